"""Settings of the suite over a real Trinity-RFT: `just test-trinity`. Without `trinity` and `ray`
every file skips."""

from __future__ import annotations

import os

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRINITY_LOG_LEVEL", "ERROR")

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.backbones.trinity.without_vllm import install

from .experiments import Experiment

install()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights with a tokenizer and a chat template."""
    from tests.tiny_models import VLLMS, save_tiny

    return save_tiny(tmp_path_factory.mktemp("models") / "tiny", VLLMS)


@pytest.fixture(scope="session")
def nodes() -> Iterator[Any]:
    """A Ray cluster of this suite's own, to which this process is connected; one node with four
    CPUs, it says."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False}
    )
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def experiment(tmp_path: Path, tiny: Path) -> Iterator[Callable[..., Any]]:
    """Makes an experiment; what is left of its run is ended with the test."""
    made: list[Experiment] = []

    def make(
        questions: Sequence[str],
        config: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        **roots: Any,
    ) -> Experiment:
        folder = tmp_path / f"project{len(made)}"
        made.append(Experiment(folder, tiny, questions, config or {}, roots, environment or {}))
        return made[-1]

    yield make
    for one in made:
        if one.process is not None and one.process.poll() is None:
            one.process.kill()
            one.process.wait()
