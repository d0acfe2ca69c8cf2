"""A run's metrics as curves: which belong in one picture, and fewer points than a screen has columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ajet_sdk.protocols import TraceReader
from ajet_tools.trace.queries.runs import metric_points, staleness

__all__ = ["Curve", "Panel", "panels", "thin"]

Points = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a picture."""

    label: str
    points: Points

    @property
    def last(self) -> float | None:
        return self.points[-1][1] if self.points else None


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture: the curves that are read together."""

    title: str
    curves: tuple[Curve, ...]


_TOGETHER: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("reward", (("train", "train/reward"), ("val", "val/reward"), ("greedy", "val/greedy_reward"))),
    ("success", (("train", "train/solved_share"), ("val", "val/solved_share"))),
    ("loss", (("", "train/loss"),)),
    ("KL", (("sampler", "train/sampler_kl"), ("reference", "train/kl"))),
    ("entropy", (("", "train/entropy"),)),
    ("tokens per episode", (("", "tokens_per_episode"),)),
    ("tokens/s", (("trained", "train/tokens_per_second"), ("sampled", "train/sampled_tokens_per_second"))),
    ("merge ratio", (("", "train/merge_ratio"),)),
    ("versions behind", (("", "staleness"),)),
    ("failed share", (("train", "train/failed_share"), ("val", "val/failed_share"))),
    ("calls per episode", (("train", "train/calls_per_episode"), ("val", "val/calls_per_episode"))),
    ("gradient norm", (("", "train/grad_norm"),)),
    ("trainer - sampler log-prob.", (("max", "train/logprob_gap_max"), ("mean", "train/logprob_gap_mean"))),
    ("seconds", (("step", "time/step"), ("rollout", "time/rollout"))),
)
"""Title -> (label, metric); two are worked out here: `tokens_per_episode` and `staleness`."""


def panels(reader: TraceReader, run_id: str) -> list[Panel]:
    """The pictures of a run that have a point to show; metrics that stand in none of ours get one each, at the end."""
    found: dict[str, Points] = {**metric_points(reader, run_id)}
    found["tokens_per_episode"] = _ratio(found.get("train/tokens_sampled", ()), found.get("train/episodes", ()))
    found["staleness"] = staleness(reader, run_id)
    placed = {name for _, lines in _TOGETHER for _, name in lines}
    made = [_panel(title, lines, found) for title, lines in _TOGETHER]
    made += [_panel(name, (("", name),), found) for name in sorted(found) if name not in placed]
    return [panel for panel in made if panel.curves]


def _panel(title: str, lines: Sequence[tuple[str, str]], found: Mapping[str, Points]) -> Panel:
    return Panel(title, tuple(Curve(label, found[name]) for label, name in lines if found.get(name)))


def _ratio(above: Points, below: Points) -> Points:
    by_step = dict(below)
    return [(step, value / by_step[step]) for step, value in above if by_step.get(step)]


def thin(panel: Panel, columns: int) -> Panel:
    """The panel with at most two points a column: of each stretch the lowest and the highest, so no spike is lost."""
    return replace(panel, curves=tuple(replace(c, points=_thin(c.points, columns)) for c in panel.curves))


def _thin(points: Points, columns: int) -> Points:
    if len(points) <= 2 * columns:
        return points
    size = math.ceil(len(points) / max(1, columns))
    kept: list[tuple[int, float]] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        low, high = min(stretch, key=_value), max(stretch, key=_value)
        kept += sorted({low, high})
    return kept


def _value(point: tuple[int, float]) -> float:
    return point[1]
