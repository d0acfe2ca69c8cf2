"""HTML for notebook cells: a paragraph, a table, the learning curve. All text is escaped."""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from ajet_sdk.reporting.output import visible

if TYPE_CHECKING:
    from ajet_sdk.types import Episode


def paragraph(text: str, *, bold: bool = False) -> str:
    weight = "bold" if bold else "normal"
    return f'<pre style="white-space: pre-wrap; font-weight: {weight}">{_text(text)}</pre>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{_text(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def progress_in_cell(total: int) -> Callable[[Episode], None] | None:
    """A callback that shows finished episodes and their mean reward in a notebook cell; None
    elsewhere."""
    if "IPython" in sys.modules:
        shell = sys.modules["IPython"].get_ipython()
    else:
        shell = None
    if (
        getattr(shell, "kernel", None) is None
    ):  # terminals cannot show it, nor programs that import parts of a kernel
        return None
    from IPython.display import HTML, display

    rewards: list[float] = []
    done = 0
    shown: Any = display(HTML(_progress(0, total, rewards)), display_id=True)

    def ended(episode: Episode) -> None:
        nonlocal done
        done += 1
        rewards.extend([episode.reward] if episode.reward is not None else [])
        shown.update(HTML(_progress(done, total, rewards)))

    return ended


def _progress(done: int, total: int, rewards: Sequence[float]) -> str:
    if rewards:
        mean = f", mean reward {sum(rewards) / len(rewards):.3f}"
    else:
        mean = ""
    return f'<progress value="{done}" max="{total}"></progress> {done}/{total} episodes{mean}'


_CURVES = {
    "train/reward": ("training, sampled", "tab:gray", "-"),
    "val/reward": ("validation, temperature 1", "tab:blue", "o-"),
    "val/greedy_reward": ("validation, greedy", "tab:green", "s--"),
}


def learning_curve(history: Mapping[str, Mapping[int, float]]) -> bytes | None:
    """Draws the rewards by step as a PNG; None without rewards or without matplotlib."""
    present = {name: style for name, style in _CURVES.items() if history.get(name)}
    if not present:
        return None
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(7, 4))  # an automatic layout would draw it three times
    figure.subplots_adjust(left=0.1, right=0.98, top=0.97, bottom=0.13)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, (label, colour, style) in present.items():
        points = sorted(history[name].items())
        axes.plot(
            [s for s, _ in points],
            [v for _, v in points],
            style,
            label=label,
            color=colour,
            linewidth=1.5,
        )
    axes.set_xlabel("step")
    axes.set_ylabel("reward")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=120)
    return drawn.getvalue()


def picture(png: bytes | None) -> str:
    """A picture within the page; nothing where there is none."""
    if png is None:
        return ""
    return f'<img width="560" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def _text(text: str) -> str:
    return escape(visible(text))
