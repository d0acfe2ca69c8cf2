"""The class API: programs written for AgentJet run unchanged, and mix with decorated functions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import Field

import ajet
from ajet_sdk.agent.workflow import (
    AjetTuner,
    BaseJudge,
    Workflow,
    WorkflowOutput,
    WorkflowTask,
    check_signature,
)
from ajet_sdk.config.config import load_config
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.errors import ContextOverflow, SignatureError
from ajet_sdk.gateway.episode import EpisodeSpec, OpenEpisode
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.rollout.episode import run_batch
from ajet_sdk.types import Episode, Reward, Task
from tests.gateways import shared_gateway

CONFIG = load_config(
    values={"ajet": {"rollout": {"timeout": 20, "judge_timeout": 20}}, "lake": {"size": 4}}
)


def episodes(
    workflow: Any, judge: Any = None, *, n: int = 1, engine: Any = None, config: Any = CONFIG
) -> list[Episode]:
    tasks = [
        Task(main_query=f"q{i}", metadata={"answer": "42", "random_number": i}) for i in range(n)
    ]

    async def main() -> list[Episode]:
        attempts = [Attempt(task, "run", attempt=3, step=5) for task in tasks]
        engine_ = engine or ScriptedEngine(lambda ask: "42")
        return await run_batch(
            workflow, judge, attempts, engine=engine_, gateway=shared_gateway(), config=CONFIG
        )

    return asyncio.run(main())


class Raw(Workflow):
    name: str = "raw"
    flavour: str = Field(default="plain")

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        self.seen = workflow_task.task.main_query
        client = tuner.as_raw_openai_sdk_client()
        reply = await client.chat.completions.create(
            workflow_task.task.init_messages, tools=[], tool_choice="auto"
        )
        await asyncio.sleep(0.02)
        return WorkflowOutput(
            metadata={"final_answer": reply.choices[0].message.content, "seen": self.seen},
            log_metrics={"turns": 1, "flag": True, "note": "text", "bad": float("nan")},
        )


class Exact(BaseJudge):
    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
        assert self.config is CONFIG or self.config is None
        right = workflow_output.metadata["final_answer"] == workflow_task.task.metadata["answer"]
        return float(right), right


@pytest.mark.parametrize("judge", [Exact, Exact(CONFIG)])
def test_a_class_workflow_with_a_class_judge(judge: Any) -> None:
    found = episodes(Raw, judge, n=4)
    assert [(e.status, e.reward, e.is_success) for e in found] == [("succeeded", 1.0, True)] * 4
    assert [e.output["metadata"]["seen"] for e in found] == [
        "q0",
        "q1",
        "q2",
        "q3",
    ]  # an instance each
    assert found[0].metrics == {"turns": 1.0, "flag": 1.0}
    [call] = found[0].calls
    assert (call.agent, call.target_tag, call.trainable) == (
        "default_agent_name",
        "default_target_tag",
        True,
    )
    assert "tools" not in call.request and call.request["messages"] == [
        {"role": "user", "content": "q0"}
    ]


def test_classes_and_functions_mix() -> None:
    @ajet.judge
    def judge(output: WorkflowOutput, answer: str) -> float:
        return float(output.metadata["final_answer"] == answer)

    @ajet.workflow
    async def solve(question: str, model: Any) -> str:
        return str((await model.chat([{"role": "user", "content": question}])).content)

    assert episodes(Raw, judge)[0].reward == 1.0
    assert episodes(solve, Exact)[0].reward == 1.0
    found = episodes(Raw(flavour="instance"), judge, n=4)
    assert [e.output["metadata"]["seen"] for e in found] == ["q0", "q1", "q2", "q3"]  # a copy each


def test_what_a_workflow_task_holds() -> None:
    class Look(Workflow):
        async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
            found = workflow_task
            assert (found.task_thread_index, found.task_batch_index, found.task_tag) == (
                3,
                5,
                "train",
            )
            assert (
                found.task_id == found.task.task_id and found.episode_uuid and found.gym_env is None
            )
            assert found.tokenizer.encode("a") == [97]
            assert tuner.config.lake.size == 4 and tuner.config.ajet.rollout.num_repeat == 4
            assert tuner.get_context_tracker().context_overflow is False
            return WorkflowOutput(reward=1, is_success=True)

    [episode] = episodes(Look)
    assert (episode.error, episode.reward, episode.is_success) == (None, 1.0, True)


def test_a_reward_of_the_class_skips_the_judge() -> None:
    class Own(Workflow):
        async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
            return WorkflowOutput(reward=[0.25, 0.5], is_success=False)

    class Never(BaseJudge):
        def compute_reward(
            self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput
        ) -> Any:
            raise AssertionError("asked")

    [episode] = episodes(Own, Never)
    assert (episode.reward, episode.is_success, len(episode.rewards)) == (0.75, False, 2)


def test_blocking_http_with_base_url_and_key() -> None:
    class Blocking(Workflow):
        async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
            access = tuner.as_oai_baseurl_apikey(agent_name="me", target_tag="tag")
            reply = httpx.post(
                f"{access.base_url}/chat/completions",
                headers={"Authorization": f"Bearer {access.api_key}"},
                json={"model": access.model, "messages": workflow_task.task.init_messages},
            )
            return WorkflowOutput(reward=float(reply.json()["choices"][0]["message"]["content"]))

    found = episodes(Blocking, n=3)
    assert [e.reward for e in found] == [42.0] * 3
    assert {(c.agent, c.target_tag) for e in found for c in e.calls} == {("me", "tag")}


def test_an_agentscope_model_is_a_real_one() -> None:
    agentscope = pytest.importorskip("agentscope.model")
    from agentscope.message import UserMsg

    class Scope(Workflow):
        async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
            model = tuner.as_agentscope_model(agent_name="Friday", target_tag="Agent_Type_1")
            assert type(model) is agentscope.OpenAIChatModel
            reply = await model([UserMsg(name="user", content=workflow_task.task.main_query)])
            return WorkflowOutput(metadata={"final_answer": reply.content[0].text})

    found = episodes(Scope, Exact, n=2)
    assert [(e.error, e.reward) for e in found] == [(None, 1.0)] * 2
    assert found[0].calls[0].agent == "Friday" and found[0].calls[0].trainable


def test_an_agentscope_agent_with_a_tool() -> None:
    pytest.importorskip("agentscope.agent")
    from agentscope.agent import Agent, InjectionConfig
    from agentscope.message import TextBlock, UserMsg
    from agentscope.permission import PermissionBehavior, PermissionDecision
    from agentscope.tool import FunctionTool, ToolChunk, Toolkit

    async def add(a: int, b: int) -> ToolChunk:
        """Add two numbers.

        Args:
            a: one
            b: the other
        """
        return ToolChunk(content=[TextBlock(text=str(a + b))])

    class Adder(FunctionTool):
        async def check_permissions(self, *args: Any, **kwargs: Any) -> PermissionDecision:
            return PermissionDecision(behavior=PermissionBehavior.ALLOW, message="")

    def replies(ask: Any) -> Any:
        if ask.body["messages"][-1]["role"] == "tool":
            return ask.body["messages"][-1]["content"]
        call = {
            "type": "function",
            "function": {"name": "add", "arguments": '{"a": 40, "b": 2}'},
            "id": "c1",
        }
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    class Scope(Workflow):
        async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
            agent = Agent(
                name="Friday",
                system_prompt="Use the tool.",
                model=tuner.as_agentscope_model(),
                toolkit=Toolkit(tools=[Adder(add)]),
                injection_config=InjectionConfig(inject_runtime_state=False),
            )
            reply = await agent.reply(UserMsg(name="user", content=workflow_task.task.main_query))
            return WorkflowOutput(metadata={"final_answer": reply.get_text_content()})

    [episode] = episodes(Scope, Exact, engine=ScriptedEngine(replies))
    assert (episode.error, episode.reward, len(episode.calls)) == (None, 1.0, 2)


class Werewolves(Workflow):
    trainable_targets: list[str] | None = Field(
        default=["werewolf"], description="List of agents to be fine-tuned."
    )
    debug: Any = None

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        for index, role in enumerate(["werewolf", "villager"]):
            client = tuner.as_raw_openai_sdk_client(f"Player{index}", role, debug_model=self.debug)
            await client.chat.completions.create([{"role": "user", "content": role}])
        return WorkflowOutput(reward=1)


def test_outside_of_the_targets_without_a_debug_model_is_an_error() -> None:
    [episode] = episodes(Werewolves)
    assert (episode.status, episode.cause) == ("failed", "ConfigError")
    assert "'villager'" in (episode.error or "") and "werewolf" in (episode.error or "")


def test_a_debug_model_by_name_needs_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    [episode] = episodes(Werewolves(debug="gpt-4o"))
    assert episode.cause == "ConfigError" and "OPENAI_BASE_URL" in (episode.error or "")


@pytest.fixture
def debug_endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenEpisode]:
    """Another gateway's policy: a real server for debug models that are given by name."""
    with Gateway() as other:
        opened = other.open(
            EpisodeSpec("other", ScriptedEngine(lambda ask: "from the debug model"))
        )
        monkeypatch.setenv("OPENAI_BASE_URL", opened.model().base_url)
        monkeypatch.setenv("OPENAI_API_KEY", opened.model().api_key)
        yield opened


def test_a_debug_model_by_name_answers_and_is_not_trained(debug_endpoint: OpenEpisode) -> None:
    [episode] = episodes(Werewolves(debug="gpt-4o"))
    assert (episode.error, episode.reward) == (None, 1.0)
    assert [(c.target_tag, c.trainable) for c in episode.calls] == [
        ("werewolf", True),
        ("villager", False),
    ]
    assert episode.calls[1].response["choices"][0]["message"]["content"] == "from the debug model"
    assert debug_endpoint.calls[0].request["model"] == "gpt-4o"


def test_a_debug_model_that_is_an_object_is_returned_as_it_is() -> None:
    tuner = AjetTuner(
        CONFIG,
        ajet.Model("http://h/episodes/e/default/v1", "k", "m"),
        lambda: ["a"],
        bool,
        lambda name: None,
    )
    mine = object()
    assert tuner.as_agentscope_model("x", "b", debug_model=mine) is mine
    assert tuner.as_raw_openai_sdk_client("x", "b", debug_model=mine) is mine


def test_targets_may_change_while_the_workflow_runs() -> None:
    class Switch(Workflow):
        async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
            self.trainable_targets = ["seer"]
            tuner.as_oai_baseurl_apikey("a", "seer")
            self.trainable_targets = []
            tuner.as_oai_baseurl_apikey("a", "seer")
            return WorkflowOutput(reward=1)

    [episode] = episodes(Switch)
    assert "trainable_targets=[]" in (episode.error or "") and episode.cause == "ConfigError"


def test_targets_that_are_set_while_the_workflow_runs_hold(debug_endpoint: OpenEpisode) -> None:
    class Late(Workflow):
        trainable_targets: list[str] | None = ["nobody yet"]

        async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
            self.trainable_targets = [workflow_task.task.metadata["answer"]]
            for tag in ("42", "seer"):
                client = tuner.as_raw_openai_sdk_client(tag, tag, debug_model="gpt-4o")
                await client.chat.completions.create([{"role": "user", "content": tag}])
            return WorkflowOutput(reward=1)

    [episode] = episodes(Late)
    assert episode.error is None
    assert [(c.target_tag, c.trainable) for c in episode.calls] == [("42", True), ("seer", False)]
    assert episode.calls[1].response["choices"][0]["message"]["content"] == "from the debug model"


def test_a_handle_outside_of_the_targets_is_answered_by_its_debug_model(
    debug_endpoint: OpenEpisode,
) -> None:
    @ajet.workflow(trainable_targets=["wolf"])
    async def play(question: str, model: Any) -> Reward:
        said = await model.agent("b", target_tag="seer", debug_model="gpt-4o").chat(
            [{"role": "user", "content": "x"}]
        )
        return Reward(value=said["content"] == "from the debug model")

    [episode] = episodes(play)
    assert (episode.error, episode.reward) == (None, 1.0)
    assert [call.trainable for call in episode.calls] == [False]


def test_empty_targets_and_a_missing_execute_fail_before_the_first_episode() -> None:
    class Empty(Workflow):
        trainable_targets: list[str] | None = []

        async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
            return WorkflowOutput(reward=1)

    class Nothing(Workflow): ...

    with pytest.raises(SignatureError, match=r"trainable_targets=\[\]"):
        check_signature(Empty, None, Task(main_query="q"), CONFIG)
    with pytest.raises(SignatureError, match="no `execute"):
        check_signature(Nothing, None, Task(main_query="q"), CONFIG)
    check_signature(Raw, Exact, Task(main_query="q"), CONFIG)


def test_functions_are_checked_before_the_first_episode() -> None:
    @ajet.workflow
    def solve(question: str, env: Any) -> str:
        return question

    service = load_config(
        values={"task_reader": {"env_service": {"env_url": "http://127.0.0.1:8080"}}}
    )
    check_signature(solve, None, Task(main_query="q", env_type="lake"), service)
    with pytest.raises(SignatureError, match="`env`"):
        check_signature(
            solve, None, Task(main_query="q"), service
        )  # a task without an environment among others
    with pytest.raises(SignatureError, match="`env`"):
        check_signature(solve, None, Task(main_query="q", metadata={"question": "q"}), CONFIG)


def test_decorated_targets_hold_for_handles() -> None:
    @ajet.workflow(trainable_targets=["wolf"])
    async def play(question: str, model: Any) -> Reward:
        await model.agent("a", target_tag="wolf").chat([{"role": "user", "content": question}])
        with pytest.raises(Exception, match="not a trainable target"):
            await model.agent("b", target_tag="seer").chat([{"role": "user", "content": question}])
        return Reward(value=1)

    [episode] = episodes(play)
    assert (episode.status, episode.cause) == ("failed", "ConfigError")


def test_a_context_overflow_is_seen_by_the_tracker() -> None:
    class Full(ScriptedEngine):
        async def answer(self, ask: Any) -> Any:
            raise ContextOverflow("prompt of 9 tokens does not fit 8")

    class Careful(Workflow):
        async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
            try:
                await tuner.as_raw_openai_sdk_client().chat.completions.create(
                    workflow_task.task.init_messages
                )
            except Exception:
                if not tuner.get_context_tracker().context_overflow:
                    raise
            return WorkflowOutput(reward=-1)

    [episode] = episodes(Careful, engine=Full(lambda ask: ""))
    assert (episode.status, episode.reward) == ("succeeded", -1.0)


def test_old_import_paths() -> None:
    from ajet.schema.task import Task as OldTask  # type: ignore[import-not-found]
    from ajet.task_judge.base_judge import BaseJudge as OldJudge  # type: ignore[import-not-found]
    from ajet.workflow import Workflow as OldWorkflow  # type: ignore[import-not-found]

    assert (OldTask, OldJudge, OldWorkflow) == (Task, BaseJudge, Workflow)
