"""The job class builds the config that the same YAML gives, and trains with it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ajet
from ajet_sdk.agent.workflow import BaseJudge, Workflow, WorkflowOutput
from ajet_sdk.config.config import load_config
from ajet_sdk.errors import ConfigError

HERE = Path(__file__)


@ajet.workflow
async def solve(question: str, model: Any) -> str:
    return str((await model.chat([{"role": "user", "content": question}])).content)


class Agent(Workflow):
    async def execute(self, workflow_task: Any, tuner: Any) -> WorkflowOutput:
        return WorkflowOutput(reward=1)


class Judge(BaseJudge):
    def compute_reward(self, workflow_task: Any, workflow_output: Any) -> Any:
        return 1.0, True


def reply(ask: Any) -> str:
    return "42"


def job(**arguments: Any) -> ajet.AjetJob:
    made = ajet.AjetJob(
        model="some/model",
        algorithm="rloo",
        backbone="debug",
        n_gpu=2,
        experiment_name="x",
        **arguments,
    )
    return made.set_workflow(f"{HERE}->solve").set_judge("exact").set_data(type="random_dummy")


def test_it_is_equal_to_the_yaml_route(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"""
ajet:
  experiment_name: x
  backbone: debug
  model: {{path: some/model}}
  rollout: {{user_workflow: "{HERE}->solve", n_vllm_engine: 3}}
  task_judge: {{judge_type: exact}}
  task_reader: {{type: random_dummy}}
  trainer_common: {{n_gpus_per_node: 2, algorithm: {{adv_estimator: rloo}}}}
""")
    built = job(n_gpu_for_infer=3)
    assert built.config == load_config(file)
    assert load_config(built.dump_job_as_yaml(tmp_path / "saved" / "dumped.yaml")) == built.config
    assert ajet.AjetJob().load_job_from_yaml(file).config == built.config
    assert built.config.load(built.config.rollout.user_workflow or "").__name__ == "solve"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            {
                "type": "hf",
                "dataset_path": "openai/gsm8k",
                "training_split": "train",
                "validation_split": "test",
            },
            {"dataset_path": "openai/gsm8k", "training_split": "train", "validation_split": "test"},
        ),
        ({"dataset_path": "openai/gsm8k", "dataset_name": "main"}, {"dataset_name": "main"}),
    ],
)
def test_data_of_the_hub(arguments: dict[str, Any], expected: dict[str, Any]) -> None:
    reader = job().set_data(**arguments).config.task_reader
    assert reader.type == "huggingface_dat_repo"
    assert {name: getattr(reader.huggingface_dat_repo, name) for name in expected} == expected


def test_data_of_files(tmp_path: Path) -> None:
    reader = (
        job()
        .set_data("jsonl", tmp_path / "a.jsonl", validation_path=tmp_path / "b.jsonl")
        .config.task_reader
    )
    assert reader.type == "jsonl_dataset_file"
    files = reader.jsonl_dataset_file
    assert (files.training.file_path, files.validation.file_path) == (
        str(tmp_path / "a.jsonl"),
        str(tmp_path / "b.jsonl"),
    )


def test_wrong_settings_are_errors() -> None:
    with pytest.raises(ConfigError, match="unknown; there are"):
        job().set_data(type="parquet")
    with pytest.raises(ConfigError, match=r"rollout\.num_repeats"):
        _ = job().set("rollout.num_repeats", 8).config
    with pytest.raises(ConfigError, match="adv_estimator"):
        _ = ajet.AjetJob(algorithm="gpro").config


def test_objects_are_named_by_class_path(tmp_path: Path) -> None:
    made = job().set_workflow(Agent).set_judge(Judge)
    assert made.config.rollout.user_workflow == f"{__name__}->Agent"
    assert made.config.task_judge.judge_protocol == f"{__name__}->Judge"
    with pytest.raises(ConfigError, match="no name"):
        job().set_judge(ajet.judge(lambda output: 1.0)).dump_job_as_yaml(tmp_path / "job.yaml")


@pytest.mark.slow
def test_what_a_prompt_defines_is_not_written_under_another_name(tmp_path: Path) -> None:
    """A notebook's `__main__` has no file either; the decorator's own was written in its place."""
    code = (
        "import ajet\n@ajet.workflow\ndef solve(question: str) -> str: return ''\n"
        "class Judge(ajet.BaseJudge): pass\n"
        "for job in (ajet.AjetJob().set_workflow(solve), ajet.AjetJob().set_judge(Judge)):\n"
        "    try: job.dump_job_as_yaml('job.yaml')\n"
        "    except ValueError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.count("in a .py file, and import it") == 2 and not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_a_name_that_means_something_else_is_not_written(tmp_path: Path) -> None:
    """The class path of these leads to another object, or to a file that does not have them."""
    other = ajet.workflow(timeout=3)(reply)
    with pytest.raises(ConfigError, match="its name in its module means something else"):
        job().set_workflow(other).dump_job_as_yaml(tmp_path / "job.yaml")
    (tmp_path / "agent.py").write_text(
        "import ajet\n@ajet.workflow\ndef solve(question: str) -> str: return ''\nclass"
        " Judge(ajet.BaseJudge): pass\nif __name__ == '__main__':\n   "
        " print(ajet.AjetJob().set_workflow(solve).set_judge(Judge).dump_job_as_yaml('job.yaml'))\n"
    )
    prompt = (
        "import ajet\n@ajet.workflow\ndef typed(question: str) -> str: return ''\n\n"
        "try: ajet.AjetJob().set_workflow(typed).dump_job_as_yaml('typed.yaml')\n"
        "except ValueError as error: print(error)\n\n"
    )
    command = [sys.executable, "-i", "agent.py"]
    done = subprocess.run(
        command, cwd=tmp_path, input=prompt, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("job.yaml\n") and "workflow 'typed' has no name" in done.stdout
    assert (
        load_config(tmp_path / "job.yaml").rollout.user_workflow
        == f"{tmp_path / 'agent.py'}->solve"
    )
    assert not (tmp_path / "typed.yaml").exists()


def test_it_tunes_in_a_notebook_whose_loop_is_running(tmp_path: Path) -> None:
    made = job().set_workflow(solve).set("experiment_dir", str(tmp_path / "experiment"))
    made.set("model.scripted", f"{HERE}->reply")

    async def cell() -> bool:
        return bool(made.tune().run_id)

    assert asyncio.run(cell())


def test_aliases() -> None:
    assert ajet.AgentJetJob is ajet.AjetJob is ajet.AstunerJob


@pytest.mark.slow
def test_it_tunes(tmp_path: Path) -> None:
    for made in (job().set_workflow(solve), job().set_workflow(Agent).set_judge(Judge)):
        made.set("experiment_dir", str(tmp_path / "experiment")).set(
            "model.scripted", f"{HERE}->reply"
        )
        tuned = made.tune()
        assert tuned.run_id and len(tuned.episodes) == 2 and tuned.path is None


def test_a_regex_judge_has_its_pattern() -> None:
    job = ajet.AjetJob().set_judge("regex", pattern=r"answer: (\d+)")
    assert job.config.task_judge.judge_type == "regex"
    assert job.config.task_judge.pattern == r"answer: (\d+)"
    with pytest.raises(ConfigError, match="pattern"):
        _ = ajet.AjetJob().set_judge("regex").config
