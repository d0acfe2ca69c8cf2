"""The active episode: which one a call belongs to, whose agent asked, and who records it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, Protocol
from urllib.parse import parse_qsl, quote, unquote

from ajet_sdk.errors import AjetError, MissingResource, UncapturedTraffic
from ajet_sdk.types import Event, Phase

Verdict = Literal["policy", "other", "ambiguous"]

log = logging.getLogger("ajet")


@dataclass(frozen=True, slots=True)
class ObservedExchange:
    """One LLM request that passed through to its own endpoint, and what came back. It holds no header and no key."""

    route: str
    model: str
    agent: str
    target_tag: str | None
    phase: Phase
    request: dict[str, object]
    response: dict[str, object]
    started_at: float
    """Unix seconds."""
    ended_at: float
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """A failure that ends an episode, as reported by another process of the agent."""

    kind: Literal["UncapturedTraffic", "MissingResource"]
    message: str

    def error(self) -> AjetError:
        return UncapturedTraffic(self.message) if self.kind == "UncapturedTraffic" else MissingResource(self.message)


class Recorder(Protocol):
    """The interface of an episode that the hooks use."""

    def answers(self, model: str) -> Verdict:
        """Whether the policy answers a captured request for `model`; "ambiguous": the gateway answers with an error."""

    def observed(self, exchange: ObservedExchange) -> None:
        """Record a request that passed through."""

    def happened(self, event: Event) -> None:
        """Record what the agent did beside its LLM calls."""

    def takes_handle(self, agent: str) -> None:
        """The workflow has a handle for an agent."""

    def fail(self, error: AjetError) -> None:
        """Keep an error that is the episode's."""


@dataclass(frozen=True, slots=True)
class HostGuard:
    """How an episode handles LLM traffic that no hook sees. Can be pickled."""

    action: Literal["error", "warn"] = "error"
    hosts: tuple[str, ...] = ()
    """Hosts to watch besides those known."""
    allowed: tuple[str, ...] = ()
    """URLs that the agent may ask, each with all below it."""


@dataclass(frozen=True, slots=True, eq=False)
class ActiveEpisode:
    """The episode that a request of this context belongs to."""

    episode_id: str
    recorder: Recorder
    gateway_url: str = ""
    """http://127.0.0.1:PORT, empty where the episode is only observed."""
    api_key: str = ""
    """The key of captured requests; handles have one of their own."""
    phase: Phase = "rollout"
    reroutes: bool = False
    """Captured requests may go to the gateway: the workflow runs, and has no `Model` handle."""
    guard: HostGuard | None = None
    """What to do about LLM traffic that no hook sees; None: nothing."""
    in_client: bool = False
    """A hooked client is sending a request that was decided on: what it calls beneath is not looked at again."""
    pid: int = field(default_factory=os.getpid)
    process_groups: set[int] = field(default_factory=set)
    """Of the programs that `ajet.run_program` runs in it now."""

    @property
    def base_url(self) -> str:
        """Where the policy answers captured requests."""
        return f"{self.gateway_url}/episodes/{self.episode_id}/default/v1"

    def refuse(self, action: str, place: str) -> None:
        """What the guard watches for happened. Raises UncapturedTraffic, the episode's fault, unless it only warns."""
        if self.guard is None:
            return
        message = (
            f"the agent {action}: the policy did not answer that call, it is not in the trace, and the provider may "
            "charge for it. Use chat completions, completions, Responses, Anthropic's Messages or Gemini's "
            "generateContent with a client that ajet captures, or take a parameter `model` and give `model.base_url` "
            f"and `model.api_key` to your client. If the call is intended, add {place} to rollout.allowed_urls; "
            "rollout.on_uncaptured: warn lets all such calls pass"
        )
        if self.guard.action == "warn":
            log.warning("%s", message)
            return
        error = UncapturedTraffic(message)
        self.recorder.fail(error)
        raise error


class Observed(Protocol):
    """An observed call of a decorated function; set `output` before the block ends."""

    output: object


class Observer(Protocol):
    """Records a deployed agent."""

    def episode(self, name: str, arguments: Mapping[str, object]) -> AbstractContextManager[Observed]:
        """Make the block one episode. An exception is recorded as the episode's failure and passes on."""


current_episode: ContextVar[ActiveEpisode | None] = ContextVar("ajet_current_episode", default=None)
"""The episode that an outgoing request belongs to: `OpenEpisode.active` while a workflow runs, then its judge's."""


class _ProcessWide:
    """A variable with one value for all tasks and threads."""

    def __init__(self) -> None:
        self._value: Observer | None = None

    def get(self) -> Observer | None:
        return self._value

    def set(self, value: Observer | None) -> None:
        self._value = value


observer = _ProcessWide()
"""Set while `ajet.trace` is on: a decorated function called outside of an episode makes itself an observed one. It is
the whole process's, for a server's requests come in tasks and threads that do not descend from where it was begun."""


@dataclass(frozen=True, slots=True)
class AgentIdentity:
    """Who asks: one path segment of a handle's base URL, so that it needs no state and survives processes."""

    agent: str = "default"
    target_tag: str | None = None
    trainable: bool = True
    debug_model: str | None = None

    def segment(self) -> str:
        """`villager;target=wolf;trainable=0;debug=gpt-4o`, percent-encoded, absent parts left out."""
        parts = [quote(self.agent, safe="")]
        if self.target_tag is not None:
            parts.append("target=" + quote(self.target_tag, safe=""))
        if not self.trainable:
            parts.append("trainable=0")
        if self.debug_model is not None:
            parts.append("debug=" + quote(self.debug_model, safe=""))
        return ";".join(parts)

    @staticmethod
    @lru_cache(maxsize=1024)
    def parse(segment: str) -> AgentIdentity:
        """The inverse of `segment`, on the raw (still encoded) text."""
        agent, _, parameters = segment.partition(";")
        named = dict(parse_qsl(parameters, separator=";", keep_blank_values=True)) if parameters else {}
        return AgentIdentity(
            agent=unquote(agent),
            target_tag=named.get("target"),
            trainable=named.get("trainable") != "0",
            debug_model=named.get("debug"),
        )
