"""Samples one conversation at a time with the model's own cache.

For models with layers other than full attention (sliding windows, state spaces, ...). It works with
all models and is much slower than `batch`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import DynamicCache

from ajet_sdk.engines.local.forward import cache_name, distance, tolerance
from ajet_sdk.engines.local.logits import process
from ajet_sdk.engines.local.requests import Continuation, TokenDraw, draw, most_likely, uniform
from ajet_sdk.engines.local.vision import Pictures, Vision

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Conversation:
    """A cache and its token ids."""

    cache: object
    ids: list[int] = field(default_factory=list)


class SingleConversation:
    """`RunningBatch` for one conversation at a time; the cache of a session is kept for its next
    turn."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_ids: Iterable[int],
        keep: int,
        vision: Vision | None = None,
    ) -> None:
        self.model, self._eos, self._keep = model, frozenset(eos_ids), keep
        self._vision = vision
        self._device: torch.device = next(model.parameters()).device
        self._cached = self._cache_works()
        self.clear()

    def suspend(self) -> list[Continuation]:
        suspended = self.continuations()
        self.clear()
        return suspended

    def clear(self) -> None:
        self._running: dict[int, tuple[Continuation, _Conversation]] = {}
        self._resting: OrderedDict[str, _Conversation] = OrderedDict()

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def resting(self) -> int:
        return len(self._resting)

    def admit(self, continuations: Sequence[Continuation]) -> list[Continuation]:
        for continuation in continuations:
            prompt = continuation.ids.tolist()
            conversation = self._resting.pop(continuation.request.session, None)
            if (
                conversation is None
                or not len(conversation.ids) < len(prompt)
                or prompt[: len(conversation.ids)] != conversation.ids
            ):
                conversation = _Conversation(DynamicCache(config=self.model.config))
            self._running[id(continuation)] = (continuation, conversation)
        return []

    def step(self) -> list[Continuation]:
        return [
            running
            for running, conversation in [*self._running.values()]
            if self._advance(running, conversation)
        ]

    def _logits(
        self, conversation: _Conversation, known: list[int], pictures: Pictures | None = None
    ) -> torch.Tensor:
        """The logits after the last id, [1, V]."""
        begin = len(conversation.ids) if self._cached else 0
        arguments = self._arguments(known, begin, pictures or {})
        if self._cached:
            arguments[cache_name(self.model)] = conversation.cache
        logits: torch.Tensor = self.model(use_cache=self._cached, **arguments).logits
        conversation.ids = known
        return logits[:, -1]

    def _arguments(self, known: list[int], begin: int, pictures: Pictures) -> dict[str, Any]:
        """The model's arguments for the ids from `begin` on."""
        keyed = np.array(known)
        if self._vision is None:
            return {"input_ids": torch.from_numpy(keyed[None, begin:]).to(self._device)}
        return dict(self._vision.inputs(keyed, pictures, self._device, begin))

    def _cache_works(self) -> bool:
        """Whether the model's cache works; if not, every token costs a full pass."""
        ids = [(i * 7919 + 13) % self.model.config.get_text_config().vocab_size for i in range(5)]
        self._cached = True
        self.model.eval()
        with torch.inference_mode():
            expected = self.model(
                input_ids=torch.tensor([ids], device=self._device), use_cache=False
            ).logits[:, -1]
            try:
                conversation = _Conversation(DynamicCache(config=self.model.config))
                self._logits(conversation, ids[:3])
                gap = distance(self._logits(conversation, ids), expected)
            except Exception as error:  # noqa: BLE001  (a model may refuse such a cache in any way)
                _log.warning(
                    "%s does not support DynamicCache: %s", type(self.model).__name__, error
                )
                return False
        return gap <= tolerance(self.model)

    def _advance(self, continuation: Continuation, conversation: _Conversation) -> bool:
        logits = self._logits(
            conversation,
            continuation.ids.tolist(),
            continuation.request.pictures,
        )
        sampling = continuation.request.sampling
        how = TokenDraw(
            np.array([sampling.temperature], np.float32),
            np.array([sampling.top_k]),
            np.array([sampling.top_p], np.float32),
            np.array([sampling.min_p], np.float32),
            self._device,
        )
        noise = uniform(
            np.array([continuation.seed], np.uint64), np.array([len(continuation.output)])
        )
        if continuation.processors:
            output = continuation.output
            logits = process(logits.float(), continuation.processors, output, [len(output)])
        token, logprob = draw(logits, how, torch.from_numpy(noise).to(self._device))
        if sampling.top_logprobs:
            [best], [values] = most_likely(logits, how, sampling.top_logprobs)
            continuation.keep_top(best.tolist(), values.tolist())
        continuation.output.append(int(token))
        continuation.logprobs.append(float(logprob))
        watch = continuation.stop
        last = continuation.output[-1]
        stopped = last in self._eos and not (watch is not None and watch.ignore_eos)
        stopped = stopped or (watch is not None and watch.feed(last))
        done = stopped or len(continuation.output) >= continuation.request.max_new
        if done:
            continuation.reason = "stop" if stopped else "length"
            del self._running[id(continuation)]
            self._resting[continuation.request.session] = conversation
            self._resting.move_to_end(continuation.request.session)
            while len(self._resting) > self._keep:
                self._resting.popitem(last=False)
        return done

    def cancel(self, continuations: Iterable[Continuation]) -> None:
        for continuation in continuations:
            self._running.pop(id(continuation), None)

    def forget(self, session: str) -> None:
        self._resting.pop(session, None)

    def continuations(self) -> list[Continuation]:
        return [continuation for continuation, _ in self._running.values()]
