"""verl's trainer asks our manager for a batch: real processes, a real model behind what verl calls
its client."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs verl, see CONTRIBUTING.md")
pytest.importorskip("ray", reason="needs Ray, see CONTRIBUTING.md")

import numpy as np
import ray
from verl import DataProto

from ajet_sdk.backbones.shared.driver import close_books
from ajet_sdk.backbones.shared.steps import attempts_of, tasks_of_step, training_sampling
from ajet_sdk.backbones.verl.backbone import VerlProgress
from ajet_sdk.capture.hooks import installed
from ajet_sdk.engines.chat import TokenEngine
from ajet_sdk.engines.local.loading import local_engine
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.reporting.loggers import Loggers
from ajet_sdk.rollout.episode import run_batch
from ajet_sdk.samples.build import build
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Run

from .setting import Setting, client_over


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
    attempts = attempts_of(
        tasks, 3, run_id="local", step=1, purpose="train", seed=config.trainer_common.seed
    )
    engine = local_engine(config)
    assert isinstance(engine, TokenEngine)
    try:
        with (
            TraceWriter(tmp_path / "local.duckdb") as writer,
            Gateway(writer) as gateway,
            installed(),
        ):
            episodes = await run_batch(setting.job.workflow, setting.job.judge, attempts, engine=engine,
                                       gateway=gateway, config=config, writer=writer,
                                       sampling=training_sampling(config))  # fmt: skip
    finally:
        await engine.aclose()
    return build(episodes, max_tokens=256, decode=engine.tokenizer.decode)


def test_a_step_of_verl_is_the_step_of_local(setting: Any, tiny: Path, tmp_path: Path) -> None:
    here = setting()
    rows = here.manager(client_over(tiny)).generate_sequences(here.asked(12, 1))
    assert len(rows) == 12 and rows.meta_info["timing"] == {}
    made = asyncio.run(local_batch(here, tmp_path))
    expected = sorted(
        (
            tuple(s.timeline.token_ids.tolist()),
            tuple(np.flatnonzero(s.timeline.loss_mask)),
            tuple(s.timeline.logprobs[s.timeline.loss_mask]),
            tuple(s.advantages[s.timeline.loss_mask]),
        )
        for s in made.samples
    )
    got = lines_of(rows)
    assert len(got) == len(expected) > 2
    for one, other in zip(got, expected, strict=True):
        assert one[:2] == other[:2]
        np.testing.assert_allclose(one[2], other[2], atol=1e-4)
        np.testing.assert_allclose(one[3], other[3], atol=1e-6)

    news = here.news()
    assert Counter(kind for kind, _ in news) == {"group": 2, "batch": 1}
    told = dict(news)["batch"]
    assert told["metrics"]["train/rows_blank"] == 12 - len(got) and told["metrics"][
        "train/timelines"
    ] == len(got)
    assert (
        sum(row["tokens"] for row in told["ledger"] if row["outcome"] == "trained")
        == rows.batch["response_mask"].sum()
    )


def test_the_driver_books_what_verl_says_it_trained(setting: Any, tiny: Path) -> None:
    """Two steps are sampled; verl ends after one: its tokens are `trained`, those of the other
    `superseded`."""
    here = setting(rows=1)
    manager = here.manager(client_over(tiny))
    validation = manager.generate_sequences(here.asked(2, 0, validate=True))
    assert len(validation) == 2 and not validation.batch["response_mask"].any()
    trained = manager.generate_sequences(here.asked(6, 1)).batch["response_mask"].sum()
    manager.generate_sequences(here.asked(6, 2))
    path = here.directory / "metrics.jsonl"
    said = {
        "training/global_step": 1,
        "actor/pg_loss": 0.25,
        "critic/score/mean": 9.0,
        "actor/lr": None,
    }
    path.write_text(json.dumps({"step": 0, "data": {"val-core/ajet/reward/mean@1": 1.0}}) + "\n"
                    + json.dumps({"step": 1, "data": said}) + "\n")  # fmt: skip

    with TraceWriter(here.directory / "trace.duckdb") as writer, Gateway(writer):
        writer.put(Run(run_id=here.run_id, backbone="verl"))
        with Loggers(
            ["console"], directory=here.directory, run_id=here.run_id, writer=writer, total_steps=2
        ) as loggers:
            progress = VerlProgress(loggers, writer, here.job, here.job.val, 2)
            progress._ended.set()
            asyncio.run(progress.listen(here.post))
            asyncio.run(progress.follow(path))
            assert progress.updates() == 1
            logged = {name: dict(values) for name, values in loggers.history.items()}
        for runner in manager._runners:
            ray.kill(runner)
        close_books(writer, here.directory, here.run_id)
    assert logged["train/loss"] == {1: 0.25} and "critic/score/mean" not in logged
    assert (
        0 in logged["val/reward"] and 0 in logged["val/greedy_reward"] and 0 in logged["val/pass@2"]
    )
    with open_trace(here.directory) as trace:
        rows = trace.query(
            "SELECT outcome, sum(tokens)::BIGINT AS tokens FROM ledger GROUP BY outcome"
        ).to_pylist()
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
    assert any("repeating" in told["text"] for kind, told in news if kind == "notice")
    assert Counter(kind for kind, _ in news)["group"] == 2
    assert here.place.directory.name == "verl"
