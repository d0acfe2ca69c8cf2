"""Learning from what was said before: which conversations are taken, what of them is learnt, and a
run over them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.backbones.shared.steps import samples_of
from ajet_sdk.backbones.shared.stored import StoredSteps, open_stored
from ajet_sdk.config.config import Config, load_config
from ajet_sdk.errors import ConfigError, TaskError, TrainingError
from ajet_sdk.protocols import Job
from ajet_sdk.run import train
from ajet_sdk.samples.build import balance
from ajet_sdk.tokens.huggingface import HFTokenizer
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Reward, Task
from ajet_tools.trace.files.check import check
from tests.drawings import part, png
from tests.sdk.test_local_backbone import job as local_job
from tests.sdk.test_local_backbone import length, outcomes, talk


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> HFTokenizer:
    return HFTokenizer(tiny_model)


def job(
    algorithm: dict[str, Any], train: Sequence[Task] = (), val: Sequence[Task] = (), batch: int = 8
) -> Job:
    values = {"trainer_common": {"algorithm": algorithm}, "data": {"train_batch_size": batch}}
    return Job(load_config(values=values), None, None, train, val, "run", Path())


def rows(path: Path, *values: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return str(path)


def said(*words: str) -> list[dict[str, Any]]:
    """Words of a user and of the assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": word} for i, word in enumerate(words)]


def step(
    stored: StoredSteps | None, tokenizer: HFTokenizer, place: Path, number: int = 1
) -> list[Episode]:
    assert stored is not None
    with TraceWriter(place / "own.duckdb") as writer:
        return asyncio.run(stored.begin_step(number, tokenizer, writer).episodes(None, ""))


def learnt(
    job: Job, episodes: Sequence[Episode], tokenizer: HFTokenizer
) -> list[tuple[str, float]]:
    """The text of each run of learnt tokens and its advantage; the ledger balances."""
    batch = samples_of(job.config, episodes, tokenizer)
    assert balance(batch.ledger, [call for episode in episodes for call in episode.calls]) == []
    return [
        (
            tokenizer.decode(sample.timeline.token_ids[span.start : span.end].tolist()),
            float(sample.advantages[span.start]),
        )
        for sample in batch.samples
        for span in sample.timeline.spans
    ]


def trace(place: Path, *scored: tuple[str, str, float]) -> str:
    """A trace of one-word replies: task, reply, reward."""
    with TraceWriter(place / "earlier.duckdb") as writer:
        for number, (task, reply, value) in enumerate(scored):
            call = Call(call_id=f"c{number}", episode_id=f"e{number}", request={"messages": said(f"Say {task}.")},
                        response={"choices": [{"message": {"role": "assistant", "content": reply}}]})  # fmt: skip
            writer.put(call, Episode(episode_id=f"e{number}", task=Task(main_query=task, task_id=task),
                                     rewards=(Reward(value=value, call_id=call.call_id),)))  # fmt: skip
    return str(place / "earlier.duckdb")


def test_of_a_trace_neither_cut_replies_nor_those_that_earned_nothing_are_learnt(
    tmp_path: Path,
) -> None:
    path = trace(tmp_path, ("a", "cut", 1.0), ("b", "good", 1.0), ("c", "bad", 0.0))
    with TraceWriter(Path(path)) as writer:
        reply = {"choices": [{"message": {"role": "assistant", "content": "long"}}]}
        call = Call(call_id="long", episode_id="long", request={"messages": said("Say d.")}, response=reply,
                    finish_reason="length")  # fmt: skip
        writer.put(
            call,
            Episode(episode_id="long", task=Task(main_query="d"), rewards=(Reward(value=1.0),)),
        )
    stored = open_stored(job({"adv_estimator": "sft", "data": path}))
    assert stored is not None and len(stored) == 2
    assert "1 with a reply cut" in stored.origin and "1 that earned nothing" in stored.origin
    place = tmp_path / "worthless"
    place.mkdir()
    with pytest.raises(ConfigError):
        open_stored(
            job(
                {"adv_estimator": "sft", "data": trace(place, ("a", "one", 0.0), ("b", "two", 0.0))}
            )
        )


def test_of_a_file_it_is_said_what_is_cut_or_earned_nothing(tmp_path: Path) -> None:
    good = {"messages": said("Say yes.", "yes"), "reward": 1.0}
    cut = {"messages": said("Say no.", "n"), "reward": 1.0, "calls": [{"message": 1, "cut": True}]}
    bad = {"messages": said("Say so.", "x"), "reward": 0.0}
    stored = open_stored(
        job(
            {"adv_estimator": "sft", "data": rows(tmp_path / "said.jsonl", good, cut, bad)}, batch=1
        )
    )
    assert (
        stored is not None
        and "1 with a reply cut" in stored.origin
        and "1 with a reward of 0" in stored.origin
    )


def test_every_reply_of_a_conversation_is_learnt_with_its_end(
    tokenizer: HFTokenizer, tmp_path: Path
) -> None:
    talk = {"messages": said("Say yes.", "yes", "Say no.", "no"), "reward": 0.5}
    of = job({"adv_estimator": "sft", "data": rows(tmp_path / "said.jsonl", talk)}, batch=1)
    (episode,) = step(open_stored(of), tokenizer, tmp_path)
    assert learnt(of, [episode], tokenizer) == [("yes<|im_end|>", 1.0), ("no<|im_end|>", 1.0)]
    assert (episode.run_id, episode.step, episode.split, episode.reward) == ("run", 1, "train", 0.5)
    assert all(call.logprobs is None and call.policy_version is None for call in episode.calls)


def test_of_a_prompt_and_its_completion_only_the_completion_is_learnt(
    tokenizer: HFTokenizer, tmp_path: Path
) -> None:
    row = {
        "prompt": said("Say yes.", "yes", "Say no."),
        "completion": [{"role": "assistant", "content": "no"}],
    }
    of = job({"adv_estimator": "sft", "data": rows(tmp_path / "said.jsonl", row)}, batch=1)
    assert learnt(of, step(open_stored(of), tokenizer, tmp_path), tokenizer) == [
        ("no<|im_end|>", 1.0)
    ]


def test_the_tasks_own_messages_are_learnt_where_no_data_is_named(
    tokenizer: HFTokenizer, tmp_path: Path
) -> None:
    tasks = [
        Task(main_query=word, metadata={"messages": said(f"Say {word}.", word)})
        for word in ("yes", "no")
    ]
    of = job({"adv_estimator": "sft"}, tasks, batch=2)
    episodes = step(open_stored(of), tokenizer, tmp_path)
    assert sorted(learnt(of, episodes, tokenizer)) == [
        ("no<|im_end|>", 1.0),
        ("yes<|im_end|>", 1.0),
    ]
    assert {episode.task.task_id for episode in episodes} == {task.task_id for task in tasks}


def test_the_best_episodes_of_each_task_of_a_trace_are_learnt(
    tokenizer: HFTokenizer, tmp_path: Path
) -> None:
    place = trace(
        tmp_path,
        ("yes", "no", 0.0),
        ("yes", "yes", 1.0),
        ("no", "yes", 0.0),
        ("maybe", "maybe", 1.0),
    )
    of = job({"adv_estimator": "sft", "data": place}, val=[Task(task_id="maybe")])
    stored = open_stored(of)
    assert stored is not None and len(stored) == 1  # `no` was never right, and `maybe` is held out
    assert stored.origin.endswith("the best of 1 of 2 tasks, rewards 1 to 1")
    episodes = step(stored, tokenizer, tmp_path)
    assert set(learnt(of, episodes, tokenizer)) == {("yes<|im_end|>", 1.0)}
    own = {call.call_id for episode in episodes for call in episode.calls}
    assert {
        reward.call_id for episode in episodes for reward in episode.rewards
    } == own  # under its new name


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": said("Say  YES.", "yes")}, "has the same question as validation task held"),
        (
            {"prompt": said("Say yes."), "completion": said("", "yes")[1:]},
            "has the same question as validation task held",
        ),
        (
            {"messages": said("Say it.", "yes"), "provenance": {"seeds": ["held"]}},
            "was made from validation task held",
        ),
    ],
)
def test_a_file_that_a_validation_task_is_in_is_refused_by_its_line(
    row: dict[str, Any], says: str, tmp_path: Path
) -> None:
    place = rows(tmp_path / "said.jsonl", {"messages": said("Say no.", "no")}, row)
    val = [Task(main_query="Say yes.", task_id="held")]
    with pytest.raises(TaskError, match=rf"said.jsonl line 2 {says}.*ajet dataset dedup --against"):
        open_stored(job({"adv_estimator": "sft", "data": place}, val=val))
    stored = open_stored(
        job({"adv_estimator": "sft", "data": place}, val=[Task(main_query="Say so.")])
    )
    assert stored is not None and len(stored) == 2


def test_a_pair_that_asks_a_validation_task_is_refused_and_rows_of_its_id_are_left_out(
    tmp_path: Path,
) -> None:
    pair = {
        "prompt": said("Say yes."),
        "chosen": said("", "yes")[1:],
        "rejected": said("", "no")[1:],
    }
    held = rows(tmp_path / "pairs.jsonl", pair)
    with pytest.raises(
        TaskError, match=r"pairs.jsonl line 1 has the same question as validation task held"
    ):
        open_stored(
            job(
                {"adv_estimator": "dpo", "data": held},
                val=[Task(main_query="Say yes.", task_id="held")],
            )
        )
    both = rows(
        tmp_path / "both.jsonl", {**pair, "prompt": said("Say no.")}, {**pair, "task_id": "held"}
    )
    stored = open_stored(
        job({"adv_estimator": "dpo", "data": both}, val=[Task(main_query="Yes?", task_id="held")])
    )
    assert stored is not None and len(stored) == 1


def test_episodes_of_a_trace_that_validated_or_ask_a_validation_task_are_left_out(
    tmp_path: Path,
) -> None:
    place = trace(tmp_path, ("yes", "yes", 1.0), ("no", "no", 1.0), ("maybe", "maybe", 1.0))
    with TraceWriter(Path(place)) as writer:
        call = Call(call_id="v", episode_id="v", request={"messages": said("Say so.")}, response={})
        writer.put(
            call,
            Episode(
                episode_id="v",
                split="val",
                task=Task(main_query="so"),
                rewards=(Reward(value=1.0),),
            ),
        )
    stored = open_stored(
        job({"adv_estimator": "sft", "data": place}, val=[Task(main_query="NO", task_id="other")])
    )
    assert stored is not None and stored.origin.startswith("2 of 2 scored episodes")


def test_the_least_reward_can_be_said(tmp_path: Path) -> None:
    place = trace(
        tmp_path, ("yes", "yes", 0.4), ("yes", "no", 0.6), ("no", "no", 0.8), ("no", "yes", 0.7)
    )
    for given, count in (
        ({}, 2),
        ({"min_reward": 0.7}, 1),
        ({"per_task": 2}, 3),
        ({"min_reward": 0, "per_task": 9}, 4),
    ):
        stored = open_stored(job({"adv_estimator": "sft", "data": place, **given}))
        assert stored is not None and len(stored) == count, given


def test_the_best_is_paired_with_the_worst(tokenizer: HFTokenizer, tmp_path: Path) -> None:
    place = trace(
        tmp_path,
        ("yes", "no", 0.1),
        ("yes", "maybe", 0.5),
        ("yes", "yes", 1.0),
        ("no", "no", 1.0),
        ("no", "yes", 1.0),
    )
    of = job({"adv_estimator": "dpo", "data": place, "per_task": 5}, batch=1)
    stored = open_stored(of)
    assert stored is not None and len(stored) == 1  # the replies to `no` are worth the same
    found = learnt(of, step(stored, tokenizer, tmp_path), tokenizer)
    assert found == [("yes<|im_end|>", 1.0), ("no<|im_end|>", -1.0)]


def test_rows_of_preferences_are_pairs(tokenizer: HFTokenizer, tmp_path: Path) -> None:
    """As `ajet trace export --format preferences` writes them, and TRL reads them."""
    row = {"prompt": said("Say yes."), "chosen": [{"role": "assistant", "content": "yes"}],
           "rejected": [{"role": "assistant", "content": "no"}], "tools": None}  # fmt: skip
    of = job({"adv_estimator": "dpo", "data": rows(tmp_path / "pairs.jsonl", row)}, batch=1)
    episodes = step(open_stored(of), tokenizer, tmp_path)
    assert learnt(of, episodes, tokenizer) == [("yes<|im_end|>", 1.0), ("no<|im_end|>", -1.0)]
    assert [reward.reason for episode in episodes for reward in episode.rewards] == [
        "chosen",
        "rejected",
    ]


def test_a_side_that_does_not_fit_takes_the_other_with_it(
    tokenizer: HFTokenizer, tmp_path: Path
) -> None:
    row = {"prompt": said("Say yes."), "chosen": [{"role": "assistant", "content": "yes"}],
           "rejected": [{"role": "user", "content": "no " * 60},
                        {"role": "assistant", "content": "no"}]}  # fmt: skip
    of = job({"adv_estimator": "dpo", "data": rows(tmp_path / "pairs.jsonl", row)}, batch=1)
    episodes = step(open_stored(of), tokenizer, tmp_path)
    batch = samples_of(of.config, episodes, tokenizer, max_tokens=40)
    assert batch.samples == ()
    assert {entry.outcome for entry in batch.ledger} == {"zero_advantage", "truncated"}
    assert balance(batch.ledger, [call for episode in episodes for call in episode.calls]) == []


def test_an_epoch_has_each_conversation_once_and_its_order_is_the_seeds(
    tokenizer: HFTokenizer, tmp_path: Path
) -> None:
    words = [f"word{i}" for i in range(6)]
    place = rows(tmp_path / "said.jsonl", *({"messages": said("Say it.", word)} for word in words))
    of = job({"adv_estimator": "sft", "data": place}, batch=3)
    orders = []
    for _ in range(2):
        episodes = [
            e for number in (1, 2) for e in step(open_stored(of), tokenizer, tmp_path, number)
        ]
        orders.append([e.calls[0].response["choices"][0]["message"]["content"] for e in episodes])
    assert orders[0] == orders[1] != words and sorted(orders[0]) == words


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": "yes"}, "said.jsonl line 1: messages must be a list of messages"),
        (
            {"messages": said("Say yes.")},
            "said.jsonl line 1: messages contains no assistant message",
        ),
        ({"text": "yes"}, "said.jsonl line 1: completion must be a list of messages"),
    ],
)
def test_a_row_that_is_no_conversation_is_told_by_its_line(
    row: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match=says):
        open_stored(job({"adv_estimator": "sft", "data": rows(tmp_path / "said.jsonl", row)}))


def test_what_the_template_refuses_is_an_error(tokenizer: HFTokenizer, tmp_path: Path) -> None:
    talk = {
        "messages": [
            {"role": "user", "content": [part(png())]},
            {"role": "assistant", "content": "a"},
        ]
    }
    of = job({"adv_estimator": "sft", "data": rows(tmp_path / "said.jsonl", talk)}, batch=1)
    with pytest.raises(TrainingError, match="a part of type 'image_url'"):
        step(open_stored(of), tokenizer, tmp_path)


def test_nothing_to_learn_from_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task .* has none; set trainer_common.algorithm.data"):
        open_stored(job({"adv_estimator": "sft"}, [Task(main_query="Say yes.")]))
    with pytest.raises(ConfigError, match=r"there is no file nowhere.jsonl"):
        open_stored(job({"adv_estimator": "sft", "data": "nowhere.jsonl"}))
    with pytest.raises(ConfigError, match=r"0 pairs of 1 scored episodes .* nothing to learn from"):
        open_stored(job({"adv_estimator": "dpo", "data": trace(tmp_path, ("yes", "yes", 1.0))}))


def test_what_is_replayed_is_imitated_and_no_episode_of_the_run(
    tokenizer: HFTokenizer, tmp_path: Path
) -> None:
    place = rows(
        tmp_path / "said.jsonl",
        *({"messages": said("Say it.", word)} for word in ("yes", "no", "so")),
    )
    of = job({"adv_estimator": "grpo", "data": place, "replay": 2, "replay_coef": 0.5})
    stored = open_stored(of)
    assert stored is not None and not any("without effect" in line for line in of.config.notices())
    samples = [sample for number in (1, 2, 3) for sample in stored.replayed(number, tokenizer)]
    texts = [
        tokenizer.decode(sample.timeline.token_ids[sample.timeline.loss_mask].tolist())
        for sample in samples
    ]
    assert sorted(texts) == sorted(2 * [f"{word}<|im_end|>" for word in ("yes", "no", "so")])
    with pytest.raises(ConfigError, match=r"algorithm.replay needs algorithm.data"):
        job({"adv_estimator": "grpo", "replay": 2})
    assert any("algorithm.data" in line for line in job({"data": place}).config.notices())


def test_conversations_of_validation_tasks_are_held_out(
    tokenizer: HFTokenizer, tmp_path: Path
) -> None:
    held = {"messages": said("Say no.", "no"), "task_id": "held"}
    place = rows(tmp_path / "said.jsonl", {"messages": said("Say yes.", "yes")}, held)
    of = job(
        {"adv_estimator": "sft", "data": place}, val=[Task(main_query="Say no.", task_id="held")]
    )
    stored = open_stored(of)
    assert stored is not None and len(stored) == 1
    (sample,) = stored.held_out_samples(tokenizer)
    assert (
        tokenizer.decode(sample.timeline.token_ids[sample.timeline.loss_mask].tolist())
        == "no<|im_end|>"
    )
    tasks = [
        Task(main_query=word, metadata={"messages": said(f"Say {word}.", word)})
        for word in ("yes", "no")
    ]
    stored = open_stored(job({"adv_estimator": "sft"}, tasks[:1], tasks[1:]))
    assert stored is not None and len(stored.held_out_samples(tokenizer)) == 1


def test_rewards_learn_from_attempts() -> None:
    assert open_stored(job({"adv_estimator": "grpo"})) is None
    assert open_stored(job({"adv_estimator": "dpo"})) is None


def test_the_algorithm_can_be_one_word() -> None:
    config = load_config(
        overrides=[
            "ajet.trainer_common.algorithm=sft",
            "ajet.trainer_common.algorithm.data=x.jsonl",
        ]
    )
    assert (
        config.trainer_common.algorithm.adv_estimator,
        config.trainer_common.algorithm.data,
    ) == ("sft", "x.jsonl")
    with pytest.raises(ConfigError, match=r"adv_estimator must be one of .*; did you mean sft"):
        load_config(overrides=["ajet.trainer_common.algorithm=sfft"])


@pytest.mark.parametrize("backbone", ["trinity", "verl"])
def test_clusters_refuse_by_name(backbone: str) -> None:
    from ajet_sdk.backbones.shared.mapping import unsupported_keys

    config = load_config(
        overrides=[f"ajet.backbone={backbone}", "ajet.trainer_common.algorithm=sft"]
    )
    assert any(
        "trainer_common.algorithm: sft" in line for line in unsupported_keys(config, backbone)
    )


def without_agent(tmp_path: Path, tiny_model: Path) -> Config:
    """A job of conversations alone: no agent, no judge, nothing to validate on."""
    place = rows(
        tmp_path / "said.jsonl",
        *({"messages": said(f"Say {w}.", w)} for w in ("yes", "no", "maybe")),
    )
    trainer = {
        "algorithm": "sft",
        "total_steps": 6,
        "optim": {"lr": 1e-2, "warmup_steps": 0},
        "logger": ["console"],
    }
    files = {"training": {"file_path": place}}
    return load_config(
        values={
            "experiment_dir": str(tmp_path / "experiment"),
            "model": {"path": str(tiny_model)},
            "task_reader": {"type": "jsonl_dataset_file", "jsonl_dataset_file": files},
            "data": {"train_batch_size": 3},
            "trainer_common": trainer,
        }
    )


@pytest.mark.slow
def test_a_run_over_conversations_needs_no_agent_and_books_every_token(
    tmp_path: Path, tiny_model: Path
) -> None:
    config = without_agent(tmp_path, tiny_model)
    tuned = train(config)
    assert (
        tuned.path is not None and tuned.metrics["train/loss"] < 5
    )  # a model of random weights begins at 5.6
    assert set(outcomes(config)) == {"trained"}
    assert check(config.directory) == []
    with open_trace(config.directory) as reader:
        rows = reader.query("SELECT advantages, logprobs FROM trained").to_pylist()
    assert rows and all(
        set(row["advantages"]) == {1.0} and max(row["logprobs"]) < 0 for row in rows
    )


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_by_rewards_replays_conversations_in_each_step(
    tmp_path: Path, tiny_model: Path, staleness: int, capsys: pytest.CaptureFixture[str]
) -> None:
    place = rows(
        tmp_path / "said.jsonl",
        *({"messages": said(f"Say {w}.", w)} for w in ("yes", "no", "maybe")),
    )
    algorithm = {"data": place, "replay": 2, "replay_coef": 1.0}
    config = local_job(
        tmp_path, tiny_model, algorithm=algorithm, val_before_train=False, mini_batch_num=3
    )
    rollout = config.rollout.model_copy(
        update={"max_staleness": staleness, "deterministic": not staleness}
    )
    tuned = train(config.model_copy(update={"rollout": rollout}), workflow=talk, judge=length)
    assert (
        tuned.history["train/replay_loss"].keys() == {1, 2}
        and tuned.metrics["train/replay_loss"] > 1
    )
    assert "each step imitates 2 of 3 conversations of " in capsys.readouterr().out
    assert check(config.directory) == []


def with_held_out(tmp_path: Path, tiny_model: Path, told: str, **trainer: Any) -> Config:
    """A job of conversations, of which the held-out one contradicts the others if `told` does."""
    config = local_job(
        tmp_path, tiny_model, val_before_train=False, val_pass_n=0, save_freq=0, **trainer
    )
    held = json.loads((tmp_path / "val.jsonl").read_text()) | {"task_id": "held"}
    (tmp_path / "val.jsonl").write_text(json.dumps(held) + "\n")
    asked = ({"messages": said(f"Say {w}.", "yes")} for w in ("yes", "no", "maybe"))
    rows(tmp_path / "said.jsonl", *asked, {"messages": said("Say never.", told), "task_id": "held"})
    return config


@pytest.mark.slow
def test_the_loss_on_held_out_conversations_is_logged(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    algorithm = {"adv_estimator": "sft", "data": str(tmp_path / "said.jsonl"), "val_loss_freq": 1}
    config = with_held_out(
        tmp_path, tiny_model, "yes", algorithm=algorithm, test_freq=0, optim={"lr": 1e-2}
    )
    tuned = train(config, workflow=talk, judge=length)
    assert tuned.history["val/loss"][2] < tuned.history["val/loss"][1] and set(
        tuned.history["val/reward"]
    ) == {2}
    assert f"validation: loss {tuned.history['val/loss'][1]:.3f}" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_ends_where_the_held_out_loss_rises_with_the_checkpoint_before(
    tmp_path: Path, tiny_model: Path
) -> None:
    """What is learnt is to answer yes; held out is another answer, so its loss rises from the first
    step on."""
    algorithm = {"adv_estimator": "sft", "data": str(tmp_path / "said.jsonl"), "val_loss_freq": 1}
    more = {
        "optim": {"lr": 3e-2, "warmup_steps": 0},
        "total_steps": 9,
        "test_freq": 0,
        "stop_when": ["rise"],
    }
    config = with_held_out(tmp_path, tiny_model, "qqqqqqqq", algorithm=algorithm, **more)
    tuned = train(config, workflow=talk, judge=length)
    losses = tuned.history["val/loss"]
    assert len(losses) < 9 and min(list(losses.values())[-2:]) > min(losses.values())
    best = min(losses, key=lambda step: losses[step])
    assert tuned.best is not None and tuned.best.name == f"step_{best:06}"
    (tmp_path / "said.jsonl").write_text(
        (tmp_path / "said.jsonl")
        .read_text()
        .partition('{"messages": [{"role": "user", "content": "Say never')[0]
    )
    with pytest.raises(ConfigError, match=r"rise needs sft, and conversations of validation tasks"):
        train(config, workflow=talk, judge=length)


@pytest.mark.slow
def test_pairs_of_the_runs_own_attempts(tmp_path: Path, tiny_model: Path) -> None:
    """Without data the attempts of each step are compared: the best of a group with its worst."""
    config = local_job(
        tmp_path, tiny_model, algorithm="dpo", val_before_train=False, test_freq=0, save_freq=0
    )
    tuned = train(config, workflow=talk, judge=length)
    assert set(outcomes(config)) == {"trained", "zero_advantage", "evaluation"}
    assert tuned.metrics["train/loss"] == pytest.approx(0.69, abs=0.02)
    assert check(config.directory) == []
