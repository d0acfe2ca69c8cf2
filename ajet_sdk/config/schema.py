"""The sections of the YAML under `ajet:`: every key, its type, its default and what it does.

The generated reference (docs/reference/config.md) is made of the descriptions here, so they are written for users.
`config.py` reads files into these models and turns what is wrong into messages with file and line.

What the sections of the config are made of: a frozen model whose keys are described for users.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

__all__ = [
    "CLUSTERS",
    "IDLE",
    "ContextTracker",
    "Data",
    "Debug",
    "ModelSource",
    "Section",
    "key",
    "section",
    "wrong",
]


def wrong(key: str, message: str) -> PydanticCustomError:
    """A value that is wrong beside another one; `key` is relative to the section that raises it.

    `{got}` in the message is replaced by the value and its place in the file.
    """
    return PydanticCustomError("ajet", "{key} {message}", {"key": key, "message": message})


class Section(BaseModel):
    """A frozen part of the config; an unknown key is an error."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _strict_numbers(cls, data: Any) -> Any:
        if data is None:
            return {}
        if not isinstance(data, Mapping):
            return data
        return {name: _no_bool(value, cls.model_fields.get(name)) for name, value in data.items()}


def _no_bool(value: Any, field: FieldInfo | None) -> Any:
    """`true` is no number: as text it is refused, where pydantic would make it 1."""
    numeric = field is not None and field.annotation in (int, float, int | None, float | None)
    return str(value) if isinstance(value, bool) and numeric else value


def key(default: Any, description: str, **limits: Any) -> Any:
    """A config key: its default, what it does, and the limits of its value."""
    return Field(default=default, description=description, **limits)


def section(of: type[Section], description: str) -> Any:
    """A nested section whose keys all have defaults."""
    return Field(default_factory=of, description=description)


IDLE = {
    "task_reader.env_service.env_action_preference": "the environment reads actions as it does",
    "task_reader.data_generation.document_reader.languages": "any language is read",
    "task_reader.data_generation.document_reader.split_by": "documents are cut where their text allows, by chunk_size",
    "task_reader.data_generation.document_reader.cache_enabled": "documents are read anew in each run",
    "task_reader.data_generation.deduplication_filter.params.db_path": "embeddings are not kept between runs",
    "task_reader.data_generation.deduplication_filter.params.api_key": "the key is read from OPENAI_API_KEY",
    "task_judge.rubrics_auto_grader.sampling_mode": "the first num_reference_samples examples are used",
    "task_judge.rubrics_auto_grader.query_specific_generate_number": "a rubric is made of all examples together",
    "task_judge.rubrics_auto_grader.input_data_type": "the examples are those of jsonl_dataset_file",
    "context_tracker.timeline_merging_policy": "calls merge by their exact ids",
    "context_tracker.fix_retokenization_drift": "ids are always those that were sampled",
}
"""Keys and sections that are accepted and checked and have no effect in this version, and why."""

CLUSTERS = (
    "rollout.n_vllm_engine",
    "rollout.multi_turn.expected_steps",
    "trainer_common.nnodes",
    "trainer_common.n_gpus_per_node",
    "trainer_common.fsdp_config",
    "trainer_common.ulysses_sequence_parallel_size",
)
"""Keys and sections that the backbones of clusters read, and the others do not."""


class Lora(Section):
    enabled: bool = key(False, "Train a LoRA adapter (peft) instead of all weights.")
    r: int = key(16, "Rank of the adapter.", ge=1)
    alpha: int = key(32, "Scale of the adapter; the update is multiplied by alpha / r.", ge=1)
    dropout: float = key(0.0, "Accepted, without effect: the policy is trained as it was sampled from.", ge=0, lt=1)
    target_modules: str | list[str] = key("all-linear", "Names of the modules that get an adapter, or `all-linear`.")


class ModelSource(Section):
    path: str | None = key(
        None, "The model to train: a local directory or a hub name such as Qwen/Qwen2.5-0.5B-Instruct."
    )
    recipe: str | None = key(
        None, "Class path of a function that builds `model.path` where it is absent, e.g. `recipe.py->recipe`."
    )
    name: str | None = key(None, "The name the model answers to; null: the last part of `path`.")
    base_url: str | None = key(None, "An OpenAI-compatible endpoint to sample from instead of a local model.")
    api_key_env: str = key("OPENAI_API_KEY", "The environment variable that holds the key for `base_url`.")
    scripted: str | None = key(
        None, "Class path of a function that writes the replies, e.g. `replies.py->reply`: no model at all."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "auto", "Type of the weights; auto: float32 on CPU, bfloat16 on GPU."
    )
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3"] = key(
        "auto", "Attention kernel of transformers; flash attention needs its package."
    )
    gradient_checkpointing: bool = key(False, "Recompute activations in the backward pass: less memory, more time.")
    device: str = key("auto", "`auto`, `cpu`, `cuda` or `cuda:N`.")
    tool_call_parser: str = key(
        "auto",
        "How tool calls are read from text: hermes, qwen3_coder, glm45, mistral, deepseek_v3, deepseek_v31, kimi_k2, "
        "granite, cohere, pythonic, llama3_json or none; auto: learnt from the chat template by probing it.",
    )
    lora: Lora = section(Lora, "Low-rank adapters.")


class Data(Section):
    max_prompt_length: int | None = key(
        None,
        "Tokens of a training sample that count as its prompt, at most; the rest of a longer first prompt counts as "
        "response. null: all of the first prompt.",
        ge=1,
    )
    max_response_length: int | None = key(
        None,
        "Tokens of a training sample after its prompt, at most; what was sampled beyond is `truncated` in the ledger. "
        "null: `rollout.max_model_len` is the only limit.",
        ge=1,
    )
    train_batch_size: int = key(32, "Tasks per training step.", ge=1)


class TimelineMergingPolicy(Section):
    timeline_compare_level: Literal["token", "text"] = key(
        "token", "How calls are compared; text is accepted and treated as token, because text is not exact."
    )
    ignore_tools: bool = key(False, "Accepted; a changed tool list shows in the ids.")


class ContextTracker(Section):
    timeline_merging_policy: TimelineMergingPolicy = section(TimelineMergingPolicy, "How calls merge into timelines.")
    fix_retokenization_drift: bool = key(True, "Accepted; ids are always those that were sampled.")
    log_tool_format_check: bool = key(False, "Log each reply whose tool call could not be read.")
    log_tool_format_error_detail: bool = key(False, "Log the text of such a reply too.")
    detect_timeline_snap: bool = key(False, "Log each split of a timeline, with its cause, when its episode ends.")


class Debug(Section):
    debug_max_parallel: int = key(4, "Episodes that run at once in the debug backbone.", ge=1)
    debug_first_n_tasks: int = key(2, "Run only the first tasks.", ge=1)
    debug_vllm_port: int = key(18000, "Port of the vLLM server, where one is started.", ge=1, le=65535)
    debug_vllm_seed: int = key(12345, "Seed of the debug backbone.", ge=0)
    debug_tensor_parallel_size: int = key(
        4, "GPUs that the vLLM server spreads the model over, where one is started; at most those there are.", ge=1
    )
