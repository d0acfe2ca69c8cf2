"""AgentScope in its installed major version: the chat model, ReAct agents, pipelines, and
AgentScope Tuner's functions.

    just test-frameworks                     # each version in an environment of its own

The workflows of the first major version are those of `tests/sdk/agentjet`, in the manner of
programs for AgentJet.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import ajet
from ajet_sdk.config.config import load_config
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.judges.load import load_judge
from ajet_sdk.protocols import Ask
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.rollout.episode import run_batch
from ajet_sdk.types import Episode, Task
from tests.gateways import shared_gateway
from tests.serving import answering, serving

agentscope = pytest.importorskip("agentscope")
FIRST = agentscope.__version__.startswith("1.")
first, later = (
    pytest.mark.skipif(not FIRST, reason="AgentScope 1.x"),
    pytest.mark.skipif(FIRST, reason="2.x"),
)

HERE = Path(__file__).parents[1] / "sdk" / "agentjet"
QUESTION = Task(main_query="6 x 7", metadata={"answer": "42"})


def run(workflow: Any, reply: Any, task: Task, config: Any, judge: Any = None) -> Episode:
    async def main() -> list[Episode]:
        attempts = [Attempt(task, "run")]
        engine = ScriptedEngine(reply)
        return await run_batch(
            workflow, judge, attempts, engine=engine, gateway=shared_gateway(), config=config
        )

    [episode] = asyncio.run(main())
    return episode


def program(name: str, reply: Any, task: Task, judge: Any = None, **fields: Any) -> Episode:
    """One episode of a file's workflow, with its judge where none is given."""
    config = load_config(HERE / f"{name}.yaml")
    workflow = config.load(config.rollout.user_workflow or "")(**fields)
    return run(workflow, reply, task, config, judge or load_judge(config))


def calling(tool: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def right(output: Any) -> float:
    return float("42" in str(output.metadata["final_answer"]))


# Programs for AgentJet, which are written for 1.x


@first
def test_a_react_agent_with_tools_and_dashscopes_formatter() -> None:
    replies = [calling("execute_python_code", code="print(6 * 7)"), "It is \\boxed{42}."]
    episode = program("math_agent", replies, QUESTION)
    assert (episode.error, episode.reward, len(episode.calls)) == (None, 1.0, 2)
    asked = episode.calls[1].request["messages"]
    assert [message["role"] for message in asked] == ["system", "user", "assistant", "tool"]
    assert asked[1]["content"] == "6 x 7" and "42" in asked[3]["content"]
    assert all(call.trainable and call.prompt_ids is not None for call in episode.calls)


@first
def test_openais_formatter() -> None:
    task = Task(metadata={"target": 7, "nums": [3, 4]})
    episode = program("countdown", lambda ask: "3 + 4", task)
    assert (episode.error, episode.reward, len(episode.calls)) == (None, 1.0, 1)


FROZEN = {
    "model": "frozen",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Not me."}}],
}


@first
def test_many_agents_of_which_one_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(answering(FROZEN)) as url:
        monkeypatch.setenv("FROZEN_URL", f"{url}/v1")
        episode = program("werewolves", lambda ask: "I slept.", Task(metadata={"random_number": 5}))
    assert (episode.error, episode.reward) == (None, 1.0)
    trained = [call for call in episode.calls if call.trainable]
    assert len(trained) == 2 and {call.target_tag for call in trained} == {"werewolf"}
    assert {call.model for call in episode.calls if not call.trainable} == {"frozen"}


@first
def test_an_agent_with_structured_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def reply(ask: Ask) -> str:
        return calling("generate_response", name="Player1") if ask.tools else "I slept."

    with serving(answering(FROZEN)) as url:
        monkeypatch.setenv("FROZEN_URL", f"{url}/v1")
        task = Task(metadata={"random_number": 5})
        episode = program("werewolves", reply, task, structured=True)
    assert (episode.error, episode.reward) == (None, 1.0)
    assert "required" in [
        call.request.get("tool_choice") for call in episode.calls if call.trainable
    ]


@first
def test_the_model_takes_parts_without_a_type() -> None:
    episode = program("rubrics", lambda ask: "42", QUESTION, judge=right)
    assert (episode.error, episode.reward) == (None, 1.0)
    assert episode.calls[0].request["messages"] == [{"role": "user", "content": "6 x 7"}]


@first
def test_a_debug_model_stands_where_a_target_is_not_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DASHSCOPE_API_KEY", "one|two")
    episode = program("feedback", lambda ask: "\\boxed{42}", QUESTION)
    assert (episode.error, episode.reward, len(episode.calls)) == (None, 1.0, 1)


@first
def test_the_robust_model_asks_with_each_key(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentscope.model import ChatResponse, DashScopeChatModel

    from ajet.utils.robust_dashscope import RobustDashScopeChatModel

    keys = []

    async def answer(self: Any, messages: Any, **_: Any) -> ChatResponse:
        keys.append(self.api_key)
        if self.api_key != "backup":
            raise ConnectionError("no such key")
        return ChatResponse(content=[{"type": "text", "text": "fine"}])

    monkeypatch.setattr(DashScopeChatModel, "__call__", answer)  # the network's end
    monkeypatch.setenv("DASHSCOPE_API_KEY", "one")
    monkeypatch.setenv("DASHSCOPE_API_KEY_BACKUP", "backup")
    assert asyncio.run(RobustDashScopeChatModel()([])).content[0]["text"] == "fine"
    with pytest.raises(ConnectionError):
        asyncio.run(RobustDashScopeChatModel(max_try=1)([]))
    assert keys == ["one", "backup", "one"]


# Both


class React(ajet.Workflow):
    """A ReAct agent of the installed version."""

    async def execute(
        self, workflow_task: ajet.WorkflowTask, tuner: ajet.AjetTuner
    ) -> ajet.WorkflowOutput:
        model = tuner.as_agentscope_model("solver", "solver")
        if FIRST:
            from agentscope.agent import ReActAgent
            from agentscope.formatter import OpenAIChatFormatter
            from agentscope.message import Msg

            agent = ReActAgent("solver", "Be brief.", model=model, formatter=OpenAIChatFormatter())
            reply = await agent.reply(Msg("user", workflow_task.task.main_query, role="user"))
        else:
            from agentscope.agent import Agent
            from agentscope.message import UserMsg

            agent = Agent(name="solver", system_prompt="Be brief.", model=model)
            reply = await agent.reply(UserMsg("user", workflow_task.task.main_query))
        return ajet.WorkflowOutput(metadata={"final_answer": reply.get_text_content()})


def test_a_react_agent_of_this_version() -> None:
    episode = run(React, lambda ask: "42", QUESTION, load_config(), right)
    assert (episode.error, episode.reward) == (None, 1.0)
    assert {(call.agent, call.trainable) for call in episode.calls} == {("solver", True)}
    assert all(call.output_ids is not None for call in episode.calls)


def test_functions_of_agentscope_tuner(monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = pytest.importorskip("agentscope.tuner")
    from agentscope.agent import ReActAgent
    from agentscope.formatter import OpenAIChatFormatter
    from agentscope.message import Msg
    from agentscope.model import OpenAIChatModel

    async def workflow(
        task: dict, model: OpenAIChatModel, auxiliary_models: dict
    ) -> tuner.WorkflowOutput:
        agent = ReActAgent("solver", "Be brief.", model=model, formatter=OpenAIChatFormatter())
        reply = await agent.reply(Msg("user", task["question"], role="user"))
        return tuner.WorkflowOutput(response=reply, metrics={"turns": 1})

    async def judge(task: dict, response: Msg, auxiliary_models: dict) -> tuner.JudgeOutput:
        said = await auxiliary_models["grader"]([{"role": "user", "content": "Is it right?"}])
        assert said.content[0]["text"] == "Not me."
        return tuner.JudgeOutput(
            reward=float(task["answer"] in response.get_text_content()), metrics={"asked": 1}
        )

    with serving(answering(FROZEN)) as url:
        given = {
            "model": {"base_url": f"{url}/v1"},
            "rollout": {"auxiliary_models": {"grader": "frozen"}},
        }
        episode = run(
            workflow, lambda ask: "42", QUESTION, load_config(values={"ajet": given}), judge
        )
    assert (episode.error, episode.reward, episode.metrics) == (
        None,
        1.0,
        {"turns": 1.0, "asked": 1.0},
    )
    assert [(call.phase, call.trainable, call.model) for call in episode.calls] == [
        ("rollout", True, "scripted"),
        ("judge", False, "frozen"),
    ]


def test_a_message_may_be_what_a_function_of_agentscope_tuner_returns() -> None:
    async def workflow(task: dict, model: Any, auxiliary_models: dict) -> Any:
        assert auxiliary_models == {}
        if FIRST:
            from agentscope.message import Msg

            return Msg("solver", "42", role="assistant")
        from agentscope.message import AssistantMsg

        return AssistantMsg("solver", "42")

    def judge(task: dict, response: Any) -> float:
        return float(response.get_text_content() == task["answer"])

    episode = run(workflow, lambda ask: "42", QUESTION, load_config(), judge)
    assert (episode.error, episode.reward) == (None, 1.0)
    episode.model_dump_json()
