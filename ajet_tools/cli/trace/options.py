"""What several `ajet trace` commands share: which trace, which run, and JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ajet_tools.cli.as_json import AsJson, print_json

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
