"""An open episode: what answers it, which calls are the policy's, and what has been recorded of them so far."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import secrets
from array import array
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any, Protocol

from ajet_sdk.agent.context import ActiveEpisode, AgentIdentity, HostGuard, ObservedExchange, Verdict, current_episode
from ajet_sdk.agent.model import Model
from ajet_sdk.engines.passed_replies import fault_in
from ajet_sdk.errors import AjetError, ContextOverflow, EngineUnavailable, ModelAmbiguous
from ajet_sdk.gateway.open_calls import OpenCalls
from ajet_sdk.protocols import Answer, Client, Engine, Sampling
from ajet_sdk.types import Call, Event, Json, Phase, new_id

CANCELLING = 2.0
"""Seconds that engines get to let go of cancelled calls."""


@dataclass(frozen=True, slots=True)
class SamplingOverride:
    """A run's own sampling for trainable calls; None leaves the request's (or the default) as it is."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    greedy: bool = False
    """Temperature 0, whatever else is said."""


def override(sampling: Sampling, overrides: SamplingOverride | None, *, max_tokens: int | None) -> Sampling:
    """`sampling` with a run's own parameters in place of the agent's, and the reply's length limited."""
    changed = dict[str, Any]()
    if overrides is not None:
        for name in ("temperature", "top_p", "top_k"):
            value = getattr(overrides, name)
            if value is not None:
                changed[name] = value
        if overrides.greedy:
            changed["temperature"] = 0.0
    if max_tokens is not None and (sampling.max_tokens is None or max_tokens < sampling.max_tokens):
        changed["max_tokens"] = max_tokens
    return replace(sampling, **changed) if changed else sampling


def mix_seed(requested: int | None, attempt: int | None, agent: str, ordinal: int, content: str = "") -> int | None:
    """A seed for one call, the same in every process: attempts differ, repeated runs do not. None if neither is given.

    `ordinal` counts the agent's requests in the episode, those of the same `content` where that is given. The result
    fits 63 bits.
    """
    if requested is None and attempt is None:
        return None
    text = json.dumps([requested, attempt, agent, ordinal, *([content] if content else [])])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class EpisodeSpec:
    """Which engine answers an episode's calls, and how."""

    episode_id: str
    engine: Engine
    sampling: SamplingOverride | None = None
    """For trainable calls, in place of what the agent asks for; None leaves the agent's own."""
    policy_models: frozenset[str] = frozenset()
    """Captured requests that name one of these are the policy's; empty: the one model that the episode names."""
    uses_handle: bool = False
    """The function takes a `Model`: only what goes through it is the policy's."""
    trainable_targets: tuple[str, ...] | None = None
    """Target tags (or, without a tag, agents) to train; None: all."""
    seed: int | None = None
    """The attempt's, mixed into every call's."""
    seed_by_content: bool = False
    """A call's seed depends on what it asks and not on its place among the agent's calls, which parallel calls take in
    any order."""
    max_tokens: int | None = None
    """Of one reply of the policy to the workflow, trained or not."""
    debug_models: Mapping[str, Engine] = field(default_factory=dict)
    """By agent, target tag or name of a debug model: what answers in its place."""
    opponent: Engine | None = None
    """What answers every other call outside of the targets."""
    open_debug_model: Callable[[str], Engine] | None = None
    """Opens a debug model that the agent's code names, where the two above say nothing. It may raise ConfigError."""
    call_timeout: float = 600.0
    """Seconds for one reply; past it the call fails with 504."""
    stop_after: Callable[[Call], str | None] | None = None
    """Why no call of the workflow is answered after this one; None: the episode goes on."""
    guard: HostGuard | None = None
    """What to do about LLM traffic that no hook sees; None: nothing."""
    keep_calls: bool = True
    """Keep finished calls in memory; False where an episode has no end and the trace has them."""

    def frozen(self, who: AgentIdentity) -> Engine | None:
        """The model that the run names for an agent outside of the targets."""
        names = [name for name in (who.agent, who.target_tag, who.debug_model) if name is not None]
        return next((self.debug_models[name] for name in names if name in self.debug_models), self.opponent)


class InFlight(Protocol):
    """A call that is not over (`ajet_sdk/gateway/answer.py`)."""

    phase: Phase
    client: Client
    work: asyncio.Future[Answer] | None
    """The engine's."""

    def confirm(self, read: bool) -> None:
        """The client has read the reply to its end, or will not."""

    def cancel(self) -> None:
        """The episode is over."""

    def close(self) -> None:
        """Record it if nobody has, and wait no longer for the engine."""


class OpenEpisode:
    """One episode of a gateway, from `Gateway.open` to `finish`. Its public methods may be called from any thread."""

    def __init__(
        self,
        spec: EpisodeSpec,
        url: str,
        put: Callable[[Call], None] | None,
        run: Callable[[Coroutine[object, object, None]], Future[None]],
        end_keys: Callable[[OpenEpisode, bool], None],
        door: object = None,
        amend: Callable[[str, str, str], None] | None = None,
    ) -> None:
        self.spec = spec
        self.episode_id = spec.episode_id
        self.url, self.door = url, door
        """`door`: the `ProcessDoor` of the gateway."""
        self.handle_key, key, self.judge_key = (f"ajet-{secrets.token_urlsafe(24)}" for _ in range(3))
        self.captured_key = key
        self.agents: set[str] = set()
        """Names that the workflow took handles for."""
        self.errors: list[AjetError] = []
        self.events: list[Event] = []
        self.context_overflow = False
        self.stopped: str | None = None
        self.in_flight: set[InFlight] = set()
        self.unconfirmed: set[InFlight] = set()
        """Calls whose last chunk was sent, while it is not known that the client has read it."""
        self._put = put
        self._amend = amend
        self._run = run
        self._end_keys = end_keys
        self.kept = OpenCalls(keep=spec.keep_calls)
        self.stored: dict[str, Json] = {}
        """What dialects keep of responses, by their ids."""
        self.indices = itertools.count()
        """Of calls."""
        self.ordinals = defaultdict[tuple[str, str], Iterator[int]](itertools.count)
        """Of an agent's calls, of one content where seeds depend on it."""
        self._model: dict[str, str] = {}
        self.asked: dict[int, Engine] = {id(spec.engine): spec.engine}
        """What answered."""
        self._judging = self._finished = False
        self.active = ActiveEpisode(spec.episode_id, self, url, key, "rollout", not spec.uses_handle, spec.guard)

    @property
    def calls(self) -> tuple[Call, ...]:
        """The recorded calls, in order of completion."""
        return self.kept.all()

    def model(
        self,
        agent: str = "default",
        target_tag: str | None = None,
        trainable: bool = True,
        debug_model: str | None = None,
    ) -> Model:
        """A handle on the policy. Taken while judging, it is the judge's: answered, and never trained."""
        key = self.judge_key if self._judging else self.handle_key
        segment = AgentIdentity(agent, target_tag, trainable, debug_model).segment()
        base_url = f"{self.url}/episodes/{self.episode_id}/{segment}/v1"
        return Model(base_url, key, self.spec.engine.model, timeout=self.spec.call_timeout)

    @property
    def judged(self) -> bool:
        """Whether the workflow is over."""
        return self._judging

    # What the hooks ask (`context.Recorder`)

    def answers(self, model: str) -> Verdict:
        """Whether the policy answers a captured request for `model`; a second name of a model is ambiguous."""
        if self.spec.uses_handle:
            return "other"
        if self.spec.policy_models:
            return "policy" if model in self.spec.policy_models else "other"
        return "policy" if self._model.setdefault("only", model) == model else "ambiguous"

    def ambiguous(self, model: str) -> ModelAmbiguous:
        """The error of a second name of a model."""
        return ModelAmbiguous(
            f"the episode uses two models, {self._model['only']!r} and {model!r}, and it is unclear which is the "
            "policy; name it in rollout.policy_models, or take a parameter `model` and use it"
        )

    def observed(self, exchange: ObservedExchange) -> None:
        """Record a request that passed through to its own endpoint; nothing once the episode is finished."""
        if not self._finished:
            call = observed_call(self.episode_id, next(self.indices), exchange)
            if call.error is not None and _is_fault(call.error):
                self.fail(EngineUnavailable(f"the model {call.model!r}, which the agent asked itself: {call.error}"))
            self.add(call)

    def happened(self, event: Event) -> None:
        """Record what the agent did beside its LLM calls; nothing once the episode is finished."""
        if not self._finished:
            self.events.append(event)

    def takes_handle(self, agent: str) -> None:
        """The workflow has a handle for an agent, which may get a reward without a call."""
        self.agents.add(agent)

    # What the gateway does

    def add(self, call: Call, engine_ids: array[int] | None = None) -> None:
        """Record a call, with its place among those before it; see `OpenCalls.add`."""
        call = self.kept.add(call, engine_ids)
        if self.spec.stop_after is not None and self.stopped is None:
            self.stopped = self.spec.stop_after(call)
        if self._put is not None:
            self._put(call)

    def undelivered(self, request_id: str, error: str) -> None:
        """The calls of a request were recorded as delivered and are not; nothing once the episode is finished."""
        if self._finished:
            return
        self.kept.undelivered(request_id, error)
        if self._amend is not None:
            self._amend(self.episode_id, request_id, error)

    def fail(self, error: AjetError) -> None:
        """Keep an error that is the episode's."""
        if isinstance(error, ContextOverflow):
            self.context_overflow = True
        else:
            self.errors.append(error)

    # Its end

    @asynccontextmanager
    async def judging(self) -> AsyncIterator[ActiveEpisode]:
        """The workflow has returned: cancel what it left in flight, revoke its keys, and go over to the judge's phase.

        `async with episode.judging() as active:`; `current_episode` is `active` inside.
        """
        self._judging = True
        await asyncio.wrap_future(self._run(self._close(False)))
        active = ActiveEpisode(self.episode_id, self, self.url, self.judge_key, "judge")
        token = current_episode.set(active)
        try:
            yield active
        finally:
            current_episode.reset(token)

    async def finish(self) -> tuple[Call, ...]:
        """Revoke every key (later requests: 410), cancel what is in flight (undelivered) and return the calls."""
        self._judging = True
        await asyncio.wrap_future(self._run(self._close(True)))
        self._finished = True
        return self.calls

    async def _close(self, final: bool) -> None:
        self._end_keys(self, final)
        for _ in range(3):  # who left a reply half read may have done so just now: the loop comes to know it first
            await asyncio.sleep(0)
        for sent in [call for call in list(self.unconfirmed) if final or call.phase == "rollout"]:
            sent.confirm(not sent.client.unread())
        ending = [call for call in self.in_flight if final or call.phase == "rollout"]
        for call in ending:
            call.cancel()
        working = [call.work for call in ending if call.work is not None]
        if working:
            await asyncio.wait(working, timeout=CANCELLING)
        for call in ending:
            call.close()
        if final:
            for engine in self.asked.values():
                engine.forget(self.episode_id)


def observed_call(episode_id: str, index: int, exchange: ObservedExchange) -> Call:
    """The call of a request that passed through: no ids, not trained. A reply that is none is its error."""
    choices = exchange.response.get("choices")
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    candidates = exchange.response.get("candidates")
    if isinstance(candidates, list) and candidates and isinstance(candidates[0], dict):
        first = {"finish_reason": candidates[0].get("finishReason")}
    finish = first.get("finish_reason") or exchange.response.get("stop_reason") or exchange.response.get("status")
    return Call(
        episode_id=episode_id,
        index=index,
        agent=exchange.agent,
        target_tag=exchange.target_tag,
        trainable=False,
        model=exchange.model,
        request=exchange.request,
        response=exchange.response,
        finish_reason=finish if isinstance(finish, str) else None,
        started_at=datetime.fromtimestamp(exchange.started_at, timezone.utc),
        ended_at=datetime.fromtimestamp(max(exchange.ended_at, exchange.started_at), timezone.utc),
        error=exchange.error or fault_in(exchange.route, exchange.request, exchange.response, repr(exchange.model)),
        request_id=new_id(),
        phase=exchange.phase,
    )


def _is_fault(error: str) -> bool:
    """Whether a call failed for another reason than what the agent asked, or that it left before the end."""
    status = error.removeprefix("HTTP ")
    if status.isdecimal():
        return int(status) not in (400, 413, 422)  # those are of what was asked
    return not error.startswith("undelivered")
