"""`--backbone tinker` against `ajet trainer serve`: runs as those of `local`, by the official SDK
and a real socket."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import ajet
from ajet_sdk.config.config import Config, load_config
from ajet_sdk.engines.local.loading import load_model
from ajet_sdk.engines.tinker.sdk import SdkService, Session
from ajet_sdk.errors import ConfigError, TrainingError
from ajet_sdk.learn.tinker.scaling import Scaling, measure_scaling
from ajet_sdk.run import run, train
from ajet_sdk.trace.reader import ledger_balance, open_trace
from tests.tinker.servers import IDS, Server
from tests.tinker.servers import train as train_client
from tests.waiting import until, until_async

pytestmark = pytest.mark.slow
GUIDE = Path(__file__).parents[2] / "docs" / "guide"


def job(
    tmp_path: Path, server: Server | Served, model: Path, tinker: Mapping[str, Any] = {},
    rollout: Mapping[str, Any] = {}, **trainer: Any,
) -> Config:  # fmt: skip
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(
        "".join(f'{{"question": "Say {w}."}}\n' for w in ("yes", "no", "maybe", "so", "well"))
    )
    return load_config(
        values={
            "experiment_name": "tiny",
            "experiment_dir": str(tmp_path / "experiment"),
            "backbone": "tinker",
            "model": {"path": str(model), "lora": {"r": 4}},
            "tinker": {"base_url": server.url, "stall_timeout": 60, **tinker},
            "task_reader": {
                "type": "jsonl_dataset_file",
                "jsonl_dataset_file": {"training": {"file_path": str(tasks)}},
            },
            "data": {"train_batch_size": 2},
            "rollout": {
                "num_repeat": 4,
                "max_model_len": 200,
                "max_response_length_in_one_turn": 6,
                **rollout,
            },
            "trainer_common": {
                "total_steps": 2,
                "test_freq": 0,
                "save_freq": 1,
                "use_kl_loss": False,
                "logger": [],
                "optim": {"lr": 0.01, "warmup_steps": 1},
                **trainer,
            },
        }
    )


@ajet.workflow
async def talk(question: str, model: ajet.Model) -> str:
    first = {"role": "user", "content": question}
    reply = await model.chat([first])
    last = await model.chat([first, reply, {"role": "user", "content": "Again."}])
    return last["content"] or ""


@ajet.judge
def length(output: str) -> float:
    return len(output) / 10


def values(config: Config, name: str) -> dict[int, float]:
    with open_trace(config.directory) as reader:
        found = reader.query(
            "SELECT step, value FROM metrics WHERE name = ? ORDER BY step", [name]
        ).to_pylist()
    return {row["step"]: row["value"] for row in found}


def test_a_run_trains_through_the_api_and_ends_with_an_adapter(
    tmp_path: Path, server: Server, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prices = {"prices": {"prefill": 1.0, "sample": 3.0, "train": 2.0}}
    config = job(tmp_path, server, tiny, prices, {"max_staleness": 0})
    tuned = train(config, workflow=talk, judge=length)
    assert tuned.path is not None and (tuned.path / "adapter_model.safetensors").is_file()
    assert tuned.trained_tokens > 0
    with open_trace(config.directory) as reader:
        calls = reader.query(
            "SELECT policy_version, step, logprobs FROM calls JOIN episodes USING (episode_id)"
        )
        assert ledger_balance(reader, tuned.run_id) == []
    versions = {(row["step"], row["policy_version"]) for row in calls.to_pylist()}
    assert versions == {(1, 0), (2, 1)}, "each step is sampled from the weights of the one before"
    assert max(values(config, "train/logprob_gap_max").values()) < 1e-4
    counted = {
        name: values(config, f"cost/{name}_tokens")[2]
        for name in ("prefilled", "sampled", "trained")
    }
    dollars = (counted["prefilled"] + 3 * counted["sampled"] + 2 * counted["trained"]) / 1e6
    assert values(config, "cost/dollars")[2] == pytest.approx(dollars) and all(counted.values())
    # The adapter is a checkpoint like any other.
    scored = load_config(values={"experiment_dir": str(tmp_path / "after"), "model": {"path": str(tuned.path)},
                                 "rollout": {"max_model_len": 200, "max_response_length_in_one_turn": 6}})  # fmt: skip
    assert (
        run(scored, workflow=talk, judge=length, tasks=[{"question": "Say yes."}]).reward
        is not None
    )
    # It becomes a plain model by what the guide has, of the same log-probabilities.
    monkeypatch.chdir(tmp_path)
    [merging] = re.findall(r"```python\n(.*?)```", (GUIDE / "tinker.md").read_text(), re.DOTALL)
    exec(merging.replace("launcher_record/tiny/checkpoint/RUN/adapter", str(tuned.path)), {})
    merged, adapted = (
        load_model(path, device="cpu", dtype="float32")
        for path in (tmp_path / "merged", tuned.path)
    )
    with torch.no_grad():
        torch.testing.assert_close(
            merged(torch.tensor([IDS])).logits, adapted(torch.tensor([IDS])).logits
        )
    # So it is where the service keeps it.
    kept = json.loads((tuned.path / "tinker.json").read_text())["sampler"]
    there = load_config(values={"experiment_dir": str(tmp_path / "there"), "tinker": {"base_url": server.url},
                                "model": {"path": kept, "name": "a-name"},
                                "rollout": {"max_model_len": 200, "max_response_length_in_one_turn": 6}})  # fmt: skip
    assert (
        run(there, workflow=talk, judge=length, tasks=[{"question": "Say yes."}]).reward is not None
    )


def test_a_resumed_run_goes_on_to_the_same_numbers(
    tmp_path: Path, server: Server, tiny: Path
) -> None:
    for name in ("straight", "halves"):
        (tmp_path / name).mkdir()
    straight = job(tmp_path / "straight", server, tiny)
    train(straight, workflow=talk, judge=length)
    train(
        job(tmp_path / "halves", server, tiny, total_training_steps=1), workflow=talk, judge=length
    )
    whole = job(tmp_path / "halves", server, tiny)
    train(whole, workflow=talk, judge=length, resume=True)
    for name in (
        "train/reward",
        "train/loss",
        "train/grad_norm",
        "train/policy_version",
        "cost/sampled_tokens",
    ):
        assert values(whole, name) == pytest.approx(values(straight, name), rel=1e-4, abs=1e-6), (
            name
        )


def test_demonstrations_are_learnt_through_the_api(
    tmp_path: Path, server: Server, tiny: Path
) -> None:
    replies = (("Say yes.", "yes"), ("Say no.", "no"))
    demonstrations = tmp_path / "said.jsonl"
    demonstrations.write_text(
        "".join(
            json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": asked},
                        {"role": "assistant", "content": reply},
                    ]
                }
            )
            + "\n"
            for asked, reply in replies
        )
    )
    algorithm = {"adv_estimator": "sft", "data": str(demonstrations)}
    config = job(tmp_path, server, tiny, algorithm=algorithm, total_steps=6, save_freq=0)
    train(config, workflow=talk, judge=length)
    losses = values(config, "train/loss")
    assert losses[6] < losses[1] - 1


def named_at(service: Any) -> list[str]:
    """The paths of all named weights that the service keeps."""
    return [
        checkpoint.tinker_path
        for checkpoint in service.create_rest_client().list_user_checkpoints().result().checkpoints
    ]


def test_weights_that_newer_ones_replace_are_deleted_at_the_service(
    tmp_path: Path, server: Server, service: Any, tiny: Path
) -> None:
    before = set(named_at(service))
    for steps in (2, 3):  # the second run goes on from the first
        config = job(
            tmp_path, server, tiny, total_training_steps=steps, total_steps=3, keep_checkpoints=1
        )
        train(config, workflow=talk, judge=length, resume=steps == 3)
    kept = [
        json.loads(file.read_text())
        for file in Path(config.directory).glob("checkpoint/*/*/tinker.json")
    ]
    paths = {path for record in kept for path in record.values() if isinstance(path, str)}
    assert len(paths) == 2, "the newest checkpoint's state, and the final model"
    assert set(named_at(service)) - before == paths


def test_a_service_that_deletes_nothing_is_no_fault(
    tmp_path: Path, server: Server, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = job(tmp_path, server, tiny, total_steps=3, keep_checkpoints=1, logger=["console"])

    @ajet.workflow
    async def losing(question: str, model: ajet.Model, episode: ajet.Episode) -> str:
        for state in Path(config.directory).glob("checkpoint/*/step_000001/tinker.json"):
            run, _, checkpoint = (
                json.loads(state.read_text())["state"].removeprefix("tinker://").partition("/")
            )
            shutil.rmtree(server.state / run.replace(":", "_") / checkpoint, ignore_errors=True)
        return await talk(question=question, model=model)

    train(config, workflow=losing, judge=length)
    assert values(config, "train/policy_version") == {1: 1.0, 2: 2.0, 3: 3.0}
    assert "there is no checkpoint tinker://" in "".join(capsys.readouterr())


def test_a_model_may_be_called_by_another_path(tmp_path: Path, server: Server, tiny: Path) -> None:
    (tmp_path / "link").symlink_to(tiny)
    config = job(tmp_path, server, tmp_path / "link", total_steps=1)
    assert train(config, workflow=talk, judge=length).trained_tokens > 0


def test_the_run_ends_before_it_costs_more_than_it_may(
    tmp_path: Path, server: Server, tiny: Path
) -> None:
    config = job(
        tmp_path, server, tiny, {"prices": {"sample": 1000.0}, "max_cost": 0.15}, total_steps=20
    )
    train(config, workflow=talk, judge=length)
    spent = values(config, "cost/dollars")
    assert 1 <= len(spent) < 20 and max(spent.values()) <= 0.15
    assert (next(Path(config.directory).glob("checkpoint/*/step_*")) / "tinker.json").is_file()
    with pytest.raises(ConfigError, match=r"tinker\.max_cost needs tinker\.prices"):
        train(job(tmp_path, server, tiny, {"max_cost": 1.0}), workflow=talk, judge=length)


def test_without_prices_the_rates_of_the_services_bills_count(
    tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = {"sampling_prefill": 10.0, "sampling_sample": 1000.0, "training": 20.0}

    events = [
        bill(model, kind, rate * factor)
        for model, factor in ((tiny, 1), ("another", 9))
        for kind, rate in rates.items()
    ]
    around = answering("billing/usage/events", {"data": events})
    with Server(tiny, tmp_path / "state", around=around) as server:
        config = job(tmp_path, server, tiny, {"max_cost": 0.15}, total_steps=20, logger=["console"])
        train(config, workflow=talk, judge=length)
    spent = values(config, "cost/dollars")
    counts = [
        values(config, f"cost/{name}_tokens")[1] for name in ("prefilled", "sampled", "trained")
    ]
    assert spent[1] == pytest.approx(np.dot(counts, list(rates.values())) / 1e6)
    assert len(spent) < 20 and max(spent.values()) <= 0.15
    assert "by the service's bills" in capsys.readouterr().out


def bill(model: Path | str, kind: str, rate: float) -> dict[str, Any]:
    """An hour's usage, as the API bills it."""
    info = {
        "type": kind,
        "token_count": 1000,
        **({"cached": False} if kind == "sampling_prefill" else {}),
    }
    hour = {"bucket_start": "2026-11-26T10:00:00Z", "bucket_end": "2026-11-26T11:00:00Z"}
    return {
        **hour,
        "base_model": str(model),
        "effective_rate_usd_per_million_tokens": rate,
        "event_info": info,
    }


def test_a_model_that_the_service_does_not_train_is_refused(tmp_path: Path, tiny: Path) -> None:
    models = [{"model_name": str(tiny), "trainable": False, "sampleable": True}]
    around = answering("get_server_capabilities", {"supported_models": models})
    with (
        Server(tiny, tmp_path / "state", around=around) as server,
        pytest.raises(ConfigError, match="does not train it"),
    ):
        train(job(tmp_path, server, tiny), workflow=talk, judge=length)


def answering(route: str, body: object) -> Callable[[ASGIApp], ASGIApp]:
    """A server that gives this answer at one route."""

    def around(app: ASGIApp) -> ASGIApp:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            instead = JSONResponse(body) if scope.get("path") == f"/api/v1/{route}" else app
            await instead(scope, receive, send)

        return answer

    return around


def test_the_next_batch_is_sampled_while_the_service_trains(
    tmp_path: Path, server: Server, tiny: Path
) -> None:
    config = job(tmp_path, server, tiny, rollout={"max_staleness": 1}, total_steps=3)
    train(config, workflow=talk, judge=length)
    assert max(values(config, "train/staleness_max").values()) == 1
    assert any(share > 0 for share in values(config, "time/overlap").values())


def test_a_straggler_is_trained_later_and_holds_up_no_step_before(
    tmp_path: Path, server: Server, tiny: Path
) -> None:
    config = job(
        tmp_path, server, tiny, rollout={"max_staleness": 3, "carry_over": 2}, total_steps=5
    )
    began = []

    @ajet.workflow
    async def agent(question: str, model: ajet.Model) -> str:
        began.append(question)
        is_straggler = len(began) == 1
        reply = await model.chat([{"role": "user", "content": question}])
        if is_straggler:
            await until_async(lambda: 2 in values(config, "train/policy_version"))
        return reply["content"] or ""

    train(config, workflow=agent, judge=length)
    with open_trace(config.directory) as reader:
        rows = reader.query(
            """SELECT step, min(policy_version) AS version FROM episodes JOIN calls USING (episode_id)
            GROUP BY group_id, step"""
        ).to_pylist()
    assert {row["step"] for row in rows} == {1, 2, 3, 4, 5}
    assert any(row["step"] == 3 and row["version"] == 0 for row in rows)
    assert max(values(config, "train/staleness_max").values()) <= 3


def test_a_signal_leaves_a_state_at_the_service(tmp_path: Path, server: Server, tiny: Path) -> None:
    config, seen = job(tmp_path, server, tiny, total_steps=6, save_freq=0), threading.Event()

    @ajet.workflow
    async def interrupted(question: str, model: ajet.Model, episode: ajet.Episode) -> str:
        if episode.step == 2 and not seen.is_set():
            seen.set()
            os.kill(os.getpid(), signal.SIGINT)
        reply = await model.chat([{"role": "user", "content": question}])
        return reply["content"] or ""

    with pytest.raises(KeyboardInterrupt):
        train(config, workflow=interrupted, judge=length)
    assert (next(Path(config.directory).glob("checkpoint/*/step_000001")) / "tinker.json").is_file()
    short = job(tmp_path, server, tiny, total_training_steps=2, total_steps=6, save_freq=0)
    train(short, workflow=interrupted, judge=length, resume=True)
    assert values(short, "train/policy_version") == {1: 1.0, 2: 2.0}


class Unreliable:
    """Of each route the first request is refused with 429, and the reply to the second is cut off
    on its way."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self.met = app, Counter[str]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = scope.get("path", "").removeprefix("/api/v1/")
        if scope["type"] != "http" or route not in TRAINING:
            return await self._app(scope, receive, send)
        self.met[route] += 1
        if self.met[route] == 1:
            return await JSONResponse({"detail": "too many requests"}, 429)(scope, receive, send)

        async def cut(message: Message) -> None:
            if self.met[route] == 2 and message["type"] == "http.response.body":
                message = {**message, "body": message["body"][:5], "more_body": True}
            await send(message)

        return await self._app(scope, receive, cut)


TRAINING = (
    "forward_backward",
    "optim_step",
    "asample",
    "save_weights",
    "save_weights_for_sampler",
    "retrieve_future",
)


def test_requests_that_are_refused_or_lost_are_repeated_and_applied_once(
    tmp_path: Path, tiny: Path
) -> None:
    between = list[Unreliable]()

    def around(app: ASGIApp) -> ASGIApp:
        between.append(Unreliable(app))
        return between[0]

    with Server(tiny, tmp_path / "state", around=around) as server:
        config = job(tmp_path, server, tiny, rollout={"max_staleness": 1}, total_steps=3)
        tuned = train(config, workflow=talk, judge=length)
    assert between[0].met.keys() == set(TRAINING) and min(between[0].met.values()) > 2
    assert values(config, "train/policy_version") == {1: 1.0, 2: 2.0, 3: 3.0}
    assert updates(server, states(config)[3]) == {3}
    with open_trace(config.directory) as reader:
        assert ledger_balance(reader, tuned.run_id) == []


@pytest.mark.long
def test_a_server_that_is_started_again_is_waited_for(tmp_path: Path, tiny: Path) -> None:
    with Server(tiny, tmp_path / "state") as server:
        config, once = job(tmp_path, server, tiny, save_freq=0), threading.Event()

        @ajet.judge
        def restarting(output: str) -> float:
            if not once.is_set():
                once.set()
                server.stop()
                threading.Timer(1.0, server.start).start()
            return len(output) / 10

        train(config, workflow=talk, judge=restarting)
        assert values(config, "train/policy_version") == {1: 1.0, 2: 2.0}


@pytest.mark.parametrize(
    "when",
    [
        pytest.param("sampling", marks=pytest.mark.long),
        pytest.param("training", marks=pytest.mark.long),
        "ahead",
    ],
)
def test_a_session_that_the_service_ended_is_replaced_and_each_step_applied_once(
    when: str, tmp_path: Path, server: Server, tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    staleness = {"max_staleness": int(when == "ahead")}
    for name in ("straight", "ended"):
        (tmp_path / name).mkdir()
    straight, config = (
        job(
            tmp_path / name,
            server,
            tiny,
            {"prices": {"sample": 1.0}},
            staleness,
            total_steps=4,
            logger=["console"],
        )
        for name in ("straight", "ended")
    )
    once = threading.Event()

    def end(step: int) -> None:
        if step == 3 and not once.is_set():
            once.set()
            end_sessions(server)

    @ajet.workflow
    async def ending(question: str, model: ajet.Model, episode: ajet.Episode) -> str:
        if when == "sampling":
            end(episode.step)
        reply = await talk(question=question, model=model)
        if when != "sampling":
            end(episode.step)
        return str(reply)

    train(straight, workflow=talk, judge=length)
    tuned = train(config, workflow=ending, judge=length)
    assert (
        once.is_set()
        and "was finished" in caplog.text
        and "continuing in a new session" in caplog.text
    )
    assert values(config, "train/policy_version") == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
    assert updates(server, states(config)[4]) == {4}
    if when != "ahead":  # which of two weights sampled a call ahead of them is chance
        for name in ("train/reward", "train/loss", "train/grad_norm"):
            assert values(config, name) == pytest.approx(
                values(straight, name), rel=1e-3, abs=1e-5
            ), name
    spent, undisturbed = (values(run, "cost/dollars") for run in (config, straight))
    assert spent[4] > undisturbed[4] or when == "sampling", "what the lost step took was paid for"
    with open_trace(config.directory) as reader:
        assert ledger_balance(reader, tuned.run_id) == []


def test_sessions_that_end_again_and_again_end_the_run(
    tmp_path: Path, server: Server, tiny: Path
) -> None:
    config = job(tmp_path, server, tiny)

    @ajet.workflow
    async def ending(question: str, model: ajet.Model, episode: ajet.Episode) -> str:
        reply = await talk(question=question, model=model)
        if episode.step == 2:
            end_sessions(server)
        return str(reply)

    with pytest.raises(TrainingError, match="was finished"):
        train(config, workflow=ending, judge=length)
    # If no reply of step 2 arrived before the end of its session, the step has metrics, and no
    # update.
    versions = values(config, "train/policy_version")
    assert versions[1] == 1.0 and set(versions.values()) == {1.0}
    train(config, workflow=talk, judge=length, resume=True)
    assert updates(server, states(config)[2]) == {2}


def test_an_engine_over_kept_weights_goes_on_in_a_new_session(tmp_path: Path, tiny: Path) -> None:
    sessions = list[str]()

    def around(app: ASGIApp) -> ASGIApp:
        async def noting(scope: Scope, receive: Receive, send: Send) -> None:
            async def note(message: Message) -> None:
                if (
                    scope["path"].endswith("/create_session")
                    and message["type"] == "http.response.body"
                ):
                    sessions.append(json.loads(message["body"])["session_id"])
                await send(message)

            await app(scope, receive, note if scope["type"] == "http" else send)

        return noting

    with Server(tiny, tmp_path / "state", around=around) as server:
        client = server.client()
        path = train_client(client, tiny).save_weights_for_sampler("kept").result().path
        there = load_config(
            values={
                "experiment_dir": str(tmp_path / "there"),
                "tinker": {"base_url": server.url},
                "model": {"path": path},
                "rollout": {"max_model_len": 200, "max_response_length_in_one_turn": 6},
            }
        )

        @ajet.workflow
        async def ending(question: str, model: ajet.Model, episode: ajet.Episode) -> str:
            if len(sessions) == 2:
                server.post(f"sessions/{sessions[1]}/finish")
            return str(await talk(question=question, model=model))

        assert (
            run(there, workflow=ending, judge=length, tasks=[{"question": "Say yes."}] * 3).reward
            is not None
        )
        client.close("success").result()
    assert len(sessions) == 3


def test_a_signal_ends_a_run_whose_session_is_gone(
    tmp_path: Path, server: Server, tiny: Path
) -> None:
    config, seen = job(tmp_path, server, tiny, save_freq=0), threading.Event()

    @ajet.workflow
    async def interrupted(question: str, model: ajet.Model, episode: ajet.Episode) -> str:
        if episode.step == 2 and not seen.is_set():
            seen.set()
            end_sessions(server)
            os.kill(os.getpid(), signal.SIGINT)
        return str(await talk(question=question, model=model))

    with pytest.raises(
        (KeyboardInterrupt, TrainingError)
    ):  # the latter where step 1 could not be saved
        train(config, workflow=interrupted, judge=length)
    assert values(config, "train/policy_version") == {1: 1.0}


def end_sessions(server: Server) -> None:
    """End all sessions with a model in training, as the service may."""
    for directory in server.state.glob("*_train_*"):
        session = directory.name.partition("_")[0]
        server.post(f"sessions/{session}/finish", reason={"type": "interrupted"}).raise_for_status()


def states(config: Config) -> dict[int, str]:
    """The path at the service of each checkpoint's state, without its scheme."""
    files = Path(config.directory).glob("checkpoint/*/step_*/tinker.json")
    return {
        int(f.parent.name[5:]): json.loads(f.read_text())["state"].removeprefix("tinker://")
        for f in files
    }


def updates(server: Server, state: str) -> set[int]:
    """How many updates a state's optimizer has made."""
    run, _, name = state.partition("/")
    optimizer = torch.load(
        server.state / run.replace(":", "_") / name / "optimiser.pt", weights_only=True
    )
    return {int(moments["step"]) for moments in optimizer["state"].values()}


AGENT = """
import ajet

@ajet.workflow
async def talk(question: str, model: ajet.Model) -> str:
    return (await model.chat([{"role": "user", "content": question}]))["content"] or ""

@ajet.judge
def length(output: str) -> float:
    return len(output) / 10
"""


def client(config: Config, agent: Path, *, resume: bool = False) -> subprocess.Popen[bytes]:
    """`ajet train` on a config, as a process."""
    file = Path(config.directory).with_suffix(".yaml")
    file.write_text(config.dump_yaml(only_set=True))
    named = [f"{agent}:talk", "--judge", f"{agent}:length", "--conf", str(file)]
    return subprocess.Popen([sys.executable, "-m", "ajet", "train", *named, *["--resume"] * resume])


def trained_alike(disturbed: Config, straight: Config) -> None:
    """Assert that two runs made the same of the same steps, to the bit."""
    for name in (
        "train/policy_version",
        "train/reward",
        "train/loss",
        "train/grad_norm",
        "train/hash",
    ):
        assert values(disturbed, name) == values(straight, name) != {}, name
    with open_trace(disturbed.directory) as reader:
        [run] = reader.query("SELECT run_id FROM runs").to_pylist()
        assert ledger_balance(reader, run["run_id"]) == []


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_ten_kills_of_the_client_end_where_an_undisturbed_run_ends(
    tmp_path: Path, tiny: Path
) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    for name in ("straight", "killed"):
        (tmp_path / name).mkdir()
    with Server(tiny, tmp_path / "state", deterministic=True) as server:
        straight, killed = (
            job(tmp_path / name, server, tiny, rollout={"deterministic": True}, total_steps=12)
            for name in ("straight", "killed")
        )
        assert client(straight, agent).wait() == 0
        for kill in range(1, 11):
            process = client(killed, agent, resume=kill > 1)
            until(
                lambda step=kill: any(
                    Path(killed.directory).glob(f"checkpoint/*/step_{step:06}/tinker.json")
                )
            )
            process.kill()
            process.wait()
        assert client(killed, agent, resume=True).wait() == 0
    trained_alike(killed, straight)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_ten_kills_of_the_server_end_where_an_undisturbed_run_ends(
    tmp_path: Path, tiny: Path
) -> None:
    """The command itself, killed as the run samples, and as it is about to train."""
    for name in ("straight", "killed"):
        (tmp_path / name).mkdir()
    with served(tiny, tmp_path / "state") as server:
        straight, config = (
            job(tmp_path / name, server, tiny, rollout={"deterministic": True}, total_steps=11)
            for name in ("straight", "killed")
        )
        train(straight, workflow=talk, judge=length)
        ready, kills = threading.Lock(), dict[int, str]()

        def kill(step: int, at: str) -> None:
            with ready:
                if step > 1 and step not in kills and at == ("sampling", "training")[step % 2]:
                    kills[step] = at
                    server.kill()

        @ajet.workflow
        async def killing(question: str, model: ajet.Model, episode: ajet.Episode) -> str:
            first = {"role": "user", "content": question}
            reply = await model.chat([first])
            await asyncio.to_thread(kill, episode.step, "sampling")
            last = await model.chat([first, reply, {"role": "user", "content": "Again."}])
            await asyncio.to_thread(kill, episode.step, "training")
            return last["content"] or ""

        train(config, workflow=killing, judge=length)
    assert len(kills) == 10
    trained_alike(config, straight)


class Served:
    """`ajet trainer serve --deterministic` as a process."""

    url = "http://127.0.0.1:0"

    def __init__(self, model: Path, state: Path) -> None:
        self._command = [
            sys.executable,
            "-m",
            "ajet",
            "trainer",
            "serve",
            "--deterministic",
            "--model",
            str(model),
        ]
        self._command += ["--state", str(state)]
        self.start()

    def start(self) -> None:
        port = self.url.rpartition(":")[2]
        self.process = subprocess.Popen(
            [*self._command, "--port", port], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[3]

    def kill(self) -> None:
        """Kill it; the next one on its state and port is there when this returns."""
        self.process.kill()
        self.process.wait()
        self.start()


@contextmanager
def served(model: Path, state: Path) -> Iterator[Served]:
    server = Served(model, state)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def test_what_a_service_cannot_do_is_refused_before_it_is_asked(
    tmp_path: Path, server: Server, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wrong, named in (
        (job(tmp_path, server, tiny, entropy_coef=0.1), "entropy_coef"),
        (job(tmp_path, server, Path("another/model")), "another/model"),
    ):
        with pytest.raises(ConfigError, match=named):
            train(wrong, workflow=talk, judge=length)
    with pytest.raises(ConfigError, match=r"rollout\.temperature must be 1\.0 .*backbone tinker"):
        job(tmp_path, server, tiny, rollout={"temperature": 0.7})
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    elsewhere = job(
        tmp_path,
        server,
        tiny,
        {"base_url": "https://service.example.com", "api_key_env": "NO_SUCH_KEY"},
    )
    with pytest.raises(ConfigError, match=r"NO_SUCH_KEY \(tinker\.api_key_env\) is not set"):
        train(elsewhere, workflow=talk, judge=length)


def test_a_service_that_is_not_there_is_named(tmp_path: Path, server: Server, tiny: Path) -> None:
    config = job(tmp_path, server, tiny, {"base_url": "http://127.0.0.1:1", "stall_timeout": 2})
    with pytest.raises(TrainingError, match=r"has not answered for 2 s \(tinker\.stall_timeout\)"):
        train(config, workflow=talk, judge=length)
    Session(job(tmp_path, server, tiny)).close()  # which is not kept from one that is there


def test_older_sdks_have_no_rest_client_of_their_own(
    tmp_path: Path, server: Server, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("tinker.RestClient")  # as 0.22, which SkyRL's server needs
    session = Session(job(tmp_path, server, tiny))
    try:
        assert not session.newer and session.model == str(tiny)
    finally:
        session.close()


def test_our_server_adds_up_losses(tmp_path: Path, server: Server, tiny: Path) -> None:
    session = Session(job(tmp_path, server, tiny))
    try:
        assert measure_scaling(SdkService(session), IDS[:10], 60.0) == Scaling()
        weights = SdkService(session).base()
        assert np.isfinite(weights.logprobs(IDS).result(60)).all()
    finally:
        session.close()
