"""What is said of a batch."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk.rollout.outcomes import (
    check_sound,
    failure_messages,
    failures_by_cause,
    pass_at_k,
    solved,
    untrained_entries,
)
from ajet_sdk.types import Call, Episode, Reward


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(1, 8))
def test_pass_at_k_is_the_mean_over_every_choice_of_k(outcomes: list[bool], k: int) -> None:
    if k > len(outcomes):
        with pytest.raises(ValueError, match="it needs at least k"):
            pass_at_k(len(outcomes), sum(outcomes), k)
        return
    choices = list(itertools.combinations(outcomes, k))
    assert pass_at_k(len(outcomes), sum(outcomes), k) == pytest.approx(
        sum(map(any, choices)) / len(choices)
    )


def test_solved_is_what_the_judge_said_or_a_full_reward() -> None:
    full, half = (Reward(value=1),), (Reward(value=0.5),)
    assert (
        solved(Episode(rewards=full))
        and not solved(Episode(rewards=half))
        and not solved(Episode())
    )
    assert solved(Episode(rewards=half, is_success=True)) and not solved(
        Episode(rewards=full, is_success=False)
    )


def test_a_sound_batch_says_nothing() -> None:
    call = Call(episode_id="e", output_ids=[1, 2])
    batch = [Episode(calls=(call,), rewards=(Reward(value=1),))] * 4
    assert failure_messages(batch) == [] and failures_by_cause(batch) == []
    check_sound(batch, 1.0)
    check_sound([], 1.0)


def test_a_cause_is_named_once() -> None:
    """Where the causes are listed beside them, notices do not tell the first again."""
    lost = Episode(
        status="failed", cause="NoReward", error="ajet_sdk.errors.NoReward: there is no judge\nmore"
    )
    assert failures_by_cause([lost])[0].startswith("1 × NoReward: there is no judge (episode ")
    assert failures_by_cause([Episode(status="timeout", error="timeout: 3 s")])[0].startswith(
        "1 × timeout: 3 s ("
    )
    assert failure_messages([lost], cause=False) == ["1 of 1 episodes failed"]
    assert "there is no judge" in failure_messages([lost])[0]


def test_calls_to_other_models_only_are_worth_a_word() -> None:
    call = Call(episode_id="e", trainable=False, model="gpt-4o")
    [notice] = failure_messages([Episode(calls=(call,))])
    assert "gpt-4o" in notice and "rollout.policy_models" in notice


def test_entries_of_an_evaluation_count_every_sampled_token() -> None:
    sampled, cancelled = (
        Call(episode_id="e", output_ids=[1, 2, 3]),
        Call(episode_id="e", cut_tokens=5),
    )
    calls = (sampled, Call(episode_id="e", trainable=False), cancelled, Call(episode_id="e"))
    entries = untrained_entries(Episode(episode_id="e", run_id="r", step=2, calls=calls))
    assert [(e.call_id, e.outcome, e.tokens, e.step) for e in entries] == [
        (sampled.call_id, "evaluation", 3, 2),
        (cancelled.call_id, "evaluation", 5, 2),
    ]
