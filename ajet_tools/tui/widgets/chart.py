"""Charts of a run's curves, and sparklines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise

from rich.text import Text
from textual.color import Color
from textual_plotext import PlotextPlot

from ajet_tools.text.clean import one_line
from ajet_tools.text.tables import compact
from ajet_tools.trace.queries.runs import Panel, thin

_MARKERS = ("⠒", "•", "x", "+", "o", "*", "#")
"""Markers distinguish curves without colour."""
_COLORS = ("primary", "success", "warning", "error", "secondary", "accent")


class Chart(PlotextPlot):
    """A panel: title, last value of each curve, and the curves."""

    DEFAULT_CSS = "Chart { padding: 0 1 0 0; }"

    def __init__(self) -> None:
        super().__init__()
        self.panel: Panel | None = None

    def show(self, panel: Panel | None) -> None:
        """Draw another panel, or new points."""
        if panel != self.panel:
            self.panel = panel
            self.refresh()

    def render(self) -> Text:
        width, height = self.size
        if self.panel is None or width < 8 or height < 3:
            return Text("")
        colors = [
            Color.parse(self.app.theme_variables.get(name, "#808080")).rgb for name in _COLORS
        ]
        head = self._head(self.panel, colors, width)
        return Text("\n").join([head, self._draw(self.panel, colors, width, height - 1)])

    def _head(self, panel: Panel, colors: list[tuple[int, int, int]], width: int) -> Text:
        """Format the title and the last value of each curve."""
        head = Text(one_line(panel.title, width), style="bold", no_wrap=True)
        for i, curve in enumerate(panel.curves):
            sign = ""
            if len(panel.curves) > 1:
                sign = f"{_MARKERS[i % len(_MARKERS)]}{curve.label} "
            color = "not bold rgb({},{},{})".format(*colors[i % len(colors)])
            head.append(f" {sign}{_format_number(curve.last)}", style=color)
        head.truncate(width)
        return head

    def _draw(
        self, panel: Panel, colors: list[tuple[int, int, int]], width: int, height: int
    ) -> Text:
        plt = self.plt
        plt.clear_figure()
        plt.theme(self._get_plotext_theme_name(self.app.theme))
        plt.frame(False)
        plt.plotsize(width, height)
        # plotext keeps the size of the figure before
        plt._set_size(width, height)
        shown = thin(panel, width)
        points = list(chain.from_iterable(curve.points for curve in shown.curves))
        values = [value for _, value in points]
        steps = [step for step, _ in points]
        low = min(values)
        high = max(values)
        if high - low <= 1e-9 * max(
            abs(low), abs(high), 1e-9
        ):  # a flat curve is drawn in the middle
            margin = abs(low) * 0.1 or 0.5
            low = low - margin
            high = high + margin
        first = min(steps)
        last = max(steps)
        plt.ylim(low, high)
        plt.xlim(first - 0.5 if first == last else first, last + 0.5 if first == last else last)
        if height < 7:
            ticks = [low, high]
        else:
            ticks = [low, (low + high) / 2, high]
        plt.yticks(ticks, [_format_number(tick).rjust(6) for tick in ticks])
        marks = sorted({first, (first + last) // 2, last})
        plt.xticks([float(mark) for mark in marks], [str(mark) for mark in marks])
        for i, curve in enumerate(shown.curves):
            x = [step for step, _ in curve.points]
            y = [value for _, value in curve.points]
            color = colors[i % len(colors)]
            marker = _MARKERS[i % len(_MARKERS)]
            if len(x) > 1:
                plt.plot(x, y, marker="braille", color=color)
            # a line of one point is not drawn, and later curves differ by their
            # marks
            if i % len(_MARKERS) or len(x) == 1:
                plt.scatter(x, y, marker=marker if i % len(_MARKERS) else "•", color=color)
        return Text.from_ansi(plt.build())


def _format_number(value: float | None) -> str:
    if value is None:
        return ""
    if abs(value) >= 1000:
        return compact(value)
    return f"{value:.3g}"


_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as at most `width` bars; more values are averaged."""
    if not values or width < 1:
        return ""
    if len(values) > width:
        edges = [i * len(values) // width for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low = min(values)
    high = max(values)
    if high - low <= 1e-12 * max(1.0, abs(high)):
        return _BARS[3] * len(values)
    return "".join(_BARS[min(7, int((value - low) / (high - low) * 8))] for value in values)
