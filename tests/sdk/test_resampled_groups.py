"""Dynamic sampling: groups without signal are replaced by other tasks, within the same step."""

from __future__ import annotations

from pathlib import Path

import pytest

import ajet
from ajet_sdk.run import train
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.types import Episode
from ajet_tools.trace.files.check import check
from tests.sdk.test_local_backbone import job, talk

SILENT = ("yes", "no", "maybe")


@ajet.judge
def some(output: str, episode: Episode) -> float:
    """Three of the five training tasks give every attempt the same reward."""
    return (
        0.0
        if any(f"Say {word}." == episode.task.main_query for word in SILENT)
        else episode.attempt / 3
    )


def groups(tmp_path: Path, model: Path, rounds: int) -> dict[int, list[tuple[str, bool]]]:
    """The tasks of each step in their order, and whether any of their tokens were trained."""
    tmp_path.mkdir()
    config = job(tmp_path, model, val_before_train=False, test_freq=0)
    config = config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"resample_groups": rounds})}
    )
    train(config, workflow=talk, judge=some)
    assert check(config.directory) == []
    with open_trace(config.directory) as trace:
        rows = trace.query("""
            SELECT e.step, json_extract_string(e.task, '$.main_query') AS asked, bool_or(l.outcome = 'trained') AS used
            FROM episodes e JOIN ledger l USING (episode_id) WHERE e.split = 'train'
            GROUP BY e.step, asked, e.group_id ORDER BY min(e.started_at)""").to_pylist()
    return {
        step: [(row["asked"], row["used"]) for row in rows if row["step"] == step]
        for step in (1, 2)
    }


@pytest.mark.slow
def test_groups_without_signal_are_replaced_until_the_batch_is_full(
    tmp_path: Path, tiny_model: Path
) -> None:
    without, replaced = (groups(tmp_path / str(rounds), tiny_model, rounds) for rounds in (0, 5))
    for step, before in without.items():
        assert len(before) == 2 and replaced[step][:2] == before
        used = [asked for asked, trained in replaced[step] if trained]
        assert sorted(used) == ["Say so.", "Say well."], "the batch is full of tasks with signal"
        assert len({asked for asked, _ in replaced[step]}) == len(replaced[step]), (
            "no task comes twice"
        )
    assert any(not trained for step in without.values() for _, trained in step)
