"""What `ajet dataset expand` and `from-docs` show: progress, and the result."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from ajet_sdk.engines.budget import Budget
from ajet_sdk.reporting import output
from ajet_tools.cli.dataset.options import counted
from ajet_tools.cli.options import pick
from ajet_tools.cli.result import TextResult
from ajet_tools.dataset.documents.corpus import Corpus
from ajet_tools.dataset.generate.pipeline import Pipeline
from ajet_tools.dataset.generate.records import GenerationResult, Interrupted
from ajet_tools.dataset.generate.runs import GenerationRun
from ajet_tools.dataset.labels import ErrorEstimate, error_lines, errors_of


@contextmanager
def progress(
    generation: Pipeline, rows: int | None, calls: int = 0
) -> Iterator[Callable[[GenerationResult], None]]:
    """On a terminal, shows a progress bar of rows (else calls), and below it `progress_lines`."""
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


def progress_lines(generation: Pipeline, rows: int | None, width: int) -> Iterator[str]:
    """Yields cost, waits and rejections (most frequent first), in lines that fit the width."""
    result = generation.result
    spent = generation.endpoint.budget.summary().split(", ")
    if not rows:
        spent.insert(0, f"{result.accepted:,} accepted")
    yield _fit("", spent, width)
    if wait := generation.describe_wait():
        yield _fit("waiting for ", wait.split("; "), width)
    reasons = [f"{count:,} {reason}" for reason, count in result.refused.most_common()]
    if reasons:
        yield _fit(f"refused {len(result.rejected):,}: ", reasons, width)


def _fit(before: str, items: Sequence[str], width: int) -> str:
    """Joins as many items as fit the width, and counts the others."""
    for shown in range(len(items), 0, -1):
        hidden = len(items) - shown
        parts = list(items[:shown])
        if hidden:
            parts.append(f"{hidden} more")
        line = before + ", ".join(parts)
        if len(line) <= width or shown == 1:
            return line
    return before


@dataclass(frozen=True)
class GenerationReport(TextResult):
    made: GenerationRun
    budget: Budget
    corpus: Corpus | None
    seconds: float = field(kw_only=True)

    @property
    def exit_code(self) -> int:
        stopped = self.made.result.stopped
        if isinstance(stopped, Interrupted):
            return 128 + stopped.signal
        return 0

    @property
    def failure(self) -> BaseException | None:
        """The error that ended generation early, else one about documents that could not be
        read."""
        stopped = self.made.result.stopped
        if isinstance(stopped, Interrupted):
            if stopped.signal == signal.SIGINT:
                return KeyboardInterrupt()
            return None
        if stopped is None and self.corpus is not None:
            return self.corpus.failure
        return stopped

    def document(self) -> object:
        result = self.made.result
        document: dict[str, object] = {
            "accepted": result.accepted,
            "train": len(result.train),
            "validation": len(result.validation),
            "refused": dict(result.refused.most_common()),
            "surplus": result.surplus,
            "diversity": result.diversity().as_json(),
            "checks": [check.as_json() for check in self.made.checks],
            "errors": [error.as_json() for error in self._errors()],
            **pick(self.budget.spent, "calls", "cached", "input_tokens", "output_tokens"),
            "money": self.budget.cost,
            "stopped": str(result.stopped) if result.stopped else None,
            "files": list(map(str, self.made.files)),
        }
        if self.corpus is not None:
            copies = self.corpus.copies
            document["documents"] = self._documents()
            document["copies"] = [{"document": name, "of": original} for name, original in copies]
            document["unreadable"] = [
                {"document": unreadable.name, "problem": unreadable.problem}
                for unreadable in self.corpus.unreadable
            ]
        return document

    def _errors(self) -> list[ErrorEstimate]:
        if self.made.checks:
            return errors_of(self.made.files)
        return []

    def _documents(self) -> dict[str, int]:
        """Returns the number of documents of each side."""
        numbers = {"train": 0, "validation": 0}
        if self.corpus is not None:
            for entry in self.corpus.held:
                numbers[entry.side] += 1
        return numbers

    def lines(self) -> Iterator[str]:
        result = self.made.result
        budget = self.budget
        per_side = []
        for side, rows in (("train", result.train), ("validation", result.validation)):
            origin = ""
            if self.corpus is not None:
                origin = f" (from {counted(self._documents()[side], 'document')})"
            per_side.append(f"{len(rows):,} {side}{origin}")
        cached = ""
        if budget.spent.cached:
            cached = f" ({budget.spent.cached:,} more from the cache)"
        yield (
            f"{counted(result.accepted, 'row')} accepted: {', '.join(per_side)};"
            f" {budget.summary()}{cached}, {self.seconds:.1f} s"
        )
        for check in self.made.checks:
            if check.budget is not None:
                took = f"; {check.budget.summary()}"
            else:
                took = ""
            yield f"  verified by {check.verifier}: {check.in_words()}{took}"
        if self.made.checks:
            for line in error_lines(self._errors(), self.made.files):
                yield f"  {line}"
        if result.accepted:
            yield f"  {counted(result.diversity().forms, 'form')}"
        for reason, count in result.refused.most_common():
            yield f"  {count:,} refused: {reason}"
        for path in self.made.files:
            yield f"  {path}"
        if isinstance(result.stopped, Interrupted):
            yield f"Terminated: {result.stopped}"
