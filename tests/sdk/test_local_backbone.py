"""The local backbone through the real gateway: a whole run, its trace, its checkpoints, and what it
says of trouble."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import ajet
from ajet_sdk.backbones.shared.steps import tasks_of_step, total_steps
from ajet_sdk.backbones.shared.training import _complete
from ajet_sdk.backbones.shared.validation import validations_left
from ajet_sdk.config.config import Config, load_config
from ajet_sdk.errors import CheckpointError, ConfigError, TrainingError
from ajet_sdk.learn.trainer import Trainer, TrainerSettings
from ajet_sdk.run import train
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.types import Task
from ajet_tools.trace.files.audit import audit
from ajet_tools.trace.files.check import check
from tests.waiting import until_async


def job(tmp_path: Path, model: Path, **trainer: Any) -> Config:
    tasks = tmp_path / "tasks.jsonl"
    rows = [{"question": f"Say {w}.", "answer": w} for w in ("yes", "no", "maybe", "so", "well")]
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = tmp_path / "val.jsonl"
    held_out.write_text(json.dumps({"question": "Say never.", "answer": "never"}) + "\n")
    files = {"training": {"file_path": str(tasks)}, "validation": {"file_path": str(held_out)}}
    return load_config(
        values={
            "experiment_name": "tiny",
            "experiment_dir": str(tmp_path / "experiment"),
            "backbone": "local",
            "model": {"path": str(model)},
            "task_reader": {"type": "jsonl_dataset_file", "jsonl_dataset_file": files},
            "data": {"train_batch_size": 2},
            "rollout": {
                "num_repeat": 4,
                "temperature": 1.0,
                "max_model_len": 128,
                "deterministic": True,
                "max_response_length_in_one_turn": 6,
            },
            "trainer_common": {
                "total_steps": 2,
                "val_before_train": True,
                "val_pass_n": 2,
                "test_freq": 2,
                "save_freq": 1,
                "use_kl_loss": False,
                "logger": ["console"],
                **trainer,
            },
        }
    )


@ajet.workflow
async def talk(question: str, model: ajet.Model) -> str:
    reply = await model.chat([{"role": "user", "content": question}])
    return reply["content"] or ""


@ajet.judge
def length(output: str) -> float:
    """Something that differs between attempts of an untrained model."""
    return len(output) / 10


def numbers(config: Config) -> dict[tuple[int, str], float]:
    """The metrics of a run that a repetition has to meet again."""
    with open_trace(config.directory) as reader:
        rows = reader.query("SELECT step, name, value FROM metrics").to_pylist()
    timed = ("time/", "per_second", "seconds")
    return {
        (r["step"], r["name"]): r["value"] for r in rows if not any(t in r["name"] for t in timed)
    }


def outcomes(config: Config) -> dict[str, int]:
    with open_trace(config.directory) as reader:
        rows = reader.query(
            "SELECT outcome, sum(tokens) AS n FROM ledger GROUP BY outcome"
        ).to_pylist()
    return {r["outcome"]: int(r["n"]) for r in rows}


@pytest.mark.slow
def test_a_run_ends_with_a_model_a_trace_and_a_curve(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = job(tmp_path, tiny_model, logger=["console", "tensorboard"])
    tuned = train(config, workflow=talk, judge=length)
    assert tuned.path is not None
    trained = AutoModelForCausalLM.from_pretrained(tuned.path).state_dict()
    start = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    assert any(not torch.equal(value, start[name]) for name, value in trained.items())
    assert AutoTokenizer.from_pretrained(tuned.path).chat_template
    measured = numbers(config)
    for name in ("val/reward", "val/greedy_reward", "val/pass@2"):
        assert {step for step, found in measured if found == name} == {0, 2}
    assert measured[2, "train/policy_version"] == 2
    assert [measured[step, "train/staleness"] for step in (1, 2)] == [0, 0]
    assert "train/failed_share" in {name for _, name in measured}
    assert measured[1, "train/logprob_gap_max"] < 1e-3
    assert f"hash {measured[2, 'train/hash']:.0f}" in capsys.readouterr().out
    assert (config.directory / "metrics" / "learning_curve.png").stat().st_size > 1000
    assert list((config.directory / "metrics" / "tensorboard").iterdir())
    assert set(outcomes(config)) <= {"trained", "evaluation", "zero_advantage"}
    assert outcomes(config)["trained"] > 0
    assert_trained_rows_fit(config)


def assert_trained_rows_fit(config: Config) -> None:
    """One row for each call that the ledger says was trained, with what the sampler had said of the
    same tokens."""
    assert check(config.directory) == []
    with open_trace(config.directory) as reader:
        rows = reader.query(
            """
            SELECT t.*, c.logprobs AS sampled, c.output_ids FROM trained t JOIN calls c USING (call_id, episode_id)
            JOIN episodes e USING (episode_id) WHERE t.run_id = e.run_id AND t.step = e.step"""
        ).to_pylist()
        booked = reader.query(
            "SELECT call_id, tokens FROM ledger WHERE outcome = 'trained'"
        ).to_pylist()
        total = reader.query("SELECT count(*) AS n FROM trained").to_pylist()
    assert {row["call_id"] for row in rows} == {row["call_id"] for row in booked}
    assert total == [{"n": len(rows)}] == [{"n": len(booked)}]
    for row in rows:
        assert (
            len(row["advantages"])
            == len(row["logprobs"])
            == len(row["entropy"])
            == len(row["output_ids"])
        )
        assert all(abs(a - b) < 1e-3 for a, b in zip(row["logprobs"], row["sampled"], strict=True))
        assert all(a != 0 for a in row["advantages"]) and all(0 <= e < 7 for e in row["entropy"])


@pytest.mark.slow
def test_a_resumed_run_goes_on_to_the_same_numbers(tmp_path: Path, tiny_model: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    straight = job(tmp_path / "one", tiny_model, total_steps=4, mini_batch_num=2)
    train(straight, workflow=talk, judge=length)
    begun = job(tmp_path / "two", tiny_model, total_steps=2, mini_batch_num=2)
    train(begun, workflow=talk, judge=length)
    longer = job(tmp_path / "two", tiny_model, total_steps=4, mini_batch_num=2)
    train(longer, workflow=talk, judge=length, resume=True)
    assert numbers(longer) == numbers(straight)
    with open_trace(longer.directory) as reader:
        assert reader.query("SELECT count(*) AS n FROM runs").to_pylist() == [{"n": 1}]


@pytest.mark.slow
def test_a_checkpoint_of_other_settings_is_not_resumed(tmp_path: Path, tiny_model: Path) -> None:
    train(job(tmp_path, tiny_model, total_steps=1), workflow=talk, judge=length)
    with pytest.raises(CheckpointError, match="other settings"):
        train(
            job(tmp_path, tiny_model, total_steps=2, seed=9),
            workflow=talk,
            judge=length,
            resume=True,
        )


@pytest.mark.slow
def test_lora_trains_an_adapter_against_itself(tmp_path: Path, tiny_model: Path) -> None:
    config = job(tmp_path, tiny_model, total_steps=1, use_kl_loss=True, kl_loss_coef=0.1)
    lora = config.model.lora.model_copy(update={"enabled": True, "r": 2})
    config = config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})})
    tuned = train(config, workflow=talk, judge=length)
    assert (
        tuned.path is not None and (tuned.path / "adapter" / "adapter_model.safetensors").is_file()
    )
    assert tuned.metrics["train/kl"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_the_divergence_from_the_first_model_lowers_the_reward(
    tmp_path: Path, tiny_model: Path, lora: bool
) -> None:
    config = job(
        tmp_path,
        tiny_model,
        total_steps=3,
        use_kl_loss=True,
        kl_loss_coef=5.0,
        val_before_train=False,
        algorithm={"use_kl_in_reward": True, "normalize_std": False},
        optim={"lr": 0.02, "warmup_steps": 1},
    )
    adapter = config.model.lora.model_copy(update={"enabled": lora, "r": 2})
    config = config.model_copy(update={"model": config.model.model_copy(update={"lora": adapter})})
    train(config, workflow=talk, judge=length)
    with open_trace(config.directory) as reader:
        metrics = {
            (r["step"], r["name"]): r["value"]
            for r in reader.query("SELECT * FROM metrics").to_pylist()
        }
        earned = (
            "SELECT step, avg(value) AS mean FROM rewards JOIN episodes USING (episode_id) WHERE"
            " split = 'train'"
        )
        means = {r["step"]: r["mean"] for r in reader.query(f"{earned} GROUP BY step").to_pylist()}
    assert metrics[1, "train/reward_kl"] == pytest.approx(0.0, abs=1e-5)
    assert metrics[3, "train/reward_kl"] > 1e-3
    assert not any(name == "train/kl" for _, name in metrics)  # it is not in the loss as well
    assert {step: metrics[step, "train/reward"] for step in means} == pytest.approx(
        means
    )  # what the judge gave
    assert [one.reason for one in audit(config.directory).unchecked] == [
        "rewards less a KL penalty that is not stored"
    ]


@pytest.mark.slow
def test_a_divergence_alone_is_no_signal(tmp_path: Path, tiny_model: Path) -> None:
    """Divided by a deviation, it would train a group whose attempts all failed at full strength."""

    @ajet.judge
    def nothing_for_even_tasks(output: str, task: Task) -> float:
        return (
            len(output) / 10 if task.main_query in ("Say yes.", "Say maybe.", "Say well.") else 0.0
        )

    config = job(
        tmp_path,
        tiny_model,
        total_steps=4,
        use_kl_loss=True,
        kl_loss_coef=5.0,
        val_before_train=False,
        algorithm={"use_kl_in_reward": True},
        optim={"lr": 0.02, "warmup_steps": 1},
    )
    train(config, workflow=talk, judge=nothing_for_even_tasks)
    earned = "SELECT episode_id, sum(value) AS total FROM rewards GROUP BY episode_id"
    groups = (
        f"SELECT step, group_id, max(total) AS most FROM episodes JOIN ({earned}) USING"
        " (episode_id) GROUP BY ALL"
    )
    ledger = (
        "SELECT outcome, most > 0 AS earns FROM ledger JOIN episodes USING (episode_id) JOIN"
        f" ({groups}) "
    )
    ledger += "USING (group_id)"
    with open_trace(config.directory) as reader:
        rows = reader.query(f"{ledger} WHERE split = 'train'").to_pylist()
        diverged = reader.query(
            "SELECT max(value) AS kl FROM metrics WHERE name = 'train/reward_kl'"
        ).to_pylist()
    assert diverged[0]["kl"] > 1e-3
    assert {(row["outcome"], row["earns"]) for row in rows} == {
        ("trained", True),
        ("zero_advantage", False),
    }


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "sft"])
def test_an_estimator_without_a_divergence_in_the_reward_is_refused(estimator: str) -> None:
    algorithm = {"adv_estimator": estimator, "use_kl_in_reward": True}
    with pytest.raises(
        ConfigError, match="use_kl_in_reward is for adv_estimator grpo, rloo and opo"
    ):
        TrainerSettings.of(Config(trainer_common={"algorithm": algorithm}), 1e-3, 1)


def test_an_agent_that_never_calls_the_model_stops_the_run(
    tmp_path: Path, tiny_model: Path
) -> None:
    @ajet.workflow
    async def silent(question: str) -> str:
        return question

    with pytest.raises(
        TrainingError, match="NoCalls: workflow silent returned without a call to a model"
    ):
        train(job(tmp_path, tiny_model, total_steps=1), workflow=silent, judge=length)


def test_a_broken_agent_stops_the_run_with_its_first_cause(
    tmp_path: Path, tiny_model: Path
) -> None:
    @ajet.workflow
    async def broken(question: str) -> str:
        raise KeyError("the agent's own mistake")

    with pytest.raises(TrainingError, match="the agent's own mistake"):
        train(job(tmp_path, tiny_model, val_before_train=False), workflow=broken, judge=length)


@pytest.mark.slow
def test_some_failures_are_left_out_and_said(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @ajet.workflow
    async def fragile(question: str, model: ajet.Model, episode: ajet.Episode) -> str:
        reply = await model.chat([{"role": "user", "content": question}])
        if episode.attempt == 0:
            raise ValueError("one in four")
        return reply["content"] or ""

    config = job(tmp_path, tiny_model, total_steps=1, val_before_train=False, test_freq=0)
    config = config.model_copy(
        update={"trainer_common": config.trainer_common.model_copy(update={"val_tasks": 0})}
    )
    train(config, workflow=fragile, judge=length)
    shown = capsys.readouterr().out
    assert "2 of 8 episodes failed" in shown and "1 step: " in shown
    assert outcomes(config)["failed"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_checkpoint_to_resume_from(
    tmp_path: Path, tiny_model: Path, number: signal.Signals
) -> None:
    config = job(tmp_path, tiny_model, total_steps=3, save_freq=100, val_before_train=False)
    stop_at = threading.Event()

    @ajet.workflow
    async def interrupted(question: str, model: ajet.Model, episode: ajet.Episode) -> str:
        reply = await model.chat([{"role": "user", "content": question}])
        if episode.step == 2 and not stop_at.is_set():
            stop_at.set()
            os.kill(os.getpid(), number)
            await asyncio.sleep(3600)
        return reply["content"] or ""

    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises((KeyboardInterrupt, SystemExit)) as ended:
        train(config, workflow=interrupted, judge=length)
    assert (
        isinstance(ended.value, KeyboardInterrupt)
        if number == signal.SIGINT
        else ended.value.code == 143
    )
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == before
    with open_trace(config.directory) as trace:
        [row] = trace.query("SELECT status, error FROM runs").to_pylist()
    by = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    assert row == {"status": "interrupted", "error": f"stopped by {by}"}
    tuned = train(config, workflow=interrupted, judge=length, resume=True)
    assert tuned.metrics["train/policy_version"] == 3
    assert "superseded" in outcomes(config)
    assert_trained_rows_fit(config)


def test_an_endpoint_cannot_be_trained(tmp_path: Path, tiny_model: Path) -> None:
    config = job(tmp_path, tiny_model)
    remote = config.model.model_copy(update={"base_url": "http://127.0.0.1:9/v1"})
    with pytest.raises(ConfigError, match=r"set model\.path"):
        train(config.model_copy(update={"model": remote}), workflow=talk, judge=length)


def test_an_epoch_sees_every_task_once_in_an_order_of_its_own() -> None:
    tasks = [Task(main_query=str(i)) for i in range(10)]
    stream = [t.main_query for step in range(1, 5) for t in tasks_of_step(tasks, step, 5, seed=1)]
    first, second = stream[:10], stream[10:]
    assert sorted(first) == sorted(second) == sorted(t.main_query for t in tasks)
    assert first != second
    assert [t.main_query for t in tasks_of_step(tasks, 3, 5, seed=1)] == second[:5]
    assert [t.main_query for t in tasks_of_step(tasks, 1, 5, seed=2)] != first[:5]


def test_epochs_or_steps_decide_the_length(tmp_path: Path, tiny_model: Path) -> None:
    config = job(tmp_path, tiny_model)
    assert total_steps(config, 100) == 2
    epochs = job(tmp_path, tiny_model, total_steps=None, total_epochs=3)
    assert total_steps(epochs, 5) == 7
    assert total_steps(epochs, 1) == 1


@pytest.mark.parametrize(
    ("done", "total", "before", "every", "expected"),
    [
        (0, 10, True, 5, 3),
        (0, 10, False, 5, 2),
        (0, 10, True, 0, 2),
        (0, 10, True, -1, 2),
        (0, 7, True, 5, 3),
        (5, 10, True, 5, 1),
        (6, 10, True, 2, 2),
        (10, 10, True, 5, 0),
    ],
)
def test_a_run_knows_how_often_it_will_still_validate(
    tmp_path: Path, tiny_model: Path, done: int, total: int, before: bool, every: int, expected: int
) -> None:
    config = job(tmp_path, tiny_model, val_before_train=before, test_freq=every)
    assert validations_left(config, done, total) == expected


def test_a_step_is_whole_when_it_is_stopped() -> None:
    """An update that Ctrl-C falls into is finished and booked; otherwise a resumed run would apply
    it twice."""
    events: list[str] = []
    asked = asyncio.Event()

    async def step() -> None:
        events.append("updated")
        await asked.wait()
        events.append("booked")

    async def stopped() -> None:
        task = asyncio.create_task(_complete(step()))
        await until_async(lambda: events)
        task.cancel()
        await asyncio.sleep(0)
        asked.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(stopped())
    assert events == ["updated", "booked"]


@pytest.mark.slow
def test_every_step_is_trained_in_one_thread(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """glibc keeps a heap for each thread: two that take turns hold a step's activations twice."""
    threads: list[int] = []
    step = Trainer.step

    def counted(*arguments: Any) -> dict[str, float]:
        threads.append(threading.get_ident())
        return step(*arguments)

    monkeypatch.setattr(Trainer, "step", counted)
    train(job(tmp_path, tiny_model, total_steps=4, test_freq=1), workflow=talk, judge=length)
    assert len(threads) > 1 and len(set(threads)) == 1
