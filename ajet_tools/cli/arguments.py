"""From a command line to a Config: what stands for a YAML file, and what is laid over one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet_sdk.errors import ConfigError

if TYPE_CHECKING:
    from ajet_sdk.config import Config

__all__ = ["Arguments", "split_arguments", "use_placeholder_key"]

BUILT_IN_JUDGES = ("exact", "math")


def split_arguments(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """`[AGENT] [KEY=VALUE]...` as the agent's class path, if there is one, and the overrides."""
    overrides = [text for text in arguments if "=" in text]
    agents = [text for text in arguments if "=" not in text]
    if len(agents) > 1:
        raise ConfigError(f"one agent at a time (got {' and '.join(agents)}); an override reads ajet.key=value")
    if agents and ":" not in agents[0] and "->" not in agents[0]:
        raise ConfigError(
            f"an agent reads file.py:function or package.module->Name (got {agents[0]!r}); "
            "a config file is given by --conf"
        )
    return (agents[0] if agents else None), overrides


@dataclass
class Arguments:
    """What the options of `ajet run` and `ajet train` say; `config()` lays it over the file and the defaults."""

    conf: Path | None = None
    overrides: Sequence[str] = ()
    agent: str | None = None
    backbone: str | None = None
    judge: str | None = None
    tasks: str | None = None
    val_tasks: str | None = None
    model: str | None = None
    scripted: str | None = None
    skip_bad_rows: bool = False
    exp_dir: Path | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further keys by dotted path, e.g. `model.base_url`; None says nothing."""

    def config(self) -> Config:
        """The config, checked. Raises ConfigError."""
        from ajet_sdk.config import load_config

        given: dict[str, Any] = {
            "backbone": self.backbone,
            "rollout.user_workflow": _from_here(self.agent) if self.agent else None,
            "model.path": _absolute(self.model) if self.model and Path(self.model).exists() else self.model,
            "model.scripted": _from_here(self.scripted) if self.scripted else None,
            "task_reader.skip_bad_rows": self.skip_bad_rows or None,
            **self._judge(),
            **self._tasks(),
            **self.more,
        }
        if self.conf is None and self.agent:
            given.setdefault("experiment_name", f"{_stem(self.agent)}-{datetime.now():%Y%m%d-%H%M%S}")
        values: dict[str, Any] = {}
        for path, value in given.items():
            if value is not None:
                _put(values, path, value)
        config = load_config(self.conf, self.overrides, values)
        if self.exp_dir is not None:
            config = config.model_copy(update={"experiment_dir": str(self.exp_dir / config.experiment_name)})
        return config

    def _judge(self) -> dict[str, Any]:
        if self.judge is None:
            return {}
        if self.judge in BUILT_IN_JUDGES:
            return {"task_judge.judge_type": self.judge}
        if self.judge.startswith("regex:"):
            return {"task_judge.judge_type": "regex", "task_judge.pattern": self.judge.removeprefix("regex:")}
        if ":" not in self.judge and "->" not in self.judge:
            raise ConfigError(
                "--judge reads file.py:function, package.module->Name, exact, math or regex:PATTERN "
                f"(got {self.judge!r})"
            )
        return {
            "task_judge.judge_type": "customized_protocol",
            "task_judge.judge_protocol": _from_here(self.judge),
        }

    def _tasks(self) -> dict[str, Any]:
        if self.tasks is None:
            if self.val_tasks is not None:
                return {"task_reader.jsonl_dataset_file.validation.file_path": _absolute(self.val_tasks)}
            return {}
        path = Path(self.tasks)
        if path.is_dir() or path.suffix == ".parquet":
            return {
                "task_reader.type": "huggingface_dat_repo",
                "task_reader.huggingface_dat_repo.dataset_path": _absolute(self.tasks),
            }
        if not path.exists() and path.suffix not in (".jsonl", ".json") and self.tasks.count("/") == 1:
            return {
                "task_reader.type": "huggingface_dat_repo",
                "task_reader.huggingface_dat_repo.dataset_path": self.tasks,
            }
        if not path.exists():
            raise ConfigError(f"--tasks: there is no file {self.tasks}")
        return {
            "task_reader.type": "jsonl_dataset_file",
            "task_reader.jsonl_dataset_file.training.file_path": _absolute(self.tasks),
            "task_reader.jsonl_dataset_file.validation.file_path": _absolute(self.val_tasks),
        }


def use_placeholder_key() -> None:
    """An agent's module may make its client when imported, which fails without a key: let there be one."""
    from ajet_sdk.capture import ensure_api_key

    ensure_api_key()


def _put(values: dict[str, Any], path: str, value: Any) -> None:
    *sections, last = path.split(".")
    for name in sections:
        values = values.setdefault(name, {})
    values[last] = value


def _from_here(class_path: str) -> str:
    """A class path of the command line, whose file is meant from here and not from beside a config file."""
    for separator in ("->", ":"):
        place, found, name = class_path.rpartition(separator)
        if found and Path(place).is_file():
            return f"{Path(place).resolve()}{separator}{name}"
    return class_path


def _absolute(path: str | None) -> str | None:
    return str(Path(path).expanduser().resolve()) if path is not None else None


def _stem(class_path: str) -> str:
    place = class_path.replace("->", ":").rpartition(":")[0]
    return Path(place).stem if place.endswith(".py") else place.rpartition(".")[2]
