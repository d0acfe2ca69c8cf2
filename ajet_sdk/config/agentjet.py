"""Translates configs written for AgentJet: keys with another name in ajet, and keys without effect,
with the reason.

`translate` renames the keys of a document before its validation. Every key of AgentJet's files is
either in the schema or in one of the tables here; any other key is an error that names the nearest
one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import yaml
from pydantic import BaseModel

from ajet_sdk.config.source import Source
from ajet_sdk.errors import ConfigError

RENAMED = {
    "rollout.tensor_model_parallel_size": "rollout.tensor_parallel_size",
    "rollout.vllm_tool_parser": "model.tool_call_parser",
    "swarm_mode_sample_collection_method": "swarm.collect",
    "lora.lora_rank": "model.lora.r",
    "lora.lora_alpha": "model.lora.alpha",
    "lora.target_modules": "model.lora.target_modules",
    "trainer_common.use_kl_in_reward": "trainer_common.algorithm.use_kl_in_reward",
    "task_reader.dataset_file": "task_reader.jsonl_dataset_file",
    "task_judge.rubrics_auto_grader.dataset_file": (
        "task_judge.rubrics_auto_grader.jsonl_dataset_file"
    ),
}
"""ajet's names of keys and sections, by AgentJet's."""

COLLECTION_METHODS = {
    "rollout_until_finish_enough_tasks": "groups",
    "rollout_until_finish_enough_episodes": "episodes",
    "rollout_until_finish_enough_non_dummy_tasks": "signal",
    "rollout_until_any_client_agree_sync_weight": "any_client",
    "rollout_until_all_clients_agree_sync_weight": "all_clients",
}
"""ajet's values of `swarm.collect` by AgentJet's."""

_VALUES = {
    **{("swarm.collect", there): here for there, here in COLLECTION_METHODS.items()},
    ("task_reader.type", "dataset_file"): "jsonl_dataset_file",
    ("task_judge.rubrics_auto_grader.input_data_type", "dataset_file"): "jsonl_dataset_file",
    ("experiment_name", "read_yaml_name"): None,
}
"""ajet's values by AgentJet's; None for the default."""

_SHORT = {"trainer_common.algorithm": "adv_estimator"}
"""Sections that may be a string, with the key that it sets."""

WITHOUT_EFFECT = {
    "rollout.mode": "every engine answers calls concurrently",
    "rollout.enable_oversample": "a group never has more attempts than num_repeat",
    "context_tracker.alien_llm_model": (
        "only judges call another model, named by task_judge.alien_llm_model"
    ),
    "context_tracker.alien_llm_response_length": "only judges call another model",
    "enable_experimental_interchange_server": "the gateway handles every call",
    "interchange_server": "the gateway handles every call",
    "task_runner": "`ajet work` sets where episodes run, rollout.timeout how long they may take",
    "enable_swarm_mode": "`ajet swarm start` serves a swarm, `ajet train` does not",
    "lora.load_format": "an adapter is loaded from the checkpoint that holds it",
    "lora.layered_summon": "it belongs to verl's way of handing over weights",
    "rollout.ppo_max_token_len_per_gpu": "trainer_common.micro_batch_tokens limits a micro-batch",
    "rollout.chat_template_generate_prompt_type": (
        "the ids of each prompt are known, so no token of it is trained"
    ),
    "trainer_common.kl_penalty_type": "trainer_common.kl_loss_type sets the form of the KL term",
    "trainer_common.val_print_to_markdown_file_path": "`ajet trace` shows every episode",
    "trainer_common.train_print_to_markdown_file_path": "`ajet trace` shows every episode",
    "trainer_common.loss_weight_normalization_episode_level": (
        "trainer_common.loss_aggregation sets how samples are weighted"
    ),
    "trainer_common.advantage_estimation_episode_level": (
        "each episode counts once in its group's baseline"
    ),
    "task_reader.huggingface_dat_repo.http_proxy_address": "HTTPS_PROXY names a proxy",
    "trainer_verl": "verl's own keys stand under `verl:`",
    "execute_test": "it controls AgentJet's own tests",
    "execute_testing_lambda": "it controls AgentJet's own tests",
}
"""Keys and sections below `ajet:` that are accepted without validation, and why they have no
effect."""

IGNORED_ROOTS = {
    "hydra": "it belongs to Hydra; ajet has built-in defaults",
    "defaults": "it belongs to Hydra; ajet has built-in defaults",
    "trainer": "it belongs to verl; put verl's keys under `verl:`",
    "actor_rollout_ref": "it belongs to verl; put verl's keys under `verl:`",
}
"""Ignored roots beside `ajet:`."""


SWARM_BACKBONES = ("local", "tinker")
TRACKERS = ("wandb", "swanlab")
_ABSENT = object()


@dataclass(frozen=True)
class Translation:
    """Keys of a config without effect."""

    dropped: tuple[str, ...] = ()
    """Keys, as dotted paths."""
    roots: tuple[str, ...] = ()

    def __add__(self, other: Translation) -> Translation:
        return Translation((*self.dropped, *other.dropped), (*self.roots, *other.roots))

    def notices(self) -> list[str]:
        """A line for the ignored roots, and one for the removed keys."""
        notices = []
        if self.roots:
            notices.append(
                "ignored: "
                + with_reasons((f"`{root}:`", IGNORED_ROOTS[root]) for root in self.roots)
            )
        if self.dropped:
            notices.append(
                "without effect: "
                + with_reasons((path, WITHOUT_EFFECT[path]) for path in self.dropped)
            )
        return notices


def with_reasons(pairs: Iterable[tuple[str, str]]) -> str:
    """`a, b (why); c (why)`: names grouped by reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in pairs:
        names = by_reason.setdefault(reason, [])
        if name not in names:
            names.append(name)
    return "; ".join(f"{', '.join(names)} ({reason})" for reason, names in by_reason.items())


def translate(source: Source) -> Translation:
    """Rename AgentJet's keys in place. Raises ConfigError if a file has a key under both names."""
    _set_short(source)
    _switch_lora(source)
    for old, new in RENAMED.items():
        if (value := source.get(f"ajet.{old}", _ABSENT)) is _ABSENT:
            continue
        places = [source.origins.get(f"ajet.{name}", "") for name in (old, new)]
        if all(place.startswith("in ") for place in places) and not isinstance(value, Mapping):
            raise ConfigError(
                f"{old} ({places[0]}) and {new} ({places[1]}) are one key; keep the second"
            )
        source.move(f"ajet.{old}", f"ajet.{new}")
    for (path, there), here in _VALUES.items():
        if source.get(f"ajet.{path}") == there:
            origin = source.origin(f"ajet.{path}") or ""
            source.remove(f"ajet.{path}")
            if here is not None:
                source.set(f"ajet.{path}", here, origin)
    dropped = tuple(
        path for path in WITHOUT_EFFECT if source.get(f"ajet.{path}", _ABSENT) is not _ABSENT
    )
    for path in dropped:
        source.remove(f"ajet.{path}")
    if source.get("ajet.lora") == {}:
        source.remove("ajet.lora")
    roots = tuple(root for root in IGNORED_ROOTS if root in source.document)
    for root in roots:
        source.remove(root)
    return Translation(dropped, roots)


JOB_ARGUMENTS = {
    "experiment_dir": "experiment_dir",
    "project_name": "project_name",
    "logging": "trainer_common.logger",
    "num_repeat": "rollout.num_repeat",
    "batch_size": "data.train_batch_size",
    "swarm_mode": "enable_swarm_mode",
    "swarm_mode_sample_collection_method": "swarm_mode_sample_collection_method",
    "max_env_worker": "rollout.max_env_worker",
    "max_num_seqs": "rollout.max_num_seqs",
    "max_prompt_length": "data.max_prompt_length",
    "max_response_length": "data.max_response_length",
    "max_response_length_in_one_turn": "rollout.max_response_length_in_one_turn",
    "max_model_len": "rollout.max_model_len",
    "compute_madness_checklist": "rollout.compute_madness_checklist",
    "tensor_model_parallel_size": "rollout.tensor_model_parallel_size",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "ppo_max_token_len_per_gpu": "rollout.ppo_max_token_len_per_gpu",
    "ulysses_sequence_parallel_size": "trainer_common.ulysses_sequence_parallel_size",
    "nnodes": "trainer_common.nnodes",
    "mini_batch_num": "trainer_common.mini_batch_num",
    "lr": "trainer_common.optim.lr",
    "lora_rank": "lora.lora_rank",
    "lora_alpha": "lora.lora_alpha",
    "lora_target_modules": "lora.target_modules",
    "lora_load_format": "lora.load_format",
    "timeline_compare_level": "context_tracker.timeline_merging_policy.timeline_compare_level",
    "val_print_to_markdown_file_path": "trainer_common.val_print_to_markdown_file_path",
    "train_print_to_markdown_file_path": "trainer_common.train_print_to_markdown_file_path",
}
"""Keys that further arguments of AgentJet's `AgentJetJob` set."""


class SettableSection:
    """A section of a job's config that programs read and set by attributes."""

    def __init__(
        self, section: object, set_key: Callable[[str, object], object], path: str = ""
    ) -> None:
        vars(self).update(_section=section, _set_key=set_key, _path=path)

    def __getattr__(self, name: str) -> Any:
        try:
            value = getattr(self._section, name)
        except AttributeError:
            value = None  # a key of AgentJet's, which can be set
        if value is None or isinstance(value, BaseModel):
            if value is None and name in getattr(type(self._section), "model_fields", {}):
                return None
            return SettableSection(value, self._set_key, f"{self._path}{name}.")
        return value

    def __setattr__(self, name: str, value: object) -> None:
        self._set_key(f"{self._path}{name}", value)


def for_swarm(text: str) -> tuple[str, list[str]]:
    """The config that a client of AgentJet's swarm sends, for a server of ours; also what was
    changed in it, a line each.

    Its defaults name a backbone, loggers and tasks of AgentJet's own server. Clients bring agent,
    judge and tasks. Raises ConfigError for what is no mapping.
    """
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"the config is not YAML: {error}") from error
    values = document.get("ajet") if isinstance(document, dict) else None
    if not isinstance(values, dict):
        raise ConfigError("the config must be a mapping with the section `ajet`")
    changed: list[str] = []
    if values.get("backbone") not in (None, *SWARM_BACKBONES):
        changed.append(f"backbone {values['backbone']}: this server trains with `local`")
        values["backbone"] = "local"
    for name in ("task_reader", "task_judge"):
        if values.pop(name, None) is not None:
            changed.append(f"{name}: the clients bring it")
    if isinstance(values.get("rollout"), dict) and values["rollout"].pop("user_workflow", None):
        changed.append("rollout.user_workflow: the clients bring it")
    common = values.get("trainer_common")
    if isinstance(common, dict) and common.get("logger") is not None:
        if isinstance(common["logger"], list):
            named = common["logger"]
        else:
            named = [common["logger"]]
        missing = [name for name in named if name in TRACKERS and find_spec(name) is None]
        if missing:
            changed.append(f"trainer_common.logger {', '.join(missing)}: not installed here")
            common["logger"] = [name for name in named if name not in missing] or ["console"]
    return yaml.safe_dump(document, sort_keys=False), changed


def _set_short(source: Source) -> None:
    for path, name in _SHORT.items():
        if isinstance(text := source.get(f"ajet.{path}"), str):
            origin = source.origin(f"ajet.{path}") or ""
            source.remove(f"ajet.{path}")
            source.set(f"ajet.{path}.{name}", text, origin)


def _switch_lora(source: Source) -> None:
    """A rank above 0 switches LoRA on there; here a key of its own does."""
    rank = source.get("ajet.lora.lora_rank")
    if rank is None:
        return
    origin = source.origin("ajet.lora.lora_rank") or ""
    if rank:
        source.set("ajet.model.lora.enabled", True, origin)
        return
    for name in ("lora_rank", "lora_alpha", "target_modules"):
        if source.get(f"ajet.lora.{name}", _ABSENT) is not _ABSENT:
            source.remove(f"ajet.lora.{name}")
