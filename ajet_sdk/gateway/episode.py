"""An open episode: its engines, its keys, the calls that the policy answers, and the calls recorded
so far."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import secrets
from array import array
from collections import defaultdict
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
)
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any, Protocol

from ajet_sdk.agent.activity import Activity
from ajet_sdk.agent.context import (
    ActiveEpisode,
    AgentIdentity,
    HostGuard,
    ObservedExchange,
    current_episode,
    open_episodes,
)
from ajet_sdk.agent.model import Model
from ajet_sdk.engines.reply_schema import fault_in
from ajet_sdk.errors import EngineUnavailable
from ajet_sdk.gateway.open_calls import OpenCalls
from ajet_sdk.gateway.recorder import EpisodeRecorder
from ajet_sdk.protocols import Answer, Client, Engine, Sampling
from ajet_sdk.types import Call, Event, Json, Phase, new_id

CANCELLING = 2.0
"""Seconds that engines get to end cancelled calls."""


@dataclass(frozen=True, slots=True)
class SamplingOverride:
    """The sampling parameters of a run for trainable calls; None keeps the request's value or the
    default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    greedy: bool = False
    """Temperature 0, regardless of the other values."""


def override(
    sampling: Sampling, overrides: SamplingOverride | None, *, max_tokens: int | None
) -> Sampling:
    """Replace the agent's sampling parameters by the run's, and limit the length of the reply."""
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


def mix_seed(
    requested: int | None, attempt: int | None, agent: str, ordinal: int, content: str = ""
) -> int | None:
    """The seed of a call, different for each attempt and equal in repeated runs. None without any
    seed.

    `ordinal` counts the agent's requests in the episode, with `content` those of equal content. The
    result has 63 bits.
    """
    if requested is None and attempt is None:
        return None
    text = json.dumps([requested, attempt, agent, ordinal, *([content] if content else [])])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class EpisodeSpec:
    """The engine of an episode's calls and its settings."""

    episode_id: str
    engine: Engine
    sampling: SamplingOverride | None = None
    """Overrides of trainable calls; None: the agent's parameters."""
    policy_models: frozenset[str] = frozenset()
    """Model names of captured requests that the policy answers; empty: the only name that the
    episode uses."""
    uses_handle: bool = False
    """The function takes a `Model`; the policy answers only calls made through it."""
    trainable_targets: tuple[str, ...] | None = None
    """Target tags (or, without a tag, agents) to train; None: all."""
    seed: int | None = None
    """The seed of the attempt, mixed into the seed of every call."""
    seed_by_content: bool = False
    """A call's seed depends on its content instead of its position, as the order of parallel calls
    varies."""
    max_tokens: int | None = None
    """Limit of each reply of the policy to the workflow, trained or not."""
    debug_models: Mapping[str, Engine] = field(default_factory=dict)
    """Engines by agent, target tag or name of a debug model."""
    opponent: Engine | None = None
    """The engine of all other calls outside of the targets."""
    open_debug_model: Callable[[str], Engine] | None = None
    """Opens a debug model named by the agent's code, if the two above have no engine. It may raise
    ConfigError."""
    call_timeout: float = 600.0
    """Seconds for a reply; after them the call fails with 503."""
    picture_hosts: tuple[str, ...] = ()
    """Hosts from which links to pictures are loaded."""
    stop_after: Callable[[Call], str | None] | None = None
    """Returns the reason to refuse all calls of the workflow after this one; None: continue."""
    guard: HostGuard | None = None
    """The policy for LLM traffic that no hook captures; None: let it pass."""
    make_key: Callable[[str], str] | None = None
    """Returns the key for `handle`, `capture` and `judge`; None: random ones."""
    keep_calls: bool = True
    """Keep finished calls in memory; False for endless episodes, whose calls are in the trace
    only."""

    def frozen(self, who: AgentIdentity) -> Engine | None:
        """The engine of the run for an agent outside of the targets."""
        names = [name for name in (who.agent, who.target_tag, who.debug_model) if name is not None]
        return next(
            (self.debug_models[name] for name in names if name in self.debug_models), self.opponent
        )


class InFlight(Protocol):
    """A call in flight (`CallInFlight` in `ajet_sdk/gateway/answer.py`)."""

    phase: Phase
    client: Client
    work: asyncio.Future[Answer] | None

    def confirm(self, is_read: bool) -> None: ...

    def cancel(self) -> None: ...

    def close(self) -> None: ...


class OpenEpisode(EpisodeRecorder):
    """An episode of a gateway, from `Gateway.open` to `finish`. Its public methods are
    thread-safe."""

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
        super().__init__(
            spec.episode_id,
            url,
            uses_handle=spec.uses_handle,
            policy_models=spec.policy_models,
        )
        self.spec = spec
        self.door = door
        """The `ProcessDoor` of the gateway."""
        make_key = spec.make_key or _random_key
        self.handle_key = make_key("handle")
        self.captured_key = key = make_key("capture")
        self.judge_key = make_key("judge")
        self.stopped: str | None = None
        self.in_flight: set[InFlight] = set()
        self.unconfirmed: set[InFlight] = set()
        """Calls whose last chunk was sent, but maybe not read yet."""
        self._put = put
        self._amend = amend
        self._run = run
        self._end_keys = end_keys
        self.kept = OpenCalls(keep=spec.keep_calls)
        self.stored: dict[str, Json] = {}
        self.loaded: dict[str, str] = {}
        """The data URLs of links to pictures."""
        """Responses and conversations that dialects store, by id."""
        self.indices = itertools.count()
        """Indices of the calls."""
        self.ordinals = defaultdict[tuple[str, str], Iterator[int]](itertools.count)
        """Counters of calls by agent, and by content if seeds depend on it."""
        self.asked: dict[int, Engine] = {id(spec.engine): spec.engine}
        """Engines used so far."""
        self.active = ActiveEpisode(
            spec.episode_id, self, url, key, "rollout", not spec.uses_handle, spec.guard
        )
        open_episodes.add(self.active)

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
        """Return a handle of the policy. While judging, it is the judge's, whose calls are never
        trained."""
        key = self.judge_key if self.judged else self.handle_key
        identity = AgentIdentity(agent, target_tag, trainable, debug_model)
        return self.handle(key, self.spec.engine.model, identity, self.spec.call_timeout)

    # The interface of the hooks (`context.Recorder`)

    def observed(self, exchange: ObservedExchange) -> None:
        """Record a request that passed through; no effect after the end of the episode."""
        if not self._finished:
            call = observed_call(self.episode_id, next(self.indices), exchange)
            if call.error is not None and _is_fault(call.error):
                self.fail(
                    EngineUnavailable(
                        f"the agent's own request to the model {call.model!r}: {call.error}"
                    )
                )
            self.add(call)

    def happened(self, event: Event) -> None:
        """Record an event besides the LLM calls; no effect after the end of the episode."""
        if not self._finished:
            self.events.append(event)

    async def senders_left(self) -> list[Activity]:
        """See `senders_running`."""
        unanswered = sum(call.phase == "rollout" for call in list(self.in_flight))
        return await self.senders_running(unanswered)

    async def update(self, error: BaseException | None = None) -> None:
        """Does nothing: the gateway records in this process."""

    # Used by the gateway

    def add(self, call: Call, engine_ids: array[int] | None = None) -> None:
        """Record a call with its place among the earlier calls; see `OpenCalls.add`."""
        call = self.kept.add(call, engine_ids)
        if self.spec.stop_after is not None and self.stopped is None:
            self.stopped = self.spec.stop_after(call)
        if self._put is not None:
            self._put(call)

    def undelivered(self, request_id: str, error: str) -> None:
        """Correct the record of a request's calls to undelivered; no effect after the end of the
        episode."""
        if self._finished:
            return
        self.kept.undelivered(request_id, error)
        if self._amend is not None:
            self._amend(self.episode_id, request_id, error)

    # End

    @asynccontextmanager
    async def judging(self) -> AsyncIterator[ActiveEpisode]:
        """Enter the judge's phase after the workflow has returned: cancel its calls in flight and
        revoke its keys.

        `async with episode.judging() as active:`; `current_episode` is `active` inside.
        """
        self.judged = True
        await asyncio.wrap_future(self._run(self._close(False)))
        active = ActiveEpisode(self.episode_id, self, self.url, self.judge_key, "judge")
        token = current_episode.set(active)
        try:
            yield active
        finally:
            current_episode.reset(token)

    async def finish(self) -> tuple[Call, ...]:
        """Revoke all keys (later requests get 410), cancel calls in flight (undelivered) and return
        all calls."""
        self.judged = True
        await asyncio.wrap_future(self._run(self._close(True)))
        self._finished = True
        return self.calls

    async def _close(self, final: bool) -> None:
        open_episodes.discard(self.active)
        self._end_keys(self, final)
        for _ in range(3):  # lets the loop learn of clients that have just left
            await asyncio.sleep(0)
        for sent in [call for call in list(self.unconfirmed) if final or call.phase == "rollout"]:
            sent.confirm(not sent.client.has_unread())
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


def _random_key(_: str) -> str:
    return f"ajet-{secrets.token_urlsafe(24)}"


def observed_call(episode_id: str, index: int, exchange: ObservedExchange) -> Call:
    """The call of a request that passed through, without ids and not trained. An invalid reply is
    its error."""
    choices = exchange.response.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        first = choices[0]
    else:
        first = {}
    candidates = exchange.response.get("candidates")
    if isinstance(candidates, list) and candidates and isinstance(candidates[0], dict):
        first = {"finish_reason": candidates[0].get("finishReason")}
    finish = (
        first.get("finish_reason")
        or exchange.response.get("stop_reason")
        or exchange.response.get("status")
    )
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
        error=exchange.error
        or fault_in(exchange.route, exchange.request, exchange.response, repr(exchange.model)),
        request_id=new_id(),
        phase=exchange.phase,
    )


def _is_fault(error: str) -> bool:
    """Whether a call failed for a reason other than an invalid request or an early end by the
    agent."""
    status = error.removeprefix("HTTP ")
    if status.isdecimal():
        return int(status) not in (400, 413, 422)  # invalid requests
    return not error.startswith("undelivered")
