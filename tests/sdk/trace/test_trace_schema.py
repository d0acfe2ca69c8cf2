"""Files of an older ajet: read as they are, made new when they are opened to write, never harmed."""

from __future__ import annotations

import re
from pathlib import Path

import duckdb
import pytest

from ajet_sdk.errors import TraceError, TraceVersionError
from ajet_sdk.trace.reader import calls_of, open_trace
from ajet_sdk.trace.schema import COLUMNS, SCHEMA_VERSION
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Run, Trained

VERSION_1 = """
CREATE TABLE meta (schema_version INTEGER, batch BIGINT);
INSERT INTO meta VALUES (1, 3);
CREATE TABLE runs (run_id VARCHAR, name VARCHAR, config JSON, backbone VARCHAR, status VARCHAR,
  started_at TIMESTAMPTZ, ended_at TIMESTAMPTZ, error VARCHAR);
CREATE TABLE episodes (episode_id VARCHAR, run_id VARCHAR, group_id VARCHAR, attempt INTEGER, step INTEGER,
  split VARCHAR, task_id VARCHAR, task JSON, output JSON, status VARCHAR, error VARCHAR, cause VARCHAR,
  infrastructure BOOLEAN, is_success BOOLEAN, metrics JSON, started_at TIMESTAMPTZ, ended_at TIMESTAMPTZ,
  superseded BOOLEAN);
CREATE TABLE calls (call_id VARCHAR, episode_id VARCHAR, "index" INTEGER, agent VARCHAR, target_tag VARCHAR,
  trainable BOOLEAN, model VARCHAR, policy_version INTEGER, request JSON, response JSON, parent_call_id VARCHAR,
  prefix_len INTEGER, prompt_suffix INTEGER[], prefix_messages INTEGER, messages_suffix JSON, output_ids INTEGER[],
  logprobs FLOAT[], finish_reason VARCHAR, started_at TIMESTAMPTZ, ended_at TIMESTAMPTZ, error VARCHAR,
  request_id VARCHAR, sampling JSON, phase VARCHAR);
CREATE TABLE rewards (episode_id VARCHAR, name VARCHAR, value DOUBLE, weight DOUBLE, reason VARCHAR, agent VARCHAR,
  call_id VARCHAR);
CREATE TABLE metrics (run_id VARCHAR, step INTEGER, name VARCHAR, value DOUBLE, "at" TIMESTAMPTZ);
CREATE TABLE ledger (run_id VARCHAR, step INTEGER, episode_id VARCHAR, call_id VARCHAR, outcome VARCHAR,
  tokens INTEGER);
CREATE TABLE feedback (feedback_id VARCHAR, episode_id VARCHAR, call_id VARCHAR, author VARCHAR, score DOUBLE,
  comment VARCHAR, correction VARCHAR, "at" TIMESTAMPTZ);
CREATE VIEW calls_full AS SELECT * FROM calls;
INSERT INTO runs VALUES ('old', 'a run', '{}', 'local', 'finished', now(), now(), NULL);
INSERT INTO calls VALUES ('c', 'e', 0, 'default', NULL, true, 'm', 0, '{}', '{}', NULL, 0, [1, 2], 0, NULL, [3],
  [-0.5], 'stop', now(), now(), NULL, '', '{}', 'rollout');
"""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "old.duckdb"
    with duckdb.connect(str(path)) as connection:
        connection.execute(VERSION_1)
    return path


def version(path: Path) -> int:
    with duckdb.connect(str(path), read_only=True) as connection:
        [row] = connection.execute("SELECT schema_version FROM meta").fetchall()
    return int(row[0])


def test_an_older_file_is_read_as_it_is(old: Path) -> None:
    before = old.read_bytes()
    with open_trace(old) as reader:
        assert reader.query("FROM trained").num_rows == 0
        assert reader.query("SELECT decoding FROM episodes WHERE decoding IS NOT NULL").num_rows == 0
        assert "logprobs" in reader.query("FROM trained").column_names
        assert reader.query("SELECT extends_call_id FROM calls").to_pylist() == [{"extends_call_id": None}]
        assert reader.query("SELECT extends_call_id FROM calls_full").to_pylist() == [{"extends_call_id": None}]
        assert [c.prompt_ids.tolist() for c in calls_of(reader, "e") if c.prompt_ids is not None] == [[1, 2]]
        assert reader.query("SELECT prompt_ids FROM calls_full").to_pylist() == [{"prompt_ids": [1, 2]}]
    assert old.read_bytes() == before


def test_an_older_file_beside_a_new_one_reads_as_one(old: Path) -> None:
    row = Trained(run_id="r", step=1, episode_id="e", call_id="c2", advantages=[1], logprobs=[0], entropy=[0])
    with TraceWriter(old.with_name("new.duckdb")) as writer:
        writer.put(Run(run_id="new"), row)
    reader = open_trace(old.parent)
    assert sorted(r["run_id"] for r in reader.query("FROM runs").to_pylist()) == ["new", "old"]
    assert [r["call_id"] for r in reader.query("FROM trained").to_pylist()] == ["c2"]


def test_an_older_file_is_made_new_when_it_is_written(old: Path) -> None:
    with TraceWriter(old) as writer:
        writer.put(
            Trained(run_id="old", step=1, episode_id="e", call_id="c", advantages=[1], logprobs=[0], entropy=[0])
        )
        writer.put(Call(call_id="d", episode_id="e", index=1, prompt_ids=[1, 2, 3], output_ids=[4]))
    assert version(old) == SCHEMA_VERSION == 7
    with open_trace(old) as reader:
        assert reader.query("SELECT call_id, advantages FROM trained").to_pylist() == [
            {"call_id": "c", "advantages": [1.0]}
        ]
        assert [c.call_id for c in calls_of(reader, "e")] == ["c", "d"]
        assert reader.query("SELECT prompt_ids FROM calls_full WHERE call_id = 'd'").to_pylist() == [
            {"prompt_ids": [1, 2, 3]}
        ]
    with TraceWriter(old):
        pass
    assert version(old) == SCHEMA_VERSION, "opening it once more changes nothing"
    with duckdb.connect(str(old), read_only=True) as connection:
        rows = sum(connection.execute(f"SELECT count(*) FROM {table}").fetchall()[0][0] for table in COLUMNS)
        assert connection.execute("SELECT count(*) FROM digests").fetchall() == [(rows,)]


def test_an_upgrade_that_fails_leaves_the_older_file_whole(old: Path) -> None:
    with duckdb.connect(str(old)) as connection:
        connection.execute("CREATE VIEW trained AS SELECT 1 AS in_the_way")
    with pytest.raises(TraceError, match="trained"):
        TraceWriter(old)
    assert version(old) == 1
    assert open_trace(old).query("SELECT run_id FROM runs").to_pylist() == [{"run_id": "old"}]


def test_a_meta_that_is_not_ours_is_a_foreign_file(tmp_path: Path) -> None:
    for value in ("'two'", "NULL"):
        path = tmp_path / "other.duckdb"
        with duckdb.connect(str(path)) as connection:
            connection.execute(f"CREATE TABLE meta AS SELECT {value}::VARCHAR AS schema_version")
        for use in (open_trace, TraceWriter):
            with pytest.raises(TraceVersionError, match="not an ajet trace"):
                use(path)
        path.unlink()


@pytest.mark.parametrize("table", COLUMNS)
def test_the_guide_lists_every_column(table: str) -> None:
    guide = (Path(__file__).parents[3] / "docs/guide/traces.md").read_text()
    row = re.search(rf"^\| `{table}` \|.*?\| `([^`]+)`", guide, re.MULTILINE)
    assert row and row[1].replace("[]", "").split() == list(COLUMNS[table])
