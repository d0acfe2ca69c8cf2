"""Screen with the list of runs, their status and verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypedDict

from rich.table import Table
from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Static

from ajet_sdk.types import now
from ajet_tools.text.clean import one_line, short_ids
from ajet_tools.text.tables import compact, fields, lasting, number
from ajet_tools.trace import queries
from ajet_tools.trace.compare.reasons import reasons
from ajet_tools.trace.compare.verdict import Verdict, verdicts
from ajet_tools.trace.queries.experiments import Group, Settings, differing, seed_groups
from ajet_tools.trace.queries.runs import REWARDS, RunOverview, quiet_seconds, seconds_of, steps_of
from ajet_tools.tui.trace.screen import TraceScreen
from ajet_tools.tui.widgets.chart import sparkline
from ajet_tools.tui.widgets.listing import ListingTable
from ajet_tools.tui.widgets.listing_rows import Column

STATUS_STYLES = {"running": "bold cyan", "failed": "bold red", "interrupted": "yellow"}
VERDICT_STYLES = {
    "learned": "green", "learned?": "yellow", "worse": "red", "collapsed": "bold red", "all failed": "bold red",
}  # fmt: skip
_MARKS = {"learned": "▲", "learned?": "▲", "worse": "▼", "collapsed": "▼"}
_TONES = {"green": "good", "yellow": "warn", "red": "bad", "bold red": "bad"}
_CURVE = 8
_QUIET = 60.0
_REASONS = 4


class RunRow(TypedDict):
    """A row of the list: a run, or a group of runs that differ by their seed."""

    run: RunOverview
    short: str
    """The id, as short as it is unique."""
    verdict: Verdict | None
    group: Group | None


@dataclass(frozen=True)
class RunRows:
    rows: Sequence[RunRow]

    @property
    def count(self) -> int:
        return len(self.rows)

    def ids(self, start: int = 0, stop: int | None = None) -> list[str]:
        return [row["run"]["run_id"] for row in self.rows[start:stop]]


class RunsScreen(TraceScreen):
    """Lists the runs, newest first, with details of the run under the cursor."""

    DEFAULT_CSS = """
    RunsScreen #run { height: auto; max-height: 11; border-top: solid $primary; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("w", "explain", "Why"),
        Binding("c", "curves", "Compare"),
        Binding("g", "group", "Group runs that differ by their seed", show=False),
        Binding("e", "episodes", "Episodes"),
        Binding("y", "copy", "Copy id"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[RunOverview] = []
        self.verdicts: dict[str, Verdict] = {}
        self.reasons: dict[str, list[str]] = {}
        """Reasons of verdicts, for runs that had the cursor since the last reading."""
        self.loaded = False
        self.groups: dict[str, Group] = {}
        """Group of each run that has other seeds."""
        self._settings: dict[str, Settings] = {}
        self.grouped = False
        """Whether groups have a single row."""

    def compose_body(self) -> ComposeResult:
        yield ListingTable(_COLUMNS, self._fetch_page)
        yield Static(id="run")

    def on_mount(self) -> None:
        self.table.focus()
        self.set_interval(1.0, self._show_times)

    @property
    def table(self) -> ListingTable:
        return self.query_one(ListingTable)

    async def _fetch_page(self, rows: RunRows, offset: int, limit: int) -> Sequence[RunRow]:
        return rows.rows[offset : offset + limit]

    async def read(self) -> None:
        runs = await self.app.ask(queries.overview)
        self.verdicts = await self.app.ask(verdicts, runs)
        self.reasons = {}
        ids = [run["run_id"] for run in runs]
        # configs do not change, so they are read for new runs alone
        if ids != [*self._settings]:
            self._settings = await self.app.ask(differing, ids)
        self.runs = runs
        self.groups = {}
        for group in seed_groups(self.runs, self._settings):
            self.groups |= dict.fromkeys(group.runs, group)
        self.loaded = True
        self._fill()
        self._explain()

    def _fill(self) -> None:
        short = short_ids([run["run_id"] for run in self.runs])
        rows: list[RunRow] = []
        for run in self.runs:
            run_id = run["run_id"]
            group = self.groups.get(run_id) if self.grouped else None
            if group is not None and group.runs[0] != run_id:
                continue
            verdict = self.verdicts.get(run_id)
            rows.append(RunRow(run=run, short=short[run_id], verdict=verdict, group=group))
        self.table.show(RunRows(rows))
        self._describe()

    def _members(self, run_id: str) -> Sequence[str]:
        """Return the runs of its group, newest first, or only itself."""
        if run_id in self.groups:
            return self.groups[run_id].runs
        return (run_id,)

    @property
    def chosen(self) -> RunOverview | None:
        """Run under the cursor."""
        run_id = self.table.cursor_id
        for run in self.runs:
            if run["run_id"] == run_id:
                return run
        return None

    def on_listing_table_moved(self) -> None:
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
        if any(run["status"] == "running" for run in self.runs):
            self.table.redraw()
            self._describe()

    def _describe(self) -> None:
        details = self.query_one("#run", Static)
        run = self.chosen
        if run is None:
            details.update("No run yet; this list follows the trace." if self.loaded else "…")
            return
        why = self.reasons.get(run["run_id"], [])
        details.update(_describe_run(run, why, self.groups.get(run["run_id"])))

    def on_listing_table_opened(self, event: ListingTable.Opened) -> None:
        self.app.open_run(event.id)

    def action_explain(self) -> None:
        if self.chosen:
            self.app.open_explanation(self.chosen["run_id"])

    def action_group(self) -> None:
        self.grouped = not self.grouped and bool(self.groups)
        if not self.groups:
            self.notify("no runs differ by their seed only", timeout=2)
        self._fill()

    def action_curves(self) -> None:
        """Compare the selected runs, or the run under the cursor with its other seeds."""
        named = set(self.table.selected)
        if self.grouped:
            for run_id in self.table.selected:
                named.update(self._members(run_id))
        if not named and self.chosen:
            named.update(self._members(self.chosen["run_id"]))
        run_ids = [run["run_id"] for run in self.runs if run["run_id"] in named]
        if run_ids:
            self.app.open_many_runs(run_ids)

    def action_episodes(self) -> None:
        self.app.open_episodes(self.chosen["run_id"] if self.chosen else None)

    def action_copy(self) -> None:
        if self.chosen:
            self.app.copy(self.chosen["run_id"], "the run's id")


def _name(row: RunRow) -> str:
    if row["group"] is None:
        name = row["run"]["name"]
    else:
        name = row["group"].name
    return one_line(name, 24) or row["short"]


def _verdict(row: RunRow) -> str:
    if row["group"] is not None:
        return f"{len(row['group'].runs)} seeds"
    return verdict_text(row["run"], row["verdict"]).plain


def _verdict_tone(row: RunRow) -> str:
    if row["verdict"] is None:
        return _TONES.get(STATUS_STYLES.get(row["run"]["status"], ""), "")
    return _TONES.get(VERDICT_STYLES.get(row["verdict"].word, ""), "")


def _validation(row: RunRow) -> str:
    if row["group"] is not None:
        return _interval(row["group"])
    return _first_to_last(row["run"], row["verdict"])


def _change(row: RunRow) -> str:
    if row["group"] is not None or row["verdict"] is None or row["verdict"].gain is None:
        return ""
    return f"{row['verdict'].gain:+.3f}"


def _train(row: RunRow) -> str:
    if row["group"] is not None:
        return ""
    last = row["run"]["last_train"]
    curve = sparkline(row["run"]["rewards"], _CURVE)
    if last is None:
        return curve
    return f"{curve} {number(last)}"


def _failed(row: RunRow) -> str:
    if row["run"]["unsound"]:
        return compact(row["run"]["unsound"])
    return ""


_COLUMNS: tuple[Column[Any], ...] = (
    Column("name", "name", 14, _name, most=24),
    Column("verdict", "verdict", 14, _verdict, tone=_verdict_tone),
    Column("validation", "validation", 22, _validation),
    Column("change", "change", 6, _change, right=True, tone=_verdict_tone),
    Column("train", "train", 14, _train),
    Column("step", "step", 6, lambda row: steps_of(row["run"])),
    Column("failed", "failed", 6, _failed, right=True, tone=lambda row: "bad"),
    Column("time", "time", 7, lambda row: lasting(seconds_of(row["run"], now())), right=True),
    Column("run", "run", 8, lambda row: row["short"], most=12),
)


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
    note = ""
    if quiet is not None and quiet >= _QUIET:
        note = f"; nothing new for {lasting(quiet)}"
    if run["status"] == "interrupted":
        note = ": its process died without a message"
    started = ""
    if run["started_at"]:
        started = f"started {run['started_at']:%Y-%m-%d %H:%M:%S} UTC, "
    size = f"{compact(run['episodes'])} episodes, {compact(run['tokens'] or 0)} tokens"
    cpu = ""
    if run["cpu_seconds"]:
        cpu = f", {lasting(run['cpu_seconds'])} of processor time"
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
