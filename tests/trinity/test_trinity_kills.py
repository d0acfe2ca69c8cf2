"""Whatever process of a run is killed, and however long after a checkpoint: it is taken up, and goes to its end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("trinity", reason="needs Trinity-RFT: just install-trinity")
pytest.importorskip("ray", reason="needs Ray: just install-trinity")

from .experiments import Experiment
from .test_trinity_failures import books_balance, process_of

pytestmark = pytest.mark.slow

EVERY = 3
"""Steps from one checkpoint to the next; weights are handed to the sampler at every step."""

PROCESSES = {
    "driver": None,
    "learner": "trinity.cpu.service",
    "trainer": "WholeBatchTrainer",
    "explorer": "SteadyExplorer",
    "synchronizer": "Synchronizer",
    "engine": "TinkerModel",
}
"""Each by what its command line holds."""


def is_beyond(one: Experiment, checkpoint: int, offset: int) -> bool:
    """Whether the weights handed over last are `offset` steps newer than a checkpoint from that step on."""
    steps = []
    for what in ("checkpointed", "state_dict"):
        files = one.directory.glob(f"checkpoint/*/trinity/latest_{what}_iteration.txt")
        steps += [int(text) for file in files if (text := file.read_text())]
    if len(steps) < 2:
        return False
    saved, handed_over = steps
    return saved >= checkpoint and handed_over - saved == offset


@pytest.mark.parametrize("victim", PROCESSES)
def test_a_run_is_taken_up_wherever_it_was_killed(
    experiment: Callable[..., Experiment], nodes: Any, victim: str
) -> None:
    total = EVERY * (EVERY + 1)
    one = experiment(["single 1", "turns 2"], {"trainer_common": {"total_steps": total, "save_freq": EVERY}})
    resume: list[str] = []
    for offset in range(EVERY):
        one.start("--with-ray-cluster", nodes.address, *resume)
        one.until(partial(is_beyond, one, EVERY * (offset + 1), offset))
        assert one.process is not None
        title = PROCESSES[victim]
        os.kill(one.process.pid if title is None else process_of(one, title), signal.SIGKILL)
        assert one.wait() != 0, one.output()
        resume = ["--resume"]
    one.start("--with-ray-cluster", nodes.address, *resume)
    assert one.wait() == 0, one.output()
    assert one.steps_saved() == total
    assert one.output().count("resuming after step") == EVERY
    assert len(list(one.trinity.glob("log.*"))) == EVERY, "each attempt has logs of its own"
    books_balance(one)
    trained = one.query("SELECT DISTINCT step FROM ledger WHERE outcome = 'trained' ORDER BY step")
    assert [row["step"] for row in trained] == list(range(1, total + 1))
