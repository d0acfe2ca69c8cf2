"""What several `ajet trace` commands share: which trace, which run, and JSON."""

from __future__ import annotations

import json
import math
from datetime import date, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["AsJson", "Fitting", "NoPager", "OfRun", "Where", "print_json"]

_PATH_HELP = "A trace file or an experiment's directory; by default the newest run below here."
Where = Annotated[Path | None, typer.Argument(metavar="PATH", help=_PATH_HELP, show_default=False)]
OfRun = Annotated[
    str | None, typer.Option("--run", metavar="ID", help="A run, by a unique prefix; by default the newest.")
]
Fitting = Annotated[
    str | None,
    typer.Option(
        "--filter",
        "-f",
        metavar="EXPR",
        help="Only episodes that fit, such as 'reward<0.5 text~\"calc\"'; `ajet trace ls --help` says more.",
    ),
]
NoPager = Annotated[bool, typer.Option("--no-pager", help="Print at once, however long it is.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def print_json(value: Any) -> None:
    typer.echo(json.dumps(_finite(value), indent=2, ensure_ascii=False, default=_plain))


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
