"""Small pieces of HTML for a notebook's cell: a paragraph, a table, curves. Every text is escaped."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from ajet_sdk.reporting.output import visible

if TYPE_CHECKING:
    from ajet_sdk.types import Episode


def paragraph(text: str, *, bold: bool = False) -> str:
    """Lines of text as they are."""
    weight = "bold" if bold else "normal"
    return f'<pre style="white-space: pre-wrap; font-weight: {weight}">{_text(text)}</pre>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    head = "".join(f"<th>{_text(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def progress_in_cell(total: int) -> Callable[[Episode], None] | None:
    """Shows in a notebook's cell how many episodes have ended, and their mean reward; None outside a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if getattr(shell, "kernel", None) is None:  # a terminal cannot show it, nor a program that imports a kernel's parts
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
    mean = f", mean reward {sum(rewards) / len(rewards):.3f}" if rewards else ""
    return f'<progress value="{done}" max="{total}"></progress> {done}/{total} episodes{mean}'


_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 560, 220, 44, 12, 24
_COLOURS = ("#d9822b", "#2e9e5b", "#2f7de1")


def curves(found: Mapping[str, Mapping[int, float]]) -> str:
    """Curves over steps as one picture (SVG); nothing where there is no point."""
    points = {name: sorted(values.items()) for name, values in found.items() if values}
    if not points:
        return ""
    steps = [step for line in points.values() for step, _ in line]
    values = [value for line in points.values() for _, value in line]
    low, high = min(0.0, *values), max(values)
    width, height = max(max(steps) - min(steps), 1), (high - low) or 1.0

    def place(step: int, value: float) -> tuple[float, float]:
        across = (step - min(steps)) / width * (_WIDTH - _LEFT - 10)
        return _LEFT + across, _TOP + (1 - (value - low) / height) * (_HEIGHT - _TOP - _BOTTOM)

    parts = []
    for at in (low, (low + high) / 2, high):
        _, y = place(0, at)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8884"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{at:.2f}</text>')
    for at in sorted({min(steps), max(steps)}):
        x, _ = place(at, low)
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{at}</text>')
    for number, (name, line) in enumerate(points.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(f'<g fill="{colour}">')
        path = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += ['<circle cx="{:.1f}" cy="{:.1f}" r="2.5"/>'.format(*place(*point)) for point in line]
        parts.append(f'<text x="{_LEFT + 8 + 150 * number}" y="{_TOP + 4}" stroke="none">{_text(name)}</text></g>')
    style = "font: 11px sans-serif; fill: currentColor"
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" style="{style}" role="img" '
        f'aria-label="learning curve">{"".join(parts)}</svg>'
    )


def _text(text: str) -> str:
    return escape(visible(text))
