"""Packing: a smaller file that says the same, in place of the old one in one step, or the old one untouched."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import pytest

from ajet_sdk.errors import TraceError, TraceLocked, TraceVersionError
from ajet_sdk.samples.prefixes import PLACE, place_all
from ajet_sdk.trace.reader import calls_of, episodes, open_trace
from ajet_sdk.trace.schema import TABLES
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Feedback, LedgerEntry, Metric, Reward, Run, Trained
from ajet_tools.trace.files.check import check
from ajet_tools.trace.files.rewrite import pack

ROOT = Path(__file__).parents[3]
TURNS = 8


def conversation(name: str, turns: int = TURNS) -> list[Call]:
    """Each turn's prompt holds all of the turns before it."""
    ids: list[int] = [1]
    messages: list[dict[str, Any]] = [{"role": "system", "content": f'Ünïcode \U0001f986 \\ " {name} ' * 20}]
    calls = []
    for turn in range(turns):
        ids = [*ids, *range(100, 400)]
        messages = [*messages, {"role": "user", "content": f"turn {turn} " * 50, "n": [1.5, None, 10**20]}]
        call = Call(
            call_id=f"{name}-{turn}",
            episode_id=name,
            index=turn,
            request={"model": "m", "messages": messages},
            prompt_ids=ids,
            output_ids=[7, 8, turn],
            logprobs=[-0.5, -0.25, float("-inf")],
        )
        calls.append(call)
        ids = [*ids, 7, 8, turn]
        messages = [*messages, {"role": "assistant", "content": f"reply {turn}"}]
    return calls


def swollen(path: Path) -> Path:
    """A trace of calls that nobody placed: every prompt is whole."""
    with TraceWriter(path, flush_rows=1) as writer:
        writer.put(Run(run_id="r", status="finished", backbone="debug"))
        for name in ("a", "b"):
            for call in conversation(name):
                writer.put(call, Metric(run_id="r", step=call.index, name="train/x", value=float("nan")))
                writer.flush()
            writer.put(Episode(episode_id=name, run_id="r", rewards=(Reward(value=1), Reward(value=1))))
        writer.put(Call(call_id="bare", episode_id="c"), Episode(episode_id="c", run_id="r"))
        writer.put(LedgerEntry(run_id="r", step=0, episode_id="a", call_id="a-0", outcome="trained", tokens=3))
        row = {"advantages": [1, 1, float("nan")], "logprobs": [0, 0, 0], "entropy": [0, 0, 0]}
        writer.put(Trained(run_id="r", step=0, episode_id="a", call_id="a-0", **row), Feedback(episode_id="a"))
    return path


def content(path: Path) -> dict[str, list[str]]:
    """Everything that a trace says, in an order of its own; calls with their whole prompts, wherever they stand."""
    with open_trace(path) as reader:
        tables = [table for table in TABLES if table != "calls"]
        said = {t: sorted(map(repr, reader.query(f"FROM {t}").to_pylist())) for t in tables}
        said["calls"] = [
            call.model_dump_json(exclude={*PLACE}) for name in ("a", "b", "c") for call in calls_of(reader, name)
        ]
        full = "SELECT call_id, request, prompt_ids FROM calls_full ORDER BY call_id"
        said["full"] = [
            repr((r["call_id"], json.loads(r["request"]), r["prompt_ids"])) for r in reader.query(full).to_pylist()
        ]
    return said


@pytest.mark.slow
def test_prompts_become_suffixes_and_all_is_as_it_was(tmp_path: Path) -> None:
    path = swollen(tmp_path / "trace.duckdb")
    path.chmod(0o640)
    before = content(path)
    packed = pack(path)
    assert packed.calls == 2 * TURNS
    assert packed.after == path.stat().st_size < packed.before / 2
    assert content(path) == before
    with open_trace(path) as reader:
        for name in ("a", "b"):
            calls = calls_of(reader, name)
            assert calls == place_all(calls)
            assert [c.extends_call_id for c in calls[1:]] == [c.call_id for c in calls[:-1]]
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path], "no draft, no log and no gateway.json is left"
    with open_trace(path) as reader:
        assert reader.query("SELECT count(*) AS n FROM calls WHERE parent_call_id IS NULL").to_pylist() == [{"n": 3}]
    assert pack(path).calls == 0, "there is nothing more to gain"
    with TraceWriter(path) as writer:
        writer.put(Call(call_id="later", episode_id="d", prompt_ids=[1]))
    assert len(calls_of(open_trace(path), "d")) == 1


@pytest.mark.slow
def test_the_room_of_what_was_deleted_is_given_back(tmp_path: Path) -> None:
    path = swollen(tmp_path / "trace.duckdb")
    with duckdb.connect(str(path)) as connection:
        connection.execute("DELETE FROM calls WHERE episode_id = 'a'; DELETE FROM trained; DELETE FROM ledger")
    packed = pack(path)
    assert packed.after < packed.before


@pytest.mark.slow
def test_a_copy_elsewhere_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    path = swollen(tmp_path / "trace.duckdb")
    before = path.read_bytes()
    packed = pack(path, tmp_path / "small.duckdb")
    assert path.read_bytes() == before
    assert packed.after == (tmp_path / "small.duckdb").stat().st_size < len(before)
    assert content(tmp_path / "small.duckdb") == content(path)
    with pytest.raises(TraceError, match="already exists"):
        pack(path, tmp_path / "small.duckdb")


def test_what_is_live_or_not_ours_is_refused_and_untouched(tmp_path: Path) -> None:
    path = tmp_path / "trace.duckdb"
    with TraceWriter(path) as writer:
        writer.put(Run(run_id="r"))
        writer.flush()
        with pytest.raises(TraceLocked, match=r"is being written by process .* pack it after the run has ended"):
            pack(path)
    other = tmp_path / "other.duckdb"
    with duckdb.connect(str(other)) as connection:
        connection.execute("CREATE TABLE customers (name VARCHAR)")
    before = other.read_bytes()
    with pytest.raises(TraceVersionError, match="not an ajet trace"):
        pack(other)
    assert other.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["other.duckdb", "trace.duckdb"]


@pytest.mark.slow
def test_a_broken_prompt_stays_as_it_is(tmp_path: Path) -> None:
    path = swollen(tmp_path / "trace.duckdb")
    with duckdb.connect(str(path)) as connection:
        connection.execute("UPDATE calls SET parent_call_id = 'gone', prefix_len = 3 WHERE call_id = 'a-5'")
    packed = pack(path)
    assert packed.calls == TURNS, "the other episode's"
    assert [(one.invariant, one.ids) for one in check(path) if one.invariant == "prefixes"] == [("prefixes", ("a-5",))]
    with pytest.raises(TraceError, match=r"call a-5 cannot be reconstructed.*gone, which is missing.*trace check"):
        calls_of(open_trace(path), "a")


KILLED = """
import os, sys
from pathlib import Path
from ajet_tools.trace.files.rewrite import pack
left = [int(sys.argv[2])]
def said(what):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), 9)
pack(Path(sys.argv[1]), on_stage=said)
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", [1, 12])
def test_a_kill_leaves_the_old_file_whole(tmp_path: Path, moment: int) -> None:
    path = swollen(tmp_path / "trace.duckdb")
    before = content(path)
    done = subprocess.run([sys.executable, "-c", KILLED, str(path), str(moment)], cwd=ROOT, capture_output=True)
    assert done.returncode == -9
    assert content(path) == before
    assert [e.episode_id for e in episodes(open_trace(tmp_path))] == ["a", "b", "c"], "a draft is no trace"
    assert pack(path).calls == 2 * TURNS
    assert list(tmp_path.iterdir()) == [path], "what the killed one left is gone"


FULL = """
import resource, sys
from pathlib import Path
from ajet_tools.trace.files.rewrite import pack
resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, 64 << 10))
try:
    pack(Path(sys.argv[1]))
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_a_full_disk_leaves_the_old_file_whole(tmp_path: Path) -> None:
    path = swollen(tmp_path / "trace.duckdb")
    before = content(path)
    done = subprocess.run([sys.executable, "-c", FULL, str(path)], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith(f"TraceError the disk of {path} is full"), done.stdout + done.stderr
    assert content(path) == before
    assert [file.name for file in tmp_path.iterdir()] == ["trace.duckdb"]


@pytest.mark.slow
def test_the_oldest_duckdb_that_is_supported_can_read_a_new_file(tmp_path: Path) -> None:
    [oldest] = re.findall(r'"duckdb>=(\d+\.\d+)', (ROOT / "pyproject.toml").read_text())
    with TraceWriter(tmp_path / "new.duckdb") as writer:
        writer.put(Run(run_id="r", status="finished"))
    pack(tmp_path / "new.duckdb", tmp_path / "packed.duckdb")
    formats = []
    for path in ("new.duckdb", "packed.duckdb"):
        with duckdb.connect(str(tmp_path / path), read_only=True) as connection:
            sql = "SELECT tags['storage_version'] FROM duckdb_databases() WHERE path IS NOT NULL"
            formats += connection.execute(sql).fetchall()
    assert formats == [(f"v{oldest}.0+",)] * 2
