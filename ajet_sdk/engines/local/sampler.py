"""`LocalSampler`: a worker thread that samples with a model in this process; and a copy of a model
under training.

Requests come from any event loop. The worker drains its queue into the running batch before every
token, so a new request waits for one token of the others, not for the end of a reply.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ajet_sdk.engines.chat import room_for_reply
from ajet_sdk.engines.local.batch import RunningBatch
from ajet_sdk.engines.local.forward import UnsupportedModel, check_rope, vocabulary
from ajet_sdk.engines.local.logits import processors
from ajet_sdk.engines.local.requests import Continuation, SamplingRequest, StopWatch, mix
from ajet_sdk.engines.local.single import SingleConversation
from ajet_sdk.engines.local.vision import check_vision, vision_of
from ajet_sdk.engines.local.weights import frozen_copy
from ajet_sdk.engines.loop_calls import LoopCalls
from ajet_sdk.errors import EngineUnavailable, RequestRefused
from ajet_sdk.pictures import PlacedPicture, keyed
from ajet_sdk.protocols import Sampled, Sampling, SamplingCancelled, Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)


class LocalSampler:
    """Implements `protocols.Sampler` over a transformers model in this process.

    A trainer changes the weights, and `policy_version`, inside `exclusive()`. Running calls go on
    behind it with the new weights, and say from which token on. With `apart` the weights are a
    copy, so that a trainer may use and change the model at any time; the copy is updated when
    `exclusive()` ends.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        *,
        model_name: str,
        max_model_len: int,
        max_batch: int = 256,
        seed: int = 0,
        deterministic: bool = False,
        kv_bytes: int | None = None,
        policy_version: int | None = 0,
        apart: bool = False,
    ) -> None:
        self.model = model_name
        self.max_model_len = max_model_len
        self.policy_version = policy_version
        self._copy = SamplingCopy(model) if apart else None
        self.module = model if self._copy is None else self._copy.module
        check_rope(self.module.config, max_model_len)
        self._tokenizer = tokenizer
        self._seed = seed
        self._max_batch, self._threads = 1 if deterministic else max_batch, torch.get_num_threads()
        self._vocabulary = vocabulary(self.module)
        self._vision = vision_of(self.module, tokenizer)
        self.takes_pictures = self._vision is not None
        if self._vision is not None:
            check_vision(self.module, self._vision)
        self._batch = self._make_batch(kv_bytes, deterministic)
        self._ordinal = count()
        self._condition = threading.Condition()
        self._arrived: deque[SamplingRequest] = deque()
        self._orders: deque[Callable[[], None]] = deque()
        self._waiting: deque[Continuation] = deque()
        self._joining: list[Continuation] = []
        self._gates: deque[_Gate] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="ajet-sampler", daemon=True)
        self._thread.start()

    def _make_batch(
        self, kv_bytes: int | None, deterministic: bool
    ) -> RunningBatch | SingleConversation:
        eos = self._tokenizer.eos_ids
        device = next(self.module.parameters()).device
        try:
            return RunningBatch(
                self.module,
                eos_ids=eos,
                vocabulary=self._vocabulary,
                max_batch=self._max_batch,
                kv_bytes=kv_budget(device) if kv_bytes is None else kv_bytes,
                deterministic=deterministic,
                vision=self._vision,
            )
        except UnsupportedModel as reason:
            _log.warning("%s Sampling one conversation at a time, which is slow.", reason)
            return SingleConversation(
                self.module,
                eos_ids=eos,
                keep=0 if deterministic else self._max_batch,
                vision=self._vision,
            )

    # The asyncio side

    async def sample(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        session: str,
        pictures: Sequence[PlacedPicture] = (),
    ) -> list[Sampled]:
        """Sample `sampling.n` continuations. Raises ContextOverflow, RequestRefused,
        EngineUnavailable.

        If cancelled, it ends after the current token with SamplingCancelled.
        """
        request = self._request(prompt_ids, sampling, session, pictures)
        with self._condition:
            if self._closed:
                raise EngineUnavailable(f"the sampler of {self.model} is closed")
            self._arrived.append(request)
            self._condition.notify()
        try:
            return await asyncio.shield(request.future)
        except asyncio.CancelledError:
            self._order(lambda: self._cancel(request))
            with suppress(EngineUnavailable):
                await request.future
            raise SamplingCancelled(
                sum(len(each.output) for each in request.continuations)
            ) from None

    def _request(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        session: str,
        pictures: Sequence[PlacedPicture],
    ) -> SamplingRequest:
        prompt = np.asarray(prompt_ids, dtype=np.int32)
        max_new = room_for_reply(prompt_ids, sampling, self.model, self.max_model_len)
        if prompt.view(np.uint32).max() >= self._vocabulary:  # negative ids are large as unsigned
            raise RequestRefused(
                f"token ids of the prompt must be less than the model's {self._vocabulary}",
                "prompt",
            )
        if any(not 0 <= token < self._vocabulary for token, _ in sampling.logit_bias):
            raise RequestRefused(
                f"token ids in logit_bias must be less than the model's {self._vocabulary}",
                "logit_bias",
            )
        if sampling.seed is None:
            seed = mix(self._seed, next(self._ordinal))
        else:
            seed = sampling.seed
        loop = asyncio.get_running_loop()
        request = SamplingRequest(
            keyed(prompt, pictures), sampling, session, seed, max_new, loop, loop.create_future()
        )
        request.pictures = {placed.picture.key: placed.picture for placed in pictures}
        for i in range(sampling.n):
            watched = sampling.stop or sampling.stop_token_ids or sampling.ignore_eos
            if watched:
                stop = StopWatch(
                    sampling.stop,
                    self._tokenizer.token_bytes,
                    sampling.stop_token_ids,
                    sampling.min_tokens,
                    sampling.ignore_eos,
                )
            else:
                stop = None
            if sampling.processed:
                changes = processors(sampling, prompt_ids, self._tokenizer)
            else:
                changes = ()
            request.continuations.append(Continuation(request, mix(seed, i), stop, changes))
        request.unfinished = sampling.n
        return request

    def forget(self, session: str) -> None:
        self._order(lambda: self._batch.forget(session))

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Use the model exclusively: running calls are suspended after their current token, new
        ones wait, and the KV cache is dropped: what goes on is computed with the weights that it
        then finds."""
        gate = _Gate()
        with self._condition:
            if self._closed:
                raise EngineUnavailable(f"the sampler of {self.model} is closed")
            self._gates.append(gate)
            self._condition.notify()
        try:
            await gate.entered
            yield
            if self._copy is not None:
                await asyncio.to_thread(self._copy.catch_up)
        finally:
            gate.released = True
            self._order(lambda: None)

    async def aclose(self) -> None:
        """Stop; running and waiting calls fail with EngineUnavailable."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        await asyncio.to_thread(self._thread.join)

    def _order(self, order: Callable[[], None]) -> None:
        with self._condition:
            self._orders.append(order)
            self._condition.notify()

    # In the worker's thread

    def _work(self) -> None:
        torch.set_num_threads(self._threads)  # a setting of each thread
        with torch.inference_mode():
            while self._next():
                try:
                    self._advance()
                except Exception as error:  # noqa: BLE001  (raised to every affected caller)
                    _log.exception(
                        "Sampling failed; running calls get the error, and all cached keys and"
                        " values are dropped."
                    )
                    self._fail([*self._batch.continuations(), *self._joining], error)
                    self._batch.clear()
        self._fail(
            [*self._batch.continuations(), *self._waiting],
            EngineUnavailable(f"the sampler of {self.model} was closed"),
        )

    def _next(self) -> bool:
        """Wait for requests and accept them; False once closed."""
        with self._condition:
            while not (self._arrived or self._orders or self._closed or self._startable()):
                self._condition.wait()
            while self._arrived:
                self._waiting.extend(self._arrived.popleft().continuations)
            orders = list(self._orders)
            self._orders.clear()
        for order in orders:
            order()
        return not self._closed

    def _startable(self) -> bool:
        if self._gates:
            gate = self._gates[0]
            return not gate.open or gate.released
        return bool(self._batch.running or self._waiting)

    def _advance(self) -> None:
        if self._gates and not self._pass_gate():
            return
        room = self._max_batch - self._batch.running
        continuations: list[Continuation] = []
        while self._waiting and len(continuations) < room:
            continuations.append(self._waiting.popleft())
        if continuations:
            self._admit(continuations)
        self._deliver(self._batch.step())

    def _admit(self, continuations: list[Continuation]) -> None:
        if self.module.training:
            self.module.eval()
        for continuation in continuations:
            continuation.go_on(self.policy_version)
        self._joining = continuations
        self._deliver(self._batch.admit(continuations))
        self._joining = []

    def _pass_gate(self) -> bool:
        """Let the first exclusive user in or out; False while it uses the model."""
        gate = self._gates[0]
        if gate.released:
            self._gates.popleft()
            if gate.open:
                self._batch.clear()
            return not self._gates
        if not gate.open:
            self._waiting.extendleft(reversed(self._batch.suspend()))
            gate.open = True
            _call(gate.loop, _settle, gate.entered, None)
        return False

    def _deliver(self, done: Sequence[Continuation]) -> None:
        ready: dict[asyncio.AbstractEventLoop, list[SamplingRequest]] = {}
        for continuation in done:
            request = continuation.request
            request.unfinished -= 1
            if not request.unfinished:
                ready.setdefault(request.loop, []).append(request)
        for loop, requests in ready.items():
            _call(loop, _resolve, requests)

    def _cancel(self, request: SamplingRequest) -> None:
        self._batch.cancel(request.continuations)
        self._waiting = deque(
            continuation for continuation in self._waiting if continuation.request is not request
        )
        _call(request.loop, _resolve, [request])

    def _fail(self, continuations: Iterable[Continuation], error: Exception) -> None:
        if not isinstance(error, EngineUnavailable):
            cause = error
            error = EngineUnavailable(
                f"{self.model} could not sample: {type(cause).__name__}: {cause}"
            )
            error.__cause__ = cause
        failed = {id(continuation.request): continuation.request for continuation in continuations}
        self._waiting = deque(
            continuation for continuation in self._waiting if id(continuation.request) not in failed
        )
        self._joining = []
        for request in failed.values():
            request.unfinished = 0
            _call(request.loop, _settle, request.future, error)


class _Gate:
    """A use of `exclusive`."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.entered: asyncio.Future[None] = self.loop.create_future()
        self.open = self.released = False


def _resolve(requests: Sequence[SamplingRequest]) -> None:
    for request in requests:
        _settle(request.future, [continuation.sampled() for continuation in request.continuations])


def _settle(future: asyncio.Future[Any], value: object) -> None:
    """Set the result or error of a future, unless it was cancelled."""
    if future.done():
        return
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)


def _call(
    loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object
) -> None:
    try:
        LoopCalls.for_loop(loop).call(function, *arguments)
    except RuntimeError:
        _log.debug("An event loop was closed while one of its calls was being sampled.")


KV_SHARE = 0.3
"""Share of a GPU's free memory for keys and values."""
KV_ON_CPU = 1 << 30


def kv_budget(device: torch.device) -> int:
    """Bytes for keys and values: 1 GiB on a CPU, a share of the free memory on a GPU."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * KV_SHARE)
    return KV_ON_CPU


class SamplingCopy:
    """A second model that shares the frozen weights, with a copy of the trained ones that
    `catch_up` updates.

    Two threads cannot use one module at once, as both would see its training mode, hooks and
    disabled adapters. Only trained weights are in memory twice: of a LoRA model, the adapter.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.module = frozen_copy(model)
        copies = dict(self.module.named_parameters())
        self._pairs = [(copies[name], p) for name, p in model.named_parameters() if p.requires_grad]

    def catch_up(self) -> None:
        """Copy the model's current weights; neither model may be in use meanwhile."""
        with torch.no_grad():
            for copied, trained in self._pairs:
                copied.copy_(trained)
