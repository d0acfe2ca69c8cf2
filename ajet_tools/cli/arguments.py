"""Converts command-line options and overrides to a Config.

An option for a single config key takes its help from the key's description (`key_option`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from ajet_sdk.config.config import Config, load_config
from ajet_sdk.config.judge_kinds import KINDS, judge_forms
from ajet_sdk.errors import ConfigError
from ajet_sdk.judges.load import judge_section
from ajet_sdk.types import Json
from ajet_tools.text.model_name import ModelName

_FILES = "task_reader.jsonl_dataset_file"
JUDGE_HELP = f"{', '.join(judge_forms(KINDS))}, or a judge of an installed package."
AgentAndOverrides = Annotated[
    list[str] | None,
    Argument(
        metavar="AGENT KEY=VALUE", help="The agent, unless the config names it, and overrides."
    ),
]
Conf = Annotated[
    Path | None,
    Option(
        "--conf",
        "-c",
        help="Config file with the top-level key `ajet:`; may name agent, judge and model.",
    ),
]
Tasks = Annotated[
    str | None, Option(help="Tasks: a .jsonl file, a directory of Parquet, or a Hugging Face name.")
]
HeldOutTasks = Annotated[str | None, Option(help="Held-out tasks, for validation: a .jsonl file.")]
Host = Annotated[str, Option(help="Address to listen on.")]
Port = Annotated[int, Option(min=0, max=65535, help="Port; 0 chooses a free one and prints it.")]
Resume = Annotated[bool, Option("--resume", help="Continue from the newest checkpoint.")]
MostTasks = Annotated[
    int | None, Option("--limit", "-n", min=1, help="Maximum number of tasks, from the first.")
]


def split_arguments(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Splits `[AGENT] [KEY=VALUE]...` into the agent's class path, if any, and the overrides."""
    overrides = [text for text in arguments if "=" in text]
    agents = [text for text in arguments if "=" not in text]
    if len(agents) > 1:
        raise ConfigError(
            f"give one agent only (got {' and '.join(agents)}); overrides have the form"
            " ajet.key=value"
        )
    if agents and ":" not in agents[0] and "->" not in agents[0]:
        raise ConfigError(
            f"an agent is file.py:function or package.module->Name (got {agents[0]!r}); a config"
            " file needs --conf"
        )
    return (agents[0] if agents else None), overrides


def key_option(key: str, *names: str, **settings: Any) -> Any:
    """Returns an option for a config key, with the key's description as its help."""
    *sections, last = key.split(".")
    model: Any = Config
    for name in sections:
        model = model.model_fields[name].annotation
    return Option(*names, help=model.model_fields[last].description, **settings)


@dataclass(frozen=True)
class JobOptions:
    """Options of every job: config file, judge, model, and parent of its directory."""

    conf: Conf = None
    judge: Annotated[str | None, Option(help=JUDGE_HELP)] = None
    model: Annotated[str | None, key_option("model.path")] = None
    exp_dir: Annotated[
        Path | None, Option(help="Directory in which to create the experiment's directory.")
    ] = None

    def config(
        self,
        agent: str | None,
        overrides: Sequence[str] = (),
        *,
        tasks: str | None = None,
        val_tasks: str | None = None,
        more: Mapping[str, object] | None = None,
        recorded: Mapping[str, object] | None = None,
        beside: Path | None = None,
        cleared: Sequence[str] = (),
    ) -> Config:
        """Combines options, overrides, config file and defaults, in this order of precedence.
        Raises ConfigError.

        Args:
            more: further keys by dotted path, e.g. `model.base_url`; None leaves a key unset.
            recorded: a recorded config document, which the other settings override.
            beside: the file of the recorded config.
            cleared: keys that are null, whatever the config file has.
        """
        settings: dict[str, object] = {
            "rollout.user_workflow": _from_here(agent) if agent else None,
            "model.path": (
                _absolute(self.model) if self.model and Path(self.model).exists() else self.model
            ),
            "task_judge": None if self.judge is None else judge_section(self.judge),
            **_task_keys(tasks, val_tasks),
            **(more or {}),
        }
        if self.conf is None and agent:
            module = agent.replace("->", ":").rpartition(":")[0]
            if module.endswith(".py"):
                stem = Path(module).stem
            else:
                stem = module.rpartition(".")[2]
            settings.setdefault("experiment_name", f"{stem}-{datetime.now():%Y%m%d-%H%M%S}")
        document: Json = copy.deepcopy({"ajet": {}, **(recorded or {})})
        for path, value in settings.items():
            if value is not None:
                _put(document["ajet"], path, value)
        # the model of the config file, in place of which another is named
        for path in cleared:
            _put(document["ajet"], path, None)
        config = load_config(self.conf, overrides, document, beside=beside)
        if self.exp_dir is not None:
            config = config.model_copy(
                update={"experiment_dir": str(self.exp_dir / config.experiment_name)}
            )
        return config


@dataclass(frozen=True)
class AgentOptions(JobOptions):
    """Options of a job without training: JobOptions, and the model that answers the agent.

    Args:
        model: NAME@URL (an OpenAI-compatible endpoint), NAME at OPENAI_BASE_URL, a local directory, a Hugging Face
            name, a name of `ajet model list`, or FILE.py:NAME (a function that replies).
    """

    model: Annotated[str | None, Option(metavar="NAME@URL|PATH|FILE:NAME")] = None

    def config(self, agent: str | None, overrides: Sequence[str] = (), **settings: Any) -> Config:
        """As in `JobOptions`; also raises ConfigError if no model is named."""
        more = dict(settings.pop("more", None) or {})
        if self.model is not None:
            more |= _model_keys(ModelName.parse(self.model))
            settings["cleared"] = tuple(key for key in _MODEL_KEYS if more.get(key) is None)
        config = super().config(agent, overrides, more=more, **settings)
        if not (config.model.base_url or config.model.path or config.model.scripted):
            raise ConfigError(
                "no model given: pass --model NAME@URL, --model PATH, or --model FILE.py:NAME"
            )
        return config


_MODEL_KEYS = ("model.path", "model.base_url", "model.name", "model.scripted")


def _model_keys(model: ModelName) -> dict[str, object]:
    if model.base_url is not None:
        return {"model.base_url": model.base_url, "model.name": model.name, "model.path": None}
    if model.scripted is not None:
        return {"model.scripted": _from_here(model.scripted), "model.path": None}
    return {"model.path": _absolute(model.name) if Path(model.name).exists() else model.name}


def _task_keys(tasks: str | None, val_tasks: str | None) -> dict[str, object]:
    if tasks is None:
        if val_tasks is None:
            return {}
        return {f"{_FILES}.validation.file_path": _absolute(val_tasks)}
    path = Path(tasks)
    # a name of the hub has one slash, and no suffix of a file
    of_hub = not path.exists() and path.suffix not in (".jsonl", ".json") and tasks.count("/") == 1
    if of_hub or path.is_dir() or path.suffix == ".parquet":
        return {
            "task_reader.type": "huggingface_dat_repo",
            "task_reader.huggingface_dat_repo.dataset_path": tasks if of_hub else _absolute(tasks),
        }
    if not path.exists():
        raise ConfigError(f"--tasks: there is no file {tasks}")
    return {
        "task_reader.type": "jsonl_dataset_file",
        f"{_FILES}.training.file_path": _absolute(tasks),
        f"{_FILES}.validation.file_path": _absolute(val_tasks),
    }


def _put(values: Json, path: str, value: object) -> None:
    *sections, last = path.split(".")
    for name in sections:
        values = values.setdefault(name, {})
    values[last] = value


def _from_here(class_path: str) -> str:
    """Makes the file of a class path absolute; on the command line, it is relative to the current
    directory."""
    for separator in ("->", ":"):
        file, matched, name = class_path.rpartition(separator)
        if matched and Path(file).is_file():
            return f"{Path(file).resolve()}{separator}{name}"
    return class_path


def _absolute(path: str | None) -> str | None:
    if path is not None:
        return str(Path(path).expanduser().resolve())
    return None
