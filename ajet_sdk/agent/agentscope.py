"""Adapts AgentScope: chat models over a `Model`, for the installed major version, and AgentScope
Tuner's signatures.

AgentScope Tuner calls `workflow_func(task, model, auxiliary_models)` and
`judge_func(task, response, auxiliary_models)`. `task` is the dataset row as a dict, the models are
AgentScope chat models, and the output has `reward`, `response` and `metrics`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Container, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from ajet_sdk.agent.model import Model
from ajet_sdk.errors import ConfigError, MissingExtra
from ajet_sdk.tasks.row_names import QUERY_COLUMNS
from ajet_sdk.types import Task

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config


def chat_model(model: Model, *, context_size: int) -> Any:
    """Return an AgentScope `OpenAIChatModel` for `model`, without streaming and retries. Raises
    MissingExtra."""
    # No retries: the gateway retries itself, and each retry here would be recorded as a call.
    if _major() >= 2:
        from agentscope.credential import OpenAICredential
        from agentscope.model import OpenAIChatModel

        return OpenAIChatModel(
            credential=OpenAICredential(api_key=model.api_key, base_url=model.base_url),
            model=model.name,
            stream=False,
            max_retries=0,
            context_size=context_size,
            client_kwargs={"timeout": model.timeout},
        )
    return _first_major()(
        model_name=model.name,
        api_key=model.api_key,
        stream=False,
        client_kwargs={"base_url": model.base_url, "timeout": model.timeout, "max_retries": 0},
    )


def _major() -> int:
    try:
        return int(version("agentscope").partition(".")[0])
    except PackageNotFoundError as error:
        raise MissingExtra("agentscope", "agentscope") from error


def _first_major() -> Any:
    """The 1.x class, extended to accept messages from DashScope's formatters, which programs for
    AgentJet use."""
    from agentscope.model import OpenAIChatModel

    class PolicyChatModel(OpenAIChatModel):  # type: ignore[misc]
        async def __call__(
            self, messages: list[dict[str, object]], *args: object, **kwargs: object
        ) -> Any:
            return await super().__call__(
                [_openai_form(message) for message in messages], *args, **kwargs
            )

    return PolicyChatModel


def _openai_form(message: dict[str, object]) -> dict[str, object]:
    """Convert a DashScope message, whose parts have no type (`{"text": …}`, `{"image": …}`), to
    OpenAI's format."""
    parts = message.get("content")
    if not isinstance(parts, list) or all(
        isinstance(part, dict) and "type" in part for part in parts if part
    ):
        return message if parts != [] else {**message, "content": None}
    parts = [part for part in parts if part != {"text": None}]
    if all("text" in part for part in parts):
        return {**message, "content": "\n".join(part["text"] for part in parts) or None}
    return {**message, "content": [_openai_part(part) for part in parts]}


def _openai_part(part: dict[str, object]) -> dict[str, object]:
    if "type" in part:
        return part
    if "image" in part:
        return {"type": "image_url", "image_url": {"url": part["image"]}}
    return {"type": "text", **part}


class TaskRow(dict[str, Any]):
    """A task as a dataset row: its metadata, and the question under every usual column name."""

    def __init__(self, task: Task) -> None:
        super().__init__({**task.metadata, "main_query": task.main_query, "task_id": task.task_id})

    def __missing__(self, name: str) -> object:
        if name in QUERY_COLUMNS:
            return self["main_query"]
        raise KeyError(name)


def arguments(
    wanted: Container[str],
    task: Task,
    agent: Callable[..., Model],
    config: Config,
    output: object = None,
) -> dict[str, Any]:
    """The arguments of AgentScope Tuner's signatures by name; `agent` makes the `Model` of an
    agent.

    Models are made only if `wanted`. Raises MissingExtra for a model without AgentScope.
    """
    size = config.rollout.max_model_len
    values = dict[str, object](task=TaskRow(task))
    values["logger"] = logging.getLogger("ajet.workflow")
    values["response"] = getattr(output, "response", output) if is_output(output) else output
    if "model" in wanted:
        values["model"] = chat_model(agent(), context_size=size)
    if "auxiliary_models" in wanted:
        values["auxiliary_models"] = {
            name: chat_model(agent(name, None, False, answering), context_size=size)
            for name, answering in config.rollout.auxiliary_models.items()
        }
    return values


def is_output(value: object) -> bool:
    """Whether a value is AgentScope Tuner's `WorkflowOutput` or `JudgeOutput`, judged by its
    fields."""
    fields = getattr(type(value), "model_fields", None)
    return isinstance(fields, Mapping) and set(fields) in (
        {"reward", "response", "metrics"},
        {"reward", "metrics"},
    )


def plain(value: Any) -> Any:
    """Convert AgentScope's outputs and 1.x messages to dictionaries; return other values
    unchanged."""
    if is_output(value):
        return {name: plain(getattr(value, name)) for name in type(value).model_fields}
    if type(value).__module__.startswith("agentscope.") and hasattr(value, "to_dict"):
        return value.to_dict()
    return value


def __getattr__(name: str) -> Any:
    """Define `RobustDashScopeChatModel` on first use, as its base class comes from AgentScope."""
    if name != "RobustDashScopeChatModel":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _major() >= 2:
        raise ConfigError(
            "RobustDashScopeChatModel exists in AgentScope 1.x only; with 2.x use "
            "agentscope.model.DashScopeChatModel with max_retries"
        )
    from agentscope.model import DashScopeChatModel

    class RobustDashScopeChatModel(DashScopeChatModel):  # type: ignore[misc]
        """DashScope's model with up to `max_try` attempts, each with the next key of
        `dashscope_keys`.

        Raises ConfigError without a key.
        """

        def __init__(
            self,
            model_name: str = "qwen3-max",
            stream: bool = False,
            max_try: int = 4,
            **kwargs: object,
        ) -> None:
            self.keys = dashscope_keys()
            self.max_try = max_try
            if not self.keys:
                raise ConfigError("no API key for RobustDashScopeChatModel: set DASHSCOPE_API_KEY")
            super().__init__(model_name=model_name, api_key=self.keys[0], stream=stream, **kwargs)

        async def __call__(self, *args: object, **kwargs: object) -> Any:
            for attempt in range(self.max_try):
                self.api_key = self.keys[attempt % len(self.keys)]
                try:
                    return await super().__call__(*args, **kwargs)
                except Exception:
                    if attempt == self.max_try - 1:
                        raise
            raise AssertionError("unreachable")

    globals()[name] = RobustDashScopeChatModel
    return RobustDashScopeChatModel


def dashscope_keys() -> list[str]:
    """The keys of DASHSCOPE_API_KEY, then those of DASHSCOPE_API_KEY_BACKUP, separated by `|`."""
    text = "|".join(
        os.environ.get(name, "") for name in ("DASHSCOPE_API_KEY", "DASHSCOPE_API_KEY_BACKUP")
    )
    return [key for key in text.split("|") if key]
