"""Checking: a sound trace has nothing to say; each way of breaking it is found, with the ids."""

from __future__ import annotations

import shutil
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import duckdb
import pytest

from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.pictures import PlacedPicture, picture_of
from ajet_sdk.samples.prefixes import PrefixIndex
from ajet_sdk.trace.digests import digested, digests_of
from ajet_sdk.trace.feedback import give
from ajet_sdk.trace.schema import COLUMNS, TABLES
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Feedback, LedgerEntry, Metric, Reward, Run, Trained
from ajet_tools.trace.files.check import Broken, check, edited
from ajet_tools.trace.files.invariants import INVARIANTS
from ajet_tools.trace.files.prune import prune
from tests.drawings import part, png

START = datetime(2026, 1, 1, tzinfo=timezone.utc)


def records(*, finished: bool = True) -> list[Any]:
    ended: dict[str, Any] = (
        {"status": "finished", "ended_at": START + timedelta(hours=1)} if finished else {}
    )
    first = {"role": "user", "content": "hi"}
    at: dict[str, Any] = {"started_at": START, "ended_at": START}
    booked: dict[str, Any] = {"run_id": "r", "step": 1, "episode_id": "e"}
    made: list[Any] = [Run(run_id="r", backbone="local", started_at=START, **ended)]
    conversation = PrefixIndex()
    for index, prompt in enumerate(([1, 2], [1, 2, 3, 4, 5])):
        call: dict[str, Any] = {
            "call_id": f"c{index}",
            "output_ids": [3, 4],
            "logprobs": [-0.5, -1],
        }
        seen = {"role": "user", "content": [part(png())]}
        request = {"messages": [first, seen][: index + 1]}
        if index:
            call["pictures"] = [PlacedPicture(4, 5, picture_of(png()), 5)]
        later = {name: START + timedelta(seconds=index) for name in at}
        one = Call(episode_id="e", index=index, prompt_ids=prompt, request=request, **later, **call)
        made.append(conversation.add(one))
        made.append(LedgerEntry(call_id=f"c{index}", outcome="trained", tokens=2, **booked))
        made.append(
            Trained(
                call_id=f"c{index}", advantages=[1, 1], logprobs=[0, 0], entropy=[0, 0], **booked
            )
        )
    made.append(
        Episode(episode_id="e", run_id="r", step=1, rewards=(Reward(value=1, call_id="c0"),), **at)
    )
    made.append(Episode(episode_id="gone", run_id="r", step=2, **at))
    return [
        *made,
        Metric(run_id="r", step=1, name="x", value=1),
        Feedback(feedback_id="f", episode_id="e", call_id="c0"),
    ]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "trace.duckdb"
    with TraceWriter(path) as writer:
        writer.put(*records())
    return path


@pytest.fixture
def path(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(sound, tmp_path))


@pytest.mark.slow
def test_a_sound_trace_has_nothing_broken(path: Path) -> None:
    assert check(path) == check(path.parent) == []


BREAKS = {
    "run ids": ("INSERT INTO runs FROM runs", "r"),
    "episode ids": ("INSERT INTO episodes FROM episodes WHERE episode_id = 'e'", "e"),
    "call ids": ("INSERT INTO calls FROM calls WHERE call_id = 'c1'", "c1"),
    "feedback ids": ("INSERT INTO feedback FROM feedback", "f"),
    "ledger rows": ("INSERT INTO ledger FROM ledger WHERE call_id = 'c0'", "r c0 trained"),
    "trained rows": ("INSERT INTO trained FROM trained WHERE call_id = 'c0'", "r 1 c0"),
    "run status": ("UPDATE runs SET ended_at = NULL", "r"),
    "episode status": ("UPDATE episodes SET status = 'running' WHERE episode_id = 'e'", "e"),
    "outcomes": ("UPDATE ledger SET outcome = 'lost' WHERE call_id = 'c0'", "c0"),
    "runs of episodes": ("UPDATE episodes SET run_id = 'other' WHERE episode_id = 'gone'", "gone"),
    "runs of metrics": ("UPDATE metrics SET run_id = 'other'", "other"),
    "episodes of calls": ("DELETE FROM episodes WHERE episode_id = 'e'", "c0"),
    "episodes of rewards": ("UPDATE rewards SET episode_id = 'x'", "x"),
    "calls of rewards": ("UPDATE rewards SET call_id = 'x'", "x"),
    "calls of the ledger": ("UPDATE ledger SET call_id = 'x' WHERE call_id = 'c0'", "x"),
    "calls of trained": ("UPDATE trained SET call_id = 'x' WHERE call_id = 'c0'", "x"),
    "episodes of feedback": ("UPDATE feedback SET episode_id = 'x'", "x"),
    "calls of feedback": ("UPDATE feedback SET call_id = 'x'", "x"),
    "prefixes": ("UPDATE calls SET prefix_len = 5 WHERE call_id = 'c1'", "c1"),
    "log-probabilities": ("UPDATE calls SET logprobs = [0] WHERE call_id = 'c1'", "c1"),
    "trained arrays": ("UPDATE trained SET entropy = [0] WHERE call_id = 'c1'", "c1"),
    "trained tokens": (
        "UPDATE trained SET advantages = ['nan'::FLOAT, 1] WHERE call_id = 'c1'",
        "c1",
    ),
    "superseded": ("UPDATE episodes SET superseded = true WHERE episode_id = 'e'", "c0"),
    "pictures of calls": ("DELETE FROM pictures", "c1"),
    "pictures of episodes": (
        f"UPDATE episodes SET output = '[\"ajet-picture:{'0' * 64}\"]' WHERE episode_id = 'e'",
        "e",
    ),
    "places of pictures": (
        "UPDATE calls SET pictures = replace(pictures::VARCHAR, '4, 5', '4, 6') WHERE call_id = 'c1'",
        "c1",
    ),
    "pictures": ("UPDATE pictures SET data = data[:40]", picture_of(png()).digest),
    "times": (
        "UPDATE calls SET ended_at = started_at - INTERVAL 1 SECOND WHERE call_id = 'c0'",
        "c0",
    ),
    "times of calls": (
        "UPDATE episodes SET started_at = started_at - INTERVAL 1 HOUR WHERE episode_id = 'e'",
        "e",
    ),
    "ledger": ("UPDATE ledger SET tokens = 1 WHERE call_id = 'c1'", "c1"),
    "circles": ("UPDATE calls SET parent_call_id = 'c1' WHERE call_id = 'c0'", "c0"),
    "extended calls": ("UPDATE calls SET agent = 'other' WHERE call_id = 'c0'", "c1"),
    "extended prompts": (
        "UPDATE calls SET prefix_len = 2, prompt_suffix = [9, 9, 5] WHERE call_id = 'c1'",
        "c1",
    ),
    "schema": ("ALTER TABLE metrics DROP COLUMN value", "metrics.value"),
}


def test_every_invariant_has_a_way_to_break_it() -> None:
    assert set(BREAKS) == {
        *INVARIANTS,
        "ledger",
        "circles",
        "extended prompts",
        "pictures",
        "schema",
    }


@pytest.mark.slow
@pytest.mark.parametrize("invariant", BREAKS)
def test_what_is_broken_is_found_with_its_id(path: Path, invariant: str) -> None:
    change, id = BREAKS[invariant]
    with duckdb.connect(str(path)) as connection:
        connection.execute(change)
    found = {one.invariant: one for one in check(path)}
    assert invariant in found, found
    assert found[invariant].count >= 1 and any(id in one for one in found[invariant].ids)


def test_many_broken_rows_are_counted_and_some_named(path: Path) -> None:
    with duckdb.connect(str(path)) as connection:
        connection.execute(
            "INSERT INTO metrics SELECT 'run-' || i, 1, 'x', 1, now() FROM range(1000) t(i)"
        )
    [one] = check(path)
    assert one == Broken(
        "runs of metrics", one.says, 1000, tuple(sorted(f"run-{i}" for i in range(1000))[:20])
    )


def test_what_a_kill_leaves_open_is_not_broken(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        writer.put(*records(finished=False))
        writer.put(Call(call_id="open", episode_id="cut", output_ids=[1], prompt_ids=[1]))
    assert check(tmp_path) == []


@pytest.mark.slow
def test_a_live_trace_can_be_checked(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace.duckdb") as writer, Gateway(writer):
        writer.put(*records(finished=False), Call(call_id="open", episode_id="cut"))
        writer.flush()
        assert check(tmp_path) == []
        writer.put(Metric(run_id="nobody", step=1, name="x", value=1))
        writer.flush()
        assert [one.ids for one in check(tmp_path)] == [("nobody",)]


@pytest.mark.slow
def test_references_hold_across_the_files_of_a_directory(tmp_path: Path) -> None:
    made = records()
    with TraceWriter(tmp_path / "one.duckdb") as one, TraceWriter(tmp_path / "two.duckdb") as two:
        one.put(
            *(r for r in made if isinstance(r, Run | LedgerEntry | Metric | Feedback | Trained))
        )
        two.put(*(r for r in made if isinstance(r, Call | Episode)))
    assert check(tmp_path) == []
    assert check(tmp_path / "one.duckdb") != []


@pytest.mark.parametrize(
    "column", [f"{table}.{column}" for table in TABLES for column in COLUMNS[table]]
)
def test_an_edit_of_any_column_is_told_from_what_was_written(path: Path, column: str) -> None:
    assert edited(path) is None
    table, name = column.split(".")
    kind = COLUMNS[table][name]
    values = {
        "VARCHAR": "'no'",
        "JSON": "'[3]'",
        "BOOLEAN": f'"{name}" IS NOT TRUE',
        "TIMESTAMPTZ": "'2020-01-01'",
        "BLOB": "'no'::BLOB",
    }
    value = values.get(kind, "[7]" if kind.endswith("[]") else "7")
    with duckdb.connect(str(path)) as connection:
        connection.execute(
            f'UPDATE {table} SET "{name}" = {value} WHERE "{name}" IS DISTINCT FROM {value}'
        )
        rows = connection.execute(f"SELECT count(*) FROM {table}").fetchall()[0][0]
    broken = edited(path)
    assert broken is not None and 0 < broken.count <= rows
    assert all(id.startswith(f"{table} ") for id in broken.ids)


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ("runs", "run_id || ' ' || name"),
        ("episodes", "episode_id || ' ' || step"),
        ("calls", "call_id"),
        ("rewards", "coalesce(call_id, episode_id) || ' ' || name"),
        ("metrics", "run_id || ' ' || name || ' ' || step"),
        ("ledger", "call_id || ' ' || outcome || ' ' || step"),
        ("trained", "call_id || ' ' || step"),
        ("feedback", "feedback_id"),
        ("pictures", "digest"),
    ],
)
def test_an_edited_row_is_named_by_its_id(path: Path, table: str, named: str) -> None:
    with duckdb.connect(str(path)) as connection:
        connection.execute(f"INSERT INTO {table} FROM {table} LIMIT 1")
        [(told,)] = connection.execute(
            f"SELECT {named} FROM {table} ORDER BY rowid DESC LIMIT 1"
        ).fetchall()
    assert told
    assert (broken := edited(path)) is not None and broken.ids == (f"{table} {told}",)


@pytest.mark.parametrize("table", TABLES)
def test_rows_that_were_added_or_deleted_are_told(path: Path, table: str) -> None:
    with duckdb.connect(str(path)) as connection:
        connection.execute(f"INSERT INTO {table} FROM {table} LIMIT 1")
    assert (
        (added := edited(path)) is not None
        and added.count == 1
        and added.ids[0].startswith(f"{table} ")
    )
    with duckdb.connect(str(path)) as connection:
        connection.execute(f"DELETE FROM {table} WHERE rowid = (SELECT max(rowid) FROM {table})")
    assert edited(path) is None, "the copy is gone again"
    with duckdb.connect(str(path)) as connection:
        connection.execute(f"DELETE FROM {table} WHERE rowid = (SELECT max(rowid) FROM {table})")
    assert (gone := edited(path)) is not None and gone.ids == (
        "1 row more were written and are gone",
    ), "the last one"
    with duckdb.connect(str(path)) as connection:
        connection.execute(f"DELETE FROM {table}")
    assert (gone := edited(path)) is not None and "written and are gone" in gone.ids[0]


def test_a_row_that_was_added_hides_none_that_was_deleted(path: Path) -> None:
    with duckdb.connect(str(path)) as connection:
        connection.execute("DELETE FROM rewards WHERE rowid = (SELECT max(rowid) FROM rewards)")
        connection.execute(
            "INSERT INTO metrics SELECT * REPLACE ('new' AS name) FROM metrics LIMIT 1"
        )
    assert (broken := edited(path)) is not None and broken.count == 2
    assert any(id.startswith("metrics ") for id in broken.ids) and any(
        "gone" in id for id in broken.ids
    )


@pytest.mark.parametrize("table", ["calls", "feedback", "metrics", "ledger"])
def test_a_row_in_place_of_another_is_told_from_one_that_was_changed(
    path: Path, table: str
) -> None:
    column = {
        "calls": "call_id",
        "feedback": "feedback_id",
        "metrics": "name",
        "ledger": "outcome",
    }[table]
    with duckdb.connect(str(path)) as connection:
        connection.execute(
            f"INSERT INTO {table} SELECT * REPLACE ('other' AS {column}) FROM {table} LIMIT 1"
        )
        connection.execute(f"DELETE FROM {table} WHERE rowid = 0")
    assert (broken := edited(path)) is not None and broken.count == 1 and "gone" in broken.ids[0]


DEEDS = {
    "changed": ("UPDATE calls SET logprobs = [-1, -1] WHERE call_id = 'c0'", "call c0 was changed"),
    "added": (
        "INSERT INTO calls SELECT * REPLACE ('new' AS call_id, [5, 6] AS output_ids) FROM calls LIMIT 1",
        "call new was added",
    ),
    "removed": ("DELETE FROM rewards WHERE rowid = 0", "1 row of rewards was removed"),
    "exchanged": (
        "UPDATE feedback SET feedback_id = 'other' WHERE rowid = 0",
        "feedback other stands in place of another row",
    ),
}


@pytest.mark.parametrize("name", DEEDS)
def test_the_deed_is_named(path: Path, name: str) -> None:
    sql, deed = DEEDS[name]
    with duckdb.connect(str(path)) as connection:
        connection.execute(sql)
    broken = edited(path)
    assert broken is not None
    [told] = broken.deeds
    assert told.startswith(deed)


def test_a_copied_call_names_its_original(path: Path) -> None:
    answer = {"choices": [{"message": {"content": "hi"}}]}
    with TraceWriter(path) as writer:
        for i in (7, 8):
            answered = {**answer, "id": f"chatcmpl-{i}"}
            call = Call(call_id=f"d{i}", episode_id="e", index=i, output_ids=[i], prompt_ids=[1])
            writer.put(call.model_copy(update={"response": answered}))
    with duckdb.connect(str(path)) as connection:
        connection.execute(
            "INSERT INTO calls SELECT * REPLACE ('thief' AS call_id) FROM calls WHERE call_id = 'd7'"
        )
    broken = edited(path)
    assert broken is not None
    [told] = broken.deeds
    assert "thief" in told and "d7" in told and "d8" not in told


def test_a_file_of_before_keeps_its_digests(path: Path) -> None:
    with duckdb.connect(str(path)) as connection:
        old = [
            digest
            for table in TABLES
            for digest in digests_of(table, connection.sql(f"FROM {table}").to_arrow_table())
        ]
        connection.execute("DELETE FROM digests")
        connection.execute("INSERT INTO digests SELECT unnest(?::UBIGINT[])", [old])
    assert edited(path) is None
    give(path, Feedback(episode_id="e", comment="well done"))
    assert edited(path) is None
    with duckdb.connect(str(path)) as connection:
        connection.execute("DELETE FROM rewards WHERE rowid = (SELECT max(rowid) FROM rewards)")
    assert (broken := edited(path)) is not None and broken.count == 1


def test_a_file_without_its_digests_is_told(path: Path) -> None:
    with duckdb.connect(str(path)) as connection:
        connection.execute("DROP TABLE digests")
    assert (broken := edited(path)) is not None and broken.count > len(TABLES)


def test_the_order_of_rows_in_a_file_is_nothing_that_was_written(path: Path) -> None:
    """Times and indices are columns: a chain over rows would call this an edit."""
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE TABLE n AS FROM calls ORDER BY call_id DESC; DELETE FROM calls")
        connection.execute("INSERT INTO calls FROM n; DROP TABLE n")
    assert edited(path) is None
    with duckdb.connect(str(path)) as connection:
        connection.execute('UPDATE calls SET "index" = 1 - "index" WHERE "index" < 2')
    assert (broken := edited(path)) is not None and broken.count >= 2


def test_what_ajet_changes_later_is_no_edit(path: Path) -> None:
    later = Run(run_id="r", backbone="local", status="running", started_at=START)
    with TraceWriter(path) as writer:
        for run in (
            later,
            later.model_copy(update={"config": {"a": 1}}),
            Run(run_id="old", started_at=START),
        ):
            writer.put(run)
            writer.flush()
        writer.put(Call(call_id="late", episode_id="e", index=2, request_id="q", output_ids=[1]))
        writer.undelivered("e", "q", "gone")
        writer.flush()
        writer.supersede("r", 0)
    give(path, Feedback(episode_id="e", comment="well done"))
    with TraceWriter(path):
        pass
    assert edited(path) is None
    with duckdb.connect(str(path), read_only=True) as connection:
        assert connection.execute("SELECT error FROM calls WHERE call_id = 'late'").fetchall() == [
            ("gone",)
        ]
        assert connection.execute("SELECT DISTINCT outcome FROM ledger").fetchall() == [
            ("superseded",)
        ]
        assert connection.execute("SELECT DISTINCT status FROM runs").fetchall() == [
            ("interrupted",)
        ]
    prune(path, ["old"])
    assert edited(path) is None


def test_a_pruned_file_still_tells_what_was_edited_before(path: Path) -> None:
    with TraceWriter(path) as writer:
        writer.put(Run(run_id="old", status="finished", started_at=START, ended_at=START))
    with duckdb.connect(str(path)) as connection:
        connection.execute("UPDATE calls SET logprobs = [-1, -1] WHERE call_id = 'c0'")
    prune(path, ["old"])
    assert (broken := edited(path)) is not None and broken.ids == ("calls c0",)


def test_the_digest_of_a_row_stays_the_same_for_ever() -> None:
    """A pyarrow or DuckDB that gives a value otherwise would call every older file edited."""
    values = {
        "VARCHAR": "'ä \" \\'", "JSON": """'{"a": [1, 2.50], "b": null}'""", "INTEGER": "-7", "DOUBLE": "1e-7",
        "BOOLEAN": "true", "TIMESTAMPTZ": "'2026-01-02 03:04:05.678901+00'", "INTEGER[]": "[1, NULL, 151643]",
        "FLOAT[]": "[-0.1, 1e-5, -1234567.8, 'nan'::FLOAT, '-inf'::FLOAT, 0]", "BLOB": r"'\x89PNG\x00'",
    }  # fmt: skip
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'Asia/Tokyo'")
        digests = []
        for table in ("calls", "episodes", "metrics", "pictures"):
            listed = ", ".join(
                f'{values[kind]}::{kind} AS "{name}"' for name, kind in COLUMNS[table].items()
            )
            connection.execute(
                f"CREATE TABLE {table} AS SELECT {listed}, NULL::INTEGER AS added_later"
            )
            digests += [mine for _, [mine] in digested(connection, table)]
    assert digests == [
        234251231518513978,
        5042564637251909934,
        6561989173625983928,
        6758454718793924787,
    ]
