"""Options shared by `ajet trace` commands: trace, run, filter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

_PATH_HELP = (
    "A trace file, or a directory whose traces are read as one. Default: the current directory."
)
Where = Annotated[Path | None, Argument(metavar="PATH", help=_PATH_HELP, show_default=False)]
RUN_HELP = (
    "A trace file, a directory (all traces in and below it are read as one), or a run by its id or"
    " name. Default: all in or below the current directory."
)
WhereOrRun = Annotated[Path | None, Argument(metavar="PATH", help=RUN_HELP, show_default=False)]
OfRun = Annotated[
    str | None,
    Option("--run", metavar="RUN", help="A run, by id, name or path. Default: the newest."),
]
Fitting = Annotated[
    str | None,
    Option(
        "--filter",
        "-f",
        metavar="EXPR",
        help=(
            "Only episodes that match, such as \"reward < 0.5 and has('calc')\"; see `ajet trace ls"
            " --help`."
        ),
    ),
]
Newest = Annotated[
    int | None,
    Option(
        "--limit", "-n", min=1, help="Only the newest N episodes. Default: all.", show_default=False
    ),
]
FROM_HELP = (
    "auto, native, openai, otlp, studio, tokens, verifiers, trl, tinker, tinker-capture, rllm or"
    " agent-lightning."
)
