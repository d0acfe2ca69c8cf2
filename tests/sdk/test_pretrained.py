"""A pretrained model, SmolLM2-135M-Instruct, through ajet: fetched, sampled from with tools and
types, trained."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import openai
import pytest
from typer.testing import CliRunner

import ajet
from ajet_sdk.config.config import Config, load_config
from ajet_sdk.engines.fetch import fetch_model
from ajet_sdk.errors import MissingExtra, MissingResource
from ajet_sdk.run import run, train
from ajet_sdk.samples.timelines import merge
from ajet_sdk.trace.reader import calls_of, episodes, open_trace
from ajet_sdk.types import Timeline
from ajet_tools.cli.app import app
from ajet_tools.trace.files.check import check

pytestmark = pytest.mark.slow

TURNS = 10
CALC: Any = {
    "type": "function",
    "function": {
        "name": "calc",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string", "maxLength": 12}},
                       "required": ["expression"], "additionalProperties": False},
    },
}  # fmt: skip
PLACE = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}, "row": {"enum": [1, 2, 3]}},
         "required": ["city", "row"], "additionalProperties": False}  # fmt: skip


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The model's directory; it is downloaded once to a machine."""
    try:
        return fetch_model("smollm2-135m")
    except (MissingExtra, MissingResource) as error:
        pytest.skip(f"SmolLM2-135M-Instruct is not to be had here: {error}")


def config_of(tmp_path: Path, model: Path, **sections: Any) -> Config:
    rollout = {
        "num_repeat": 2,
        "temperature": 1.0,
        "max_model_len": 768,
        "max_response_length_in_one_turn": 40,
    }
    values = {
        "experiment_name": "pretrained",
        "experiment_dir": str(tmp_path / "run"),
        "model": {"path": str(model)},
        "rollout": rollout,
        **sections,
    }
    return load_config(values=values)


def timelines(directory: Path) -> list[list[Timeline]]:
    """Of each episode."""
    with open_trace(directory) as reader:
        return [
            list(merge(calls_of(reader, episode.episode_id)).timelines)
            for episode in episodes(reader)
        ]


@ajet.workflow
def chat(question: str) -> str:
    """Ten turns, of which the model reads all."""
    client = openai.OpenAI()
    messages: list[Any] = [{"role": "user", "content": question}]
    for turn in range(TURNS):
        reply = client.chat.completions.create(model="m", messages=messages, max_tokens=4)
        messages += [
            reply.choices[0].message.model_dump(exclude_none=True),
            {"role": "user", "content": f"Then {turn}?"},
        ]
    return json.dumps(messages)


@ajet.judge
def capitals(output: str) -> float:
    """Something that differs between the attempts."""
    return sum(map(str.isupper, output)) / len(output)


@pytest.mark.parametrize(("dtype", "gap"), [("float32", 1e-4), ("bfloat16", 0.5)])
def test_a_lora_step_on_ten_turns_merged_into_one_timeline(
    smollm2: Path, tmp_path: Path, dtype: str, gap: float
) -> None:
    config = config_of(
        tmp_path,
        smollm2,
        backbone="local",
        data={"train_batch_size": 1},
        trainer_common={
            "total_steps": 1,
            "val_before_train": False,
            "use_kl_loss": False,
            "micro_batch_tokens": 1024,
        },
    )
    lora = config.model.lora.model_copy(update={"enabled": True})
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"lora": lora, "dtype": dtype})}
    )
    tuned = train(config, workflow=chat, judge=capitals, tasks=[{"question": "Count."}])
    assert tuned.metrics["train/logprob_gap_max"] < gap
    assert tuned.outcomes["trained"] == tuned.trained_tokens > 2 * TURNS
    for merged in timelines(config.directory):
        [timeline] = merged
        assert len(timeline.call_ids) == TURNS
    assert check(config.directory) == []


@ajet.workflow
def use_tool(question: str) -> str:
    """A forced call of a tool, and what it gave in a typed reply."""
    client = openai.OpenAI()
    messages: list[Any] = [{"role": "user", "content": question}]
    forced: Any = {"type": "function", "function": {"name": "calc"}}
    reply = client.chat.completions.create(
        model="m", messages=messages, tools=[CALC], tool_choice=forced
    )
    [call] = reply.choices[0].message.tool_calls or []
    assert call.type == "function" and set(json.loads(call.function.arguments)) == {"expression"}
    messages.append(reply.choices[0].message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "Rome, row 2"})
    form: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}
    typed = client.chat.completions.create(
        model="m", messages=messages, tools=[CALC], tool_choice="none", response_format=form
    )
    return typed.choices[0].message.content or ""


@ajet.judge
def is_typed(output: str) -> float:
    place = json.loads(output)
    return float(place["city"] in ("Paris", "Rome") and place["row"] in (1, 2, 3))


def test_tools_and_typed_replies_of_a_template_without_tools(
    smollm2: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tmp_path, smollm2)
    with caplog.at_level(logging.INFO, "ajet"):
        report = run(
            config, workflow=use_tool, judge=is_typed, tasks=[{"question": "Where am I?"}], k=2
        )
    assert report.reward == 1.0 and not report.failures
    told = [record for record in caplog.records if "Hermes form" in record.getMessage()]
    assert len(told) == 1
    for merged in timelines(config.directory):
        [timeline] = merged
        assert len(timeline.call_ids) == 2
    assert check(config.directory) == []


@pytest.mark.long
def test_the_demo_learns_and_prints_replies_before_and_after(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["demo", "--pretrained"])
    assert done.exit_code == 0, done.output
    assert re.search(r"held-out question +before +after", done.output)
    said = re.search(
        r"Reward on 32 held-out questions: (\S+) → (\S+), paired difference", done.output
    )
    assert said is not None and float(said[2]) > float(said[1]) + 0.2
