"""A value of each token in a few levels that a colour or a mark can show, with the words of their legend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ajet_sdk.types import OUTCOMES
from ajet_tools.trace.tokens.view import TokenView

_Codes = npt.NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class Level:
    """A range of values."""

    label: str
    tone: str
    """Its colour's name: `prompt unknown`, `low2 low1 mid high1 high2` where 0 lies in the middle, `scale0` to
    `scale4` where more is more, `trained held left context` for what stands in the loss mask."""


@dataclass(frozen=True, eq=False)
class ColorScale:
    """One value of a timeline's tokens in levels."""

    name: str
    levels: tuple[Level, ...]
    of: _Codes
    """The level of each token."""
    note: str = ""
    """What there is to know of the values."""

    @property
    def present(self) -> list[Level]:
        """The levels that some token has, in order."""
        return [self.levels[i] for i in np.unique(self.of).tolist()]


_PROMPT = Level("prompt", "prompt")
_UNKNOWN = Level("not known", "unknown")


def shade(view: TokenView, name: str) -> ColorScale:
    """A timeline's tokens shaded by one of SHADINGS."""
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
    own_turn = np.array([turn.own for turn in view.turns], np.bool_)[view.turn]
    codes[view.sampled & ~view.mask] = 5
    codes[view.sampled & ~own_turn] = 4
    codes[view.mask] = 3
    codes[view.mask & (view.outcome < 0)] = 2
    codes[view.mask & (view.outcome == OUTCOMES.index("trained"))] = 1
    return ColorScale("loss mask", levels, codes)


def _logprob(view: TokenView) -> ColorScale:
    edges, labels = np.log([0.9, 0.5, 0.1, 0.01]), ("p ≥ 0.9", "≥ 0.5", "≥ 0.1", "≥ 0.01", "< 0.01")
    return _sequence("log-probability", view, view.sampler, -edges, labels, negated=True)


def _entropy(view: TokenView) -> ColorScale:
    note = "" if np.isfinite(view.entropy).any() else "no entropy was recorded"
    labels = ("< 0.1 nats", "< 0.5", "< 1", "< 2", "≥ 2")
    return _sequence("entropy", view, view.entropy, np.array([0.1, 0.5, 1.0, 2.0]), labels, note=note)


def _sequence(
    name: str,
    view: TokenView,
    values: npt.NDArray[np.float32],
    edges: npt.NDArray[np.float64],
    labels: Sequence[str],
    *,
    negated: bool = False,
    note: str = "",
) -> ColorScale:
    levels = (_PROMPT, _UNKNOWN, *(Level(label, f"scale{i}") for i, label in enumerate(labels)))
    indices = np.searchsorted(edges, -values if negated else values, side="left" if negated else "right")
    return ColorScale(name, levels, _placed(view, values, indices), note)


def _advantage(view: TokenView) -> ColorScale:
    note = "recomputed from the group" if view.recomputed else ""
    values = view.advantage[np.isfinite(view.advantage)]
    half = float(np.abs(values).max()) / 2 if values.size else 0.0
    distinct = np.unique(values)
    if len(distinct) > 5:
        return _signed("advantage", view, view.advantage, 0.0, half, note)
    levels = (_PROMPT, _UNKNOWN, *(Level(f"{value:+.3g}", _tone(value, half)) for value in distinct.tolist()))
    return ColorScale(
        "advantage", levels, _placed(view, view.advantage, np.searchsorted(distinct, view.advantage)), note
    )


def _tone(value: float, half: float) -> str:
    if not value:
        return "mid"
    return f"{'high' if value > 0 else 'low'}{2 if abs(value) >= half else 1}"


def _gap(view: TokenView) -> ColorScale:
    note = "" if np.isfinite(view.gap).any() else "the trainer's log-probability was not recorded"
    return _signed("trainer minus sampler log-probability", view, view.gap, 0.01, 0.1, note)


def _signed(
    name: str, view: TokenView, values: npt.NDArray[np.float32], near: float, far: float, note: str
) -> ColorScale:
    """Values around 0: `near` and nearer counts as 0, `far` and farther as much."""
    zero = f"within {near:g}" if near else "0"
    labels = (f"≤ {-far:.3g}", f"< {-near:g}" if near else "< 0", zero, f"> {near:g}", f"≥ {far:.3g}")
    tones = ("low2", "low1", "mid", "high1", "high2")
    levels = (_PROMPT, _UNKNOWN, *(Level(label, tone) for label, tone in zip(labels, tones, strict=True)))
    size = np.abs(values)
    magnitudes = np.where(size > near, np.where(size >= max(far, 1e-12), 2, 1), 0)
    return ColorScale(name, levels, _placed(view, values, 2 + np.sign(values) * magnitudes), note)


def _version(view: TokenView) -> ColorScale:
    known = np.where(view.version < 0, np.nan, view.version).astype(np.float32)
    if view.step_version is None:
        return _versions(view, known)
    levels = (_PROMPT, _UNKNOWN, *(Level(word, f"scale{i}") for i, word in enumerate(_BEHIND)))
    behind = np.clip(view.staleness, 0, len(_BEHIND) - 1)
    versions = ", ".join(str(v) for v in np.unique(view.version[view.version >= 0]).tolist()[:6])
    note = f"sampled by version {versions or 'unknown'}; the step trained version {view.step_version}"
    return ColorScale("policy version", levels, _placed(view, known, behind), note)


_BEHIND = ("current", "1 update behind", "2 behind", "3 behind", "4 or more behind")


def _versions(view: TokenView, known: npt.NDArray[np.float32]) -> ColorScale:
    """Where it is not known which version was trained: the versions themselves, the newest apart."""
    distinct = np.unique(view.version[view.version >= 0])[::-1][:5]
    levels = (_PROMPT, _UNKNOWN, *(Level(f"version {v}", f"scale{i}") for i, v in enumerate(distinct.tolist())))
    place = np.zeros(len(view), np.int64)
    for i, version in enumerate(distinct.tolist()):
        place[view.version <= version] = i
    return ColorScale("policy version", levels, _placed(view, known, place), "which version was trained is not known")


def _placed(view: TokenView, values: npt.NDArray[np.float32], indices: npt.NDArray[np.generic]) -> _Codes:
    """Levels as numbers: 0 a prompt's token, 1 unknown, then those found."""
    codes = np.zeros(len(view), np.int8)
    codes[view.sampled] = 1
    known = view.sampled & np.isfinite(values)
    codes[known] = 2 + indices[known].astype(np.int8)
    return codes


_BY_NAME: dict[str, Callable[[TokenView], ColorScale]] = {
    "mask": _mask,
    "logprob": _logprob,
    "advantage": _advantage,
    "version": _version,
    "gap": _gap,
    "entropy": _entropy,
}
SHADINGS: tuple[str, ...] = tuple(_BY_NAME)
"""What tokens can be shaded by."""
