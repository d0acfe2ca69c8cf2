"""The group `ajet dataset`; the module of a command is imported when it runs."""

from __future__ import annotations

import signal
import threading
from typing import NoReturn

import typer

from ajet_tools.cli.lazy import LazyGroup


class DatasetCommands(LazyGroup):
    package = "ajet_tools.cli.dataset"
    panels = {
        "Look": {"label": "label", "check": "inspect"},
        "Make": {"expand": "generate", "from-docs": "generate"},
        "Change": {
            "filter": "selection",
            "dedup": "dedup",
            "split": "split",
        },
        "Exchange": {"export": "export"},
    }
    moved = {
        "calibrate": "run --out FILE",
        "view": "dataset label FILE",
        "mix": "dataset filter",
        "stats": "dataset check",
        "validate": "dataset check",
        "from-traces": "trace export --format tasks",
        "decontaminate": "dataset dedup --against EVAL",
    }


app = typer.Typer(cls=DatasetCommands, no_args_is_help=True, add_completion=False)


@app.callback()
def dataset(ctx: typer.Context) -> None:
    """Build, clean, inspect and convert datasets.

    \b
    ajet dataset expand seeds.jsonl --count 500 --out data/
    ajet dataset from-docs handbook.pdf --out data/
    ajet trace export launcher_record/prod --format tasks --feedback down \\
      --out tasks.jsonl
    ajet dataset dedup tasks.jsonl --out clean.jsonl
    ajet dataset check clean.jsonl

    Each command reads JSONL, Parquet, CSV or a Hugging Face directory, and writes whole files or
    none.
    """

    def end(*_: object) -> NoReturn:
        ctx.meta["ajet.ended"] = True  # libraries may convert the exception
        raise SystemExit(128 + signal.SIGTERM)

    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, end)  # the default handler would leave drafts behind
        ctx.call_on_close(lambda: signal.signal(signal.SIGTERM, before))
