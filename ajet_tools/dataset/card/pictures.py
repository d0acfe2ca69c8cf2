"""Pictures of a dataset as PNG, for its card and for `stats`; the same numbers give the same bytes (no dates, no
versions in them)."""

from __future__ import annotations

import io
import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ajet_sdk.errors import MissingExtra
from ajet_tools.dataset.curation.stats import Stats

_INK, _FAINT = "#26323d", "#d9dee3"
_COLOURS = ("#3b6ea5", "#d9822b", "#4f9d69", "#b8476b", "#7d63b8", "#a58a2c", "#3c9aa8", "#8d6a54", "#6f7f8f")
_BINS = 30
_ROOM = 5
"""Characters on either side of the bars, lest one length fill the whole picture."""
_WIDE = 30.0
"""Where the longest is so many times the shortest, lengths are on a logarithmic axis."""
_BARS = 12
_LABEL = 28
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
}


def require_pictures() -> None:
    """Raises MissingExtra where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingExtra("matplotlib", "local") from None


@contextmanager
def _open_grid(size: tuple[float, float], rows: int = 1, columns: int = 1) -> Iterator[tuple[list[Any], io.BytesIO]]:
    """Axes to draw on; the bytes are there when the block ends."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a script that the font has not is drawn as boxes
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        figure = Figure(figsize=size, dpi=120, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        out = io.BytesIO()
        yield list(figure.subplots(rows, columns, squeeze=False).flatten()), out
        canvas.print_png(out, metadata={"Software": None})  # `savefig` draws twice


@contextmanager
def _open_axes(title: str, size: tuple[float, float] = (7.2, 3.2)) -> Iterator[tuple[Any, io.BytesIO]]:
    with _open_grid(size) as ([axes], out):
        axes.set_title(title)
        yield axes, out


def lengths(by_split: Mapping[str, Sequence[int]]) -> bytes:
    """How many characters the questions have, by split."""
    with _open_axes("Length of the questions") as (axes, out):
        _draw_lengths(axes, {split: (values, np.ones(len(values))) for split, values in by_split.items()})
        axes.set_xlabel("characters")
        if len(by_split) > 1:
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return out.getvalue()


def _draw_lengths(axes: Any, groups: Mapping[str, tuple[Sequence[int], Any]]) -> None:
    """A histogram of each group of lengths and how often each is there; bins of whole lengths, or logarithmic."""
    everything = np.concatenate([np.asarray(values, dtype=float) for values, _ in groups.values()])
    low, high = max(1.0, float(everything.min())), max(2.0, float(everything.max()))
    if high / low > _WIDE:
        edges = np.geomspace(low, high, _BINS + 1)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    else:
        width = max(1, math.ceil((high - low + 1) / _BINS))
        edges = np.arange(math.floor(low), high + width + 1, width) - 0.5
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlim(min(edges[0], low - _ROOM), max(edges[-1], high + _ROOM))
    for number, (name, (values, counts)) in enumerate(groups.items()):
        clipped = np.clip(np.asarray(values, dtype=float), edges[0], edges[-1])
        colour = _COLOURS[number % len(_COLOURS)]
        axes.hist(clipped, bins=edges, weights=counts, color=colour, alpha=0.85, label=name)
    axes.set_ylabel("rows")
    axes.grid(axis="y", color=_FAINT)


def similarity(values: Sequence[float]) -> bytes:
    """How like each row is to the nearest one that was there before it."""
    title, label = "Similarity to the nearest earlier row", "similarity: 0 nothing in common, 1 the same text"
    with _open_axes(title) as (axes, out):
        _draw_shares(axes, label, np.clip(values, 0, 1), bins=np.linspace(0, 1, _BINS + 1), color=_COLOURS[0])
        axes.set_xlim(0, 1)
    return out.getvalue()


def difficulty(rates: Sequence[float]) -> bytes:
    """How often the rows are solved."""
    kinds = {round(rate, 6) for rate in rates}
    k = next((k for k in range(4, 33) if all(abs(rate * k - round(rate * k)) < 1e-4 for rate in kinds)), None)
    edges = np.linspace(0, 1, 11) if k is None else (np.arange(k + 2) - 0.5) / k
    label = "share of attempts that solve the task: 0 never, 1 always"
    with _open_axes("Pass rate") as (axes, out):
        _draw_shares(axes, label, np.asarray(rates, dtype=float), bins=edges, color=_COLOURS[2], rwidth=0.92)
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
        axes.set_xlim(min(edges[0], 0) - 0.02, max(edges[-1], 1) + 0.02)
    return out.getvalue()


def _draw_shares(axes: Any, label: str, values: Any, **how: Any) -> None:
    axes.hist(values, **how)
    axes.set_xlabel(label)
    axes.set_ylabel("rows")
    axes.grid(axis="y", color=_FAINT)


def pictures_of(stats: Stats) -> dict[str, bytes]:
    """`lengths.png` and, where fields have few values, `shares.png`. Raises MissingExtra without matplotlib."""
    require_pictures()
    pictures = {"lengths.png": _lengths(stats)}
    return pictures | ({"shares.png": _shares(panels)} if (panels := _panels(stats)) else {})


def _lengths(stats: Stats) -> bytes:
    panels = [("characters a question", stats.chars), ("words a question", stats.words)]
    panels += [("characters an answer", stats.answer_chars)] if stats.answered else []
    with _open_grid((4.2 * len(panels), 3.2), 1, len(panels)) as (grid, out):
        for axes, (name, length_counts) in zip(grid, panels, strict=True):
            values, counts = zip(*length_counts.bins(), strict=True)
            _draw_lengths(axes, {name: (values, counts)})
            middle = length_counts.quantile(0.5)
            axes.axvline(middle, color="black", linewidth=1, linestyle="--")
            axes.set_xlabel(f"{name} (median {middle:,})")
    return out.getvalue()


def _shares(panels: Sequence[tuple[str, Sequence[tuple[str, int]]]]) -> bytes:
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    with _open_grid((5.2 * columns, 2.8 * rows), rows, columns) as (grid, out):
        for axes, (name, counts) in zip(grid, panels, strict=False):
            axes.barh(range(len(counts)), [number for _, number in counts], color=_COLOURS[0])
            axes.set_yticks(range(len(counts)), [_escape(text) for text, _ in counts], fontsize=8)
            axes.invert_yaxis()
            axes.set_title(_escape(name, 50), fontsize=9)
            axes.set_xlabel("rows", fontsize=8)
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
    return out.getvalue()


def _panels(stats: Stats) -> list[tuple[str, Sequence[tuple[str, int]]]]:
    """What has a few values that come often: languages, sources, the field asked for, and fields like them."""
    panels: list[tuple[str, Sequence[tuple[str, int]]]] = []
    if stats.by:
        panels.append((stats.by, [(name, summary.count) for name, summary in stats.top_groups(_BARS)]))
    for name, counts in (("language", stats.languages), ("provenance.source", stats.sources)):
        if len(counts) > 1:
            panels.append((name, sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:_BARS]))
    for name, summary in stats.fields.items():
        if name not in (stats.by, "provenance.source") and 1 < len(summary.values) <= _BARS and not summary.others:
            panels.append((name, [(_label(value), number) for value, number in summary.common(_BARS)]))
    return [(name, counts) for name, counts in panels if counts][:8]


def _label(value: str) -> str:
    """A value of a field, which is JSON, as a label: text without its quotes."""
    read = json.loads(value)
    return read if isinstance(read, str) else value


def _escape(text: str, most: int = _LABEL) -> str:
    """Text that matplotlib takes for text: a dollar would begin a formula."""
    text = " ".join(text.split()).replace("$", r"\$")
    return text if len(text) <= most else text[: most - 1] + "…"
