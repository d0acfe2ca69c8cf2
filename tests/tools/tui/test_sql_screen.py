"""The SQL console: asking, stopping, what goes wrong, the tables, queries kept, export, and hostile
values."""

from __future__ import annotations

import json
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from textual.pilot import Pilot
from textual.widgets import Input, Static, Tree

from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.trace.writer import TraceWriter
from ajet_tools.tui.trace.dialogs import TextScreen
from ajet_tools.tui.trace.run import RunScreen
from ajet_tools.tui.trace.sql import ResultTable, SqlEditor, SqlScreen

pytestmark = pytest.mark.anyio


def said(pilot: Pilot[None]) -> str:
    return str(pilot.app.screen.query_one("#message", Static).render())


def shown(pilot: Pilot[None]) -> str:
    return "\n".join(strip.text for strip in pilot.app.screen._compositor.render_strips())


def result(pilot: Pilot[None]) -> pa.Table:
    return pilot.app.screen.query_one(ResultTable).table


async def opened(pilot: Pilot[None], until: Any, sql: str = "") -> SqlScreen:
    pilot.app.open_sql(sql)
    await until(
        pilot, lambda: isinstance(pilot.app.screen, SqlScreen) and pilot.app.screen.query(SqlEditor)
    )
    screen: SqlScreen = pilot.app.screen
    return screen


@pytest.mark.slow
async def test_a_query_is_typed_asked_and_answered(
    training_trace: Path, viewing: Any, until: Any, own_home: Path
) -> None:
    async with viewing(training_trace) as pilot:
        screen = await opened(pilot, until)
        editor = screen.query_one(SqlEditor)
        editor.text = ""
        await pilot.press(*"select count(*) as n from runs".replace(" ", "_"))
        editor.text = editor.text.replace("_", " ")
        await pilot.press("f5")
        await until(pilot, lambda: "1 row, 1 column" in said(pilot))
        assert result(pilot).to_pylist() == [{"n": 3}]
        await pilot.press("escape")
        await opened(pilot, until)
        assert pilot.app.screen.query_one(SqlEditor).text == "select count(*) as n from runs", (
            "it stands there again"
        )


@pytest.mark.slow
async def test_what_is_wrong_is_a_word(
    training_trace: Path, viewing: Any, until: Any, own_home: Path
) -> None:
    async with viewing(training_trace) as pilot:
        screen = await opened(pilot, until)
        for sql, word in (
            ("DELETE FROM runs", "exactly one SELECT"),
            ("SELECT absent FROM runs", "absent"),
            ("SELECT", "cannot be parsed"),
            ("SELECT 1; SELECT 2", "exactly one"),
            ("FROM read_csv('/etc/passwd')", "the query failed"),
        ):
            screen.query_one(SqlEditor).text = sql
            await pilot.press("f5")
            await until(pilot, lambda word=word: word in said(pilot))
            assert pilot.app.screen is screen and not result(pilot).num_columns


def answering() -> list[int]:
    """Processes of this one that answer questions in SQL."""
    found = []
    for task in Path("/proc/self/task").glob("*/children"):
        for pid in task.read_text().split():
            with suppress(OSError):  # it has ended
                if "ajet_tools.trace.sql.process" in Path(f"/proc/{pid}/cmdline").read_text():
                    found.append(int(pid))
    return found


ENDLESS = (
    "SELECT count(*) FROM range(10000000000) a, range(1000000) b WHERE a.range % 7 = b.range % 11"
)


@pytest.mark.slow
@pytest.mark.parametrize("live", [False, True], ids=["at rest", "live"])
async def test_a_query_is_stopped_in_duckdb_and_the_next_one_answered(
    training_trace: Path, viewing: Any, until: Any, own_home: Path, live: bool
) -> None:
    with ExitStack() as stack:
        if live:
            stack.enter_context(Gateway(stack.enter_context(TraceWriter(training_trace))))
        async with viewing(training_trace) as pilot:
            screen = await opened(pilot, until, ENDLESS)
            await until(pilot, lambda: "F9 stops" in said(pilot))
            await pilot.pause(0.3)  # until DuckDB is at it
            [asked] = answering()
            await pilot.press("f9")
            await until(pilot, lambda: "stopped" in said(pilot))
            await until(pilot, lambda: asked not in answering())
            screen.query_one(SqlEditor).text = "SELECT 2 AS two"
            await pilot.press("f5")
            await until(pilot, lambda: "1 row" in said(pilot))
            assert result(pilot).to_pylist() == [{"two": 2}]
            screen.query_one(SqlEditor).text = ENDLESS
            await pilot.press("f5")
            await until(pilot, lambda: "F9 stops" in said(pilot))
            await pilot.pause(0.3)
            await pilot.press("escape")  # to leave the screen ends it too
            await until(pilot, lambda: not answering())


@pytest.mark.slow
async def test_a_large_result_scrolls_with_a_cursor(
    training_trace: Path, viewing: Any, until: Any, own_home: Path
) -> None:
    async with viewing(training_trace) as pilot:
        await opened(
            pilot, until, "SELECT range AS n, 'x' || range AS t, NULL AS nothing FROM range(300000)"
        )
        await until(pilot, lambda: "300,000 rows, 3 columns" in said(pilot))
        table = pilot.app.screen.query_one(ResultTable)
        table.focus()
        await pilot.press("end", "right")
        await until(
            pilot, lambda: table.cursor_coordinate == (1_999, 1) and "1,999" in shown(pilot)
        )
        assert table.value == "x1999" and "the first 2,000 are shown" in said(pilot)
        await pilot.press("pageup", "up", "home", "down", "left")
        assert table.cursor_coordinate == (1, 0) and " n " in shown(pilot)
        await pilot.press("y")
        assert pilot.app.clipboard == "1"
        await pilot.press("Y")
        assert pilot.app.clipboard.startswith("n\tt\tnothing\n0\tx0\tnull\n1\tx1")
        await pilot.click(ResultTable, offset=(12, 3))
        assert table.cursor_coordinate == (2, 1)


@pytest.mark.slow
async def test_enter_opens_an_id_and_shows_anything_else_whole(
    training_trace: Path, viewing: Any, until: Any, own_home: Path
) -> None:
    async with viewing(training_trace) as pilot:
        await opened(pilot, until, "SELECT run_id, name, config FROM runs ORDER BY run_id")
        await until(pilot, lambda: "3 rows" in said(pilot))
        pilot.app.screen.query_one(ResultTable).focus()
        await pilot.press("down", "right", "enter")
        await until(
            pilot, lambda: isinstance(pilot.app.screen, TextScreen) and "not markup" in shown(pilot)
        )
        assert all(
            part in shown(pilot) for part in ("[bold red]not markup[/]", "\\x07", "\\u202e", "字字")
        )
        assert "\x1b" not in shown(pilot) and "\u202e" not in shown(pilot)
        await pilot.press("y", "escape")
        assert "\x1b" in pilot.app.clipboard, "a copy is exact"
        await pilot.press("up", "right", "enter")
        await until(pilot, lambda: '"scripted": "a.py:b"' in shown(pilot))
        await pilot.press("escape", "left", "left", "enter")
        await until(
            pilot, lambda: isinstance(pilot.app.screen, RunScreen) and pilot.app.screen.panels
        )
        assert pilot.app.screen.run_id == "aaaa0001"


@pytest.mark.slow
async def test_explain(training_trace: Path, viewing: Any, until: Any, own_home: Path) -> None:
    async with viewing(training_trace) as pilot:
        pilot.app.open_sql("EXPLAIN SELECT count(*) FROM runs")
        await until(
            pilot, lambda: isinstance(pilot.app.screen, TextScreen) and "Scan" in shown(pilot)
        )


@pytest.mark.slow
async def test_the_tables_put_names_into_the_query(
    training_trace: Path, viewing: Any, until: Any, own_home: Path
) -> None:
    async with viewing(training_trace, size=(120, 40)) as pilot:
        screen = await opened(pilot, until)
        screen.query_one(SqlEditor).text = ""
        await pilot.press("f4")
        tree = screen.query_one(Tree)
        await until(pilot, lambda: len(tree.root.children) >= 8)
        names = [str(node.label) for node in tree.root.children]
        assert {"runs", "episodes", "calls", "calls_full", "ledger", "feedback"} <= set(names)
        tree.root.children[0].expand()
        await until(pilot, lambda: tree.root.children[0].is_expanded)
        await pilot.press("down", "down", "enter")
        await until(pilot, lambda: screen.query_one(SqlEditor).text == "run_id")
        await pilot.press("f4")
        await until(pilot, lambda: not tree.display)


@pytest.mark.slow
async def test_what_was_asked_before_is_listed_with_examples(
    training_trace: Path, viewing: Any, until: Any, own_home: Path
) -> None:
    async with viewing(training_trace) as pilot:
        screen = await opened(pilot, until, "SELECT 41 + 1 AS answer")
        await until(pilot, lambda: "1 row" in said(pilot))
        screen.query_one(SqlEditor).text = "SELECT 2"
        await pilot.press("f3")
        await until(
            pilot, lambda: "before" in shown(pilot) and "why episodes failed" in shown(pilot)
        )
        await pilot.press("enter")
        await until(pilot, lambda: screen.query_one(SqlEditor).text == "SELECT 41 + 1 AS answer")
        await pilot.press("f3", "escape")
        await until(pilot, lambda: pilot.app.screen is screen)


@pytest.mark.slow
async def test_a_result_is_exported(
    training_trace: Path, viewing: Any, until: Any, own_home: Path, tmp_path: Path
) -> None:
    async with viewing(training_trace) as pilot:
        await opened(pilot, until, "SELECT 1 AS a, 2 AS a, [1, 2] AS l, 'é\n\"' AS t")
        await until(pilot, lambda: "1 row" in said(pilot))
        expected = [
            f"written to {tmp_path / name}" for name in ("out.csv", "out.jsonl", "out.parquet")
        ]
        for name, words in zip(
            ("out.csv", "out.jsonl", "out.parquet", "out.csv"), [*expected, "exists;"], strict=True
        ):
            await pilot.press("f8")
            pilot.app.screen.query_one("#file Input", Input).value = str(tmp_path / name)
            await pilot.press("enter")
            await until(pilot, lambda words=words: words in said(pilot) + shown(pilot))
    row = {"a": 1, "a:1": 2, "l": [1, 2], "t": 'é\n"'}
    assert pq.read_table(tmp_path / "out.parquet").to_pylist() == [row]
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == [row]
    assert (tmp_path / "out.csv").read_text() == 'a,a:1,l,t\n1,2,"[1, 2]","é\n"""\n'
    assert [path.name for path in tmp_path.glob(".out*")] == []


@pytest.mark.slow
async def test_an_export_without_a_result_or_with_an_odd_name(
    training_trace: Path, viewing: Any, until: Any, own_home: Path
) -> None:
    async with viewing(training_trace) as pilot:
        await opened(pilot, until)
        await pilot.press("f8")
        assert "no result to export" in said(pilot)
        await pilot.press("f5")
        await until(pilot, lambda: "3 rows" in said(pilot))
        await pilot.press("f8")
        pilot.app.screen.query_one("#file Input", Input).value = "result.xls"
        await pilot.press("enter")
        await until(pilot, lambda: "end in .csv" in shown(pilot))
        await pilot.press("escape")
        assert isinstance(pilot.app.screen, SqlScreen) and isinstance(pilot.app.focused, SqlEditor)
