"""From a command line to a Config: what stands for a YAML file, and what is laid over one.

The options of commands that run an agent without training it, and the config that they mean.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from ajet_sdk.config.config import Config, load_config
from ajet_sdk.config.judge_kinds import KINDS, judge_forms
from ajet_sdk.errors import ConfigError
from ajet_sdk.judges.load import judge_section
from ajet_sdk.types import Json

JUDGE_HELP = f"{', '.join(judge_forms(KINDS))}, or a judge of an installed package."


AgentAndOverrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="AGENT KEY=VALUE", help="The agent, unless the config names it, and overrides."),
]
Conf = Annotated[Path | None, typer.Option("--conf", "-c", help="A config file with the top-level key `ajet:`.")]
MostTasks = Annotated[int | None, typer.Option("--limit", "-n", min=1, help="Maximum number of tasks, from the first.")]
WithLogview = Annotated[
    bool, typer.Option("--with-logview", help="Serve the viewer to a browser during the run; prints the URL.")
]


def split_arguments(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """`[AGENT] [KEY=VALUE]...` as the agent's class path, if there is one, and the overrides."""
    overrides = [text for text in arguments if "=" in text]
    agents = [text for text in arguments if "=" not in text]
    if len(agents) > 1:
        raise ConfigError(f"give one agent only (got {' and '.join(agents)}); overrides have the form ajet.key=value")
    if agents and ":" not in agents[0] and "->" not in agents[0]:
        raise ConfigError(
            f"an agent is file.py:function or package.module->Name (got {agents[0]!r}); to give a config file, "
            "use --conf"
        )
    return (agents[0] if agents else None), overrides


@dataclass
class Arguments:
    """The options of `ajet run` and `ajet train`; `config()` merges them over the config file and the defaults."""

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
    more: Mapping[str, object] = field(default_factory=dict)
    """Further keys by dotted path, e.g. `model.base_url`; None leaves a key unset."""
    recorded: Mapping[str, object] = field(default_factory=dict)
    """The document of a config that a run recorded, over which the other settings are laid."""
    beside: Path | None = None
    """The file that the recorded config came from."""

    def config(self) -> Config:
        """The config, checked. Raises ConfigError."""
        overrides: dict[str, object] = {
            "backbone": self.backbone,
            "rollout.user_workflow": _from_here(self.agent) if self.agent else None,
            "model.path": _absolute(self.model) if self.model and Path(self.model).exists() else self.model,
            "model.scripted": _from_here(self.scripted) if self.scripted else None,
            "task_reader.skip_bad_rows": self.skip_bad_rows or None,
            "task_judge": None if self.judge is None else judge_section(self.judge),
            **self._tasks(),
            **self.more,
        }
        if self.conf is None and self.agent:
            overrides.setdefault("experiment_name", f"{_stem(self.agent)}-{datetime.now():%Y%m%d-%H%M%S}")
        document: Json = copy.deepcopy({"ajet": {}, **self.recorded})
        for path, value in overrides.items():
            if value is not None:
                _put(document["ajet"], path, value)
        config = load_config(self.conf, self.overrides, document, beside=self.beside)
        if self.exp_dir is not None:
            config = config.model_copy(update={"experiment_dir": str(self.exp_dir / config.experiment_name)})
        return config

    def _tasks(self) -> dict[str, object]:
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


def _put(values: Json, path: str, value: object) -> None:
    *sections, last = path.split(".")
    for name in sections:
        values = values.setdefault(name, {})
    values[last] = value


def _from_here(class_path: str) -> str:
    """A class path with an absolute file: on the command line, paths are relative to the current directory."""
    for separator in ("->", ":"):
        file, matched, name = class_path.rpartition(separator)
        if matched and Path(file).is_file():
            return f"{Path(file).resolve()}{separator}{name}"
    return class_path


def _absolute(path: str | None) -> str | None:
    return str(Path(path).expanduser().resolve()) if path is not None else None


def _stem(class_path: str) -> str:
    place = class_path.replace("->", ":").rpartition(":")[0]
    return Path(place).stem if place.endswith(".py") else place.rpartition(".")[2]


@dataclass(frozen=True)
class AgentOptions:
    """The model, the judge, and the directory of the episodes."""

    conf: Annotated[
        Path | None,
        typer.Option(
            "--conf", "-c", help="Config file with the top-level key `ajet:`; it may name agent, judge and model."
        ),
    ] = None
    judge: Annotated[str | None, typer.Option(help=JUDGE_HELP)] = None
    base_url: Annotated[str | None, typer.Option(help="URL of an OpenAI-compatible endpoint.")] = None
    model: Annotated[
        str | None,
        typer.Option(
            help="Model name at the endpoint (or at OPENAI_BASE_URL), a local directory, a Hugging Face name, or a "
            "name of `ajet model list`."
        ),
    ] = None
    api_key_env: Annotated[str | None, typer.Option(help="Environment variable with the endpoint's API key.")] = None
    scripted: Annotated[str | None, typer.Option(help="replies.py:function that replies instead of a model.")] = None
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Sampling temperature. Default: the agent's own.")
    ] = None
    exp_dir: Annotated[Path | None, typer.Option(help="Create the trace directory in this directory.")] = None

    def config(
        self,
        agent: str | None,
        overrides: Sequence[str] = (),
        *,
        tasks: str | None = None,
        val_tasks: str | None = None,
        skip_bad_rows: bool = False,
        more: Mapping[str, object],
        recorded: Mapping[str, object] | None = None,
        beside: Path | None = None,
    ) -> Config:
        """The config of a run of that agent; `more` has further keys, `recorded` and `beside` are as in `Arguments`.

        From then on an agent's module may be imported. Raises ConfigError, also where nothing answers.
        """
        config = Arguments(
            conf=self.conf,
            overrides=overrides,
            agent=agent,
            judge=self.judge,
            tasks=tasks,
            val_tasks=val_tasks,
            model=self.model if self.base_url is None else None,
            scripted=self.scripted,
            skip_bad_rows=skip_bad_rows,
            exp_dir=self.exp_dir,
            more={
                "model.base_url": self.base_url,
                "model.name": self.model if self.base_url is not None else None,
                "model.api_key_env": self.api_key_env,
                "rollout.temperature": self.temperature,
                **more,
            },
            recorded=recorded or {},
            beside=beside,
        ).config()
        if not (config.model.base_url or config.model.path or config.model.scripted):
            raise ConfigError(
                "no model given: pass --base-url URL --model NAME (an endpoint), --model PATH (a local model), "
                "or --scripted replies.py:reply"
            )
        return config
