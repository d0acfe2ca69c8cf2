"""The class API: a `Workflow` with `execute`, a `BaseJudge` with `compute_reward`, and their
arguments.

    class Math(ajet.Workflow):
        async def execute(self, workflow_task, tuner):
            client = tuner.as_raw_openai_sdk_client()
            reply = await client.chat.completions.create(workflow_task.task.init_messages)
            return ajet.WorkflowOutput(metadata={"final_answer": reply.choices[0].message.content})

Programs written for AgentJet run unchanged. Decorated functions and these classes mix freely.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard

from pydantic import BaseModel, ConfigDict, Field

from ajet_sdk.agent.agentscope import chat_model
from ajet_sdk.agent.decorators import GROUP_NAMES, JUDGE_NAMES, WORKFLOW_NAMES, bind, spec_of
from ajet_sdk.agent.model import Model
from ajet_sdk.errors import ConfigError, SignatureError
from ajet_sdk.types import UNTAGGED, Json, Reward, Task

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config


class WorkflowTask(BaseModel):
    """One attempt at a task, as passed to `execute`."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow", arbitrary_types_allowed=True)

    task: Task
    env_type: str = ""
    task_id: str = ""
    task_thread_index: int = 0
    """The attempt: 0 to `rollout.num_repeat` - 1."""
    task_batch_index: int = 0
    """The training step."""
    task_tag: str = ""
    """`train` or `val`."""
    episode_uuid: str = ""
    observation_window: Json = Field(default_factory=dict)
    llm_inference_fn: Callable[..., Any] | None = None
    """Always None; use a model of the tuner."""
    tokenizer: Any = None
    """The engine's tokenizer, if it has one."""
    gym_env: Any = None
    """The task's environment (`GymEnv`), if a service is configured."""


class WorkflowOutput(BaseModel):
    """The result of `execute`. With a `reward` the judge is skipped; a list of numbers is several
    rewards, summed."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow", arbitrary_types_allowed=True)

    reward: float | list[float] | list[Reward] | None = None
    is_success: bool | None = None
    metadata: Json = Field(default_factory=dict)
    log_metrics: Json = Field(default_factory=dict)
    """Numbers here are logged with the episode."""


class Workflow(BaseModel):
    """Base class of agents; a subclass implements `async def execute`. Each episode gets its own
    instance."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow", arbitrary_types_allowed=True)

    name: str = "ajet-workflow"
    trainable_targets: list[str] | None = None
    """Target tags to train; None: all agents. Read each time the tuner makes a model."""

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        """Run the agent once. Raises NotImplementedError unless overridden."""
        raise NotImplementedError(f"{type(self).__name__} has no `execute`")


class BaseJudge:
    """Base class of judges: created once per run with the config, called for each output without a
    reward."""

    def __init__(self, config: Any = None) -> None:
        self.config = config

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
        """Return the reward, or `(reward, is_success)`; may be async."""
        raise NotImplementedError(f"{type(self).__name__} has no `compute_reward`")


@dataclass(frozen=True)
class BaseUrlAndKey:
    """An OpenAI-compatible endpoint, for programs that send their own requests."""

    base_url: str
    api_key: str
    model: str


class ContextTracker:
    """The state of a workflow's calls while it runs."""

    def __init__(self, overflowed: Callable[[], bool]) -> None:
        self._overflowed = overflowed

    @property
    def context_overflow(self) -> bool:
        """Whether a call exceeded the context length."""
        return self._overflowed()


class AjetTuner:
    """Provides the model under training to each agent, under the agent's name."""

    def __init__(
        self,
        config: Config,
        model: Model,
        targets: Callable[[], list[str] | None],
        overflowed: Callable[[], bool],
        open_debug_model: Callable[[str], object],
    ) -> None:
        self.config = config
        self._model = model
        self._targets = targets
        self._tracker = ContextTracker(overflowed)
        self._open_debug_model = open_debug_model

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the current targets; the copy asks the gateway whether a call overflowed."""
        targets = self._targets()
        return _rebuild_tuner, (
            self.config,
            self._model,
            None if targets is None else tuple(targets),
        )

    def get_context_tracker(self) -> ContextTracker:
        """Return the episode's tracker; programs read `.context_overflow`."""
        return self._tracker

    def as_agentscope_model(
        self,
        agent_name: str = "default_agent_name",
        target_tag: str = UNTAGGED,
        debug_model: object = None,
    ) -> Any:
        """Return an AgentScope `OpenAIChatModel` for one agent, of the installed major version
        (1.x, 2.x).

        Outside of the trainable targets `debug_model` answers instead: an AgentScope model, which
        is returned as it is, or the name of a model. Raises ConfigError if it is missing,
        MissingExtra without AgentScope.
        """
        model = self._answering(agent_name, target_tag, debug_model)
        size = self.config.rollout.max_model_len
        if isinstance(model, Model):
            return chat_model(model, context_size=size)
        return model

    def as_raw_openai_sdk_client(
        self,
        agent_name: str = "default_agent_name",
        target_tag: str = UNTAGGED,
        debug_model: object = "gpt-4o",
    ) -> Any:
        """Return an `openai.AsyncOpenAI` client whose `chat.completions.create` needs no model
        name."""
        model = self._answering(agent_name, target_tag, debug_model)
        if not isinstance(model, Model):
            return model
        client = model.async_openai()
        create = client.chat.completions.create

        def with_defaults(messages: Any, *, model: str = model.name, **parameters: Any) -> object:
            if not parameters.get("tools"):  # OpenAI rejects an empty list of tools
                parameters = {
                    k: v for k, v in parameters.items() if k not in ("tools", "tool_choice")
                }
            return create(messages=messages, model=model, **parameters)

        client.chat.completions.create = with_defaults  # type: ignore[method-assign,assignment]
        return client

    def as_oai_baseurl_apikey(
        self,
        agent_name: str = "default_agent_name",
        target_tag: str = UNTAGGED,
        debug_model: str | None = None,
    ) -> BaseUrlAndKey:
        """Return base URL, key and model name of one agent, for any OpenAI-compatible client."""
        model = self._answering(agent_name, target_tag, debug_model)
        return BaseUrlAndKey(model.base_url, model.api_key, model.name)

    def _answering(self, agent_name: str, target_tag: str, debug_model: Any) -> Any:
        """The `Model` of an agent; outside of the targets, the given debug model unless the config
        names an opponent.

        Raises ConfigError if no model answers the agent.
        """
        targets = self._targets()
        rollout = self.config.rollout
        if targets is None or target_tag in targets:
            return self._model.agent(agent_name, target_tag)
        if not targets:
            raise ConfigError(
                "trainable_targets=[] would train no agent; name at least one target tag, or set it"
                " to None"
            )
        named = debug_model if isinstance(debug_model, str) else None
        configured = any(name in rollout.debug_models for name in (agent_name, target_tag, named))
        if not (rollout.opponent or configured):
            if debug_model is None:
                raise ConfigError(
                    f"target_tag {target_tag!r} is not among the trainable targets"
                    f" ({', '.join(targets)}) and no debug_model is given to answer in its place;"
                    " pass debug_model=, set rollout.opponent, or add the tag to trainable_targets"
                )
            if named is None:
                return debug_model
            self._open_debug_model(named)  # raises here if it has no endpoint
        return self._model.agent(agent_name, target_tag, trainable=False, debug_model=named)


def _rebuild_tuner(config: Config, model: Model, targets: tuple[str, ...] | None) -> AjetTuner:
    known = None if targets is None else list(targets)
    # The gateway opens debug models.
    return AjetTuner(config, model, lambda: known, model.overflowed, lambda name: None)


def is_workflow_class(workflow: object) -> TypeGuard[Workflow | type[Workflow]]:
    """Whether a value is a `Workflow` class or instance."""
    return isinstance(workflow, Workflow) or (
        inspect.isclass(workflow) and issubclass(workflow, Workflow)
    )


def make_workflow(workflow: Workflow | type[Workflow]) -> Workflow:
    """Return an instance for one episode, as concurrent episodes set attributes on it. Raises
    SignatureError."""
    if isinstance(workflow, type):
        instance = workflow()
    else:
        instance = workflow.model_copy()
    if type(instance).execute is Workflow.execute:
        raise SignatureError(
            f"workflow {type(instance).__name__} has no `execute(self, workflow_task, tuner)`"
        )
    if instance.trainable_targets is not None and not instance.trainable_targets:
        raise SignatureError(
            f"workflow {type(instance).__name__}: trainable_targets=[] would train no agent; name"
            " at least one target tag, or set it to None for all"
        )
    return instance


def check_signature(workflow: object, judge: object, task: Task, config: Config) -> None:
    """Raise SignatureError if a run could not call the workflow or the judge for this task."""
    placeholder = Model("", "", "policy")
    absent = (
        frozenset() if config.task_reader.has_environment(task.env_type) else frozenset({"env"})
    )
    if is_workflow_class(workflow):
        make_workflow(workflow)
    else:
        spec = spec_of(workflow, "workflow")
        bind(spec, task, dict.fromkeys((WORKFLOW_NAMES | spec.tuner_names) - absent, placeholder))
    if (
        judge is not None
        and not hasattr(judge, "compute_reward")
        and getattr(judge, "group", None) is not True
    ):
        spec = spec_of(judge, "judge")
        names = GROUP_NAMES if spec.group else JUDGE_NAMES | spec.tuner_names
        bind(spec, task, dict.fromkeys(names - absent, placeholder))
