"""REINFORCE++: each token's return against all tokens of the batch, whatever task they belong
to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ajet_sdk.samples.build import Batch, balance, build
from ajet_sdk.types import Call, Episode, Reward


def call(call_id: str, length: int, **more: Any) -> Call:
    given = {"episode_id": "e", "policy_version": 7, "logprobs": [-0.5] * length, **more}
    return Call(call_id=call_id, prompt_ids=[1, 2], output_ids=[3] * length, **given)  # type: ignore[arg-type]


def episode(name: str, value: float, lengths: Sequence[int] = (1,), **more: Any) -> Episode:
    """One group of its own, as with `num_repeat: 1`."""
    calls = more.pop("calls", None) or [
        call(f"{name}.{i}", length) for i, length in enumerate(lengths)
    ]
    rewards = more.pop("rewards", [Reward(value=value)])
    given = {"group_id": name, "run_id": "r", "step": 3, **more}
    return Episode(episode_id=name, calls=tuple(calls), rewards=rewards, **given)


def plus_plus(episodes: Sequence[Episode], **options: Any) -> Batch:
    return build(episodes, estimator="reinforce_plus_plus", **options)


def of_calls(batch: Batch) -> dict[str, float]:
    return {
        s.call_id: float(x.advantages[s.start]) for x in batch.samples for s in x.timeline.spans
    }


def of_tokens(batch: Batch) -> np.ndarray[Any, Any]:
    return np.concatenate([s.advantages[s.timeline.loss_mask] for s in batch.samples]).astype(
        np.float64
    )


def test_by_hand() -> None:
    """Four tokens worth 1, 1, 1, 0: the mean is 3/4, the variance (3/16 + 9/16) / 3 = 1/4."""
    batch = plus_plus([episode("long", 1.0, [3]), episode("short", 0.0, [1])])
    assert of_calls(batch) == pytest.approx({"long.0": 0.5, "short.0": -1.5}, rel=1e-4)
    assert batch.metrics["train/groups"] == 2 and batch.metrics["train/groups_zero_variance"] == 0


def test_it_is_verls_and_trinitys_formula() -> None:
    """`masked_whiten` of the returns, as both compute it."""
    torch = pytest.importorskip("torch")
    episodes = [episode("a", 2.0, [3, 2]), episode("b", -1.0, [4]), episode("c", 0.5, [1])]
    returns = torch.tensor([2.0] * 5 + [-1.0] * 4 + [0.5])
    white = (returns - returns.mean()) * torch.rsqrt(returns.var() + 1e-8)
    assert of_tokens(plus_plus(episodes)) == pytest.approx(white.numpy(), rel=1e-5)


_VALUED = st.lists(
    st.tuples(
        st.floats(-3, 3).map(lambda x: round(x, 2)),
        st.lists(st.integers(1, 9), min_size=1, max_size=3),
    ),
    min_size=2,
    max_size=8,
)


@given(_VALUED, st.booleans())
def test_tokens_have_mean_nothing_and_variance_one(
    valued: list[tuple[float, list[int]]], std: bool
) -> None:
    assume(len({value for value, _ in valued}) > 1)
    batch = plus_plus(
        [episode(str(i), v, lengths) for i, (v, lengths) in enumerate(valued)], normalize_std=std
    )
    tokens = of_tokens(batch)
    assert len(tokens) == sum(sum(lengths) for _, lengths in valued)
    assert tokens.mean() == pytest.approx(0.0, abs=1e-4)
    assert tokens.std(ddof=1) == pytest.approx(1.0, rel=1e-2)


@given(_VALUED, st.floats(0.5, 20), st.floats(-50, 50))
def test_neither_scale_nor_shift_of_the_reward_matters(
    valued: list[tuple[float, list[int]]], scale: float, shift: float
) -> None:
    assume(len({value for value, _ in valued}) > 1)
    plain = plus_plus([episode(str(i), v, lengths) for i, (v, lengths) in enumerate(valued)])
    moved = plus_plus(
        [episode(str(i), scale * v + shift, lengths) for i, (v, lengths) in enumerate(valued)]
    )
    assert of_calls(moved) == pytest.approx(of_calls(plain), rel=1e-2, abs=1e-3)


def test_groups_do_not_matter() -> None:
    apart = [episode(str(i), v, [i + 1]) for i, v in enumerate((1.0, 0.0, 0.5))]
    together = [e.model_copy(update={"group_id": "g"}) for e in apart]
    assert of_calls(plus_plus(apart)) == of_calls(plus_plus(together))


def test_a_batch_that_is_all_alike_is_left_out_and_said() -> None:
    batch = plus_plus([episode(str(i), 1.0, [2, 3]) for i in range(3)])
    assert batch.samples == () and {row.outcome for row in batch.ledger} == {"zero_advantage"}
    assert batch.metrics["train/groups_zero_variance"] == 3
    assert plus_plus([episode("alone", 1.0)]).samples == ()
    assert plus_plus([episode("alike", 1.0, [2, 3]), episode("empty", 0.0, [0])]).samples == ()


def test_agents_are_compared_with_themselves() -> None:
    """A role that always earns more is not praised for it."""

    def game(name: str, wolf: float, villager: float) -> Episode:
        calls = [call(f"{name}.w", 2, agent="wolf"), call(f"{name}.v", 2, agent="villager")]
        rewards = [Reward(value=wolf, agent="wolf"), Reward(value=villager, agent="villager")]
        return episode(name, 0.0, calls=calls, rewards=rewards)

    got = of_calls(plus_plus([game("a", 10.0, 1.0), game("b", 10.0, 0.0)]))
    assert got == pytest.approx({"a.v": math.sqrt(3) / 2, "b.v": -math.sqrt(3) / 2}, rel=1e-4)


def test_what_is_too_old_counts_in_the_mean_and_is_not_trained() -> None:
    old = episode("old", 0.0, calls=[call("old.0", 1, policy_version=1)])
    batch = plus_plus([episode("new", 1.0, [3]), old], policy_version=7, max_staleness=1)
    assert of_calls(batch) == pytest.approx({"new.0": 0.5}, rel=1e-4)
    assert {row.call_id: row.outcome for row in batch.ledger} == {
        "new.0": "trained",
        "old.0": "stale",
    }
    assert balance(batch.ledger, [c for e in (old,) for c in e.calls] + [call("new.0", 3)]) == []
