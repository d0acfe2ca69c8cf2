"""The runs of a trace: how each goes."""

from __future__ import annotations

from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.coordinate import Coordinate
from textual.widgets import Static

from ajet_sdk.types import now
from ajet_tools.text.clean import one_line, short_ids
from ajet_tools.text.tables import compact, fields, lasting, number
from ajet_tools.trace import queries
from ajet_tools.trace.queries.runs import REWARDS, RunOverview, failures_in_words, quiet_seconds, seconds_of, steps_of
from ajet_tools.tui.trace.screen import FittedTable, TraceScreen
from ajet_tools.tui.widgets.chart import sparkline

STATUS_STYLES = {"running": "bold cyan", "finished": "green", "failed": "bold red", "interrupted": "yellow"}
_COLUMNS = ("run", "status", "step", "reward", "curve", "episodes", "failed", "tokens", "time", "name")
_RIGHT = frozenset({"reward", "episodes", "tokens", "time", "failed"})
_CURVE = 8
_QUIET = 60.0
_WIDE = 100


class RunsScreen(TraceScreen):
    """The runs of a trace, newest first; below, the one under the cursor."""

    PATIENCE_FACTOR = 1.5
    """Its figures are of whole steps: they may come so many times later than a call is shown."""
    DEFAULT_CSS = """
    RunsScreen DataTable { height: 1fr; }
    RunsScreen #run { height: auto; max-height: 9; border-top: solid $primary; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("o", "open", "Open run"),
        Binding("w", "explain", "Why"),
        Binding("e", "episodes", "Episodes"),
        Binding("s", "sql", "SQL"),
        Binding("y", "copy", "Copy id"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[RunOverview] = []
        self.loaded = False

    def compose_body(self) -> ComposeResult:
        yield FittedTable(cursor_type="row", zebra_stripes=True)
        yield Static(id="run")

    def on_mount(self) -> None:
        self._set_columns()
        self.set_interval(1.0, self._show_times)

    def _set_columns(self) -> None:
        """The name gets a column if there is room; it is always shown below."""
        table = self.query_one(FittedTable)
        names = _COLUMNS if self.app.size.width >= _WIDE else _COLUMNS[:-1]
        if len(names) != len(table.columns):
            at = table.cursor_row
            table.clear(columns=True)
            for name in names:
                table.add_column(Text(name, justify="right" if name in _RIGHT else "left"), key=name)
            self._fill(self.runs)
            table.move_cursor(row=at, animate=False)

    def on_resize(self) -> None:
        self._set_columns()

    async def read(self) -> None:
        runs = await self.app.ask(queries.overview)
        self.loaded = True
        self._fill(runs)

    def _fill(self, runs: list[RunOverview]) -> None:
        """Update cells in place; with a new run, keep the cursor on its run."""
        table, chosen = self.query_one(FittedTable), self.chosen
        self.runs = runs
        short = short_ids([run["run_id"] for run in runs])
        rows = [_cells(short[run["run_id"]], run)[: len(table.columns)] for run in runs]
        with self.app.batch_update():
            if [row.value for row in table.rows] == list(short):
                for y, row in enumerate(rows):
                    for x, cell in enumerate(row):
                        table.update_cell_at(Coordinate(y, x), cell, update_width=True)
            else:
                scrolled, at = table.scroll_offset, table.cursor_row
                table.clear()
                for run, row in zip(runs, rows, strict=True):
                    table.add_row(*row, key=run["run_id"])
                if chosen is not None and chosen["run_id"] in short:
                    line, y = table.get_row_index(chosen["run_id"]), scrolled.y
                    if line - y >= table.scrollable_content_region.height - table.header_height:
                        y += line - at  # else it would leave the screen
                    table.move_cursor(row=line, animate=False, scroll=False)
                    table.scroll_to(scrolled.x, y, animate=False, force=True)
        self._describe()

    @property
    def chosen(self) -> RunOverview | None:
        """The run under the cursor."""
        row = self.query_one(FittedTable).cursor_row
        return self.runs[row] if 0 <= row < len(self.runs) else None

    def on_data_table_row_highlighted(self) -> None:
        self._describe()

    def _show_times(self) -> None:
        """Update the durations of running runs."""
        table = self.query_one(FittedTable)
        for run in self.runs:
            if run["status"] == "running" and run["run_id"] in table.rows:
                time = _align_right(lasting(seconds_of(run, now())))
                table.update_cell(run["run_id"], "time", time, update_width=True)
        if self.chosen and self.chosen["status"] == "running":
            self._describe()

    def _describe(self) -> None:
        run = self.chosen
        none = "No run yet; this list follows the trace." if self.loaded else "reading …"
        self.query_one("#run", Static).update(none if run is None else _describe_run(run))

    def on_data_table_row_selected(self) -> None:
        self.action_open()

    def action_open(self) -> None:
        if self.chosen:
            self.app.open_run(self.chosen["run_id"])

    def action_explain(self) -> None:
        if self.chosen:
            self.app.open_explanation(self.chosen["run_id"])

    def action_episodes(self) -> None:
        self.app.open_episodes(self.chosen["run_id"] if self.chosen else None)

    def action_sql(self) -> None:
        self.app.open_sql()

    def action_copy(self) -> None:
        if self.chosen:
            self.app.copy(self.chosen["run_id"], "the run's id")


def _align_right(text: str, style: str = "") -> Text:
    return Text(text, style=style, justify="right", no_wrap=True)


def _cells(short: str, run: RunOverview) -> list[Text]:
    style = STATUS_STYLES.get(run["status"], "")
    shown = next((value for _, value in _rewards(run) if value is not None), None)
    return [
        Text(short),
        Text(run["status"], style=style),
        Text(steps_of(run)),
        _align_right(number(shown)),
        Text(sparkline(run["rewards"], _CURVE)),
        _align_right(compact(run["episodes"])),
        _align_right(compact(run["unsound"]) if run["unsound"] else "", "red"),
        _align_right(compact(run["tokens"])),
        _align_right(lasting(seconds_of(run, now()))),
        Text(one_line(run["name"], 40)),
    ]


def _rewards(run: RunOverview) -> list[tuple[str, float | None]]:
    """The mean rewards of `ajet trace ls`; the first that a run has stands in its row."""
    return [(name, run[name]) for name in REWARDS]  # type: ignore[literal-required]


def _describe_run(run: RunOverview) -> Table:
    quiet = quiet_seconds(run, now())
    note = f"; nothing new for {lasting(quiet)}" if quiet is not None and quiet >= _QUIET else ""
    if run["status"] == "interrupted":
        note = ": its process died without a message"
    started = f"{run['started_at']:%Y-%m-%d %H:%M:%S} UTC" if run["started_at"] else ""
    return fields(
        [
            ("run", f"{run['run_id']}  {one_line(run['name'], 40)}"),
            ("status", f"{run['status']}{note}"),
            ("started", f"{started}  backbone {run['backbone']}"),
            ("error", one_line(run["error"], 300) if run["error"] else None),
            ("reward", ", ".join(f"{name} {number(value)}" for name, value in _rewards(run) if value is not None)),
            (
                "failures",
                f"{run['unsound']:,} of {run['episodes']:,}: {failures_in_words(run)}" if run["unsound"] else None,
            ),
        ]
    )
