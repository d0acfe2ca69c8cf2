"""Loggers: what goes where, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ajet_sdk.errors import ConfigError
from ajet_sdk.loggers import Loggers, learning_curve
from ajet_sdk.trace.writer import TraceWriter


def loggers(tmp_path: Path, writer: TraceWriter, *names: str) -> Loggers:
    return Loggers(names, directory=tmp_path / "metrics", run_id="r", writer=writer, total_steps=3)


def test_metrics_reach_trace_console_tensorboard_and_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        with loggers(tmp_path, writer, "console", "tensorboard") as logged:
            logged.log(0, {"val/reward": 0.25, "val/greedy_reward": 0.5})
            logged.log(1, {"train/reward": 0.5, "train/loss": float("nan"), "time/step": 2.0})
            logged.say("[not] markup")
        writer.flush()
        rows = writer.query("SELECT step, name, value FROM metrics ORDER BY step, name").to_pylist()
    assert [(r["step"], r["name"], r["value"]) for r in rows] == [
        (0, "val/greedy_reward", 0.5),
        (0, "val/reward", 0.25),
        (1, "time/step", 2.0),
        (1, "train/reward", 0.5),
    ]
    said = capsys.readouterr().out
    assert "step 0/3  validation: reward 0.250  greedy reward 0.500" in said
    assert "step 1/3  reward 0.500  s 2.0  0:04 left" in said
    assert "[not] markup" in said
    assert logged.last == {"val/reward": 0.25, "val/greedy_reward": 0.5, "train/reward": 0.5, "time/step": 2.0}
    assert (tmp_path / "metrics" / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "metrics" / "tensorboard").iterdir())


def test_other_loggers_are_refused_with_what_there_is(tmp_path: Path) -> None:
    known = "not known; there are console, tensorboard, wandb, swanlab"
    with TraceWriter(tmp_path / "trace.duckdb") as writer, pytest.raises(ConfigError, match=known):
        loggers(tmp_path, writer, "tensorbord")


def test_without_a_reward_there_is_no_curve(tmp_path: Path) -> None:
    assert learning_curve(tmp_path / "curve.png", {"train/loss": {1: 0.5}}) is None
    assert list(tmp_path.iterdir()) == []


def test_a_tensorboard_that_cannot_be_imported_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "__init__.py").write_text("raise TypeError('Descriptors cannot be created directly')")
    for name in [n for n in sys.modules if n.partition(".")[0] == "tensorboard" or n.startswith("torch.utils.tensorb")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with TraceWriter(tmp_path / "trace.duckdb") as writer, pytest.raises(ConfigError, match=r"TypeError: Descriptors"):
        loggers(tmp_path, writer, "tensorboard")
