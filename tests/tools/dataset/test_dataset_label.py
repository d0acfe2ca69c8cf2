"""`ajet dataset label`: each key labels the row that is shown, and the labels are there the next
time."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Static
from typer.testing import CliRunner

from ajet_tools.cli.app import app
from ajet_tools.dataset.files.rows import read
from ajet_tools.dataset.labels import Labels, draw, estimate, labels_beside
from ajet_tools.tui.label import LabelApp, LabelScreen, row_text
from tests.tools.terminal import in_terminal
from tests.waiting import until_shown

pytestmark = pytest.mark.anyio


def row(i: int) -> dict[str, Any]:
    verdict = {"verifier": "agreement:3", "ok": True, "reason": "secret reason"}
    return {
        "metadata": {"answer": str(i + 1), "level": i % 3},
        "main_query": f"What is {i} + 1?",
        "provenance": {"source": "expand", "verdict": verdict},
    }


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("tasks.jsonl")
    path.write_text("".join(json.dumps(row(i)) + "\n" for i in range(20)))
    return path


@asynccontextmanager
async def labelling(path: Path, size: int = 4) -> AsyncIterator[Pilot[None]]:
    labels = Labels(labels_beside(path))
    view = LabelApp(
        str(path),
        labels,
        lambda: draw(read(path), size),
        lambda rows: estimate(rows, labels),
    )
    async with view.run_test(size=(100, 30), notifications=True) as pilot:
        await until_shown(
            pilot, lambda: isinstance(view.screen, LabelScreen) and bool(view.screen.sample)
        )
        yield pilot


def screen(pilot: Pilot[None]) -> LabelScreen:
    assert isinstance(pilot.app.screen, LabelScreen)
    return pilot.app.screen


def shown(pilot: Pilot[None]) -> str:
    return "\n".join(strip.text for strip in pilot.app.screen._compositor.render_strips())


async def test_a_x_and_s_label_and_go_on_and_u_goes_back(tasks: Path) -> None:
    sample = draw(read(tasks), 4)
    labels = Labels(labels_beside(tasks))
    async with labelling(tasks) as pilot:
        await pilot.press("a", "x", "s", "u")
        assert screen(pilot).row == sample[2]
        await pilot.press("x")
        status = str(pilot.app.screen.query_one("#status", Static).render())
        assert "row 4 of 4" in status and "2 of 3 wrong: 67%" in status
    labels = Labels(labels.path)
    found = [labels.of(row.values) for row in sample]
    assert found == ["accepted", "rejected", "rejected", None]
    async with labelling(tasks) as pilot:
        assert screen(pilot).row == sample[3], "it goes on where it stopped"
        await pilot.press("a", "a")
        assert screen(pilot).row is None and "all rows" in shown(pilot)
    assert len(Labels(labels.path)) == 4


async def test_the_row_is_shown_without_its_verdict_and_controls(tasks: Path) -> None:
    evil = {**row(0), "main_query": "[bold]no markup[/] \x1b[31mred"}
    tasks.write_text(json.dumps(evil) + "\n")
    async with labelling(tasks) as pilot:
        text = shown(pilot)
        assert "[bold]no markup[/]" in text and "\x1b" not in text
        assert "metadata.answer: 1" in text and "secret reason" not in text
        await pilot.press("y")
        assert json.loads(pilot.app.clipboard) == evil


def test_the_question_comes_first_and_a_conversation_is_readable() -> None:
    text = row_text(
        {"level": 1, "question": "Why?", "messages": [{"role": "user", "content": "Hi"}]}
    )
    assert text.splitlines() == ["question: Why?", "level: 1", "messages:", "  user: Hi"]


async def test_a_row_that_cannot_be_read_ends_it_with_its_place(tasks: Path) -> None:
    tasks.write_text(json.dumps(row(1)) + "\nno row\n")
    labels = Labels(labels_beside(tasks))
    view = LabelApp(str(tasks), labels, lambda: draw(read(tasks), 4), lambda rows: None)
    async with view.run_test() as pilot:
        await until_shown(pilot, lambda: view.failure is not None)
    assert "tasks.jsonl line 2" in str(view.failure)


def test_without_a_terminal_it_names_what_does_the_same_in_a_script(tasks: Path) -> None:
    done = CliRunner().invoke(app, ["dataset", "label", str(tasks)])
    assert done.exit_code == 2 and "ajet dataset filter" in done.output


@pytest.mark.slow
def test_in_a_real_terminal_it_labels_and_writes_what_was_not_rejected(tasks: Path) -> None:
    first, second, *_ = draw(read(tasks), 2)
    code, written = in_terminal(
        *("dataset", "label", str(tasks), "--sample", "2", "--out", "kept.jsonl"),
        keys=[
            (first.values["main_query"].encode(), b"x"),
            (second.values["main_query"].encode(), b"a"),
            (b"all rows", b"q"),
        ],
    )
    assert code == 0, written
    kept = [row.values for row in read("kept.jsonl")]
    assert len(kept) == 19 and first.values not in kept
