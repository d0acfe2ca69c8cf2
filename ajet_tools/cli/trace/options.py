"""Arguments and options shared by `ajet trace` commands: trace, run, filter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

_PATH_HELP = (
    "A trace file, or a directory whose traces are read as one. Default: the current directory."
)
Where = Annotated[Path | None, Argument(metavar="PATH", help=_PATH_HELP, show_default=False)]
OfRun = Annotated[
    str | None,
    Argument(
        metavar="RUN",
        help=(
            "A run by its id or name, a trace file, or a directory, whose traces are read as one."
            " Default: the newest run."
        ),
        show_default=False,
    ),
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
