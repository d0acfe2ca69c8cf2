"""Two Ray nodes on one machine, one of which goes in mid-run: no recorded call is lost, and none is
trained twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trinity", reason="needs Trinity-RFT: just install-trinity")
pytest.importorskip("ray", reason="needs Ray: just install-trinity")

from ajet_sdk.trace.reader import ledger_balance, open_trace

from .experiments import Experiment

pytestmark = pytest.mark.slow

STEPS = 3


def raylet(node: Any) -> int:
    """The process of a node under which its workers are."""
    return int(node.all_processes["raylet"][0].process.pid)


def parent(pid: int) -> int | None:
    try:
        return int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def files_of(one: Experiment, node: Any) -> list[Path]:
    """Trace files of worker processes on a node, which are named after them."""
    found = []
    for path in one.directory.glob("trace-*.duckdb"):
        pid = path.stem.rpartition("-")[2]
        if pid.isdecimal() and parent(int(pid)) == raylet(node):
            found.append(path)
    return found


def test_a_node_that_goes_takes_no_record_with_it(
    experiment: Callable[..., Experiment], nodes: Any
) -> None:
    second = nodes.add_node(
        num_cpus=0
    )  # for runners, which ask for no CPU, and for none of Trinity's one of a kind
    removed = False
    try:
        config = {"data": {"train_batch_size": 8}, "trainer_common": {"total_steps": STEPS}}
        spread = {
            "explorer": {"runner_per_model": 8}
        }  # Ray draws each one's node: so many that none is without one
        one = experiment(["slow 1", "slow 2", "turns 1", "fork 1"], config, trinity=spread)
        one.start("--with-ray-cluster", nodes.address)
        one.until(lambda: files_of(one, second) and files_of(one, nodes.head_node))
        there = files_of(one, second)[0]
        one.until(lambda: one.steps_saved() >= 1 and _calls(there))
        before = {row["call_id"] for row in one.query("SELECT call_id FROM calls")}
        on_it = _calls(there)
        nodes.remove_node(second)
        removed = True
        assert one.wait() == 0, one.output()
    finally:
        if not removed:
            nodes.remove_node(second)
    after = {row["call_id"] for row in one.query("SELECT call_id FROM calls")}
    assert on_it and on_it <= before <= after
    assert one.steps_saved() == STEPS
    assert "a runner process died" in one.output()
    with open_trace(one.directory) as trace:
        assert ledger_balance(trace, one.run_id) == []
    twice = (
        "SELECT call_id FROM ledger WHERE outcome = 'trained' GROUP BY call_id HAVING count(*) > 1"
    )
    assert one.query(twice) == []
    trained = one.query("SELECT count(DISTINCT step) AS n FROM ledger WHERE outcome = 'trained'")
    assert trained[0]["n"] > 1, "it went on learning"


def _calls(file: Path) -> set[str]:
    with open_trace(file) as trace:
        return {row["call_id"] for row in trace.query("SELECT call_id FROM calls").to_pylist()}


def test_a_node_that_takes_the_trainer_with_it_is_named_and_the_run_is_taken_up(
    experiment: Callable[..., Experiment],
) -> None:
    """Trinity's actors ask for a CPU each, which only the second node has."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    try:
        second = cluster.add_node(num_cpus=4)
        one = experiment(["single 1", "turns 2"], {"trainer_common": {"total_steps": 12}})
        one.start("--with-ray-cluster", cluster.address)
        one.until(lambda: one.steps_saved() >= 1)
        cluster.remove_node(second, allow_graceful=False)
        assert one.wait() == 1, one.output()
        (message,) = [line for line in one.output().splitlines() if "TrainingError" in line]
        lost = ("explorer", "trainer", "synchronizer", "explorer_rollout_model_0_0")
        for named in (second.node_ip_address, *lost, "--resume"):
            assert named in message
        cluster.add_node(num_cpus=4)
        one.start("--with-ray-cluster", cluster.address, "--resume")
        assert one.wait() == 0, one.output()
        assert one.steps_saved() == 12
    finally:
        cluster.shutdown()
