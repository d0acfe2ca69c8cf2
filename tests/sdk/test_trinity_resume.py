"""A run on Trinity that was killed and is taken up: the files of its trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from ajet_sdk.backbones.shared.steps import resume_at, saved_step
from ajet_sdk.backbones.trinity.reports import first_batch, read_reports, write_report
from ajet_sdk.cluster.mailbox import TrainedMessage
from ajet_sdk.errors import ConfigError


def checkpoints(directory: Path, *whole: int, handed_over: int) -> None:
    """As Trinity's trainer leaves them: each step's weights for sampling, and some checkpoints."""
    for step in range(1, handed_over + 1):
        (directory / f"global_step_{step}").mkdir(parents=True)
        (directory / f"global_step_{step}" / "remote_sampler_path.txt").write_text(
            f"job-sampler-{step}"
        )
    for step in whole:
        (directory / f"global_step_{step}" / ".full_checkpoint").touch()
    (directory / "latest_state_dict_iteration.txt").write_text(str(handed_over))


@pytest.mark.parametrize(("written", "step"), [("4", 4), ("", 4), ("\n", 4), (None, 0)])
@pytest.mark.parametrize("beyond", [0, 1, 2])
def test_the_trainer_begins_at_the_newest_whole_checkpoint(
    tmp_path: Path, written: str | None, step: int, beyond: int
) -> None:
    """However far the weights for sampling are beyond it; an empty file is of one who was killed
    while writing it."""
    checkpoints(tmp_path, 2, 4, handed_over=4 + beyond)
    newest = tmp_path / "latest_checkpointed_iteration.txt"
    if written is not None:
        newest.write_text(written)
    assert saved_step(tmp_path) == resume_at(tmp_path) == step
    assert (newest.read_text() if step else newest.exists()) == (str(step) if step else False)
    assert not (tmp_path / "latest_state_dict_iteration.txt").exists(), (
        "else Trinity deletes what it writes next"
    )


def test_a_number_that_was_cut_off_before_the_first_checkpoint_is_a_run_without_one(
    tmp_path: Path,
) -> None:
    checkpoints(tmp_path, handed_over=2)
    (tmp_path / "latest_checkpointed_iteration.txt").touch()
    assert resume_at(tmp_path) == 0
    assert not (tmp_path / "latest_checkpointed_iteration.txt").exists(), "Trinity would read it"


def taken(step: int, *places: tuple[int, int]) -> TrainedMessage:
    groups = [{"batch": batch, "position": position, "episodes": []} for batch, position in places]
    return {"step": step, "calls": [], "groups": groups}  # type: ignore[typeddict-item]


def test_the_explorer_begins_with_the_first_batch_that_has_groups_to_train(tmp_path: Path) -> None:
    """The second group of the first batch is late; the first step took one of the second batch."""
    for report in (taken(1, (1, 0), (2, 0)), taken(2, (2, 1), (3, 0)), taken(3, (1, 1), (3, 1))):
        write_report(tmp_path, report)
    assert [first_batch(read_reports(tmp_path, n), n, 2, carry_over=2) for n in (1, 2, 3)] == [
        0,
        0,
        3,
    ]
    assert first_batch([], 4, 2, carry_over=2) == 4, "a run of before there were reports"


def test_a_run_that_carried_groups_over_is_not_resumed_without_it() -> None:
    """It would train one group twice, and another never. A group that was lost is no such one."""
    carried = [taken(1, (1, 0), (2, 0))]
    with pytest.raises(ConfigError, match=r"rollout\.carry_over"):
        first_batch(carried, 1, 2, carry_over=0)
    assert first_batch([taken(1, (1, 0))], 1, 2, carry_over=0) == 1
