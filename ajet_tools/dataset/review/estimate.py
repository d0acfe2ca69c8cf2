"""Estimates the error rate of verdicts from the marks a person made in `ajet dataset view`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ajet_sdk.judges.agreement import wilson
from ajet_tools.dataset.files.blocks import json_line
from ajet_tools.dataset.files.tables import read
from ajet_tools.dataset.files.values import value_at
from ajet_tools.dataset.review.journal import Journal, Mark, digest_of_line, journal_beside
from ajet_tools.dataset.review.save import BY_HAND, rejected_beside


@dataclass(frozen=True)
class ErrorEstimate:
    """The number of verified rows, of labelled rows, and of wrong verdicts among these."""

    accepted: bool
    """Whether the rows passed verification; a wrong verdict on refused rows lost a correct row."""
    rows: int
    labelled: int
    wrong: int
    at_random: bool = False
    """Whether the labels are of a random sample; chosen rows may not be typical."""
    skipped: int = 0
    """Unlabelled rows of the sample before a labelled one."""

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the error rate; exact if all rows are labelled."""
        if self.labelled == self.rows:
            return self.wrong / self.rows, self.wrong / self.rows
        return wilson(self.wrong / self.labelled, self.labelled)

    def labels_for(self, width: float) -> int:
        """Estimates the labels needed for an interval of that width, at the current error rate."""
        share = self.wrong / self.labelled or sum(wilson(0.0, self.labelled)) / 4

        def is_narrow(labels: int) -> bool:
            low, high = wilson(share, labels)
            return high - low <= width

        return bisect_left(range(self.rows), True, self.labelled, key=is_narrow)

    def as_json(self) -> dict[str, object]:
        low, high = self.interval
        return {
            "of": "accepted" if self.accepted else "refused", "rows": self.rows, "labelled": self.labelled,
            "sample": "random" if self.at_random else "chosen", "skipped": self.skipped,
            "wrong": self.wrong, "error": self.wrong / self.labelled, "low": low, "high": high,
            "labels_for_half": self.labels_for((high - low) / 2),
        }  # fmt: skip

    def as_text(self) -> str:
        low, high = self.interval
        kind = (
            "accepted rows have a wrong answer"
            if self.accepted
            else "refused rows have a right answer"
        )
        text = (
            f"{self.wrong / self.labelled:.1%} of the {kind} ({low:.1%} to {high:.1%} at 95 %), by "
            f"{self.labelled:,} {'random ' if self.at_random else ''}labels of {self.rows:,} rows"
        )
        if low == high:
            return text
        text += f"; {self.labels_for((high - low) / 2):,} labels make that half as wide"
        if not self.at_random:
            return (
                f"{text}. These rows were chosen, not drawn: label those of `ajet dataset view FILE"
                " --sample 50`"
            )
        return (
            f"{text}. {self.skipped:,} rows of the sample were skipped: label them too"
            if self.skipped
            else text
        )


def estimate_errors(path: Path) -> ErrorEstimate | None:
    """Estimates the error rate of verdicts from the marks on a file; None if no verified row is
    marked.

    `accepted` means a right answer, `rejected` a wrong one, in files of accepted and of refused
    rows. Rows that were rejected and saved elsewhere count too. If a random sample was labelled,
    only its labels count.
    """
    journal = Journal(journal_beside(str(path)))
    marks = journal.read() if path.is_file() else {}
    beside = rejected_beside(path)
    saved = beside.is_file() and beside != path
    if not marks and not saved:
        return None
    passed, marked = None, list[tuple[Mark | None, int | None]]()
    """Mark of each verified row, and its position in the sample."""
    sample = journal.sample

    def add(mark: Mark | None, values: Mapping[str, object]) -> None:
        marked.append((mark, sample.find(values) if sample is not None else None))

    for number, row in enumerate(read(path)):
        verdict = _verdict(row.values)
        if verdict is None:
            continue
        passed = bool(verdict["ok"]) if passed is None else passed
        decision = marks.get((number, digest_of_line(json_line(row.values)))) if marks else None
        add(decision.mark if decision is not None else None, row.values)
    for row in read(beside) if saved else ():
        if row.values.get("rejected") == BY_HAND and _verdict(row.values) is not None:
            add("rejected", row.values)
    labels = [mark for mark, place in marked if mark is not None and place is not None]
    at_random = bool(labels)
    labels = labels or [mark for mark, _ in marked if mark is not None]
    if passed is None or not labels:
        return None
    last = max(
        (place for mark, place in marked if mark is not None and place is not None), default=0
    )
    skipped = sum(mark is None and place is not None and place < last for mark, place in marked)
    wrong = labels.count("rejected" if passed else "accepted")
    return ErrorEstimate(passed, len(marked), len(labels), wrong, at_random, skipped)


def errors_of(files: Sequence[Path]) -> list[ErrorEstimate]:
    """Returns the available estimates for a run's files."""
    estimates = [estimate_errors(path) for path in files if path.suffix in (".jsonl", ".parquet")]
    return [estimate for estimate in estimates if estimate is not None]


def error_lines(errors: Sequence[ErrorEstimate], files: Sequence[Path]) -> list[str]:
    """Returns the estimates for a report, or how to get one."""
    if errors or not files:
        return [estimate.as_text() for estimate in errors]
    view = f"ajet dataset view {files[0]} --sample 50"
    return [
        "the error rate of these verdicts is unknown: mark rows as right (a) or wrong (x) in"
        f" `{view}`"
    ]


def _verdict(values: Mapping[str, object]) -> Mapping[str, object] | None:
    verdict = value_at(values, "provenance.verdict")
    return verdict if isinstance(verdict, Mapping) and isinstance(verdict.get("ok"), bool) else None
