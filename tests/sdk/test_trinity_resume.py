"""A run on Trinity that was killed and is taken up: the trainer's files, the learner's snapshots, errors that count."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from ajet_sdk.backbones.shared.steps import resume_at, saved_step
from ajet_sdk.backbones.trinity.cpu.process import run_service
from ajet_sdk.backbones.trinity.cpu.service import Service
from ajet_sdk.errors import EngineUnavailable
from tests.sdk.test_trinity_service import write_model


def checkpoints(directory: Path, *whole: int, handed_over: int) -> None:
    """As Trinity's trainer leaves them: each step's weights for sampling, and some checkpoints."""
    for step in range(1, handed_over + 1):
        (directory / f"global_step_{step}").mkdir(parents=True)
        (directory / f"global_step_{step}" / "remote_sampler_path.txt").write_text(f"job-sampler-{step}")
    for step in whole:
        (directory / f"global_step_{step}" / ".full_checkpoint").touch()
    (directory / "latest_state_dict_iteration.txt").write_text(str(handed_over))


@pytest.mark.parametrize(("written", "step"), [("4", 4), ("", 4), ("\n", 4), (None, 0)])
@pytest.mark.parametrize("beyond", [0, 1, 2])
def test_the_trainer_begins_at_the_newest_whole_checkpoint(
    tmp_path: Path, written: str | None, step: int, beyond: int
) -> None:
    """However far the weights for sampling are beyond it; an empty file is of one who was killed while writing it."""
    checkpoints(tmp_path, 2, 4, handed_over=4 + beyond)
    newest = tmp_path / "latest_checkpointed_iteration.txt"
    if written is not None:
        newest.write_text(written)
    assert saved_step(tmp_path) == resume_at(tmp_path) == step
    assert (newest.read_text() if step else newest.exists()) == (str(step) if step else False)
    assert not (tmp_path / "latest_state_dict_iteration.txt").exists(), "else Trinity deletes what it writes next"


def test_a_number_that_was_cut_off_before_the_first_checkpoint_is_a_run_without_one(tmp_path: Path) -> None:
    checkpoints(tmp_path, handed_over=2)
    (tmp_path / "latest_checkpointed_iteration.txt").touch()
    assert resume_at(tmp_path) == 0
    assert not (tmp_path / "latest_checkpointed_iteration.txt").exists(), "Trinity would read it"


def test_a_snapshot_that_is_written_anew_is_not_deleted_for_its_past(tmp_path: Path) -> None:
    """Taken up at step 4 with the weights of step 5 handed over, Trinity deletes those, and one step later the 4th."""
    write_model(tmp_path / "model")
    arguments = argparse.Namespace(model=str(tmp_path / "model"), work_dir=str(tmp_path / "work"), temperature=1.0,
                                   settings="{}", dtype="float32", max_model_len=32, max_batch=4, seed=0)  # fmt: skip
    service = Service(arguments)
    try:
        client = TestClient(service.app())

        def save(step: int) -> None:
            client.post("/train/save_weights", json={"name": f"job-sampler-{step}"}).raise_for_status()

        save(5)  # by the attempt that was killed
        for step, stale in ((4, 5), (5, 4), (6, 5)):
            save(step)
            client.delete(f"/checkpoints/job-sampler-{stale}").raise_for_status()
            client.post("/sampler", json={"path": f"job-sampler-{step}"}).raise_for_status()
        assert sorted(place.name for place in (tmp_path / "work").iterdir()) == ["job-sampler-5", "job-sampler-6"]
    finally:
        asyncio.run(service.sampler.aclose())


@pytest.mark.slow
def test_a_service_that_does_not_start_shows_what_this_start_logged(tmp_path: Path) -> None:
    log, broken = tmp_path / "service.log", tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    log.write_text("ajet: an error of the start before\n")

    async def start() -> None:
        async with run_service(broken, temperature=1.0, max_model_len=8, work_dir=tmp_path / "work", log=log):
            pytest.fail("it started")

    with pytest.raises(EngineUnavailable, match=r"model\.path") as caught:
        asyncio.run(start())
    assert "the start before" not in str(caught.value)
