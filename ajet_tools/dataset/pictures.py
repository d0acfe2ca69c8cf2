"""The pictures of a dataset card, as PNG; the same numbers give the same bytes (no dates, no versions in them)."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ajet_sdk.errors import MissingExtra
from ajet_tools.dataset.topics import Topics

__all__ = ["difficulty", "lengths", "require_pictures", "similarity", "topic_map"]

_INK, _FAINT = "#26323d", "#d9dee3"
_COLOURS = ("#3b6ea5", "#d9822b", "#4f9d69", "#b8476b", "#7d63b8", "#a58a2c", "#3c9aa8", "#8d6a54", "#6f7f8f")
_BINS = 30
_ROOM = 5
"""Characters on either side of the bars, lest one length fill the whole picture."""
_WIDE = 30.0
"""Where the longest is so many times the shortest, lengths are on a logarithmic axis."""
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
def _drawing(title: str, size: tuple[float, float] = (7.2, 3.2)) -> Iterator[tuple[Any, io.BytesIO]]:
    """Axes to draw on; the bytes are there when the block ends."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        figure = Figure(figsize=size, dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.set_title(title)
        out = io.BytesIO()
        yield axes, out
        figure.savefig(out, format="png", metadata={"Software": None})


def lengths(by_split: Mapping[str, Sequence[int]]) -> bytes:
    """How many characters the questions have, by split."""
    everything = np.concatenate([np.asarray(values, dtype=float) for values in by_split.values()])
    low, high = max(1.0, float(everything.min())), max(2.0, float(everything.max()))
    wide = high / low > _WIDE
    edges = np.geomspace(low, high, _BINS + 1) if wide else _whole_edges(low, high)
    with _drawing("Length of the questions") as (axes, out):
        if wide:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        else:
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.set_xlim(min(edges[0], low - _ROOM), max(edges[-1], high + _ROOM))
        for number, (split, values) in enumerate(by_split.items()):
            clipped = np.clip(np.asarray(values, dtype=float), edges[0], edges[-1])
            axes.hist(clipped, bins=edges, color=_COLOURS[number % len(_COLOURS)], alpha=0.85, label=split)
        axes.set_xlabel("characters")
        axes.set_ylabel("rows")
        axes.grid(axis="y", color=_FAINT)
        if len(by_split) > 1:
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return out.getvalue()


def _whole_edges(low: float, high: float) -> Any:
    """Bins of whole characters, so that none is wider by chance than its neighbour."""
    width = max(1, math.ceil((high - low + 1) / _BINS))
    return np.arange(math.floor(low), high + width + 1, width) - 0.5


def similarity(values: Sequence[float]) -> bytes:
    """How like each row is to the nearest one that was there before it."""
    with _drawing("Similarity to the nearest earlier row") as (axes, out):
        axes.hist(np.clip(values, 0, 1), bins=np.linspace(0, 1, _BINS + 1), color=_COLOURS[0])
        axes.set_xlim(0, 1)
        axes.set_xlabel("similarity: 0 nothing in common, 1 the same text")
        axes.set_ylabel("rows")
        axes.grid(axis="y", color=_FAINT)
    return out.getvalue()


def difficulty(rates: Sequence[float]) -> bytes:
    """How often the rows are solved."""
    kinds = {round(rate, 6) for rate in rates}
    k = next((k for k in range(4, 33) if all(abs(rate * k - round(rate * k)) < 1e-4 for rate in kinds)), None)
    edges = np.linspace(0, 1, 11) if k is None else (np.arange(k + 2) - 0.5) / k
    with _drawing("Pass rate") as (axes, out):
        axes.hist(np.asarray(rates, dtype=float), bins=edges, color=_COLOURS[2], rwidth=0.92)
        axes.set_xlabel("share of attempts that solve the task: 0 never, 1 always")
        axes.set_ylabel("rows")
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
        axes.set_xlim(min(edges[0], 0) - 0.02, max(edges[-1], 1) + 0.02)
        axes.grid(axis="y", color=_FAINT)
    return out.getvalue()


def topic_map(topics: Topics) -> bytes:
    """Each row a dot near those with the same words, in the colour of its topic, the topics named beside it."""
    with _drawing("Topics, by the words of the questions", (8.4, 4.8)) as (axes, out):
        for number, topic in enumerate(topics.topics):
            mine = topics.places_N2[topics.labels_N == number]
            colour = _COLOURS[number % len(_COLOURS)]
            axes.scatter(
                mine[:, 0], mine[:, 1], s=14, alpha=0.55, linewidths=0, color=colour, label=_label(number, topic.words)
            )
            x, y = np.median(mine, axis=0)
            axes.annotate(
                str(number + 1), (x, y), ha="center", va="center", color="white", fontsize=9, fontweight="bold",
                bbox={"boxstyle": "circle,pad=0.25", "facecolor": colour, "edgecolor": "white"},
            )  # fmt: skip
        axes.set_aspect("equal", adjustable="datalim")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9, handletextpad=0.2)
    return out.getvalue()


def _label(number: int, words: Sequence[str]) -> str:
    """The topic's number and words, those that the font can draw; the card has all of them."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties(family="DejaVu Sans")))
    drawn = [word for word in words[:3] if all(font.get_char_index(ord(char)) for char in word)]
    return f"{number + 1}  {', '.join(drawn)}".rstrip().replace("$", r"\$")
