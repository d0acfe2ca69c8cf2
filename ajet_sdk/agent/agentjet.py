"""Names that programs for AgentJet import besides the class API; `ajet` maps their import paths to
this module."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from ajet_sdk.agent.agentscope import dashscope_keys
from ajet_sdk.agent.workflow import BaseJudge, WorkflowOutput, WorkflowTask
from ajet_sdk.config.api_keys import api_key as user_key
from ajet_sdk.config.objects import load_object
from ajet_sdk.engines.reply_schema import read_reply
from ajet_sdk.errors import ConfigError, EngineUnavailable
from ajet_sdk.types import JsonView, Task

_DASHSCOPE = "https://dashscope.aliyuncs.com/compatible-mode/v1"

dynamic_import = load_object


class EnvServiceJudge(BaseJudge):
    """Rewards the environment's score as AgentJet does: 1 + score / 2 for a success (score >= 1),
    else score / 2."""

    def compute_reward(
        self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput
    ) -> tuple[float, bool]:
        """Raises ConfigError without an environment, EnvironmentUnavailable without a score."""
        if workflow_task.gym_env is None:
            raise ConfigError(
                f"task {workflow_task.task_id} has no environment to score it; set"
                " task_reader.env_service.env_url"
            )
        score = float(
            workflow_task.gym_env.evaluate(workflow_task.episode_uuid, params={"sparse": False})
        )
        success = score >= 1
        return success + score / 2, success


class BaseTaskReader:
    """Base class of task readers; a subclass implements both methods."""

    def __init__(self, reader_config: Any = None) -> None:
        self.reader_config = reader_config

    def get_training_tasks(self) -> list[Task]:
        """Return the training tasks."""
        raise NotImplementedError(f"{type(self).__name__} has no `get_training_tasks`")

    def get_validation_tasks(self) -> list[Task]:
        """Return the validation tasks."""
        raise NotImplementedError(f"{type(self).__name__} has no `get_validation_tasks`")


def create_external_llm_fn(
    alien_llm_model: str,
    alien_llm_response_length: int,
    *,
    base_url: str | None = None,
    api_key: str | None = None,
) -> Callable[..., dict[str, str]]:
    """Return a blocking function from messages to the reply's message, for judges.

    The endpoint defaults to OPENAI_BASE_URL, else DashScope. The keys default to those of
    DASHSCOPE_API_KEY and DASHSCOPE_API_KEY_BACKUP (separated by `|`), else OPENAI_API_KEY. The
    function raises EngineUnavailable if the request fails with every key. Raises ConfigError
    without a key.
    """
    if api_key:
        keys = [api_key]
    else:
        keys = dashscope_keys() or [key for key in [user_key("OPENAI_API_KEY")] if key]
    if not keys:
        raise ConfigError(
            f"no API key for {alien_llm_model}: set DASHSCOPE_API_KEY or OPENAI_API_KEY, or pass"
            " api_key="
        )
    url = base_url or os.environ.get("OPENAI_BASE_URL") or _DASHSCOPE

    def ask(
        messages: Sequence[JsonView],
        sampling_params_override: JsonView | None = None,
        request_id: str = "",
    ) -> dict[str, str]:
        import openai

        sampling = {"temperature": 0.0, "max_completion_tokens": alien_llm_response_length}
        body = {**sampling, **(sampling_params_override or {})}
        failed: Exception | None = None
        for key in keys:
            try:
                with openai.OpenAI(api_key=key, base_url=url) as client:
                    copies: Any = [dict(message) for message in messages]
                    reply = client.chat.completions.create(
                        model=alien_llm_model, messages=copies, extra_body=body
                    )
                read_reply(reply.model_dump(exclude_unset=True), "chat/completions", url)
                return {"role": "assistant", "content": reply.choices[0].message.content or ""}
            except openai.OpenAIError as error:
                failed = error
        raise EngineUnavailable(f"{alien_llm_model} at {url} did not answer: {failed}") from failed

    return ask
