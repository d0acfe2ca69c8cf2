"""`CombinedJudge`: a weighted sum of several judges' rewards."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from ajet_sdk.config.config import Config
from ajet_sdk.errors import AjetError, ConfigError
from ajet_sdk.judges.call import is_group_judge, judge_stored
from ajet_sdk.judges.load import named_judge, resolved
from ajet_sdk.judges.model import counted, gather
from ajet_sdk.judges.rewards import Verdict
from ajet_sdk.types import Episode, Reward

log = logging.getLogger("ajet")
_opening: ContextVar[tuple[str, ...]] = ContextVar("ajet_combined_judges", default=())
"""Names of the judges being opened, outermost first."""


@dataclass(frozen=True)
class WeightedJudge:
    """One part of a combined judge."""

    judge: Any
    weight: float = 1.0
    name: str | None = None
    """Name of its rewards; None: as the judge names them."""


def _name_of(judge: object) -> str:
    return str(
        getattr(judge, "name", None) or getattr(judge, "__name__", None) or type(judge).__name__
    )


class CombinedJudge:
    """Runs several judges; the reward is their weighted sum, and each score is recorded under its
    name.

        judge = ajet.CombinedJudge([(math, 1.0), (ajet.LlmJudge("It is brief."), 0.2)])

    Group judges and judges of single outputs can be mixed; all run once the group is complete. If a
    judge fails, the verdict fails, since a partial sum would be a different reward. A judge with
    weight 0 only observes: its rewards are recorded and logged as `held_out_NAME` without counting.
    Its first failure is logged; the metric `judge_failed_NAME` is the share of episodes where it
    failed. An episode is a success if all weighted judges that report `is_success` report it as
    true.

    Args:
        parts: judges with their weights.
    """

    def __init__(self, parts: Sequence[WeightedJudge | tuple[object, float]]) -> None:
        self.parts: list[WeightedJudge] = [
            part if isinstance(part, WeightedJudge) else WeightedJudge(*part) for part in parts
        ]
        if not any(part.weight for part in self.parts):
            raise ConfigError("a combined judge needs at least one judge with a nonzero weight")
        self.group: bool = any(is_group_judge(part.judge) for part in self.parts)
        limits = [getattr(part.judge, "timeout", None) for part in self.parts]
        self.timeout: float | None = max((limit for limit in limits if limit), default=None)
        self._warned: set[str] = set()

    async def __call__(self, output: object, episode: Episode) -> Verdict:
        """Judges one output. Raises whatever a judge raises."""
        seen = episode.model_copy(update={"output": output})
        return (await self.compute_rewards([seen]))[0]

    async def compute_rewards(self, episodes: Sequence[Episode]) -> list[Verdict]:
        """Judges a group, in order. Raises whatever a judge raises."""
        with counted():
            each = await gather([self._of(part, episodes) for part in self.parts])
        return [self._sum([verdicts[place] for verdicts in each]) for place in range(len(episodes))]

    async def _of(self, part: WeightedJudge, episodes: Sequence[Episode]) -> list[Verdict]:
        if part.weight:
            return await judge_stored(part.judge, episodes)
        name = part.name or _name_of(part.judge)
        metric = f"judge_failed_{name}"
        try:
            verdicts = await judge_stored(part.judge, episodes)
        except Exception as error:  # noqa: BLE001  an observer must not fail the episode
            if name not in self._warned:
                self._warned.add(name)
                log.warning(
                    "the judge %s, of weight 0, failed: %s: %s (said once; the metric %s has how"
                    " often)",
                    name,
                    type(error).__name__,
                    error,
                    metric,
                )
            used = error.metrics if isinstance(error, AjetError) else {}
            failed = Verdict((), metrics={metric: 1.0})
            return [Verdict((), metrics={**used, metric: 1.0}), *[failed] * (len(episodes) - 1)]
        return [replace(verdict, metrics={**verdict.metrics, metric: 0.0}) for verdict in verdicts]

    def _sum(self, verdicts: Sequence[Verdict]) -> Verdict:
        rewards: list[Reward] = []
        metrics: dict[str, float] = {}
        for part, verdict in zip(self.parts, verdicts, strict=True):
            for reward in verdict.rewards:
                name = reward.name if part.name is None else part.name
                rewards.append(
                    reward.model_copy(update={"name": name, "weight": reward.weight * part.weight})
                )
            for name, value in verdict.metrics.items():
                metrics[name] = metrics.get(name, 0.0) + value
        counting = [
            verdict for part, verdict in zip(self.parts, verdicts, strict=True) if part.weight
        ]
        successes = [verdict.is_success for verdict in counting if verdict.is_success is not None]
        return Verdict(tuple(rewards), all(successes) if successes else None, metrics)


def open_combined(config: Config) -> CombinedJudge:
    """Opens the judge `combined`; paths of its parts are relative to the config file. Raises
    ConfigError."""
    parts = [(resolved(part.judge, config), part) for part in config.task_judge.combined]
    outer = _opening.get()
    for name, _ in parts:
        if name in outer:
            raise ConfigError(f"judge {name} contains itself; remove it from its own parts")
    judges = []
    for name, part in parts:
        token = _opening.set((*outer, name))
        try:
            judges.append(WeightedJudge(named_judge(name, config), part.weight, part.name))
        finally:
            _opening.reset(token)
    return CombinedJudge(judges)
