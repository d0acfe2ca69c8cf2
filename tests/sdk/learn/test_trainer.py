"""The trainer: what a step does to the weights, and that a checkpoint brings everything back."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import ajet
from ajet_sdk.errors import CheckpointError, ConfigError, TrainingError
from ajet_sdk.learn import checkpoint
from ajet_sdk.learn.batches import collate
from ajet_sdk.learn.learner import default_lr
from ajet_sdk.learn.losses import score
from ajet_sdk.learn.objective import LossSettings
from ajet_sdk.learn.scores import TokenScores
from ajet_sdk.learn.trainer import Trainer, TrainerSettings
from ajet_sdk.protocols import Sampling
from ajet_sdk.types import Sample, Span, Task, Timeline


def tiny(seed: int = 0, dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return Qwen3ForCausalLM(config).to(dtype).eval()


def with_lora(model: Qwen3ForCausalLM, dropout: float = 0.0) -> torch.nn.Module:
    import peft

    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=dropout, target_modules="all-linear"
    )
    return peft.get_peft_model(model, config).eval()


def batch(model: torch.nn.Module, seed: int, rows: int = 6) -> list[Sample]:
    """Samples whose log-probabilities are the model's own, as a sampler would have left them."""
    draw = np.random.default_rng(seed)
    samples = []
    for row in range(rows):
        length = int(draw.integers(6, 20))
        start = int(draw.integers(2, length - 2))
        mask = np.arange(length) >= start
        line = Timeline(
            agent="default",
            token_ids=draw.integers(0, 40, length),
            loss_mask=mask,
            logprobs=np.zeros(length),
            call_ids=(f"c{row}",),
            spans=(Span(call_id=f"c{row}", start=start, end=length),),
        )
        bare = Sample(
            timeline=line,
            episode_id=str(row),
            group_id="g",
            reward=0.0,
            advantages=np.zeros(length),
        )
        with torch.no_grad():
            own = score(model, collate([bare]), entropy=False).logprobs_N.float().numpy()
        logprobs = np.zeros(length)
        logprobs[mask] = own
        line = line.model_copy(
            update={
                "logprobs": Timeline.model_validate({**dict(line), "logprobs": logprobs}).logprobs
            }
        )
        samples.append(
            Sample(
                timeline=line,
                episode_id=str(row),
                group_id="g",
                reward=0.0,
                advantages=np.where(mask, float(draw.normal()), 0.0),
            )
        )
    return samples


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, b[name]) for name, value in a.items())


def test_a_step_reports_no_gap_no_kl_and_no_clipping_at_the_start() -> None:
    model = tiny()
    trainer = Trainer(model, TrainerSettings(lr=1e-3, loss=LossSettings(kl_coef=0.1)))
    metrics = trainer.step(batch(model, 0))
    assert metrics["logprob_gap_max"] < 1e-5
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["clip_share"] == 0
    assert 0 < metrics["entropy"] <= math.log(40)
    assert metrics["lr"] == pytest.approx(2e-4)  # one of five warm-up steps
    assert trainer.updates == 1


@pytest.mark.parametrize("budget", [1, 30, 100_000])
def test_a_step_tells_each_token_s_scores_as_they_were_before_it(budget: int) -> None:
    model = tiny()
    samples = batch(model, 0)
    scores = TokenScores()
    Trainer(model, TrainerSettings(lr=1e-1, warmup_steps=0, micro_batch_tokens=budget)).step(
        samples, scores=scores
    )
    for sample, logprobs_T, entropy_T in zip(samples, scores.logprobs, scores.entropy, strict=True):
        line = sample.timeline
        assert np.array_equal(np.isfinite(logprobs_T), line.loss_mask)
        assert np.array_equal(np.isfinite(entropy_T), line.loss_mask)
        np.testing.assert_allclose(
            logprobs_T[line.loss_mask], line.logprobs[line.loss_mask], atol=1e-5
        )
        assert (entropy_T[line.loss_mask] <= math.log(40) + 1e-5).all()


def test_scores_of_later_mini_batches_are_unknown() -> None:
    """They are seen only by weights that the first update has moved."""
    model = tiny()
    samples, scores = batch(model, 0), TokenScores()
    Trainer(model, TrainerSettings(lr=1e-3, mini_batch_num=2, ppo_epochs=2)).step(
        samples, scores=scores
    )
    known = [bool(np.isfinite(a).any()) for a in scores.logprobs]
    assert known.count(True) == known.count(False) == 3
    for sample, logprobs_T in zip(samples, scores.logprobs, strict=True):
        if np.isfinite(logprobs_T).any():
            mask = sample.timeline.loss_mask
            np.testing.assert_allclose(logprobs_T[mask], sample.timeline.logprobs[mask], atol=1e-5)


def noisy(kind: str) -> Any:
    """Models that drop out where they train: in layers, in functions, whole layers, in an
    adapter."""
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
        return GPT2LMHeadModel(
            GPT2Config(
                **sizes, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5, initializer_range=0.2
            )
        ).eval()
    if kind == "opt":
        config = OPTConfig(
            vocab_size=40,
            hidden_size=16,
            ffn_dim=32,
            num_hidden_layers=3,
            num_attention_heads=2,
            init_std=0.2,
            max_position_embeddings=64,
            word_embed_proj_dim=16,
            dropout=0.5,
            attention_dropout=0.5,
            layerdrop=0.5,
        )
        return OPTForCausalLM(config).eval()
    return with_lora(tiny(), dropout=0.5)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["gpt2", "opt", "lora"])
def test_the_policy_is_trained_as_it_was_sampled_from_without_dropout(
    kind: str, checkpointing: bool
) -> None:
    model = noisy(kind)
    samples = batch(model, 0)
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    passes, of_old = [], {m: m.training for m in model.modules()}
    kept = {
        name: value for m in model.modules() for name, value in vars(m).items() if "drop" in name
    }
    layer = next(m for name, m in model.named_modules() if name.endswith((".0.mlp", ".0.fc1")))
    layer.register_forward_pre_hook(lambda *_: passes.append(1))
    trainer = Trainer(model, TrainerSettings(lr=1e-3, loss=LossSettings(kl_coef=0.1)))
    passes.clear()
    metrics = trainer.step(samples)
    assert metrics["logprob_gap_max"] < 1e-5 and metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["clip_share"] == 0
    policys = len(passes) - 1  # without the one of the reference
    assert policys == (2 if checkpointing else 1), "checkpointed layers run again backwards"
    assert {m: m.training for m in model.modules()} == of_old
    assert {
        name: value for m in model.modules() for name, value in vars(m).items() if "drop" in name
    } == kept


@pytest.mark.parametrize("lora", [False, True])
def test_a_reference_is_compared_over_the_tokens_that_could_be_drawn(lora: bool) -> None:
    """At the first step the policy is its reference, whatever top_p leaves of both."""
    model = with_lora(tiny()) if lora else tiny()
    trainer = Trainer(
        model, TrainerSettings(lr=1e-2, warmup_steps=0, loss=LossSettings(kl_coef=0.1))
    )
    kl = [trainer.step(batch(model, 0), Sampling(top_p=0.5))["kl"] for _ in range(2)]
    assert kl[0] == pytest.approx(0.0, abs=1e-6) and math.isfinite(kl[1]) and kl[1] > 1e-6


def test_good_tokens_become_likelier_and_bad_ones_less() -> None:
    model = tiny()
    samples = batch(model, 1)
    before = score(model, collate(samples), entropy=False).logprobs_N.detach()
    Trainer(model, TrainerSettings(lr=1e-3, warmup_steps=0)).step(samples)
    after = score(model, collate(samples), entropy=False).logprobs_N.detach()
    advantages = collate(samples).advantages_N
    assert float(((after - before) * advantages).sum()) > 0


@pytest.mark.parametrize("budget", [1, 30, 100_000])
def test_the_size_of_micro_batches_changes_no_result(budget: int) -> None:
    model, whole = tiny(), tiny()
    samples = batch(model, 2)
    one = Trainer(whole, TrainerSettings(lr=1e-3)).step(samples)
    other = Trainer(model, TrainerSettings(lr=1e-3, micro_batch_tokens=budget)).step(samples)
    for name in set(one) - {"seconds", "tokens_per_second"}:
        assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name


def test_mini_batches_and_epochs_are_updates_and_count_as_versions() -> None:
    model = tiny()
    trainer = Trainer(model, TrainerSettings(lr=1e-3, mini_batch_num=2, ppo_epochs=3))
    trainer.step(batch(model, 3))
    assert trainer.updates == 6
    assert sorted(
        i
        for share in trainer.settings.shares(batch(model, 3, rows=7), trainer.updates)
        for i in share
    ) == list(range(7))


@pytest.mark.parametrize(
    ("decay", "expected"),
    [("constant", [0.5, 1, 1, 1]), ("linear", [0.5, 1, 1, 0.5]), ("cosine", [0.5, 1, 1, 0.5])],
)
def test_the_learning_rate_rises_and_then_stays_or_falls(decay: Any, expected: list[float]) -> None:
    model = tiny()
    settings = TrainerSettings(lr=1e-3, warmup_steps=2, lr_scheduler_type=decay, total_updates=4)
    trainer = Trainer(model, settings)
    seen = [trainer.step(batch(model, 2))["lr"] for _ in expected]
    assert seen == pytest.approx([1e-3 * e for e in expected], rel=1e-4)


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 5, 19, 20, 40])
def test_the_schedule_reaches_the_learning_rate_and_never_exceeds_it(
    decay: Any, warmup: int
) -> None:
    settings = TrainerSettings(
        lr=1e-3, warmup_steps=warmup, lr_scheduler_type=decay, total_updates=20
    )
    rates = [settings.lr_after(update) for update in range(20)]
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1]) and rates[top:] == sorted(
        rates[top:], reverse=True
    )
    assert all(0 < rate <= 1e-3 for rate in rates)
    assert max(rates) == pytest.approx(1e-3 * min(1, 20 / warmup) if warmup else 1e-3)
    assert bool(settings.schedule_notice(0, None)) is (warmup == 40)
    end = settings.lr_after(20)
    assert end == pytest.approx(1e-3 if decay == "constant" else 0.0, abs=1e-9) or warmup >= 20


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_a_longer_run_goes_on_as_if_it_had_been_planned(decay: Any) -> None:
    short = TrainerSettings(lr=1e-3, warmup_steps=2, lr_scheduler_type=decay, total_updates=10)
    longer = replace(short, total_updates=30)
    notice = longer.schedule_notice(8, short.total_updates)
    assert bool(notice) is (decay != "constant")
    if notice:
        assert f"{short.lr_after(8):.3g}" in notice and f"{longer.lr_after(8):.3g}" in notice
    assert not longer.schedule_notice(8, 30) and not longer.schedule_notice(8, None)


def test_lower_precision_weights_have_masters() -> None:
    """A step of 1e-4 is lost in bfloat16; a hundred of them are not, since the masters add them
    up."""
    model = tiny(dtype=torch.bfloat16)
    trainer = Trainer(model, TrainerSettings(lr=1e-4, warmup_steps=0))
    assert all(m.dtype == torch.float32 for m in trainer.masters)
    samples, before = batch(model, 4), [m.clone() for m in trainer.masters]
    trainer.step(samples)
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.masters, strict=True))
    for master, parameter in zip(trainer.masters, trainer.parameters, strict=True):
        assert torch.equal(master.to(torch.bfloat16), parameter.detach())


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_gradients_of_many_samples_add_up_in_bfloat16(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean over a thousand copies of a sample, one a pass or all in one row, has the gradient
    of the sample."""
    if not shared:
        monkeypatch.setattr("ajet_sdk.learn.trainer.shares_prefixes", lambda _: False)
    model = tiny(dtype=torch.bfloat16)
    one = batch(model, 4, rows=1)

    def norm(samples: list[Sample]) -> float:
        settings = TrainerSettings(lr=0.0, micro_batch_tokens=1)
        return Trainer(tiny(dtype=torch.bfloat16), settings).step(samples)["grad_norm"]

    assert norm(one * 1000) == pytest.approx(norm(one), rel=0.02)


def test_a_full_gpu_is_said_with_what_to_do_and_leaves_nothing_behind() -> None:
    model = tiny()
    samples, before = batch(model, 4), weights(model)
    trainer = Trainer(model, TrainerSettings(lr=1e-3, micro_batch_tokens=20))
    passes = 0

    def fill(*_: object) -> None:
        nonlocal passes
        passes += 1
        if passes == 3:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …"
            )

    hook = model.register_forward_pre_hook(fill)
    with pytest.raises(TrainingError, match=r"CUDA out of memory\).*micro_batch_tokens \(20\)"):
        trainer.step(samples)
    hook.remove()
    assert same(before, weights(model))
    assert all(p.grad is None for p in model.parameters())


def test_lora_moves_only_the_adapter_and_is_its_own_reference() -> None:
    model = with_lora(tiny())
    base = {n: v for n, v in weights(model).items() if "lora_" not in n}
    trainer = Trainer(
        model, TrainerSettings(lr=1e-2, warmup_steps=0, loss=LossSettings(kl_coef=0.1))
    )
    samples = batch(model, 5)
    kls = [trainer.step(samples)["kl"] for _ in range(3)]
    assert kls[0] == pytest.approx(0.0, abs=1e-6)
    assert kls[2] > 1e-5
    assert same(base, weights(model))


def test_a_gradient_that_is_not_finite_stops_the_run_and_leaves_the_weights() -> None:
    model = tiny()
    before = weights(model)
    samples = batch(model, 6)
    spoilt = samples[0].model_copy(update={"advantages": samples[0].advantages * np.float32("inf")})
    with pytest.raises(TrainingError, match="not finite"):
        Trainer(model, TrainerSettings(lr=1e-3)).step([spoilt])
    assert same(before, weights(model))


def test_nothing_to_train_on_is_said() -> None:
    with pytest.raises(TrainingError, match="no sample"):
        Trainer(tiny(), TrainerSettings(lr=1e-3)).step([])


def test_an_unknown_estimator_is_a_config_error() -> None:
    model = tiny()
    trainer = Trainer(model, TrainerSettings(lr=1e-3, loss=LossSettings(kl_coef=0.1, kl_type="k7")))
    with pytest.raises(ConfigError, match="kl_loss_type"):
        trainer.step(batch(model, 0))


def test_smaller_models_learn_at_higher_rates() -> None:
    sizes = [100_000, 10_000_000, 500_000_000, 7_000_000_000]
    rates = [default_lr(n, lora=False) for n in sizes]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == 1e-3 and rates[-1] == 1e-6
    adapters = [
        default_lr(n, lora=True)
        for n in (100_000, 135_000_000, 500_000_000, 2_000_000_000, 70_000_000_000)
    ]
    assert adapters == [1e-3, 1e-3, 4e-4, 1e-4, 1e-4]


# Checkpoints


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    backend = Tokenizer(models.WordLevel({f"t{i}": i for i in range(40)}, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="t1", pad_token="t2")


def progress(step: int) -> checkpoint.Progress:
    settings = {"trainer.lr": "0.01"}
    return checkpoint.Progress(
        step=step, policy_version=step, shared=settings, metrics={"val/reward": 0.5}
    )


def test_a_checkpoint_of_another_version_is_resumed_and_other_settings_are_named(
    tmp_path: Path,
) -> None:
    """A new field of the trainer's settings changed a hash of all of them, and an old run could not
    be resumed."""
    config, settings = ajet.Config(model={"path": "m"}), TrainerSettings(lr=1e-2)
    shared = checkpoint.shared_settings(config, settings, [])
    place = checkpoint.save(tmp_path, lambda _: None, checkpoint.Progress(1, 1, shared), keep=1)
    longer = checkpoint.shared_settings(config, replace(settings, total_updates=99), [])
    newer = {**longer, "trainer.loss.new": "0.5"}
    assert checkpoint.restore(place, lambda _: None, newer).step == 1
    other = checkpoint.shared_settings(config, replace(settings, lr=0.5), [Task(main_query="q")])
    with pytest.raises(
        CheckpointError, match=r"other settings \(training tasks .*; trainer.lr 0.01, now 0.5\)"
    ):
        checkpoint.restore(place, lambda _: None, other)
    state = place / "state.json"
    state.write_text(
        json.dumps({"step": 1, "policy_version": 1, "fingerprint": "0a1b", "metrics": {}})
    )
    with pytest.raises(CheckpointError, match="recorded no settings to compare"):
        checkpoint.restore(place, lambda _: None, shared)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_run_goes_on_to_the_same_numbers(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, lora: bool, dtype: torch.dtype
) -> None:
    """Three steps at a stretch, and one step, a checkpoint, a new process's objects, and two more
    steps."""

    def made() -> Trainer:
        model = tiny(dtype=dtype)
        return Trainer(
            with_lora(model, dropout=0.1) if lora else model,
            TrainerSettings(lr=1e-2, mini_batch_num=2),
        )

    torch.manual_seed(7)
    straight = made()
    batches = [batch(straight.model, seed) for seed in range(3)]
    torch.manual_seed(8)
    straight.step(batches[0])
    place = checkpoint.save(
        tmp_path,
        partial(checkpoint.write_trainer, trainer=straight, tokenizer=tokenizer),
        progress(1),
        keep=2,
    )
    expected = [straight.step(b) for b in batches[1:]]

    again = made()
    assert checkpoint.restore(
        place, partial(checkpoint.read_trainer, trainer=again), {"trainer.lr": "0.01"}
    ) == progress(1)
    numbers = [again.step(b) for b in batches[1:]]
    for one, other in zip(expected, numbers, strict=True):
        assert {k: v for k, v in one.items() if "seconds" not in k and "per_second" not in k} == {
            k: v for k, v in other.items() if "seconds" not in k and "per_second" not in k
        }
    assert same(weights(straight.model), weights(again.model))


def test_only_the_newest_checkpoints_are_kept(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    trainer = Trainer(tiny(), TrainerSettings(lr=1e-3))
    for step in (1, 2, 3, 3):
        checkpoint.save(
            tmp_path,
            partial(checkpoint.write_trainer, trainer=trainer, tokenizer=tokenizer),
            progress(step),
            keep=2,
        )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000002", "step_000003"]
    newest = checkpoint.latest(tmp_path)
    assert newest is not None and newest.name == "step_000003"


def test_a_half_written_checkpoint_is_never_the_latest(tmp_path: Path) -> None:
    (tmp_path / "step_000009").mkdir()
    (tmp_path / ".step_000010.123").mkdir()
    assert checkpoint.latest(tmp_path) is None


def test_a_spoilt_checkpoint_says_so(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    trainer = Trainer(tiny(), TrainerSettings(lr=1e-3))
    place = checkpoint.save(
        tmp_path,
        partial(checkpoint.write_trainer, trainer=trainer, tokenizer=tokenizer),
        progress(1),
        keep=1,
    )
    (place / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(CheckpointError, match="cannot be restored"):
        checkpoint.restore(place, partial(checkpoint.read_trainer, trainer=trainer), {})
    (place / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match="incomplete or damaged"):
        checkpoint.restore(place, partial(checkpoint.read_trainer, trainer=trainer), {})


def test_the_result_of_lora_is_a_merged_model_with_its_adapter(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    from transformers import AutoModelForCausalLM

    model = with_lora(tiny())
    trainer = Trainer(model, TrainerSettings(lr=1e-1, warmup_steps=0))
    trainer.step(batch(model, 0))
    before = weights(model)
    place = checkpoint.export(tmp_path / "model", model, tokenizer)
    assert same(before, weights(model))
    ids = torch.tensor([[1, 2, 3, 4]])
    merged = AutoModelForCausalLM.from_pretrained(place).eval()
    assert torch.allclose(merged(ids).logits, model(ids).logits, atol=1e-4)
    assert not torch.allclose(merged(ids).logits, tiny()(ids).logits, atol=1e-3)
    assert (place / "adapter" / "adapter_config.json").is_file()
