"""Refuses LLM requests that belong to no single episode.

A thread, task or process belongs to the episode that started it. One that works for several
episodes, such as a worker behind a queue, would give the calls of all of them to the one that
started it. Which job a call is for cannot be seen from outside, so such calls are refused and never
guessed:

- a request from a context without an episode, or whose episode is over, while workflows run;
- an activity that sent requests for an episode while others were open, and still runs when its
  workflow has returned.

The key or base URL of a handle, a function that is submitted to a pool, and a function that runs in
a copy of the episode's context each name their episode.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from ajet_sdk.agent.activity import Activity, activities
from ajet_sdk.agent.context import (
    ActiveEpisode,
    ObservedExchange,
    Verdict,
    open_episodes,
)
from ajet_sdk.capture.uncaptured import is_allowed
from ajet_sdk.engines.http import of_endpoint
from ajet_sdk.errors import AjetError, UnattributedCall
from ajet_sdk.types import Event, Phase

REMEDY = (
    "Which episode such a call is for cannot be told, and a guess would train it with another"
    " attempt's reward. Send the context with each job: `context = contextvars.copy_context()`"
    " where the workflow queues the job, and `context.run(function, ...)` in the worker (for a"
    " coroutine, `context.run(asyncio.ensure_future, ...)`). Or start the worker in the workflow,"
    " and end it before the workflow returns"
)


class Unattributed:
    """The recorder of a context without an open episode: an error fails every episode that the call
    may be for."""

    def __init__(self, ended: ActiveEpisode | None) -> None:
        self.ended = ended
        """The episode of the context, which is over; None: the context never had one."""

    def is_over(self, phase: Phase) -> bool:
        """Always true."""
        return True

    def called_by(self, activity: Activity) -> None:
        """Does nothing: the call is refused."""

    def has_child(self, child: str, activity: Activity) -> None:
        """Does nothing: the calls of the child are refused, too."""

    def is_outlived_by(self, activities: Iterable[Activity]) -> bool:
        """Always false: there is no episode."""
        return False

    def unanswered(self, error: BaseException | None) -> None:
        """Does nothing: no request goes to a gateway."""

    def hide(self, secrets: Collection[str]) -> None:
        """Does nothing: nothing is stored."""

    def answers(self, model: str) -> Verdict:
        """Always `policy`: the call may be for it."""
        return "policy"

    def observed(self, exchange: ObservedExchange) -> None:
        """Does nothing: the call is refused."""

    def happened(self, event: Event) -> None:
        """Does nothing: it is unknown whose event it is."""

    def takes_handle(self, agent: str) -> None:
        """Does nothing: a handle has its own episode."""

    def fail(self, error: AjetError) -> None:
        """Fail every open episode.

        An activity that got no reply for its own episode is nobody's worker but was left behind,
        such as the slower one of two attempts.
        """
        if self.ended is not None and not self.ended.recorder.is_outlived_by(activities()):
            return
        for active in list(open_episodes):
            active.recorder.fail(error)


def outside_of_episodes(ended: ActiveEpisode | None) -> ActiveEpisode | None:
    """Stands for all open episodes, in a context that has none or whose episode has `ended`.

    Without open episodes, or where their guard does not refuse, the context stays as it is.
    """
    if of_endpoint.get():
        return ended
    for active in list(open_episodes):
        if active.reroutes and active.guard is not None and active.guard.action == "error":
            return replace(active, episode_id="", api_key="", recorder=Unattributed(ended))
    return ended


def refuse_unattributed(active: ActiveEpisode, recorder: Unattributed, url: str) -> None:
    """Raise UnattributedCall for an LLM request, unless the config allows its URL."""
    if active.guard is not None and is_allowed(active.guard, url):
        return
    started = " and ".join(activity.name for activity in activities()) or "a thread"
    if recorder.ended is None:
        origin = f"{started} that no episode started"
    else:
        origin = f"{started} of episode {recorder.ended.episode_id}, whose workflow has returned"
    error = UnattributedCall(
        f"an LLM request to {url} came from {origin}. {REMEDY}. If it is no call of the agent, add"
        " its URL to rollout.allowed_urls"
    )
    recorder.fail(error)
    raise error


def outlived(names: Iterable[str]) -> UnattributedCall:
    """The error of an episode with senders that still run after its workflow."""
    return UnattributedCall(
        f"{', '.join(sorted(set(names)))} sent LLM requests for this episode, and still runs after"
        f" its workflow has returned, as a worker does that other episodes use, too. {REMEDY}"
    )
