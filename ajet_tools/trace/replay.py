"""A recorded episode's workflow, run again with the recorded completions: does it make the same calls?

The workflow runs as in a run, through the gateway and the capture, and only the model is a recording. Nothing is
written to the trace.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ajet_sdk.backbones.debug import stopping_at
from ajet_sdk.config import Config
from ajet_sdk.episode import Attempt, run_episode
from ajet_sdk.errors import QueryError
from ajet_sdk.protocols import TraceReader
from ajet_sdk.trace.reader import calls_of, episodes
from ajet_sdk.types import Episode
from ajet_tools.trace.recording import Recording, RecordingGateway
from ajet_tools.trace.rejudge import workflow_returned
from ajet_tools.trace.request_diff import Difference, compare, requests_of

__all__ = ["Replay", "recorded_episode", "replay"]

_A_WEEK = 7 * 24 * 3600.0


@dataclass(frozen=True)
class Replay:
    """What a replay came to."""

    recorded: Episode
    replayed: Episode
    differences: tuple[Difference, ...]
    """In the order of the recording; empty: the workflow made the same calls."""
    requests: int
    """As recorded."""
    requests_now: int

    @property
    def error(self) -> str | None:
        """Why the workflow failed now, where it did not then; also where it fails for another cause."""
        now = None if workflow_returned(self.replayed) else self.replayed.cause
        then = None if workflow_returned(self.recorded) else self.recorded.cause
        return self.replayed.error if now is not None and now != then else None

    @property
    def same(self) -> bool:
        """The same calls, and the workflow came to its end as it did then."""
        return not self.differences and self.error is None

    @property
    def same_output(self) -> bool:
        return bool(self.recorded.output == self.replayed.output)


def recorded_episode(reader: TraceReader, episode_id: str) -> Episode:
    """An episode that can be replayed. Raises QueryError where it has not ended, or its calls cannot be answered."""
    found = episodes(reader, episode_ids=[episode_id], superseded=True)
    if not found:
        raise QueryError(
            f"episode {episode_id} has not ended, or its run was cut off: it has {len(calls_of(reader, episode_id))} "
            "calls and no task, so there is nothing to start the workflow with"
        )
    episode = found[0]
    foreign = [c for c in episode.calls if c.phase == "rollout" and c.error is None and not _answerable(c.response)]
    if foreign:
        raise QueryError(
            f"call {foreign[0].call_id} of episode {episode_id} was answered in another dialect than chat/completions "
            f"or completions ({', '.join(sorted(foreign[0].response)[:6]) or 'nothing was recorded'}); a replay "
            "answers these two"
        )
    return episode


def _answerable(response: dict[str, Any]) -> bool:
    choices = response.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return isinstance(first, dict) and ("message" in first or "text" in first)


async def replay(
    recorded: Episode,
    workflow: Any,
    config: Config,
    *,
    timeout: float | None = None,
    debug_tags: Collection[str] = (),
) -> Replay:
    """Run `workflow` on the task of a recorded episode, with its completions.

    `timeout` is in seconds; None: the config's. With debug tags there is none, since a person may sit at a breakpoint.
    Judges are not run. Never raises for what the workflow does.
    """
    requests = requests_of(recorded.calls)
    recording = Recording(requests)
    limit = _A_WEEK if debug_tags else timeout or config.rollout.timeout
    rollout = config.rollout.model_copy(update={"timeout": limit, "max_env_worker": 1})
    attempt = Attempt(
        task=recorded.task,
        run_id=recorded.run_id,
        group_id=recorded.group_id,
        attempt=recorded.attempt,
        step=recorded.step,
        split=recorded.split or "train",
    )
    with stopping_at(debug_tags), RecordingGateway(recording) as gateway:
        replayed = await run_episode(
            workflow,
            _unjudged,
            attempt,
            engine=recording,
            gateway=gateway,
            config=config.model_copy(update={"rollout": rollout}),
        )
    now = requests_of(replayed.calls)
    return Replay(recorded, replayed, tuple(compare(requests, now)), len(requests), len(now))


def _unjudged() -> float:
    """A replay asks what the workflow does, and not what it is worth."""
    return 0.0
