"""The list of episodes, each key of it, on real small traces."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from ajet_sdk.protocols import Stop
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Reward, Run, Task
from ajet_tools.tui.trace.app import TraceApp
from ajet_tools.tui.trace.episodes import EpisodesScreen
from ajet_tools.tui.trace.screen import TraceChanged
from ajet_tools.tui.widgets.lines import PartsLine
from tests.tools.tui.palette import choose
from tests.waiting import settled, until_shown

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("own_home")]
EVIL = "[bold red]not markup[/] :smile: \x1b[31mred\x1b]0;title\x07 \u202eback\nnext 字字 👨‍👩‍👧"
START = datetime(2026, 3, 1, 9, tzinfo=timezone.utc)


def episode(i: int, **named: Any) -> tuple[Call, Episode]:
    """Episode i ended at minute i, has reward i / 100, and belongs to group i // 4."""
    began, agent = START + timedelta(minutes=i), "wolf" if i % 2 else "villager"
    id, said = f"ep{i:04d}", "the moon is full" if i % 10 == 3 else "nothing"
    call = Call(
        call_id=f"call{i:04d}",
        episode_id=id,
        agent=agent,
        request={"messages": [{"role": "user", "content": said}]},
        response={"choices": [{"message": {"role": "assistant", "content": "well"}}]},
        prompt_ids=[1, 2],
        output_ids=[3] * (i + 1),
        logprobs=[-1.0] * (i + 1),
        started_at=began,
        ended_at=began + timedelta(seconds=30),
    )
    fields: dict[str, Any] = {
        "run_id": "run-1",
        "group_id": f"group{i // 4}",
        "attempt": i % 4,
        "step": i // 10,
        "task": Task(task_id=f"t{i // 4}", main_query=f"What is {i // 4} + {i // 4}?"),
        "rewards": (Reward(value=i / 100),),
        "status": "failed" if i % 7 == 0 else "succeeded",
        "started_at": began,
        "ended_at": began + timedelta(seconds=40),
    }
    return call, Episode(episode_id=id, **{**fields, **named})


def written(file: Path, count: int, *more: Episode) -> Path:
    with TraceWriter(file) as writer:
        writer.put(Run(run_id="run-1", name="math", backbone="local", started_at=START))
        for i in range(count):
            writer.put(*episode(i))
        writer.put(*more)
        writer.put(
            Run(run_id="run-1", name="math", backbone="local", status="finished", started_at=START)
        )
    return file


@pytest.fixture(scope="module")
def forty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("forty") / "trace.duckdb", 40)


@pytest.fixture
def trace(forty: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(forty, tmp_path))


@asynccontextmanager
async def viewed(
    where: Path, run_id: str | None = "run-1", filter: str = "", size: tuple[int, int] = (80, 24)
) -> AsyncIterator[tuple[Pilot[None], EpisodesScreen]]:
    with open_trace(where) as reader:
        app = TraceApp(reader, where)
        async with app.run_test(size=size) as pilot:
            screen = EpisodesScreen(run_id, filter)
            await app.push_screen(screen)
            await settled(pilot)
            yield pilot, screen


async def entered(pilot: Pilot[None], key: str, text: str) -> None:
    """Press the key of a prompt and enter a text in it, as if it were typed."""
    await pilot.press(key)
    assert isinstance(pilot.app.focused, Input)
    pilot.app.focused.value = text
    await pilot.press("enter")
    await settled(pilot)


def lines(screen: EpisodesScreen) -> list[str]:
    return [
        screen.table.render_line(y).text
        for y in range(screen.table.scrollable_content_region.height)
    ]


def status(screen: EpisodesScreen) -> str:
    return str(screen.query_one(PartsLine).render())


def shown(screen: EpisodesScreen) -> list[str]:
    assert screen.table.rows is not None
    return screen.table.rows.ids()


@pytest.mark.slow
async def test_newest_first_with_every_column(trace: Path) -> None:
    async with viewed(trace) as (_, screen):
        assert (screen.title, status(screen)[:7]) == ("runs › math › episodes", "1 of 40")
        assert shown(screen)[:2] == ["ep0039", "ep0038"]
        head, first = lines(screen)[:2]
        assert head.split() == [
            "task",
            "try",
            "status",
            "reward",
            "turns",
            "split",
            "tokens",
            "time",
            "step",
        ]
        assert first.split() == [
            "▸",
            "What",
            "is",
            "9",
            "+",
            "9?",
            "3",
            "succeeded",
            "0.39",
            "1",
            "train",
            "40",
            "40",
            "s",
            "3",
        ]


@pytest.mark.slow
async def test_each_column_is_sorted_by_its_number_and_again_in_reverse(trace: Path) -> None:
    async with viewed(trace) as (pilot, screen):
        await pilot.press("down", "down")
        await choose(pilot, "Sort by reward")
        await settled(pilot)
        assert shown(screen)[0] == "ep0039" and "reward↓" in lines(screen)[0]
        assert screen.table.cursor_id == "ep0037", "the cursor stays on its episode"
        await choose(pilot, "Sort by reward")
        await settled(pilot)
        assert shown(screen)[0] == "ep0000" and "reward↑" in lines(screen)[0]
        for title, first in {
            "task": "t0",
            "try": 0,
            "status": "failed",
            "turns": 1,
            "split": "train",
            "tokens": 40,
            "time": 40.0,
            "step": 3,
        }.items():
            await choose(pilot, f"Sort by {title}")
            await settled(pilot)
            [column] = [column.name for column in screen.table.columns if column.title == title]
            row = screen.table.row(0) or {}
            value = row["task_id"] if column == "task" else row[column]
            assert (value if not isinstance(value, list) else value[0]) == first, column
        await choose(pilot, "Sort by time of end")
        await settled(pilot)
        assert shown(screen)[0] == "ep0039"
        await choose(pilot, "Reverse the order")
        await settled(pilot)
        assert shown(screen)[0] == "ep0000"


@pytest.mark.slow
async def test_a_click_on_a_title_sorts(trace: Path) -> None:
    async with viewed(trace) as (pilot, screen):
        at = lines(screen)[0].index("reward")
        await pilot.click("ListingTable", offset=(at, 0))
        await settled(pilot)
        assert screen.listing is not None and screen.listing.sort == "reward"


@pytest.mark.slow
async def test_filter_history_and_errors_that_keep_the_list(trace: Path) -> None:
    async with viewed(trace) as (pilot, screen):
        await entered(pilot, "slash", "reward<0.05")
        assert (
            len(shown(screen)) == 5
            and "reward<0.05" in status(screen)
            and screen.focused is screen.table
        )
        await entered(pilot, "slash", "rewrd<1")
        assert screen.prompt.is_open and "rewrd" in str(screen.prompt.query_one("#wrong").render())
        assert len(shown(screen)) == 5, "a wrong filter leaves the list as it is"
        await pilot.press("escape")
        await entered(pilot, "slash", "status='failed'")
        assert len(shown(screen)) == 6
        await pilot.press("slash", "up", "up", "enter")
        await settled(pilot)
        assert len(shown(screen)) == 5, "the filter before the last"
        await entered(pilot, "slash", "")
        assert len(shown(screen)) == 40
        assert pilot.app.filters == ["status='failed'", "reward<0.05"]


@pytest.mark.slow
async def test_a_filter_can_be_given_and_a_wrong_one_is_asked_for_again(trace: Path) -> None:
    async with viewed(trace, filter="'wolf' in agents and step>=3") as (_, screen):
        assert shown(screen) == ["ep0039", "ep0037", "ep0035", "ep0033", "ep0031"]
    async with viewed(trace, filter="reward<") as (pilot, screen):
        assert len(shown(screen)) == 40 and screen.prompt.is_open
        await pilot.press("0", ".", "1", "enter")
        await settled(pilot)
        assert len(shown(screen)) == 10


@pytest.mark.slow
async def test_the_selection_outlives_a_filter_and_says_what_it_hides(trace: Path) -> None:
    async with viewed(trace) as (pilot, screen):
        await pilot.press("space", "down", "space")
        await entered(pilot, "slash", "reward<0.39")
        assert screen.table.selected == {"ep0039", "ep0038"}
        assert "2 selected (1 not in this list)" in status(screen)
        await choose(pilot, "Select all, or none")
        assert len(screen.table.selected) == 40
        await pilot.press("escape")
        assert not screen.table.selected


@pytest.mark.slow
async def test_enter_opens_the_episode_at_what_was_found(trace: Path) -> None:
    async with viewed(trace) as (pilot, screen):
        await entered(pilot, "slash", "MOON is")
        assert shown(screen) == ["ep0033", "ep0023", "ep0013", "ep0003"]
        await pilot.press("enter")
        await settled(pilot)
        opened: Any = pilot.app.screen
        assert type(opened).__name__ == "EpisodeScreen" and opened.episode_id == "ep0033"
        assert "the moon is full" in opened.messages.chosen.text
        await pilot.press("escape")
        await settled(pilot)
        assert pilot.app.screen is screen and screen.table.cursor_id == "ep0033"


async def test_an_episode_without_a_group_is_compared_with_its_task_at_other_steps(
    tmp_path: Path,
) -> None:
    def validation(id: str, step: int, decoding: str, task: str = "t") -> Episode:
        fields: dict[str, Any] = {
            "group_id": id,
            "attempt": 0,
            "step": step,
            "split": "val",
            "decoding": decoding,
        }
        made = episode(50 + step, task=Task(task_id=task, main_query="What?"), **fields)[1]
        return made.model_copy(update={"episode_id": id})

    more = [
        validation(f"{decoding[0]}{step}", step, decoding)
        for step in range(3)
        for decoding in ("greedy", "sampled")
    ]
    async with viewed(
        written(tmp_path / "t.duckdb", 0, *more, validation("alone", 9, "greedy", "other"))
    ) as (
        pilot,
        screen,
    ):
        assert screen.table.cursor_id == "alone"
        await pilot.press("g")
        await settled(pilot)
        assert pilot.app.screen is screen, "a notice says that there is nothing to compare with"
        await pilot.press("down")
        at = screen.table.cursor_id
        assert at in ("g2", "s2")
        await pilot.press("g")
        await settled(pilot)
        opened: Any = pilot.app.screen
        assert opened.episode_ids == tuple(f"{at[0]}{step}" for step in (2, 1, 0))


@pytest.mark.slow
async def test_group_and_compare(trace: Path) -> None:
    async with viewed(trace) as (pilot, screen):
        await pilot.press("down", "g")
        await settled(pilot)
        opened: Any = pilot.app.screen
        assert opened.episode_ids == ("ep0036", "ep0037", "ep0038", "ep0039")
        await pilot.press("escape")
        await settled(pilot)
        await pilot.press("c")
        assert pilot.app.screen is screen, "one episode cannot be compared"
        await pilot.press("space", "down", "down", "c")
        await settled(pilot)
        opened = pilot.app.screen
        assert opened.episode_ids == (
            "ep0038",
            "ep0036",
        ), "the selected one and the one under the cursor"


@pytest.mark.slow
async def test_the_ids_are_copied(trace: Path) -> None:
    async with viewed(trace) as (pilot, _):
        await pilot.press("y")
        assert pilot.app.clipboard == "ep0039"
        await pilot.press("space", "down", "space", "y")
        assert pilot.app.clipboard == "ep0039\nep0038"


@pytest.fixture
def live(tmp_path: Path) -> Iterator[TraceWriter]:
    """A run that goes on; this process owns the file and answers as the run would."""
    with TraceWriter(tmp_path / "live.duckdb") as writer:
        writer.put(Run(run_id="run-1", started_at=START))
        for i in range(40):
            writer.put(*episode(i))
        writer.flush()
        yield writer


class Live:
    """Reads what a writer of this process has written, as its gateway does; to close it closes no
    writer."""

    def __init__(self, writer: TraceWriter) -> None:
        self.writer = writer

    spent = 0.0

    def query(self, sql: str, parameters: Sequence[Any] = (), stop: Stop | None = None) -> pa.Table:
        return self.writer.query(sql, parameters, stop)

    def of_run(self, run_id: str) -> Live:
        return self

    def close(self) -> None:
        pass


@asynccontextmanager
async def followed(writer: TraceWriter) -> AsyncIterator[tuple[Pilot[None], EpisodesScreen]]:
    app = TraceApp(Live(writer), writer.path)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = EpisodesScreen("run-1")
        await app.push_screen(screen)
        await settled(pilot)
        yield pilot, screen


def more(writer: TraceWriter, screen: EpisodesScreen, *numbers: int) -> None:
    for i in numbers:
        writer.put(*episode(i))
    writer.flush()
    screen.post_message(TraceChanged())


@pytest.mark.slow
async def test_at_the_top_new_episodes_appear_and_the_cursor_stays_on_its_own(
    live: TraceWriter,
) -> None:
    async with followed(live) as (pilot, screen):
        await pilot.press("down", "space")
        more(live, screen, 40, 41)
        await until_shown(pilot, lambda: screen.table.count == 42)
        assert shown(screen)[0] == "ep0041" and screen.table.at_top
        assert screen.table.cursor_id == "ep0038" and screen.table.selected == {"ep0038"}
        assert "new:" not in status(screen)


@pytest.mark.slow
async def test_scrolled_away_new_episodes_are_counted_until_asked_for(live: TraceWriter) -> None:
    async with followed(live) as (pilot, screen):
        await pilot.press("end")
        before = lines(screen)
        more(live, screen, 40, 41)
        await until_shown(pilot, lambda: "2 new" in status(screen))
        more(live, screen, 42)
        await until_shown(pilot, lambda: "3 new" in status(screen))
        assert lines(screen) == before and screen.table.cursor_id == "ep0000"
        await pilot.press("full_stop")
        await settled(pilot)
        assert (
            screen.table.cursor_id == "ep0042"
            and screen.table.at_top
            and "new:" not in status(screen)
        )
        await pilot.press("end")
        more(live, screen, 43)
        await until_shown(pilot, lambda: "1 new" in status(screen))
        await pilot.press("home")
        await until_shown(pilot, lambda: screen.table.count == 44)
        assert screen.table.cursor_id == shown(screen)[0] == "ep0043", (
            "on the first row it goes along"
        )


@pytest.mark.slow
async def test_the_cursor_never_leaves_the_screen_as_episodes_come(live: TraceWriter) -> None:
    async with followed(live) as (pilot, screen):
        await pilot.press("down", "down")
        table = screen.table
        for first in range(40, 80, 4):
            more(live, screen, *range(first, first + 4))
            await until_shown(
                pilot,
                lambda: screen.latest is not None and screen.latest.count == first + 4,  # noqa: B023
            )
            assert table.cursor_id == "ep0037" and any("▸" in line for line in lines(screen))
        assert "new" in status(screen), "further down what comes is counted"
        await pilot.press("home")
        for first in range(80, 120, 4):
            more(live, screen, *range(first, first + 4))
            await until_shown(pilot, lambda: screen.table.count == first + 4)  # noqa: B023
            assert table.cursor == 0 and table.at_top and table.cursor_id == f"ep{first + 3:04}"


@pytest.mark.slow
async def test_a_list_of_failed_episodes_says_why(live: TraceWriter) -> None:
    put = Episode(
        episode_id="lost",
        run_id="run-1",
        step=1,
        status="timeout",
        cause="EpisodeTimeout",
        error="it stood",
    )
    live.put(put)
    live.flush()
    async with followed(live) as (pilot, screen):
        assert "cause" not in lines(screen)[0]
        screen.app.open_episodes("run-1", "status <> 'succeeded'")
        await settled(pilot)
        failed = pilot.app.screen
        assert "cause" in lines(failed)[0] and "EpisodeTimeout: it" in "\n".join(lines(failed))


@pytest.mark.slow
async def test_in_another_order_nothing_moves_until_asked_for(live: TraceWriter) -> None:
    async with followed(live) as (pilot, screen):
        await choose(pilot, "Sort by reward")
        await pilot.press("down")
        await settled(pilot)
        more(live, screen, 40)
        await until_shown(pilot, lambda: "1 new" in status(screen))
        assert shown(screen)[0] == "ep0039"
        await pilot.press("full_stop")
        await settled(pilot)
        assert shown(screen)[0] == "ep0040" and screen.table.cursor_id == "ep0038"


@pytest.mark.slow
async def test_a_trace_without_a_run_an_episode_or_a_fit(tmp_path: Path) -> None:
    file = written(tmp_path / "empty.duckdb", 0)
    async with viewed(file) as (pilot, screen):
        assert status(screen) == "no episode yet"
        keys = [
            "down",
            "space",
            "enter",
            "b",
            "g",
            "c",
            "f",
            "e",
            "y",
            "n",
            "N",
            "t",
            "r",
        ]
        for command in ("Sort by reward", "Reverse the order", "Select all, or none"):
            await choose(pilot, command)
        for key in [*keys, "escape"]:
            await pilot.press(key)
            await pilot.pause()
        await settled(pilot)
        assert pilot.app.screen is screen or key == "escape"
    async with viewed(written(tmp_path / "few.duckdb", 3), filter="reward>9") as (_, screen):
        assert status(screen).startswith("no episode fits")


@pytest.mark.slow
async def test_calls_without_episodes_are_listed_by_theirs(tmp_path: Path) -> None:
    file = tmp_path / "calls.duckdb"
    with TraceWriter(file) as writer:
        writer.put(episode(1)[0], episode(2)[0])
    async with viewed(file, run_id=None) as (pilot, screen):
        assert sorted(shown(screen)) == ["ep0001", "ep0002"] and "2 that have not ended" in status(
            screen
        )
        assert "unended" in lines(screen)[1]
        await choose(pilot, "Sort by reward")
        await settled(pilot)


@pytest.mark.slow
@pytest.mark.parametrize("run_id", [None, "run-1"])
async def test_of_very_many_that_have_not_ended_the_newest_are_listed_and_all_counted(
    tmp_path: Path, run_id: str | None
) -> None:
    began = [START + timedelta(seconds=i) for i in range(1_203)]
    with TraceWriter(tmp_path / "calls.duckdb") as writer:
        writer.put(Run(run_id="run-1", started_at=START))
        writer.put(
            *(
                Call(call_id=f"c{i}", episode_id=f"ep{i:04d}", started_at=at)
                for i, at in enumerate(began)
            )
        )
        writer.put(Call(call_id="second", episode_id="ep1202", started_at=began[-1]))
    async with viewed(tmp_path / "calls.duckdb", run_id=run_id) as (_, screen):
        assert status(screen).startswith("1 of the newest 1,000 of 1,203 that have not ended")
        assert screen.table.count == 1_000 and shown(screen)[0] == "ep1202"


@pytest.mark.slow
async def test_hostile_text_in_every_column_and_a_task_of_ten_megabytes(tmp_path: Path) -> None:
    task = Task(task_id=EVIL, main_query=EVIL + "x" * 10_000_000)
    evil = episode(99, task=task, group_id=EVIL, cause=EVIL, error=EVIL, output=EVIL)[1]
    with TraceWriter(tmp_path / "evil.duckdb") as writer:
        writer.put(
            Run(run_id="run-1"),
            Call(call_id="c", episode_id="ep0099", agent=EVIL, output_ids=[1]),
            evil,
        )
    async with viewed(tmp_path / "evil.duckdb", size=(120, 40)) as (pilot, screen):
        row = lines(screen)[1]
        assert "[bold red]not markup[/]" in row and not any(c in row for c in "\x1b\x07\u202e\n")
        await entered(pilot, "slash", "markup")
        assert screen.table.count == 1 and "\x1b" not in status(screen)


@pytest.mark.slow
async def test_any_size_of_terminal(trace: Path) -> None:
    async with viewed(trace) as (pilot, screen):
        for size in ((20, 5), (1, 1), (60, 15), (300, 80)):
            await pilot.press("home")
            await pilot.resize_terminal(*size)
            await pilot.press("down", "pagedown", "right")
            await settled(pilot)
            assert all(
                strip.cell_length == size[0]
                for strip in pilot.app.screen._compositor.render_strips()
            )
            assert screen.table.cursor > 0
            await pilot.resize_terminal(80, 24)
            await until_shown(
                pilot, lambda: pilot.app.screen is screen and screen.table.size.width == 80
            )
            await until_shown(pilot, lambda: sum("▸" in line for line in lines(screen)) == 1)


async def _looked_at(pilot: Pilot[None], *keys: str) -> None:
    await pilot.app.push_screen(EpisodesScreen("run-1"))
    await settled(pilot)
    for key in keys:
        await pilot.press(key)
        await settled(pilot)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
def test_looks(trace: Path, snap_compare: Any, size: tuple[int, int]) -> None:
    with open_trace(trace) as reader:
        keys = (
            "slash",
            *"moon",
            "enter",
            "b",
            "up",
            "space",
            "up",
            "space",
            "down",
            "down",
            "down",
            "4",
        )
        app = TraceApp(reader, Path("trace.duckdb"))
        assert snap_compare(
            app, terminal_size=size, run_before=lambda pilot: _looked_at(pilot, *keys)
        )


@pytest.mark.slow
def test_looks_without_colour(
    trace: Path, snap_compare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with open_trace(trace) as reader:
        app = TraceApp(reader, Path("trace.duckdb"))
        assert snap_compare(
            app,
            terminal_size=(80, 24),
            run_before=lambda pilot: _looked_at(pilot, "space", "down", "b"),
        )
