"""How often verdicts are wrong, from the rows of which a person said in `ajet dataset view` whether they are right."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ajet_tools.dataset.files.tables import read
from ajet_tools.dataset.files.writer import json_line
from ajet_tools.dataset.review.journal import Journal, digest_of_line, journal_beside
from ajet_tools.dataset.review.save import BY_HAND, rejected_beside

__all__ = ["ErrorEstimate", "error_lines", "errors_of", "estimate_errors", "wilson"]

_Z = 1.959964
"""Of a 95 % interval."""


def wilson(wrong: float, labelled: int) -> tuple[float, float]:
    """The 95 % confidence interval of a share (Wilson 1927, Probable Inference, the Law of Succession)."""
    share, z2 = wrong / labelled, _Z * _Z
    middle = (share + z2 / (2 * labelled)) / (1 + z2 / labelled)
    half = _Z / (1 + z2 / labelled) * math.sqrt(share * (1 - share) / labelled + z2 / (4 * labelled**2))
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True)
class ErrorEstimate:
    """Of verified rows: how many a person labelled, and in how many of these the verdict was wrong."""

    accepted: bool
    """Of rows that passed; else of rows that were refused, where a wrong verdict lost a right row."""
    rows: int
    labelled: int
    wrong: int

    @property
    def interval(self) -> tuple[float, float]:
        """In which the share of wrong verdicts lies, at 95 %; exact where all are labelled."""
        if self.labelled == self.rows:
            return self.wrong / self.rows, self.wrong / self.rows
        return wilson(self.wrong, self.labelled)

    def labels_for(self, width: float) -> int:
        """About how many labels make the interval at most so wide, where their errors are as frequent as so far."""
        low, high = wilson(self.wrong, self.labelled)
        share, few, many = self.wrong / self.labelled or (low + high) / 4, self.labelled, self.rows
        while few < many:
            middle = (few + many) // 2
            one, other = wilson(share * middle, middle)
            few, many = (few, middle) if other - one <= width else (middle + 1, many)
        return few

    def as_json(self) -> dict[str, Any]:
        low, high = self.interval
        return {
            "of": "accepted" if self.accepted else "refused", "rows": self.rows, "labelled": self.labelled,
            "wrong": self.wrong, "error": self.wrong / self.labelled, "low": low, "high": high,
            "labels_for_half": self.labels_for((high - low) / 2),
        }  # fmt: skip

    def as_text(self) -> str:
        low, high = self.interval
        kind = "accepted rows have a wrong answer" if self.accepted else "refused rows have a right answer"
        text = (
            f"{self.wrong / self.labelled:.1%} of the {kind} ({low:.1%} to {high:.1%} at 95 %), by "
            f"{self.labelled:,} labels of {self.rows:,} rows"
        )
        more = self.labels_for((high - low) / 2)
        return text if low == high else f"{text}; {more:,} labels make that half as wide"


def estimate_errors(path: Path) -> ErrorEstimate | None:
    """What a person's marks on a file of rows say of its verdicts; None where nobody marked a verified row.

    In a file of accepted rows `accepted` means that the answer is right, `rejected` that it is wrong; so it does among
    refused rows. Rows that were rejected and saved away count too.
    """
    marks = Journal(journal_beside(str(path))).read() if path.is_file() else {}
    beside = rejected_beside(path)
    saved = beside.is_file() and beside != path
    if not marks and not saved:
        return None
    passed, rows, right, wrong = None, 0, 0, 0
    for number, row in enumerate(read(path)):
        verdict = _verdict(row.values)
        if verdict is None:
            continue
        passed, rows = bool(verdict["ok"]) if passed is None else passed, rows + 1
        said = marks.get((number, digest_of_line(json_line(row.values)))) if marks else None
        right += said is not None and said.mark == "accepted"
        wrong += said is not None and said.mark == "rejected"
    for row in read(beside) if saved else ():
        if row.values.get("rejected") == BY_HAND and _verdict(row.values) is not None:
            rows, wrong = rows + 1, wrong + 1
    if passed is None or not right + wrong:
        return None
    return ErrorEstimate(passed, rows, right + wrong, wrong if passed else right)


def errors_of(files: Sequence[Path]) -> list[ErrorEstimate]:
    """The estimates that there are of a run's files."""
    found = [estimate_errors(path) for path in files if path.suffix in (".jsonl", ".parquet")]
    return [one for one in found if one is not None]


def error_lines(errors: Sequence[ErrorEstimate], files: Sequence[Path]) -> list[str]:
    """The estimates for a report, or how to come to one."""
    if errors or not files:
        return [one.as_text() for one in errors]
    view = f"ajet dataset view {files[0]}"
    return [f"the error rate of these verdicts is unknown: mark rows as right (a) or wrong (x) in `{view}`"]


def _verdict(values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    provenance = values.get("provenance")
    verdict = provenance.get("verdict") if isinstance(provenance, Mapping) else None
    return verdict if isinstance(verdict, Mapping) and isinstance(verdict.get("ok"), bool) else None
