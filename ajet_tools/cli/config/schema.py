"""`ajet config schema`: every key of the configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel

from ajet_sdk.config.config import Config, is_idle
from ajet_sdk.errors import ConfigError
from ajet_sdk.reporting.output import echo, style
from ajet_tools.cli.options import print_json

__all__ = ["app", "describe_keys"]

app = typer.Typer(add_completion=False)


@app.command()
def schema(
    section: Annotated[str | None, typer.Argument(metavar="SECTION", help="Only this section, e.g. rollout.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON schema, for editors.")] = False,
) -> None:
    """Print every key with its type, its default and what it does.

    \b
    ajet config schema rollout
    ajet config schema --json > ajet.schema.json
    """
    if as_json:
        print_json(_document_schema(Config.model_json_schema()))
        return
    rows = [row for row in describe_keys() if section is None or f"{row['key']}.".startswith(f"{section}.")]
    if not rows:
        raise ConfigError(f"there is no section {section!r}; sections: {', '.join(Config.model_fields)}")
    for row in rows:
        echo(f"{style(row['key'], bold=True)}  {row['type']}  [{row['default']}]")
        echo(f"    {row['description']}")


def _document_schema(ours: dict[str, Any]) -> dict[str, Any]:
    """The schema of a whole file: ours under the root `ajet`, any other root beside it."""
    definitions = ours.pop("$defs", {})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "required": ["ajet"],
        "properties": {"ajet": ours},
        "$defs": definitions,
    }


def describe_keys() -> list[dict[str, str]]:
    """Every key that holds a value: its dotted path, type, default and description."""
    return list(_describe(Config, ""))


def _describe(model: Any, prefix: str) -> Iterator[dict[str, str]]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type(BaseModel)):
            yield from _describe(kind, f"{prefix}{name}.")
        else:
            default = json.dumps(field.get_default(call_default_factory=True), ensure_ascii=False, default=str)
            limits = _limits(field.metadata)
            yield {
                "key": f"{prefix}{name}",
                "type": _type_name(kind) + (f", {limits}" if limits else ""),
                "default": default,
                "description": f"{field.description}"
                + (" No effect in this version." if is_idle(prefix + name) else ""),
            }


def _limits(metadata: list[Any]) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = [
        f"{sign} {getattr(item, name):g}" for item in metadata for name, sign in signs.items() if hasattr(item, name)
    ]
    return " and ".join(found)


def _type_name(kind: Any) -> str:
    origin, inner = get_origin(kind), get_args(kind)
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
    names = {str: "text", int: "integer", float: "number", bool: "true | false", dict: "mapping"}
    return names.get(origin or kind, getattr(kind, "__name__", str(kind)))
