"""Loggers: what goes where, and what is refused."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.errors import ConfigError
from ajet_sdk.reporting.html import learning_curve
from ajet_sdk.reporting.loggers import Display, Loggers
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Run


def loggers(tmp_path: Path, writer: TraceWriter, *names: str) -> Loggers:
    writer.put(Run(run_id="r", name="r", config={"ajet": {"project_name": "p"}}))
    return Loggers(names, directory=tmp_path / "metrics", run_id="r", writer=writer, total_steps=3)


def test_metrics_reach_trace_console_tensorboard_and_curve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert logged.last == {
        "val/reward": 0.25,
        "val/greedy_reward": 0.5,
        "train/reward": 0.5,
        "time/step": 2.0,
    }
    assert (tmp_path / "metrics" / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    [events] = (tmp_path / "metrics" / "tensorboard").iterdir()
    read = [
        (event.step, {one.tag: one.simple_value for one in event.summary.value})
        for event in _events(events)
    ]
    assert read == [
        (0, {}),  # what it is a file of
        (0, {"val/reward": 0.25, "val/greedy_reward": 0.5}),
        (1, {"train/reward": 0.5, "time/step": 2.0}),
    ]


def test_a_step_without_a_reward_is_a_line_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Imitation, preferences and distillation have a loss, and no reward."""
    with (
        TraceWriter(tmp_path / "trace.duckdb") as writer,
        loggers(tmp_path, writer, "console") as logged,
    ):
        logged.log(1, {"train/loss": 2.5, "train/entropy": 1.0, "time/step": 2.0})
        logged.log(2, {"train/loss": 0.6, "train/dpo_accuracy": 0.75, "time/step": 2.0})
        logged.log(3, {"train/loss": 0.1, "train/teacher_kl": 0.125, "time/step": 2.0})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 1/3  loss +2.500  entropy 1.00  s 2.0  ")
    assert lines[1].startswith("step 2/3  loss +0.600  preferred 0.75  s 2.0  ")
    assert lines[2].startswith("step 3/3  loss +0.100  teacher kl 0.125  s 2.0  0:00 left")


def test_a_validation_tells_how_far_it_is_off_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Validation before the first step took minutes without a line in a log file."""
    display = Display(3)
    display.begin("step 0/3 val", 4)
    display.advance(2)
    assert capsys.readouterr().out == ""  # a short one needs none
    monkeypatch.setattr("ajet_sdk.reporting.loggers._QUIET", 0.0)
    display.advance()
    display.advance()
    display.stop()
    assert capsys.readouterr().out == "step 0/3 val: 3 of 4 in 0:00\n"


def _events(file: Path) -> list[Any]:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    return list(LegacyEventFileLoader(str(file)).Load())


@pytest.mark.parametrize("names", [("tensorboard",), ("console", "tensorboard")])
def test_a_tensorboard_that_fails_in_the_middle_is_one_warning_and_the_run_goes_on(
    tmp_path: Path,
    names: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        with loggers(tmp_path, writer, *names) as logged:
            logged.log(1, {"train/reward": 0.5})
            [events] = (tmp_path / "metrics" / "tensorboard").iterdir()
            _fill_the_disk_of(events)
            for step in range(2, 40):
                logged.log(step, {"train/reward": 0.5, **{f"train/{i}": 1.0 for i in range(30)}})
        writer.flush()
        assert writer.query("SELECT max(step) AS last FROM metrics").to_pylist() == [{"last": 39}]
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1 and "tensorboard failed" in said[0] and "the trace" in said[0]
    assert str(events) in said[0] and "No space left on device" in said[0]
    assert "Traceback" not in "".join(capfd.readouterr())
    assert [event.step for event in _events(events)] == [0, 1]


def _fill_the_disk_of(file: Path) -> None:
    """Have what this process writes to an open file end in the error of a full disk."""
    opened = [
        fd for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink() and fd.readlink() == file
    ]
    assert opened
    with Path("/dev/full").open("wb") as full:
        for descriptor in opened:
            os.dup2(full.fileno(), int(descriptor.name))


def test_other_loggers_are_refused_with_what_there_is(tmp_path: Path) -> None:
    known = "is unknown; choose from console, tensorboard, wandb, swanlab"
    with TraceWriter(tmp_path / "trace.duckdb") as writer, pytest.raises(ConfigError, match=known):
        loggers(tmp_path, writer, "tensorbord")


def test_without_a_reward_there_is_no_curve() -> None:
    assert learning_curve({"train/loss": {1: 0.5}}) is None


def test_a_tensorboard_that_cannot_be_imported_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "__init__.py").write_text(
        "raise TypeError('Descriptors cannot be created directly')"
    )
    for name in [
        n
        for n in sys.modules
        if n.partition(".")[0] == "tensorboard" or n.startswith("torch.utils.tensorb")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with (
        TraceWriter(tmp_path / "trace.duckdb") as writer,
        pytest.raises(ConfigError, match=r"TypeError: Descriptors"),
    ):
        loggers(tmp_path, writer, "tensorboard")
