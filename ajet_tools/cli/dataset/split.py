"""`ajet dataset split`: splits rows without leakage."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from typer import Option

from ajet_sdk.errors import ConfigError
from ajet_sdk.reporting.output import ProgressBar
from ajet_sdk.tasks.lineage import Descent, families
from ajet_sdk.tasks.task_rows import SPLITS
from ajet_tools.cli.dataset.options import RowsResult, Source, counted, read_some
from ajet_tools.cli.result import HIDDEN
from ajet_tools.dataset.curation.descent import (
    descent_of,
    has_lineage,
    held_out_block,
    training_block,
)
from ajet_tools.dataset.curation.fields import field_names, unknown_field
from ajet_tools.dataset.curation.splitter import Splitter, check_fractions, is_held_out, keys_of
from ajet_tools.dataset.files.rows import Rows
from ajet_tools.dataset.files.sources import splits_of
from ajet_tools.dataset.files.writer import Writer
from ajet_tools.dataset.similarity.near import near_groups, together

log = logging.getLogger("ajet.dataset")


@dataclass(frozen=True, kw_only=True)
class SplitResult(RowsResult):
    splits: Mapping[str, int]
    """Rows by side."""
    empty: Sequence[str]
    """Sides that should have rows, and have none."""
    suffix: str = field(metadata=HIDDEN)
    is_one_family: bool = field(metadata=HIDDEN)

    def lines(self) -> Iterator[str]:
        yield f"{counted(self.rows, 'row')}, to {self.path}"
        for name, number in self.splits.items():
            share = 100 * number / self.rows
            yield f"  {name}{self.suffix}: {counted(number, 'row')} ({share:.1f} %)"
        if self.empty:
            cause = "too few"
            remedy = "try a larger fraction or another --seed"
            if self.is_one_family:
                cause = "one family of rows, which stays on one side"
                remedy = "expand each side's seeds instead"
            yield f"  {' and '.join(self.empty)} got no rows ({cause}); {remedy}"


def split(
    source: Source,
    *,
    out: Annotated[
        Path, Option("--out", "-o", metavar="DIR", help="Output directory; one file per side.")
    ],
    fractions: Annotated[str, Option(metavar="NAME=SHARE,...")] = "train=0.9,validation=0.1",
    by: Annotated[str | None, Option(metavar="FIELD")] = None,
    stratify: Annotated[str | None, Option(metavar="FIELD")] = None,
    near: Annotated[float | None, Option(min=0.5, max=1.0, metavar="SHARE")] = None,
    seed: Annotated[int, Option(help="Random seed.")] = 0,
) -> SplitResult:
    """Split a dataset so that rows keep their side when the file grows.

    Each side is a file in the format of the source: Parquet, CSV, else JSON lines.

    Rows that were grown from the same tasks (provenance.roots) are a family and go where its first
    row goes, with the tasks themselves. Rows of a side besides train are marked as held out
    (provenance.splits), so that no command makes training data of them under another name.

    A row's side is decided by a hash of what it asks, or of its group (--by): not by its place, and
    not by the other rows; a larger fraction keeps what a side had. With --stratify each value has
    its fractions exactly, and rows that are appended move none before them. With --near a cluster
    goes where its first row goes; an appended row that is like two clusters puts them together,
    which may move the later one.

    Args:
        fractions: Sides and their fractions; a single number is the fraction of validation.
        by: Keep rows with the same value of this field on one side.
        near: Keep near copies on one side, by this share of equal characters (0.8 as in `dedup`).
        stratify: Split each value of this field in the same proportions.

    \b
    ajet dataset split tasks.jsonl --out data/
    ajet dataset split tasks.jsonl --fractions train=0.8,validation=0.1,test=0.1 -o data/
    ajet dataset split qa.parquet --by metadata.document --near 0.8 -o qa/
    ajet dataset split tasks.jsonl --stratify metadata.level --fractions 0.2 -o data/
    """
    suffix = next((suffix for suffix in (".parquet", ".csv") if source.endswith(suffix)), ".jsonl")
    shares = _fractions(fractions)
    _check_place(out, shares, suffix)
    splitter = Splitter(shares, by=by, stratify=stratify, seed=seed)
    with ProgressBar("reading") as bar, ExitStack() as stack:
        rows = Rows(source, again=True, pictures=True)
        has_families = any(map(has_lineage, read_some(rows.blocks(), source, bar)))
        keys: list[str] = []
        if has_families or near is not None:
            # else a row's key alone decides, and no key is kept in memory
            texts: list[str] = []
            descents: list[Descent] = []
            for block in read_some(rows.blocks(), source, bar):
                keys += keys_of(block, by)
                if near is not None:
                    texts += block.texts
                if has_families:
                    descents += map(descent_of, block.values())
            groupings = [families(descents)] if has_families else []
            if near is not None:
                groupings.append(near_groups(texts, near, bar.show))
            keys = together(keys, *groupings)
        any_held_out = any(is_held_out(name, shares) for name in shares)
        empty = rows.empty()
        if any_held_out:
            empty = training_block(empty)
        siblings: list[Writer] = []
        writers = {}
        for name in shares:
            path = out / f"{name}{suffix}"
            writer = Writer(path, schema=empty.data.schema, siblings=siblings)
            writers[name] = stack.enter_context(writer)
        # the third pass: the sides of a family are known only after its last row
        number = 0
        for block in read_some(rows.blocks(), source, bar):
            block_keys = keys[number : number + len(block)] or keys_of(block, by)
            sides = splitter.sides(block, block_keys)
            for name, writer in writers.items():
                some = [index for index, side in enumerate(sides) if side == name]
                part = block.take(some)
                if is_held_out(name, shares):
                    part = held_out_block(part)
                elif any_held_out:
                    part = training_block(part)
                writer.write_block(part)
            number += len(block)
        if stratify and splitter.strata == {"null"}:
            raise unknown_field(stratify, field_names(next(block.values())))
    counts = {name: writer.rows for name, writer in writers.items()}
    return SplitResult(
        rows=sum(counts.values()),
        path=str(out),
        splits=counts,
        empty=[name for name, number in counts.items() if not number and shares[name] > 0],
        suffix=suffix,
        is_one_family=len(keys) > 1 and len(set(keys)) == 1,
    )


def _check_place(out: Path, sides: Iterable[str], suffix: str) -> None:
    """Raises ConfigError if the directory has rows of a side in another format, which readers would
    include."""
    files_by_split = splits_of(out) if out.is_dir() else {}
    for side in sides:
        for file in files_by_split.pop(side, []):
            if file != out / f"{side}{suffix}":
                raise ConfigError(
                    f"{file} would be read as {side} too; remove it, or name another directory"
                )
    stale: list[Path] = []
    for name in files_by_split:
        if name in SPLITS:
            stale += files_by_split[name]
    if stale:
        log.warning(
            "%s: not of this split; remove it if it has the same rows", ", ".join(map(str, stale))
        )


def _fractions(text: str) -> dict[str, float]:
    shares: dict[str, float] = {}
    try:
        if "=" not in text:
            shares = {"train": 1 - float(text), "validation": float(text)}
        for part in text.split(",") if not shares else ():
            name, _, share = part.partition("=")
            name = name.strip()
            if not name or name in shares or "/" in name or name.startswith("."):
                raise ConfigError(
                    f"--fractions must name each side once, with a valid file name (got {text!r})"
                )
            shares[name] = float(share)
    except ConfigError:
        raise
    except ValueError:
        raise ConfigError(
            f"--fractions takes train=0.9,validation=0.1 or 0.1 (got {text!r})"
        ) from None
    return check_fractions(shares)
