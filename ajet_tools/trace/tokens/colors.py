"""Maps a value of each token to a few levels, to be shown as colours or marks with a legend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ajet_sdk.types import OUTCOMES
from ajet_tools.trace.tokens.view import TokenView

_Codes = npt.NDArray[np.int8]
_Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Level:
    """A range of values."""

    label: str
    tone: str
    """Name of its colour: `prompt unknown`; `low2 low1 mid high1 high2` for values around 0;
    `scale0` to `scale4` for increasing values; `trained held left context` for the loss mask."""


@dataclass(frozen=True, eq=False)
class ColorScale:
    """Levels of a value for the tokens of a timeline."""

    name: str
    levels: tuple[Level, ...]
    of: _Codes
    """Level of each token."""
    note: str = ""
    """Remark for the legend."""

    @property
    def present(self) -> list[Level]:
        """Levels of at least one token, in order."""
        return [self.levels[i] for i in np.unique(self.of).tolist()]


_PROMPT = Level("prompt", "prompt")
_UNKNOWN = Level("not known", "unknown")


def shade(view: TokenView, name: str) -> ColorScale:
    """Shade the tokens of a timeline by one of SHADINGS."""
    return _BY_NAME[name](view)


def _mask(view: TokenView) -> ColorScale:
    levels = (
        _PROMPT,
        Level("trained", "trained"),
        Level("not booked yet", "held"),
        Level("masked in, not trained", "left"),
        Level("context, masked in elsewhere", "context"),
        Level("sampled, not the policy's", "unknown"),
    )
    codes = np.zeros(len(view), np.int8)
    is_home = np.array([turn.is_home for turn in view.turns], np.bool_)[view.turn]
    codes[view.sampled & ~view.mask] = 5
    codes[view.sampled & ~is_home] = 4
    codes[view.mask] = 3
    codes[view.mask & (view.outcome < 0)] = 2
    codes[view.mask & (view.outcome == OUTCOMES.index("trained"))] = 1
    return ColorScale("loss mask", levels, codes)


def _logprob(view: TokenView) -> ColorScale:
    indices = np.searchsorted(-np.log([0.9, 0.5, 0.1, 0.01]), -view.sampler)
    levels = _in_order("p ≥ 0.9", "≥ 0.5", "≥ 0.1", "≥ 0.01", "< 0.01")
    return _scale(view, "log-probability", view.sampler, indices, levels)


def _entropy(view: TokenView) -> ColorScale:
    if np.isfinite(view.entropy).any():
        note = ""
    else:
        note = "no entropy was recorded"
    indices = np.searchsorted([0.1, 0.5, 1.0, 2.0], view.entropy, side="right")
    return _scale(
        view,
        "entropy",
        view.entropy,
        indices,
        _in_order("< 0.1 nats", "< 0.5", "< 1", "< 2", "≥ 2"),
        note,
    )


def _advantage(view: TokenView) -> ColorScale:
    note = "recomputed from the group" if view.recomputed else ""
    values = view.advantage[np.isfinite(view.advantage)]
    half = float(np.abs(values).max()) / 2 if values.size else 0.0
    distinct = np.unique(values)
    if len(distinct) > 5:
        return _signed(view, "advantage", view.advantage, 0.0, half, note)
    levels = []
    for value in distinct.tolist():
        if value:
            tone = f"{'high' if value > 0 else 'low'}{2 if abs(value) >= half else 1}"
        else:
            tone = "mid"
        levels.append(Level(f"{value:+.3g}", tone))
    return _scale(
        view, "advantage", view.advantage, np.searchsorted(distinct, view.advantage), levels, note
    )


def _gap(view: TokenView) -> ColorScale:
    if np.isfinite(view.gap).any():
        note = ""
    else:
        note = "the trainer's log-probability was not recorded"
    return _signed(view, "trainer minus sampler log-probability", view.gap, 0.01, 0.1, note)


def _signed(
    view: TokenView, name: str, values: _Floats, near: float, far: float, note: str
) -> ColorScale:
    """Levels for values around 0: up to `near` counts as 0, and from `far` on as large."""
    zero = f"within {near:g}" if near else "0"
    labels = (
        f"≤ {-far:.3g}",
        f"< {-near:g}" if near else "< 0",
        zero,
        f"> {near:g}",
        f"≥ {far:.3g}",
    )
    size = np.abs(values)
    magnitudes = np.where(size > near, np.where(size >= max(far, 1e-12), 2, 1), 0)
    levels = list(map(Level, labels, ("low2", "low1", "mid", "high1", "high2")))
    return _scale(view, name, values, 2 + np.sign(values) * magnitudes, levels, note)


def _version(view: TokenView) -> ColorScale:
    known = np.where(view.version < 0, np.nan, view.version).astype(np.float32)
    sampled = np.unique(view.version[view.version >= 0])
    if view.step_version is None:
        newest = sampled[::-1][:5].tolist()
        older = sum(
            (view.version <= version for version in newest[1:]), np.zeros(len(view), np.int64)
        )
        levels = _in_order(*(f"version {v}" for v in newest))
        note = "which version was trained is not known"
        return _scale(view, "policy version", known, older, levels, note)
    levels = _in_order("current", "1 update behind", "2 behind", "3 behind", "4 or more behind")
    versions = ", ".join(map(str, sampled.tolist()[:6]))
    note = (
        f"sampled by version {versions or 'unknown'}; the step trained version {view.step_version}"
    )
    return _scale(
        view, "policy version", known, np.clip(view.staleness, 0, len(levels) - 1), levels, note
    )


def _in_order(*labels: str) -> list[Level]:
    return [Level(label, f"scale{i}") for i, label in enumerate(labels)]


def _scale(
    view: TokenView,
    name: str,
    values: _Floats,
    indices: npt.NDArray[np.generic],
    levels: Sequence[Level],
    note: str = "",
) -> ColorScale:
    """Make a scale of level indices, after two more levels for prompts and unknown values."""
    codes = np.zeros(len(view), np.int8)
    codes[view.sampled] = 1
    known = view.sampled & np.isfinite(values)
    codes[known] = 2 + indices[known].astype(np.int8)
    return ColorScale(name, (_PROMPT, _UNKNOWN, *levels), codes, note)


_BY_NAME: dict[str, Callable[[TokenView], ColorScale]] = {
    "mask": _mask,
    "logprob": _logprob,
    "advantage": _advantage,
    "version": _version,
    "gap": _gap,
    "entropy": _entropy,
}
SHADINGS: tuple[str, ...] = tuple(_BY_NAME)
"""Names of the values to shade tokens by."""
