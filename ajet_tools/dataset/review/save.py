"""Writes a reviewed dataset: the kept rows and, in a second file, the rejected ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from ajet_sdk.errors import ConfigError
from ajet_sdk.tasks.json_rows import BadRows
from ajet_tools.dataset.curation.descent import marked_rows
from ajet_tools.dataset.files.blocks import Row, json_line
from ajet_tools.dataset.files.tables import read, tables_of
from ajet_tools.dataset.files.writer import Writer
from ajet_tools.dataset.review.journal import Decision, digest_of_line
from ajet_tools.dataset.review.review import Review

_WRITTEN = (".jsonl", ".jsonl.gz", ".csv", ".parquet")
_TOGETHER = 256
BY_HAND = {"reason": "rejected by hand"}


@dataclass(frozen=True)
class Plan:
    """The plan of `save`, and its result."""

    target: Path
    rejected_to: Path
    rows: int
    rejected: int
    in_place: bool
    """Whether the dataset itself is overwritten."""
    replaces: bool
    """Whether another file is overwritten."""

    @classmethod
    def of(cls, review: Review, target: Path, *, only_accepted: bool = False) -> Plan:
        """Raises ConfigError if it is impossible or would lose data."""
        if not review.loaded:
            raise ConfigError("rows are still being read; save when that is finished")
        marks, total = review.marks, len(review.spool)
        undecided = total - marks["accepted"] - marks["rejected"]
        rows = marks["accepted"] if only_accepted else total - marks["rejected"]
        target = target.expanduser()
        in_place = any(target.exists() and file.samefile(target) for file in review.files)
        _check(review, target, in_place=in_place, lost=undecided if only_accepted else 0)
        there = target.exists() and not in_place
        return cls(target, rejected_beside(target), rows, marks["rejected"], in_place, there)

    @property
    def files(self) -> list[Path]:
        return [self.target, *([self.rejected_to] if self.rejected else [])]

    def as_text(self) -> str:
        verb = "replaces" if self.in_place or self.replaces else "writes"
        apart = f"; {self.rejected:,} rejected to {self.rejected_to.name}" if self.rejected else ""
        note = "" if self.in_place or not self.replaces else " (this file already exists)"
        return f"{verb} {self.target}{note} with {self.rows:,} rows{apart}"


def proposed(review: Review) -> Path:
    """Returns the dataset itself if it is a single writable file, else a file beside it."""
    if len(review.files) == 1 and not review.mapping and not review.bad.count:
        [file] = review.files
        if file.name.lower().endswith(_WRITTEN):
            return file
    path = Path(
        review.source.rpartition(":")[0] if ":" in review.source else review.source
    ).expanduser()
    stem = path.name if path.is_dir() else path.name.removesuffix(".gz").rpartition(".")[0]
    return path.with_name(f"{stem or 'rows'}.reviewed.jsonl")


def rejected_beside(target: Path) -> Path:
    """Returns the file for rejected rows; Parquet if the target is, which keeps the types of
    columns."""
    stem = target.name.removesuffix(".gz").rpartition(".")[0] or target.name
    return target.with_name(
        f"{stem}.rejected{'.parquet' if target.suffix.lower() == '.parquet' else '.jsonl'}"
    )


def _check(review: Review, target: Path, *, in_place: bool, lost: int) -> None:
    if target.is_dir() or not target.name.lower().endswith(_WRITTEN):
        raise ConfigError(
            f"{target} is not a dataset file name; it must end in {', '.join(_WRITTEN)}"
        )
    if not in_place:
        return
    advice = "save under another name"
    if len(review.files) > 1:
        raise ConfigError(f"{target} is one of {len(review.files)} source files: {advice}")
    if review.bad.count:
        raise ConfigError(f"{review.bad.count:,} invalid rows of {target} would be lost: {advice}")
    if review.mapping:
        raise ConfigError(f"the columns of {target} would be renamed (--map): {advice}")
    if lost:
        raise ConfigError(
            f"{lost:,} undecided rows would be lost: {advice}, or save all but the rejected"
        )
    if review.stamps_now() != review.stamps:
        raise ConfigError(
            f"{target} was changed by another program: {advice}, or reopen it (decisions are kept)"
        )


def save(review: Review, target: Path, *, only_accepted: bool = False) -> Plan:
    """Writes the kept rows to `target`, complete or not at all, and adds rejected rows to their
    file.

    Rejected rows are written first, so that no row is ever lost. Raises ConfigError and TaskError
    on failure, without changing files.
    """
    plan = Plan.of(review, target, only_accepted=only_accepted)
    if plan.rejected:
        _write_rejected(review, plan.rejected_to)
    kept: dict[int, tuple[str, Decision]] = {}
    with Writer(plan.target, tables=tables_of(review.source, review.mapping)) as writer:
        named = marked_rows((row for _, row in _rows(review)), review.source, str(plan.target))
        for number, row in enumerate(named):
            mark = review.mark_of(number)
            if mark == "accepted":
                kept[writer.rows] = digest_of_line(json_line(row.values)), Decision("accepted")
            if mark == "accepted" or (mark is None and not only_accepted):
                writer.write(row.values, row.stored)
    if plan.in_place:
        review.journal.replace(kept)
    review.was_saved()
    return plan


def _rows(review: Review) -> Iterator[tuple[int, Row]]:
    """Yields every row with its number in its current state; for tables, with the stored row.

    Raises ConfigError if the file changed since it was read.
    """
    starts = range(0, len(review.spool), _TOGETHER)
    batches = (range(start, min(start + _TOGETHER, len(review.spool))) for start in starts)
    spooled = (
        pair for numbers in batches for pair in zip(numbers, review.rows(numbers), strict=True)
    )
    if not any(file.suffix in (".parquet", ".arrow") for file in review.files):
        yield from spooled
        return
    rows = read(review.source, mapping=review.mapping, bad=BadRows(skip=review.bad.skip))
    for number, (row, stored) in enumerate(
        zip_longest((spooled_row for _, spooled_row in spooled), rows)
    ):
        if row is None or stored is None or row.where != stored.where:
            raise ConfigError(
                f"{review.source} was changed by another program since it was opened; reopen it"
            )
        yield number, Row(row.where, row.values, stored.stored)


def _write_rejected(review: Review, path: Path) -> None:
    """Writes existing and new rejected rows, without repetitions."""
    seen: set[str] = set()
    with Writer(path) as writer:
        if path.exists():
            for row in read(path):
                seen.add(digest_of_line(json_line(row.values)))
                writer.write(row.values, row.stored)
        for number, row in _rows(review):
            values = {**row.values, "rejected": BY_HAND}
            if (
                review.mark_of(number) == "rejected"
                and digest_of_line(json_line(values)) not in seen
            ):
                writer.write(values, row.stored)
