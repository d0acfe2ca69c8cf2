"""`ajet dataset view` by its keys, on real files; how it looks; and what it says where it cannot
open."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Button, Input, Static, TextArea
from typer.testing import CliRunner

from ajet_sdk.errors import TaskError
from ajet_tools.cli.app import app
from ajet_tools.dataset.files.tables import read
from ajet_tools.dataset.review.review import Review
from ajet_tools.tui.dataset.app import DatasetApp, RowsScreen
from ajet_tools.tui.dataset.edit import EditScreen
from ajet_tools.tui.dataset.row import RowScreen
from ajet_tools.tui.dataset.save import SaveScreen
from ajet_tools.tui.widgets.long_text import LongText
from tests.tools.terminal import in_terminal
from tests.waiting import until_shown

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("lasting_notices")]

EVIL = "[bold red]not markup[/] \x1b[31mred\x07 \u202eback 字字"


def row(i: int) -> dict[str, Any]:
    verdict = {"verifier": "agreement:3", "ok": i % 4 != 3, "reason": "2 of 3 independent answers agree",
               "details": {"answers": ["42", "84/2", "41"], "votes": 2, "of": 3}}  # fmt: skip
    return {
        "main_query": EVIL if i == 5 else f"What is {i} + 1?",
        "metadata": {"answer": str(i + 1), "level": i % 3},
        "provenance": {
            "source": "expand",
            "prompt": {"name": "expand/harder", "version": "1"},
            "model": "writer",
            "parameters": {"strategy": ("harder", "persona")[i % 2]},
            "verdict": verdict,
        },
    }


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Forty rows, in the current directory."""
    monkeypatch.chdir(tmp_path)
    path = Path("tasks.jsonl")
    path.write_text("".join(json.dumps(row(i)) + "\n" for i in range(40)))
    return path


@asynccontextmanager
async def viewing(
    path: Path, *, size: tuple[int, int] = (100, 30), filter: str = "", sample: int | None = None
) -> AsyncIterator[Pilot[None]]:
    view = DatasetApp(Review(str(path), sample=sample), filter)
    async with view.run_test(size=size, notifications=True) as pilot:
        await until_shown(
            pilot,
            lambda: (
                isinstance(view.screen, RowsScreen) and view.review.loaded and not at_work(pilot)
            ),
        )
        yield pilot
    view.review.close()


def at_work(pilot: Pilot[None]) -> bool:
    return any(not worker.is_finished for worker in pilot.app.workers)


async def press(pilot: Pilot[None], *keys: str) -> None:
    for key in keys:
        await pilot.press(key)
        await pilot.pause()
        await until_shown(pilot, lambda: not at_work(pilot))


async def typed(pilot: Pilot[None], text: str) -> None:
    pilot.app.screen.query_one("Prompt:focus-within Input", Input).value = text
    await press(pilot, "enter")


def rows(pilot: Pilot[None]) -> RowsScreen:
    assert isinstance(pilot.app.screen, RowsScreen)
    return pilot.app.screen


def review(pilot: Pilot[None]) -> Review:
    assert isinstance(pilot.app, DatasetApp)
    return pilot.app.review


def said(pilot: Pilot[None], where: str = "ReviewStatus") -> str:
    return str(pilot.app.screen.query_one(where, Static).render())


@pytest.mark.slow
async def test_a_and_x_decide_and_go_on_and_u_goes_back(tasks: Path) -> None:
    async with viewing(tasks) as pilot:
        await press(pilot, "a", "x", "down", "a")
        assert [review(pilot).mark_of(i) for i in range(4)] == [
            "accepted",
            "rejected",
            None,
            "accepted",
        ]
        assert rows(pilot).table.cursor == 4
        assert "2 accepted · 1 rejected · not saved" in said(pilot)
        await press(pilot, "u", "u")
        assert review(pilot).marks == {"accepted": 1, "edited": 0} and rows(pilot).table.cursor == 1
        await press(pilot, "u", "u")
        assert not review(pilot).decisions and "not saved" not in said(pilot)


async def test_a_selection_is_decided_on_at_once(tasks: Path) -> None:
    async with viewing(tasks) as pilot:
        await press(pilot, "shift+down", "shift+down", "x")
        assert [review(pilot).mark_of(i) for i in range(4)] == ["rejected"] * 3 + [None]
        await press(pilot, "u")
        assert not review(pilot).decisions
        await press(pilot, "ctrl+a", "a")
        assert review(pilot).marks["accepted"] == 40


@pytest.mark.slow
async def test_filter_search_and_what_is_left_to_do(tasks: Path) -> None:
    async with viewing(tasks, filter="metadata.level=1") as pilot:
        await until_shown(pilot, lambda: rows(pilot).table.count == 13)
        await press(pilot, "a", "a", "t")
        assert rows(pilot).table.count == 11 and "only undecided" in said(pilot)
        await press(pilot, "escape", "ctrl+f")
        assert rows(pilot).table.count == 40
        await typed(pilot, "is 3")
        assert rows(pilot).table.cursor == 30  # from where the cursor is
        await press(pilot, *["n"] * 10)  # the last, and round the end
        assert rows(pilot).table.cursor == 3 and "have 'is 3'" in said(pilot)
        await press(pilot, "slash")
        await typed(pilot, "metadata.levle=1")
        wrong = said(pilot, "#filter #wrong")
        assert "did you mean metadata.level" in wrong and rows(pilot).table.count == 40
        await typed(pilot, "metadata.level=")
        assert "a value is missing" in said(pilot, "#filter #wrong")
        await typed(pilot, "provenance.verdict.ok=false")
        assert rows(pilot).table.count == 10 and not rows(pilot).query_one("#filter").display


@pytest.mark.slow
async def test_a_sample_is_labelled_without_its_verdicts_and_goes_on_where_it_stopped(
    tasks: Path,
) -> None:
    async with viewing(tasks, sample=6) as pilot:
        sampled = review(pilot).sampled
        assert (
            sampled is not None
            and rows(pilot).table.number == sampled[0]
            and rows(pilot).table.count == 6
        )
        assert "independent answers agree" not in said(pilot, "RowPane Static")
        assert all(column.title != "verified" for column in rows(pilot).table.columns)
        await press(pilot, "a")
        assert rows(pilot).table.number == sampled[1] and "random sample: 1 of 6 labelled" in said(
            pilot
        )
        await press(pilot, "x", "up")
        assert rows(pilot).table.number == sampled[1]
        assert "independent answers agree" in said(pilot, "RowPane Static")
        await press(pilot, "slash")
        await typed(pilot, f"main_query~'What is {sampled[4]} '")
        assert rows(pilot).table.numbers == [sampled[4]] and rows(pilot).table.count == 1
        await press(pilot, "escape")
        assert rows(pilot).table.count == 6
    async with viewing(tasks, sample=6) as pilot:
        assert review(pilot).sampled == sampled and rows(pilot).table.number == sampled[2]


async def test_an_answer_is_edited_in_a_form(tasks: Path) -> None:
    async with viewing(tasks) as pilot:
        await press(pilot, "e")
        assert isinstance(pilot.app.screen, EditScreen)
        focused = pilot.app.focused
        assert (
            isinstance(focused, TextArea) and focused.text == "1"
        )  # the answer, which is what is wrong mostly
        await press(pilot, "end", "0", "ctrl+s")
        assert review(pilot).row(0).values["metadata"] == {"answer": "10", "level": 0}
        assert review(pilot).row(0).values["provenance"]["edited"] == ["metadata.answer"]
        await until_shown(pilot, lambda: rows(pilot).table.row(0) is not None)
        shown = rows(pilot).table.row(0)
        assert shown is not None and shown["values"]["metadata"]["answer"] == "10"


@pytest.mark.slow
async def test_what_is_no_row_is_not_kept_and_what_was_typed_is_not_lost_by_one_key(
    tasks: Path,
) -> None:
    async with viewing(tasks) as pilot:
        await press(pilot, "E")
        area = pilot.app.screen.query_one("#whole", TextArea)
        area.text = '{"main_query": "Half'
        await press(pilot, "ctrl+s")
        assert "invalid JSON" in said(pilot, "#wrong")
        area.text = json.dumps({**row(0), "metadata": {"answer": 1}})
        await press(pilot, "ctrl+s")
        assert "metadata.answer is a number, and text in these rows" in said(pilot, "#wrong")
        await press(pilot, "escape")
        assert isinstance(pilot.app.screen, EditScreen) and "escape again" in said(pilot, "#wrong")
        await press(pilot, "escape")
        assert isinstance(pilot.app.screen, RowsScreen) and not review(pilot).decisions
        await press(pilot, "e", "escape")  # nothing was typed: at once
        assert isinstance(pilot.app.screen, RowsScreen)


@pytest.mark.slow
async def test_a_row_whole_with_where_it_is_from_and_how_it_was_verified(tasks: Path) -> None:
    async with viewing(tasks) as pilot:
        pane = str(pilot.app.screen.query_one("RowPane > Static", Static).render())
        for part in (
            "What is 0 + 1?",
            "passed, agreement:3: 2 of 3 independent answers agree",
            '"84/2"',
            "expand/harder",
        ):
            assert part in pane
        await press(pilot, *["down"] * 5, "enter")
        assert isinstance(pilot.app.screen, RowScreen)
        text = pilot.app.screen.query_one(LongText).text
        assert (
            "[bold red]not markup[/] \\x1b[31mred\\x07 \\u202eback" in text and "\x1b" not in text
        )
        await press(pilot, "a")
        assert (
            review(pilot).mark_of(5) == "accepted"
            and "What is 6 + 1?" in pilot.app.screen.query_one(LongText).text
        )
        await press(pilot, "k", "u", "escape")
        assert review(pilot).mark_of(5) is None and rows(pilot).table.cursor == 5


@pytest.mark.slow
async def test_saved_over_itself_the_rest_goes_on(tasks: Path) -> None:
    async with viewing(tasks) as pilot:
        await press(pilot, "x", "a", "ctrl+s")
        assert isinstance(pilot.app.screen, SaveScreen)
        assert (
            said(pilot, "#plan")
            == "replaces tasks.jsonl with 39 rows; 1 rejected to tasks.rejected.jsonl"
        )
        assert len(tasks.read_text().splitlines()) == 40
        await press(pilot, "enter")
        await until_shown(
            pilot, lambda: isinstance(pilot.app.screen, RowsScreen) and review(pilot).loaded
        )
        assert [one.values for one in read(tasks)] == [row(i) for i in range(1, 40)]
        assert review(pilot).mark_of(0) == "accepted" and rows(pilot).table.count == 39
        await press(pilot, "q")
    assert pilot.app.return_code == 0


async def test_another_file_is_replaced_only_when_that_was_said_twice(tasks: Path) -> None:
    Path("other.jsonl").write_text("something of mine\n")
    async with viewing(tasks) as pilot:
        await press(pilot, "a", "ctrl+s")
        pilot.app.screen.query_one(Input).value = "other.jsonl"
        pilot.app.screen.query_one(Button).press()
        await press(pilot, "enter")
        assert isinstance(
            pilot.app.screen, SaveScreen
        ) and "press enter again to replace it" in said(pilot, "#wrong")
        assert Path("other.jsonl").read_text() == "something of mine\n"
        await press(pilot, "ctrl+s")
        await until_shown(pilot, lambda: isinstance(pilot.app.screen, RowsScreen))
        assert [one.values for one in read("other.jsonl")] == [row(0)] and not review(pilot).unsaved


async def test_what_cannot_be_saved_is_said_and_asked_again(tasks: Path) -> None:
    async with viewing(tasks) as pilot:
        await press(pilot, "x", "ctrl+s")
        pilot.app.screen.query_one(Input).value = "tasks.jsonl/below.jsonl"
        await press(pilot, "enter")
        await until_shown(pilot, lambda: "cannot write" in said(pilot, "#wrong"))
        assert isinstance(pilot.app.screen, SaveScreen) and review(pilot).unsaved


async def test_q_leaves_and_decisions_are_there_the_next_time(tasks: Path) -> None:
    async with viewing(tasks) as pilot:
        await press(pilot, "x", "ctrl+q")
        assert "kept in .tasks.jsonl.review.jsonl; nothing is saved yet" in pilot.app.parting  # type: ignore[attr-defined]
    again = Review(str(tasks))
    again.load()
    assert len(again.spool) == 40 and again.mark_of(0) == "rejected"


async def test_decisions_that_no_file_keeps_are_lost_only_where_q_is_pressed_twice(
    tasks: Path,
) -> None:
    view = DatasetApp(Review(str(tasks), mapping={"main_query": "metadata.question"}))
    async with view.run_test(notifications=True) as pilot:
        await until_shown(pilot, lambda: view.review.loaded and not at_work(pilot))
        await press(pilot, "x", "q")
        assert pilot.app.is_running and "ctrl+s saves them" in list(view._notifications)[-1].message
        await press(pilot, "q")
    assert view.return_code == 0 and not view.parting


async def test_a_row_that_cannot_be_read_ends_it_with_its_place(tasks: Path) -> None:
    tasks.write_text(json.dumps(row(0)) + "\n{half\n")
    view = DatasetApp(Review(str(tasks)))
    async with view.run_test() as pilot:
        await until_shown(pilot, lambda: view.failure is not None)
    assert isinstance(view.failure, TaskError) and "tasks.jsonl line 2" in str(view.failure)
    assert view.return_code == 1


@pytest.mark.parametrize("size", [(60, 16), (80, 24), (200, 60)])
async def test_the_question_has_room_at_any_size(tasks: Path, size: tuple[int, int]) -> None:
    async with viewing(tasks, size=size) as pilot:
        table = rows(pilot).table
        widths = dict(zip((column.name for column in table.columns), table._widths, strict=True))
        assert widths["question"] >= 36 or size[0] == 60
        assert table.virtual_size.width <= size[0] or size[0] == 60
        assert ("metadata.level" in widths) == (size[0] == 200)


# How it looks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "size"),
    [
        (["a", "x", "down", "space", "down"], (80, 24)),
        (["down", "enter"], (120, 40)),
        (["e"], (80, 24)),
        (["x", "ctrl+s"], (120, 40)),
        (["question_mark"], (120, 40)),
    ],
    ids=["table", "row", "edit", "save", "keys"],
)
def test_looks(snap_compare: Any, tasks: Path, keys: list[str], size: tuple[int, int]) -> None:
    view = DatasetApp(Review(str(tasks)))

    async def before(pilot: Pilot[None]) -> None:
        await until_shown(pilot, lambda: view.review.loaded and not at_work(pilot))
        await press(pilot, *keys)
        if isinstance(pilot.app.focused, Input | TextArea):  # whose cursor blinks
            pilot.app.set_focus(None)
        await pilot.pause(0.2)

    assert snap_compare(view, terminal_size=size, run_before=before)


# The command


def test_without_a_terminal_it_names_what_does_the_same_in_a_script(tasks: Path) -> None:
    done = CliRunner().invoke(app, ["dataset", "view", str(tasks)])
    assert (
        done.exit_code == 2
        and "ajet dataset filter FILE EXPR" in done.output
        and "Traceback" not in done.output
    )
    shown = " ".join(CliRunner().invoke(app, ["dataset", "view", "--help"]).output.split())
    assert "--rejected long.jsonl" in shown and "In a script" in shown


@pytest.mark.slow
def test_in_a_real_terminal_it_decides_and_leaves_and_the_decision_is_kept(tasks: Path) -> None:
    code, written = in_terminal(
        "dataset", "view", str(tasks), keys=[(b"What is 0 + 1?", b"x"), (b"row 2", b"q")]
    )
    assert (
        code == 0
        and b"kept in .tasks.jsonl.review.jsonl" in written
        and b"Traceback" not in written
    )
    again = Review(str(tasks))
    again.load()
    assert again.mark_of(0) == "rejected" and len(tasks.read_text().splitlines()) == 40


@pytest.mark.slow
def test_what_cannot_be_opened_is_said(tasks: Path) -> None:
    tasks.write_text(json.dumps(row(0)) + "\n{half\n")
    for option, words in (("chars<", b"a value is missing"), ("chars<9", b"tasks.jsonl line 2")):
        ended, written = in_terminal("dataset", "view", str(tasks), "--filter", option)
        assert ended == 2 and words in b" ".join(written.split()) and b"Traceback" not in written, (
            written
        )
