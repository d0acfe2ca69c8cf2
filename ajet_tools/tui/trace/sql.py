"""Read-only SQL console over a trace, with an editor, results, and a list of earlier queries and
examples."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import OptionList, Static, TextArea, Tree
from textual.widgets.option_list import Option
from textual.worker import Worker

from ajet_sdk.errors import AjetError, QueryError
from ajet_sdk.protocols import Stop, TraceReader
from ajet_sdk.reporting.output import visible
from ajet_sdk.trace.query import rows_of, values_of
from ajet_tools.text.clean import counted, one_line
from ajet_tools.text.tables import number
from ajet_tools.trace.sql import console
from ajet_tools.trace.sql.process import SqlProcess
from ajet_tools.tui.base import Dialog
from ajet_tools.tui.trace.dialogs import TextScreen
from ajet_tools.tui.trace.screen import READ_ONLY, FittedTable, TraceScreen, TraceViewer
from ajet_tools.tui.widgets.lines import Prompt, remember

_FIRST = "SELECT * FROM runs"

EXAMPLES: Mapping[str, str] = {
    "reward by step": (
        "SELECT step, split, count(DISTINCT episode_id) AS episodes, avg(value * weight) AS"
        " reward\nFROM episodes JOIN rewards USING (episode_id)\nGROUP BY ALL ORDER BY ALL"
    ),
    "why episodes failed": (
        "SELECT cause, status, count(*) AS episodes, any_value(error) AS example\n"
        "FROM episodes WHERE status <> 'succeeded'\nGROUP BY ALL ORDER BY episodes DESC"
    ),
    "hardest tasks": (
        "SELECT task_id, count(*) AS attempts, avg(value * weight) AS reward,"
        " any_value(task->>'main_query') AS query\nFROM episodes JOIN rewards USING"
        " (episode_id)\nGROUP BY task_id ORDER BY reward LIMIT 50"
    ),
    "slowest calls": (
        "SELECT call_id, agent, epoch(ended_at - started_at) AS seconds, len(output_ids) AS tokens,"
        " finish_reason\nFROM calls ORDER BY seconds DESC LIMIT 50"
    ),
    "least likely tokens": (
        "SELECT call_id, episode_id, list_min(logprobs) AS lowest, list_avg(logprobs) AS mean\n"
        "FROM calls WHERE len(logprobs) > 0 ORDER BY lowest LIMIT 50"
    ),
    "what became of the tokens": (
        "SELECT step, outcome, sum(tokens) AS tokens FROM ledger\nGROUP BY ALL ORDER BY step,"
        " tokens DESC"
    ),
}
"""Example queries by name."""

_IDS = ("run_id", "episode_id", "call_id", "parent_call_id")


class SqlScreen(TraceScreen):
    """Editor and result, with an optional tree of tables and columns."""

    TITLE = "ajet"
    SUB_TITLE = "SQL"
    DEFAULT_CSS = """
    SqlScreen SqlEditor { height: 8; border: round $primary; }
    SqlScreen SqlEditor:focus { border: round $accent; }
    SqlScreen #message { height: auto; max-height: 6; padding: 0 1; background: $panel; }
    SqlScreen ResultTable { height: 1fr; }
    SqlScreen Tree { width: 34; display: none; border-right: solid $primary; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f5,ctrl+r", "ask", "Run", priority=True, key_display="F5"),
        Binding("f3", "queries", "Queries", priority=True, key_display="F3"),
        Binding("f4", "tables", "Tables", priority=True, key_display="F4"),
        Binding("f8", "export", "Export", priority=True, key_display="F8"),
        Binding("f1", "app.keys", "Keys", priority=True, key_display="F1"),
        Binding("f9", "stop", "Stop", priority=True, show=False),
        Binding("y", "copy", "Copy cell", show=False),
        Binding("Y", "copy_result", "Copy the result as tab-separated text", show=False),
    ]

    def __init__(self, text: str = "", *, ask: bool = True) -> None:
        super().__init__()
        self.first_text = text
        self._asks = ask  # the query of a link only runs after its user has seen it
        self.running_query: Worker[None] | None = None
        self._stop = Stop()
        self._process: SqlProcess | None = None
        self._asked = text

    @property
    def address(self) -> str:
        """Address with the last query, or the initial one."""
        return f"sql:{self._asked}"

    def compose_body(self) -> ComposeResult:
        with Horizontal():
            yield Tree("tables", id="tables")
            with Vertical():
                yield SqlEditor(
                    self.first_text or self.app.last_sql or _FIRST, show_line_numbers=False
                )
                yield Static(id="message")
                yield ResultTable()
        yield Prompt("export to", "a new file: .csv, .jsonl or .parquet", back=SqlEditor, id="file")

    def on_mount(self) -> None:
        self._process = SqlProcess(self.app.path, read_only=self.app.read_only)
        self._show_message("F5 runs it; one SELECT, read-only, stopped after 30 s")
        editor = self.query_one(SqlEditor)
        editor.move_cursor(editor.document.end)
        editor.focus()
        if self.first_text and self._asks:
            self.action_ask()

    def on_text_area_changed(self, event: SqlEditor.Changed) -> None:
        """Save the text for the next console."""
        self.app.last_sql = event.text_area.text

    @property
    def sql(self) -> str:
        """The selected text, or else the whole text."""
        editor = self.query_one(SqlEditor)
        return editor.selected_text.strip() or editor.text.strip()

    def _show_message(self, text: str, style: str = "dim") -> None:
        for line in self.query("#message").results(Static):
            line.update(Text(visible(text), style=style))

    def action_ask(self) -> None:
        self.action_stop()
        self._asked = self.sql
        self.running_query = self._ask(self._asked)

    @work
    async def _ask(self, sql: str) -> None:
        self._show_message("asking … F9 stops", "italic")
        self.query_one(ResultTable).loading = True
        started, self._stop = time.perf_counter(), Stop()
        try:
            result = await self.app.ask(self._answer, sql, self._stop)
        except AjetError as error:
            self._show_message(str(error), "bold red")
        except asyncio.CancelledError:
            self._show_message("stopped")
            raise
        else:
            self._show(result, time.perf_counter() - started)
            remember(self.app.queries, sql)
        finally:
            for table in self.query(ResultTable):  # none after the screen was closed
                table.loading = False

    def _answer(self, reader: TraceReader, sql: str, stop: Stop) -> pa.Table:
        """Run the query in the child process, not with the reader of the viewer."""
        if self._process is None:
            raise QueryError("the console has been left")
        return self._process.ask(sql, stop)

    def _show(self, result: pa.Table, seconds: float) -> None:
        if result.column_names == ["explain_key", "explain_value"]:
            self.app.push_screen(
                TextScreen("explain", lambda: "\n".join(result["explain_value"].to_pylist()))
            )
        self.query_one(ResultTable).show(result)
        rows, columns = counted(len(result), "row"), counted(result.num_columns, "column")
        cut = (
            f"; the first {MOST_ROWS:,} are shown, F8 writes all" if len(result) > MOST_ROWS else ""
        )
        self._show_message(f"{rows}, {columns}, {seconds:.2f} s{cut}", "")

    def action_stop(self) -> None:
        """Stop the query and its process; the next query starts another one."""
        if self.running_query is not None and self.running_query.is_running:
            self._stop.set()
            self.running_query.cancel()

    def on_unmount(self) -> None:
        process, self._process = self._process, None
        self._stop.set()
        if process is not None:
            process.close()

    @work
    async def action_queries(self) -> None:
        chosen = await self.app.push_screen_wait(QueriesScreen(self.app.queries))
        if chosen:
            editor = self.query_one(SqlEditor)
            editor.text = chosen
            editor.focus()

    @work
    async def action_tables(self) -> None:
        """Show or hide the tables; enter inserts a name into the query."""
        tree = self.query_one(Tree)
        tree.display = not tree.display
        if not tree.display:
            self.query_one(SqlEditor).focus()
            return
        tree.focus()
        if not tree.root.children:
            for table, columns in (await self.app.ask(console.tables)).items():
                branch = tree.root.add(table, data=table)
                for column, kind in columns.items():
                    label = Text(column).append(f"  {kind.lower()}", style="dim")
                    branch.add_leaf(
                        label, data=f'"{column}"' if column in ("index", "at") else column
                    )
            tree.root.expand()

    def on_tree_node_selected(self, event: Tree.NodeSelected[str]) -> None:
        if event.node.data and not event.node.children:
            self.query_one(SqlEditor).insert(event.node.data)

    def action_export(self) -> None:
        if self.app.read_only:
            self._show_message(str(READ_ONLY), "bold red")
        elif self.query_one(ResultTable).table.num_columns:
            self.query_one("#file", Prompt).open("result.csv")
        else:
            self._show_message("there is no result to export; F5 runs the query", "bold red")

    async def on_prompt_submitted(self, event: Prompt.Submitted) -> None:
        path = Path(event.text)
        try:
            count = await asyncio.to_thread(
                console.save_result, self.query_one(ResultTable).table, path
            )
        except AjetError as error:
            event.prompt.show_error(str(error))
            return
        event.prompt.close()
        self._show_message(f"{counted(count, 'row')} written to {path}", "")

    def on_data_table_cell_selected(self) -> None:
        """Open an id, or show another value whole."""
        table = self.query_one(ResultTable)
        column, value = table.column, table.value
        if column in _IDS and isinstance(value, str):
            self.app.open_found(value)
        else:
            self.app.push_screen(TextScreen(column, lambda: console.spelled(value)))

    def action_copy(self) -> None:
        table = self.query_one(ResultTable)
        if table.row_count:
            self.app.copy(console.spelled(table.value), table.column)

    def action_copy_result(self) -> None:
        """Copy the first thousand rows for a spreadsheet."""
        table = self.query_one(ResultTable).table.slice(0, 1000)
        lines = ["\t".join(table.column_names)]
        lines += [
            "\t".join(" ".join(console.spelled(v).split()) for v in row.values())
            for row in rows_of(table)
        ]
        self.app.copy("\n".join(lines), counted(len(table), "row"))


MOST_ROWS = 2_000
"""Maximum number of shown rows: a DataTable measures every cell, this many in half a second."""
_WIDEST = 48
"""Maximum number of characters in a cell."""


class ResultTable(FittedTable):
    """The first rows of a result."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("home,g", "scroll_top", "First row", show=False),
        Binding("end,G", "scroll_bottom", "Last row", show=False),
    ]

    def __init__(self) -> None:
        super().__init__(zebra_stripes=True)
        self.table: pa.Table = pa.table({})

    def show(self, table: pa.Table) -> None:
        """Show another result from its first row."""
        self.table = table
        self.clear(columns=True)
        self.add_columns(*(Text(one_line(name, _WIDEST)) for name in table.column_names))
        columns = (
            [_text(value) for value in values_of(column[:MOST_ROWS])] for column in table.columns
        )
        self.add_rows(zip(*columns, strict=True))

    @property
    def column(self) -> str:
        """Name of the column under the cursor."""
        name: str = self.table.column_names[self.cursor_column]
        return name

    @property
    def value(self) -> object:
        """Value under the cursor."""
        [value] = values_of(self.table[self.cursor_column].slice(self.cursor_row, 1))
        return value


def _text(value: object) -> Text:
    """Format a value as a cell."""
    if value is None:
        return Text("")
    if isinstance(value, bool):
        return Text(str(value).lower())
    if isinstance(value, Decimal) and value == value.to_integral_value():
        value = int(value)
    if isinstance(value, int | float):
        return Text(number(value), justify="right")
    if isinstance(value, list):
        value = value[:_WIDEST]
    return Text(one_line(value if isinstance(value, str | list | dict) else str(value), _WIDEST))


class QueriesScreen(Dialog[str]):
    """Lists queries, and returns the selected one or None."""

    app: TraceViewer
    DEFAULT_CSS = """
    QueriesScreen > Vertical { width: 90%; height: 85%; padding: 0; }
    QueriesScreen OptionList { height: 1fr; border: none; }
    QueriesScreen Static { height: 6; padding: 0 1; border-top: solid $primary; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "Close"),
    ]

    def __init__(self, asked: Sequence[str]) -> None:
        super().__init__()
        self.listed = [("before", one_line(sql, 120), sql) for sql in reversed(asked)]
        self.listed += [("example", name, sql) for name, sql in EXAMPLES.items()]
        """Kind, name, SQL."""

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "queries"
            box.border_subtitle = "enter takes it · escape closes"
            yield OptionList()
            yield Static()

    def on_mount(self) -> None:
        options = self.query_one(OptionList)
        for kind, name, _ in self.listed:
            line = Text(f"{kind:8}", style="dim", no_wrap=True, overflow="ellipsis")
            options.add_option(Option(line.append(one_line(name), style="not dim")))
        options.highlighted = 0
        options.focus()

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        self.query_one(Static).update(Text(visible(self.listed[event.option_index][2])))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self.listed[event.option_index][2])


_WORDS = (
    "all and any anti as asc between by case cast cross desc distinct else end except exclude"
    " exists explain false filter following from full group having in inner intersect is join"
    " lateral left like ilike limit not null nulls offset on or order outer over partition pivot"
    " positional preceding qualify range recursive replace right rows sample select semi struct"
    " then true unbounded union unnest unpivot using values when where window with"
)

_PARTS = re.compile(
    r"(?P<comment>--[^\n]*|/\*.*?(?:\*/|\Z))|(?P<string>'(?:[^']|'')*(?:'|\Z))|(?P<property>\"(?:[^\"]|\"\")*(?:\"|\Z))"
    rf"|(?P<number>\b\d+(?:\.\d+)?\b)|(?P<keyword>\b(?:{'|'.join(_WORDS.split())})\b)|(?P<function>\b\w+(?=\())",
    re.I | re.S,
)


class SqlEditor(TextArea):
    """A text area that highlights DuckDB's SQL without a parser."""

    def _build_highlight_map(self) -> None:
        self._line_cache.clear()
        self._highlights.clear()
        text = self.text
        for match in _PARTS.finditer(text):
            row = text.count("\n", 0, match.start())
            column = match.start() - (text.rfind("\n", 0, match.start()) + 1)
            for line in match.group().split("\n"):
                before = self.document.get_line(row)[:column]
                start = len(before.encode())
                self._highlights[row].append(
                    (start, start + len(line.encode()), match.lastgroup or "")
                )
                row, column = row + 1, 0
