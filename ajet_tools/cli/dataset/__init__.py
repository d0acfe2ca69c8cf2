"""`ajet dataset`: the table of its commands; the module of a command is imported when it runs."""

from __future__ import annotations

import typer

from ajet_tools.cli.lazy import LazyGroup

__all__ = ["app"]


class DatasetCommands(LazyGroup):
    package = "ajet_tools.cli.dataset"
    table = {
        "expand": (
            "generate",
            "Grow a dataset from a few examples: more tasks like them, with verified answers and without duplicates.",
        ),
        "from-docs": (
            "generate",
            "Make tasks from your documents, each with an answer and the passage that it is from.",
        ),
        "from-traces": (
            "from_traces",
            "Make a dataset of what an agent did in service, and of what people said of it.",
        ),
        "calibrate": (
            "calibrate",
            "Measure how often a model solves each task, write it into the row, and keep a band.",
        ),
        "dedup": ("similarity", "Keep one row of those that ask the same, or nearly the same."),
        "decontaminate": (
            "similarity",
            "Leave out the rows that give an evaluation set away, with the evidence for each.",
        ),
        "split": ("similarity", "Divide a dataset so that a row stays on its side when the file grows."),
        "filter": ("rows", "Keep the rows that fit: an expression, a length, a language, a judge."),
        "mix": ("rows", "Make one dataset of several, in shares."),
        "export": ("export", "Write a dataset in the form that a training library reads."),
        "view": (
            "inspect",
            "Look through a dataset: read rows whole, search and filter them, edit answers, accept and reject by key.",
        ),
        "stats": (
            "inspect",
            "Count what is in a dataset: rows, duplicates, lengths, languages, fields and their values.",
        ),
        "validate": (
            "inspect",
            "Say what is wrong with datasets before a run finds it out. The exit code is 1 where there is an error.",
        ),
        "diff": (
            "inspect",
            "Say what changed between two datasets: rows added, removed, changed, and in which fields.",
        ),
    }
    panels = {
        "Look": ("view", "stats", "validate", "diff"),
        "Make": ("expand", "from-docs", "from-traces"),
        "Change": ("filter", "calibrate", "dedup", "decontaminate", "split", "mix"),
        "Exchange": ("export",),
    }


app = typer.Typer(cls=DatasetCommands, no_args_is_help=True, add_completion=False)


@app.callback()
def dataset() -> None:
    """Build a dataset, and work on one.

    \b
    ajet dataset expand seeds.jsonl --count 500 --out data/
    ajet dataset from-docs handbook.pdf --out data/
    ajet dataset from-traces launcher_record/prod --feedback down --out tasks.jsonl
    ajet dataset dedup tasks.jsonl --out clean.jsonl
    ajet dataset stats clean.jsonl

    Each command reads JSONL, Parquet, CSV or a Hugging Face directory, and writes whole files or none.
    """
