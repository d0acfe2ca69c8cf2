"""What programs for AgentJet and AgentScope Tuner import, call and return; AgentScope itself is
tested apart."""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import ajet
from ajet_sdk.agent.workflow import AjetTuner, Workflow, WorkflowOutput, WorkflowTask
from ajet_sdk.config.config import load_config
from ajet_sdk.config.objects import load_object
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.errors import ConfigError, EngineUnavailable, MissingExtra
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.rollout.episode import run_batch
from ajet_sdk.types import Episode, Task
from tests.gateways import shared_gateway
from tests.matrix import AGENTJET
from tests.serving import replying, serving

CONFIG = load_config(values={"ajet": {"rollout": {"timeout": 30}}, "lake": {"size": 4}})


def run(workflow: Any, judge: Any = None) -> Episode:
    async def main() -> list[Episode]:
        attempts = [Attempt(Task(main_query="6 x 7", metadata={"answer": "42"}), "run")]
        engine = ScriptedEngine(lambda ask: "42")
        return await run_batch(
            workflow, judge, attempts, engine=engine, gateway=shared_gateway(), config=CONFIG
        )

    return asyncio.run(main())[0]


def test_the_extra_has_what_agentjets_tutorials_import() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    listed = [
        re.search(rf"^{name} = \[(.*?)^\]", text, re.M | re.S)
        for name in ("agentjet", "dependencies")
    ]
    has = {name for part in listed if part for name in re.findall(r'"([\w-]+)', part[1])}
    named = {
        "dotenv": "python-dotenv",
        "beast_logger": "beast-logger",
        "langchain_openai": "langchain-openai",
    }
    programs = (Path(__file__).parent / "agentjet").glob("*.py")
    found = {
        name
        for path in programs
        for name in re.findall(r"^(?:import|from) (\w+)", path.read_text(), re.M)
    }
    wanted = {name.partition(".")[0] for name in AGENTJET} | found - sys.stdlib_module_names - {
        "ajet"
    }
    assert {named.get(name, name) for name in wanted} <= has


# Import paths


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("ajet.workflow", "Workflow WorkflowTask WorkflowOutput"),
        ("ajet.tuner", "AjetTuner"),
        ("ajet.schema.task", "Task WorkflowTask WorkflowOutput"),
        ("ajet.task_judge.base_judge", "BaseJudge"),
        ("ajet.copilot.job", "AgentJetJob"),
        ("ajet", "Workflow WorkflowTask WorkflowOutput AjetTuner AgentJetJob Task"),
    ],
)
def test_a_path_gives_the_same_names(path: str, names: str) -> None:
    module = importlib.import_module(path)
    assert all(getattr(module, name) is getattr(ajet, name) for name in names.split())


def test_the_decorator_stays_an_attribute_and_the_path_a_module() -> None:
    from ajet.workflow import Workflow as theirs

    assert (
        theirs is Workflow
        and ajet.workflow is load_object("ajet->workflow")
        and callable(ajet.workflow)
    )
    assert importlib.util.find_spec("ajet.schema.task") is not None
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        importlib.import_module("ajet.utils.nothing")
    with pytest.raises(ImportError, match="Nothing"):
        exec("from ajet.schema.task import Nothing")


def test_judges_and_readers_by_their_paths() -> None:
    reader = load_object("ajet.task_reader.task_reader_base->BaseTaskReader")
    with pytest.raises(NotImplementedError, match="get_training_tasks"):
        reader(None).get_training_tasks()
    with pytest.raises(ConfigError, match="JSON lines with a question"):
        load_object("ajet.task_judge.rm_auto_grader_judge->AutoGraderJudge")(CONFIG)
    judge = load_object("ajet.task_judge.env_service_as_judge->EnvServiceJudge")(CONFIG)
    with pytest.raises(ConfigError, match="no environment"):
        judge.compute_reward(WorkflowTask(task=Task(main_query="q")), WorkflowOutput())

    class Env:
        def __init__(self, score: float) -> None:
            self.score = score

        def evaluate(self, uuid: str, params: dict[str, Any]) -> float:
            return self.score

    for score, reward in [(-1, -0.5), (0, 0.0), (0.5, 0.25), (0.999, 0.4995), (1, 1.5), (2, 2.0)]:
        task = WorkflowTask(task=Task(main_query="q"), gym_env=Env(score))
        assert judge.compute_reward(task, WorkflowOutput()) == (reward, score >= 1)


# The LLM function of judges


def test_the_llm_function_tries_each_key(monkeypatch: pytest.MonkeyPatch) -> None:
    create = load_object("ajet.task_rollout.dashscope_llm_bridge->create_external_llm_fn")
    asked: list[Any] = []

    def reply(path: str, headers: Mapping[str, str], body: Any) -> tuple[int, Any]:
        asked.append(body)
        if headers["authorization"] != "Bearer good":
            return 401, {"error": {"message": "no such key"}}
        return 200, {"choices": [{"index": 0, "message": {"role": "assistant", "content": "fine"}}]}

    with serving(replying(reply)) as url:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{url}/v1")
        monkeypatch.setenv("DASHSCOPE_API_KEY", "bad|worse")
        monkeypatch.setenv("DASHSCOPE_API_KEY_BACKUP", "good")
        ask = create("judge-model", 77)
        message = [{"role": "user", "content": "how good?"}]
        assert ask(message, sampling_params_override={"temperature": 0.5}) == {
            "role": "assistant",
            "content": "fine",
        }
        assert len(asked) == 3
        sent = asked[-1]
        assert (sent["model"], sent["temperature"], sent["max_completion_tokens"]) == (
            "judge-model",
            0.5,
            77,
        )
        with pytest.raises(EngineUnavailable, match="did not answer"):
            create("judge-model", 77, api_key="bad")(message)
    monkeypatch.delenv("DASHSCOPE_API_KEY")
    monkeypatch.delenv("DASHSCOPE_API_KEY_BACKUP")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="no API key"):
        create("judge-model", 77)


# AgentScope Tuner's functions


class TunerOutput(BaseModel):
    """The fields of AgentScope Tuner's `WorkflowOutput`."""

    reward: float | None = None
    response: Any | None = None
    metrics: dict[str, float] | None = None


class JudgeOutput(BaseModel):
    """The fields of its own."""

    reward: float
    metrics: dict[str, float] | None = None


async def of_row(task: dict[str, Any], logger: Any) -> TunerOutput:
    logger.info("asked")
    assert (
        task["question"] == task["problem"] == task["main_query"] == "6 x 7"
        and task["answer"] == "42"
    )
    with pytest.raises(KeyError):
        task["nothing"]
    return TunerOutput(response="42", metrics={"turns": 2})


async def judge_of_row(
    task: dict[str, Any], response: Any, auxiliary_models: dict[str, Any]
) -> JudgeOutput:
    assert auxiliary_models == {}
    return JudgeOutput(reward=float(response == task["answer"]), metrics={"length": len(response)})


def test_functions_of_agentscope_tuner_are_recognised() -> None:
    episode = run(of_row, judge_of_row)
    assert (episode.error, episode.reward, episode.metrics) == (
        None,
        1.0,
        {"turns": 2.0, "length": 2.0},
    )


def test_an_output_with_a_reward_skips_the_judge() -> None:
    async def rewarded(task: dict[str, Any]) -> TunerOutput:
        return TunerOutput(reward=0.25, metrics={"turns": 1})

    episode = run(rewarded, judge_of_row)
    assert (episode.error, episode.reward, episode.metrics) == (None, 0.25, {"turns": 1.0})


def test_without_agentscope_its_model_is_an_error_that_says_so() -> None:
    try:
        importlib.import_module("agentscope")
    except ImportError:
        pass
    else:
        pytest.skip("AgentScope is installed")

    async def with_model(
        task: dict[str, Any], model: Any, auxiliary_models: dict[str, Any]
    ) -> TunerOutput:
        raise AssertionError("called")

    assert run(with_model, judge_of_row).cause == "MissingExtra"
    with pytest.raises(MissingExtra):
        load_object("ajet.utils.robust_dashscope->RobustDashScopeChatModel")


# Other processes


def in_a_child(tuner: AjetTuner, send: Any) -> None:
    """What a child process does with a tuner: asks as two agents, reads the config and the
    tracker."""

    async def ask() -> list[str]:
        replies = []
        for agent in ("one", "two"):
            client = tuner.as_raw_openai_sdk_client(
                agent_name=agent, target_tag="trained", debug_model="other"
            )
            replies.append(await client.chat.completions.create([{"role": "user", "content": "?"}]))
        return [reply.choices[0].message.content for reply in replies]

    send.send(
        (asyncio.run(ask()), tuner.config.lake.size, tuner.get_context_tracker().context_overflow)
    )


class InChild(Workflow):
    method: str = "spawn"
    trainable_targets: list[str] | None = ["trained"]

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        context = multiprocessing.get_context(self.method)
        receive, send = context.Pipe(duplex=False)
        child = context.Process(target=in_a_child, args=(tuner, send))
        child.start()
        said = receive.recv()
        child.join()
        return WorkflowOutput(reward=1.0, metadata={"said": said})


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_tuner_goes_into_other_processes(method: str) -> None:
    episode = run(InChild(method=method))
    assert episode.error is None and episode.output["metadata"]["said"] == [["42", "42"], 4, False]
    assert [(call.agent, call.trainable, call.error) for call in episode.calls] == [
        ("one", True, None),
        ("two", True, None),
    ]


class InRay(Workflow):
    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        import ray

        @ray.remote(num_cpus=0)
        def ask(tuner: AjetTuner) -> Any:
            async def replies() -> list[str]:
                model = tuner.as_oai_baseurl_apikey("one", "trained")
                other = ajet.Model(model.base_url, model.api_key, model.model)
                return [str((await other.chat([{"role": "user", "content": "?"}])).content)]

            return asyncio.run(replies()), tuner.config.lake.size

        said = await asyncio.wrap_future(ask.remote(tuner).future())
        return WorkflowOutput(reward=1.0, metadata={"said": said})


@pytest.mark.slow
def test_a_tuner_goes_into_ray_processes() -> None:
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        episode = run(InRay)
    finally:
        ray.shutdown()
    assert episode.error is None and episode.output["metadata"]["said"] == [["42"], 4]
    assert [(call.agent, call.trainable) for call in episode.calls] == [("one", True)]
