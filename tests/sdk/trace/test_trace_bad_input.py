"""Whatever lies where a trace should be, reading it ends in an answer or in one error that says
what is wrong."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb
import pytest

from ajet_sdk.errors import AjetError, TraceError
from ajet_sdk.trace.reader import calls_of, episodes, open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Run
from ajet_tools.trace.files.check import check

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "trace.duckdb"
    with TraceWriter(path) as writer:
        writer.put(Run(run_id="r"))
        for i in range(50):
            message = {"role": "user", "content": f"{i} " * 200}
            request = {"messages": [message]}
            writer.put(
                Call(
                    episode_id=f"e{i}",
                    request=request,
                    prompt_ids=range(i, i + 300),
                    output_ids=[i],
                )
            )
            writer.put(Episode(episode_id=f"e{i}", run_id="r"))
    return path


def read_all(path: Path) -> int:
    with open_trace(path) as reader:
        return sum(len(episode.calls) for episode in episodes(reader))


@pytest.mark.slow
def test_a_file_cut_off_anywhere_is_one_error(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.duckdb"
    content = whole.read_bytes()
    for cut in (0, 1, 7, 8, 12, 100, 4096, 8191, 8192, 12287, 12288, 20000, len(content) // 2):
        path.write_bytes(content[:cut])
        for use in (read_all, check):
            with pytest.raises(TraceError, match=r"it is empty|not a trace|is truncated"):
                use(path)
        assert path.read_bytes() == content[:cut]
        assert list(tmp_path.iterdir()) == [path]
    path.write_bytes(content[:-1])
    try:
        assert read_all(path) == 50, "the last byte was nobody's"
    except TraceError as error:
        assert "is truncated" in str(error)


def any_bytes(there: bytes, at: int) -> bytes:
    return bytes(
        byte ^ other for byte, other in zip(there, random.Random(at).randbytes(16), strict=False)
    )


def inverted(there: bytes, at: int) -> bytes:
    """Words that were equal still are, which DuckDB's checksum, the XOR of a hash of each word,
    does not see."""
    return bytes(255 - byte for byte in there)


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    [
        any_bytes,
        pytest.param(
            inverted,
            marks=pytest.mark.skipif(
                duckdb.__version__ < "2",
                reason="DuckDB 1.5 crashes on statistics (HyperLogLog) that 2.0 refuses",
            ),
        ),
    ],
)
def test_a_damaged_file_is_read_or_an_error_and_never_a_crash(
    whole: Path, tmp_path: Path, damage: Callable[[bytes, int], bytes]
) -> None:
    path = tmp_path / "trace.duckdb"
    content = whole.read_bytes()
    outcomes = set()
    for at in range(0, len(content), max(1, len(content) // 40)):
        damaged = bytearray(content)
        damaged[at : at + 16] = damage(content[at : at + 16], at)
        path.write_bytes(damaged)
        for use in (read_all, check):
            try:
                use(path)
            except AjetError as error:
                outcomes.add("error")
                assert str(path) in str(error) or "query failed" in str(error)
            else:
                outcomes.add("read")
    assert "error" in outcomes


KILLED = """
import os, sys
from pathlib import Path
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Run
writer = TraceWriter(Path(sys.argv[1]))
writer.put(Run(run_id="r"))
for i in range(10):
    writer.put(Call(episode_id=f"e{i}", prompt_ids=range(300), output_ids=[i]), Episode(episode_id=f"e{i}", run_id="r"))
    writer.flush()
os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_a_log_cut_off_anywhere_loses_its_end_only(tmp_path: Path) -> None:
    home = tmp_path / "killed"
    home.mkdir()
    subprocess.run(
        [sys.executable, "-c", KILLED, str(home / "trace.duckdb")], cwd=ROOT, check=False
    )
    log = (home / "trace.duckdb.wal").read_bytes()
    assert read_all(home / "trace.duckdb") == 10
    kept = []
    for number, cut in enumerate(range(0, len(log), max(1, len(log) // 12))):
        copy = tmp_path / f"cut-{number}"
        shutil.copytree(home, copy)
        (copy / "trace.duckdb.wal").write_bytes(log[:cut])
        kept.append(read_all(copy / "trace.duckdb"))
        assert check(copy) == []
    assert kept == sorted(kept) and kept[0] == 0 and 0 < kept[-1] < 10


@pytest.mark.slow
def test_a_directory_without_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"no trace \(\*\.duckdb\)"):
        open_trace(tmp_path)
    TraceWriter(tmp_path / "trace.duckdb").close()
    with open_trace(tmp_path) as reader:
        assert episodes(reader) == [] and calls_of(reader, "e") == []
        assert reader.query("FROM runs").num_rows == 0
    assert check(tmp_path) == []


def test_one_call_without_ids_messages_or_episode(tmp_path: Path) -> None:
    call = Call(call_id="c", episode_id="e")
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        writer.put(call)
    with open_trace(tmp_path) as reader:
        assert calls_of(reader, "e") == [call]
        [row] = reader.query("SELECT prompt_ids, messages, request FROM calls_full").to_pylist()
    assert row == {"prompt_ids": None, "messages": None, "request": "{}"}
    assert check(tmp_path) == []


@pytest.fixture
def large(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    text = "long \u00e9 \U0001f986 \x1b[31m " * 700_000
    assert len(text.encode()) > 10_000_000
    messages = [{"role": "user", "content": text}]
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        writer.put(
            Run(run_id="r"), Call(call_id="1", episode_id="e", request={"messages": messages})
        )
        more = [*messages, {"role": "assistant", "content": "ok"}]
        writer.put(Call(call_id="2", episode_id="e", index=1, request={"messages": more}))
        writer.put(Episode(episode_id="e", run_id="r"))
    yield tmp_path / "trace.duckdb", text


@pytest.mark.slow
def test_a_message_of_ten_megabytes_is_kept_once_and_read_whole(large: tuple[Path, str]) -> None:
    path, text = large
    assert path.stat().st_size < 1.5 * len(text.encode())
    with open_trace(path) as reader:
        [episode] = episodes(reader)
        assert [len(c.request["messages"]) for c in episode.calls] == [1, 2]
        assert episode.calls[1].request["messages"][0]["content"] == text
        [row] = reader.query("SELECT messages FROM calls_full WHERE call_id = '2'").to_pylist()
    assert json.loads(row["messages"])[0]["content"] == text
    assert check(path) == []
