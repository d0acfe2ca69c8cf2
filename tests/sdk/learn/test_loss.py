"""The loss against hand computation, and the laws that micro-batches and merging keep."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from ajet_sdk.engines.local.requests import TokenDraw, draw
from ajet_sdk.errors import ConfigError
from ajet_sdk.learn.batches import MicroBatch, collate, micro_batches, trained_inputs
from ajet_sdk.learn.losses import score
from ajet_sdk.learn.objective import LossSettings, Scored, kl_estimate, policy_loss
from ajet_sdk.learn.trees import Rows
from ajet_sdk.protocols import Sampling
from ajet_sdk.types import Sample, Span, Timeline


def tiny(seed: int = 0) -> GPT2LMHeadModel:
    """A model of 64-bit floats throughout (others normalise in 32 bits), so that gradients can be
    compared exactly."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=40,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=64,
        initializer_range=0.2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config).double().eval()


def sample(
    ids: list[int], mask: list[int], advantage: float = 1.0, logprob: float = -1.0
) -> Sample:
    trained = np.array(mask, dtype=bool)
    spans, start = [], None
    for at, on in enumerate([*mask, 0]):
        if on and start is None:
            start = at
        elif not on and start is not None:
            spans.append(Span(call_id=f"c{start}", start=start, end=at))
            start = None
    line = Timeline(
        agent="default",
        token_ids=ids,
        loss_mask=trained,
        logprobs=np.where(trained, logprob, 0.0),
        call_ids=tuple(s.call_id for s in spans),
        spans=tuple(spans),
    )
    return Sample(
        timeline=line,
        episode_id="e",
        group_id="g",
        reward=1.0,
        advantages=np.where(trained, advantage, 0.0),
    )


def batch_of(
    logprobs: list[float], sampler: list[float], advantages: list[float]
) -> tuple[Scored, MicroBatch]:
    n = len(logprobs)
    nothing = Rows(torch.zeros(1, 1, dtype=torch.long))
    batch = MicroBatch(
        nothing,
        torch.zeros(n),
        torch.zeros(n),
        torch.tensor(sampler),
        torch.tensor(advantages),
        None,
    )
    return Scored(torch.tensor(logprobs), torch.full((n,), 2.0)), batch


def test_the_clipped_loss_is_what_a_hand_computes() -> None:
    """Ratios 1, 2, 2, 0.5, 0.5 with advantages 1, 3, -3, 3, -3 and bounds 0.8, 1.28."""
    log2 = math.log(2)
    scored, batch = batch_of(
        [-1.0 + x for x in (0, log2, log2, -log2, -log2)], [-1.0] * 5, [1.0, 3.0, -3.0, 3.0, -3.0]
    )
    loss_N, seen = policy_loss(scored, batch, LossSettings())
    assert loss_N.tolist() == pytest.approx([-1.0, -3.84, 6.0, -1.5, 2.4])
    assert seen["clip_share"].tolist() == [0, 1, 0, 0, 1]
    assert seen["gap"].tolist() == pytest.approx([0, log2, log2, log2, log2], abs=1e-6)
    assert seen["sampler_kl"].tolist() == pytest.approx(
        [0, 1 - log2, 1 - log2, log2 - 0.5, log2 - 0.5], abs=1e-6
    )
    assert seen["entropy"].tolist() == [2.0] * 5


def test_a_ratio_that_would_overflow_is_bounded() -> None:
    scored, batch = batch_of([0.0], [-100.0], [-1.0])
    assert policy_loss(scored, batch, LossSettings())[0].item() == pytest.approx(math.exp(20))
    assert kl_estimate(torch.tensor([-100.0]), torch.zeros(1), "k3").item() == pytest.approx(
        math.exp(20) - 21
    )


def test_kl_and_entropy_enter_with_their_coefficients() -> None:
    scored, batch = batch_of([-1.0], [-1.0], [0.5])
    settings_ = LossSettings(kl_coef=0.1, kl_type="k2", entropy_coef=0.01)
    loss_N, seen = policy_loss(scored, batch, settings_, torch.tensor([-3.0]))
    assert loss_N.item() == pytest.approx(-0.5 + 0.1 * 2.0 - 0.01 * 2.0)
    assert seen["kl"].item() == pytest.approx(2.0)
    assert policy_loss(scored, batch, LossSettings(), torch.tensor([-3.0]))[
        0
    ].item() == pytest.approx(-0.5)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("k1", 0.5),
        ("kl", 0.5),
        ("abs", 0.5),
        ("k2", 0.125),
        ("mse", 0.125),
        ("k3", math.exp(-0.5) - 1 + 0.5),
        ("low_var_kl", math.exp(-0.5) - 1 + 0.5),
    ],
)
def test_kl_estimators(kind: str, value: float) -> None:
    assert kl_estimate(torch.tensor([-1.0]), torch.tensor([-1.5]), kind).item() == pytest.approx(
        value
    )


def test_an_unknown_kl_estimator_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="k3 \\(low_var_kl\\)"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k9")


def test_k3_is_unbiased() -> None:
    """Its mean under the policy is the exact divergence."""
    generator = torch.Generator().manual_seed(0)
    policy = torch.log_softmax(torch.randn(6, generator=generator), 0)
    reference = torch.log_softmax(torch.randn(6, generator=generator), 0)
    exact = (policy.exp() * (policy - reference)).sum()
    mean = (policy.exp() * kl_estimate(policy, reference, "k3")).sum()
    assert mean.item() == pytest.approx(exact.item(), rel=1e-5)


def test_scores_are_the_models_own_log_probabilities() -> None:
    model = tiny()
    samples = [sample([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1]), sample([7, 8, 9], [0, 1, 1])]
    scored = score(model, collate(samples), entropy=True)
    expected, entropies = [], []
    for one in samples:
        ids = torch.tensor(one.timeline.token_ids, dtype=torch.long)
        full = torch.log_softmax(model(ids[None]).logits[0], -1)
        for at in np.flatnonzero(one.timeline.loss_mask):
            expected.append(full[at - 1, ids[at]].item())
            entropies.append(-(full[at - 1].exp() * full[at - 1]).sum().item())
    assert scored.logprobs_N.tolist() == pytest.approx(expected, abs=1e-9)
    assert scored.entropy_N is not None
    assert scored.entropy_N.tolist() == pytest.approx(entropies, abs=1e-9)


def test_each_call_has_its_own_temperature() -> None:
    model = tiny()
    one = sample([1, 2, 3, 4, 5, 6], [0, 1, 0, 0, 1, 1])
    scored = score(model, collate([one], {"c1": Sampling(0.5), "c4": Sampling(2.0)}), entropy=False)
    ids = torch.tensor(one.timeline.token_ids, dtype=torch.long)
    logits = model(ids[None]).logits[0]
    expected = [
        torch.log_softmax(logits[at - 1] / t, -1)[ids[at]].item()
        for at, t in ((1, 0.5), (4, 2.0), (5, 2.0))
    ]
    assert scored.logprobs_N.tolist() == pytest.approx(expected, abs=1e-6)


@given(
    st.integers(0, 2**32 - 1),
    st.floats(0.3, 3),
    st.floats(0.05, 1),
    st.sampled_from([-1, 1, 3, 12]),
    st.sampled_from([0.0, 0.1, 0.7]),
    st.booleans(),
)
def test_what_was_drawn_with_top_p_top_k_and_min_p_has_the_log_probability_that_the_sampler_gave(
    seed: int, temperature: float, top_p: float, top_k: int, min_p: float, alone: bool
) -> None:
    """So the ratio on policy is 1, and the gradient is of the distribution that was sampled
    from."""
    random = np.random.default_rng(seed)
    model = tiny()
    ids = torch.from_numpy(random.integers(0, 40, 6))
    named = ((temperature, np.float32), (top_k, np.int64), (top_p, np.float32), (min_p, np.float32))
    how = TokenDraw(*(np.array([value], kind) for value, kind in named), torch.device("cpu"))
    with torch.no_grad():
        [token], [logprob] = draw(
            model(ids[None]).logits[0, -1:], how, torch.from_numpy(random.random(1))
        )
    one = sample([*ids.tolist(), int(token), 1], [0] * 6 + [1, int(not alone)])
    sampling = {"c6": Sampling(temperature, top_p, top_k, min_p=min_p)}
    scored = score(model, collate([one], sampling), entropy=True, entropy_grad=True)
    assert scored.logprobs_N[0].item() == pytest.approx(logprob.item(), abs=1e-5)
    assert scored.entropy_N is not None and torch.isfinite(scored.entropy_N).all()
    assert -1e-9 <= scored.entropy_N[0].item() <= math.log(top_k if top_k > 0 else 40) + 1e-6
    (scored.logprobs_N.sum() + scored.entropy_N.sum()).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


ways = st.builds(
    Sampling,
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([0.3, 0.9, 1.0]),
    st.sampled_from([-1, 0, 1, 3]),
)


@pytest.mark.slow
@settings(max_examples=30)
@given(st.lists(ways, min_size=2, max_size=2))
def test_how_one_call_was_sampled_does_not_matter_to_another(how: list[Sampling]) -> None:
    """Nor is `top_k` 0 another thing than -1."""
    model, ids = tiny(), [1, 2, 3, 4, 5]
    batch = collate([sample(ids, [0, 1, 0, 0, 1])], dict(zip(("c1", "c4"), how, strict=True)))
    limited = [
        i for i, way in enumerate(how) if way.temperature > 0 and (way.top_k > 0 or way.top_p < 1)
    ]
    assert ([] if batch.limits is None else batch.limits.rows_M.tolist()) == limited
    both = score(model, batch, entropy=True)
    assert both.entropy_N is not None
    for i, (mask, way) in enumerate(zip(([0, 1], [0, 0, 0, 0, 1]), how, strict=True)):
        one = collate([sample(ids[: len(mask)], mask)], replace(way, top_k=way.top_k or -1))
        alone = score(model, one, entropy=True)
        assert alone.entropy_N is not None
        assert both.logprobs_N[i].item() == pytest.approx(alone.logprobs_N.item(), abs=1e-9)
        assert both.entropy_N[i].item() == pytest.approx(alone.entropy_N.item(), abs=1e-9)


def test_a_token_without_context_is_not_trained_and_what_follows_the_last_one_is_not_computed() -> (
    None
):
    batch = collate([sample([1, 2, 3], [1, 1, 0]), sample([4, 5, 6], [1, 0, 0])])
    positions = batch.logits.positions_U.tolist()
    assert (batch.rows.ids_BT.tolist(), positions, batch.targets_N.tolist()) == (
        [[1], [0]],
        [0],
        [2],
    )
    assert len(trained_inputs(sample([1, 2, 3], [0, 0, 0]))) == 0


def test_a_token_outside_of_what_the_weights_of_now_would_draw_has_a_gradient_all_the_same() -> (
    None
):
    model = tiny()
    ids = [1, 2, 3]
    least = int(model(torch.tensor([ids])).logits[0, -1].argmin())
    scored = score(
        model, collate([sample([*ids, least], [0, 0, 0, 1])], Sampling(top_k=2)), entropy=False
    )
    assert scored.support_MV is not None and scored.support_MV.sum().item() == 3
    scored.logprobs_N.sum().backward()
    assert torch.isfinite(scored.logprobs_N).all() and model.lm_head.weight.grad.abs().sum() > 0


def test_a_greedy_call_is_scored_at_temperature_one() -> None:
    one = sample([1, 2, 3], [0, 1, 1])
    assert collate([one], Sampling(0.0, top_p=0.5)).limits is None
    assert collate([one], Sampling(0.0, top_p=0.5)).logits.temperatures_U is None


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(10, 200))
def test_micro_batches_hold_every_row_once_and_keep_the_budget(
    lengths: list[int], budget: int
) -> None:
    groups = [
        group.members for group in micro_batches([np.arange(length) for length in lengths], budget)
    ]
    assert sorted(i for g in groups for i in g) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or len(group) * max(lengths[i] for i in group) <= budget
    for group, after in itertools.pairwise(groups):  # of like length, and none had room for another
        assert min(lengths[i] for i in group) >= max(lengths[i] for i in after)
        assert (len(group) + 1) * max(lengths[i] for i in group) > budget


def gradient(model: GPT2LMHeadModel, samples: list[Sample], budget: int) -> dict[str, torch.Tensor]:
    model.zero_grad()
    for group in micro_batches([trained_inputs(s) for s in samples], budget):
        batch = collate([samples[i] for i in group.members])
        loss_N, _ = policy_loss(score(model, batch, entropy=True), batch, LossSettings())
        loss_N.sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


lines = st.lists(
    st.tuples(st.integers(0, 39), st.booleans()), min_size=2, max_size=12
).filter(lambda line: any(on for _, on in line[1:]))  # fmt: skip


@settings(max_examples=10)
@given(st.lists(lines, min_size=1, max_size=5))
def test_micro_batches_do_not_change_the_gradient(rows: list[list[tuple[int, bool]]]) -> None:
    model = tiny()
    samples = [
        sample([i for i, _ in row], [0, *(int(on) for _, on in row[1:])], advantage=k - 1.5)
        for k, row in enumerate(rows)
    ]
    whole, split = gradient(model, samples, 10_000), gradient(model, samples, 1)
    for name, value in whole.items():
        assert torch.allclose(value, split[name], atol=1e-12)


def test_a_merged_timeline_has_the_gradient_of_its_calls() -> None:
    """One sample per call, each with the whole history as its prompt, against one timeline."""
    model = tiny()
    ids = list(range(1, 21))
    spans = [(4, 8), (11, 13), (17, 20)]
    merged = sample(ids, [int(any(a <= i < b for a, b in spans)) for i in range(20)], advantage=0.7)
    calls = [sample(ids[:b], [int(a <= i < b) for i in range(b)], advantage=0.7) for a, b in spans]
    one, many = gradient(model, [merged], 10_000), gradient(model, calls, 10_000)
    for name, value in one.items():
        assert torch.allclose(value, many[name], atol=1e-12), name


def test_entropy_is_computed_where_it_is_asked_for_and_moves_the_weights_where_it_is_a_term() -> (
    None
):
    model, batch = tiny(), collate([sample([1, 2, 3, 4], [0, 0, 1, 1])])
    assert score(model, batch, entropy=False).entropy_N is None
    by_default = score(model, batch, entropy=True).entropy_N
    assert by_default is not None and not by_default.requires_grad
    for grad in (False, True):
        entropy_N = score(model, batch, entropy=True, entropy_grad=grad).entropy_N
        assert entropy_N is not None and entropy_N.requires_grad is grad


def test_log_probabilities_of_a_model_in_half_precision_are_taken_in_single() -> None:
    model, batch = tiny().to(torch.bfloat16), collate([sample([1, 2, 3, 4], [0, 0, 1, 1])])
    scored = score(model, batch, entropy=True)
    assert scored.logprobs_N.dtype == torch.float32
    logits = model(input_ids=batch.rows.ids_BT).logits[0].float().log_softmax(-1)
    expected = logits[batch.logits.positions_U][batch.logits.rows_N, batch.targets_N]
    torch.testing.assert_close(scored.logprobs_N, expected)
