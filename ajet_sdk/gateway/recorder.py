"""What is noted of an open episode in the process of its workflow, wherever its gateway is: which
calls are the policy's, and which threads, tasks and programs send them."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Collection, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from ajet_sdk.agent.activity import Activity, forked_process
from ajet_sdk.agent.context import ActiveEpisode, AgentIdentity, Verdict, open_episodes
from ajet_sdk.agent.model import Model
from ajet_sdk.errors import AjetError, ContextOverflow, ModelAmbiguous
from ajet_sdk.types import Call, Event, Phase

ENDING = 1.0
"""Seconds that threads and tasks get to end when their workflow has returned."""


@dataclass
class SentRequests:
    """The requests of an activity in the name of an episode."""

    count: int = 0
    among_others: bool = False
    """Whether another episode of this process was open at one of them."""


class EpisodeRecorder:
    """The part of an open episode that its own process needs. Its methods are thread-safe."""

    def __init__(
        self,
        episode_id: str,
        url: str,
        *,
        uses_handle: bool,
        policy_models: frozenset[str] = frozenset(),
    ) -> None:
        self.episode_id = episode_id
        self.url = url
        """The gateway's."""
        self.uses_handle = uses_handle
        self.policy_models = policy_models
        self.agents: set[str] = set()
        """Agents for which the workflow uses handles."""
        self.errors: list[AjetError] = []
        self.events: list[Event] = []
        self.secrets = set[str]()
        """Keys that the agent sent to other endpoints."""
        self.context_overflow = False
        self.is_cut_off = False
        """Whether the last request did not reach the gateway."""
        self.judged = False
        """Whether the workflow is over."""
        self._finished = False
        self._model: dict[str, str] = {}
        self._requests = defaultdict[Activity, SentRequests](SentRequests)
        self._children: dict[str, Activity] = {}
        self._outliving = frozenset[Activity]()
        """Activities that got replies and ran on after the workflow."""

    def handle(
        self,
        key: str,
        model: str,
        identity: AgentIdentity,
        timeout: float,
    ) -> Model:
        """A handle of the policy as one agent."""
        base_url = f"{self.url}/episodes/{self.episode_id}/{identity.segment()}/v1"
        return Model(base_url, key, model, timeout=timeout)

    # The interface of the hooks (`context.Recorder`)

    def answers(self, model: str) -> Verdict:
        """Whether the policy answers a captured request for `model`; a second model name is
        ambiguous."""
        if self.uses_handle:
            return "other"
        if self.policy_models:
            return "policy" if model in self.policy_models else "other"
        if self._model.setdefault("only", model) == model:
            return "policy"
        return "ambiguous"

    def hide(self, secrets: Collection[str]) -> None:
        """Keep the keys of a request out of everything that is stored of the episode."""
        self.secrets.update(secrets)

    def ambiguous(self, model: str) -> ModelAmbiguous:
        """The error for a second model name."""
        return ModelAmbiguous(
            f"the episode uses two models, {self._model['only']!r} and {model!r}, and it is unclear"
            " which is the policy; name it in rollout.policy_models, or take a parameter `model`"
            " and use it"
        )

    def unanswered(self, error: BaseException | None) -> None:
        """Does nothing: the gateway is in this process, and knows its requests."""

    def is_over(self, phase: Phase) -> bool:
        """Whether the workflow, or for phase `judge` the judge, has returned."""
        return self._finished or (self.judged and phase == "rollout")

    def called_by(self, activity: Activity) -> None:
        """Note that an activity sends an LLM request in the name of the episode."""
        requests = self._requests[activity]
        requests.count += 1
        requests.among_others |= len(open_episodes) > 1

    def has_child(self, child: str, activity: Activity) -> None:
        """Note that the episode has started a child process, whose requests have the id `child`."""
        self._children[child] = activity

    def called_by_child(self, child: str) -> None:
        """As `called_by`, for a request of a child process."""
        activity = self._children.get(child) or forked_process(child)
        if activity is not None:
            self._children[child] = activity
            self.called_by(activity)

    def is_outlived_by(self, activities: Iterable[Activity]) -> bool:
        """Whether one of these activities got replies for the episode and ran on after its
        workflow."""
        return not self._outliving.isdisjoint(activities)

    def takes_handle(self, agent: str) -> None:
        """Note that the workflow uses a handle for an agent, which may get a reward without a
        call."""
        self.agents.add(agent)

    def fail(self, error: AjetError) -> None:
        """Record an error that fails the episode."""
        if isinstance(error, ContextOverflow):
            self.context_overflow = True
        else:
            self.errors.append(error)

    # After the workflow

    @property
    def sent(self) -> int:
        """Number of requests in the name of the episode, except those of handles."""
        return sum(requests.count for requests in self._requests.values())

    async def senders_running(self, unanswered: int) -> list[Activity]:
        """Activities that got replies among other open episodes and still run; called when the
        workflow has returned.

        Those that end within a moment, such as cancelled tasks, are waited for. `unanswered`
        requests have no reply yet.
        """
        deadline = time.monotonic() + ENDING
        left = [who for who in self._requests if who.is_running()]
        while left and time.monotonic() < deadline:
            await asyncio.sleep(0.01)  # threads of users signal nothing
            left = [who for who in left if who.is_running()]
        if sum(self._requests[who].count for who in left) <= unanswered:
            return []  # their requests are cut off with the episode
        self._outliving = frozenset(left)
        return [who for who in left if self._requests[who].among_others]


class RunningEpisode(Protocol):
    """An open episode as its runner sees it; its gateway is here or elsewhere."""

    episode_id: str
    active: ActiveEpisode
    agents: set[str]
    errors: list[AjetError]
    events: list[Event]
    secrets: set[str]
    context_overflow: bool
    is_cut_off: bool
    stopped: str | None
    """Why the gateway refuses further calls of the workflow; None: it does not."""
    judged: bool

    @property
    def calls(self) -> tuple[Call, ...]:
        """The recorded calls, in order of completion."""

    def model(
        self,
        agent: str = "default",
        target_tag: str | None = None,
        trainable: bool = True,
        debug_model: str | None = None,
    ) -> Model:
        """A handle of the policy."""

    def fail(self, error: AjetError) -> None:
        """Record an error that fails the episode."""

    async def update(self, error: BaseException | None = None) -> None:
        """Learn what the gateway has recorded, after the workflow or the judge, which may have
        raised `error`."""

    async def senders_left(self) -> list[Activity]:
        """See `EpisodeRecorder.senders_running`."""

    def judging(self) -> AbstractAsyncContextManager[ActiveEpisode]:
        """Enter the judge's phase."""

    async def finish(self) -> tuple[Call, ...]:
        """End the episode's calls here, and return all of them."""
