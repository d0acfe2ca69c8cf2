"""What Ray reports of a process that failed becomes one line: the cause, the actor, its node, its
log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trinity", reason="needs Trinity-RFT: just install-trinity")
pytest.importorskip("ray", reason="needs Ray: just install-trinity")

import ray

from ajet_sdk.backbones.shared.failure import failure_of
from ajet_sdk.backbones.trinity.launch import first_error

BOILERPLATE = (
    "Refer to the documentation",
    "tracing_helper",
    "RayTaskError",
    "Some common causes",
    "resource-isolation",
)


def actors() -> tuple[Any, Any]:
    """Made here, so that they travel by value: an engine, and an explorer over it as Trinity's is
    over its engines."""

    class Engine:
        def __init__(self, full: bool = False) -> None:
            if full:
                self.write()

        def write(self) -> None:
            with Path("/dev/full").open("w") as disk:
                disk.write("weights")

        def die(self) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        def raise_lines(self) -> None:
            raise ValueError("the first line\nFile is no traceback\n  the third")

    class Explorer:
        def __init__(self) -> None:
            self.engine = ray.remote(Engine).options(name="rollout_0_0", num_cpus=0).remote()

        async def explore(self, what: str) -> None:
            await getattr(self.engine, what).remote()

        async def prepare(self) -> None:
            await ray.remote(Engine).options(num_cpus=0).remote(True).write.remote()

    return Engine, Explorer


@pytest.fixture
def explorer(nodes: Any) -> Iterator[Any]:
    one = ray.remote(actors()[1]).options(num_cpus=0).remote()
    yield one
    ray.kill(one)  # its engine ends with it


def report_of(reference: Any) -> str:
    with pytest.raises(ray.exceptions.RayError) as told:
        ray.get(reference)
    return str(told.value)


def check(report: str, *named: str) -> None:
    said = str(failure_of(report))
    assert "\n" not in said and not any(word in said for word in BOILERPLATE), said
    for one in (*named, ray.util.get_node_ip_address(), "log: "):
        assert one in said
    log = Path(said.rpartition("log: ")[2].rstrip(")"))
    assert log.is_file() and str(failure_of(report).pid) in log.name


def test_a_full_disk_is_told_with_the_actor_that_met_it(explorer: Any) -> None:
    check(report_of(explorer.explore.remote("write")), "No space left on device", "Engine.write")
    check(report_of(explorer.prepare.remote()), "No space left on device", "Engine.__init__")


def test_a_killed_process_is_told_by_name(explorer: Any) -> None:
    report = report_of(explorer.explore.remote("die"))
    check(report, "was killed or crashed", "`dmesg`", "Engine rollout_0_0")
    assert failure_of(report).died


def test_the_first_line_of_a_message_of_several_is_the_cause(explorer: Any) -> None:
    check(
        report_of(explorer.explore.remote("raise_lines")),
        "ValueError: the first line (Engine.raise_lines",
    )


def test_an_actor_that_was_ended_says_by_what(explorer: Any) -> None:
    ray.get(explorer.__ray_ready__.remote())
    ray.kill(explorer)
    found = failure_of(report_of(explorer.prepare.remote()))
    assert found.died and "ray.kill" in found.cause and "Explorer" in found.actor


def test_a_lack_of_memory_is_told_with_how_much_there_was() -> None:
    """A Ray of its own, which takes a hundredth of the memory for all of it."""
    program = """
import threading
import ray
from ajet_sdk.backbones.shared.failure import failure_of

class Engine:
    def wait(self):
        threading.Event().wait()  # until it is killed, however late Ray looks

ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
try:
    ray.get(ray.remote(Engine).options(name="rollout_0_0").remote().wait.remote())
except ray.exceptions.RayError as error:
    print(failure_of(str(error)))
"""
    limits = {"RAY_memory_usage_threshold": "0.01", "RAY_memory_monitor_refresh_ms": "100"}
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **limits, "PYTHONPATH": root},
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("out of memory: "), done.stdout + done.stderr
    assert "GB of the node's" in done.stdout and not any(
        word in done.stdout for word in BOILERPLATE
    )


def logged(directory: Path, name: str, second: int, text: str, line: int = 12) -> None:
    """As Trinity's formatter writes it: its prefix before every line."""
    start = f"ERROR 11-22 13:00:{second:02d} [explorer.py:{line}] "
    with (directory / name).open("a", newline="") as log:
        log.write(
            f"INFO 11-22 12:59:59 [explorer.py:1] begun\n{start}"
            + text.replace("\n", f"\r\n{start}")
            + "\n"
        )


def test_the_earliest_error_of_the_logs_is_told_without_rays_advice(
    explorer: Any, tmp_path: Path
) -> None:
    full, died = (report_of(explorer.explore.remote(what)) for what in ("write", "die"))
    traceback = (
        'Traceback (most recent call last):\n  File "explorer.py", line 299, in explore\n    await'
        " it\n"
    )
    logged(tmp_path, "trainer.log", 9, f"Error in Trainer:\n{traceback}{full}")
    logged(tmp_path, "explorer.log", 8, f"Error in Explorer: {traceback}{died}")
    logged(tmp_path, "explorer.log", 8, "Something else in the same second", line=99)
    said = first_error(tmp_path) or ""
    assert (
        said.startswith("Error in Explorer: the process was killed or crashed")
        and "Engine rollout_0_0" in said
    )
    assert not any(word in said for word in BOILERPLATE) and "Something else" not in said
    assert said.endswith(f"(log: {tmp_path / 'explorer.log'})")
    (tmp_path / "explorer.log").unlink()
    said = first_error(tmp_path) or ""
    assert said.startswith(
        "Error in Trainer: OSError: [Errno 28] No space left on device (Engine.write on "
    )
