"""Separate models for the targets of one workflow: each learns from its own calls alone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import ajet
from ajet_sdk.config.config import Config, load_config
from ajet_sdk.config.model_source import separate_targets
from ajet_sdk.errors import ConfigError, TrainingError
from ajet_sdk.learn.learner import open_learners
from ajet_sdk.learn.probe import Probe
from ajet_sdk.learn.scores import TokenScores
from ajet_sdk.learn.separate import SeparateTrainer
from ajet_sdk.learn.trainer import Trainer, TrainerSettings
from ajet_sdk.run import run, train
from ajet_sdk.trace.reader import ledger_balance, open_trace
from ajet_sdk.types import Sample
from ajet_tools.trace.files.audit import audit
from tests.sdk.learn.test_trainer import batch, same, tiny, weights
from tests.sdk.test_local_backbone import job as shared_job
from tests.sdk.test_local_backbone import length, numbers

TARGETS = ["planner", "executor"]


def job(tmp_path: Path, model: Path, *, rollout: Mapping[str, Any] = {}, **trainer: Any) -> Config:
    """The small job of the local backbone's tests, with a model for each target."""
    whole = shared_job(tmp_path, model, val_before_train=False, val_pass_n=1, logger=[], **trainer)
    values = whole.model_dump(mode="json", exclude_unset=True)
    values["rollout"] |= {"trainable_targets": TARGETS, "trained_models": "separate", **rollout}
    return load_config(values=values)


@ajet.workflow
async def relay(question: str, model: ajet.Model) -> str:
    """A planner is asked, and an executor goes by its plan."""
    planner = model.agent("Ann", target_tag="planner")
    executor = model.agent("Bob", target_tag="executor")
    plan = await planner.chat([{"role": "user", "content": question}], max_tokens=6)
    asked = plan["content"] or "?"
    reply = await executor.chat([{"role": "user", "content": asked}], max_tokens=6)
    return reply["content"] or ""


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(path).state_dict())


@pytest.mark.slow
def test_each_target_has_a_model_of_its_own(tmp_path: Path, tiny_model: Path) -> None:
    config = job(tmp_path, tiny_model)
    tuned = train(config, workflow=relay, judge=length)
    assert tuned.path is not None and separate_targets(tuned.path) == TARGETS
    start = read_weights(tiny_model)
    planner, executor = (read_weights(tuned.path / target) for target in TARGETS)
    assert not same(planner, start) and not same(executor, start) and not same(planner, executor)
    measured = numbers(config)
    assert max(measured[step, "train/logprob_gap_max"] for step in (1, 2)) < 1e-4
    assert {"train/loss/planner", "train/loss/executor"} <= {name for _, name in measured}
    with open_trace(config.directory) as trace:
        answered = trace.query("SELECT DISTINCT target_tag, model FROM calls").to_pylist()
        run_id = trace.query("SELECT run_id FROM runs").to_pylist()[0]["run_id"]
        assert ledger_balance(trace, run_id) == []
    assert {(row["target_tag"], row["model"].rpartition("/")[2]) for row in answered} == {
        (target, target) for target in TARGETS
    }
    audited = audit(config.directory, weights=True)
    assert audited.differs == ()
    assert audited.rows["weights"] > 20, "also of the models of steps 1 and 2"


@pytest.mark.slow
def test_a_resumed_run_goes_on_to_the_same_numbers(tmp_path: Path, tiny_model: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    straight = job(tmp_path / "one", tiny_model, total_steps=3, mini_batch_num=2)
    train(straight, workflow=relay, judge=length)
    train(
        job(tmp_path / "two", tiny_model, total_steps=1, mini_batch_num=2),
        workflow=relay,
        judge=length,
    )
    longer = job(tmp_path / "two", tiny_model, total_steps=3, mini_batch_num=2)
    train(longer, workflow=relay, judge=length, resume=True)
    mine = {at: value for at, value in numbers(longer).items() if at != (1, "val/reward")}
    common = numbers(straight)
    assert {at: value for at, value in mine.items() if at in common} == {
        at: value for at, value in common.items() if at in mine
    }
    assert (3, "train/hash") in mine and (3, "train/hash") in common


@pytest.mark.slow
def test_a_trained_directory_answers_with_the_model_of_each_target(
    tmp_path: Path, tiny_model: Path
) -> None:
    config = job(tmp_path, tiny_model, total_steps=1, test_freq=0)
    tuned = train(config, workflow=relay, judge=length)
    assert tuned.path is not None
    values = config.model_dump(mode="json", exclude_unset=True)
    values["model"]["path"] = str(tuned.path)
    values["experiment_dir"] = str(tmp_path / "again")
    again = load_config(values=values)
    report = run(again, workflow=relay, judge=length, tasks=[{"question": "Say so."}])
    models = {(call.target_tag, call.model) for call in report.episodes[0].calls}
    assert {target for target, _ in models} == set(TARGETS) and len(models) == 2


@pytest.mark.slow
def test_checkpoints_of_the_run_are_opponents_by_target(tmp_path: Path, tiny_model: Path) -> None:
    config = job(
        tmp_path,
        tiny_model,
        rollout={"trained_seats": 1, "opponent": "checkpoint@latest"},
        total_steps=3,
        test_freq=0,
    )
    train(config, workflow=relay, judge=length)
    with open_trace(config.directory) as trace:
        rows = trace.query(
            """SELECT DISTINCT c.target_tag, c.model FROM calls c JOIN episodes e USING (episode_id)
            WHERE NOT c.trainable AND e.split = 'train' AND e.step = 3 AND c.error IS NULL"""
        ).to_pylist()
    assert rows
    assert all(row["model"] == f"checkpoint@2/{row['target_tag']}" for row in rows)


@pytest.mark.slow
def test_with_staleness_and_lora_the_log_probabilities_are_those_of_the_own_model(
    tmp_path: Path, tiny_model: Path
) -> None:
    config = job(
        tmp_path,
        tiny_model,
        rollout={"max_staleness": 1, "deterministic": False},
        total_steps=3,
        mini_batch_num=2,
    )
    values = config.model_dump(mode="json", exclude_unset=True)
    values["model"]["lora"] = {"enabled": True, "r": 4}
    config = load_config(values=values)
    train(config, workflow=relay, judge=length)
    gaps = [value for (_, name), value in numbers(config).items() if "logprob_gap_max" in name]
    assert gaps
    assert audit(config.directory).differs == ()


def for_target(target: str, samples: list[Sample]) -> list[Sample]:
    return [sample.model_copy(update={"target": target}) for sample in samples]


def test_a_step_trains_each_model_as_a_trainer_of_its_own_would() -> None:
    settings = TrainerSettings(lr=1e-2, mini_batch_num=2, total_updates=10)
    apart = {target: Trainer(tiny(), settings) for target in TARGETS}
    own_trainers = {target: Trainer(tiny(), settings) for target in TARGETS}
    joint = SeparateTrainer(own_trainers)
    for seed in range(3):
        own = {target: batch(tiny(), seed + 10 * i) for i, target in enumerate(TARGETS)}
        if seed == 1:
            own.pop("executor")
        samples = [
            sample
            for pair in zip(*(for_target(name, rows) for name, rows in own.items()), strict=True)
            for sample in pair
        ]
        scores = TokenScores()
        joint.step(samples, scores=scores)
        for target, rows in own.items():
            alone = TokenScores()
            apart[target].step(rows, scores=alone)
            places = [i for i, sample in enumerate(samples) if sample.target == target]
            for place, logprobs in zip(places, alone.logprobs, strict=True):
                assert torch.equal(
                    torch.tensor(scores.logprobs[place]).nan_to_num(),
                    torch.tensor(logprobs).nan_to_num(),
                )
    for target, trainer in apart.items():
        ours = own_trainers[target]
        assert same(weights(ours.model), weights(trainer.model))
        assert ours.updates == trainer.updates
    assert joint.updates == 6


def test_adapters_share_one_base(tmp_path: Path, tiny_model: Path) -> None:
    config = job(tmp_path, tiny_model)
    values = config.model_dump(mode="json", exclude_unset=True)
    values["model"]["lora"] = {"enabled": True, "r": 4}
    config = load_config(values=values)
    probe = Probe(config, relay, length, [])
    learners = asyncio.run(open_learners(config, probe, 2, lambda line: None, TARGETS))
    planner, executor = (learners[target].trainer.model for target in TARGETS)
    shared = dict(executor.named_parameters())
    for name, parameter in planner.named_parameters():
        assert (parameter is shared[name]) == (not parameter.requires_grad)
    assert any(parameter.requires_grad for parameter in executor.parameters())


@ajet.workflow
async def untagged(question: str, model: ajet.Model) -> str:
    reply = await model.chat([{"role": "user", "content": question}])
    return reply["content"] or ""


@ajet.workflow
async def both(question: str, model: ajet.Model) -> str:
    """One agent under two targets: their calls would be one timeline."""
    for target in TARGETS:
        await model.agent("Ann", target_tag=target).chat([{"role": "user", "content": question}])
    return "done"


@pytest.mark.slow
def test_one_agent_is_not_two_targets(tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(TrainingError, match="different names"):
        train(job(tmp_path, tiny_model, total_steps=1), workflow=both, judge=length)


@pytest.mark.parametrize(
    "change",
    [
        {"backbone": "tinker"},
        {"backbone": "trinity"},
        {"trainer_common": {"algorithm": {"adv_estimator": "sft"}}},
        {"rollout": {"trained_models": "separate", "name": "vllm"}},
    ],
)
def test_what_needs_one_model_is_refused(change: dict[str, Any]) -> None:
    values = {"rollout": {"trained_models": "separate"}, "model": {"path": "m"}, **change}
    with pytest.raises(ConfigError, match="trained_models"):
        load_config(values=values)


def test_targets_must_be_named(tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="trainable_targets"):
        train(
            job(tmp_path, tiny_model, rollout={"trainable_targets": None}),
            workflow=untagged,
            judge=length,
        )


@pytest.mark.parametrize("name", ["../escape", "a/b", ".", ".."])
def test_a_target_names_no_other_directory(name: str, tmp_path: Path, tiny_model: Path) -> None:
    config = job(tmp_path, tiny_model, rollout={"trainable_targets": [name, "executor"]})
    with pytest.raises(ConfigError, match="directory"):
        train(config, workflow=relay, judge=length)
