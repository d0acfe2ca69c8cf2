"""The figures of a dataset as pictures: how long its texts are, and what shares they fall into."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ajet_sdk.errors import ConfigError, MissingExtra
from ajet_tools.dataset.stats import Lengths, Stats

__all__ = ["draw"]

_INK = "#3b6ea5"
_BARS = 12
_BINS = 40
_DPI = 120
_LABEL = 28


def draw(stats: Stats, folder: Path) -> list[Path]:
    """Write `lengths.png` and `shares.png` into a directory, and return what was written; the same figures, the same
    bytes. Raises MissingExtra without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("matplotlib", "local") from None
    made = {"lengths.png": _lengths(Figure, stats), "shares.png": _shares(Figure, stats)}
    written = []
    for name, figure in made.items():
        if figure is not None:
            written.append(folder / name)
            _save(figure, written[-1])
    return written


def _save(figure: Any, path: Path) -> None:
    draft = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # a script that the font has not is drawn as boxes
            figure.savefig(draft, format="png", dpi=_DPI, metadata={"Software": None})
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        draft.unlink(missing_ok=True)


def _lengths(figure_of: Any, stats: Stats) -> Any:
    panels = [("characters a question", stats.chars), ("words a question", stats.words)]
    panels += [("characters an answer", stats.answer_chars)] if stats.answered else []
    figure = figure_of(figsize=(4.2 * len(panels), 3.2), layout="constrained")
    for axes, (name, lengths) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        edges, heights, logarithmic = _histogram(lengths)
        widths = [b - a for a, b in pairwise(edges)]
        axes.bar(edges[:-1], heights, widths, align="edge", color=_INK)
        if logarithmic:
            axes.set_xscale("log")
        middle = lengths.quantile(0.5)
        axes.axvline(middle, color="black", linewidth=1, linestyle="--")
        axes.xaxis.get_major_locator().set_params(**({} if logarithmic else {"integer": True}))
        axes.set_xlabel(f"{name} (median {middle:,})")
        axes.set_ylabel("rows")
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _histogram(lengths: Lengths) -> tuple[list[float], list[int], bool]:
    """Edges, heights, and whether the scale is logarithmic, as it is where lengths differ by orders of magnitude."""
    least, most = lengths.least, lengths.most
    logarithmic = most > 50 * max(1, lengths.quantile(0.5))
    if logarithmic:
        low, high = math.log10(max(1, least)), math.log10(most + 1)
        edges = [10 ** (low + (high - low) * i / _BINS) for i in range(_BINS + 1)]
    else:
        step = max(1, -(-(most - least + 1) // _BINS))
        edges = [least + step * i - 0.5 for i in range((most - least) // step + 2)]  # a bar about its integers
    heights = [0] * (len(edges) - 1)
    for length, number in lengths.bins():
        place = next((i for i in range(len(heights)) if length < edges[i + 1]), len(heights) - 1)
        heights[place] += number
    return edges, heights, logarithmic


def _shares(figure_of: Any, stats: Stats) -> Any:
    panels = _panels(stats)
    if not panels:
        return None
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure = figure_of(figsize=(5.2 * columns, 2.8 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes, (name, counts) in zip(grid, panels, strict=False):
        labels = [_label(text) for text, _ in counts]
        axes.barh(range(len(counts)), [number for _, number in counts], color=_INK)
        axes.set_yticks(range(len(counts)), labels, fontsize=8)
        axes.invert_yaxis()
        axes.set_title(_label(name, 50), fontsize=9, loc="left")
        axes.set_xlabel("rows", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    return figure


def _panels(stats: Stats) -> list[tuple[str, Sequence[tuple[str, int]]]]:
    """What has a few values that come often: languages, sources, the field asked for, and fields like them."""
    panels: list[tuple[str, Sequence[tuple[str, int]]]] = []
    if stats.by:
        panels.append((stats.by, [(name, found.count) for name, found in stats.top_groups(_BARS)]))
    for name, counts in (("language", stats.languages), ("provenance.source", stats.sources)):
        if len(counts) > 1:
            panels.append((name, sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:_BARS]))
    for name, found in stats.fields.items():
        if name not in (stats.by, "provenance.source") and 1 < len(found.values) <= _BARS and not found.others:
            panels.append((name, [(_said(value), number) for value, number in found.common(_BARS)]))
    return [(name, counts) for name, counts in panels if counts][:8]


def _said(value: str) -> str:
    """A value of a field, which is JSON, as a label: text without its quotes."""
    read = json.loads(value)
    return read if isinstance(read, str) else value


def _label(text: str, most: int = _LABEL) -> str:
    """Text that matplotlib takes for text: a dollar would begin a formula."""
    text = " ".join(text.split()).replace("$", r"\$")
    return text if len(text) <= most else text[: most - 1] + "…"
