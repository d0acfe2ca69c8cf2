"""One job's configuration: YAML under the root `ajet:`, overrides, defaults, and where each value
came from.

    config = load_config(Path("math.yaml"), ["ajet.rollout.num_repeat=8"])
    config.rollout.num_repeat        # 8
    config.frozen_lake.map_size      # another root of the same file, untouched

Keys and defaults are in `schema.py` and the other schema modules; `objects.py` loads objects by
class path.
"""

from __future__ import annotations

import difflib
import logging
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal, get_args

import yaml
from pydantic import BaseModel, PrivateAttr, ValidationError, model_validator

from ajet_sdk.config.agentjet import SettableSection, Translation, translate, with_reasons
from ajet_sdk.config.mistakes import explain
from ajet_sdk.config.objects import load_object
from ajet_sdk.config.rollout_schema import Rollout
from ajet_sdk.config.schema import (
    CLUSTERS,
    HERE,
    IDLE,
    ContextTracker,
    Data,
    Debug,
    ModelSource,
    Section,
    Tinker,
    key,
    section,
    wrong,
)
from ajet_sdk.config.source import Roots, Source, read_document, read_override
from ajet_sdk.config.swarm_schema import Swarm
from ajet_sdk.config.task_schema import TaskJudge, TaskReader
from ajet_sdk.config.trainer_schema import READ_BY, TrainerCommon
from ajet_sdk.errors import ConfigError
from ajet_sdk.secret_keys import masked
from ajet_sdk.types import Json

log = logging.getLogger("ajet.config")

_QUIET_ON_ONE_MACHINE = tuple(
    path for path in CLUSTERS if path != "rollout.multi_turn.expected_steps"
)
BackboneName = Literal["debug", "local", "tinker", "trinity", "verl"]


class Config(Section):
    """Everything under `ajet:`, validated and frozen. `roots` has the other roots of the file.

        ajet.Config(model={"path": "Qwen/Qwen2.5-0.5B-Instruct"}, rollout={"num_repeat": 8})

    Raises ConfigError that lists every unknown key, with the nearest known one, and every wrong
    value.
    """

    project_name: str = key("ajet", "Project under which wandb and swanlab group experiments.")
    experiment_name: str = key(
        "", "Name of the run and of its directory; empty: the config file's name and the time."
    )
    experiment_dir: str = key(
        "auto", "Directory of the experiment; auto: `launcher_record/{experiment_name}`."
    )
    backbone: BackboneName = key(
        "local",
        "What runs the job: debug (a few episodes in one process, with breakpoints, no training),"
        " local (training in this process), tinker (training at a service), trinity or verl"
        " (training on a Ray cluster).",
    )
    model: ModelSource = section(ModelSource, "The model to train, and how it is loaded.")
    tinker: Tinker = section(Tinker, "Backbone tinker: the service that trains the model.")
    data: Data = section(Data, "Sequence lengths and batch size.")
    rollout: Rollout = section(Rollout, "How the agent runs and how its model samples.")
    task_reader: TaskReader = section(TaskReader, "Where tasks come from.")
    task_judge: TaskJudge = section(TaskJudge, "What computes the reward.")
    context_tracker: ContextTracker = section(
        ContextTracker, "How calls are merged into training samples."
    )
    debug: Debug = section(Debug, "The debug backbone.")
    swarm: Swarm = section(Swarm, "How `ajet swarm start` collects the episodes of its clients.")
    trainer_common: TrainerCommon = section(
        TrainerCommon, "Training, validation, checkpoints, logging."
    )

    _roots: Roots = PrivateAttr(default_factory=lambda: Roots({}))
    _source: Path | None = PrivateAttr(default=None)
    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _translated: Translation = PrivateAttr(default_factory=Translation)
    _set: Callable[[str, object], object] | None = PrivateAttr(default=None)
    """Sets a key of the job that the config is of."""

    def __init__(self, **values: object) -> None:
        source = Source({}, {})
        source.merge({"ajet": {name: _plain(value) for name, value in values.items()}}, "argument")
        self._read(source, translate(source))

    def _read(self, source: Source, translated: Translation, path: Path | None = None) -> None:
        """Read a document and remember where each value came from. Raises ConfigError."""
        values = source.document.get("ajet") or {}
        if isinstance(values, Mapping) and values.get("experiment_name", "") == "":
            values = {**values, "experiment_name": default_name(path)}
        try:
            self.__pydantic_validator__.validate_python(values, self_instance=self)
        except ValidationError as error:
            raise ConfigError(
                "\n".join(explain(error, source, list(keys(lists=True)), _default))
            ) from None
        self._roots = Roots(
            {name: value for name, value in source.document.items() if name != "ajet"}
        )
        self._translated = translated
        self._source = path.resolve() if path is not None else None
        self._origins = {
            place.removeprefix("ajet."): origin
            for place, origin in source.origins.items()
            if place.startswith("ajet.")
        }
        for notice in self.notices():
            log.warning("%s", notice)

    @property
    def ajet(self) -> Any:
        """Itself, as programs for AgentJet read `config.ajet.rollout`; of a job's config, a view
        that sets keys of the job: `job.config.ajet.rollout.num_repeat = 8`."""
        return self if self._set is None else SettableSection(self, self._set)

    def of_job(self, set_key: Callable[[str, object], object]) -> Config:
        """The config of a job whose keys `set_key` sets."""
        self._set = set_key
        return self

    def to_dict(self) -> dict[str, Any]:
        """The values that were set, and the roots, as a document."""
        values = self.model_dump(mode="json", exclude_unset=True)
        return {"ajet": values, **self._roots.plain()}

    @property
    def roots(self) -> Roots:
        """The roots beside `ajet:`."""
        return self._roots

    @property
    def source(self) -> Path | None:
        """The file that the config was read from."""
        return self._source

    @property
    def directory(self) -> Path:
        """The experiment's directory; it may not exist."""
        if self.experiment_dir != "auto":
            return Path(self.experiment_dir)
        return Path("launcher_record") / (self.experiment_name or "ajet")

    @property
    def model_name(self) -> str:
        """The model's name: `model.name`, or the last part of `model.path`."""
        return self.model.name or Path(self.model.path or "model").name

    def origin(self, path: str) -> str:
        """The origin of the value of a key such as `rollout.num_repeat`: a file and line, an
        override, `default`."""
        return self._origins.get(path, "default")

    def is_set(self, path: str) -> bool:
        """Whether a file, an override or an argument gave this key a value."""
        return any(known == path or known.startswith(path + ".") for known in self._origins)

    @property
    def is_seeded(self) -> bool:
        """Whether requests have a seed; for an endpoint, only if `trainer_common.seed` is set."""
        return not self.model.base_url or self.is_set("trainer_common.seed")

    @property
    def validation_attempts(self) -> int:
        """Sampled attempts per validation task: `val_pass_n`, or `val_kwargs.num_repeat` if only
        that is set."""
        path = "rollout.val_kwargs.num_repeat"
        if self.is_set(path) and not self.is_set("trainer_common.val_pass_n"):
            return self.rollout.val_kwargs.num_repeat
        return self.trainer_common.val_pass_n

    def resolve(self, path: str | Path) -> Path:
        """Resolve a path: next to the config file if it exists there, else from the working
        directory."""
        path = Path(path).expanduser()
        if (
            not path.is_absolute()
            and self._source is not None
            and (self._source.parent / path).exists()
        ):
            return self._source.parent / path
        return path

    def load(self, class_path: str) -> Any:
        """Load the object of a class path in the config."""
        return load_object(class_path, self._source.parent if self._source else None)

    def dump_yaml(self, *, only_set: bool = False) -> str:
        """Return the config as YAML: all effective values, or only those that were set."""
        values = self.model_dump(mode="json", exclude_unset=only_set)
        return plain_yaml({"ajet": values, **self._roots.plain()})

    def shown(self) -> Json:
        """Return all effective values and roots as plain data without secrets."""
        return dict(masked({"ajet": self.model_dump(mode="json"), **self._roots.plain()}, "***"))

    def notices(self) -> list[str]:
        """Notices on keys without effect, or with an effect that differs from their name."""
        notices = self._translated.notices()
        level = "context_tracker.timeline_merging_policy.timeline_compare_level"
        if self.context_tracker.timeline_merging_policy.timeline_compare_level == "text":
            notices.append(
                f"{level}: text comparison is not supported; calls are compared by token ids, as"
                f" with token ({self.origin(level)})"
            )
        idle = [
            path
            for path in self._origins
            if path != level and is_idle(path) and _at(self, path) != _default(path)
        ]
        idle = [path for path in idle if path.rpartition(".")[0] not in idle]
        if idle:
            notices.append(
                "without effect in this version: "
                + with_reasons((p, _why_idle(p)) for p in sorted(idle))
            )
        if self.backbone in ("local", "tinker"):
            quiet = (*_QUIET_ON_ONE_MACHINE, *(HERE if self.backbone == "tinker" else ()))
            paths = [
                path for path in quiet if self.is_set(path) and _at(self, path) != _default(path)
            ]
            if paths:
                notices.append(f"without effect with backbone {self.backbone}: {', '.join(paths)}")
            estimator = self.trainer_common.algorithm.adv_estimator
            if self.trainer_common.algorithm.replays:
                reads = {estimator, "replay"}
            else:
                reads = {estimator}
            read_by = {
                f"trainer_common.{name}": by for name, by in READ_BY.items() if not reads & {*by}
            }
            paths = [
                p
                for p in read_by
                if self.is_set(p) and _at(self, p) not in (None, False, _default(p))
            ]
            if paths:
                unread = ((path, f"only for {', '.join(read_by[path])}") for path in paths)
                notices.append(f"without effect with {estimator}: {with_reasons(unread)}")
        return notices

    @model_validator(mode="before")
    @classmethod
    def _tool_calls_left_unread(cls, data: object) -> object:
        """Let `rollout.force_disable_toolcalls` select the parser `none`."""
        if not isinstance(data, Mapping):
            return data
        rollout = data.get("rollout")
        model = data.get("model") or {}
        if not isinstance(rollout, Mapping) or rollout.get("force_disable_toolcalls") is not True:
            return data
        if isinstance(model, Mapping):
            return {**data, "model": {**model, "tool_call_parser": "none"}}
        return data

    @model_validator(mode="before")
    @classmethod
    def _sampled_as_trained(cls, data: object) -> object:
        """Sample at temperature 1 by default with backbone tinker, as the service trains that
        distribution."""
        if not isinstance(data, Mapping) or data.get("backbone") != "tinker":
            return data
        rollout = data.get("rollout") or {}
        if isinstance(rollout, Mapping):
            return {**data, "rollout": {"temperature": 1.0, **rollout}}
        return data

    @model_validator(mode="after")
    def _across_sections(self) -> Config:
        name = self.experiment_name  # empty names are replaced
        odd = name.startswith(".") or any(
            c in "/\\" or unicodedata.category(c) in ("Cc", "Cs") for c in name
        )
        if odd or name != name.strip() or len(name.encode(errors="replace")) > 200:
            raise wrong(
                "experiment_name",
                "must be a valid directory name: at most 200 bytes, no / or \\, no control"
                " characters, no leading . {got}; to give a path, set experiment_dir",
            )
        estimator = self.trainer_common.algorithm.adv_estimator
        grouped = self.trainer_common.algorithm.grouped
        if self.backbone != "debug" and self.rollout.num_repeat < 2 and grouped:
            raise wrong(
                "rollout.num_repeat",
                f"must be at least 2 for {estimator} {{got}}: with one attempt per task every"
                " advantage is 0",
            )
        rollout = self.rollout
        if self.backbone in ("local", "tinker") and rollout.deterministic and rollout.max_staleness:
            raise wrong(
                "rollout.max_staleness",
                "must be 0 with rollout.deterministic {got}: otherwise timing decides which weights"
                " sample a call",
            )
        common = self.trainer_common
        updates = common.mini_batch_num * common.ppo_epochs
        if rollout.carry_over and rollout.max_staleness < (rollout.carry_over + 1) * updates:
            raise wrong(
                "rollout.carry_over",
                f"is too large {{got}} for rollout.max_staleness: {rollout.max_staleness}, which has"
                f" to be at least {(rollout.carry_over + 1) * updates}: a group that is carried over"
                " grows older by the updates of each step, and sampling has to be a step ahead",
            )
        if rollout.trained_models == "separate":
            self._check_separate_models()
        drawn = (rollout.temperature, rollout.top_p, max(rollout.top_k, 0))
        remote = self.trainer_common.algorithm.remote_teacher
        service = self.backbone == "tinker"
        if (remote or service) and rollout.sampling == "run" and drawn != (1.0, 1.0, 0):
            if service:
                who = "backbone tinker: the service"
            else:
                who = "opd with a teacher at an endpoint: it"
            raise wrong(
                "rollout.temperature",
                f"must be 1.0 {{got}}, and top_p and top_k without effect, for {who} returns"
                " log-probabilities of that distribution only"
                + ("" if service else ". Or name the teacher as a directory"),
            )
        both = {"max_model_len", "max_response_length_in_one_turn"} <= rollout.model_fields_set
        if both and rollout.max_response_length_in_one_turn > rollout.max_model_len:
            raise wrong(
                "rollout.max_response_length_in_one_turn",
                f"must be at most rollout.max_model_len ({rollout.max_model_len}) {{got}}",
            )
        if rollout.overlong_buffer > rollout.max_response_length_in_one_turn:
            raise wrong(
                "rollout.overlong_buffer",
                "must be at most rollout.max_response_length_in_one_turn"
                f" ({rollout.max_response_length_in_one_turn}) {{got}}",
            )
        return self

    def _check_separate_models(self) -> None:
        """Refuse what needs one model for all trained targets."""
        common = self.trainer_common
        rollout = self.rollout
        why = ""
        if self.backbone not in ("local", "debug"):
            why = f"backbone {self.backbone}; use backbone local"
        elif common.algorithm.adv_estimator in ("sft", "dpo", "opd"):
            why = (
                f"trainer_common.algorithm.adv_estimator: {common.algorithm.adv_estimator}; use an"
                " estimator of rewards"
            )
        elif common.algorithm.replay:
            why = "trainer_common.algorithm.replay: a stored conversation names no target"
        elif rollout.name == "vllm":
            why = "rollout.name: vllm, which serves one model; leave it out"
        if why:
            raise wrong("rollout.trained_models", f"separate is not supported with {why} {{got}}")

    def __eq__(self, other: object) -> bool:
        """Equal values and roots, regardless of their origin."""
        if not isinstance(other, Config):
            return NotImplemented
        return self.__dict__ == other.__dict__ and self._roots == other._roots

    __hash__ = None  # type: ignore[assignment]  # lists inside: compare, do not hash

    if (
        not TYPE_CHECKING
    ):  # another root as an attribute; hidden from type checkers, which then find typos

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                private = object.__getattribute__(self, "__pydantic_private__") or {}
                roots = private.get("_roots")
                if roots is not None and name in roots:
                    return roots[name]
                if name.startswith("_"):
                    raise
                known = [*type(self).model_fields, *(roots or ())]
                raise AttributeError(
                    f"the config has no section {name!r}{_nearest(name, known)}"
                ) from None


def load_config(
    path: Path | str | None = None,
    overrides: Sequence[str] = (),
    values: Mapping[str, object] | None = None,
    *,
    beside: Path | None = None,
) -> Config:
    """Read and validate a config. Precedence, lowest first: defaults, file, `values`, `overrides`.

    Args:
        path: a YAML file; None: the defaults. Its relative paths are resolved next to the file first.
        overrides: settings as on the command line, such as `ajet.rollout.num_repeat=8`; the value is read as YAML.
        values: a document like that of a file (`{"ajet": {...}, "frozen_lake": {...}}`), or only the content of the
            root `ajet`.
        beside: the file of `values`, if they came from a file.

    Returns:
        The config, frozen.

    Raises:
        ConfigError: lists all invalid keys and values, each with file and line.
    """
    source = Source({}, {})
    translated = Translation()
    if path is not None:
        path = Path(path)
        source = read_document(path, tuple(Config.model_fields))
        translated += translate(source)
    if values is not None:
        source.merge(values if "ajet" in values else {"ajet": values}, "argument")
        translated += translate(source)
    for text in overrides:
        source.set(
            *read_override(text, known=(*Config.model_fields,), roots=tuple(source.document))
        )
        translated += translate(source)
    config = Config.__new__(Config)
    config._read(source, translated, Path(path) if path is not None else None)
    if path is None:
        config._source = beside
    return config


def _plain(value: object) -> object:
    """Convert a value for YAML: a section to its set values, a path to text."""
    if isinstance(value, Section):
        return value.model_dump(exclude_unset=True)
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    return str(value) if isinstance(value, PurePath) else value


def plain_yaml(document: Mapping[str, object]) -> str:
    """Write a document as YAML, without escapes except for line separators."""
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    odd = any(character in text for character in "\x85\u2028\u2029")
    return yaml.safe_dump(document, sort_keys=False) if odd else text


def default_name(path: Path | None) -> str:
    return f"{path.stem if path is not None else 'ajet'}-{datetime.now():%Y%m%d-%H%M%S}"


def _nearest(name: str, known: Sequence[str]) -> str:
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {matches[0]}?" if matches else ""


def _default(path: str) -> object:
    return _at(Config.model_construct(), path)


def _at(config: Config, path: str) -> object:
    value: object = config
    for step in path.split("."):
        if isinstance(value, Mapping):
            value = value.get(step)
        else:
            value = getattr(value, step, None)
    return value


def is_idle(path: str) -> bool:
    """Whether a key is accepted but has no effect in this version."""
    return _why_idle(path) != ""


def _why_idle(path: str) -> str:
    return next((why for idle, why in IDLE.items() if f"{path}.".startswith(f"{idle}.")), "")


def keys(
    model: type[BaseModel] = Config, prefix: str = "", *, lists: bool = False
) -> Iterator[str]:
    """Yield every key under `ajet:` as a dotted path, sections before their keys; with `lists` also
    keys of sections in lists."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        yield path
        for inner in [field.annotation, *(get_args(field.annotation) if lists else ())]:
            if isinstance(inner, type(BaseModel)):  # on Python 3.10 list[str] is a type too
                yield from keys(inner, f"{path}.", lists=lists)
