"""`ajet dataset label`: labels a random sample of a dataset by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from ajet_sdk.errors import ConfigError
from ajet_sdk.reporting.output import echo
from ajet_tools.cli.dataset.options import counted
from ajet_tools.cli.viewer import check_terminal, load_viewer
from ajet_tools.dataset.files.blocks import Row
from ajet_tools.dataset.files.rows import Rows
from ajet_tools.dataset.files.sources import files_of
from ajet_tools.dataset.files.writer import Writer
from ajet_tools.dataset.labels import (
    ErrorEstimate,
    Labels,
    draw,
    estimate,
    estimate_errors,
    labels_beside,
)


def label(
    source: Annotated[str, Argument(metavar="FILE", show_default=False)],
    sample: Annotated[int, Option(min=1)] = 50,
    out: Annotated[Path | None, Option("--out", "-o", metavar="FILE")] = None,
) -> None:
    """Label a random sample of a dataset in the terminal: a accepts a row, x rejects it, s skips it.

    The labels are kept in .NAME.labels.jsonl beside the file, and a sample goes on where it
    stopped. They say how often the rows are wrong, or the verdicts of `expand` on them
    (`ajet dataset check FILE`): label train.jsonl and rejected.jsonl. The verdict of a row is
    hidden. To browse a dataset, use `harlequin` or `ajet dataset filter`; to edit it, an editor.

    Args:
        source: JSONL, Parquet, CSV or a Hugging Face directory (DIR:SPLIT for another split than train).
        sample: Number of rows; a larger sample begins with a smaller one.
        out: Afterwards, write all rows but the rejected ones to this file.

    \b
    ajet dataset label data/train.jsonl
    ajet dataset label data/rejected.jsonl --sample 100
    ajet dataset label data/train.jsonl --out clean.jsonl
    """
    check_terminal("ajet dataset label", "print rows with `ajet dataset filter FILE EXPR`")
    if source == "-":
        raise ConfigError("stdin is the keyboard; write the dataset to a file first")
    files_of(source)  # raises if there is none
    app_module = load_viewer("label")
    labels = Labels(labels_beside(source))

    def estimate_sample(rows: Sequence[Row]) -> ErrorEstimate | None:
        return estimate(rows, labels)

    rows = Rows(source)
    viewer = app_module.LabelApp(source, labels, lambda: draw(iter(rows), sample), estimate_sample)
    viewer.run()
    if viewer.failure is not None:
        raise viewer.failure
    errors = estimate_errors(Path(source))
    if errors is not None:
        echo(errors.as_text(), err=True)
    if out is not None:
        with Writer(out, schema=rows.schema) as writer:
            for block in rows.blocks():
                marks = [labels.of(values) for values in block.values()]
                kept = [index for index, mark in enumerate(marks) if mark != "rejected"]
                writer.write_block(block.take(kept))
        echo(f"{counted(writer.rows, 'row')}, to {out}", err=True)
    raise typer.Exit(viewer.return_code or 0)
