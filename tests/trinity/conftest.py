"""Settings of the suite over a real Trinity-RFT: `just test-trinity`. Without `trinity` and `ray`
every file skips."""

from __future__ import annotations

import os

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRINITY_LOG_LEVEL", "ERROR")

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.backbones.trinity.without_vllm import stand_in
from ajet_sdk.cluster.code import install_code

from .experiments import ROOT, Experiment

install_code()
try:
    import_module("vllm.entrypoints.chat_utils")
except ImportError:  # no vLLM, or none that Trinity's own module can be imported with
    stand_in()


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


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A Ray node that says it has three GPUs, and whose processes take the CPU for one."""
    from ray.cluster_utils import Cluster

    shim = Path(__file__).parent / "verl_cpu"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AJET_TEST_MARK", uuid.uuid4().hex)
        environment.setenv("AJET_TEST_PLAIN_PATH", str(ROOT))
        environment.setenv("AJET_TEST_VLLM", str(tmp_path_factory.mktemp("vllm")))
        environment.setenv("PYTHONPATH", os.pathsep.join([str(shim), str(ROOT)]))
        cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 8, "num_gpus": 3, "include_dashboard": False},
        )
        yield cluster
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
