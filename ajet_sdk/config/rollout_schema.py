"""The section `rollout` of the YAML: execution of the agent, sampling of its model, and models of
other agents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import field_validator, model_validator

from ajet_sdk.config.schema import ONE_OR_MORE, ModelSource, Section, key, section, wrong


class MultiTurn(Section):
    max_sample_per_task: int = key(
        30,
        "Maximum number of samples (timelines) trained per episode; if there are more, a random"
        " subset is trained and the others are `truncated` in the ledger.",
        ge=1,
    )
    max_steps: int = key(
        30,
        "Maximum number of turns per episode, for workflows that read it (`tuner.config`); ajet"
        " itself does not enforce it.",
        ge=1,
    )
    expected_steps: int = key(
        1, "Typical number of turns per episode; sizes buffers on clusters.", ge=1
    )


class ValKwargs(Section):
    temperature: float = key(0.0, "Temperature of val/reward with do_sample: true.", ge=0)
    top_k: int = key(-1, "Sample from the k most likely tokens; -1: from all.", ge=-1)
    top_p: float = key(
        1.0,
        "Sample from the most likely tokens whose probabilities add up to this (nucleus sampling).",
        gt=0,
        le=1,
    )
    do_sample: bool = key(
        False,
        "false: val/reward is sampled at temperature 1; true: at `temperature`. The greedy reward"
        " is always reported beside it.",
    )
    num_repeat: int = key(
        1, "Sampled attempts per validation task if `trainer_common.val_pass_n` is not set.", ge=1
    )
    opponent: Annotated[list[str | ModelSource] | None, ONE_OR_MORE] = key(
        None,
        "Opponents during validation, as in `rollout.opponent`; null: the same as in training.",
        min_length=1,
    )

    @property
    def greedy(self) -> bool:
        """Whether no temperature above 0 is set: without do_sample, or with temperature 0."""
        return not self.do_sample or self.temperature == 0

    @model_validator(mode="after")
    def _pass_at_k(self) -> ValKwargs:
        if self.num_repeat > 1 and self.greedy:
            raise wrong(
                "num_repeat",
                "must be 1 with greedy validation {got}: all attempts would be identical, so pass@k"
                " means nothing. Set do_sample: true and a temperature above 0",
            )
        return self


class Rollout(Section):
    user_workflow: str | None = key(
        None,
        "Class path of the agent: `package.module->Name` or `path/file.py->name`; null if the agent"
        " is passed from Python or `ajet run`.",
    )
    force_disable_toolcalls: bool = key(
        False,
        "Leave tool calls unparsed in the text of a reply; the same as `model.tool_call_parser:"
        " none`.",
    )
    max_env_worker: int = key(64, "Number of episodes run concurrently.", ge=1)
    trainable_targets: Annotated[list[str] | None, ONE_OR_MORE] = key(
        None,
        "Target tag or list of tags to train, overriding those of the workflow; null: the"
        " workflow's.",
        min_length=1,
    )
    trained_models: Literal["shared", "separate"] = key(
        "shared",
        "`shared`: all trained targets have one model; `separate`: each of `trainable_targets` has"
        " weights of its own, or with `model.lora` an adapter of its own on one base (backbone"
        " `local`).",
    )
    trained_seats: int | None = key(
        None,
        "Number of targets the policy plays in each episode, chosen at random; opponents play the"
        " others. All attempts at a task use the same choice. null: all targets.",
        ge=1,
    )
    opponent: Annotated[list[str | ModelSource] | None, ONE_OR_MORE] = key(
        None,
        "What plays the agents that are not trained. From a list, one is chosen at random for each"
        " task of a step. Each is `checkpoint@40` (a step of this experiment; `@0`: the initial"
        " model; `@latest`; `@any`: a random earlier step), `EXPERIMENT@40`, a model's directory,"
        " `policy` (the current policy), a model name served at `model.base_url` or"
        " OPENAI_BASE_URL, or a section with the keys of `model`.",
        min_length=1,
    )
    debug_models: dict[str, str | ModelSource] = key(
        {},
        "What answers in place of a debug model, with the values of `opponent`. The keys are target"
        " tags, agent names, or the names that the agent's code gives its debug models. Takes"
        " precedence over `opponent`.",
    )
    auxiliary_models: dict[str, str] = key(
        {},
        "For AgentScope Tuner functions: the `auxiliary_models` by name. Each value is the name of"
        " a model served at `model.base_url` or OPENAI_BASE_URL. They are never trained.",
    )
    gamma: float = key(
        1.0,
        "Discount factor per turn: an agent's last turn gets the full reward of the episode, each"
        " earlier turn gamma times the next one's. A reward for a single call is not discounted.",
        ge=0,
        le=1,
    )
    compute_madness_checklist: list[Literal["nonsense", "wrong_toolcall"]] = key(
        [],
        "What makes a reply count as mad: `nonsense` (endless repetition), `wrong_toolcall` (a tool"
        " call that cannot be parsed).",
    )
    agent_madness_termination: bool = key(
        True,
        "true: a mad reply ends the episode; further calls are refused and the episode's reward is"
        " `agent_madness_reward`. false: the episode continues, and only the mad reply gets that"
        " reward.",
    )
    agent_madness_reward: float = key(
        -1.0, "Reward of a mad reply, or of the episode that it ends."
    )
    max_response_length_in_one_turn: int = key(
        4096, "Maximum length of one reply, in tokens.", ge=1
    )
    overlong_buffer: int = key(
        0,
        "Soft limit of replies in training (arXiv:2503.14476, eq. 13): a reply's reward falls"
        " linearly by up to `overlong_penalty` over the last so many tokens before"
        " max_response_length_in_one_turn; 0: no soft limit.",
        ge=0,
    )
    overlong_penalty: float = key(1.0, "Reward that a reply of maximum length loses.", ge=0)
    overlong_filtering: bool = key(
        False,
        "true: replies that end at their maximum length are not trained (arXiv:2503.14476; outcome"
        " `overlong`), nor are an agent's other replies in an episode that ends so. Their rewards"
        " count in the group's baseline.",
    )
    max_model_len: int = key(18000, "Maximum length of prompt and reply together, in tokens.", ge=1)
    multi_turn: MultiTurn = section(MultiTurn, "Limits for multi-turn episodes.")
    tensor_parallel_size: int = key(1, "Tensor parallel size of each vLLM engine.", ge=1)
    n_vllm_engine: int | None = key(
        None,
        "Number of inference engines (clusters); null: the most that leave half of the GPUs, in whole"
        " machines, to the trainer.",
        ge=1,
    )
    max_num_seqs: int = key(
        10,
        "Maximum number of sequences that one vLLM engine samples at once; if not set, backbone"
        " local uses max_env_worker.",
        ge=1,
    )
    gpu_memory_utilization: float | None = key(
        None,
        "Fraction of each GPU's memory that vLLM uses; null: 0.5 if the GPU is also used for"
        " training, else 0.85.",
        gt=0,
        le=1,
    )
    name: Literal["auto", "transformers", "vllm"] = key(
        "auto",
        "Inference engine: vllm (a server started by ajet) or transformers (in this process); auto:"
        " vllm if it is installed and there is a GPU. Clusters always use vllm.",
    )
    num_repeat: int = key(4, "Attempts per task (group size).", ge=1)
    resample_groups: int = key(
        0,
        "backbone local: how often a step replaces the tasks whose attempts all got the same reward"
        " by other tasks (dynamic sampling, arXiv:2503.14476, section 3.2). Their episodes stay in"
        " the trace as zero_advantage.",
        ge=0,
    )
    temperature: float = key(0.9, "Sampling temperature during training.", ge=0)
    top_p: float = key(
        1.0,
        "Sample from the most likely tokens whose probabilities add up to this (nucleus sampling).",
        gt=0,
        le=1,
    )
    top_k: int = key(-1, "Sample from the k most likely tokens; -1: from all.", ge=-1)
    val_kwargs: ValKwargs = section(ValKwargs, "Sampling during validation.")
    policy_models: list[str] = key(
        [],
        "Model names in requests that the policy answers; empty: the one name that the agent uses.",
    )
    on_uncaptured: Literal["error", "warn"] = key(
        "error",
        "What to do when an agent asks a model host for what ajet does not answer, or through a"
        " client that it does not capture: end the episode (error) or log a warning (warn).",
    )
    llm_hosts: list[str] = key(
        [], "Hosts to watch for such calls, in addition to the known providers."
    )
    allowed_urls: list[str] = key(
        [],
        "URLs of model hosts that the agent may call beside the policy, each with everything below"
        " it, such as https://api.openai.com/v1/images. These calls are not recorded.",
    )
    picture_hosts: list[str] = key(
        [],
        "Hosts from which links to pictures in requests to the policy are loaded (https only);"
        " other links are refused. Pictures in the request itself need no host.",
    )
    sampling: Literal["run", "request"] = key(
        "run",
        "Which temperature and top_p apply in training: those of the run (above), or those of each"
        " request.",
    )
    deterministic: bool = key(
        False,
        "Sample each call alone and without reused keys and values: a run repeats to the bit on one"
        " machine. With backbone `tinker` the service must do so: `ajet trainer serve"
        " --deterministic`.",
    )
    timeout: float = key(600.0, "Time limit of an episode, in seconds.", gt=0)
    judge_timeout: float = key(120.0, "Time limit of a judge, in seconds.", gt=0)
    max_retries: int = key(1, "Number of retries after an infrastructure failure.", ge=0)
    failure_reward: float | None = key(
        None,
        "Reward of an episode whose own code failed or that exceeded the context length; null:"
        " excluded from training.",
    )
    min_sound_share: float = key(
        0.5,
        "Minimum fraction of a batch's episodes that must succeed; the run stops below it.",
        ge=0,
        le=1,
    )
    max_staleness: int = key(
        0,
        "Maximum age of a trained token, in policy updates; above 0, the next batch is sampled"
        " while the current one trains.",
        ge=0,
    )
    carry_over: int = key(
        0,
        "Steps by which a task's attempts may end late: a step trains the tasks that are done first,"
        " and waits only for those begun `carry_over` steps earlier. Part of `max_staleness`: the"
        " rest of it is how far sampling runs ahead.",
        ge=0,
    )

    @field_validator("compute_madness_checklist", mode="before")
    @classmethod
    def _no_checklist(cls, value: object) -> object:
        return [] if value in (None, "None") else value

    @model_validator(mode="before")
    @classmethod
    def _no_runner(cls, data: object) -> object:
        """Refuse `runner: ray` of earlier versions, and drop `runner: thread`."""
        if not isinstance(data, Mapping) or "runner" not in data:
            return data
        if data["runner"] != "thread":
            raise wrong(
                "runner",
                f"{data['runner']!r} is not supported any more: to run agents in other processes"
                " or on other machines, run `ajet swarm start` here and `ajet work URL` there",
            )
        return {name: value for name, value in data.items() if name != "runner"}

    @model_validator(mode="after")
    def _seats(self) -> Rollout:
        targets = self.trainable_targets
        if self.trained_seats is None:
            return self
        if not self.opponent and not self.debug_models:
            raise wrong(
                "trained_seats",
                "needs rollout.opponent {got}: something must play the targets that the policy"
                " does not",
            )
        if targets is not None and self.trained_seats > len(targets):
            raise wrong(
                "trained_seats",
                f"must be at most {len(targets)}, the number of trainable_targets {{got}}",
            )
        return self
