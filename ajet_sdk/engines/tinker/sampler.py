"""`TinkerSampler`: samples with weights at a training service; and an engine over it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from ajet_sdk.engines.chat import TokenEngine
from ajet_sdk.engines.local.requests import StopWatch
from ajet_sdk.engines.picture_text import picture_spans
from ajet_sdk.engines.tinker.sdk import SdkWeights, Session
from ajet_sdk.engines.tinker.service import Continued, Costs
from ajet_sdk.errors import ContextOverflow, EngineUnavailable, RequestRefused, TrainingError
from ajet_sdk.pictures import PlacedPicture
from ajet_sdk.protocols import Sampled, Sampling, Tokenizer
from ajet_sdk.tokens.huggingface import HFTokenizer

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config


class TinkerSampler:
    """Implements `protocols.Sampler` over weights at a service.

    A trainer sets `policy_version` inside `exclusive()`; at its end, `publish` returns the weights
    of that version. Calls in flight keep their weights and version.
    """

    def __init__(
        self,
        weights: SdkWeights,
        tokenizer: Tokenizer,
        costs: Costs,
        *,
        model_name: str,
        max_model_len: int,
        publish: Callable[[], SdkWeights] | None = None,
        policy_version: int | None = None,
        close: Callable[[], None] | None = None,
    ) -> None:
        self.model = model_name
        self.max_model_len = max_model_len
        self.policy_version = policy_version if publish is None else 0
        self._current: tuple[SdkWeights, int | None] = (weights, self.policy_version)
        self._tokenizer = tokenizer
        self._costs = costs
        self.takes_pictures = tokenizer.pictures is not None
        self._never_sampled = frozenset(
            tokenizer.pictures.never_sampled if tokenizer.pictures else ()
        )
        self._publish = publish
        self._close = close
        self._vocabulary = len(tokenizer.hf) if isinstance(tokenizer, HFTokenizer) else None

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """The weights may change within the block; calls after it use the new ones."""
        yield
        if self._publish is not None and self._current[1] != self.policy_version:
            self._current = (await asyncio.to_thread(self._publish), self.policy_version)

    async def sample(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        session: str,
        pictures: Sequence[PlacedPicture] = (),
    ) -> list[Sampled]:
        """`sampling.n` continuations. Raises ContextOverflow, RequestRefused, EngineUnavailable."""
        room = self.max_model_len - len(prompt_ids)
        if not len(prompt_ids) or room < 1:
            raise ContextOverflow(
                f"the prompt has {len(prompt_ids)} tokens, and {self.model} takes"
                f" {self.max_model_len} with the reply; shorten the conversation or raise"
                " rollout.max_model_len"
            )
        _refuse(sampling)
        ids = [
            *([] if sampling.ignore_eos else sorted(self._tokenizer.eos_ids)),
            *sampling.stop_token_ids,
        ]
        # The API takes either ids or strings; with strings, ends of turn are given as text.
        stop = (
            [*sampling.stop, *(self._tokenizer.decode([token]) for token in ids)]
            if sampling.stop
            else ids
        )
        weights, version = self._current
        replies = await weights.sample(
            prompt_ids,
            sampling.n,
            max_tokens=min(room, sampling.max_tokens or room),
            temperature=max(0.0, sampling.temperature),
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            stop=stop,
            vocabulary=self._vocabulary,
            pictures=picture_spans(prompt_ids, pictures, self._tokenizer) if pictures else (),
        )
        self._costs.sampled(
            len(prompt_ids), [len(reply.output_ids) for reply in replies], replies[0].cached
        )
        return [self._cut(reply, sampling, frozenset(ids), version) for reply in replies]

    def _cut(
        self, reply: Continued, sampling: Sampling, ends: frozenset[int], version: int | None
    ) -> Sampled:
        """Cut the reply at its first stop, whether or not the service ended it there.

        Raises EngineUnavailable for an image token, which would be a picture that is not there.
        """
        if not self._never_sampled.isdisjoint(map(int, reply.output_ids)):
            raise EngineUnavailable(
                f"the service of {self.model} sampled an image token, which the API cannot forbid;"
                " the reply is not used"
            )
        watch = StopWatch(sampling.stop, self._tokenizer.token_bytes)
        for count, token in enumerate(map(int, reply.output_ids), 1):
            if token in ends or watch.feed(token):
                ids = list(reply.output_ids[:count])
                logprobs = list(reply.logprobs[:count])
                return Sampled(ids, logprobs, "stop", version, watch.text)
        if reply.stopped and sampling.stop:
            text = self._tokenizer.decode(reply.output_ids)
        else:
            text = None
        return Sampled(
            reply.output_ids, reply.logprobs, "stop" if reply.stopped else "length", version, text
        )

    def forget(self, session: str) -> None:
        """Does nothing: the service manages its prefix cache."""

    async def aclose(self) -> None:
        if self._close is not None:
            await asyncio.to_thread(self._close)


def _refuse(sampling: Sampling) -> None:
    """Raise RequestRefused for parameters that the Tinker API does not have."""
    plain = Sampling()
    for name in ("min_p", "grammar", "top_logprobs"):
        if getattr(sampling, name) != getattr(plain, name):
            if name == "grammar":
                feature = "A structured output or a forced tool call"
            else:
                feature = name
            raise RequestRefused(
                f"{feature} is not supported by a service of the Tinker API; leave it out", name
            )


def tinker_engine(config: Config) -> TokenEngine:
    """An engine over weights at a service (`model.path: tinker://…`), for sampling only."""
    path = str(config.model.path)
    session = Session(config)
    try:
        base = session.base_of(path)
    except TrainingError:
        if config.model.name is None:
            raise
        base = config.model.name  # the service does not tell; the name is that of the base model
    tokenizer = HFTokenizer(str(config.resolve(base)) if config.resolve(base).exists() else base)
    sampler = TinkerSampler(
        session.weights(path),
        tokenizer,
        Costs(config.tinker.prices),
        model_name=config.model.name or base,
        max_model_len=min(
            config.rollout.max_model_len, session.served(base)[1] or config.rollout.max_model_len
        ),
        close=session.close,
    )
    return TokenEngine(
        sampler, tokenizer, tool_call_parser=config.model.tool_call_parser, rescored=False
    )
