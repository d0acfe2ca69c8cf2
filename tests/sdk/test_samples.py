"""Samples and the ledger: every sampled token is trained once with its episode's advantage, or
listed with a reason."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk.errors import ConfigError
from ajet_sdk.samples.build import Batch, balance, build
from ajet_sdk.types import Call, Episode, LedgerEntry, Reward


def call(call_id: str, prompt: Sequence[int], output: Sequence[int], **more: Any) -> Call:
    given = {"episode_id": "e", "logprobs": [-0.5] * len(output), "policy_version": 7, **more}
    return Call(call_id=call_id, prompt_ids=prompt, output_ids=output, **given)  # type: ignore[arg-type]


def episode(
    name: str, value: float | None, calls: Sequence[Call] | None = None, **more: Any
) -> Episode:
    calls = [call(f"{name}.0", [1, 2], [3, 4])] if calls is None else calls
    rewards = [] if value is None else [Reward(value=value)]
    given = {"group_id": "g", "run_id": "r", "step": 3, "rewards": rewards, **more}
    return Episode(episode_id=name, calls=tuple(calls), **given)


def outcomes(batch: Batch) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for row in batch.ledger:
        found[row.call_id][row.outcome] = row.tokens
    return dict(found)


def advantages(batch: Batch) -> dict[str, float]:
    return {s.episode_id: float(s.advantages[s.timeline.loss_mask][0]) for s in batch.samples}


def test_grpo_is_the_distance_from_the_groups_mean_in_deviations() -> None:
    batch = build([episode(str(i), v) for i, v in enumerate((1.0, 0.0, 0.0, 1.0))])
    deviation = np.std([1, 0, 0, 1], ddof=1)
    assert advantages(batch)["0"] == pytest.approx(0.5 / deviation, rel=1e-4)
    assert advantages(batch)["1"] == pytest.approx(-0.5 / deviation, rel=1e-4)
    assert advantages(build([episode("0", 3.0), episode("1", 0.0)]))["0"] == pytest.approx(
        0.5**0.5, rel=1e-4
    )
    plain = build(
        [episode(str(i), v) for i, v in enumerate((1.0, 0.0, 0.0, 1.0))], normalize_std=False
    )
    assert advantages(plain)["0"] == pytest.approx(0.5)


def test_rloo_is_the_distance_from_the_mean_of_the_others() -> None:
    batch = build([episode(str(i), v) for i, v in enumerate((1.0, 0.0, 0.5))], estimator="rloo")
    assert advantages(batch) == pytest.approx({"0": 0.75, "1": -0.75, "2": 0.0})


def test_advantages_stand_on_sampled_tokens_only() -> None:
    batch = build([episode("a", 1.0), episode("b", 0.0)])
    sample = batch.samples[0]
    assert sample.advantages.tolist()[:2] == [0.0, 0.0] and all(sample.advantages[2:])
    assert sample.reward == 1.0 and sample.group_id == "g"
    assert batch.samples[1].reward == 0.0


def test_each_episode_counts_once_however_many_calls_it_has() -> None:
    many = [call(f"m{i}", [1, i], [3]) for i in range(9)]
    batch = build([episode("many", 1.0, many), episode("one", 0.0)], normalize_std=False)
    assert advantages(batch) == pytest.approx({"many": 0.5, "one": -0.5})
    assert len(batch.samples) == 10


def test_rewards_may_name_an_agent_or_a_call() -> None:
    def two(name: str, wolf: float, first: float) -> Episode:
        calls = [
            call(f"{name}.w", [1], [2], agent="wolf"),
            call(f"{name}.v", [1], [2], agent="villager"),
        ]
        rewards = [
            Reward(value=wolf, agent="wolf"),
            Reward(value=first, call_id=f"{name}.v"),
            Reward(value=1.0),
        ]
        return episode(name, None, calls, rewards=rewards)

    batch = build([two("a", 1.0, 0.0), two("b", 0.0, 0.5)], normalize_std=False)
    got = {s.timeline.spans[0].call_id: float(s.advantages[1]) for s in batch.samples}
    assert got == pytest.approx({"a.w": 0.5, "a.v": -0.25, "b.w": -0.5, "b.v": 0.25})


def test_calls_that_no_reward_names_are_left_out() -> None:
    def half(name: str, value: float) -> Episode:
        calls = [
            call(f"{name}.w", [1], [2], agent="wolf"),
            call(f"{name}.v", [1], [2], agent="villager"),
        ]
        return episode(name, None, calls, rewards=[Reward(value=value, agent="wolf")])

    batch = build([half("a", 1.0), half("b", 0.0)])
    assert outcomes(batch)["a.v"] == {"zero_advantage": 1}
    assert {s.timeline.agent for s in batch.samples} == {"wolf"}


@pytest.mark.parametrize("values", [(1.0, 1.0), (0.1 + 0.2, 0.3), (1e9 * (0.1 + 0.2), 3e8), (1.0,)])
def test_a_group_without_variance_is_left_out_and_said(values: tuple[float, ...]) -> None:
    batch = build([episode(str(i), v) for i, v in enumerate(values)])
    assert batch.samples == () and batch.metrics["train/tokens_trained"] == 0
    assert batch.metrics["train/merge_ratio"] == 1.0
    assert outcomes(batch)["0.0"] == {"zero_advantage": 2}
    assert batch.metrics["train/groups_zero_variance"] == 1


def test_a_group_whose_attempts_all_failed_is_counted_among_those_that_trained_nothing() -> None:
    """`train/groups` is the number of groups of the step, as a trace's episodes have it."""
    failed = [
        episode(f"f{i}", None, group_id="lost").model_copy(update={"status": "failed"})
        for i in range(2)
    ]
    batch = build([episode("a", 1.0), episode("b", 0.0), *failed])
    assert (batch.metrics["train/groups"], batch.metrics["train/groups_zero_variance"]) == (2, 1)


def test_episodes_without_a_group_are_not_one_group() -> None:
    batch = build([episode(str(i), float(i), group_id="") for i in range(3)])
    assert batch.samples == () and batch.metrics["train/groups"] == 3


def test_outcomes_in_their_order() -> None:
    def odd(name: str, **more: Any) -> Call:
        return call(name, [1], [2, 3], **more)

    calls = [
        odd("ok"),
        odd("untrainable", trainable=False, error="undelivered", policy_version=0),
        odd("judge", phase="judge"),
        odd("undelivered", error="undelivered", policy_version=0),
        odd("blind", logprobs=None),
        odd("nan", logprobs=[-1.0, math.nan]),
        odd("old", policy_version=5),
        odd("stale", policy_version=4),
    ]
    good = episode("good", 1.0, calls)
    others = [
        episode("bad", 0.0),
        episode("crashed", None, [odd("failed", policy_version=0)], status="failed"),
    ]
    val = episode("val", 0.0, [odd("val", trainable=False)], split="val")
    batch = build([good, *others, val], policy_version=6, max_staleness=1)
    assert outcomes(batch) == {
        "ok": {"trained": 2},
        "untrainable": {"untrainable": 2},
        "judge": {"untrainable": 2},
        "undelivered": {"undelivered": 2},
        "blind": {"untrainable": 2},
        "nan": {"untrainable": 2},
        "old": {"trained": 2},
        "stale": {"stale": 2},
        "bad.0": {"trained": 2},
        "failed": {"failed": 2},
        "val": {"evaluation": 2},
    }
    assert all(np.isfinite(s.timeline.logprobs).all() for s in batch.samples)


def test_what_does_not_fit_is_cut_and_said() -> None:
    turns = [call("a", [1, 2], [3, 4, 5]), call("b", [1, 2, 3, 4, 5, 6], [7, 8])]
    batch = build([episode("x", 1.0, turns), episode("y", 0.0)], max_tokens=4)
    assert outcomes(batch)["a"] == {"trained": 2, "truncated": 1}
    assert outcomes(batch)["b"] == {"truncated": 2}
    line = batch.samples[0].timeline
    assert line.token_ids.tolist() == [1, 2, 3, 4] and line.call_ids == ("a",)
    assert line.policy_version == 7
    untrained = call(
        "b", [1, 2, 3, 4, 5], [7], trainable=False
    )  # begins where what is trained ends
    line = build([episode("x", 1.0, [turns[0], untrained]), episode("y", 0.0)]).samples[0].timeline
    assert line.token_ids.tolist() == [1, 2, 3, 4, 5] and line.call_ids == ("a",)


def test_a_timeline_that_is_cut_is_as_old_as_the_oldest_call_that_is_left() -> None:
    versions: list[int | None] = [6, None, 5, 4]
    turns = [
        call(str(i), range(2 * i + 1), [2 * i + 1], policy_version=v)
        for i, v in enumerate(versions)
    ]
    sample = build([episode("x", 1.0, turns), episode("y", 0.0)], max_tokens=6).samples[0]
    assert sample.timeline.call_ids == ("0", "1", "2") and sample.timeline.policy_version == 5
    assert sample.reward == 1.0


def test_a_call_between_others_may_be_left_out_alone() -> None:
    turns = [
        call(str(i), range(2 * i + 1), [2 * i + 1], policy_version=v)
        for i, v in enumerate((7, 5, 7))
    ]
    batch = build([episode("x", 1.0, turns), episode("y", 0.0)], policy_version=7, max_staleness=1)
    line = batch.samples[0].timeline
    assert (
        np.flatnonzero(line.loss_mask).tolist() == np.flatnonzero(line.logprobs).tolist() == [1, 5]
    )
    assert [span.call_id for span in line.spans] == ["0", "2"] and line.policy_version == 7


def test_a_failure_may_be_given_a_value_but_never_an_infrastructure_fault() -> None:
    def crashed(name: str, **more: Any) -> Episode:
        return episode(name, None, status=more.pop("status", "failed"), **more)

    batch = build(
        [
            episode("good", 1.0),
            crashed("own", cause="ZeroDivisionError"),
            crashed("long", cause="ContextOverflow"),
            crashed("engine", cause="EngineUnavailable", infrastructure=True),
            crashed("unjudged", cause="NoReward"),
            crashed("slow", status="timeout"),
        ],
        failure_reward=-1.0,
        normalize_std=False,
    )
    assert advantages(batch) == pytest.approx({"good": 4 / 3, "own": -2 / 3, "long": -2 / 3})
    assert (
        outcomes(batch)["engine.0"]
        == outcomes(batch)["unjudged.0"]
        == outcomes(batch)["slow.0"]
        == {"failed": 2}
    )
    assert batch.metrics["train/reward"] == pytest.approx(-1 / 3)


def test_an_episode_that_failed_before_its_first_call_still_counts() -> None:
    crashed = episode("crashed", None, [], status="failed", cause="ZeroDivisionError")
    batch = build([episode("good", 1.0), crashed], failure_reward=0.0, normalize_std=False)
    assert advantages(batch) == pytest.approx({"good": 0.5})


def test_metrics_of_a_merged_batch() -> None:
    turns = [
        call("a", [1, 2], [3]),
        call("b", [1, 2, 3, 4], [5]),
        call("c", [1, 2, 3, 4, 5, 6], [7]),
    ]
    metrics = build([episode("x", 1.0, turns), episode("y", 0.0, split="train")]).metrics
    assert (
        metrics["train/reward"] == 0.5
        and metrics["train/episodes"] == 2
        and metrics["train/timelines"] == 2
    )
    assert metrics["train/tokens_trained"] == 5 and metrics["train/tokens_sampled"] == 5
    assert metrics["train/merge_ratio"] == pytest.approx((3 + 5 + 7 + 4) / (7 + 4))
    assert build([]).metrics == {} and build([episode("v", 1.0, split="val")]).metrics == {}


def test_an_unknown_estimator_is_named() -> None:
    with pytest.raises(ConfigError, match="grpo, rloo, opo, reinforce_plus_plus"):
        build([], estimator="ppo")  # type: ignore[arg-type]


def test_balance_says_what_does_not_add_up() -> None:
    calls = [call("a", [1], [2, 3]), call("b", [1], [2]), call("free", [1], [2], trainable=False)]

    def row(call_id: str, tokens: int, outcome: Any = "trained") -> LedgerEntry:
        return LedgerEntry(
            run_id="r", step=0, episode_id="e", call_id=call_id, outcome=outcome, tokens=tokens
        )

    assert balance([row("a", 1), row("a", 1, "truncated"), row("b", 1)], calls) == []
    found = balance([row("a", 1), row("a", 2), row("ghost", 1)], calls)
    assert len(found) == 4
    assert any("two ledger rows" in f for f in found) and any("ghost" in f for f in found)
    assert any("3 in the ledger" in f for f in found) and any(
        f.startswith("call b: 1 tokens sampled, none") for f in found
    )
    assert balance([row("a", 3), row("a", -1, "stale"), row("b", 1)], calls) == [
        "call a: -1 tokens stale"
    ]


@st.composite
def batches(draw: st.DrawFn) -> list[Episode]:
    """Groups of episodes of a few agents with drift, branches, failures and whatever else leaves
    tokens out."""
    rng = random.Random(draw(st.integers(0, 2**32 - 1)))
    return [_episode(rng, f"e{i}") for i in range(draw(st.integers(0, 10)))]


def _episode(rng: random.Random, name: str) -> Episode:
    calls: list[Call] = []
    for i in range(rng.randint(0, 7)):
        prompt = [rng.randrange(3) for _ in range(rng.randint(0, 3))]
        if calls and rng.random() < 0.8:
            old = rng.choice(calls)
            prompt = [*old.prompt_ids.tolist(), *old.output_ids.tolist(), *prompt]  # type: ignore[union-attr]
            prompt = prompt[: rng.randint(0, len(prompt))] if rng.random() < 0.2 else prompt
        output = [rng.randrange(3) for _ in range(rng.randint(0, 4))]
        calls.append(
            call(
                f"{name}.{i}",
                prompt,
                output,
                agent=rng.choice("ab"),
                trainable=rng.random() < 0.9,
                phase="judge" if rng.random() < 0.05 else "rollout",
                error=rng.choice([None] * 6 + ["undelivered"]),
                policy_version=rng.choice([None, 5, 6, 7]),
                **({"logprobs": None} if rng.random() < 0.05 else {}),
            )
        )
    rewards = [Reward(value=rng.choice([0.0, 0.5, 1.0])) for _ in range(rng.choice([0, 1, 1, 2]))]
    if rng.random() < 0.3:
        rewards.append(Reward(value=1.0, agent=rng.choice("ab")))
    if calls and rng.random() < 0.3:
        rewards.append(Reward(value=-1.0, call_id=rng.choice(calls).call_id))
    return episode(
        name,
        None,
        calls,
        rewards=rewards,
        group_id=rng.choice(["g1", "g2"]),
        status=rng.choice(["succeeded"] * 5 + ["failed", "timeout", "aborted"]),
        split=rng.choice(["train"] * 5 + ["val"]),
        infrastructure=rng.random() < 0.2,
    )


@given(
    batches(),
    st.sampled_from(["grpo", "rloo", "reinforce_plus_plus"]),
    st.sampled_from([None, 3, 6]),
    st.sampled_from([None, 0, 1]),
    st.sampled_from([None, -1.0]),
)
def test_every_sampled_token_is_trained_once_or_listed_with_a_reason(
    episodes: list[Episode],
    estimator: Any,
    max_tokens: int | None,
    stale: int | None,
    failure: float | None,
) -> None:
    options: dict[str, Any] = {
        "estimator": estimator,
        "max_tokens": max_tokens,
        "failure_reward": failure,
    }
    batch = build(episodes, policy_version=7, max_staleness=stale, **options)
    calls = {c.call_id: c for e in episodes for c in e.calls}
    assert balance(batch.ledger, calls.values()) == []
    trained: dict[str, int] = defaultdict(int)
    for sample in batch.samples:
        line = sample.timeline
        assert max_tokens is None or len(line.token_ids) <= max_tokens
        assert (
            len(sample.advantages)
            == len(line.token_ids)
            == len(line.loss_mask)
            == len(line.logprobs)
        )
        assert not line.logprobs[~line.loss_mask].any()
        assert not sample.advantages[~line.loss_mask].any() and np.isfinite(sample.advantages).all()
        assert line.loss_mask.sum() == sum(s.end - s.start for s in line.spans)
        for span in line.spans:
            c = calls[span.call_id]
            assert np.array_equal(line.token_ids[: span.start], c.prompt_ids)  # type: ignore[arg-type]
            assert np.array_equal(
                line.token_ids[span.start : span.end], c.output_ids[: span.end - span.start]
            )  # type: ignore[index]
            assert np.array_equal(
                line.logprobs[span.start : span.end], c.logprobs[: span.end - span.start]
            )  # type: ignore[index]
            assert len(set(sample.advantages[span.start : span.end].tolist())) == 1
            assert span.call_id not in trained
            trained[span.call_id] += span.end - span.start
            assert c.trainable and c.phase == "rollout" and c.error is None
    listed = {
        row.call_id: row.tokens for row in batch.ledger if row.outcome == "trained" and row.tokens
    }
    assert listed == dict(trained)
    metrics = batch.metrics
    assert (
        all(math.isfinite(v) for v in metrics.values()) and "train/tokens_evaluation" not in metrics
    )
    causes = sum(n for name, n in metrics.items() if name.startswith("train/splits_"))
    assert causes == metrics.get("train/splits", 0)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus"])
def test_the_better_attempt_has_the_greater_advantage_however_near_they_are(estimator: Any) -> None:
    got = advantages(build([episode("better", 1e-7), episode("worse", 0.0)], estimator=estimator))
    assert got["worse"] < 0 < got["better"] < 1


@given(batches(), st.sampled_from(["grpo", "rloo"]))
def test_a_groups_advantages_add_up_to_nothing(episodes: list[Episode], estimator: Any) -> None:
    """Each episode's mean advantage, over the calls of one agent: a baseline takes nothing in and
    gives nothing out."""
    sound = [
        e.model_copy(update={"split": "train", "status": "succeeded"}) for e in episodes if e.calls
    ]
    sound = [e.model_copy(update={"calls": tuple(_plain(c) for c in e.calls)}) for e in sound]
    batch = build(sound, estimator=estimator)
    by_call = {
        s.call_id: float(x.advantages[s.start]) for x in batch.samples for s in x.timeline.spans
    }
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for e in sound:
        agents = defaultdict(list)
        for c in e.calls:
            if e.value(c.agent, c.call_id) is not None:
                agents[c.agent].append(by_call.get(c.call_id, 0.0))
        for agent, values in agents.items():
            sums[e.group_id, agent] += float(np.mean(values))
    assert all(abs(total) < 1e-3 for total in sums.values())


def _plain(c: Call) -> Call:
    return call(c.call_id, c.prompt_ids.tolist(), [1, 2], agent=c.agent)  # type: ignore[union-attr]


def test_a_call_of_which_only_the_prompt_is_known_sampled_nothing() -> None:
    bare = Call(call_id="bare", episode_id="e", prompt_ids=[1, 2])  # type: ignore[arg-type]
    batch = build([episode("a", 1.0, [bare, call("a.1", [1], [2])]), episode("b", 0.0)])
    assert outcomes(batch)["bare"] == {"untrainable": 0}
    assert batch.metrics["train/tokens_sampled"] == 3
    assert [s.timeline.call_ids for s in batch.samples if s.episode_id == "a"] == [("a.1",)]


def test_a_group_compared_with_an_attempt_without_calls_is_not_without_variance() -> None:
    batch = build([episode("a", 1.0), episode("silent", 0.0, [])], normalize_std=False)
    assert advantages(batch) == pytest.approx({"a": 0.5})
    assert (batch.metrics["train/groups"], batch.metrics["train/groups_zero_variance"]) == (1, 0)


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_an_attempt_counts_the_same_whether_it_made_calls_or_not(estimator: Any) -> None:
    def others(silent: bool) -> dict[str, float]:
        last = episode("last", None, [] if silent else None, status="failed")
        group = [episode("a", 1.0), episode("b", 0.5), last]
        got = advantages(build(group, estimator=estimator, failure_reward=-3.0))
        return {name: got[name] for name in "ab"}

    assert others(silent=True) == pytest.approx(others(silent=False))


def _by_call(batch: Batch) -> dict[str, float]:
    return {
        span.call_id: float(sample.advantages[span.start])
        for sample in batch.samples
        for span in sample.timeline.spans
    }


@given(batches(), st.data())
def test_a_reward_for_a_turn_reaches_that_turns_tokens_and_one_for_an_agent_that_agents(
    episodes: list[Episode], data: st.DataObject
) -> None:
    """Between calls of one agent and group, advantages differ as their values do; no other agent's
    change at all."""
    before = _by_call(build(episodes, normalize_std=False))
    named = [(e, c) for e in episodes for c in e.calls if c.call_id in before]
    if not named:
        return
    chosen, turn = data.draw(st.sampled_from(named))
    whole = data.draw(st.booleans())
    extra = (
        Reward(value=0.25, agent=turn.agent) if whole else Reward(value=0.25, call_id=turn.call_id)
    )
    more = [
        (
            e.model_copy(update={"rewards": (*e.rewards, extra)})
            if e.episode_id == chosen.episode_id
            else e
        )
        for e in episodes
    ]
    after = _by_call(build(more, normalize_std=False))
    for episode_, one in named:
        if (
            one.call_id not in after
            or one.agent != turn.agent
            or episode_.group_id != chosen.group_id
        ):
            assert one.agent == turn.agent or after.get(one.call_id) == before[one.call_id]
            continue
        reached = episode_.episode_id == chosen.episode_id if whole else one.call_id == turn.call_id
        gained = 0.25 * (int(reached) - 1)  # beside the turn that it names
        change = (after[one.call_id] - after[turn.call_id]) - (
            before[one.call_id] - before[turn.call_id]
        )
        assert change == pytest.approx(gained, abs=1e-6)


def with_ends(name: str, value: float, *ends: tuple[str, str], **given: Any) -> Episode:
    """An episode with a call of an agent for each pair of agent and finish reason."""
    calls = [
        call(f"{name}.{number}", [1, number], [3, 4], agent=agent, finish_reason=finish)
        for number, (agent, finish) in enumerate(ends)
    ]
    return episode(name, value, calls, **given)


def test_overlong_replies_are_left_out_and_count_in_the_baseline() -> None:
    group = [
        with_ends("a", 1.0, ("x", "stop")),
        with_ends("b", 0.0, ("x", "length")),
        with_ends("c", 0.5, ("x", "stop")),
    ]
    plain, filtered = build(group), build(group, overlong_filtering=True)
    assert set(advantages(plain)) == {"a", "b", "c"}
    assert advantages(filtered) == {name: advantages(plain)[name] for name in ("a", "c")}
    assert outcomes(filtered) == {
        "a.0": {"trained": 2},
        "b.0": {"overlong": 2},
        "c.0": {"trained": 2},
    }
    assert balance(filtered.ledger, [call for each in group for call in each.calls]) == []
    assert filtered.metrics["train/tokens_overlong"] == 2
    assert filtered.metrics["train/reward"] == plain.metrics["train/reward"] == 0.5


def test_an_agent_that_ends_overlong_is_left_out_and_one_that_recovers_is_not() -> None:
    group = [
        with_ends("ended", 1.0, ("x", "stop"), ("x", "length"), ("y", "stop")),
        with_ends("recovered", 0.0, ("x", "length"), ("x", "stop"), ("y", "tool_calls")),
        with_ends(
            "overflowed", 0.5, ("x", "stop"), status="failed", cause="ContextOverflow", rewards=[]
        ),
    ]
    batch = build(group, overlong_filtering=True, failure_reward=-1.0)
    left_out = {name for name, of in outcomes(batch).items() if "overlong" in of}
    assert left_out == {"ended.0", "ended.1", "recovered.0", "overflowed.0"}
    assert balance(batch.ledger, [call for each in group for call in each.calls]) == []


def test_other_reasons_go_before_overlong() -> None:
    same = [with_ends(name, 1.0, ("x", "length")) for name in "ab"]
    assert {tuple(of) for of in outcomes(build(same, overlong_filtering=True)).values()} == {
        ("zero_advantage",)
    }
    validation = [with_ends("v", 1.0, ("x", "length"), split="val")]
    assert outcomes(build(validation, overlong_filtering=True))["v.0"] == {"evaluation": 2}
    batch = build(
        [with_ends("a", 1.0, ("x", "length")), with_ends("b", 0.0, ("x", "length"))],
        overlong_filtering=True,
    )
    assert batch.samples == () and {tuple(of) for of in outcomes(batch).values()} == {("overlong",)}
