"""The files that several live processes of one run write are one trace: for queries, commands and
the viewer."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ajet_sdk.errors import QueryError
from ajet_sdk.trace.feedback import give
from ajet_sdk.trace.owner import owners, settled_owners
from ajet_sdk.trace.reader import calls_of, episodes, ledger_balance, open_trace, trace_files
from ajet_sdk.types import Feedback
from ajet_tools.cli.app import app
from ajet_tools.trace import queries
from ajet_tools.trace.files.check import check
from ajet_tools.trace.locate import open_located, open_named
from ajet_tools.trace.queries.listing import open_listing
from ajet_tools.trace.queries.records import records_of
from ajet_tools.trace.queries.search import episodes_with
from ajet_tools.tui.trace.app import TraceApp
from ajet_tools.tui.trace.episodes import EpisodesScreen
from tests.waiting import until_shown

pytestmark = pytest.mark.slow

Start = Callable[[str], Any]


def _overview(reader: Any) -> dict[str, Any]:
    [run] = queries.overview(reader)
    return run


def test_processes_that_live_are_read_as_one_run_and_followed(tmp_path: Path, node: Start) -> None:
    head, one, two = node("head"), node("n1"), node("n2")
    assert len(owners(tmp_path)) == 3
    head.tell("run running")
    one.tell("episode a 1 1")
    two.tell("episode b 1 0")
    reader = open_trace(tmp_path)
    assert {**_overview(reader), "rewards": None}.items() >= {
        "status": "running",
        "episodes": 2,
        "last_train": 0.5,
    }.items()
    head.tell("book a 1", "book b 1", "metric 1 0.5")
    assert _overview(reader)["tokens"] == 6 and _overview(reader)["rewards"] == [0.5]
    assert ledger_balance(reader, "run1") == []

    two.tell("episode c 2 1")
    head.tell("book c 2")
    assert {e.episode_id for e in episodes(reader, "run1")} == {"a", "b", "c"}
    assert [c.prompt_ids.tolist() for c in calls_of(reader, "c") if c.prompt_ids is not None] == [
        [1, 2],
        [1, 2, 3, 4, 5],
    ]
    [record] = records_of(reader, ["c"], whole=True)
    assert [
        (entry.outcome, entry.tokens) for entry in record.ledger if entry.call_id == "c-c1"
    ] == [("trained", 1)]
    assert len(record.episode.calls[1].request["messages"]) == 3
    assert queries.find(reader, "c-c1").kind == "call"
    assert episodes_with(reader, "question of B") == {"b"}

    three = node("n3")  # a process that joins while the reader is open
    three.tell("episode d 2 1")
    assert _overview(reader)["episodes"] == 4
    two.kill()  # one that dies leaves what it wrote
    assert _overview(reader)["episodes"] == 4 and _overview(reader)["status"] == "running"
    one.end()
    three.tell("episode e 3 1")
    assert _overview(reader)["episodes"] == 5
    assert check(tmp_path) == []
    head.tell("run finished")
    head.end()
    three.end()
    assert not settled_owners(trace_files(tmp_path))
    assert {**_overview(reader), "rewards": None}.items() >= {
        "status": "finished",
        "episodes": 5,
        "tokens": 9,
    }.items()
    assert len(calls_of(reader, "e")) == 2


def test_what_a_resume_rolls_back_is_seen(tmp_path: Path, node: Start) -> None:
    head, one = node("head"), node("n1")
    head.tell("run running", "metric 1 0.1", "metric 2 0.2", "metric 3 0.3")
    one.tell("episode a 1 1", "episode b 3 1")
    reader = open_trace(tmp_path)
    assert _overview(reader)["rewards"] == [0.1, 0.2, 0.3]
    one.tell("supersede 2")
    head.tell("supersede 2", "metric 3 0.9", "metric 4 1.0")
    assert _overview(reader)["rewards"] == [0.1, 0.2, 0.9, 1.0]
    assert {e.episode_id for e in episodes(reader, "run1")} == {"a"}
    assert {e.episode_id for e in episodes(reader, "run1", superseded=True)} == {"a", "b"}


_QUERIES = [
    "SELECT count(*) AS n FROM calls",
    "SELECT c FROM calls c ORDER BY c.call_id",
    "FROM episodes SELECT episode_id, task->>'$.main_query' AS q ORDER BY ALL",
    "SELECT agent, sum(len(output_ids)) AS t FROM calls GROUP BY agent HAVING t > 1 ORDER BY agent",
    "SELECT call_id FROM calls WHERE response::VARCHAR LIKE '%reply 1%' ORDER BY call_id",
    (
        "SELECT e.episode_id FROM episodes e WHERE NOT EXISTS (FROM rewards r WHERE r.episode_id ="
        " e.episode_id)"
    ),
    "SELECT call_id, prompt_ids, messages FROM calls_full ORDER BY call_id",
    "SELECT (SELECT count(*) FROM runs), max(step), count(DISTINCT group_id) FROM episodes",
    (
        "WITH RECURSIVE up AS (SELECT call_id, parent_call_id FROM calls WHERE index = 1 UNION ALL "
        "SELECT c.call_id, c.parent_call_id FROM calls c JOIN up ON c.call_id = up.parent_call_id) "
        "SELECT * FROM up ORDER BY ALL"
    ),
    "SELECT COLUMNS('.*_id') FROM calls ORDER BY ALL LIMIT 3",
    "SELECT name, value FROM metrics WHERE run_id = 'run1' AND step IN (1, 2) ORDER BY step",
    "SELECT call_id, messages_suffix FROM calls WHERE episode_id IN ('a', 'b') ORDER BY call_id",
]


def test_a_query_answers_live_what_it_answers_at_rest(tmp_path: Path, node: Start) -> None:
    head, one = node("head"), node("n1")
    head.tell("run running", "metric 1 0.1", "metric 2 0.2")
    one.tell("episode a 1 1")
    readers = [open_trace(tmp_path) for _ in _QUERIES]  # none profits from what another has read
    first = [reader.query(sql) for reader, sql in zip(readers, _QUERIES, strict=True)]
    one.tell("episode b 3 1", "call d")
    live = [reader.query(sql) for reader, sql in zip(readers, _QUERIES, strict=True)]
    together = [readers[0].query(sql) for sql in _QUERIES]
    with pytest.raises(QueryError, match="rowid"):  # several files have no row ids in common
        readers[0].query("SELECT rowid FROM calls")
    one.end()
    head.end()
    rest = open_trace(tmp_path)
    for sql, before, answer, again in zip(_QUERIES, first, live, together, strict=True):
        wanted = rest.query(sql)
        assert answer.to_pylist() == again.to_pylist() == wanted.to_pylist(), sql
        assert before.schema.names == wanted.schema.names


def test_wrong_queries_are_refused_live_as_at_rest(tmp_path: Path, node: Start) -> None:
    for name in ("head", "n1"):
        node(name).tell("episode a 1 1")
    reader = open_trace(tmp_path)
    for sql, word in (
        ("SELECT nothing FROM calls", "nothing"),
        ("DELETE FROM calls", "exactly one SELECT"),
        ("SELECT 1; SELECT 2", "exactly one SELECT"),
        ("SELEC 1", "parsed"),
        ("SELECT * FROM read_text('/etc/hostname')", "disabled"),
        (f"SELECT * FROM read_text('{tmp_path}/gateway.json')", "disabled"),
    ):
        with pytest.raises(QueryError, match=word):
            reader.query(sql)
    assert "explain_value" in reader.query("EXPLAIN ANALYZE SELECT * FROM calls").column_names


def test_a_process_of_another_machine_is_asked_where_its_gateway_answers(
    tmp_path: Path, node: Start
) -> None:
    head, one = node("head"), node("n1")
    head.tell("run running")
    one.tell("episode a 1 1")
    reader = open_trace(tmp_path)
    source = next(owner.source for owner in owners(tmp_path) if owner.trace.startswith("trace-"))
    told = json.loads(source.read_text())
    source.write_text(json.dumps({**told, "host": "another", "url": "http://127.0.0.2:9"}))
    assert [owner.alive for owner in owners(tmp_path) if owner.host == "another"] == [False]
    port = told["url"].rpartition(":")[2]
    elsewhere = {**told, "host": "another", "url": f"http://{socket.gethostname()}:{port}"}
    source.write_text(
        json.dumps({**elsewhere, "token": "foreign"})
    )  # something else answers at its port by now
    assert [owner.alive for owner in owners(tmp_path) if owner.host == "another"] == [False]
    source.write_text(json.dumps(elsewhere))
    assert _overview(reader)["episodes"] == 1


def test_commands_find_the_files_of_a_run_as_one(
    tmp_path: Path, node: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, one, two = node("head"), node("n1"), node("n2")
    head.tell("run running")
    one.tell("episode a 1 1")
    two.tell("episode b 1 0")
    monkeypatch.chdir(tmp_path)
    reader, where = open_located()
    assert where.resolve() == tmp_path.resolve() and len(episodes(reader)) == 2
    assert open_named("run1")[1:] == (where, "run1")
    ran = CliRunner().invoke(app, ["trace", "ls", "--json"])
    assert ran.exit_code == 0, ran.output
    listed = json.loads(ran.stdout)
    assert [run["episodes"] for run in listed["runs"]] == [2]
    assert {episode["episode_id"] for episode in listed["episodes"]} == {"a", "b"}
    ran = CliRunner().invoke(app, ["trace", "show", "b-c1"])
    assert ran.exit_code == 0 and "go on" in ran.stdout
    give(tmp_path, Feedback(episode_id="b", author="me", score=1.0))
    assert reader.query("SELECT episode_id FROM feedback").to_pylist() == [{"episode_id": "b"}]


@pytest.mark.asyncio
async def test_the_viewer_follows_all_of_them(
    tmp_path: Path, node: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    head, one = node("head"), node("n1")
    head.tell("run running")
    one.tell("episode a 1 1")
    reader = open_trace(tmp_path)
    viewer = TraceApp(reader, tmp_path)

    async with viewer.run_test(size=(100, 30)) as pilot:
        await until_shown(pilot, lambda: bool(getattr(viewer.screen, "runs", [])))
        viewer.open_episodes("run1")
        await until_shown(
            pilot,
            lambda: isinstance(viewer.screen, EpisodesScreen) and viewer.screen.listing is not None,
        )
        await until_shown(pilot, lambda: viewer.screen.listing.count == 1)  # type: ignore[attr-defined]
        two = node("n2")  # its file appears while the viewer is open
        two.tell("episode b 1 1")
        one.tell("episode c 1 1")
        await until_shown(pilot, lambda: viewer.screen.listing.count == 3)  # type: ignore[attr-defined]
        two.kill()
        head.tell("run finished")
        await until_shown(pilot, lambda: viewer.screen.listing.count == 3)  # type: ignore[attr-defined]
        head.end()
        one.end()
        await pilot.press("escape")
        await until_shown(
            pilot,
            lambda: [run["status"] for run in getattr(viewer.screen, "runs", [])] == ["finished"],
        )
        [run] = viewer.screen.runs  # type: ignore[attr-defined]
        assert run["episodes"] == 3
    assert open_listing(reader, "run1").count == 3
