"""Screen that compares runs: curves, and a heat map of tasks by runs (of a single run, by
steps)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.color import Color

from ajet_tools.text import tables
from ajet_tools.text.clean import one_line
from ajet_tools.text.conditions import literal
from ajet_tools.trace import queries
from ajet_tools.trace.queries.experiments import (
    TaskReward,
    TaskRow,
    by_task,
    leaderboard,
    reward_panel,
    run_names,
    task_rewards,
)
from ajet_tools.tui.trace.dialogs import TextScreen, text_width
from ajet_tools.tui.trace.screen import FittedTable, TraceScreen
from ajet_tools.tui.widgets.chart import Chart


class ManyRunsScreen(TraceScreen):
    """Shows mean rewards of validation, or else of training, with the most different tasks
    first."""

    DEFAULT_CSS = """
    ManyRunsScreen Chart { height: 2fr; }
    ManyRunsScreen DataTable { height: 3fr; border-top: solid $primary; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("d", "leaderboard", "Who solves the task best"),
    ]

    def __init__(self, run_ids: Sequence[str]) -> None:
        super().__init__()
        self.run_ids = tuple(run_ids)
        self.title = f"{len(run_ids)} runs" if len(run_ids) > 1 else f"run {run_ids[0][:12]}"
        self.rewards: list[TaskReward] = []
        self.rows: list[TaskRow] = []

    def compose_body(self) -> ComposeResult:
        yield Chart(head=3)
        yield FittedTable(fixed_columns=1, zebra_stripes=False)

    async def read(self) -> None:
        rewards = await self.app.ask(task_rewards, self.run_ids)
        if rewards == self.rewards:
            return
        runs = [
            run for run in await self.app.ask(queries.overview) if run["run_id"] in self.run_ids
        ]
        self.rewards, names = rewards, run_names(runs)
        self.query_one(Chart).show(reward_panel(rewards, names))
        self.rows = by_task(rewards, "run_id" if len(self.run_ids) > 1 else "step")
        self._fill(names)

    def _fill(self, names: dict[str, str]) -> None:
        table = self.query_one(FittedTable)
        scroll, cursor = table.scroll_offset, table.cursor_coordinate
        there = {column for row in self.rows for column in row.rewards}
        columns: list[str | int] = [run_id for run_id in names if run_id in there]
        columns = columns or sorted(there)
        values = [value for row in self.rows for value in row.rewards.values()]
        with self.app.batch_update():
            table.clear(columns=True)
            table.add_column("task")
            for column in columns:
                table.add_column(
                    Text(one_line(names.get(str(column), f"step {column}"), 24), justify="right")
                )
            for row in self.rows:
                cells = [
                    self._cell(row.rewards.get(column), min(values), max(values))
                    for column in columns
                ]
                table.add_row(Text(one_line(row.task, 40)), *cells)
            table.move_cursor(row=cursor.row, column=cursor.column, animate=False)
            table.scroll_to(*scroll, animate=False, force=True)

    def _cell(self, value: float | None, low: float, high: float) -> Text:
        """Format a value on a colour between those of the lowest and highest."""
        if value is None:
            return Text("·", justify="right", style="dim")
        worst, best = (
            Color.parse(self.app.theme_variables.get(name, "#808080"))
            for name in ("error", "success")
        )
        color = worst.blend(best, (value - low) / (high - low) if high > low else 1.0)
        style = Style(bgcolor=color.rich_color, color=color.get_contrast_text(1.0).rich_color)
        return Text(f" {value:.3g} ".rjust(8), style=style, justify="right")

    @property
    def chosen(self) -> TaskRow | None:
        """Task under the cursor."""
        at = self.query_one(FittedTable).cursor_row
        return self.rows[at] if 0 <= at < len(self.rows) else None

    def on_data_table_cell_selected(self) -> None:
        self.action_open()

    def action_open(self) -> None:
        """Open the episodes of the task under the cursor."""
        if self.chosen:
            single = self.run_ids[0] if len(self.run_ids) == 1 else None
            wanted = f"task_id = {literal(self.chosen.task_id)}"
            if single is None:
                wanted += f" and run_id in ({', '.join(map(literal, self.run_ids))})"
            self.app.open_episodes(single, wanted)

    def action_leaderboard(self) -> None:
        """Rank all runs of the trace at the task under the cursor."""
        if not self.chosen:
            return
        task_id, width, reader, console = (
            self.chosen.task_id,
            text_width(self.app),
            self.app.reader,
            self.app.console,
        )

        def render() -> str:
            table = tables.table(leaderboard(reader, queries.overview(reader), task_id), width)
            lines = console.render_lines(table, console.options.update(width=width))
            return "\n".join("".join(segment.text for segment in line).rstrip() for line in lines)

        self.app.push_screen(TextScreen(self.chosen.task, render))
