"""`rollout.max_staleness` above 0: the next batch is sampled while this one trains, and every
promise still holds."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ajet
from ajet_sdk.config.config import Config, load_config
from ajet_sdk.engines.local.sampler import LocalSampler, SamplingCopy
from ajet_sdk.engines.scripted import ByteTokenizer
from ajet_sdk.errors import ConfigError
from ajet_sdk.learn.batches import collate
from ajet_sdk.learn.losses import score
from ajet_sdk.learn.objective import LossSettings
from ajet_sdk.learn.trainer import Trainer, TrainerSettings
from ajet_sdk.protocols import Sampling
from ajet_sdk.run import train
from ajet_sdk.trace.reader import ledger_balance, open_trace
from ajet_sdk.types import Sample, Span, Timeline
from ajet_tools.trace.files.audit import audit
from ajet_tools.trace.files.check import check
from tests.sdk.test_local_backbone import length, talk
from tests.waiting import until_async

pytestmark = pytest.mark.slow


def job(tmp_path: Path, model: Path, rollout: Mapping[str, Any] = {}, **trainer: Any) -> Config:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(
        "".join(f'{{"question": "Say {w}."}}\n' for w in ("yes", "no", "maybe", "so", "well"))
    )
    return load_config(
        values={
            "experiment_name": "tiny",
            "experiment_dir": str(tmp_path / "experiment"),
            "model": {"path": str(model)},
            "task_reader": {
                "type": "jsonl_dataset_file",
                "jsonl_dataset_file": {"training": {"file_path": str(tasks)}},
            },
            "data": {"train_batch_size": 2},
            "rollout": {
                "num_repeat": 4,
                "temperature": 1.0,
                "max_model_len": 200,
                "max_staleness": 1,
                "max_response_length_in_one_turn": 6,
                **rollout,
            },
            "trainer_common": {
                "total_steps": 4,
                "test_freq": 0,
                "save_freq": 1,
                "keep_checkpoints": 100,
                "use_kl_loss": False,
                "logger": [],
                "optim": {"lr": 0.01, "warmup_steps": 1},
                **trainer,
            },
        }
    )


def rows(config: Config, sql: str) -> list[dict[str, Any]]:
    with open_trace(config.directory) as reader:
        return reader.query(sql).to_pylist()


def assert_balanced(config: Config) -> None:
    assert check(config.directory) == []
    with open_trace(config.directory) as reader:
        for row in reader.query("SELECT run_id FROM runs").to_pylist():
            assert ledger_balance(reader, row["run_id"]) == []


def metric(config: Config, name: str) -> dict[int, float]:
    found = rows(config, f"SELECT step, value FROM metrics WHERE name = '{name}' ORDER BY step")
    return {row["step"]: row["value"] for row in found}


def two_turns(checkpoints: Path) -> Any:
    """An agent whose second turn waits until the step before its own is over: it sees both sides of
    an update."""

    @ajet.workflow
    async def agent(question: str, model: ajet.Model, episode: ajet.Episode) -> str:
        messages = [{"role": "user", "content": question}]
        first = await model.chat(messages)
        if episode.step > 1:  # trained while this one is sampled, or this never ends
            await until_async(lambda: list(checkpoints.glob(f"*/step_{episode.step - 1:06d}")))
        second = await model.chat([*messages, {"role": "assistant", "content": first["content"]},
                                   {"role": "user", "content": "And again."}])  # fmt: skip
        return f"{first['content']}{second['content']}"

    return agent


@ajet.workflow
async def endless(question: str, model: ajet.Model) -> str:
    """Its reply takes several times as long as a step of training."""
    sampled = await model.chat([{"role": "user", "content": question}], ignore_eos=True)
    return str(sampled["content"])


def test_replies_go_on_with_new_weights_and_say_from_which_token_on(
    tmp_path: Path, tiny_model: Path
) -> None:
    """The audit recomputes each token's log-probability with the weights of its own version."""
    long = {"max_model_len": 1000, "max_response_length_in_one_turn": 600}
    config = job(tmp_path, tiny_model, long)
    train(config, workflow=endless, judge=length)
    calls = rows(config, """
        SELECT e.step, policy_version, weight_updates, len(output_ids) AS tokens
        FROM calls JOIN episodes e USING (episode_id) WHERE trainable""")  # fmt: skip
    spanning = [call for call in calls if call["weight_updates"]]
    assert len(spanning) >= 8, "no reply was being sampled while the weights changed"
    for call in spanning:
        assert call["policy_version"] == call["step"] - 2
        assert all(0 < place < call["tokens"] for place in call["weight_updates"])
    assert_balanced(config)
    audited = audit(config.directory / "trace.duckdb", weights=True)
    assert (audited.differs, audited.unchecked) == ((), ())
    ages = metric(config, "train/staleness")
    assert any(0 < age < 1 for age in ages.values())


def test_a_batch_is_sampled_on_both_sides_of_an_update_and_each_call_is_exact(
    tmp_path: Path, tiny_model: Path
) -> None:
    """Every recorded log-probability is that of the weights whose version its token bears."""
    from transformers import AutoModelForCausalLM

    config = job(tmp_path, tiny_model)
    checkpoints = config.directory / "checkpoint"
    train(config, workflow=two_turns(checkpoints), judge=length)
    calls = rows(config, """
        SELECT e.step, policy_version, weight_updates, prompt_ids, output_ids, logprobs
        FROM calls_full JOIN episodes e USING (episode_id) WHERE trainable""")  # fmt: skip
    versions = {(c["step"], c["policy_version"]) for c in calls}
    after = {(step, step - 1) for step in (1, 2, 3, 4)}
    assert after < versions <= after | {(step, step - 2) for step in (2, 3, 4)}
    places = [tiny_model, *sorted(checkpoints.glob("*/step_*"))]
    models = [AutoModelForCausalLM.from_pretrained(place).eval() for place in places]
    other = 0.0
    for c in calls:
        ids, size = torch.tensor([[*c["prompt_ids"], *c["output_ids"]]]), len(c["output_ids"])
        later = np.searchsorted(c["weight_updates"] or [], np.arange(size), side="right")
        for version, model in enumerate(models):
            with torch.inference_mode():
                logprobs = torch.log_softmax(model(ids).logits[0, -size - 1 : -1], -1)
            scored = logprobs.gather(1, ids[0, -size:, None])[:, 0].numpy()
            gaps = np.abs(scored - np.array(c["logprobs"]))
            sampled = c["policy_version"] + later == version
            assert gaps.max(where=sampled, initial=0) < 1e-4
            other = max(other, gaps.max(where=~sampled, initial=0))
    assert other > 1e-2  # the versions do differ
    assert_balanced(config)
    assert {row["outcome"] for row in rows(config, "SELECT DISTINCT outcome FROM ledger")} <= {
        "trained",
        "zero_advantage",
    }
    assert max(metric(config, "train/staleness_max").values()) == 1
    assert 0 < max(metric(config, "train/staleness").values()) < 1
    assert set(metric(config, "time/overlap")) == {1, 2, 3}
    assert all(0 < share <= 1 for share in metric(config, "time/overlap").values())
    assert set(metric(config, "time/train")) == {1, 2, 3, 4}


def test_without_staleness_no_batch_begins_before_its_turn(
    tmp_path: Path, tiny_model: Path
) -> None:
    config = job(tmp_path, tiny_model, {"max_staleness": 0})
    train(config, workflow=talk, judge=length)
    calls = rows(
        config, "SELECT e.step, policy_version FROM calls JOIN episodes e USING (episode_id)"
    )
    assert {(c["step"], c["policy_version"]) for c in calls} == {(s, s - 1) for s in (1, 2, 3, 4)}
    assert metric(config, "time/overlap") == {}


def test_with_many_updates_a_step_the_bound_holds(tmp_path: Path, tiny_model: Path) -> None:
    """Sampling begins so late in a step that nothing has to be thrown away for its age."""
    config = job(tmp_path, tiny_model, {"max_staleness": 2}, mini_batch_num=2, ppo_epochs=2)
    train(config, workflow=talk, judge=length)
    assert all(0 <= most <= 2 for most in metric(config, "train/staleness_max").values())
    assert max(metric(config, "train/staleness_max").values()) > 0
    assert max(metric(config, "train/policy_version").values()) == 16
    assert "stale" not in {row["outcome"] for row in rows(config, "SELECT outcome FROM ledger")}
    assert_balanced(config)


@pytest.mark.parametrize("bound", [1, 3])
def test_a_straggler_holds_up_its_step_and_no_sampling_of_the_next(
    bound: int, tmp_path: Path, tiny_model: Path
) -> None:
    """One episode of step 1 waits for the end of those of the last step that may be sampled with
    the same weights: the run would hang if it was not sampled, and trains too old tokens if a later
    one is."""
    began: Counter[int] = Counter()
    ended: Counter[int] = Counter()
    began_before_training: list[int] = []

    @ajet.workflow
    async def agent(question: str, model: ajet.Model, episode: ajet.Episode) -> str:
        began[episode.step] += 1
        is_straggler = episode.step == 1 and began[1] == 1
        reply = await model.chat([{"role": "user", "content": question}])
        if is_straggler:
            await until_async(lambda: ended[bound + 1] == 8)
            began_before_training.append(max(began))
        ended[episode.step] += 1
        return reply["content"] or ""

    config = job(tmp_path, tiny_model, {"max_staleness": bound}, total_steps=6)
    train(config, workflow=agent, judge=length)
    assert began_before_training == [bound + 1]
    assert max(metric(config, "train/staleness_max").values()) == bound
    assert "stale" not in {row["outcome"] for row in rows(config, "SELECT outcome FROM ledger")}
    assert_balanced(config)


@ajet.judge
def always_right(output: str) -> tuple[float, bool]:
    return 1.0, True


@pytest.mark.parametrize("bound", [1, 3])
def test_a_run_that_stops_early_books_what_it_sampled_ahead(
    bound: int, tmp_path: Path, tiny_model: Path
) -> None:
    config = job(
        tmp_path, tiny_model, {"max_staleness": bound}, total_steps=12, stop_when=["solved"]
    )
    train(config, workflow=talk, judge=always_right)
    steps = {row["step"] for row in rows(config, "SELECT step FROM metrics")}
    assert max(steps) < 12
    ahead = rows(config, "SELECT outcome FROM ledger JOIN episodes USING (episode_id)"
                 f" WHERE episodes.step > {max(steps)}")  # fmt: skip
    assert ahead and {row["outcome"] for row in ahead} <= {"failed", "superseded"}
    assert_balanced(config)
    assert audit(config.directory / "trace.duckdb").differs == ()


def test_ctrl_c_books_the_batch_that_was_under_way_and_a_resume_goes_on(
    tmp_path: Path, tiny_model: Path
) -> None:
    config = job(tmp_path, tiny_model, save_freq=100)
    stopped = threading.Event()

    @ajet.workflow
    async def interrupted(question: str, model: ajet.Model, episode: ajet.Episode) -> str:
        reply = await model.chat([{"role": "user", "content": question}])
        if episode.step == 3 and not stopped.is_set():
            stopped.set()
            await asyncio.sleep(0.3)  # the others have called too, and step 2 may still be training
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(3600)
        return reply["content"] or ""

    with pytest.raises(KeyboardInterrupt):
        train(config, workflow=interrupted, judge=length)
    assert_balanced(config)
    lost = rows(
        config, "SELECT step, sum(tokens) AS n FROM ledger WHERE outcome = 'failed' GROUP BY step"
    )
    assert lost[0]["step"] == 3 and lost[0]["n"] > 0
    assert {row["step"] for row in lost} <= {3, 4}
    assert {r["status"] for r in rows(config, "SELECT status FROM episodes WHERE step = 3")} >= {
        "aborted"
    }
    tuned = train(config, workflow=interrupted, judge=length, resume=True)
    assert tuned.metrics["train/policy_version"] == 4
    assert rows(config, "SELECT sum(tokens) AS n FROM ledger WHERE outcome = 'superseded'")[0][
        "n"
    ] >= sum(row["n"] for row in lost)
    assert_balanced(config)


def test_a_failing_batch_ends_the_one_ahead_of_it(tmp_path: Path, tiny_model: Path) -> None:
    from ajet_sdk.errors import TrainingError

    @ajet.workflow
    async def failing(question: str, model: ajet.Model, episode: ajet.Episode) -> str:
        reply = await model.chat([{"role": "user", "content": question}])
        if episode.step == 2:
            raise ValueError("from the second step on")
        return reply["content"] or ""

    config = job(tmp_path, tiny_model)
    with pytest.raises(TrainingError, match="from the second step on"):
        train(config, workflow=failing, judge=length)
    assert {row["status"] for row in rows(config, "SELECT status FROM runs")} == {"failed"}


def test_lora_is_sampled_from_a_twin_of_the_adapter_alone(tmp_path: Path, tiny_model: Path) -> None:
    config = job(tmp_path, tiny_model, total_steps=3, use_kl_loss=True, kl_loss_coef=0.1)
    lora = config.model.lora.model_copy(update={"enabled": True, "r": 2, "dropout": 0.1})
    config = config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})})
    tuned = train(config, workflow=two_turns(config.directory / "checkpoint"), judge=length)
    assert (
        tuned.path is not None and (tuned.path / "adapter" / "adapter_model.safetensors").is_file()
    )
    assert_balanced(config)


def test_deterministic_and_overlapping_exclude_each_other(tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"rollout\.max_staleness must be 0 with rollout\.deterministic"
    ):
        job(tmp_path, tiny_model, {"deterministic": True})


def plain(seed: int = 0) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=320,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    return Qwen3ForCausalLM(config).eval()


def first_logprobs(model: Any, prompt: list[int]) -> torch.Tensor:
    return torch.log_softmax(model(torch.tensor([prompt])).logits[0, -1], -1)


def test_the_loss_of_stale_tokens_has_the_new_policys_gradient_in_expectation() -> None:
    """Over the old policy's distribution of the next token, with its own log-probabilities as the
    ratio's denominator, the loss's gradient is that of the new policy's expected advantage:
    importance sampling, exactly.
    """
    old, new, prompt, vocabulary = plain(0), plain(1), [5, 7, 11], 320
    with torch.no_grad():
        old_V = first_logprobs(old, prompt)
    worth_V = torch.randn(vocabulary, generator=torch.Generator().manual_seed(2))
    expected = -(first_logprobs(new, prompt).exp() * worth_V).sum() / vocabulary
    expected.backward()
    wanted = [p.grad.clone() for p in new.parameters()]
    new.zero_grad()

    def sample(token: int) -> Sample:
        line = Timeline(
            agent="default",
            token_ids=[*prompt, token],
            loss_mask=[False] * 3 + [True],
            logprobs=[0.0] * 3 + [float(old_V[token])],
            call_ids=("c",),
            spans=(Span(call_id="c", start=3, end=4),),
        )
        share = float(
            old_V[token].exp() * worth_V[token]
        )  # how often the sampler draws it, times what it is worth
        return Sample(
            timeline=line,
            episode_id="e",
            group_id="g",
            reward=0.0,
            advantages=np.array([0, 0, 0, share]),
        )

    trainer = Trainer(
        new,
        TrainerSettings(
            lr=1e-9, loss=LossSettings(clip_ratio_low=1.0, clip_ratio_high=1e9), grad_clip=1e9
        ),
    )
    seen: list[torch.Tensor] = []
    trainer.optimizer.register_step_pre_hook(
        lambda *_: seen.extend(p.grad.clone() for p in new.parameters())
    )
    trainer.step([sample(token) for token in range(vocabulary)])
    for got, want in zip(seen, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("lora", [False, True])
def test_a_twin_is_apart_until_it_catches_up(lora: bool) -> None:
    model = plain()
    if lora:
        import peft

        model = peft.get_peft_model(
            model, peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear")
        ).eval()
    copied, prompt = SamplingCopy(model), [1, 2, 3]
    before = first_logprobs(copied.module, prompt)
    assert torch.equal(before, first_logprobs(model, prompt))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.train()
    assert torch.equal(before, first_logprobs(copied.module, prompt))
    assert not copied.module.training
    copied.catch_up()
    model.eval()
    assert torch.equal(first_logprobs(copied.module, prompt), first_logprobs(model, prompt))
    own = {id(p) for p in copied.module.parameters()} - {id(p) for p in model.parameters()}
    assert len(own) == sum(p.requires_grad for p in model.parameters())
    if lora:
        with model.disable_adapter():
            assert torch.equal(
                first_logprobs(copied.module, prompt), first_logprobs(copied.module, prompt)
            )
            assert not torch.equal(
                first_logprobs(copied.module, prompt), first_logprobs(model, prompt)
            )


def test_a_sampler_apart_takes_the_weights_as_exclusive_ends() -> None:
    model = plain()
    sampler = LocalSampler(model, ByteTokenizer(), model_name="m", max_model_len=64, apart=True)

    async def draw() -> float:
        [got] = await sampler.sample([1, 2, 3], Sampling(max_tokens=1, seed=1), "s")
        chosen = collate([_one_token(got.output_ids[0])])
        with torch.no_grad():
            return float(score(model, chosen, entropy=False).logprobs_N[0]) - got.logprobs[0]

    async def run() -> None:
        assert abs(await draw()) < 1e-5
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        assert abs(await draw()) > 1e-3
        async with sampler.exclusive():
            sampler.policy_version = 1
        assert abs(await draw()) < 1e-5
        await sampler.aclose()

    asyncio.run(run())


def _one_token(token: int) -> Sample:
    line = Timeline(
        agent="default",
        token_ids=[1, 2, 3, token],
        loss_mask=[False] * 3 + [True],
        logprobs=np.zeros(4),
        call_ids=("c",),
        spans=(Span(call_id="c", start=3, end=4),),
    )
    return Sample(timeline=line, episode_id="e", group_id="g", reward=0.0, advantages=np.zeros(4))
