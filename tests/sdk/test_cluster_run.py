"""Traces and books of a run on a cluster: nodes write to the checkpoint store, and the run is taken
up after a kill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.backbones.shared.driver import ClusterRun, learning_rate
from ajet_sdk.cluster.mailbox import TrainedMessage, group_message
from ajet_sdk.config.config import load_config
from ajet_sdk.errors import ConfigError
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.protocols import Job
from ajet_sdk.reporting.loggers import Loggers
from ajet_sdk.rollout.outcomes import describe_error
from ajet_sdk.trace.reader import ledger_balance, open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, LedgerEntry, Run, Task
from ajet_tools.trace.files.check import check

RUN = "r"


def records(*steps: int) -> list[Call | Episode]:
    """An episode of each step, with a call of two tokens."""
    calls = [
        Call(
            call_id=f"c{step}",
            episode_id=f"e{step}",
            prompt_ids=[1],
            output_ids=[4, 5],
            logprobs=[-0.1, -0.2],
        )
        for step in steps
    ]
    episodes = [
        Episode(episode_id=call.episode_id, run_id=RUN, step=step, calls=(call,))
        for step, call in zip(steps, calls, strict=True)
    ]
    return [*calls, *episodes]


class Cluster:
    """A run with a checkpoint store, and what its nodes write there."""

    def __init__(self, folder: Path, store: Path | None) -> None:
        self.directory = folder / "experiment"
        values = {
            "model": {"path": "org/model"},
            "trainer_common": {"checkpoint_base_dir": store and str(store)},
        }
        job = Job(config=load_config(values=values), workflow=None, judge=None, train=[Task(main_query="q")], val=[],
                  run_id=RUN, directory=self.directory, resume=True)  # fmt: skip
        self.writer = TraceWriter(self.directory / "trace.duckdb")
        self.writer.put(Run(run_id=RUN))
        loggers = Loggers(
            [], directory=self.directory, run_id=RUN, writer=self.writer, total_steps=3
        )
        self.run = ClusterRun(job, self.writer, loggers, 3)

    def node(self, name: str) -> TraceWriter:
        return TraceWriter(self.run.traces / f"trace-{name}.duckdb")

    def sampled(self, node: str, *steps: int) -> None:
        """What a process on a node wrote, and closed."""
        with self.node(node) as writer:
            writer.put(*records(*steps))

    def trained(self, *steps: int) -> None:
        """The trainer took the calls of these steps."""
        self.writer.put(*(LedgerEntry(run_id=RUN, step=step, episode_id=f"e{step}", call_id=f"c{step}",
                                      outcome="trained", tokens=2) for step in steps))  # fmt: skip
        self.writer.flush()

    def query_unbalanced(self, sql: str) -> list[tuple[Any, ...]]:
        self.run.copy_traces()
        with open_trace(self.directory, writer=self.writer) as trace:
            return [tuple(row.values()) for row in trace.query(sql).to_pylist()]

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        self.writer.flush()
        with open_trace(self.directory) as trace:
            assert ledger_balance(trace, RUN) == []
            return [tuple(row.values()) for row in trace.query(sql).to_pylist()]


@pytest.fixture(params=["a store of its own", "the experiment's directory"])
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    made = Cluster(tmp_path, tmp_path / "store" if request.param == "a store of its own" else None)
    with made.writer, Gateway(made.writer):
        yield made


@pytest.mark.slow
def test_what_a_killed_run_left_in_the_store_is_rolled_back(cluster: Cluster) -> None:
    """Its driver was killed before it had brought anything."""
    cluster.sampled("one", 1, 2, 3)
    cluster.trained(1)
    cluster.run.roll_back(1)
    cluster.run.close_books()
    assert cluster.query("SELECT step, superseded FROM episodes ORDER BY step") == [
        (1, False),
        (2, True),
        (3, True),
    ]
    assert cluster.query("SELECT call_id, outcome FROM ledger ORDER BY call_id") == [
        ("c1", "trained"), ("c2", "superseded"), ("c3", "superseded"),
    ]  # fmt: skip


@pytest.mark.slow
def test_tokens_that_were_trained_after_the_checkpoint_are_booked_once(cluster: Cluster) -> None:
    """The driver booked them as trained, in a file of its own."""
    cluster.sampled("one", 1, 2)
    cluster.trained(1, 2)
    cluster.run.roll_back(1)
    cluster.run.close_books()
    assert cluster.query("SELECT call_id, outcome, tokens FROM ledger ORDER BY call_id") == [
        ("c1", "trained", 2), ("c2", "superseded", 2),
    ]  # fmt: skip


@pytest.mark.slow
def test_a_group_that_was_lost_on_its_way_to_the_trainer_is_superseded(cluster: Cluster) -> None:
    """Its step was trained without it, and a checkpoint was written."""
    cluster.sampled("one", 1)
    lost = Episode(
        episode_id="lost",
        run_id=RUN,
        step=1,
        calls=(records(1)[0].model_copy(update={"call_id": "c", "episode_id": "lost"}),),  # type: ignore[arg-type]
    )
    with cluster.node("two") as writer:
        writer.put(*lost.calls, lost)
    cluster.trained(1)
    cluster.run.roll_back(1)
    cluster.run.close_books()
    assert cluster.query("SELECT episode_id, superseded FROM episodes ORDER BY ALL") == [
        ("e1", False),
        ("lost", True),
    ]
    assert cluster.query("SELECT call_id, outcome, tokens FROM ledger ORDER BY ALL") == [
        ("c", "superseded", 2),
        ("c1", "trained", 2),
    ]


@pytest.mark.slow
def test_a_step_of_which_nothing_was_reported_is_not_taken_for_lost(cluster: Cluster) -> None:
    """The driver may have been killed before it booked what was trained."""
    cluster.sampled("one", 1, 2)
    cluster.trained(1)
    cluster.run.roll_back(2)
    assert cluster.query_unbalanced("SELECT step, superseded FROM episodes ORDER BY step") == [
        (1, False),
        (2, False),
    ]


@pytest.mark.slow
def test_calls_of_an_episode_that_ended_with_its_process_are_superseded(cluster: Cluster) -> None:
    cluster.sampled("one", 1)
    cluster.trained(1)
    call = records(2)[0]
    with cluster.node("two") as writer:
        writer.put(call)
    cluster.run.close_books()
    assert cluster.query("SELECT call_id, outcome, tokens FROM ledger ORDER BY ALL") == [
        ("c1", "trained", 2),
        ("c2", "superseded", 2),
    ]
    assert check(cluster.directory) == []


def report(step: int, *batches: int) -> TrainedMessage:
    """The trainer took the episodes that `sampled` makes for these batches."""
    return {
        "step": step,
        "calls": [
            {"episode_id": f"e{batch}", "call_id": f"c{batch}", "outcome": "trained", "tokens": 2}
            for batch in batches
        ],
        "groups": [{"batch": batch, "position": 0, "episodes": [f"e{batch}"]} for batch in batches],
    }


@pytest.mark.slow
def test_what_a_killed_driver_did_not_hear_of_is_booked_from_the_reports(cluster: Cluster) -> None:
    """The trainer wrote a checkpoint of the step before the driver had its message."""
    cluster.sampled("one", 1, 2, 3)
    cluster.trained(1)
    cluster.run.roll_back(2, reports=[report(1, 1), report(2, 2)])
    cluster.run.close_books()
    assert cluster.query("SELECT step, call_id, outcome FROM ledger ORDER BY ALL") == [
        (1, "c1", "trained"),
        (2, "c2", "trained"),
        (3, "c3", "superseded"),
    ]


@pytest.mark.slow
def test_groups_that_were_carried_over_are_of_the_step_that_took_them(cluster: Cluster) -> None:
    """They were recorded as those of the last step that may take them; one of them taught
    nothing, and its node booked it so."""
    cluster.sampled("one", 3, 4, 5)
    with cluster.node("one") as writer:
        writer.put(
            LedgerEntry(
                run_id=RUN,
                step=4,
                episode_id="e4",
                call_id="c4",
                outcome="zero_advantage",
                tokens=2,
            )
        )
    first = report(1, 3)
    second = report(2, 4)
    second["calls"] = []
    cluster.run.roll_back(2, reports=[first, second])
    cluster.run.close_books()
    assert cluster.query("SELECT step, call_id, outcome FROM ledger ORDER BY ALL") == [
        (1, "c3", "trained"),
        (2, "c4", "zero_advantage"),
        (5, "c5", "superseded"),
    ]
    assert cluster.query("SELECT step, superseded FROM episodes ORDER BY step") == [
        (1, False),
        (2, False),
        (5, True),
    ]


@pytest.mark.slow
def test_what_is_brought_again_replaces_what_was_there(cluster: Cluster) -> None:
    """First the file and the log of a process that is there yet, then what it left in the end, in a
    file alone."""
    with cluster.node("one") as writer:
        writer.put(*records(1))
        writer.flush()
        cluster.run.copy_traces()
        assert (cluster.directory / "trace-one.duckdb.wal").exists()
        writer.put(*records(2))
    cluster.run.close_books()
    assert cluster.query("SELECT step FROM episodes ORDER BY step") == [(1,), (2,)]


def test_a_model_that_is_not_there_is_told_in_a_line() -> None:
    config = load_config(values={"backbone": "trinity", "model": {"path": "./nowhere"}})
    with pytest.raises(
        ConfigError, match=r"model\.path: .* cannot be loaded as a causal language model"
    ) as told:
        learning_rate(config, "./nowhere", print)
    assert "\n" not in str(told.value)


def test_the_driver_is_told_of_a_group_whatever_its_agents_returned_or_raised() -> None:
    failed = Episode(status="failed", error=describe_error(ValueError("no answer: \ud83d")))
    call = Call(call_id="c", episode_id="e", request={"messages": []}, output_ids=[1])
    odd = Episode(episode_id="e", output={"board": object()}, calls=(call,))
    told = [
        Episode.model_validate_json(text)
        for text in group_message([failed, odd], 1, 0, "train", {})["episodes"]
    ]
    assert told[0].error == "ValueError: no answer: ?"
    assert told[1].episode_id == odd.episode_id and [call.call_id for call in told[1].calls] == [
        "c"
    ]
