"""verl's trainer asks our manager for a batch: real processes, a real model behind what verl calls its client.

The client stands for verl's `LLMServerClient`, which needs GPUs: the same `generate`, over our own sampler.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs verl: ajet install trinity")
ray = pytest.importorskip("ray", reason="needs Ray: ajet install trinity")

import numpy as np
from verl import DataProto
from verl.utils.dataset.rl_dataset import collate_fn

from ajet_sdk.backbones.post import open_post
from ajet_sdk.backbones.rollouts import attempts_at, tasks_of_step, training_sampling
from ajet_sdk.backbones.trinity.ledger import close_books
from ajet_sdk.backbones.verl.launch import composed
from ajet_sdk.backbones.verl.manager import AjetManager
from ajet_sdk.backbones.verl.mapping import NAME, Place, to_verl
from ajet_sdk.backbones.verl.progress import VerlProgress
from ajet_sdk.backbones.verl.runner import write_job
from ajet_sdk.backbones.verl.slots import Slots
from ajet_sdk.capture import installed
from ajet_sdk.config import load_config
from ajet_sdk.engines.chat import TokenEngine
from ajet_sdk.engines.local import local_engine
from ajet_sdk.episode import run_batch
from ajet_sdk.gateway import Gateway
from ajet_sdk.loggers import Loggers
from ajet_sdk.protocols import Job
from ajet_sdk.samples import build
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Run, Task, new_id

QUESTIONS = ["Say yes.", "Say no.", "Say maybe.", "Say yes, no."]


def agent() -> tuple[Any, Any]:
    """A workflow of two turns and a judge, made here so that they travel by value."""
    import ajet

    @ajet.workflow
    async def talk(question: str) -> str:
        from openai import AsyncOpenAI

        client = AsyncOpenAI()
        said = [{"role": "user", "content": question}]
        for _ in range(2):
            reply = await client.chat.completions.create(model="any", messages=said)
            said += [
                reply.choices[0].message.model_dump(include={"role", "content"}),
                {"role": "user", "content": "On."},
            ]
        return str(said[1]["content"])

    @ajet.judge
    def length(output: str) -> float:
        return float(len(output) % 5)

    return talk, length


def client_over(tiny: Path, broken: bool = False) -> Any:
    """What verl calls a client; each process that it reaches loads the model for itself."""

    class Client:
        def __init__(self) -> None:
            self.engine: Any = None

        async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
            from ajet_sdk.config import load_config
            from ajet_sdk.engines.local import local_engine
            from ajet_sdk.protocols import Sampling
            from verl.workers.rollout.replica import TokenOutput

            if broken:
                raise ValueError("the engine is out of order")
            if self.engine is None:
                values = {"model": {"path": str(tiny), "dtype": "float32"}, "rollout": {"max_model_len": 256}}
                self.engine = local_engine(load_config(values=values))
            asked = {key: value for key, value in sampling_params.items() if key != "logprobs"}
            (got,) = await self.engine.sampler.sample(prompt_ids, Sampling(**asked), request_id)
            return TokenOutput(token_ids=list(got.output_ids), log_probs=list(got.logprobs), stop_reason="completed",
                               extra_fields={"global_steps": 0})  # fmt: skip

    return Client()


class Setting:
    """A job on disk, its Post, and verl's config for it."""

    def __init__(self, folder: Path, tiny: Path, rows: int = 2) -> None:
        self.run_id = new_id()
        self.config = load_config(
            values={
                "backbone": "verl",
                "experiment_dir": str(folder),
                "model": {"path": str(tiny), "dtype": "float32"},
                "data": {"train_batch_size": 2},
                "rollout": {"num_repeat": 3, "temperature": 1.0, "max_model_len": 256, "max_env_worker": 4,
                            "max_response_length_in_one_turn": 6, "min_sound_share": 0.2, "max_retries": 0,
                            "multi_turn": {"expected_steps": rows}},
                "trainer_common": {"n_gpus_per_node": 1, "total_steps": 2, "val_pass_n": 2, "use_kl_loss": False,
                                   "optim": {"warmup_steps": 0}, "logger": ["console"]},
            }
        )  # fmt: skip
        self.tasks = [Task(main_query=q, metadata={"question": q}) for q in QUESTIONS]
        self.job = Job(config=self.config, workflow=agent()[0], judge=agent()[1], train=self.tasks,
                       val=self.tasks[:2], run_id=self.run_id, directory=folder)  # fmt: skip
        place = Place(run_id=self.run_id, model=str(tiny), steps=2, lr=0.01, checkpoints=folder / "store", val_tasks=2)
        write_job(place.job, self.job, self.job.val, str(tiny))
        assert place.job.stat().st_mode & 0o077 == 0, "it may hold keys"
        self.verl = composed(to_verl(self.config, place))
        self.post = open_post(self.run_id)
        self.directory, self.place = folder, place

    def manager(self, client: Any) -> AjetManager:
        return AjetManager.create(config=self.verl, llm_client=client, teacher_client=None,
                                  reward_loop_worker_handles=None)  # fmt: skip

    def asked(self, count: int, step: int, validate: bool = False) -> DataProto:
        slots = Slots(count)
        batch = DataProto.from_single_dict(collate_fn([slots[at] for at in range(count)]))
        batch.meta_info = {"global_steps": step, "validate": validate}
        return batch

    def news(self) -> list[tuple[str, dict[str, Any]]]:
        return list(ray.get(self.post.take.remote(1.0)))


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def setting(cluster: None, tiny: Path, tmp_path: Path) -> Callable[..., Setting]:
    return lambda **more: Setting(tmp_path / "experiment", tiny, **more)


def lines_of(rows: DataProto) -> list[tuple[Any, ...]]:
    """Ids, mask, log-probabilities and advantages of every row that trains something."""
    wide = rows.batch["prompts"].shape[1]
    found = []
    for at in range(len(rows)):
        one = {name: value[at].numpy() for name, value in rows.batch.items()}
        if one["response_mask"].any():
            seen, mask = one["attention_mask"].astype(bool), one["response_mask"].astype(bool)
            found.append((tuple(one["input_ids"][seen].tolist()), tuple(np.flatnonzero(mask) + seen[:wide].sum()),
                          tuple(one["rollout_log_probs"][mask]), tuple(one["rm_scores"][mask])))  # fmt: skip
    return sorted(found)


async def local_batch(setting: Setting, tmp_path: Path) -> Any:
    """The samples of the first step as `local` makes them, in this process."""
    config = setting.config
    tasks = tasks_of_step(setting.tasks, 1, 2, config.trainer_common.seed)
    attempts = attempts_at(tasks, 3, "local", 1, "train", config.trainer_common.seed, 1)
    engine = local_engine(config)
    assert isinstance(engine, TokenEngine)
    try:
        with TraceWriter(tmp_path / "local.duckdb") as writer, Gateway(writer) as gateway, installed():
            episodes = await run_batch(setting.job.workflow, setting.job.judge, attempts, engine=engine,
                                       gateway=gateway, config=config, writer=writer,
                                       sampling=training_sampling(config))  # fmt: skip
    finally:
        await engine.aclose()
    return build(episodes, max_tokens=256, decode=engine.tokenizer.decode)


async def test_a_step_of_verl_is_the_step_of_local(setting: Any, tiny: Path, tmp_path: Path) -> None:
    here = setting()
    rows = here.manager(client_over(tiny)).generate_sequences(here.asked(12, 1))
    assert len(rows) == 12 and rows.meta_info["timing"] == {}
    made = await local_batch(here, tmp_path)
    expected = sorted(
        (tuple(s.timeline.token_ids.tolist()), tuple(np.flatnonzero(s.timeline.loss_mask)),
         tuple(s.timeline.logprobs[s.timeline.loss_mask]), tuple(s.advantages[s.timeline.loss_mask]))
        for s in made.samples
    )  # fmt: skip
    got = lines_of(rows)
    assert len(got) == len(expected) > 2
    for one, other in zip(got, expected, strict=True):
        assert one[:2] == other[:2]
        np.testing.assert_allclose(one[2], other[2], atol=1e-4)
        np.testing.assert_allclose(one[3], other[3], atol=1e-6)

    news = here.news()
    assert Counter(kind for kind, _ in news) == {"group": 2, "batch": 1}
    told = dict(news)["batch"]
    assert told["metrics"]["train/rows_blank"] == 12 - len(got) and told["metrics"]["train/timelines"] == len(got)
    assert (
        sum(row["tokens"] for row in told["ledger"] if row["outcome"] == "trained") == rows.batch["response_mask"].sum()
    )


async def test_the_driver_books_what_verl_says_it_trained(setting: Any, tiny: Path) -> None:
    """Two steps are sampled; verl ends after one: its tokens are `trained`, those of the other `superseded`."""
    here = setting(rows=1)
    manager = here.manager(client_over(tiny))
    validation = manager.generate_sequences(here.asked(2, 0, validate=True))
    assert len(validation) == 2 and not validation.batch["response_mask"].any()
    trained = manager.generate_sequences(here.asked(6, 1)).batch["response_mask"].sum()
    manager.generate_sequences(here.asked(6, 2))
    path = here.directory / "metrics.jsonl"
    said = {"training/global_step": 1, "actor/pg_loss": 0.25, "critic/score/mean": 9.0, "actor/lr": None}
    path.write_text(json.dumps({"step": 0, "data": {"val-core/ajet/reward/mean@1": 1.0}}) + "\n"
                    + json.dumps({"step": 1, "data": said}) + "\n")  # fmt: skip

    with TraceWriter(here.directory / "trace.duckdb") as writer:
        writer.put(Run(run_id=here.run_id, backbone="verl"))
        with Loggers(
            ["console"], directory=here.directory, run_id=here.run_id, writer=writer, total_steps=2
        ) as loggers:
            progress = VerlProgress(loggers, writer, here.job, here.job.val, 2)
            progress._ended.set()
            await progress.listen(here.post)
            await progress.follow(path)
            assert progress.updates() == 1
            logged = {name: dict(values) for name, values in loggers.history.items()}
        for runner in manager._runners:
            ray.kill(runner)
        close_books(writer, here.directory, here.run_id)
    assert logged["train/loss"] == {1: 0.25} and "critic/score/mean" not in logged
    assert 0 in logged["val/reward"] and 0 in logged["val/greedy_reward"] and 0 in logged["val/pass@2"]
    trace = open_trace(here.directory)
    rows = trace.query("SELECT outcome, sum(tokens)::BIGINT AS tokens FROM ledger GROUP BY outcome").to_pylist()
    trace.close()
    tokens = {row["outcome"]: row["tokens"] for row in rows}
    assert tokens["trained"] == trained and tokens["superseded"] > 0 and tokens["evaluation"] > 0


def test_too_few_rows_are_told(setting: Any, tiny: Path) -> None:
    here = setting(rows=1)
    rows = here.manager(client_over(tiny)).generate_sequences(here.asked(2, 1))
    assert len(lines_of(rows)) == len(rows) == 2
    told = dict(here.news())["batch"]
    assert "raise rollout.multi_turn.expected_steps" in told["words"][0]
    assert any(row["outcome"] == "truncated" for row in told["ledger"])


def test_an_engine_that_fails_stops_the_run_with_the_cause(setting: Any, tiny: Path) -> None:
    from ajet_sdk.errors import TrainingError

    here = setting()
    with pytest.raises(TrainingError, match="out of order"):
        here.manager(client_over(tiny, broken=True)).generate_sequences(here.asked(12, 1))


def test_a_process_that_is_lost_costs_its_groups_and_nothing_else(setting: Any, tiny: Path) -> None:
    here = setting()
    manager = here.manager(client_over(tiny))
    manager.generate_sequences(here.asked(12, 1))
    here.news()
    ray.kill(manager._runners[0])
    rows = manager.generate_sequences(here.asked(12, 2))
    assert len(rows) == 12
    news = here.news()
    assert any("run again" in word for kind, told in news for word in told.get("words", ()) if kind == "words")
    assert Counter(kind for kind, _ in news)["group"] == 2
    assert here.place.directory.name == NAME
