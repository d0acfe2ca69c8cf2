"""Workflows in the manner of programs for AgentJet, with AgentScope 1.x."""

import os
import random
from typing import Any

from agentscope.agent import AgentBase, ReActAgent
from agentscope.formatter import (
    DashScopeChatFormatter,
    DashScopeMultiAgentFormatter,
    OpenAIChatFormatter,
    OpenAIMultiAgentFormatter,
)
from agentscope.memory import InMemoryMemory
from agentscope.message import Msg
from agentscope.model import ChatResponse, DashScopeChatModel, OpenAIChatModel
from agentscope.pipeline import MsgHub, fanout_pipeline, sequential_pipeline
from agentscope.tool import Toolkit, execute_python_code
from pydantic import BaseModel, Field

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask
from ajet.utils.robust_dashscope import RobustDashScopeChatModel


def text_of(reply: Msg) -> str:
    return str(reply.get_text_content())


class MathAgent(Workflow):
    name: str = "math_agent_workflow"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        self.toolkit = Toolkit()
        self.toolkit.register_tool_function(execute_python_code)
        self.agent = ReActAgent(
            name="math_react_agent",
            sys_prompt="Solve it with Python. Put the answer in \\boxed{}.",
            model=tuner.as_agentscope_model(),
            formatter=DashScopeChatFormatter(),
            toolkit=self.toolkit,
            memory=InMemoryMemory(),
            max_iters=3,
        )
        self.agent.set_console_output_enabled(False)
        reply = await self.agent.reply(Msg("user", workflow_task.task.main_query, role="user"))
        return WorkflowOutput(reward=None, metadata={"final_answer": text_of(reply)})


class Countdown(Workflow):
    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        target, nums = (workflow_task.task.metadata[name] for name in ("target", "nums"))
        agent = ReActAgent(
            name="countdown",
            sys_prompt="Write one equation.",
            model=tuner.as_agentscope_model(),
            formatter=OpenAIChatFormatter(),
            max_iters=2,
        )
        agent.set_console_output_enabled(False)
        reply = await agent.reply(Msg("user", f"Make {target} of {nums}.", role="user"))
        metadata = {"final_answer": text_of(reply), "target": target, "nums": nums}
        return WorkflowOutput(reward=None, metadata=metadata)


class Observer(AgentBase):
    """An agent without a model: it hears what is said."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    async def observe(self, msg: Msg | list[Msg] | None) -> None:
        self.heard += [
            text_of(one) for one in (msg if isinstance(msg, list) else [msg]) if one is not None
        ]

    async def reply(self, msg: Msg | None = None) -> Msg:
        return Msg("moderator", f"{len(self.heard)} were heard", role="assistant")


class Vote(BaseModel):
    """Who is voted out."""

    name: str = Field(description="A player's name.")


class Werewolves(Workflow):
    trainable_targets: list[str] | None = Field(
        default=["werewolf"], description="Roles to be trained."
    )
    structured: bool = False

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        assert self.trainable_targets is not None
        roles = ["werewolf", "villager", "seer"]
        random.Random(workflow_task.task.metadata["random_number"]).shuffle(roles)
        players = []
        for i, role in enumerate(roles):
            frozen = OpenAIChatModel(
                model_name="frozen",
                api_key="none",
                stream=False,
                client_kwargs={"base_url": os.environ["FROZEN_URL"]},
            )
            model = tuner.as_agentscope_model(
                agent_name=f"Player{i + 1}", target_tag=role, debug_model=frozen
            )
            trained = role in self.trainable_targets
            player = ReActAgent(
                name=f"Player{i + 1}",
                sys_prompt=f"You are a {role}.",
                model=model,
                formatter=(
                    DashScopeMultiAgentFormatter() if trained else OpenAIMultiAgentFormatter()
                ),
                max_iters=3 if trained else 5,
            )
            player.set_console_output_enabled(False)
            players.append(player)
        moderator = Observer()
        async with MsgHub(
            [*players, moderator], announcement=Msg("moderator", "It is day.", role="assistant")
        ):
            await sequential_pipeline(players)
        again = await fanout_pipeline(
            players, Msg("moderator", "Vote.", role="assistant"), enable_gather=False
        )
        if self.structured:
            wolves = [
                player
                for player, role in zip(players, roles, strict=True)
                if role in self.trainable_targets
            ]
            votes = [await wolf.reply(structured_model=Vote) for wolf in wolves]
            assert [vote.metadata["name"] for vote in votes] == ["Player1"]
        won = len(moderator.heard) > len(players) and len(again) == len(players)
        return WorkflowOutput(reward=float(won), is_success=won)


class Answer(Workflow):
    """The model itself, without an agent."""

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        messages: list[Any] = [
            {"role": "user", "content": [{"text": workflow_task.task.main_query}]}
        ]
        response = await tuner.as_agentscope_model()(messages)
        assert isinstance(response, ChatResponse)
        return WorkflowOutput(reward=None, metadata={"final_answer": response.content[0]["text"]})


class Robust(Workflow):
    """A target outside of the trained ones is answered by the debug model that is given."""

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        fallback = RobustDashScopeChatModel("qwen-max", max_try=2)
        assert isinstance(fallback, DashScopeChatModel)
        self.trainable_targets = ["solver"]
        assert tuner.as_agentscope_model("critic", "critic", fallback) is fallback
        model = tuner.as_agentscope_model("solver", "solver", fallback)
        response = await model([{"role": "user", "content": workflow_task.task.main_query}])
        return WorkflowOutput(reward=None, metadata={"final_answer": response.content[0]["text"]})
