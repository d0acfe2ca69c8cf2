"""A person's labels of a random sample of rows, stored beside the dataset, and the error rate that
they show."""

from __future__ import annotations

import hashlib
import heapq
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal, get_args

from ajet_sdk.errors import ConfigError
from ajet_sdk.judges.agreement import wilson
from ajet_tools.dataset.files.blocks import Row, json_line
from ajet_tools.dataset.files.rows import read
from ajet_tools.dataset.files.values import value_at

Label = Literal["accepted", "rejected", "skipped"]


def labels_beside(source: str | Path) -> Path:
    """Return `.tasks.jsonl.labels.jsonl` for `tasks.jsonl`, `.SPLIT.labels.jsonl` in a directory;
    readers skip it."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path / ".train.labels.jsonl"
    folder, colon, split = str(source).rpartition(":")
    if colon and Path(folder).expanduser().is_dir():
        return Path(folder).expanduser() / f".{split}.labels.jsonl"
    return path.with_name(f".{path.name}.labels.jsonl")


def key_of(values: Mapping[str, object], *, drawing: bool = False) -> str:
    """Return a digest of a row, or its place in the random order of samples.

    The reason of a rejection does not count: a run may word it anew.
    """
    line = json_line({name: value for name, value in values.items() if name != "rejected"})
    return hashlib.blake2b(line, digest_size=8, key=b"0" if drawing else b"").hexdigest()


class Labels:
    """A file with a line per label; the last one of a row counts."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a file that holds something else."""
        self.path = path
        self._labels: dict[str, Label] = {}
        try:
            lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
        for number, line in enumerate(lines[:-1], 1):  # a last line without an end was cut
            try:
                entry = json.loads(line)
                self._set(str(entry["row"]), entry["label"])
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"{path} line {number} was not written by `ajet dataset label`; move it away"
                ) from error

    def _set(self, key: str, label: Label | None) -> None:
        if label is None:
            self._labels.pop(key, None)
        elif label in get_args(Label):
            self._labels[key] = label
        else:
            raise ValueError(f"no label: {label}")

    def __len__(self) -> int:
        return len(self._labels)

    def of(self, values: Mapping[str, object]) -> Label | None:
        return self._labels.get(key_of(values))

    def set(self, values: Mapping[str, object], label: Label | None) -> None:
        """Store a label; None takes it back. Raises ConfigError if it cannot be stored."""
        key = key_of(values)
        try:
            text = self.path.read_bytes() if self.path.exists() else b""
            with self.path.open("ab") as file:
                if text and not text.endswith(b"\n"):
                    file.truncate(text.rfind(b"\n") + 1)
                file.write(json_line({"row": key, "label": label}))
        except OSError as error:
            raise ConfigError(
                f"cannot store the label in {self.path}: {error.strerror or error}"
            ) from error
        self._set(key, label)


def draw(rows: Iterable[Row], size: int) -> list[Row]:
    """Draw rows at random: those whose hash is lowest, in that order.

    The order of the file does not matter, and a larger sample begins with a smaller one.
    """
    numbers = count()
    places = ((key_of(row.values, drawing=True), next(numbers), row) for row in rows)
    return [row for _, _, row in heapq.nsmallest(size, places)]


@dataclass(frozen=True)
class ErrorEstimate:
    """How many rows of a file are wrong, or how many verdicts on them, by the labels."""

    passed: bool | None
    """Whether the rows passed verification, so that `rejected` is a wrong verdict; if they were
    refused, `accepted` is. None: rows without a verdict."""
    rows: int
    labelled: int
    wrong: int
    skipped: int = 0

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the error rate; exact if all rows are labelled."""
        if self.labelled == self.rows:
            return self.wrong / self.rows, self.wrong / self.rows
        return wilson(self.wrong / self.labelled, self.labelled)

    def labels_for(self, width: float) -> int:
        """Estimate the labels needed for an interval of that width, at the current error rate."""
        share = self.wrong / self.labelled or sum(wilson(0.0, self.labelled)) / 4

        def is_narrow(labels: int) -> bool:
            low, high = wilson(share, labels)
            return high - low <= width

        return bisect_left(range(self.rows), True, self.labelled, key=is_narrow)

    def as_json(self) -> dict[str, object]:
        low, high = self.interval
        return {
            "of": {True: "accepted", False: "refused", None: "all"}[self.passed],
            "rows": self.rows,
            "labelled": self.labelled,
            "skipped": self.skipped,
            "wrong": self.wrong,
            "error": self.wrong / self.labelled,
            "low": low,
            "high": high,
            "labels_for_half": self.labels_for((high - low) / 2),
        }

    def as_text(self) -> str:
        low, high = self.interval
        subjects = {
            None: "rows are wrong",
            True: "accepted rows have a wrong answer",
            False: "refused rows have a right answer",
        }
        text = (
            f"{self.wrong / self.labelled:.1%} of the {subjects[self.passed]} ({low:.1%} to {high:.1%} at 95 %), by"
            f" {self.labelled:,} random labels of {self.rows:,} rows"
        )
        if low != high:
            text += f"; {self.labels_for((high - low) / 2):,} labels make that half as wide"
        if self.skipped:
            text += f". {self.skipped:,} rows of the sample were skipped: label them too"
        return text


def estimate(rows: Iterable[Row], labels: Labels) -> ErrorEstimate | None:
    """Estimate the error rate; None without a label. Of rows with verdicts, those like the first
    row's count."""
    passed: bool | None = None
    total = 0
    counts: Counter[Label] = Counter()
    for row in rows:
        verdict = value_at(row.values, "provenance.verdict.ok")
        if not isinstance(verdict, bool):
            verdict = None
        if total == 0:
            passed = verdict
        if verdict == passed:
            total += 1
            label = labels.of(row.values)
            if label is not None:
                counts[label] += 1
    labelled = counts["accepted"] + counts["rejected"]
    if not labelled:
        return None
    wrong = counts["accepted"] if passed is False else counts["rejected"]
    return ErrorEstimate(passed, total, labelled, wrong, counts["skipped"])


def estimate_errors(path: Path) -> ErrorEstimate | None:
    """Estimate the error rate of a file from the labels beside it; None without labels."""
    labels = Labels(labels_beside(path))
    return estimate(read(path), labels) if labels and path.exists() else None


def errors_of(files: Sequence[Path]) -> list[ErrorEstimate]:
    """Return the available estimates for a run's files."""
    estimates = [estimate_errors(path) for path in files if path.suffix in (".jsonl", ".parquet")]
    return [estimate for estimate in estimates if estimate is not None]


def error_lines(errors: Sequence[ErrorEstimate], files: Sequence[Path]) -> list[str]:
    """Return the estimates for a report, or how to get one."""
    if errors or not files:
        return [found.as_text() for found in errors]
    return [
        "the error rate of these verdicts is unknown: label a random sample as right (a) or wrong"
        f" (x) in `ajet dataset label {files[0]}`"
    ]
