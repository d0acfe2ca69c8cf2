"""Translates configs written for AgentJet: keys with another name in ajet, and keys without effect,
with the reason.

`translate` renames the keys of a document before its validation. Every key of AgentJet's files is
either in the schema or in one of the tables here; any other key is an error that names the nearest
one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ajet_sdk.config.source import Source
from ajet_sdk.errors import ConfigError

RENAMED = {
    "rollout.tensor_model_parallel_size": "rollout.tensor_parallel_size",
    "task_reader.dataset_file": "task_reader.jsonl_dataset_file",
    "task_judge.rubrics_auto_grader.dataset_file": (
        "task_judge.rubrics_auto_grader.jsonl_dataset_file"
    ),
}
"""ajet's names of keys and sections, by AgentJet's."""

_VALUES = {
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
    "task_runner": "rollout.runner sets where episodes run, rollout.timeout how long they may take",
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
    for path, name in _SHORT.items():
        if isinstance(text := source.get(f"ajet.{path}"), str):
            origin = source.origin(f"ajet.{path}") or ""
            source.remove(f"ajet.{path}")
            source.set(f"ajet.{path}.{name}", text, origin)
    dropped = tuple(
        path for path in WITHOUT_EFFECT if source.get(f"ajet.{path}", _ABSENT) is not _ABSENT
    )
    for path in dropped:
        source.remove(f"ajet.{path}")
    roots = tuple(root for root in IGNORED_ROOTS if root in source.document)
    for root in roots:
        source.remove(root)
    return Translation(dropped, roots)
