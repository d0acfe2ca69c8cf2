"""Progress and report of a run that generates rows: a bar with waits and diversity, then the result."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from ajet_sdk.engines.budget import Budget
from ajet_sdk.reporting import output
from ajet_sdk.reporting.output import echo
from ajet_tools.cli.dataset.options import counted
from ajet_tools.cli.options import pick, print_json
from ajet_tools.dataset.documents.corpus import Corpus
from ajet_tools.dataset.generate.loop import Generation
from ajet_tools.dataset.generate.records import GenerationResult, Interrupted
from ajet_tools.dataset.generate.runs import GenerationRun
from ajet_tools.dataset.review.estimate import error_lines, errors_of


@contextmanager
def progress(
    generation: Generation[Any], rows: int | None, calls: int = 0
) -> Iterator[Callable[[GenerationResult], None]]:
    """On a terminal: a bar of the rows wanted (else of all calls) and the time left, and below it `progress_lines`."""
    if not sys.stderr.isatty():
        yield lambda result: None
        return

    class Shown(Progress):
        """The bar, and below it the lines of `progress_lines`."""

        def get_renderables(self) -> Iterable[RenderableType]:
            yield from super().get_renderables()
            for line in progress_lines(generation, rows, console.width):
                yield Text(line, no_wrap=True, overflow="ellipsis")

    console = output.console(stderr=True)
    title = TextColumn("Accepted" if rows else "Parts asked")
    columns = (title, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Shown(*columns, console=console, transient=True) as shown:
        bar = shown.add_task("", total=rows or calls)
        yield lambda result: shown.update(bar, completed=result.accepted if rows else result.calls)


def progress_lines(generation: Generation[Any], rows: int | None, width: int) -> Iterator[str]:
    """Cost, waits and rejections (the most frequent reason first), in lines that fit the width."""
    result, wait = generation.result, generation.describe_wait()
    accepted = [] if rows else [f"{result.accepted:,} accepted"]
    yield _fit("", [*accepted, *generation.endpoint.budget.summary().split(", ")], width)
    if wait:
        yield _fit("waiting for ", wait.split("; "), width)
    reasons = [f"{count:,} {reason}" for reason, count in result.refused.most_common()]
    if varied := generation.coverage.parts():
        yield _fit("", varied, width)
    if reasons:
        yield _fit(f"refused {len(result.rejected):,}: ", reasons, width)


def _fit(before: str, items: Sequence[str], width: int) -> str:
    """As many items as fit the width, and how many are left out."""
    for shown in range(len(items), 0, -1):
        hidden = len(items) - shown
        line = before + ", ".join([*items[:shown], *([f"{hidden} more"] if hidden else [])])
        if len(line) <= width or shown == 1:
            return line
    return before


def report(made: GenerationRun, budget: Budget, seconds: float, *, as_json: bool) -> None:
    """Print the result. Raises KeyboardInterrupt, or Exit with 143, if Ctrl-C or SIGTERM ended the run."""
    result, files, checks, corpus = made.result, made.files, made.checks, made.corpus
    spent, sides = budget.spent, {"train": result.train, "validation": result.validation}
    documents = {side: sum(entry.side == side for entry in corpus.held) for side in sides} if corpus is not None else {}
    errors = errors_of(files) if checks else []
    if as_json:
        print_json(
            {
                "accepted": result.accepted,
                **{side: len(rows) for side, rows in sides.items()},
                "refused": dict(result.refused.most_common()),
                "surplus": result.surplus,
                "diversity": {**result.diversity().as_json(), **result.coverage},
                "checks": [entry.as_json() for entry in checks],
                "errors": [entry.as_json() for entry in errors],
                **(_documents(corpus, documents) if corpus is not None else {}),
                **pick(spent, "calls", "cached", "input_tokens", "output_tokens"),
                "money": budget.cost,
                "stopped": str(result.stopped) if result.stopped else None,
                "files": [str(path) for path in files],
            }
        )
    else:
        origins = {side: f" (from {counted(number, 'document')})" for side, number in documents.items()}
        per_side = ", ".join(f"{len(rows):,} {side}{origins.get(side, '')}" for side, rows in sides.items())
        cached = f" ({spent.cached:,} more from the cache)" if spent.cached else ""
        echo(f"{counted(result.accepted, 'row')} accepted: {per_side}; {budget.summary()}{cached}, {seconds:.1f} s")
        for entry in checks:
            took = f"; {entry.budget.summary()}" if entry.budget is not None else ""
            echo(f"  verified by {entry.verifier}: {entry.in_words()}{took}")
        for line in error_lines(errors, files) if checks else ():
            echo(f"  {line}")
        if result.coverage_text:
            echo(f"  {result.coverage_text}")
        for reason, count in result.refused.most_common():
            echo(f"  {count:,} refused: {reason}")
        for path in files:
            echo(f"  {path}")
    if isinstance(result.stopped, Interrupted):
        if result.stopped.signal == signal.SIGINT:
            raise KeyboardInterrupt
        echo(f"Terminated: {result.stopped}", err=True)
        raise typer.Exit(128 + result.stopped.signal)


def _documents(corpus: Corpus, by_side: Mapping[str, int]) -> dict[str, object]:
    return {
        "documents": by_side,
        "copies": [{"document": name, "of": original} for name, original in corpus.copies],
        "unreadable": [{"document": document.name, "problem": document.problem} for document in corpus.unreadable],
    }
