"""Listings: every order, pages, filters that read texts in spans, and following a run that goes
on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ajet_sdk.errors import QueryError
from ajet_sdk.protocols import Stop, TraceReader
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Reward, Run, Task
from ajet_tools.trace.queries import search
from ajet_tools.trace.queries.filters import parse
from ajet_tools.trace.queries.listing import COLUMNS, open_listing
from ajet_tools.trace.queries.search import Cancelled
from tests.serving import live_trace

BEGAN = datetime(2026, 5, 1, tzinfo=timezone.utc)
N = 40


def put(writer: TraceWriter, i: int, run_id: str = "run") -> None:
    """Episode i: i % 4 calls of ten tokens each; no reward where i is a multiple of five."""
    at = BEGAN + timedelta(seconds=10 * i)
    for turn in range(i % 4):
        writer.put(
            Call(
                episode_id=f"{run_id}-{i:02}",
                index=turn,
                agent=f"agent{turn % 2}",
                request={"messages": [{"role": "user", "content": f"Question {i} of {turn}"}]},
                output_ids=range(10),
                phase="judge" if turn == 2 else "rollout",
                started_at=at,
                ended_at=at + timedelta(seconds=1),
            )
        )
    writer.put(
        Episode(
            episode_id=f"{run_id}-{i:02}",
            run_id=run_id,
            step=i // 8,
            attempt=i % 8,
            group_id=f"g{i // 8}",
            task=Task(task_id=f"t{i % 3}", main_query=f"What is {i}?" * (100 if i == 7 else 1)),
            status="failed" if i % 10 == 3 else "succeeded",
            error="broke" * 200 if i % 10 == 3 else None,
            cause="ValueError" if i % 10 == 3 else None,
            rewards=(Reward(value=(i * 7 % 11) / 10),) if i % 5 else (),
            started_at=at,
            ended_at=at + timedelta(seconds=i % 9),
        )
    )


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TraceReader]:
    path = tmp_path_factory.mktemp("listing") / "trace.duckdb"
    with TraceWriter(path) as writer:
        writer.put(Run(run_id="run"), Run(run_id="other"))
        for i in range(N):
            put(writer, i)
        put(writer, 3, "other")
    with open_trace(path) as found:
        yield found


@pytest.fixture(scope="module")
def everything(reader: TraceReader) -> dict[str, dict[str, Any]]:
    return {row["episode_id"]: row for row in open_listing(reader, "run").page(reader, 0, 1000)}


def test_a_row_says_what_an_episode_was(everything: dict[str, dict[str, Any]]) -> None:
    row = everything["run-07"]
    assert tuple(row) == COLUMNS
    assert {name: row[name] for name in ("calls", "turns", "agents", "tokens")} == {
        "calls": 3,
        "turns": 2,
        "agents": 2,
        "tokens": 30,
    }
    assert row["reward"] == pytest.approx(0.5) and row["seconds"] == 7 and row["task_id"] == "t1"
    assert row["task"].startswith("What is 7?") and len(row["task"]) == 300
    without = everything["run-20"]
    assert (without["reward"], without["calls"], without["tokens"]) == (None, 0, None)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("column", COLUMNS)
def test_any_column_gives_an_order(
    reader: TraceReader,
    everything: dict[str, dict[str, Any]],
    column: str,
    descending: bool,
) -> None:
    rows = everything
    found = open_listing(reader, "run").sorted(reader, column, descending)
    ids = found.ids()
    assert open_listing(reader, "run", None, column, descending).ids() == ids
    values = [rows[id][column] for id in ids]
    there = [value for value in values if value is not None]
    assert there == sorted(there, reverse=descending) and values[: len(there)] == there, (
        "no value comes last"
    )
    assert sorted(ids) == sorted(rows) and found.count == N
    for before, after in pairwise(ids):
        if rows[before][column] == rows[after][column]:
            assert rows[before]["ended_at"] >= rows[after]["ended_at"], (
                "of equals the newer comes first"
            )
    assert found.page(reader, 5, 10) == [rows[id] for id in ids[5:15]]
    assert "other-03" not in ids
    assert found.page(reader, N, 10) == [] and found.ids(N - 1) == ids[-1:]


def test_an_unknown_column_is_refused(reader: TraceReader) -> None:
    with pytest.raises(QueryError, match="no column 'colour'"):
        open_listing(reader, "run", sort="colour")


def test_all_runs(reader: TraceReader) -> None:
    assert open_listing(reader, None).count == N + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "status='failed'",
        "reward>0.5 and step<3",
        "question",
        "'question 2'",
        "not has('of 1')",
        "has('of 2') or status='failed'",
        "zzz",
    ],
)
def test_a_filter_fits_the_same_episodes_in_spans_and_in_one_query(
    reader: TraceReader,
    everything: dict[str, dict[str, Any]],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search, "_SPAN", 7)
    parsed = parse(text)
    told: list[tuple[int, int]] = []
    found = open_listing(
        reader, "run", parsed, sort="tokens", progress=lambda done, of: told.append((done, of))
    )
    sql = f"SELECT episode_id FROM episodes e WHERE run_id = 'run' AND {parsed.sql}"
    assert sorted(found.ids()) == sorted(
        reader.query(sql, parsed.parameters)["episode_id"].to_pylist()
    )
    assert found.of == N and found.filter == parsed
    assert found.page(reader, 0, N) == [everything[id] for id in found.ids()]
    if parsed.needles:
        calls = sum(i % 4 for i in range(N)) + 3
        assert len(told) > 3 and told == sorted(told) and told[-1] == (calls, calls)
    assert found.filtered(reader, parse("")).count == N


def test_a_search_can_be_cancelled(reader: TraceReader) -> None:
    with pytest.raises(Cancelled):
        open_listing(reader, "run", parse("question"), cancelled=lambda: True)


@pytest.mark.slow
def test_following_a_run(tmp_path: Path) -> None:
    path = tmp_path / "trace.duckdb"
    with TraceWriter(path) as writer:
        writer.put(Run(run_id="run"))
        for i in range(10):
            put(writer, i)
    with open_trace(path) as reader:
        everyone = open_listing(reader, "run", sort="reward")
        chosen = open_listing(reader, "run", parse("status='failed' or has('question 11')"))
        assert everyone.refreshed(reader) is everyone and chosen.ids() == ["run-03"]
        with TraceWriter(path) as writer:
            for i in (12, 11, 13):
                put(writer, i)
        grown = everyone.refreshed(reader)
        assert (everyone.count, grown.count) == (10, 13), "a listing itself does not change"
        assert grown.ids() == open_listing(reader, "run", sort="reward").ids()
        assert grown.page(reader, 0, 20) == open_listing(reader, "run", sort="reward").page(
            reader, 0, 20
        )
        assert grown.refreshed(reader) is grown
        assert sorted(chosen.refreshed(reader).ids()) == ["run-03", "run-11", "run-13"]
        with TraceWriter(path) as writer:
            writer.supersede("run", after_step=0)
        rolled = grown.refreshed(reader)
        rows = rolled.sorted(reader, "step", False).page(reader, 0, 13)
        assert [row["superseded"] for row in rows] == [False] * 8 + [True] * 5


@pytest.mark.parametrize(
    "there", [range(20, 33), range(20, 25), range(3)], ids=["more", "as many", "fewer"]
)
def test_a_file_that_another_took_the_place_of_is_listed_anew(
    tmp_path: Path, there: Sequence[int]
) -> None:
    path, other = tmp_path / "trace.duckdb", tmp_path / "other" / "trace.duckdb"
    for file, numbers in ((path, range(5)), (other, there)):
        with TraceWriter(file) as writer:
            writer.put(Run(run_id="run"))
            for i in numbers:
                put(writer, i)
    with open_trace(path) as reader:
        found = open_listing(reader, "run")
        other.replace(path)
        assert sorted(found.refreshed(reader).ids()) == [f"run-{i:02}" for i in there]


@pytest.mark.slow
def test_no_episode_at_all(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        writer.put(Run(run_id="run"))
    with open_trace(tmp_path) as reader:
        found = open_listing(reader, "run", parse("status='failed' or has('hello')"))
        assert found.count == 0 and found.page(reader, 0, 10) == []
        assert [found.sorted(reader, name, True).count for name in COLUMNS] == [0] * len(COLUMNS)
        with TraceWriter(tmp_path / "trace.duckdb") as writer:
            put(writer, 3)
        assert found.refreshed(reader).ids() == ["run-03"]


@contextmanager
def of_ten(folder: Path) -> Iterator[tuple[TraceWriter, TraceReader]]:
    """A live run of ten episodes, and a reader of it."""
    with TraceWriter(folder / "trace.duckdb") as writer, live_trace(writer):
        writer.put(Run(run_id="run"))
        for i in range(10):
            put(writer, i)
        writer.flush()
        with open_trace(folder) as reader:
            yield writer, reader


@pytest.mark.slow
def test_a_live_run_is_listed_filtered_and_searched_while_it_goes_on(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace.duckdb") as writer, live_trace(writer):
        writer.put(Run(run_id="run"))
        for i in range(20):
            put(writer, i)
        writer.flush()
        with open_trace(tmp_path) as reader:
            found = open_listing(
                reader,
                "run",
                parse("age() > interval 1 second and has('question 1') or step=2"),
                sort="tokens",
            )
            assert "run-11" in found.ids() and "run-21" not in found.ids()
            for i in range(20, 30):
                put(writer, i)
            writer.flush()
            grown = found.refreshed(reader)
            assert (
                grown.ids() == open_listing(reader, "run", grown.filter, sort="tokens").ids()
                and grown.of == 30
            )
            assert [row["tokens"] for row in grown.page(reader, 0, 3)] == [30, 30, 30]
            named = grown.filtered(reader, parse("question 22 of 1"))
            assert named.ids() == ["run-22"]


class Watched:
    """A reader that keeps the questions, and lets something happen after the second."""

    def __init__(self, reader: TraceReader, happens: Callable[[], None]) -> None:
        self._reader, self._happens = reader, happens
        self.asked: list[str] = []

    spent = 0.0

    def query(self, sql: str, parameters: Sequence[Any] = (), stop: Stop | None = None) -> pa.Table:
        found = self._reader.query(sql, parameters, stop)
        self.asked.append(sql)
        if len(self.asked) == 2:
            self._happens()
        return found

    def close(self) -> None:
        self._reader.close()


@pytest.mark.slow
def test_what_is_new_is_few_questions_also_while_more_ends(tmp_path: Path) -> None:
    with of_ten(tmp_path) as (writer, reader):
        found = open_listing(reader, "run")
        put(writer, 10)
        writer.flush()

        def more() -> None:
            put(writer, 11)
            writer.flush()

        watched = Watched(reader, more)
        grown = found.refreshed(watched)
        assert grown.ids()[0] == "run-10" and grown.count == 11
        assert len(watched.asked) == 2, "how many there are, and which"
        grown = grown.refreshed(watched)
        assert (
            grown.ids()[:2] == ["run-11", "run-10"]
            and grown.count == 12
            and len(watched.asked) == 4
        )
        fresh = open_listing(reader, "run")
        assert grown.page(reader, 0, 12) == fresh.page(reader, 0, 12)


def test_calls_are_counted_once_for_all_pages(
    reader: TraceReader, everything: dict[str, dict[str, Any]]
) -> None:
    watched = Watched(reader, lambda: None)
    found = open_listing(watched, "run", sort="group_id")
    found.page(watched, 0, 3)
    watched.asked.clear()
    page = found.page(watched, 3, N)
    of_page = list(watched.asked)
    by_tokens = found.sorted(watched, "tokens", True).page(watched, 0, N)
    assert page == [everything[id] for id in found.ids(3, N)]
    assert by_tokens[0]["tokens"] == max(row["tokens"] or 0 for row in everything.values())
    assert len(of_page) == 1 and not any("calls" in sql.split("FROM")[-1] for sql in watched.asked)


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True], ids=["next", "that ended before"])
def test_a_text_is_found_in_what_comes_later(tmp_path: Path, late: bool) -> None:
    """Also in episodes that ended before others, and come from another worker's file."""
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        writer.put(Run(run_id="run"))
        put(writer, 5 if late else 1)
    with open_trace(tmp_path) as reader:
        found = open_listing(reader, "run", parse("question"))
        with TraceWriter(tmp_path / "other.duckdb") as writer:
            put(writer, 2)
        assert sorted(found.refreshed(reader).ids()) == sorted([*found.ids(), "run-02"])
