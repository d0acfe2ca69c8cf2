"""`--json`: the option of a command that prints JSON, and how it does."""

from __future__ import annotations

import math
from datetime import date, datetime
from typing import Annotated, Any

import typer

from ajet_sdk.output import echo, json_line

__all__ = ["AsJson", "print_json"]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def print_json(value: Any) -> None:
    echo(json_line(_finite(value), default=_plain))


def _finite(value: Any) -> Any:
    """JSON has no NaN: it becomes null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime | date) else str(value)
