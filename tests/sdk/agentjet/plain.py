"""Workflows in the manner of programs for AgentJet, over the OpenAI client, plain HTTP, and an
environment service."""

import random
from typing import Any

import requests
from pydantic import Field

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask
from ajet.schema.task import Task
from ajet.task_reader.task_reader_base import BaseTaskReader
from ajet.task_rollout.dashscope_llm_bridge import create_external_llm_fn

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiply two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]


class MathOpenAI(Workflow):
    name: str = "math_openai"
    system_prompt: str = Field(default="Answer in \\boxed{}.")

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        self.client = tuner.as_raw_openai_sdk_client()
        self.messages: list[Any] = [
            {"role": "system", "content": self.system_prompt},
            {"role": "user", "content": workflow_task.task.main_query},
        ]
        reply = await self.client.chat.completions.create(
            self.messages, tools=TOOLS, tool_choice="auto"
        )
        message = reply.choices[0].message
        if message.tool_calls:
            self.messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                self.messages.append({"role": "tool", "tool_call_id": call.id, "content": "42"})
            reply = await self.client.chat.completions.create(messages=self.messages, tools=TOOLS)
        return WorkflowOutput(
            reward=None, metadata={"final_answer": reply.choices[0].message.content}
        )


class MathHTTP(Workflow):
    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        access = tuner.as_oai_baseurl_apikey()
        reply = requests.post(
            f"{access.base_url}/chat/completions",
            headers={"Authorization": f"Bearer {access.api_key}"},
            json={
                "model": access.model,
                "messages": [{"role": "user", "content": workflow_task.task.main_query}],
            },
            timeout=600,
        ).json()
        return WorkflowOutput(
            reward=None, metadata={"final_answer": reply["choices"][0]["message"]["content"]}
        )


class FrozenLake(Workflow):
    """A walk over a board that the task's number makes."""

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        lake = tuner.config.frozen_lake
        board = random.Random(workflow_task.task.metadata["random_number"])
        goal = board.randrange(2, lake.frozen_lake_size)
        client = tuner.as_raw_openai_sdk_client(agent_name="walker", target_tag="walker")
        messages: list[Any] = [
            {"role": "system", "content": f"Walk {goal} steps to the right. Say Right or Stop."}
        ]
        at = 0
        for _ in range(tuner.config.ajet.rollout.multi_turn.max_steps):
            messages.append({"role": "user", "content": f"You are at {at}."})
            reply = (await client.chat.completions.create(messages)).choices[0].message.content
            messages.append({"role": "assistant", "content": reply})
            if tuner.get_context_tracker().context_overflow or "Right" not in reply:
                break
            at += 1
            if at == goal:
                break
        return WorkflowOutput(
            reward=float(at == goal),
            is_success=at == goal,
            log_metrics={"steps": len(messages) // 2},
        )


class LearnToAsk(Workflow):
    """An agent whose answer another model grades, inside the workflow."""

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        judge = tuner.config.ajet.task_judge
        grade = create_external_llm_fn(judge.alien_llm_model, judge.alien_llm_response_length)
        client = tuner.as_raw_openai_sdk_client()
        reply = await client.chat.completions.create(workflow_task.task.init_messages)
        asked = reply.choices[0].message.content
        said = grade(messages=[{"role": "user", "content": f"Score this question: {asked}"}])
        return WorkflowOutput(reward=float(said["content"]), metadata={"asked": asked})


class AppWorld(Workflow):
    """Code against an environment service, until it says that the task is over."""

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        env = workflow_task.gym_env
        client = tuner.as_raw_openai_sdk_client()
        messages: list[Any] = list(workflow_task.task.init_messages)
        for _ in range(tuner.config.ajet.rollout.multi_turn.max_steps):
            reply = (await client.chat.completions.create(messages)).choices[0].message.content
            observation, _, over, _ = env.step(action={"content": reply, "role": "assistant"})
            messages += [
                {"role": "assistant", "content": reply},
                {"role": "user", "content": observation},
            ]
            if over:
                break
        return WorkflowOutput(reward=None, metadata={"service": env.service_url})


class Numbers(BaseTaskReader):
    """Tasks from a range."""

    def get_training_tasks(self) -> list[Task]:
        return [Task(main_query=f"{n} x 7", init_messages=[], env_type="no_env") for n in range(3)]

    def get_validation_tasks(self) -> list[Task]:
        return [Task(main_query="9 x 7")]
