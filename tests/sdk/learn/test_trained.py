"""Rows of `trained`: each call's own places in its timeline, as long as what it sampled."""

from __future__ import annotations

import math

import numpy as np

from ajet_sdk.learn.scores import trained_calls
from ajet_sdk.samples.build import build
from ajet_sdk.types import Call, Episode, Reward


def episode(name: str, reward: float) -> Episode:
    first = Call(
        call_id=f"{name}-0",
        episode_id=name,
        prompt_ids=[1, 2],
        output_ids=[3, 4, 5],
        logprobs=[-1, -2, -3],
    )
    second = Call(
        call_id=f"{name}-1",
        episode_id=name,
        index=1,
        prompt_ids=[1, 2, 3, 4, 5, 6],
        output_ids=[7, 8, 9],
        logprobs=[-4, -5, -6],
    )
    return Episode(
        episode_id=name,
        run_id="r",
        group_id="g",
        step=4,
        calls=(first, second),
        rewards=(Reward(value=reward),),
    )


def test_a_call_gets_its_own_places_and_nan_for_what_was_cut_off() -> None:
    episodes = [episode("good", 1.0), episode("bad", 0.0)]
    batch = build(episodes, max_tokens=8)
    scores = [np.arange(len(s.timeline.token_ids), dtype=np.float32) for s in batch.samples]
    rows = {
        t.call_id: t
        for t in trained_calls("r", 4, batch.samples, episodes, scores, [-s for s in scores])
    }
    assert set(rows) == {"good-0", "good-1", "bad-0", "bad-1"}
    assert rows["good-0"].logprobs.tolist() == [2, 3, 4]
    assert rows["good-1"].logprobs[:2].tolist() == [6, 7] and math.isnan(rows["good-1"].logprobs[2])
    assert rows["good-1"].entropy[:2].tolist() == [-6, -7]
    assert (rows["good-0"].run_id, rows["good-0"].step, rows["good-0"].episode_id) == (
        "r",
        4,
        "good",
    )
    assert rows["good-0"].advantages[0] > 0 > rows["bad-0"].advantages[0]
    assert math.isnan(rows["bad-1"].advantages[2])
    booked = {row.call_id: row.tokens for row in batch.ledger if row.outcome == "trained"}
    assert {name: int(np.isfinite(t.advantages).sum()) for name, t in rows.items()} == booked


def test_where_nobody_scored_the_tokens_only_the_advantages_are_known() -> None:
    episodes = [episode("good", 1.0), episode("bad", 0.0)]
    rows = list(trained_calls("r", 4, build(episodes).samples, episodes))
    assert all(np.isnan(t.logprobs).all() and np.isnan(t.entropy).all() for t in rows)
    assert all(np.isfinite(t.advantages).all() for t in rows)
