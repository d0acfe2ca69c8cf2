"""`ajet config`: shows effective values, explains keys, and checks files."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.text import Text
from typer import Argument, Option

from ajet_sdk.config.config import Config, is_idle, load_config, plain_yaml
from ajet_sdk.errors import ConfigError
from ajet_sdk.reporting.output import echo, style, visible
from ajet_sdk.secret_keys import masked
from ajet_tools.cli.config_check import Checked, check_file
from ajet_tools.cli.options import expand_options
from ajet_tools.cli.result import Result, TextResult
from ajet_tools.text.clean import flat_keys

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def config() -> None:
    """Show, check and explain the configuration.

    \b
    ajet config check math.yaml
    ajet config show --conf math.yaml ajet.rollout.num_repeat=8
    ajet config schema rollout
    """


@dataclass(frozen=True)
class ValuesResult(Result):
    """The effective values of a config, and where each came from."""

    ajet: Sequence[Mapping[str, object]]
    roots: Mapping[str, object]
    """Other top-level keys, which are passed to their owners."""

    def show(self, out: Console) -> None:
        width = max((len(str(row["key"])) for row in self.ajet), default=0)
        for row in self.ajet:
            line = Text(f"{row['key']:<{width}}  ")
            line.append(visible(json.dumps(row["value"], ensure_ascii=False)))
            if row["from"] != "default":
                line.append(f"  ({row['from']})", style="dim")
            out.print(line, soft_wrap=True)
        for name in self.roots:
            out.print(f"{name}: passed through to its owner", soft_wrap=True)


@dataclass(frozen=True)
class MappedResult(TextResult):
    """The config of another trainer."""

    mapping: Mapping[str, object]

    def document(self) -> object:
        return self.mapping

    def lines(self) -> list[str]:
        return [plain_yaml(self.mapping).rstrip()]


@app.command()
@expand_options
def show(
    overrides: Annotated[list[str] | None, Argument(metavar="KEY=VALUE", help="Overrides.")] = None,
    conf: Annotated[
        Path | None, Option("--conf", "-c", help="A config file. Default: the built-in defaults.")
    ] = None,
    only_set: Annotated[bool, Option("--set", help="Only keys that were set.")] = False,
    backbone: Annotated[
        str | None, Option(help="Print the config for `trinity` or `verl`, as YAML.")
    ] = None,
) -> ValuesResult | MappedResult:
    """Print each key's effective value and where it came from.

    \b
    ajet config show --conf math.yaml ajet.rollout.num_repeat=8
    ajet config show --conf math.yaml --set
    ajet config show --conf math.yaml --backbone trinity
    """
    changes = list(overrides or ())
    if backbone:
        changes.append(f"ajet.backbone={backbone}")
    config = load_config(conf, changes)
    if backbone in ("trinity", "verl"):
        return MappedResult(_mapping(config, backbone))
    rows = []
    for path, value in flat_keys(masked(config.model_dump(mode="json"), "***")):
        if not only_set or config.is_set(path):
            rows.append({"key": path, "value": value, "from": config.origin(path)})
    return ValuesResult(rows, masked(config.roots.plain(), "***"))


def _mapping(config: Config, backbone: str) -> Mapping[str, object]:
    common = config.trainer_common
    known: dict[str, object] = {
        "run_id": "RUN",
        "model": config.model.path or "",
        "steps": common.total_steps or 0,
        "lr": common.optim.lr,
        "checkpoints": Path(common.checkpoint_base_dir or config.directory / "checkpoint"),
        "val_tasks": 1,
    }
    module = importlib.import_module(f"ajet_sdk.backbones.{backbone}.mapping")
    if backbone == "verl":
        mapping = module.to_verl(config, module.VerlPlace(**known))
    else:
        mapping = module.to_trinity(config, module.TrinityPlace(**known, tasks=Path("RUN/tasks")))
    if not common.total_steps:
        echo(
            "Note: the number of steps (0 here) is computed from the number of tasks when the run"
            " starts.",
            err=True,
        )
    if common.optim.lr is None:
        echo("Note: the learning rate is chosen by the model's size when the run starts.", err=True)
    plain: Mapping[str, object] = masked(mapping, "***")
    return plain


@dataclass(frozen=True)
class KeysResult(Result):
    """Keys of the config; as JSON a schema of whole files, for editors."""

    keys: Sequence[Mapping[str, str]]

    def document(self) -> object:
        return _document_schema(Config.model_json_schema())

    def show(self, out: Console) -> None:
        for row in self.keys:
            head = Text(row["key"], style="bold")
            head.append(f"  {row['type']}  [{row['default']}]", style="not bold")
            out.print(head, soft_wrap=True)
            out.print(f"    {row['description']}", soft_wrap=True)


@app.command()
@expand_options
def schema(
    section: Annotated[
        str | None, Argument(metavar="SECTION", help="Only this section, e.g. rollout.")
    ] = None,
) -> KeysResult:
    """Print every key with its type, its default and what it does; as JSON, a schema for editors.

    \b
    ajet config schema rollout
    ajet config schema --json > ajet.schema.json
    """
    rows = []
    for row in describe_keys():
        if section is None or f"{row['key']}.".startswith(f"{section}."):
            rows.append(row)
    if not rows:
        raise ConfigError(
            f"there is no section {section!r}; sections: {', '.join(Config.model_fields)}"
        )
    return KeysResult(rows)


def _document_schema(ours: dict[str, object]) -> dict[str, object]:
    """Returns the schema of a whole file: ours under the root `ajet`, with any other roots beside
    it."""
    definitions = ours.pop("$defs", {})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "required": ["ajet"],
        "properties": {"ajet": ours},
        "$defs": definitions,
    }


def describe_keys() -> list[dict[str, str]]:
    """Returns every key with a value: dotted path, type, default and description."""
    return list(_describe(Config, ""))


def _describe(model: type[BaseModel], prefix: str) -> Iterator[dict[str, str]]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type(BaseModel)):
            yield from _describe(kind, f"{prefix}{name}.")
        else:
            default = json.dumps(
                field.get_default(call_default_factory=True), ensure_ascii=False, default=str
            )
            limits = _limits(field.metadata)
            yield {
                "key": f"{prefix}{name}",
                "type": _type_name(kind) + (f", {limits}" if limits else ""),
                "default": default,
                "description": (
                    f"{field.description}"
                    + (" No effect in this version." if is_idle(prefix + name) else "")
                ),
            }


def _limits(metadata: list[object]) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    bounds: list[str] = []
    for item in metadata:
        for name, sign in signs.items():
            if hasattr(item, name):
                bounds.append(f"{sign} {getattr(item, name):g}")
    return " and ".join(bounds)


def _type_name(kind: object) -> str:
    origin = get_origin(kind)
    inner = get_args(kind)
    if kind is NoneType:
        return "null"
    if origin is Literal:
        return " | ".join(str(value) for value in inner)
    if origin in (Union, UnionType):
        return " or ".join(_type_name(part) for part in inner)
    if origin is list:
        return f"list of {_type_name(inner[0])}"
    if origin is tuple:
        return "list of " + ", ".join(_type_name(part) for part in inner)
    names: dict[object, str] = {
        str: "text",
        int: "integer",
        float: "number",
        bool: "true | false",
        dict: "mapping",
    }
    return names.get(origin or kind) or str(getattr(kind, "__name__", kind))


@dataclass(frozen=True)
class CheckedResult(Result):
    files: Sequence[Checked]

    @property
    def exit_code(self) -> int:
        if any(checked.wrong for checked in self.files):
            return 2
        return 0

    def document(self) -> object:
        documents = [checked.plain() for checked in self.files]
        if len(documents) == 1:
            return documents[0]
        return documents

    def show(self, out: Console) -> None:
        for checked in self.files:
            _print_checked(checked)


@app.command()
@expand_options
def check(
    arguments: Annotated[
        list[str] | None,
        Argument(
            metavar="FILE... KEY=VALUE...",
            help="Config files with the top-level key `ajet:`, and overrides.",
        ),
    ] = None,
) -> CheckedResult:
    """Check config files: keys and values (schema), workflow and judge (imports), and what a run
    needs (resources).

    Resources are tasks, documents, models, services and API keys. Exits with 2 if the schema or an
    import is wrong. Missing resources are listed, and leave the exit code 0.

    \b
    ajet config check math.yaml
    ajet config check *.yaml ajet.backbone=debug
    """
    args = arguments or []
    files = [Path(text) for text in args if not _is_override(text)]
    if not files:
        raise ConfigError("name a config file to check: ajet config check FILE")
    changes = [text for text in args if _is_override(text)]
    return CheckedResult([check_file(file, changes) for file in files])


def _is_override(text: str) -> bool:
    return "=" in text and not Path(text).is_file()


def _print_checked(checked: Checked) -> None:
    for name, part in checked.parts.items():
        for problem in part.problems:
            echo(f"{style(name, fg='red', bold=True)}: {problem}", err=True)
        if not part.problems:
            found = "; ".join(f"{what}: {_counts(value)}" for what, value in part.found.items())
            state = "ok" if part.checked else "not checked"
            echo(f"{name}: {state} ({found})" if found else f"{name}: {state}")
    missing = len(checked.resources.problems) - checked.unreadable
    problems: list[str] = []
    if checked.wrong:
        problems.append(f"{checked.wrong} problem(s)")
    elif missing:
        problems.append("no problem")
    if missing:
        problems.append(f"{missing} missing resource(s)")
    state = f"has {' and '.join(problems)}" if problems else "is fine"
    echo(f"{checked.file} {state}")


def _counts(value: object) -> str:
    """Formats the resources; for tasks, their number."""
    if not isinstance(value, dict):
        return str(value)
    if "made" in value:
        return f"made {value['made']}"
    return f"{value['train']} to train on, {value['val']} to validate on"
