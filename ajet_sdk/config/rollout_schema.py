"""The section `rollout` of the YAML: how the agent runs, how its model samples, and which other models play."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import model_validator

from ajet_sdk.config.schema import ModelSource, Section, key, section, wrong

__all__ = ["Rollout"]


class MultiTurn(Section):
    max_sample_per_task: int = key(
        30,
        "Most samples (timelines) trained from one episode; of more, as many are drawn, and the others are `truncated` "
        "in the ledger.",
        ge=1,
    )
    max_steps: int = key(
        30, "Most turns of an episode, for workflows that read it (`tuner.config`); nothing else ends an episode.", ge=1
    )
    expected_steps: int = key(1, "Turns that an episode usually takes; sizes buffers on clusters.", ge=1)


class ValKwargs(Section):
    temperature: float = key(0.0, "Temperature of val/reward, with do_sample: true.", ge=0)
    top_k: int = key(-1, "Sample among the k most likely tokens; -1: all.", ge=-1)
    top_p: float = key(1.0, "Sample among the most likely tokens that make up this probability.", gt=0, le=1)
    do_sample: bool = key(
        False, "false: val/reward is sampled at temperature 1; true: at `temperature`. The greedy reward is beside it."
    )
    num_repeat: int = key(
        1, "Sampled attempts per validation task, where `trainer_common.val_pass_n` is not given.", ge=1
    )
    opponent: list[str | ModelSource] | None = key(
        None, "The opponents of validation, as in `rollout.opponent`; null: those of training.", min_length=1
    )

    @model_validator(mode="before")
    @classmethod
    def _one_opponent(cls, data: Any) -> Any:
        one = isinstance(data, Mapping) and isinstance(data.get("opponent"), (str, Mapping))
        return {**data, "opponent": [data["opponent"]]} if one else data

    @property
    def greedy(self) -> bool:
        """Every attempt at a task would be the same."""
        return not self.do_sample or self.temperature == 0

    @model_validator(mode="after")
    def _pass_at_k(self) -> ValKwargs:
        if self.num_repeat > 1 and self.greedy:
            raise wrong(
                "num_repeat",
                "must be 1 while validation is greedy {got}; every attempt would be the same, so pass@k means nothing. "
                "Set do_sample: true and a temperature above 0",
            )
        return self


class Rollout(Section):
    user_workflow: str | None = key(
        None, "Class path of the agent: `package.module->Name` or `path/file.py->name`; null when given by the caller."
    )
    force_disable_toolcalls: bool = key(
        False, "Leave tool calls in the text of a reply, unread: `model.tool_call_parser: none`."
    )
    max_env_worker: int = key(64, "Episodes that run at once.", ge=1)
    trainable_targets: list[str] | None = key(
        None,
        "Target tags to train, one or a list of them, in place of those that the workflow names; null: the workflow's.",
        min_length=1,
    )
    trained_seats: int | None = key(
        None,
        "How many of the targets the policy plays in an episode, drawn by the run's seed; the others are opponents'. "
        "The attempts at one task share the draw. null: all of them.",
        ge=1,
    )
    opponent: list[str | ModelSource] | None = key(
        None,
        "What answers the agents outside of the targets, never trained; of a list, one is drawn for each task of a "
        "step by the run's seed. `checkpoint@40` (a step of this experiment; `@0`: the model that it began with; "
        "`@latest`; `@any`: drawn among those before the step), `EXPERIMENT@40`, the directory of a model, `policy` "
        "(the policy as it is), a name that `model.base_url` or OPENAI_BASE_URL answers, or a section with the keys of "
        "`model`.",
        min_length=1,
    )
    debug_models: dict[str, str | ModelSource] = key(
        {},
        "By target tag, agent, or the name that the agent's code gives its debug model: what answers in its place, as "
        "in `opponent`, before which it comes.",
    )
    auxiliary_models: dict[str, str] = key(
        {},
        "For AgentScope Tuner's functions: the models in `auxiliary_models` by name, each the name of a model that "
        "`model.base_url` or OPENAI_BASE_URL answers. They are never trained.",
    )
    gamma: float = key(
        1.0,
        "Discount of an episode's reward for each later turn of the same agent: the last turn has all of it. A reward "
        "that names one call is not discounted.",
        ge=0,
        le=1,
    )
    compute_madness_checklist: list[Literal["nonsense", "wrong_toolcall"]] = key(
        [],
        "What makes a reply of the policy count as mad: `nonsense` (it repeats itself without end), `wrong_toolcall` "
        "(a tool call in it cannot be read).",
    )
    agent_madness_termination: bool = key(
        True,
        "A mad reply is the episode's last: further calls are refused, and its reward is `agent_madness_reward`. "
        "false: the episode goes on, and the mad reply alone has that reward.",
    )
    agent_madness_reward: float = key(-1.0, "Reward of a mad reply, or of the episode that it ended.")
    max_response_length_in_one_turn: int = key(4096, "Longest reply of one call, in tokens.", ge=1)
    max_model_len: int = key(18000, "Longest prompt and reply together, in tokens.", ge=1)
    multi_turn: MultiTurn = section(MultiTurn, "Limits of episodes of many turns.")
    tensor_parallel_size: int = key(1, "GPUs that one vLLM engine spreads the model over.", ge=1)
    n_vllm_engine: int | None = key(
        None, "Inference engines (clusters); null: the fewest that leave whole machines to the trainer.", ge=1
    )
    max_num_seqs: int = key(
        10, "Sequences that one vLLM engine samples at once; not given, `local` takes max_env_worker.", ge=1
    )
    gpu_memory_utilization: float | None = key(
        None, "Share of each GPU's memory that vLLM takes; null: 0.5 on the trainer's GPU, else 0.85.", gt=0, le=1
    )
    name: Literal["auto", "transformers", "vllm"] = key(
        "auto",
        "What samples: vllm (a server that ajet starts), transformers (in this process); auto: vllm where it is "
        "installed and there is a GPU. Clusters always sample with vllm.",
    )
    runner: Literal["thread", "ray"] = key(
        "thread",
        "Where the agent's code runs: in threads of this process, or in worker processes over a Ray cluster, which may "
        "block, fork, leak or die.",
    )
    num_repeat: int = key(4, "Attempts per task: the size of a group.", ge=1)
    temperature: float = key(0.9, "Sampling temperature of training.", ge=0)
    top_p: float = key(1.0, "Sample among the most likely tokens that make up this probability.", gt=0, le=1)
    top_k: int = key(-1, "Sample among the k most likely tokens; -1: all.", ge=-1)
    val_kwargs: ValKwargs = section(ValKwargs, "Sampling of validation.")
    policy_models: list[str] = key(
        [], "Model names in the agent's requests that the policy answers; empty: the one name that the agent uses."
    )
    on_uncaptured: Literal["error", "warn"] = key(
        "error",
        "Where an episode connects to an LLM provider through a client that ajet does not capture: end the episode "
        "(error) or write a line to the log (warn).",
    )
    llm_hosts: list[str] = key([], "More hosts to watch in that way than those of the known providers.")
    sampling: Literal["run", "request"] = key(
        "run", "Whose temperature and top_p hold in training: the run's (here) or those of the agent's own request."
    )
    deterministic: bool = key(False, "Generate serially, so that a run repeats to the token.")
    timeout: float = key(600.0, "Seconds an episode may take.", gt=0)
    judge_timeout: float = key(120.0, "Seconds a judge may take.", gt=0)
    max_retries: int = key(1, "New tries of an attempt after an infrastructure fault.", ge=0)
    failure_reward: float | None = key(
        None, "Reward of an episode whose own code failed or that outgrew the context; null: left out of training."
    )
    min_sound_share: float = key(0.5, "Stop the run when a smaller share of a batch's episodes is sound.", ge=0, le=1)
    max_staleness: int = key(
        0,
        "Policy updates a sampled token may be old and still be trained; above 0 the next batch is sampled while this "
        "one trains.",
        ge=0,
    )

    @model_validator(mode="before")
    @classmethod
    def _lists(cls, data: Any) -> Any:
        """One target or opponent is a list of one; no checklist is an empty one."""
        if not isinstance(data, Mapping):
            return data
        data = dict(data)
        for name in ("trainable_targets", "opponent"):
            if isinstance(data.get(name), (str, Mapping)):
                data[name] = [data[name]]
        if data.get("compute_madness_checklist", "") in (None, "None"):
            data["compute_madness_checklist"] = []
        return data

    @model_validator(mode="after")
    def _seats(self) -> Rollout:
        targets = self.trainable_targets
        if self.trained_seats is None:
            return self
        if not self.opponent and not self.debug_models:
            raise wrong("trained_seats", "needs rollout.opponent {got}: who plays the targets that are not drawn?")
        if targets is not None and self.trained_seats > len(targets):
            raise wrong("trained_seats", f"must be at most {len(targets)}, as many as trainable_targets has {{got}}")
        return self
