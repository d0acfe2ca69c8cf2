"""Screen of a run: curves, ledger, failures, metrics, config."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import ClassVar

import yaml
from rich.console import Group, RenderableType
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid, VerticalScroll
from textual.widgets import ContentSwitcher, DataTable, Static

from ajet_sdk.reporting.output import visible
from ajet_sdk.types import now
from ajet_tools.text.clean import one_line
from ajet_tools.text.tables import compact, lasting, number, table
from ajet_tools.trace import queries
from ajet_tools.trace.compare.reasons import reasons
from ajet_tools.trace.compare.verdict import Verdict, verdicts
from ajet_tools.trace.decoding import recorded_config
from ajet_tools.trace.queries.receipts import HERE, TokenReceipt, by_client, client_rows
from ajet_tools.trace.queries.runs import (
    Failure,
    LedgerTotal,
    Panel,
    RunOverview,
    failures_in_words,
    is_constant,
    panels,
    seconds_of,
    steps_of,
)
from ajet_tools.tui.trace.runs import STATUS_STYLES, VERDICT_STYLES, verdict_text
from ajet_tools.tui.trace.screen import FittedTable, TraceScreen
from ajet_tools.tui.widgets.chart import Chart, sparkline

_VIEWS = ("curves", "ledger", "metrics", "config")
_REASONS = 3
"""Lines of reasons for a verdict; `w` shows all."""
_CHART = (38, 8)
"""Minimum columns and rows of a chart among several."""


class RunScreen(TraceScreen):
    """Shows one of four views of a run, with live updates."""

    AUTO_FOCUS = ""
    DEFAULT_CSS = """
    RunScreen #head { height: auto; padding: 0 1; }
    RunScreen #views { height: 1; padding: 0 1; background: $panel; }
    RunScreen ContentSwitcher { height: 1fr; }
    RunScreen #curves { height: 1fr; grid-size: 2 2; grid-gutter: 0 1; padding: 0 1; }
    RunScreen VerticalScroll { padding: 0 1; }
    RunScreen DataTable { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("v", "next_view", "View"),
        Binding("right", "page(1)", "Next curves", show=False),
        Binding("left", "page(-1)", "Previous curves", show=False),
        Binding("z", "zoom", "Zoom"),
        Binding("w", "explain", "Why"),
        Binding("e", "episodes", "Episodes"),
        Binding("F", "failed", "Failed"),
        Binding("y", "copy", "Copy id", show=False),
    ]
    PALETTE: ClassVar[Sequence[tuple[str, str]]] = [
        *((f"View: {name}", f"view('{name}')") for name in _VIEWS),
        ("Tasks by steps", "tasks"),
    ]

    def __init__(self, run_id: str) -> None:
        super().__init__()
        self.run_id = run_id
        self.run: RunOverview | None = None
        self.verdict: Verdict | None = None
        self.reasons: list[str] = []
        self.panels: list[Panel] = []
        """Varying panels, followed by constant ones."""
        self.varying = 0
        """Number of varying panels."""
        self.first = 0
        """Index of the first visible panel."""
        self.zoomed = False
        """Whether only one chart is shown."""
        self.title, self.sub_title = "runs › …", one_line(run_id, 12)

    def compose_body(self) -> ComposeResult:
        yield Static(id="head")
        yield Static(id="views")
        with ContentSwitcher(initial="curves"):
            yield Grid(id="curves")
            with VerticalScroll(id="ledger"):
                yield Static()
            yield FittedTable(id="metrics", cursor_type="row", zebra_stripes=True)
            with VerticalScroll(id="config"):
                yield Static()

    def on_mount(self) -> None:
        metrics = self.query_one("#metrics", DataTable)
        for name in ("metric", "curve", "last", "lowest", "highest", "step"):
            metrics.add_column(name, key=name)
        self._update_view_line()
        self.set_interval(1.0, self._show_head)

    async def read(self) -> None:
        matches = await self.app.ask(queries.overview, self.run_id)
        first, self.run = self.run is None, matches[0] if matches else None
        if self.run is not None:
            self.title = f"runs › {one_line(self.run['name'], 40) or 'run'}"
            self.verdict = (await self.app.ask(verdicts, matches))[self.run_id]
            self.reasons = await self.app.ask(reasons, self.run, self.verdict)
        shown = await self.app.ask(panels, self.run_id)
        self.panels = sorted(shown, key=is_constant)
        self.varying = sum(not is_constant(panel) for panel in shown) or len(shown)
        self._show_head()
        await self._show_curves()
        self._show_metrics()
        if self.query_one(ContentSwitcher).current == "ledger":
            await self._show_ledger()
        scored = (
            not self.panels
            and self.run is not None
            and self.run["status"] == "finished"
            and self.run["episodes"]
        )
        if first and scored and self.is_current:
            await self.action_view("config")
            self.app.open_episodes(self.run_id)

    async def on_resize(self, event: events.Resize) -> None:
        await self._show_curves()

    def _show_head(self) -> None:
        if self.run is not None:
            head = _head(self.run, self.panels, self.app.size.width - 2)
            if self.verdict is not None and self.verdict.first is not None:
                head = _verdict_head(self.run, self.verdict, self.reasons, self.app.size.width - 4)
            self.query_one("#head", Static).update(head)

    def _update_view_line(self) -> None:
        now_shown = self.query_one(ContentSwitcher).current
        line = Text()
        for name in _VIEWS:
            line.append(f" {name} ", style="bold reverse" if name == now_shown else "")
            line.append(" ")
        if now_shown == "curves" and self.panels:
            last = min(self.first + self._page_size(), self._end)
            constant = len(self.panels) - self.varying
            line.append(f"{self.first + 1} to {last} of {self._end}  ← →", style="dim")
            line.append(f"  ({constant} constant: metrics)" if constant else "", style="dim")
        self.query_one("#views", Static).update(line)

    def _grid(self) -> tuple[int, int]:
        """Return the numbers of columns and rows of charts that fit."""
        if self.zoomed:
            return 1, 1
        size = self.query_one(ContentSwitcher).size
        return max(1, size.width // _CHART[0]), max(1, size.height // _CHART[1])

    @property
    def _end(self) -> int:
        """End of the panels to page through; constant ones are only shown if selected in the
        metrics."""
        return self.varying if self.first < self.varying else len(self.panels)

    def _page_size(self) -> int:
        columns, rows = self._grid()
        return columns * rows

    async def _show_curves(self) -> None:
        grid = self.query_one("#curves", Grid)
        columns, rows = self._grid()
        grid.styles.grid_size_columns, grid.styles.grid_size_rows = columns, rows
        charts = list(grid.query(Chart))
        if len(charts) < columns * rows:
            charts += (more := [Chart() for _ in range(columns * rows - len(charts))])
            await grid.mount(*more)
        shown = self.panels[self.first : min(self.first + columns * rows, self._end)]
        for i, chart in enumerate(charts):
            chart.display = i < columns * rows
            chart.show(shown[i] if i < len(shown) else None)
        self._update_view_line()

    def _show_metrics(self) -> None:
        """Update the cells in place, keeping the cursor."""
        metrics = self.query_one("#metrics", DataTable)
        for panel in self.panels:
            for curve in panel.curves:
                values = [value for _, value in curve.points]
                name = f"{panel.title} {curve.label}".strip()
                cells = (
                    *map(number, (values[-1], min(values), max(values))),
                    str(curve.points[-1][0]),
                )
                row = [
                    Text(sparkline(values, 12)),
                    *(Text(cell, justify="right") for cell in cells),
                ]
                if name in metrics.rows:
                    for column, cell in zip(
                        ("curve", "last", "lowest", "highest", "step"), row, strict=True
                    ):
                        metrics.update_cell(name, column, cell, update_width=True)
                else:
                    metrics.add_row(Text(one_line(name, 28)), *row, key=name)

    async def action_next_view(self) -> None:
        current = _VIEWS.index(str(self.query_one(ContentSwitcher).current))
        await self.action_view(_VIEWS[(current + 1) % len(_VIEWS)])

    async def action_view(self, name: str) -> None:
        switcher = self.query_one(ContentSwitcher)
        switcher.current = name
        if name in ("config", "ledger"):
            self.run_worker(
                self._show_config() if name == "config" else self._show_ledger(), group=name
            )
        self.set_focus(None if name == "curves" else self.query_one(f"#{name}"))
        self._update_view_line()

    async def _show_ledger(self) -> None:
        totals = await self.app.ask(queries.ledger_totals, self.run_id)
        failed = await self.app.ask(queries.failures, self.run_id)
        clients = await self.app.ask(by_client, self.run_id)
        width = max(40, self.app.size.width - 4)
        self.query_one("#ledger Static", Static).update(_ledger(totals, failed, clients, width))

    async def _show_config(self) -> None:
        config = await self.app.ask(recorded_config, self.run_id)
        text = (
            yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
            if config
            else "No config is recorded."
        )
        self.query_one("#config Static", Static).update(Text(visible(text)))

    async def action_page(self, by: int) -> None:
        size = self._page_size()
        last = (max(0, self.varying - 1) // size) * size
        self.first = min(max(0, self.first // size * size + by * size), last)
        await self._show_curves()

    async def action_zoom(self) -> None:
        """Toggle between one chart and as many as fit."""
        self.zoomed = not self.zoomed
        self.first = self.first // self._page_size() * self._page_size()
        await self._show_curves()

    async def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Zoom in on the chart of a metric."""
        index_of = {
            f"{p.title} {c.label}".strip(): i for i, p in enumerate(self.panels) for c in p.curves
        }
        self.zoomed, self.first = True, index_of[str(event.row_key.value)]
        await self.action_view("curves")
        await self._show_curves()

    async def on_click(self, event: events.Click) -> None:
        """Switch to the clicked view, or zoom the clicked chart."""
        if event.widget is self.query_one("#views"):
            end = 0
            for name in _VIEWS:
                end += len(name) + 3
                if event.x < end + 1:
                    await self.action_view(name)
                    return
        elif isinstance(event.widget, Chart) and event.widget.panel is not None:
            if not self.zoomed:
                self.first = self.panels.index(event.widget.panel)
            self.zoomed = not self.zoomed
            await self._show_curves()

    def action_tasks(self) -> None:
        self.app.open_many_runs([self.run_id])

    def action_explain(self) -> None:
        self.app.open_explanation(self.run_id)

    def action_episodes(self) -> None:
        self.app.open_episodes(self.run_id)

    def action_failed(self) -> None:
        if self.run is not None and not self.run["unsound"]:
            self.notify("no episode failed", timeout=2)
        else:
            self.app.open_episodes(self.run_id, "status <> 'succeeded'")

    def action_copy(self) -> None:
        self.app.copy(self.run_id, "the run's id")


def _verdict_head(run: RunOverview, verdict: Verdict, why: Sequence[str], width: int) -> Text:
    """Format status, verdict with rewards, and reasons, one per line."""
    head = _progress(run)
    head.append("\n")
    head.append(verdict_text(run, verdict))
    first, last, best = verdict.first, verdict.last, verdict.best
    assert first is not None and last is not None and best is not None
    head.append(f"  {verdict.kind} ")
    head.append(
        f"{first['mean']:.3f} → {last['mean']:.3f}", style=VERDICT_STYLES.get(verdict.word, "bold")
    )
    head.append(f" (step {first['step']} to {last['step']}; best at {best['step']})")
    if run["error"]:
        head.append(f"\n{one_line(run['error'], width)}", style="red")
    lines = [
        line
        for reason in why
        for line in wrap(reason, width, initial_indent="  ", subsequent_indent="    ")
    ]
    for line in lines[:_REASONS]:
        head.append(f"\n{visible(line)}")
    return head


def _head(run: RunOverview, shown: list[Panel], width: int) -> Text:
    """Format two lines: status and progress, then the latest metrics or the error."""
    head = _progress(run)
    head.append("\n")
    if run["error"]:
        head.append(one_line(run["error"], width), style="red")
    elif run["unsound"]:
        head.append(f"{run['unsound']:,} failed: {failures_in_words(run, width - 20)}", style="red")
    else:
        last = {panel.title: panel.curves[0].last for panel in shown}
        names = [
            name
            for name in ("reward", "success", "merge ratio", "entropy", "KL", "dollars")
            if name in last
        ]
        head.append(
            "  ".join(f"{name} {number(last[name])}" for name in names) or "no metric yet",
            style="dim",
        )
    return head


def _progress(run: RunOverview) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(one_line(run["name"], 24), style="bold")
    line.append("  ")
    line.append(run["status"], style=STATUS_STYLES.get(run["status"], ""))
    steps = steps_of(run)
    parts = [
        run["backbone"],
        f"step {steps}" if steps else "",
        f"{compact(run['episodes'])} episodes",
    ]
    parts += [
        f"{compact(run['tokens'])} tokens" if run["tokens"] else "",
        lasting(seconds_of(run, now())),
    ]
    line.append("".join(f"  {part}" for part in parts if part))
    return line


def _ledger(
    totals: list[LedgerTotal], failed: list[Failure], clients: list[TokenReceipt], width: int
) -> Group:
    """Format the ledger, the causes of failures, and the clients of a swarm as tables."""
    parts: list[RenderableType] = []
    if totals:
        tokens = sum(row["tokens"] for row in totals) or 1
        rows = [{**row, "share": f"{row['tokens'] / tokens:.1%}"} for row in totals]
        parts.append(
            table(rows, width, title="ledger: what became of every sampled token", right=["share"])
        )
    else:
        parts.append(Text("No ledger yet: it is written at the end of a step.", style="dim"))
    parts.append(Text())
    if failed:
        columns = ("cause", "episodes", "share", "last_step", "example", "error")
        causes = [
            {**row, "share": f"{row['share']:.1%}", "example": row["example"][:8]} for row in failed
        ]
        rows = [{column: cause[column] for column in columns} for cause in causes]
        parts.append(table(rows, width, title="failures by cause", right=["share"]))
    else:
        parts.append(Text("No episode failed.", style="dim"))
    if any(client.name != HERE for client in clients):
        parts += [Text(), table(client_rows(clients), width, title="clients, and their tokens")]
    return Group(*parts)
