"""Training on from an adapter: the reference is what the run starts from, and the config may not
contradict it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ajet
from ajet_sdk.config.config import Config, load_config
from ajet_sdk.engines.local.loading import load_model
from ajet_sdk.engines.open import open_engine
from ajet_sdk.errors import ConfigError
from ajet_sdk.learn.objective import LossSettings
from ajet_sdk.learn.start_adapter import check_start_adapter
from ajet_sdk.learn.trainer import Trainer, TrainerSettings
from ajet_sdk.run import train
from ajet_sdk.tokens.huggingface import HFTokenizer
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trainer_service.policies import BaseModel

WORDS = ("yes", "no", "maybe", "so", "well")


def config_of(
    tmp_path: Path, name: str, model: Path, *, lora: dict[str, Any] | None = None, **common: Any
) -> Config:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(
        "".join(json.dumps({"question": f"Say {w}.", "answer": w}) + "\n" for w in WORDS)
    )
    trainer = {
        "total_steps": 2,
        "val_pass_n": 1,
        "test_freq": 9,
        "val_before_train": False,
        "save_freq": 1,
    }
    return load_config(
        values={
            "experiment_name": name,
            "experiment_dir": str(tmp_path / name),
            "backbone": "local",
            "model": {"path": str(model), "lora": {"enabled": True} if lora is None else lora},
            "task_reader": {
                "type": "jsonl_dataset_file",
                "jsonl_dataset_file": {"training": {"file_path": str(tasks)}},
            },
            "data": {"train_batch_size": 2},
            "rollout": {
                "num_repeat": 4,
                "max_model_len": 128,
                "max_response_length_in_one_turn": 6,
            },
            "trainer_common": {**trainer, "logger": ["console"], **common},
        }
    )


@ajet.workflow
async def talk(question: str, model: ajet.Model) -> str:
    reply = await model.chat([{"role": "user", "content": question}])
    return reply["content"] or ""


@ajet.judge
def length(output: str) -> float:
    return len(output) / 10


HOT = {"optim": {"lr": 0.05, "warmup_steps": 0}}


@pytest.fixture(scope="module")
def finished(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's directory in `checkpoint/` of a LoRA run that changed the head of a tied model a
    lot."""
    lora = {"enabled": True, "r": 4, "alpha": 8, "target_modules": ["lm_head", "q_proj", "up_proj"]}
    config = config_of(tmp_path_factory.mktemp("first"), "first", tiny_model, lora=lora, **HOT)
    tuned = train(config, workflow=talk, judge=length)
    assert tuned.path is not None
    return tuned.path.parent


def first_step(config: Config) -> dict[str, float]:
    with open_trace(config.directory) as reader:
        rows = reader.query("SELECT name, value FROM metrics WHERE step = 1").to_pylist()
    return {row["name"]: row["value"] for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize("start", ["step_000002", "model/adapter"])
def test_the_divergence_is_measured_to_the_adapter(
    finished: Path, tmp_path: Path, start: str
) -> None:
    config = config_of(
        tmp_path, "second", finished / start, use_kl_loss=True, kl_loss_coef=0.1, **HOT
    )
    tuned = train(config, workflow=talk, judge=length)
    metrics = first_step(config)
    assert metrics["train/kl"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["train/logprob_gap_mean"] < 1e-3, "the sampler has the adapter, too"
    assert tuned.metrics["train/kl"] > 1e-3, "it moves away from its start"
    assert tuned.path is not None
    assert json.loads((tuned.path / "adapter" / "adapter_config.json").read_text())["r"] == 4


@pytest.mark.slow
def test_preferences_begin_without_any(finished: Path, tmp_path: Path) -> None:
    config = config_of(
        tmp_path, "dpo", finished / "step_000002", algorithm={"adv_estimator": "dpo"}, **HOT
    )
    train(config, workflow=talk, judge=length)
    assert first_step(config)["train/loss"] == pytest.approx(0.6931, abs=1e-3)
    assert first_step(config)["train/dpo_margin"] == pytest.approx(0.0, abs=1e-4)


@pytest.mark.slow
def test_a_run_on_an_adapter_resumes_with_the_same_reference(
    finished: Path, tmp_path: Path
) -> None:
    whole = config_of(
        tmp_path, "whole", finished / "step_000002", use_kl_loss=True, total_steps=3, **HOT
    )
    short = config_of(
        tmp_path, "short", finished / "step_000002", use_kl_loss=True, total_steps=2, **HOT
    )
    deterministic = {"rollout": whole.rollout.model_copy(update={"deterministic": True})}
    expected = train(whole.model_copy(update=deterministic), workflow=talk, judge=length)
    train(short.model_copy(update=deterministic), workflow=talk, judge=length)
    longer = config_of(
        tmp_path, "short", finished / "step_000002", use_kl_loss=True, total_steps=3, **HOT
    )
    resumed = train(
        longer.model_copy(update=deterministic), workflow=talk, judge=length, resume=True
    )
    assert resumed.metrics["train/kl"] == expected.metrics["train/kl"] > 1e-4
    assert resumed.metrics["train/hash"] == expected.metrics["train/hash"]


@pytest.mark.slow
def test_an_adapter_without_a_tokenizer_has_that_of_its_base(
    finished: Path, tiny_model: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(finished / "model" / "adapter", tmp_path / "adapter"))
    for file in path.iterdir():
        if not file.name.startswith("adapter"):
            file.unlink()
    bare, base = HFTokenizer(str(path)), HFTokenizer(str(tiny_model))
    assert bare.eos_ids == base.eos_ids
    assert bare.encode("Say yes.") == base.encode("Say yes.")
    open_engine(load_config(values={"model": {"path": str(path), "device": "cpu"}}))


@pytest.mark.slow
def test_what_contradicts_the_adapter_is_an_error_with_the_fix(
    finished: Path, tmp_path: Path
) -> None:
    step = finished / "step_000002"

    def check(lora: dict[str, Any], path: Path = step) -> str:
        config = config_of(tmp_path, "conflict", path, lora=lora)
        messages: list[str] = []
        check_start_adapter(config, path, messages.append)
        return "".join(messages)

    merged = str(finished / "model")
    for wrong in ({"r": 16}, {"alpha": 32}, {"target_modules": ["q_proj"]}):
        with pytest.raises(ConfigError, match=f"model.lora.{next(iter(wrong))}") as caught:
            check({"enabled": True, **wrong})
        assert merged in str(caught.value)
    for off in ({"enabled": False}, {}):
        for path in (step, finished / "model" / "adapter"):
            with pytest.raises(ConfigError, match=r"model\.lora\.enabled: true") as caught:
                check(off, path)
            assert merged in str(caught.value)
    same = {"enabled": True, "r": 4, "alpha": 8, "target_modules": ["up_proj", "q_proj", "lm_head"]}
    assert str(step) in check(same), "the start and the reference are said"
    assert check({"enabled": True}), "keys that are not set follow the adapter"
    with pytest.raises(ConfigError, match="target_modules"):
        config = config_of(
            tmp_path, "all", step, lora={"enabled": True, "target_modules": "all-linear"}
        )
        train(config, workflow=talk, judge=length)
    with pytest.raises(ConfigError, match="LoRA adapter"):
        BaseModel(str(step), device="cpu")


@pytest.mark.slow
def test_the_base_of_an_adapter_must_be_there_and_whole(finished: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(finished / "step_000002", tmp_path / "adapter"))
    file = path / "adapter_config.json"
    values = json.loads(file.read_text())
    for base in (tmp_path / "gone", finished / "step_000001"):
        file.write_text(json.dumps({**values, "base_model_name_or_path": str(base)}))
        with pytest.raises(ConfigError) as caught:
            load_model(path, device="cpu")
        assert str(base) in str(caught.value) and str(path) in str(caught.value)


def test_the_reference_of_an_adapter_shares_the_base(tiny_model: Path) -> None:
    lora = load_config(
        values={"model": {"path": "x", "lora": {"enabled": True, "r": 2}}}
    ).model.lora
    model: Any = load_model(tiny_model, device="cpu", lora=lora)
    reference: Any = Trainer(
        model, TrainerSettings(lr=1e-3, loss=LossSettings(kl_coef=0.1))
    ).reference
    theirs = dict(reference.named_parameters())
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, parameter in model.named_parameters():
        assert (theirs[name] is parameter) is (name not in trained)
        assert torch.equal(theirs[name], parameter) and not theirs[name].requires_grad
