"""`ajet dataset view`: the rows of a dataset in a terminal, to be read, edited, accepted and rejected."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from ajet_sdk.errors import ConfigError, MissingExtra
from ajet_sdk.output import echo
from ajet_tools.cli.dataset.options import Map, SkipBad, mapping_of

__all__ = ["app"]

app = typer.Typer(add_completion=False)


@app.command()
def view(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="JSONL, Parquet, CSV or a Hugging Face directory (DIR:SPLIT for another split than train).",
            show_default=False,
        ),
    ],
    filter: Annotated[
        str, typer.Option("--filter", "-f", metavar="EXPR", help="Begin with the rows that fit, as in `filter`.")
    ] = "",
    map: Map = None,
    skip_bad_rows: SkipBad = False,
) -> None:
    """Look through a dataset: read rows whole, search and filter them, edit answers, accept and reject by key.

    Keys: a accepts, x rejects, u undoes, e edits, / filters, ctrl+f searches, enter shows a row whole, ctrl+s saves,
    ? shows all keys. The file is not touched before it is saved; then it is replaced whole, and rejected rows go to
    NAME.rejected.jsonl beside it (.parquet beside Parquet). Until then decisions are kept in .NAME.review.jsonl and are
    there the next time.

    In a script the same is done by `filter` (rows that fit to --out, the others to --rejected), `validate` and `diff`.

    \b
    ajet dataset view data/train.jsonl
    ajet dataset view data/:validation --filter 'metadata.pass_rate<0.2'
    ajet dataset view data/rejected.jsonl -f 'rejected.reason~"agree"'
    ajet dataset filter data/train.jsonl 'chars<500' --rejected long.jsonl -o short.jsonl
    """
    _check_terminal()
    from ajet_tools.dataset.filter import parse
    from ajet_tools.dataset.review import Review

    try:
        from ajet_tools.tui.dataset.app import DatasetApp
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "textual":
            raise
        raise MissingExtra("textual", "tools") from None
    parse(filter)
    viewer = DatasetApp(Review(source, mapping=mapping_of(map), skip_bad=skip_bad_rows), filter)
    viewer.run()
    viewer.review.close()
    if viewer.failure is not None:
        raise viewer.failure
    if viewer.parting:
        echo(viewer.parting, err=True)
    raise typer.Exit(viewer.return_code or 0)


def _check_terminal() -> None:
    """Raises ConfigError where there is no terminal that can place a cursor."""
    other = "print rows with `ajet dataset filter FILE EXPR`, and count them with `ajet dataset stats FILE`"
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(f"`ajet dataset view` needs a terminal, and this is a pipe or a file; {other}")
    if os.environ.get("TERM") in ("dumb", "", None):
        raise ConfigError(
            f"the terminal TERM={os.environ.get('TERM', '')!r} cannot place a cursor; set TERM (xterm-256color, say), "
            f"or {other}"
        )
