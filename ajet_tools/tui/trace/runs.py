"""Screen with the list of runs, their status and verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.coordinate import Coordinate
from textual.widgets import Static

from ajet_sdk.types import now
from ajet_tools.text.clean import one_line, short_ids
from ajet_tools.text.tables import compact, fields, lasting, number
from ajet_tools.trace import queries
from ajet_tools.trace.compare.reasons import reasons
from ajet_tools.trace.compare.verdict import Verdict, verdicts
from ajet_tools.trace.queries.experiments import Group, Settings, differing, seed_groups
from ajet_tools.trace.queries.runs import REWARDS, RunOverview, quiet_seconds, seconds_of, steps_of
from ajet_tools.tui.trace.screen import FittedTable, TraceScreen
from ajet_tools.tui.widgets.chart import sparkline

STATUS_STYLES = {"running": "bold cyan", "failed": "bold red", "interrupted": "yellow"}
VERDICT_STYLES = {
    "learned": "green", "learned?": "yellow", "worse": "red", "collapsed": "bold red", "all failed": "bold red",
}  # fmt: skip
_MARKS = {"learned": "▲", "learned?": "▲", "worse": "▼", "collapsed": "▼"}
_COLUMNS = ("name", "verdict", "validation", "change", "train", "step", "failed", "time", "run")
_RIGHT = frozenset({"change", "failed", "time"})
_CURVE = 8
_QUIET = 60.0
_WIDE = 100
_NARROW = 6
"""Number of columns on a narrow terminal."""
_REASONS = 4


class RunsScreen(TraceScreen):
    """Lists the runs, newest first, with details of the run under the cursor."""

    DEFAULT_CSS = """
    RunsScreen DataTable { height: 1fr; }
    RunsScreen #run { height: auto; max-height: 11; border-top: solid $primary; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("w", "explain", "Why"),
        Binding("c", "curves", "Compare"),
        Binding("space", "mark", "Select to compare", show=False),
        Binding("g", "group", "Group runs that differ by their seed", show=False),
        Binding("e", "episodes", "Episodes"),
        Binding("y", "copy", "Copy id"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[RunOverview] = []
        """Listed runs."""
        self.all_runs: list[RunOverview] = []
        self.verdicts: dict[str, Verdict] = {}
        self.reasons: dict[str, list[str]] = {}
        """Reasons of verdicts, for runs that had the cursor since the last reading."""
        self.loaded = False
        self.marked: set[str] = set()
        self.groups: dict[str, Group] = {}
        """Group of each run that has other seeds."""
        self._settings: dict[str, Settings] = {}
        self.grouped = False
        """Whether groups have a single row."""

    def compose_body(self) -> ComposeResult:
        yield FittedTable(cursor_type="row", zebra_stripes=True)
        yield Static(id="run")

    def on_mount(self) -> None:
        self._set_columns()
        self.set_interval(1.0, self._show_times)

    def _set_columns(self) -> None:
        """Show the columns that fit; the details have the others."""
        table = self.query_one(FittedTable)
        names = _COLUMNS if self.app.size.width >= _WIDE else _COLUMNS[:_NARROW]
        if len(names) != len(table.columns):
            at = table.cursor_row
            table.clear(columns=True)
            for name in names:
                table.add_column(
                    Text(name, justify="right" if name in _RIGHT else "left"), key=name
                )
            self._fill(self.all_runs)
            table.move_cursor(row=at, animate=False)

    def on_resize(self) -> None:
        self._set_columns()

    async def read(self) -> None:
        runs = await self.app.ask(queries.overview)
        self.verdicts, self.reasons = await self.app.ask(verdicts, runs), {}
        ids = [run["run_id"] for run in runs]
        if ids != [*self._settings]:
            self._settings = await self.app.ask(differing, ids)
        self.groups = {
            run_id: group for group in seed_groups(runs, self._settings) for run_id in group.runs
        }
        self.loaded, self.all_runs = True, runs
        self._fill(runs)
        self._explain()

    def _fill(self, runs: list[RunOverview]) -> None:
        """Update cells in place; with new runs, keep the cursor on its run."""
        table, chosen = self.query_one(FittedTable), self.chosen
        if self.grouped:
            runs = [run for run in runs if self._members(run["run_id"])[0] == run["run_id"]]
        self.runs = runs
        short = short_ids([run["run_id"] for run in runs])
        rows = [self._row(short[run["run_id"]], run)[: len(table.columns)] for run in runs]
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
                        y += line - at  # keeps it on the screen
                    table.move_cursor(row=line, animate=False, scroll=False)
                    table.scroll_to(scrolled.x, y, animate=False, force=True)
        self._describe()

    def _members(self, run_id: str) -> Sequence[str]:
        """Return the runs of its group, newest first, or only itself."""
        return self.groups[run_id].runs if run_id in self.groups else (run_id,)

    def _row(self, short: str, run: RunOverview) -> list[Text]:
        cells = _cells(short, run, self.verdicts.get(run["run_id"]))
        group = self.groups.get(run["run_id"]) if self.grouped else None
        if group is not None:
            cells[:5] = map(
                Text,
                (one_line(group.name, 24), f"{len(group.runs)} seeds", _interval(group), "", ""),
            )
        if self.marked.intersection((run["run_id"],) if group is None else group.runs):
            cells[0] = Text.assemble(("● ", "bold"), cells[0])
        return cells

    @property
    def chosen(self) -> RunOverview | None:
        """Run under the cursor."""
        row = self.query_one(FittedTable).cursor_row
        return self.runs[row] if 0 <= row < len(self.runs) else None

    def on_data_table_row_highlighted(self) -> None:
        self._describe()
        self._explain()

    @work(group="reasons")
    async def _explain(self) -> None:
        """Read the reasons for the verdict on the run under the cursor."""
        run = self.chosen
        if run is None or run["run_id"] in self.reasons or run["run_id"] not in self.verdicts:
            return
        self.reasons[run["run_id"]] = await self.app.ask(reasons, run, self.verdicts[run["run_id"]])
        self._describe()

    def _show_times(self) -> None:
        """Update the durations of running runs."""
        table = self.query_one(FittedTable)
        for run in self.runs:
            if run["status"] == "running" and run["run_id"] in table.rows:
                time = _align_right(lasting(seconds_of(run, now())))
                if len(table.columns) == len(_COLUMNS):
                    table.update_cell(run["run_id"], "time", time, update_width=True)
        if self.chosen and self.chosen["status"] == "running":
            self._describe()

    def _describe(self) -> None:
        run = self.chosen
        none = "No run yet; this list follows the trace." if self.loaded else "reading …"
        why = self.reasons.get(run["run_id"], []) if run is not None else []
        group = self.groups.get(run["run_id"]) if run is not None else None
        self.query_one("#run", Static).update(
            none if run is None else _describe_run(run, why, group)
        )

    def on_data_table_row_selected(self) -> None:
        self.action_open()

    def action_open(self) -> None:
        if self.chosen:
            self.app.open_run(self.chosen["run_id"])

    def action_explain(self) -> None:
        if self.chosen:
            self.app.open_explanation(self.chosen["run_id"])

    def action_mark(self) -> None:
        if self.chosen:
            run_id = self.chosen["run_id"]
            self.marked ^= {*self._members(run_id)} if self.grouped else {run_id}
            self._fill(self.all_runs)
            self.query_one(FittedTable).action_cursor_down()

    def action_group(self) -> None:
        self.grouped = not self.grouped and bool(self.groups)
        if not self.groups:
            self.notify("no runs differ by their seed only", timeout=2)
        self._fill(self.all_runs)

    def action_curves(self) -> None:
        """Compare the marked runs, or the run under the cursor with its other seeds."""
        here = self._members(self.chosen["run_id"]) if self.chosen else ()
        chosen = [run["run_id"] for run in self.all_runs if run["run_id"] in (self.marked or here)]
        if chosen:
            self.app.open_many_runs(chosen)

    def action_episodes(self) -> None:
        self.app.open_episodes(self.chosen["run_id"] if self.chosen else None)

    def action_copy(self) -> None:
        if self.chosen:
            self.app.copy(self.chosen["run_id"], "the run's id")


def _align_right(text: str, style: str = "") -> Text:
    return Text(text, style=style, justify="right", no_wrap=True)


def _cells(short: str, run: RunOverview, verdict: Verdict | None) -> list[Text]:
    train = Text(sparkline(run["rewards"], _CURVE))
    if run["last_train"] is not None:
        train.append(f" {number(run['last_train'])}")
    gain = verdict.gain if verdict is not None else None
    style = VERDICT_STYLES.get(verdict.word, "") if verdict is not None else ""
    return [
        Text(one_line(run["name"], 24) or short),
        verdict_text(run, verdict),
        Text(_first_to_last(run, verdict)),
        _align_right("" if gain is None else f"{gain:+.3f}", style),
        train,
        Text(steps_of(run)),
        _align_right(compact(run["unsound"]) if run["unsound"] else "", "red"),
        _align_right(lasting(seconds_of(run, now()))),
        Text(short),
    ]


def verdict_text(run: RunOverview, verdict: Verdict | None) -> Text:
    """Format a verdict with its mark, and the status of an unfinished run."""
    text = Text(no_wrap=True)
    if run["status"] != "finished":
        text.append(run["status"], style=STATUS_STYLES.get(run["status"], ""))
    if verdict is not None and verdict.word != run["status"]:
        text.append(" " if text else "")
        text.append(
            f"{_MARKS.get(verdict.word, '·')} {verdict.word}",
            style=VERDICT_STYLES.get(verdict.word, ""),
        )
    return text


def _first_to_last(run: RunOverview, verdict: Verdict | None) -> str:
    """Format the mean rewards of the first and last step, with their kind unless validation."""
    if verdict is None or verdict.first is None or verdict.last is None:
        means = {
            "": run["last_val"],
            " greedy": run["last_greedy"],
            " train": run["last_train"],
            " trials": run["last_trial"],
            " mean": run["run_mean"],
        }
        return next((f"{mean:.3f}{kind}" for kind, mean in means.items() if mean is not None), "")
    kind = {"training": " train", "greedy validation": " greedy"}.get(verdict.kind, "")
    return f"{verdict.first['mean']:.3f} → {verdict.last['mean']:.3f}{kind}"


def _interval(group: Group) -> str:
    if group.mean is None or group.low is None or group.high is None:
        return ""
    return f"{group.mean:.3f} ({group.low:.3f} to {group.high:.3f})"


def _describe_run(run: RunOverview, why: Sequence[str], group: Group | None) -> Table:
    quiet = quiet_seconds(run, now())
    note = f"; nothing new for {lasting(quiet)}" if quiet is not None and quiet >= _QUIET else ""
    if run["status"] == "interrupted":
        note = ": its process died without a message"
    started = f"started {run['started_at']:%Y-%m-%d %H:%M:%S} UTC, " if run["started_at"] else ""
    size = f"{compact(run['episodes'])} episodes, {compact(run['tokens'] or 0)} tokens"
    cpu = f", {lasting(run['cpu_seconds'])} of processor time" if run["cpu_seconds"] else ""
    rewards: list[tuple[str, float | None]] = [(name, run[name]) for name in REWARDS]  # type: ignore[literal-required]
    return fields(
        [
            ("run", f"{run['run_id']}  {one_line(run['name'], 40)}"),
            ("status", f"{run['status']}{note}; {started}backbone {run['backbone']}"),
            ("error", one_line(run["error"], 300) if run["error"] else None),
            ("took", f"{size}, {lasting(seconds_of(run, now()))}{cpu}"),
            (
                "reward",
                ", ".join(
                    f"{name} {number(value)}" for name, value in rewards if value is not None
                ),
            ),
            (
                "seeds",
                (
                    f"{group.of or 'reward'} of {len(group.runs)} runs: {_interval(group)}"
                    if group
                    else None
                ),
            ),
            ("why", "\n".join(why[:_REASONS]) if why else None),
        ]
    )
