"""The active episode of a request, the identity of the agent that sends it, and the interface that
records it."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, Protocol
from urllib.parse import parse_qsl, quote, unquote

from ajet_sdk.agent.activity import Activity
from ajet_sdk.errors import AjetError, MissingResource, UncapturedTraffic
from ajet_sdk.types import Event, Phase

Verdict = Literal["policy", "other", "ambiguous"]

log = logging.getLogger("ajet")

_NOTED = 20
"""Requests that an episode notes besides its calls."""


@dataclass(frozen=True, slots=True)
class ObservedExchange:
    """An LLM request that passed through to its own endpoint, with the response, without headers
    and keys."""

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
        if self.kind == "UncapturedTraffic":
            return UncapturedTraffic(self.message)
        return MissingResource(self.message)


class Recorder(Protocol):
    """The interface of an episode that the hooks use."""

    def is_over(self, phase: Phase) -> bool:
        """Whether the function of `phase`, the workflow or the judge, has returned."""

    def called_by(self, activity: Activity) -> None:
        """Note that an activity sends an LLM request in the name of the episode."""

    def has_child(self, child: str, activity: Activity) -> None:
        """Note that the episode has started a child process, whose requests have the id `child`."""

    def is_outlived_by(self, activities: Iterable[Activity]) -> bool:
        """Whether one of these activities got replies for the episode and ran on after its
        workflow."""

    def unanswered(self, error: BaseException | None) -> None:
        """Note that the gateway did not answer a request over a socket; None: it answered one."""

    def hide(self, secrets: Collection[str]) -> None:
        """Keep the keys of a request out of everything that is stored of the episode."""

    def answers(self, model: str) -> Verdict:
        """Whether the policy answers a captured request for `model`; "ambiguous": the gateway
        answers with an error."""

    def observed(self, exchange: ObservedExchange) -> None:
        """Record a request that passed through."""

    def happened(self, event: Event) -> None:
        """Record an event besides the LLM calls, such as a tool call."""

    def takes_handle(self, agent: str) -> None:
        """Note that the workflow uses a handle for an agent."""

    def fail(self, error: AjetError) -> None:
        """Record an error that fails the episode."""


@dataclass(frozen=True, slots=True)
class HostGuard:
    """The policy of an episode for LLM traffic that no hook captures. Can be pickled."""

    action: Literal["error", "warn"] = "error"
    hosts: tuple[str, ...] = ()
    """Hosts to watch besides the known ones."""
    allowed: tuple[str, ...] = ()
    """URLs that the agent may request, each with all paths below it."""


@dataclass(frozen=True, slots=True, eq=False)
class ActiveEpisode:
    """The episode that a request of this context belongs to."""

    episode_id: str
    recorder: Recorder
    gateway_url: str = ""
    """http://127.0.0.1:PORT, empty where the episode is only observed."""
    api_key: str = ""
    """The key of captured requests; handles have their own."""
    phase: Phase = "rollout"
    reroutes: bool = False
    """Captured requests may go to the gateway: the workflow runs, and has no `Model` handle."""
    guard: HostGuard | None = None
    """The policy for LLM traffic that no hook captures; None: let it pass."""
    in_client: bool = False
    """A hooked client is sending a request; the hooks of the libraries below it let the request
    pass."""
    pid: int = field(default_factory=os.getpid)
    process_groups: set[int] = field(default_factory=set)
    """Process groups of the running `ajet.run_program` calls."""
    child: str = ""
    """The id of the child process that this copy is for."""
    others: dict[str, None] = field(default_factory=dict)
    """Requests and connections of this process that were no calls to a model, in order."""
    observed: bool = False
    """An episode of `ajet.trace`: the gateway takes reports of child processes and answers no
    calls."""

    @property
    def base_url(self) -> str:
        """The base URL at which the policy answers captured requests."""
        segment = AgentIdentity(child=self.child).segment()
        return f"{self.gateway_url}/episodes/{self.episode_id}/{segment}/v1"

    def note(self, request: str) -> None:
        """Note a request that is no call to a model, for the error of an episode without calls."""
        if len(self.others) < _NOTED:
            self.others[request] = None

    def refuse(self, action: str, place: str) -> None:
        """Fail the episode with UncapturedTraffic, or log a warning, as the guard says."""
        if self.guard is None:
            return
        message = (
            f"the agent {action}: the policy did not answer that call, it is not in the trace, and"
            " the provider may charge for it. Use chat completions, completions, Responses,"
            " Anthropic's Messages or Gemini's generateContent with a client that ajet captures,"
            " or take a parameter `model` and give `model.base_url` and `model.api_key` to your"
            f" client. If the call is intended, add {place} to rollout.allowed_urls;"
            " rollout.on_uncaptured: warn lets all such calls pass"
        )
        if self.guard.action == "warn":
            log.warning("%s", message)
            return
        error = UncapturedTraffic(message)
        self.recorder.fail(error)
        raise error


class Observed(Protocol):
    """An observed call of a decorated function; its block sets `output`."""

    output: object


class Observer(Protocol):
    """Records a deployed agent."""

    def episode(
        self, name: str, arguments: Mapping[str, object]
    ) -> AbstractContextManager[Observed]:
        """Record the block as an episode. An exception is recorded as its failure and raised
        again."""


current_episode: ContextVar[ActiveEpisode | None] = ContextVar("ajet_current_episode", default=None)
"""The episode that an outgoing request belongs to: `OpenEpisode.active` while a workflow runs, then
its judge's."""

open_episodes: set[ActiveEpisode] = set()
"""The episodes of this process whose workflow runs."""


class _ProcessWide:
    """A variable with one value for all tasks and threads."""

    def __init__(self) -> None:
        self._value: Observer | None = None

    def get(self) -> Observer | None:
        return self._value

    def set(self, value: Observer | None) -> None:
        self._value = value


observer = _ProcessWide()
"""Set while `ajet.trace` is on: calls of decorated functions outside of an episode are then
recorded as episodes. It is process-wide because a server handles requests in tasks and threads that
don't inherit a context variable."""


@dataclass(frozen=True, slots=True)
class AgentIdentity:
    """The agent that sends a request. The base URL of a handle has it, so that processes need no
    shared state."""

    agent: str = "default"
    target_tag: str | None = None
    trainable: bool = True
    debug_model: str | None = None
    child: str = field(default="", compare=False)
    """The child process that sends it; empty: the process of the workflow, or unknown."""

    def segment(self) -> str:
        """Encode as a path segment: `villager;target=wolf;trainable=0;debug=gpt-4o`, without absent
        parts."""
        parts = [quote(self.agent, safe="")]
        if self.target_tag is not None:
            parts.append("target=" + quote(self.target_tag, safe=""))
        if not self.trainable:
            parts.append("trainable=0")
        if self.debug_model is not None:
            parts.append("debug=" + quote(self.debug_model, safe=""))
        if self.child:
            parts.append("child=" + quote(self.child, safe=""))
        return ";".join(parts)

    @staticmethod
    @lru_cache(maxsize=1024)
    def parse(segment: str) -> AgentIdentity:
        """Decode a path segment that is still percent-encoded."""
        agent, _, parameters = segment.partition(";")
        if parameters:
            named = dict(parse_qsl(parameters, separator=";", keep_blank_values=True))
        else:
            named = {}
        return AgentIdentity(
            agent=unquote(agent),
            target_tag=named.get("target"),
            trainable=named.get("trainable") != "0",
            debug_model=named.get("debug"),
            child=named.get("child", ""),
        )
