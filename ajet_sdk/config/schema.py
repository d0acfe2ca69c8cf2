"""The base class of config sections, and some sections of the YAML under `ajet:`: keys with type,
default, description.

The reference (docs/reference/config.md) is generated from the descriptions, which are therefore
written for users. `config.py` reads files into these models and converts validation errors to
messages with file and line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError


def wrong(key: str, message: str) -> PydanticCustomError:
    """Make the error of a value that conflicts with another; `key` is relative to the section that
    raises it.

    `{got}` in the message is replaced by the value and its line in the file.
    """
    return PydanticCustomError("ajet", "{key} {message}", {"key": key, "message": message})


class Section(BaseModel):
    """A frozen section of the config. Unknown keys are errors."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _strict_numbers(cls, data: object) -> object:
        if data is None:
            return {}
        if not isinstance(data, Mapping):
            return data
        # Refuse `true` as a number, which pydantic would convert to 1.
        numeric = {
            n
            for n, f in cls.model_fields.items()
            if f.annotation in (int, float, int | None, float | None)
        }
        return {
            n: str(value) if isinstance(value, bool) and n in numeric else value
            for n, value in data.items()
        }


def key(default: Any, description: str, **limits: Any) -> Any:
    """Define a config key by its default, description, and the limits of its value."""
    return Field(default=default, description=description, **limits)


ONE_OR_MORE = BeforeValidator(lambda value: [value] if isinstance(value, (str, Mapping)) else value)
"""Accept a single text or section as a list."""


def section(of: type[Section], description: str) -> Any:
    """Define a nested section; all its keys have defaults."""
    return Field(default_factory=of, description=description)


IDLE = {
    "task_reader.env_service.env_action_preference": "the environment accepts actions in any form",
    "task_reader.data_generation.document_reader.languages": "documents may be in any language",
    "task_reader.data_generation.document_reader.split_by": (
        "documents are cut at natural boundaries, by chunk_size"
    ),
    "task_reader.data_generation.document_reader.cache_enabled": (
        "documents are read again in each run"
    ),
    **dict.fromkeys(
        (
            f"task_reader.data_generation.deduplication_filter.params.{name}"
            for name in ("db_path", "model", "api_key", "base_url")
        ),
        "tasks are compared by their characters; `ajet dataset dedup --embed` compares meanings",
    ),
    "task_judge.rubrics_auto_grader.sampling_mode": (
        "the first num_reference_samples examples are used"
    ),
    "task_judge.rubrics_auto_grader.query_specific_generate_number": (
        "one rubric is made from all examples together"
    ),
    "task_judge.rubrics_auto_grader.input_data_type": "examples are read from jsonl_dataset_file",
    "context_tracker.timeline_merging_policy": "calls are merged by their exact token ids",
    "context_tracker.fix_retokenization_drift": "token ids are always the sampled ones",
}
"""Keys and sections that are validated but have no effect in this version, and why."""

CLUSTERS = (
    "rollout.n_vllm_engine",
    "rollout.multi_turn.expected_steps",
    "trainer_common.nnodes",
    "trainer_common.n_gpus_per_node",
    "trainer_common.fsdp_config",
    "trainer_common.ulysses_sequence_parallel_size",
)
"""Keys and sections that only the cluster backbones read."""

HERE = (
    "model.dtype",
    "model.attn_implementation",
    "model.gradient_checkpointing",
    "model.vision_tower",
    "model.device",
    "model.lora.enabled",
    "model.lora.alpha",
    "model.lora.target_modules",
    "trainer_common.micro_batch_tokens",
)
"""Keys of a model in this process, which a training service decides itself."""


class Lora(Section):
    enabled: bool = key(False, "Train a LoRA adapter (peft) instead of all weights.")
    r: int = key(
        16,
        "Rank of the adapter; also with backbone tinker, and trinity without GPUs, which always"
        " train one. Up to 512 with vLLM.",
        ge=1,
    )
    alpha: int = key(32, "Scaling of the adapter: its update is multiplied by alpha / r.", ge=1)
    target_modules: str | list[str] = key(
        "all-linear", "Modules that get an adapter: a list of names, or `all-linear`."
    )


class ModelSource(Section):
    path: str | None = key(
        None,
        "Model to train: a local directory, a Hugging Face name such as Qwen/Qwen2.5-0.5B-Instruct,"
        " or a short name of `ajet model list`, which is fetched if need be. Backbone tinker: the"
        " service's name of it.",
    )
    recipe: str | None = key(
        None,
        "Class path of a recipe that makes the model if the directory `model.path` does not exist,"
        " e.g. `recipe.py->recipe`.",
    )
    name: str | None = key(
        None, "Name under which the model is served; null: the last part of `path`."
    )
    base_url: str | None = key(
        None, "OpenAI-compatible endpoint to sample from instead of a local model."
    )
    api_key_env: str = key(
        "OPENAI_API_KEY", "Environment variable that holds the API key for `base_url`."
    )
    scripted: str | None = key(
        None,
        "Class path of a function that returns the replies instead of a model, e.g."
        " `replies.py->reply`.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "auto",
        "Data type of the weights; auto: float32 on CPU, bfloat16 on GPU. bfloat16 on a CPU: of"
        " products only, weights and sums stay in float32.",
    )
    attn_implementation: Literal[
        "auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3"
    ] = key(
        "auto",
        "Attention implementation of transformers; the flash attention ones need their package.",
    )
    gradient_checkpointing: bool = key(
        False, "Recompute activations in the backward pass: uses less memory and more time."
    )
    vision_tower: Literal["frozen", "trained"] = key(
        "frozen",
        "Of a model that takes pictures: whether the part that turns pixels into embeddings is"
        " trained, too. A model trained from scratch needs it trained.",
    )
    device: str = key("auto", "Device: `auto`, `cpu`, `cuda` or `cuda:N`.")
    trust_remote_code: bool = key(
        False,
        "Run Python code that comes with the checkpoint (`auto_map` in its config.json), with your"
        " rights: it can read your files and use the network. Only with backbone local, for a"
        " checkpoint whose code you have read.",
    )
    tool_call_parser: str = key(
        "auto",
        "Format of tool calls in the model's text: hermes, qwen3_coder, glm45, mistral,"
        " deepseek_v3, deepseek_v31, kimi_k2, granite, cohere, pythonic, llama3_json or none; auto:"
        " detected from the chat template. Where the template renders no tools or no calls, auto"
        " writes and reads them in the Hermes form and logs a warning; template: as auto, but"
        " requests with tools are refused there.",
    )
    lora: Lora = section(Lora, "LoRA adapters.")


class Prices(Section):
    prefill: float = key(
        0.0, "Tokens of prompts, and of forward passes without a backward pass.", ge=0
    )
    cached: float = key(0.0, "Tokens of prompts that the service's prefix cache had.", ge=0)
    sample: float = key(0.0, "Sampled tokens.", ge=0)
    train: float = key(0.0, "Tokens of forward and backward passes.", ge=0)

    @property
    def known(self) -> bool:
        return any(self.model_dump().values())


class Tinker(Section):
    base_url: str | None = key(
        None,
        "Address of a service that speaks the Tinker API, e.g. `http://127.0.0.1:8900`; null:"
        " TINKER_BASE_URL, else the hosted service.",
    )
    api_key_env: str = key(
        "TINKER_API_KEY",
        "Environment variable that holds the service's API key; not needed at 127.0.0.1.",
    )
    prices: Prices = section(
        Prices,
        "Dollars per million tokens, for `max_cost`, the progress lines and the trace. Without any,"
        " the rates at which the service billed this model's tokens in the last 14 days, where the"
        " API key may read them.",
    )
    max_cost: float | None = key(
        None,
        "Dollars after which the run ends, with a checkpoint, once the step is done"
        " (`--max-cost`).",
        gt=0,
    )
    stall_timeout: float = key(
        600.0,
        "Seconds after which a request that the service has not answered counts as failed.",
        gt=0,
    )
    telemetry: bool = key(False, "Let the package `tinker` report on its use to its makers.")


class Data(Section):
    max_prompt_length: int | None = key(
        None,
        "Maximum prompt length of a training sample, in tokens; the rest of a longer first prompt"
        " counts as response. null: no limit.",
        ge=1,
    )
    max_response_length: int | None = key(
        None,
        "Maximum length after the prompt of a training sample, in tokens; sampled tokens beyond it"
        " are `truncated` in the ledger. null: only `rollout.max_model_len` limits it.",
        ge=1,
    )
    train_batch_size: int = key(32, "Tasks per training step.", ge=1)


class TimelineMergingPolicy(Section):
    timeline_compare_level: Literal["token", "text"] = key(
        "token",
        "How calls are compared. Only token is implemented; text is accepted and treated as token.",
    )
    ignore_tools: bool = key(
        False, "Accepted, but has no effect: a changed tool list already changes the token ids."
    )


class ContextTracker(Section):
    timeline_merging_policy: TimelineMergingPolicy = section(
        TimelineMergingPolicy, "How calls are merged into timelines."
    )
    fix_retokenization_drift: bool = key(
        True, "Accepted, but has no effect: token ids are always the sampled ones."
    )
    log_tool_format_check: bool = key(False, "Log each reply whose tool call could not be parsed.")
    log_tool_format_error_detail: bool = key(False, "Log the text of that reply too.")
    detect_timeline_snap: bool = key(
        False, "When an episode ends, log each split of a timeline and its cause."
    )


class Debug(Section):
    debug_max_parallel: int = key(
        4, "Number of episodes run concurrently with backbone debug.", ge=1
    )
    debug_first_n_tasks: int = key(2, "Number of tasks to run, from the first.", ge=1)
    debug_vllm_port: int = key(18000, "Port of the vLLM server, if one is started.", ge=1, le=65535)
    debug_vllm_seed: int = key(12345, "Random seed with backbone debug.", ge=0)
    debug_tensor_parallel_size: int = key(
        4,
        "Tensor parallel size of the vLLM server, if one is started; at most the number of GPUs.",
        ge=1,
    )
