"""Configs and workflows in the manner of programs for AgentJet, in `agentjet/` beside this file:
all load, and run.

Those with AgentScope run in `tests/frameworks/test_agentscope_programs.py`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ajet_sdk.config.agentjet import IGNORED_ROOTS, RENAMED, WITHOUT_EFFECT
from ajet_sdk.config.config import Config, load_config
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.judges.load import load_judge
from ajet_sdk.protocols import Ask
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.rollout.episode import run_batch
from ajet_sdk.types import Episode, Task
from tests.gateways import shared_gateway
from tests.sdk.environments.test_client import Service
from tests.serving import answering, serving

HERE = Path(__file__).parent / "agentjet"
FILES = sorted(HERE.glob("*.yaml"))


def keys_of(values: Any, prefix: str = "") -> Iterator[str]:
    for name, value in values.items() if isinstance(values, dict) else ():
        yield f"{prefix}{name}"
        yield from keys_of(value, f"{prefix}{name}.")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_loads_with_a_line_for_what_is_ignored(path: Path) -> None:
    config = load_config(path, ["ajet.backbone=trinity"])
    given = yaml.safe_load(path.read_text())
    roots = [root for root in IGNORED_ROOTS if root in given]
    [line] = [line for line in config.notices() if line.startswith("ignored: ")]
    assert roots[:2] == ["hydra", "defaults"] and all(f"`{root}:`" in line for root in roots)
    dropped = [key for key in keys_of(given["ajet"]) if key in WITHOUT_EFFECT]
    found = [line for line in config.notices() if line.startswith("without effect: ")]
    assert len(found) == bool(dropped) and all(key in found[0] for key in dropped)
    assert config.roots.keys() == given.keys() - {"ajet", *roots}
    if "experiment_name" in given["ajet"]:
        assert config.experiment_name.startswith(path.stem)


def test_the_files_hold_what_such_programs_hold() -> None:
    assert len(FILES) == 11
    held = {key for path in FILES for key in keys_of(yaml.safe_load(path.read_text())["ajet"])}
    assert WITHOUT_EFFECT.keys() - held <= {"rollout.enable_oversample"} and RENAMED.keys() <= held
    listed = (
        "gamma val_kwargs max_sample_per_task expected_steps max_num_seqs detect_timeline_snap"
        " total_training_steps"
    )
    assert set(listed.split()) <= {key.rpartition(".")[2] for key in held}


# Those without AgentScope run


def run(name: str, reply: Any, task: Task, *overrides: str) -> tuple[Config, Episode]:
    """One episode of the file's workflow and judge."""
    config = load_config(HERE / f"{name}.yaml", overrides)
    workflow, judge = config.load(config.rollout.user_workflow or ""), load_judge(config)

    async def main() -> list[Episode]:
        engine = ScriptedEngine(reply)
        return await run_batch(
            workflow,
            judge,
            [Attempt(task, "run")],
            engine=engine,
            gateway=shared_gateway(),
            config=config,
        )

    return config, asyncio.run(main())[0]


QUESTION = Task(main_query="6 x 7", metadata={"answer": "42"})
CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>'


@pytest.mark.parametrize(
    ("replies", "reward", "calls"),
    [
        ([CALL, "It is \\boxed{42}."], 1.0, 2),
        (["\\boxed{41}"], 0.0, 1),
        (["42"], -0.5, 1),
        (['<tool_call>{"name": multiply}</tool_call>'], -1.0, 1),
    ],
)
def test_arithmetic_over_the_openai_client(replies: list[str], reward: float, calls: int) -> None:
    _, episode = run("math_openai", replies, QUESTION)
    assert (episode.error, episode.reward, len(episode.calls)) == (None, reward, calls)
    assert all(call.trainable for call in episode.calls)


def test_arithmetic_over_http() -> None:
    _, episode = run("math_http", lambda ask: "\\boxed{42}", QUESTION)
    assert (episode.error, episode.reward, episode.is_success) == (None, 1.0, True)


def test_a_walk_over_a_lake() -> None:
    task = Task(metadata={"random_number": 3})

    def reply(ask: Ask) -> str:
        messages: Any = ask.messages
        goal = int(re.findall(r"\d+", messages[0]["content"])[0])
        return "Right" if len(messages) // 2 <= goal else "Stop"

    config, episode = run("frozenlake", reply, task)
    assert (episode.error, episode.reward) == (None, 1.0) and episode.metrics["steps"] == len(
        episode.calls
    ) > 1
    assert config.model.tool_call_parser == "none" and {call.agent for call in episode.calls} == {
        "walker"
    }


def test_a_workflow_that_another_model_grades(monkeypatch: pytest.MonkeyPatch) -> None:
    grade = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "0.75"}}]}
    with serving(answering(grade)) as url:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{url}/v1")
        monkeypatch.setenv("DASHSCOPE_API_KEY", "key")
        messages = [{"role": "user", "content": "My head aches."}]
        _, episode = run("learn2ask", lambda ask: "Since when?", Task(init_messages=messages))
    assert (episode.error, episode.reward) == (None, 0.75)
    assert (episode.calls[0].trainable, episode.calls[0].model) == (True, "scripted")


def test_an_environment_service_judges() -> None:
    with serving(Service().app) as url:
        override = f"ajet.task_reader.env_service.env_url={url}"
        task = Task(task_id="t1", env_type="appworld", metadata={})
        _, episode = run("appworld", lambda ask: "print(1)", task, override)
    assert (episode.error, episode.reward, episode.is_success, len(episode.calls)) == (
        None,
        1.5,
        True,
        3,
    )


def test_readers_derive_from_the_base() -> None:
    config = load_config(HERE / "frozenlake.yaml")
    reader = config.load("plain.py->Numbers")(config.task_reader)
    assert [task.main_query for task in reader.get_training_tasks()] == ["0 x 7", "1 x 7", "2 x 7"]
    assert reader.reader_config is config.task_reader and len(reader.get_validation_tasks()) == 1
