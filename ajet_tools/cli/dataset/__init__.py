"""`ajet dataset`: the table of its commands; the module of a command is imported when it runs."""

from __future__ import annotations

import signal
import threading
from typing import NoReturn

import typer

from ajet_tools.cli.lazy import LazyGroup


class DatasetCommands(LazyGroup):
    package = "ajet_tools.cli.dataset"
    table = {
        "expand": (
            "generate",
            "Grow a dataset from a few examples: more tasks like them, with verified answers and without duplicates.",
        ),
        "from-docs": ("generate", "Generate tasks from documents, each with an answer and the passage it comes from."),
        "from-traces": ("from_traces", "Build a dataset from a deployed agent's traces and users' feedback."),
        "calibrate": ("calibrate", "Measure how often a model solves each task, and keep tasks within a range."),
        "dedup": ("similarity", "Remove exact and near duplicates."),
        "decontaminate": ("decontaminate", "Remove rows that leak an evaluation set, with the evidence for each."),
        "split": ("similarity", "Split a dataset so that rows keep their side when the file grows."),
        "filter": ("selection", "Keep rows that match an expression, a language or a judge."),
        "mix": ("selection", "Mix several datasets by weight."),
        "export": ("export", "Convert a dataset to the format of a training library."),
        "view": ("inspect", "Browse a dataset in the terminal: read, search, filter, edit, accept and reject rows."),
        "stats": ("inspect", "Summarize a dataset: rows, duplicates, lengths, languages, fields and their values."),
        "validate": ("inspect", "Find errors in datasets before a run does. Exits with 1 if there are any."),
    }
    panels = {
        "Look": ("view", "stats", "validate"),
        "Make": ("expand", "from-docs", "from-traces"),
        "Change": ("filter", "calibrate", "dedup", "decontaminate", "split", "mix"),
        "Exchange": ("export",),
    }


app = typer.Typer(cls=DatasetCommands, no_args_is_help=True, add_completion=False)


@app.callback()
def dataset(ctx: typer.Context) -> None:
    """Build, clean, inspect and convert datasets.

    \b
    ajet dataset expand seeds.jsonl --count 500 --out data/
    ajet dataset from-docs handbook.pdf --out data/
    ajet dataset from-traces launcher_record/prod --feedback down --out tasks.jsonl
    ajet dataset dedup tasks.jsonl --out clean.jsonl
    ajet dataset stats clean.jsonl

    Each command reads JSONL, Parquet, CSV or a Hugging Face directory, and writes whole files or none.
    """

    def end(*_: object) -> NoReturn:
        ctx.meta["ajet.ended"] = True  # libraries make another error of what is raised here
        raise SystemExit(128 + signal.SIGTERM)

    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, end)  # its default leaves drafts behind
        ctx.call_on_close(lambda: signal.signal(signal.SIGTERM, before))
