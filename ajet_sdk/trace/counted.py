"""The reward with which an episode counts, in training, in metrics and in comparisons of stored
episodes.

It is the sum of its rewards, or `rollout.failure_reward` if the agent failed by its own fault. Left
out are failures of the infrastructure or the judge, and those of agents if there is no
`failure_reward`: nothing is known about them.
"""

from __future__ import annotations

from collections.abc import Iterable

from ajet_sdk import errors
from ajet_sdk.types import Episode

_OF_AJET = {
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.AjetError)
}
_NOT_THE_AGENTS = _OF_AJET - {"ContextOverflow", "RequestRefused"}
"""Causes, as names of exceptions, that are no fault of the agent."""
_OF_JUDGE = "judge "
"""Beginning of the error of an episode whose judge failed."""


def failed_by_itself(episode: Episode) -> bool:
    """Whether the episode failed by the agent's own fault."""
    of_judge = (episode.error or "").startswith(_OF_JUDGE)
    foreign = episode.infrastructure or of_judge or episode.cause in _NOT_THE_AGENTS
    return episode.status == "failed" and not foreign


def counted_reward(episode: Episode, failure_reward: float | None) -> float | None:
    """The reward with which an episode counts; None if it is left out."""
    if episode.status == "succeeded":
        return episode.reward
    return failure_reward if failed_by_itself(episode) else None


def counted_rewards(episodes: Iterable[Episode], failure_reward: float | None) -> list[float]:
    """The rewards of the episodes that count."""
    values = (counted_reward(episode, failure_reward) for episode in episodes)
    return [value for value in values if value is not None]


FAILED_BY_ITSELF = f"""(e.status = 'failed' AND NOT coalesce(e.infrastructure, false)
    AND NOT starts_with(coalesce(e.error, ''), '{_OF_JUDGE}')
    AND coalesce(e.cause, '') NOT IN ({", ".join(f"'{name}'" for name in sorted(_NOT_THE_AGENTS))}))"""
"""SQL: `failed_by_itself` of an episode `e`."""

COUNTED = f"""(
    SELECT e.episode_id, CASE
        WHEN e.status = 'succeeded' THEN earned.reward
        WHEN {FAILED_BY_ITSELF} THEN try_cast(run.config->>'$.ajet.rollout.failure_reward' AS DOUBLE) END AS reward
    FROM episodes e LEFT JOIN runs run USING (run_id)
    LEFT JOIN (SELECT episode_id, sum(value * weight) AS reward FROM rewards GROUP BY ALL) earned USING (episode_id))"""
"""SQL: a relation with the `counted_reward` of each episode, as `reward`, by `episode_id`; NULL if
it is left out."""
