"""Advantages that no file keeps: made again of what training compared them with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ajet_sdk.errors import ConfigError
from ajet_sdk.samples.build import build
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Reward, Run
from ajet_tools.trace.queries.records import recomputed_advantages

REWARDS = {"a0": 1.0, "a1": 0.0, "b0": 1.0, "b1": 1.0, "c0": 0.0, "c1": 0.5}
"""Episodes of the groups a and b in step 1, and c in step 2; the replies are of several lengths."""


def write(path: Path, estimator: str) -> list[Episode]:
    found = []
    for number, (id, reward) in enumerate(REWARDS.items()):
        output = list(range(number + 1))
        call = Call(
            call_id=id,
            episode_id=id,
            prompt_ids=[99],
            output_ids=output,
            logprobs=[-1.0] * len(output),
        )
        of = {
            "run_id": "r",
            "group_id": id[0],
            "attempt": int(id[1]),
            "step": 2 if id[0] == "c" else 1,
        }
        found.append(Episode(episode_id=id, calls=(call,), rewards=(Reward(value=reward),), **of))
    config = {"ajet": {"trainer_common": {"algorithm": {"adv_estimator": estimator}}}}
    with TraceWriter(path) as writer:
        writer.put(Run(run_id="r", config=config, status="finished"))
        for episode in found:
            writer.put(*episode.calls, episode)
    return found


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus"])
def test_they_are_those_of_the_step(tmp_path: Path, estimator: str) -> None:
    stored = write(tmp_path / "t.duckdb", estimator)
    reader = open_trace(tmp_path / "t.duckdb")
    for step in (1, 2):
        samples = build([e for e in stored if e.step == step], estimator=estimator).samples  # type: ignore[arg-type]
        trained = {s.episode_id: s.advantages[s.timeline.loss_mask] for s in samples}
        for id in (e.episode_id for e in stored if e.step == step):
            again = recomputed_advantages(reader, id)
            assert (id in again) == (id in trained)
            if id in trained:
                np.testing.assert_allclose(again[id], trained[id], rtol=1e-5)


def test_an_estimator_of_another_version_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "t.duckdb", "not-yet")
    with pytest.raises(ConfigError, match="not-yet"):
        recomputed_advantages(open_trace(tmp_path / "t.duckdb"), "a0")
