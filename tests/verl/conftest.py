"""Settings of the suite over a real verl, without GPUs: `just test-verl`. Without `verl` and `ray`
most files skip."""

from __future__ import annotations

import os

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights with a tokenizer and a chat template."""
    from tests.tiny_models import save_tiny

    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def no_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl takes padding away by flash-attn, which needs CUDA; for the test, by what Trinity's
    trainer does then."""
    from verl.utils import attention_utils

    from ajet_sdk.backbones.shared.padding import unpad_without_flash_attention

    own = attention_utils._get_attention_functions
    monkeypatch.setattr(
        attention_utils, "_get_attention_functions", own
    )  # undone at the end, with what follows
    unpad_without_flash_attention()


@pytest.fixture(scope="session")
def model(tiny: Path) -> Any:
    """The same, loaded."""
    from ajet_sdk.engines.local.loading import load_model

    return load_model(tiny, dtype="float32", device="cpu").eval()


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A Ray of this suite's own, to which this process is connected."""
    import ray

    ray.init(
        "local", num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False
    )
    yield
    ray.shutdown()


@pytest.fixture
def setting(cluster: None, tiny: Path, tmp_path: Path) -> Callable[..., Any]:
    """Makes a job in a folder of the test's own."""
    from .setting import Setting

    return lambda **more: Setting(tmp_path / "experiment", tiny, **more)
