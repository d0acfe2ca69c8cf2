"""Several files into one: what they share is kept once, what they contradict each other in is named."""

from __future__ import annotations

import shutil
from datetime import datetime, timezone
from pathlib import Path

import duckdb
import pytest

from ajet_sdk.errors import TraceError, TraceLocked
from ajet_sdk.trace.reader import calls_of, episodes, ledger_balance, open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Feedback, LedgerEntry, Metric, Reward, Run, Trained
from ajet_tools.trace.files.check import check
from ajet_tools.trace.files.merge import merge_files
from ajet_tools.trace.files.rewrite import pack

BEGUN = datetime(2026, 1, 1, tzinfo=timezone.utc)
RUN = Run(run_id="r", status="finished", backbone="local", started_at=BEGUN, ended_at=BEGUN)


def node(path: Path, name: str, *, with_run: bool = False) -> Path:
    """What one gateway saw: an episode of two calls, the second's prompt stored as a suffix."""
    with TraceWriter(path) as writer:
        if with_run:
            writer.put(RUN, Metric(run_id="r", step=1, name="train/reward", value=0.5, at=RUN.started_at))
        for index, prompt in enumerate(([1, 2], [1, 2, 3, 4])):
            call = Call(
                call_id=f"{name}-{index}",
                episode_id=name,
                index=index,
                request={"messages": [{"role": "user", "content": "hi"}] * (index + 1)},
                prompt_ids=prompt,
                output_ids=[3],
                logprobs=[-0.5],
            )
            writer.put(call)
            writer.put(
                LedgerEntry(run_id="r", step=1, episode_id=name, call_id=call.call_id, outcome="trained", tokens=1)
            )
            arrays = {"advantages": [0.5], "logprobs": [-0.5], "entropy": [float("nan")]}
            writer.put(Trained(run_id="r", step=1, episode_id=name, call_id=call.call_id, **arrays))
        rewards = (Reward(value=1), Reward(value=1))
        writer.put(
            Episode(episode_id=name, run_id="r", step=1, rewards=rewards), Feedback(feedback_id=name, episode_id=name)
        )
    return path


@pytest.mark.slow
def test_what_several_have_is_kept_once_and_all_is_there(tmp_path: Path) -> None:
    one, two = node(tmp_path / "one.duckdb", "a", with_run=True), node(tmp_path / "two.duckdb", "b")
    three = Path(shutil.copy(one, tmp_path / "three.duckdb"))
    pack(three)
    sources = {file: file.read_bytes() for file in (one, two, three)}
    merged = merge_files([one, two, three, one], tmp_path / "whole.duckdb")
    assert merged.files == 3
    assert merged.rows == {"runs": 1, "episodes": 2, "calls": 4, "rewards": 4, "metrics": 1, "ledger": 4, "trained": 4,
                           "feedback": 2}  # fmt: skip
    assert merged.shared["calls"] == merged.shared["rewards"] == 2 and merged.shared["metrics"] == 1
    assert {file: file.read_bytes() for file in sources} == sources
    with open_trace(tmp_path / "whole.duckdb") as reader:
        assert ledger_balance(reader, "r") == []
        assert {e.episode_id: e for e in episodes(reader)} == {
            file_episode.episode_id: file_episode for file in (one, two) for file_episode in episodes(open_trace(file))
        }
    assert check(tmp_path / "whole.duckdb") == []
    assert sorted(file.suffix for file in tmp_path.iterdir()) == [".duckdb"] * 4


@pytest.mark.slow
def test_one_call_stored_in_two_ways_is_one_call(tmp_path: Path) -> None:
    one, two = node(tmp_path / "one.duckdb", "a"), tmp_path / "two.duckdb"
    shutil.copy(one, two)
    with duckdb.connect(str(two)) as connection:
        connection.execute(
            "UPDATE calls SET parent_call_id = NULL, prefix_len = 0, prefix_messages = 0, "
            "prompt_suffix = [1, 2, 3, 4], "
            """messages_suffix = '[{"role": "user", "content": "hi"}, {"role": "user", "content": "hi"}]' """
            "WHERE call_id = 'a-1'"
        )
    assert merge_files([one, two], tmp_path / "whole.duckdb").shared["calls"] == 2
    with duckdb.connect(str(two)) as connection:
        connection.execute("UPDATE calls SET prompt_suffix = [1, 2, 3, 5] WHERE call_id = 'a-1'")
    with pytest.raises(TraceError, match=r"calls on the same call_id: a-1\."):
        merge_files([one, two], tmp_path / "other.duckdb")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return node(tmp_path_factory.mktemp("one") / "one.duckdb", "a", with_run=True)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("UPDATE runs SET status = 'failed'", "runs on the same run_id: r"),
        ("UPDATE episodes SET status = 'failed'", "episodes on the same episode_id: a"),
        ("UPDATE calls SET output_ids = [9] WHERE call_id = 'a-1'", "calls on the same call_id: a-1"),
        ("UPDATE rewards SET value = 2", "rewards on the same episode_id: a"),
        ("UPDATE ledger SET outcome = 'stale'", "ledger on the same episode_id: a"),
        ("UPDATE metrics SET value = 2", "metrics on the same run_id: r train/reward at step 1"),
        ("UPDATE feedback SET comment = 'no'", "feedback on the same feedback_id: a"),
    ],
)
def test_a_contradiction_is_named_and_nothing_is_written(one: Path, tmp_path: Path, change: str, named: str) -> None:
    two = Path(shutil.copy(one, tmp_path / "two.duckdb"))
    with duckdb.connect(str(two)) as connection:
        connection.execute(change)
    with pytest.raises(TraceError, match=f"{named}.*nothing was written"):
        merge_files([one, two], tmp_path / "whole.duckdb")
    assert list(tmp_path.iterdir()) == [two]


def test_a_live_file_and_a_target_that_exists_are_refused(tmp_path: Path) -> None:
    one = node(tmp_path / "one.duckdb", "a")
    with pytest.raises(TraceError, match="already exists"):
        merge_files([one], one)
    with TraceWriter(tmp_path / "live.duckdb") as writer, pytest.raises(TraceLocked, match="merge it after"):
        merge_files([one, writer.path], tmp_path / "whole.duckdb")


@pytest.mark.slow
def test_calls_of_one_episode_in_two_files_come_together(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "one.duckdb") as writer:
        writer.put(Call(call_id="1", episode_id="e", prompt_ids=[1], output_ids=[2]))
    with TraceWriter(tmp_path / "two.duckdb") as writer:
        writer.put(
            Call(call_id="2", episode_id="e", index=1, prompt_ids=[1, 2, 3], output_ids=[4]), Episode(episode_id="e")
        )
    merge_files([tmp_path / "two.duckdb", tmp_path / "one.duckdb"], tmp_path / "whole.duckdb")
    calls = calls_of(open_trace(tmp_path / "whole.duckdb"), "e")
    assert [c.prompt_ids.tolist() for c in calls if c.prompt_ids is not None] == [[1], [1, 2, 3]]
