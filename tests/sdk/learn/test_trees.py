"""What samples share is computed once: the layout, which models take it, and that no gradient
changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import peft
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ajet_sdk.learn.batches import collate, micro_batches, trained_inputs
from ajet_sdk.learn.objective import LossSettings
from ajet_sdk.learn.scores import TokenScores
from ajet_sdk.learn.trainer import Trainer, TrainerSettings
from ajet_sdk.learn.trees import _runs, grid, lay_out, shares_prefixes
from ajet_sdk.protocols import Sampling
from ajet_sdk.types import Sample, Span, Timeline

VOCABULARY, PROMPT = 40, 36
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128, "initializer_range": 0.2,
}  # fmt: skip
ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}

TAKES: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=64,
            initializer_range=0.2,
        )
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
    "opt": lambda: OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=2,
            ffn_dim=32,
            max_position_embeddings=64,
            num_attention_heads=2,
            word_embed_proj_dim=16,
            init_std=0.2,
        )
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=True)),
}
REFUSES: dict[str, Callable[[], Any]] = {
    "eager": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attn_implementation="eager")),
    "alibi": lambda: BloomForCausalLM(
        BloomConfig(
            vocab_size=VOCABULARY, hidden_size=16, n_layer=2, n_head=2, initializer_range=0.2
        )
    ),
    "sliding window": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=8)),
    "rope by length": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=ROPE)),
    "state space": lambda: MambaForCausalLM(
        MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, state_size=4)
    ),
}


def tiny(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make().eval()


def with_lora(model: Any) -> Any:
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    ).eval()
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.2)
    return adapted


def sample(ids: list[int], spans: list[tuple[int, int]], advantage: float, episode: str) -> Sample:
    mask = np.zeros(len(ids), np.bool_)
    for start, end in spans:
        mask[start:end] = True
    names = [f"{episode}.{start}" for start, _ in spans]
    line = Timeline(
        agent="",
        token_ids=ids,
        loss_mask=mask,
        logprobs=np.where(mask, -3.0, 0.0),
        call_ids=tuple(names),
        spans=tuple(
            Span(call_id=n, start=a, end=b) for n, (a, b) in zip(names, spans, strict=True)
        ),
    )
    return Sample(
        timeline=line,
        episode_id=episode,
        group_id=episode[0],
        reward=0.0,
        advantages=np.where(mask, advantage, 0.0).astype(np.float32),
    )


def groups_and_branches() -> list[Sample]:
    """Two groups of a prompt each with an equal pair of replies, and an episode whose second turn
    branches."""
    draw = np.random.default_rng(0)

    def ids(length: int) -> list[int]:
        return draw.integers(0, VOCABULARY, length).tolist()

    samples = []
    for group in "ab":
        prompt, twice = ids(PROMPT), ids(4)
        for k, reply in enumerate([twice, ids(5), ids(2), twice]):
            tokens = [*prompt, *reply]
            samples.append(sample(tokens, [(PROMPT, len(tokens))], k - 1.2, f"{group}{k}"))
    turn = [*ids(PROMPT), *ids(3)]
    first, second = ([*turn, *ids(6)] for _ in range(2))
    samples.append(sample(first, [(PROMPT, PROMPT + 3), (PROMPT + 6, PROMPT + 9)], 0.8, "c0"))
    samples.append(sample(second, [(PROMPT + 7, PROMPT + 9)], -0.6, "c0"))
    return samples


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=6))
def test_a_token_sees_what_is_before_it_in_its_sequence(sequences: list[list[int]]) -> None:
    tree = lay_out([np.array(ids, np.int64) for ids in sequences])
    prefixes = {tuple(ids[: n + 1]) for ids in sequences for n in range(len(ids))}
    assert len(tree.ids_T) == len(prefixes)
    for ids, places in zip(sequences, tree.places, strict=True):
        assert tree.ids_T[places].tolist() == ids
        assert tree.depths_T[places].tolist() == list(range(len(ids)))
        for n, i in enumerate(places):
            seen = [j for j in range(len(tree.ids_T)) if j <= i < tree.ends_T[j]]
            assert seen == places[: n + 1].tolist()
    runs, starts = _runs(tree.ends_T.tobytes()), [0]
    for run in runs:
        starts.append(starts[-1] + run.size)
    for number, run in enumerate(runs):
        above = [i for index in run.above for i in range(starts[index], starts[index + 1])]
        for i in range(starts[number], starts[number + 1]):
            assert [*above, *range(starts[number], i + 1)] == [
                j for j in range(i + 1) if i < tree.ends_T[j]
            ]
    assert starts[-1] == len(tree.ids_T)


def test_padding_sees_itself() -> None:
    rows, places = grid([np.array(ids) for ids in ([1, 2], [1, 3], [4])], [2, 1])
    assert rows.ids_BT.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert [at.tolist() for at in places] == [[0, 1], [0, 2], [3]]
    inputs = rows.inputs()
    assert inputs["position_ids"].tolist() == [[0, 1, 1], [0, 0, 0]]
    assert inputs["attention_mask"][:, 0, 0].tolist() == [[3, 2, 3], [1, 3, 3]]
    assert [_runs(ends.numpy().tobytes()) for ends in inputs["attention_mask"][:, 0, 0]] == [
        ((1, ()), (1, (0,)), (1, (0,))),
        ((1, ()), (2, ())),
    ]
    assert list(grid([np.array([1, 2])], [1])[0].inputs()) == ["input_ids"]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20), st.integers(1, 8)), max_size=20),
    st.integers(5, 120),
    st.booleans(),
)
def test_rows_hold_every_sample_once_and_keep_the_budget(
    found: list[tuple[int, int, int]], budget: int, share: bool
) -> None:
    inputs = [
        np.array([prompt] * length + [10 + i] * own)
        for i, (prompt, length, own) in enumerate(found)
    ]
    groups = micro_batches(inputs, budget, share=share)
    assert sorted(i for group in groups for i in group.members) == list(range(len(inputs)))
    alone = max((len(ids) for ids in inputs), default=0) * 5 // 4
    for group in groups:
        assert sum(group.row_sizes) == len(group.members)
        shape = grid([inputs[i] for i in group.members], group.row_sizes)[0].ids_BT.shape
        assert shape.numel() <= budget or (shape[0] == 1 and shape[1] <= alone)
        assert share or set(group.row_sizes) == {1}


def test_a_long_prompt_is_shared_though_it_fills_the_budget() -> None:
    prompt = np.arange(1000)
    [group] = micro_batches([np.append(prompt, [i] * 20) for i in range(8)], 256, share=True)
    assert group.row_sizes == [8]


def test_what_shares_nothing_has_a_row_of_its_own() -> None:
    inputs = [np.array([*[i] * 200]) for i in range(1, 5)]
    [group] = micro_batches(inputs, 1000, share=True)
    assert group.row_sizes == [1, 1, 1, 1]


@pytest.mark.parametrize(("shared", "rows"), [(0, 8), (1, 8), (8, 8), (31, 8), (32, 1), (100, 1)])
def test_a_trivial_common_prefix_joins_no_rows(shared: int, rows: int) -> None:
    draw = np.random.default_rng(0)
    prompt = draw.integers(0, 40, shared)
    inputs = [np.concatenate([prompt, [40 + i], draw.integers(0, 40, 60)]) for i in range(8)]
    [group] = micro_batches(inputs, 4000, share=True)
    assert len(group.row_sizes) == rows


def test_what_continues_another_sample_shares_its_row() -> None:
    whole = np.arange(40)
    [group] = micro_batches([whole[:5], whole[:5], whole[:9], whole], 4000, share=True)
    assert group.row_sizes == [4]


@pytest.mark.parametrize("name", TAKES)
@pytest.mark.parametrize(("lora", "limited"), [(False, False), (True, True)])
def test_no_gradient_changes(
    name: str, lora: bool, limited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, samples = tiny(TAKES[name]), groups_and_branches()
    model = with_lora(model) if lora and name != "gpt2" else model  # its layers are no linear ones
    assert shares_prefixes(model)
    loss = LossSettings(loss_aggregation="turn", ratio_level="sequence", entropy_coef=0.01)
    sampling = {f"a1.{PROMPT}": Sampling(temperature=0.7)} | (
        {f"b0.{PROMPT}": Sampling(top_k=5)} if limited else {}
    )
    computed: list[int] = []
    model.register_forward_pre_hook(
        lambda _, __, given: computed.append(given["input_ids"].numel()), with_kwargs=True
    )
    seen = []
    for shares in (True, False):
        if not shares:
            monkeypatch.setattr("ajet_sdk.learn.trainer.shares_prefixes", lambda _: False)
        trainer = Trainer(model, TrainerSettings(lr=0.0, loss=loss, grad_clip=1e9))
        gradients: list[torch.Tensor] = []
        monkeypatch.setattr(
            trainer.optimizer,
            "step",
            lambda t=trainer, g=gradients: g.extend(p.grad.clone() for p in t.parameters),
        )
        computed.clear()
        scores = TokenScores()
        metrics = trainer.step(samples, sampling, scores)
        seen.append((gradients, scores, metrics, sum(computed)))
    (ours, our_scores, our_metrics, few), (theirs, their_scores, their_metrics, many) = seen
    assert few < many / 2
    largest = max(float(g.abs().max()) for g in theirs)
    assert largest > 1e-2
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6 * max(1.0, largest), rtol=1e-5)
    for a_T, b_T in zip(our_scores.logprobs, their_scores.logprobs, strict=True):
        np.testing.assert_allclose(a_T, b_T, atol=2e-6)
    for key in ("loss", "grad_norm", "logprob_gap_max", "entropy", "clip_share"):
        assert our_metrics[key] == pytest.approx(their_metrics[key], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", REFUSES)
def test_a_model_that_takes_no_tree_is_trained_sample_by_sample(name: str) -> None:
    model = tiny(REFUSES[name])
    assert not shares_prefixes(model)
    shapes: list[torch.Size] = []
    model.register_forward_pre_hook(
        lambda _, __, given: shapes.append(given["input_ids"].shape), with_kwargs=True
    )
    Trainer(model, TrainerSettings(lr=0.0)).step(groups_and_branches()[:4])
    assert shapes[-1] == (4, PROMPT + 4)


def test_flash_attention_takes_no_mask() -> None:
    model = tiny(TAKES["llama"])
    model.config._attn_implementation = "flash_attention_2"
    assert not shares_prefixes(model)


def test_checkpointed_activations_change_no_gradient() -> None:
    norms = []
    for checkpointed in (False, True):
        model = tiny(TAKES["qwen3"])
        if checkpointed:
            model.gradient_checkpointing_enable()
        norms.append(
            Trainer(model, TrainerSettings(lr=0.0)).step(groups_and_branches())["grad_norm"]
        )
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_equal_samples_cost_the_tokens_of_one() -> None:
    samples = [groups_and_branches()[0]] * 8
    [group] = micro_batches([trained_inputs(sample) for sample in samples], 100, share=True)
    batch = collate([samples[i] for i in group.members], row_sizes=group.row_sizes)
    assert batch.rows.ids_BT.shape == (1, PROMPT + 3)
    assert (len(batch.targets_N), len(batch.logits.positions_U)) == (8 * 4, 4)


def bytes_kept(model: Any, samples: list[Sample], row_sizes: list[int]) -> float:
    """Bytes per token that a pass keeps for its backward pass, without the weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept.update(
            {storage.data_ptr(): storage.nbytes()} if storage.data_ptr() not in weights else {}
        )
        return tensor

    rows = collate(samples, row_sizes=row_sizes).rows
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model.model(**rows.inputs(), use_cache=False).last_hidden_state
    return sum(kept.values()) / (hidden.shape[0] * hidden.shape[1])


def test_a_row_with_branches_keeps_no_more_for_a_token_than_any_other() -> None:
    """The estimate of a run's memory counts tokens. Keys and values that each branch sees were kept
    once per branch."""
    model = tiny(TAKES["llama"])
    assert shares_prefixes(model)
    prompt = [*range(PROMPT)]
    replies = [
        sample([*prompt, 31 + k, 5, 6], [(PROMPT, PROMPT + 3)], 1.0, f"a{k}") for k in range(8)
    ]
    line = sample([*range(VOCABULARY), *prompt[:8]], [(1, 48)], 1.0, "b0")
    assert bytes_kept(model, replies, [8]) <= 1.05 * bytes_kept(model, [line], [1])
