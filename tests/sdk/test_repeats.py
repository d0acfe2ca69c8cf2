"""`rollout.deterministic`: bit-identical tokens, log-probabilities and weights, whenever calls
arrive, under load, and after kills."""

from __future__ import annotations

import multiprocessing
import random
import signal
from pathlib import Path

import pytest

from ajet_sdk.config.config import Config
from ajet_sdk.config.model_source import saved_steps
from tests.sdk.repeating import numbers_of, repeat, repeating_job

KILLS = 20
CALLS = 3 * 3 * 7
"""Of a step."""


@pytest.mark.long
@pytest.mark.slow
def test_a_run_under_load_that_is_killed_twenty_times_repeats_to_the_bit(
    tmp_path: Path, tiny_model: Path
) -> None:
    """And whenever calls arrive: `repeat` lets them come in another order every time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.sdk.repeating", "ajet_sdk.backbones.local"])

    def start(config: Config, **how: int | float | bool | None) -> int | None:
        process = context.Process(target=repeat, args=(config,), kwargs=how)
        process.start()
        process.join()
        return process.exitcode

    killed, draw = tmp_path / "killed", random.Random(0)
    load = [context.Process(target=_spin, daemon=True) for _ in range(2)]
    for process in load:
        process.start()
    try:
        for kill in range(KILLS):
            how = {"kill_after": draw.randrange(1, 2 * CALLS), "pause": draw.random() * 0.3}
            assert (
                start(repeating_job(killed, tiny_model, 100), resume=kill > 0, **how)
                == -signal.SIGKILL
            )
        [run] = (killed / "experiment" / "checkpoint").iterdir()
        steps = max(saved_steps(run), default=0) + 1
        finished = repeating_job(killed, tiny_model, steps)
        assert start(finished, resume=True) == 0
    finally:
        for process in load:
            process.terminate()
    straight = repeating_job(tmp_path / "straight", tiny_model, steps)
    assert start(straight) == 0
    calls, hashes, weights = numbers_of(straight)
    assert numbers_of(finished) == (calls, hashes, weights) and calls and hashes and weights


def _spin() -> None:
    while True:
        pass


@pytest.mark.slow
def test_the_number_of_threads_changes_no_bit(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, hashes = multiprocessing.get_context("spawn"), []
    for threads in ("1", "2"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        config = repeating_job(tmp_path / threads, tiny_model, 2)
        process = context.Process(target=repeat, args=(config,))
        process.start()
        process.join()
        hashes.append(numbers_of(config)[1])
    assert hashes[0] == hashes[1] and len(hashes[0]) == 2
