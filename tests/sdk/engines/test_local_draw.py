"""Drawing tokens: noise that is uniform and belongs to its request, and the limits of top-k and
top-p."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk.engines.local.requests import TokenDraw, draw, mix, uniform

CPU = torch.device("cpu")


def how(temperature: list[float], top_k: list[int], top_p: list[float]) -> TokenDraw:
    none = np.zeros(len(top_k), np.float32)
    return TokenDraw(
        np.array(temperature, np.float32), np.array(top_k), np.array(top_p, np.float32), none, CPU
    )


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20), st.integers(0, 10_000))
def test_noise_is_of_the_row_alone_and_below_one(seeds: list[int], place: int) -> None:
    array = np.array(seeds, dtype=np.uint64)
    together = uniform(array, np.full(len(seeds), place))
    alone = [uniform(array[i : i + 1], np.array([place]))[0] for i in range(len(seeds))]
    assert together.tolist() == alone
    assert (together >= 0).all() and (together < 1).all()


def test_noise_is_spread_evenly_over_places_and_over_seeds() -> None:
    many = np.arange(50_000)
    for noise in (
        uniform(np.full(50_000, 7, np.uint64), many),
        uniform(many.astype(np.uint64), np.zeros(50_000, np.int64)),
        uniform(
            np.array([mix(3, int(i)) for i in many[:5000]], np.uint64), np.zeros(5000, np.int64)
        ),
    ):
        counts = np.histogram(noise, bins=20, range=(0, 1))[0]
        expected = len(noise) / 20
        # 19 degrees of freedom: 50 is exceeded once in 7,000 times.
        assert ((counts - expected) ** 2 / expected).sum() < 50


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=4, unique=True))
def test_a_mixed_seed_tells_its_parts_and_their_order(parts: list[int]) -> None:
    assert 0 <= mix(*parts) < 2**64
    assert mix(*parts) == mix(*parts) != mix(*reversed(parts))
    assert mix(*parts) != mix(*parts[:-1])


@given(
    st.integers(0, 500),
    st.floats(0.0, 1.0, exclude_max=True),
    st.integers(1, 6),
    st.floats(0.01, 1.0),
)
def test_a_token_is_drawn_from_the_nucleus_with_its_renormalised_probability(
    seed: int, noise: float, top_k: int, top_p: float
) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(1, 12) * 3
    token, logprob = draw(
        logits, how([0.7], [top_k], [top_p]), torch.tensor([noise], dtype=torch.float64)
    )
    kept = (logits[0] / np.float32(0.7)).sort(descending=True)
    share = kept.values[:top_k].double().softmax(0)
    size = int((share.cumsum(0) - share < np.float32(top_p)).sum())
    nucleus = kept.indices[:size].tolist()
    assert int(token) in nucleus
    expected = torch.log(share[nucleus.index(int(token))] / share[:size].sum())
    assert abs(float(logprob) - float(expected)) < 1e-5


def test_rows_of_one_batch_keep_their_own_parameters() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.2, 0.7]])).repeat(4, 1)
    rows = how([0.0, 1.0, 1.0, 2.0], [-1, 1, -1, -1], [1.0, 1.0, 0.5, 1.0])
    tokens, logprobs = draw(logits, rows, torch.tensor([0.0, 0.0, 0.0, 0.0], dtype=torch.float64))
    assert tokens.tolist() == [2, 2, 2, 0]
    hot = torch.log(torch.tensor([0.1, 0.2, 0.7])) / 2
    expected = [np.log(0.7), 0.0, 0.0, float(torch.log_softmax(hot, 0)[0])]
    np.testing.assert_allclose(logprobs, expected, atol=1e-6)


def test_a_token_of_no_probability_is_never_drawn() -> None:
    logits = torch.full((2, 5), -torch.inf)
    logits[:, 2] = 0.0
    tokens, logprobs = draw(
        logits,
        how([1.0, 1.0], [-1, -1], [1.0, 1.0]),
        torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64),
    )
    assert tokens.tolist() == [2, 2]
    assert logprobs.tolist() == [0.0, 0.0]
