"""wandb and swanlab, the real packages, offline: what they wrote is read back from their files."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import signal
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.errors import ConfigError, MissingExtra
from ajet_sdk.reporting import trackers
from ajet_sdk.reporting.loggers import Loggers
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Run
from tests.waiting import FOREVER

NAMES = ("wandb", "swanlab")
RUN = "0123456789abcdef0123456789abcdef"


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in NAMES:
        monkeypatch.setenv(f"{name.upper()}_MODE", "offline")
        monkeypatch.delenv(f"{name.upper()}_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # no login of the person who runs the tests
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()  # it reads the environment once


def records(name: str, directory: Path) -> Iterator[Any]:
    """The records in a tracker's files, oldest run first: a leveldb log of protobuf messages."""
    pattern = "wandb/offline-run-*/*.wandb" if name == "wandb" else "swanlab/run-*/*.swanlab"
    for path in sorted(directory.glob(pattern)):
        if name == "wandb":
            from wandb.proto import wandb_internal_pb2

            data, at, held = path.read_bytes(), 7, b""
            while at + 7 <= len(data):
                _, size, kind = struct.unpack("<IHB", data[at : at + 7])
                held += data[at + 7 : at + 7 + size]
                at += 7 + size
                left = 32768 - at % 32768
                at += left if left < 7 else 0
                if kind in (1, 4):
                    yield wandb_internal_pb2.Record.FromString(held)
                    held = b""
        else:
            from swanlab.proto.swanlab.record.v1.record_pb2 import Record
            from swanlab.sdk.internal.core_python.store import DataStoreReader

            reader = DataStoreReader()
            reader.open(path)
            yield from map(Record.FromString, reader)


def points(name: str, directory: Path) -> list[tuple[int, str, float]]:
    """(step, metric, value) in the order in which they were logged."""
    found: list[tuple[int, str, float]] = []
    for record in records(name, directory):
        if name == "wandb" and record.WhichOneof("record_type") == "history":
            values = {
                item.key or item.nested_key[0]: json.loads(item.value_json)
                for item in record.history.item
            }
            found += [
                (values["step"], key, v)
                for key, v in values.items()
                if "/" in key and not key.startswith("_")
            ]
        elif name == "swanlab" and record.WhichOneof("record_type") == "scalar":
            scalar = record.scalar
            found.append((scalar.step, scalar.key, scalar.value.number))
    return found


def loggers(tmp_path: Path, writer: TraceWriter, *names: str) -> Loggers:
    config = {"ajet": {"project_name": "sums", "rollout": {"num_repeat": 8}}}
    writer.put(Run(run_id=RUN, name="math", config=config, backbone="local"))
    return Loggers(
        ["console", *names],
        directory=tmp_path / "metrics",
        run_id=RUN,
        writer=writer,
        total_steps=9,
    )


@pytest.mark.parametrize("name", NAMES)
def test_metrics_project_name_and_config_are_there(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(name)
    with (
        TraceWriter(tmp_path / "trace.duckdb") as writer,
        loggers(tmp_path, writer, name) as logged,
    ):
        logged.log(0, {"val/reward": 0.25})
        logged.log(1, {"train/reward": 0.5, "train/loss": float("nan")})
        logged.log(1, {"val/pass@4": 0.75})
    assert sorted(points(name, tmp_path / "metrics")) == [
        (0, "val/reward", 0.25),
        (1, "train/reward", 0.5),
        (1, "val/pass@4", 0.75),
    ]
    text = "".join(str(record) for record in records(name, tmp_path / "metrics"))
    assert all(word in text for word in ("sums", "math", RUN))
    folder = tmp_path / "metrics" / name
    written = text + "".join(path.read_text() for path in folder.rglob("config.yaml"))
    assert "num_repeat" in written
    assert f"{name} sync" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_is_the_same_one_and_its_axis_may_go_back(tmp_path: Path, name: str) -> None:
    pytest.importorskip(name)
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        with loggers(tmp_path, writer, name) as logged:
            for step in (1, 2, 3):
                logged.log(step, {"train/reward": step / 10})
        with loggers(tmp_path, writer, name) as logged:
            for step in (2, 3, 4):
                logged.log(step, {"train/reward": step / 5})
    assert points(name, tmp_path / "metrics") == [
        (step, "train/reward", pytest.approx(value)) for step, value in
        ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.4), (3, 0.6), (4, 0.8))
    ]  # fmt: skip
    places = list((tmp_path / "metrics" / name).glob("*run-*"))
    assert len(places) == 2 and all(place.name.endswith(RUN) for place in places)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "error", [asyncio.CancelledError(), KeyboardInterrupt(), ValueError("broken")]
)
def test_a_run_that_ends_before_its_time_is_closed_as_what_it_is(
    tmp_path: Path, name: str, error: BaseException
) -> None:
    pytest.importorskip(name)
    with (
        pytest.raises(type(error)),
        TraceWriter(tmp_path / "trace.duckdb") as writer,
        loggers(tmp_path, writer, name) as logged,
    ):
        logged.log(1, {"train/reward": 0.5})
        raise error
    assert points(name, tmp_path / "metrics") == [(1, "train/reward", 0.5)]
    ended = [
        str(r)
        for r in records(name, tmp_path / "metrics")
        if r.WhichOneof("record_type") in ("exit", "finish")
    ]
    assert len(ended) == 1
    stopped = not isinstance(error, ValueError)
    word = {"wandb": "255" if stopped else "1", "swanlab": "ABORTED" if stopped else "broken"}[name]
    assert word in ended[0]


@pytest.mark.parametrize("name", NAMES)
def test_without_a_login_the_way_out_is_told(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(name)
    monkeypatch.setenv(f"{name.upper()}_MODE", "online")
    monkeypatch.setattr(sys, "stdin", open("/dev/null"))  # noqa: PTH123, SIM115
    with (
        TraceWriter(tmp_path / "trace.duckdb") as writer,
        pytest.raises(ConfigError, match=f"{name.upper()}_MODE=off"),
    ):
        loggers(tmp_path, writer, name)


@pytest.mark.parametrize("name", NAMES)
def test_ctrl_c_stays_the_runs(tmp_path: Path, name: str) -> None:
    pytest.importorskip(name)
    before = signal.getsignal(signal.SIGINT)
    with TraceWriter(tmp_path / "trace.duckdb") as writer, loggers(tmp_path, writer, name):
        assert signal.getsignal(signal.SIGINT) is before


def test_a_service_that_does_not_answer_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(trackers, "_BEGIN_SECONDS", 0.1)
    monkeypatch.setattr(trackers, "TRACKERS", {"deaf": lambda run: time.sleep(FOREVER)})
    run = trackers.TrackedRun(RUN, "sums", "math", {}, tmp_path)
    with pytest.raises(
        ConfigError, match=r"deaf could not start the run \(TimeoutError: no answer"
    ):
        trackers.Tracker("deaf", run, print)


def test_a_service_that_breaks_is_told_once_and_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Breaking:
        address = "nowhere"

        def log(self, step: int, metrics: Any) -> None:
            raise OSError("gone")

    monkeypatch.setattr(trackers, "TRACKERS", {"breaking": lambda run: Breaking()})
    said: list[str] = []
    tracker = trackers.Tracker(
        "breaking", trackers.TrackedRun(RUN, "sums", "math", {}, tmp_path), said.append
    )
    for step in range(3):
        tracker.log(step, {"train/reward": 1.0})
    tracker.finish(None)
    assert said == ["breaking: nowhere"]
    [warning] = [record.getMessage() for record in caplog.records]
    assert "breaking failed" in warning and "OSError: gone" in warning


@pytest.mark.parametrize("name", NAMES)
def test_an_absent_package_is_told_with_its_pip_command(tmp_path: Path, name: str) -> None:
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    with (
        TraceWriter(tmp_path / "trace.duckdb") as writer,
        pytest.raises(MissingExtra, match=r"ajet\[loggers\]"),
    ):
        loggers(tmp_path, writer, name)
