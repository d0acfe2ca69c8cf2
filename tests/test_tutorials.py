"""The tutorials: their files say what their programs make, and their programs run as printed."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ajet_sdk.config.config import load_config
from ajet_sdk.errors import EnvironmentUnavailable, MissingResource
from ajet_sdk.protocols import Ask
from ajet_sdk.tasks.lineage import same_tasks
from ajet_sdk.tasks.load import load_tasks
from ajet_sdk.types import Task

pytestmark = pytest.mark.usefixtures("audited")

TUTORIALS = Path(__file__).parents[1] / "tutorial"
MATH, LAKE = TUTORIALS / "example_math_agent", TUTORIALS / "example_frozenlake"


def load(path: Path) -> ModuleType:
    """The module at a path, its folder importable as when ajet runs it."""
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules.setdefault(path.stem, importlib.util.module_from_spec(spec))
    if not hasattr(module, "__ready__"):
        spec.loader.exec_module(module)
        module.__ready__ = True  # type: ignore[attr-defined]
    return module


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")


@pytest.mark.parametrize(("folder", "program"), [(MATH, "arithmetic.py"), (LAKE, "lake.py")])
def test_the_task_files_are_what_their_program_writes(
    folder: Path, program: str, tmp_path: Path
) -> None:
    copy = tmp_path / program
    copy.write_text((folder / program).read_text())
    subprocess.run([sys.executable, copy], check=True, timeout=300)
    for name in ("train.jsonl", "val.jsonl"):
        assert (tmp_path / name).read_text() == (folder / name).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("config", sorted(TUTORIALS.glob("*/*.yaml")), ids=lambda path: path.stem)
def test_the_tasks_of_every_job_load(config: Path) -> None:
    """A job refuses files that share a task: so the tutorial would end before its first step."""
    if not config.read_text(encoding="utf-8").partition("ajet:")[1]:
        pytest.skip("not a job")
    if "task_reader" not in config.read_text(encoding="utf-8"):
        pytest.skip("a judge's config, without tasks")
    job = load_config(config)
    try:
        assert load_tasks(job).train
    except (
        MissingResource,
        EnvironmentUnavailable,
    ) as missing:  # of files and services that the tutorial makes first
        pytest.skip(str(missing))


def test_dialogues_that_end_alike_are_different_tasks() -> None:
    said = [
        [{"role": "user", "content": text} for text in ("I cough.", answer, "yes")]
        for answer in ("no", "two")
    ]
    first, second = (Task(init_messages=messages) for messages in said)
    assert list(same_tasks([first], [second])) == [] and list(
        same_tasks([first], [Task(init_messages=said[0])])
    )


@pytest.mark.parametrize("folder", [MATH, LAKE])
def test_training_and_validation_share_no_task(folder: Path) -> None:
    train, val = (
        set((folder / f"{name}.jsonl").read_text().splitlines()) for name in ("train", "val")
    )
    assert train and val and train.isdisjoint(val)


def test_no_demonstration_shows_a_held_out_problem() -> None:
    recipe, arithmetic = load(MATH / "recipe.py"), load(MATH / "arithmetic.py")
    val = {json.loads(line)["question"] for line in (MATH / "val.jsonl").read_text().splitlines()}
    draw = random.Random(1)
    shown = {recipe.demonstrate(draw).messages[1]["content"] for _ in range(2000)}
    assert shown.isdisjoint(val)
    assert all(not arithmetic.held_out(arithmetic.draw_problem(draw)) for _ in range(100))


def test_no_demonstration_walks_a_held_out_lake() -> None:
    lake = load(LAKE / "lake.py")
    draw = random.Random(1)
    assert all(not lake.held_out(lake.draw_lake(draw)) for _ in range(200))
    assert all(
        lake.held_out(json.loads(row)["lake"])
        for row in (LAKE / "val.jsonl").read_text().splitlines()
    )


def test_the_lake_is_as_it_says() -> None:
    lake = load(LAKE / "lake.py")
    world = lake.Lake.of(["A.#.", "....", "#..G", "...."])
    assert world.look() == "goal down 2 right 3\nsafe down right"
    assert world.go("up") == "" and world.at == (0, 0)
    assert world.go("right") == "" and world.go("right") == "hole"
    assert lake.distances(["A.#.", "....", "#..G", "...."])[0, 0] == 5


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("57+38", "95"),
        ("12 - 40", "-28"),
        ("99*99", "9801"),
        ("2**3", "error"),
        ("__import__('os')", "error"),
    ],
)
def test_the_tool_counts_and_evaluates_nothing_else(expression: str, value: str) -> None:
    assert load(MATH / "agent.py").calc(expression) == value


@pytest.mark.parametrize(
    ("output", "answer", "reward"),
    [("95", "95", 1.0), ("It is 95.", "95", 1.0), ("-5", "5", 0.0), ("", "5", 0.0)],
)
def test_the_judge_reads_the_last_number(output: str, answer: str, reward: float) -> None:
    assert load(MATH / "agent.py").right(output, answer) == reward


def calculator(ask: Ask) -> dict[str, Any]:
    """What a model that knows its tool would say."""
    messages = ask.body["messages"]
    if messages[-1]["role"] == "tool":
        return {"role": "assistant", "content": messages[-1]["content"]}
    expression = messages[-1]["content"].removeprefix("What is ").removesuffix("?")
    function = {"name": "calc", "arguments": json.dumps({"expression": expression})}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }


@pytest.mark.slow
def test_the_math_agent_solves_its_tasks_with_a_model_that_can(tmp_path: Path) -> None:
    """The agent as printed, captured without an edit, on the debug backbone with a scripted
    model."""
    from ajet_sdk.run import train

    (tmp_path / "replies.py").write_text(
        "from ajet_sdk.engines.scripted import ScriptedEngine\n"
        "from test_tutorials import calculator\n"
        "replies = ScriptedEngine(calculator)\n"
    )
    sys.modules.setdefault("test_tutorials", sys.modules[__name__])
    config = load_config(
        MATH / "math_agent.yaml",
        [
            "ajet.backbone=debug",
            "ajet.debug.debug_first_n_tasks=8",
            "ajet.rollout.max_response_length_in_one_turn=512",  # the scripted model's tokens are bytes
            "ajet.rollout.max_model_len=4096",
            f"ajet.model.scripted={tmp_path / 'replies.py'}->replies",
            f"ajet.experiment_dir={tmp_path / 'experiment'}",
        ],
    )
    tuned = train(config)
    assert tuned.metrics == {"debug/reward": 1.0}
    assert all(len(e.calls) == 2 for e in tuned.episodes)


def relay_player(ask: Ask) -> str:
    """A planner that goes by the goal alone, and an executor that goes elsewhere at a hole."""
    said = str((ask.messages or [{}])[-1]["content"])
    if ask.target == "planner":
        assert "safe" not in said, "the planner is not told of the holes"
        return said.split()[1]
    assert "goal" not in said, "the executor is not told of the goal"
    plan, safe = said.splitlines()
    wish, ways = plan.split()[1], safe.split()[1:]
    return wish if wish in ways else ways[0]


@pytest.mark.slow
def test_two_agents_cross_the_lake_together(tmp_path: Path) -> None:
    from ajet_sdk.run import run

    (tmp_path / "replies.py").write_text(
        "from ajet_sdk.engines.scripted import ScriptedEngine\n"
        "from test_tutorials import relay_player\n"
        "replies = ScriptedEngine(relay_player)\n"
    )
    sys.modules.setdefault("test_tutorials", sys.modules[__name__])
    job = load_config(
        LAKE / "relay.yaml",
        [
            "ajet.rollout.max_model_len=4096",  # the scripted model's tokens are bytes
            "ajet.model.recipe=null",
            "ajet.model.path=null",
            f"ajet.model.scripted={tmp_path / 'replies.py'}->replies",
            f"ajet.experiment_dir={tmp_path / 'experiment'}",
        ],
    )
    report = run(job)
    outputs = [episode.output for episode in report.episodes]
    assert outputs.count("goal") > len(outputs) / 2 and "nonsense" not in outputs
    targets = {call.target_tag for episode in report.episodes for call in episode.calls}
    assert targets == {"planner", "executor"}


@pytest.mark.parametrize(
    "file", [MATH / "math_agent.yaml", LAKE / "frozenlake.yaml", LAKE / "relay.yaml"]
)
def test_one_line_switches_to_a_model_of_the_hub(file: Path) -> None:
    from ajet_sdk.learn.recipe import wants_recipe

    assert wants_recipe(load_config(file))
    assert not wants_recipe(load_config(file, ["ajet.model.path=Qwen/Qwen2.5-0.5B-Instruct"]))


@pytest.mark.long
@pytest.mark.slow
def test_the_main_job_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tutorial with fewer steps: from the recipe's model to a clearly better one, the ledger
    balanced."""
    from ajet_sdk.run import train

    monkeypatch.chdir(tmp_path)
    config = load_config(
        MATH / "math_agent.yaml",
        [
            "ajet.trainer_common.total_steps=12",
            "ajet.trainer_common.val_tasks=200",
            "ajet.trainer_common.test_freq=12",
            "ajet.trainer_common.optim.lr_scheduler_type=constant",  # in so few steps there is no time to slow down
        ],
    )
    tuned = train(config)
    recipe = json.loads((tmp_path / "launcher_record/models/calculator/.ajet").read_text())
    assert recipe["reward"] >= 0.25
    rewards = tuned.history["val/reward"]
    assert rewards[12] >= rewards[0] + 0.15, rewards
