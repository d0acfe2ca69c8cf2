"""`ajet dataset dedup` and `split`: remove duplicates, and split rows without leakage."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from ajet_sdk.errors import ConfigError
from ajet_sdk.reporting.output import ProgressBar
from ajet_sdk.tasks.lineage import Descent, families
from ajet_sdk.tasks.questions import readable
from ajet_sdk.tasks.task_rows import SPLITS
from ajet_tools.cli.dataset.leaks import LeaksResult, embedded, remove_leaks
from ajet_tools.cli.dataset.options import (
    Embed,
    KeptRows,
    Out,
    RowOptions,
    RowsResult,
    Source,
    check_apart,
    counted,
    read_some,
    write_kept,
    write_report,
)
from ajet_tools.cli.result import HIDDEN
from ajet_tools.dataset.curation.descent import (
    descent_of,
    has_lineage,
    held_out_block,
    training_block,
)
from ajet_tools.dataset.curation.fields import field_names, unknown_field
from ajet_tools.dataset.curation.splitter import Splitter, check_fractions, is_held_out, keys_of
from ajet_tools.dataset.files.blocks import Block
from ajet_tools.dataset.files.sources import splits_of
from ajet_tools.dataset.files.writer import Writer
from ajet_tools.dataset.similarity.dedup import Found, RowFacts
from ajet_tools.dataset.similarity.dedup import find as find_duplicates
from ajet_tools.dataset.similarity.embedding import Embedding
from ajet_tools.dataset.similarity.near import together, together_by
from ajet_tools.text.clean import one_line

log = logging.getLogger("ajet.dataset")
_SHOWN = 3

Report = Annotated[
    str | None, Option(metavar="FILE", help="File for the removed rows, with the evidence.")
]


@dataclass(frozen=True, kw_only=True)
class DedupResult(KeptRows):
    labels = {"exact": "(exact)", "near": "(near)", "meaning": "(by meaning)"}
    clusters: int
    answers_differ: int
    """Dropped rows with another answer than the row that was kept."""

    def dropped_lines(self) -> Iterator[str]:
        yield from super().dropped_lines()
        if self.answers_differ:
            yield (
                f"  {counted(self.answers_differ, 'row')} of these had another answer than the row"
                " that was kept; check them"
            )


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
        yield from self.bad_row_lines()


def dedup(
    source: Source,
    *,
    out: Out = "-",
    near: Annotated[float, Option(min=0.5, max=1.0, metavar="SHARE")] = 0.8,
    keep: str = "first",
    ignore_numbers: Annotated[bool, Option("--ignore-numbers")] = False,
    embed: Embed = None,
    against: Annotated[list[str] | None, Option(metavar="FILE")] = None,
    report: Report = None,
    rows: RowOptions,
) -> DedupResult | LeaksResult:
    """Remove exact and near duplicates, or with --against, rows that leak an evaluation set.

    Rows are compared by what they ask. Alike are texts of which at least --near of the
    characters are the same, by edit distance; texts under 100 characters must be closer, and other
    numbers make another task. Candidates are found by their rarest 8-grams: with up to 15 % of the
    characters edited over 99 % are found, with 20 % 97 %. Rows that are alike by way of a third are
    one cluster. The report names for each row the one that stays.

    With --against, a row is removed if its question equals or nearly equals that of an evaluation
    row, or if any of its texts shares a run of 13 words with one (for a short row all its
    words: 6 or more, or 3 or more with a number). Runs that more than a twentieth of the evaluation
    rows share are instructions and don't count. Or if it has most of the words of one in the same
    order and the same numbers (a quotation with every sixth word changed); with --embed, the
    same meaning.

    Args:
        near: Share of equal characters from which two texts are near copies; 1: only exact copies, ignoring case,
            spaces and quotes.
        against: Evaluation rows: remove the rows that leak them; repeatable.
        ignore_numbers: Treat texts that differ only in numbers as duplicates (`12 + 34` and `12 + 35`).
        keep: Which row of a cluster to keep: first, last, longest, shortest, answered, max:FIELD or min:FIELD.

    \b
    ajet dataset dedup tasks.jsonl --out clean.jsonl --report repeats.jsonl
    ajet dataset dedup tasks.parquet --near 0.9 --keep answered -o clean.parquet
    ajet dataset dedup tasks.jsonl --keep max:metadata.votes -o - | wc -l
    ajet dataset dedup tasks.jsonl --embed bge-small@http://127.0.0.1:8000/v1 -o clean.jsonl
    ajet dataset dedup tasks.jsonl --against test.jsonl --report leaks.jsonl -o clean.jsonl
    """
    embedding = Embedding.parse(embed) if embed is not None else None
    if near == 1 and embedding is not None:
        raise ConfigError("--near 1 finds exact copies only; remove --near or --embed")
    if against:
        if near == 1 or keep != "first":
            raise ConfigError("--against removes every leak; remove --near 1 and --keep")
        return remove_leaks(
            source,
            against,
            out=out,
            similarity=near,
            ignore_numbers=ignore_numbers,
            embedding=embedding,
            report=report,
            rows=rows,
        )
    check_apart(out=out, report=report)
    with ProgressBar("reading") as bar:
        read = rows.rows(source, again=True, pictures=True)
        blocks = read_some(read.blocks(), source, bar)
        facts: list[RowFacts] = []
        for block in blocks:
            facts += [RowFacts.of(row.where, row.values, keep) for row in block.rows()]
        if all(row.rank == -math.inf for row in facts):
            raise unknown_field(keep.partition(":")[2], field_names(next(iter(read)).values))
        vectors = None
        meaning = 0.9
        if embedding is not None:
            meaning = embedding.meaning or meaning
            vectors = asyncio.run(embedded([row.text for row in facts], embedding, bar.show))
        result = find_duplicates(
            facts,
            threshold=near,
            numbers=not ignore_numbers,
            near=near < 1,
            keep=keep,
            vectors=vectors,
            meaning=meaning,
            on_progress=bar.show,
        )
    gone = {duplicate.index for duplicate in result.duplicates}
    write_kept(read, gone, len(facts), out)
    if report:
        write_report(report, _duplicate_rows(facts, result))
    counts = Counter[str](each.kind for each in result.duplicates)
    return DedupResult(
        rows=result.rows,
        path=out,
        bad=rows.bad,
        kinds={kind: counts[kind] for kind in DedupResult.labels},
        report=report,
        clusters=result.clusters,
        answers_differ=sum(each.answers_differ for each in result.duplicates),
        examples=list(_examples(facts, result)),
    )


def _duplicate_rows(rows: Sequence[RowFacts], result: Found) -> Iterator[dict[str, object]]:
    for each in result.duplicates:
        line = {
            "row": rows[each.index].where,
            "kept": rows[each.kept].where,
            "kind": each.kind,
            "similarity": round(each.similarity, 4),
            "text": readable(rows[each.index].text),
            "kept_text": readable(rows[each.kept].text),
        }
        if each.via is not None:
            line["via"] = rows[each.via].where
        if each.answers_differ:
            line["answers"] = [rows[each.index].answer, rows[each.kept].answer]
        yield line


def _examples(rows: Sequence[RowFacts], result: Found) -> Iterator[str]:
    inexact = [each for each in result.duplicates if each.kind != "exact"]
    for each in inexact[:_SHOWN]:
        row = rows[each.index]
        kept = rows[each.kept]
        yield f"{each.similarity:.2f} {row.where}: {one_line(row.text, 72)}"
        yield f"     {kept.where}: {one_line(kept.text, 72)}"


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
    format: Annotated[
        Literal["jsonl", "parquet", "csv", "directory"], Option(help="Output format.")
    ] = "jsonl",
    seed: Annotated[int, Option(help="Random seed.")] = 0,
    rows: RowOptions,
) -> SplitResult:
    """Split a dataset so that rows keep their side when the file grows.

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
    ajet dataset split qa.parquet --by metadata.document --near 0.8 --format parquet -o qa/
    ajet dataset split tasks.jsonl --stratify metadata.level --fractions 0.2 -o data/
    """
    suffix = "" if format == "directory" else f".{format}"
    shares = _fractions(fractions)
    _check_place(out, shares, suffix)
    splitter = Splitter(shares, by=by, stratify=stratify, seed=seed)
    with ProgressBar("reading") as bar, ExitStack() as stack:
        read = rows.rows(source, again=True, pictures=True)
        keys = _family_keys(read_some(read.blocks(), source, bar), by)
        if near is not None:
            texts: list[str] = []
            first_keys: list[str] = []
            for block in read_some(read.blocks(), source, bar):
                first_keys.extend(keys_of(block, by))
                texts += block.texts
            keys = together(keys or first_keys, texts, near, bar.show)
        any_held_out = any(is_held_out(name, shares) for name in shares)
        if any_held_out:
            empty = training_block(read.empty())
        else:
            empty = read.empty()
        siblings: list[Writer] = []
        writers = {}
        for name in shares:
            if format == "directory":
                path = out
            else:
                path = out / f"{name}{suffix}"
            writer = Writer(path, split=name, schema=empty.data.schema, siblings=siblings)
            writers[name] = stack.enter_context(writer)
        number = 0
        for block in read_some(read.blocks(), source, bar):
            if keys:
                block_keys = keys[number : number + len(block)]
            else:
                block_keys = keys_of(block, by)
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
        bad=rows.bad,
        splits=counts,
        empty=[name for name, number in counts.items() if not number and shares[name] > 0],
        suffix=suffix,
        is_one_family=len(keys) > 1 and len(set(keys)) == 1,
    )


def _family_keys(blocks: Iterable[Block], by: str | None) -> list[str]:
    """Returns the key of each row, that of its family's first row; empty if no row was grown from
    another."""
    keys: list[str] = []
    descents: list[Descent] = []
    waiting: list[Block] = []
    for block in blocks:
        waiting.append(block)
        if not descents and not has_lineage(block):
            continue
        # the rows before the first grown one may be its sources
        for earlier in waiting:
            keys.extend(keys_of(earlier, by))
            descents += [descent_of(row.values) for row in earlier.rows()]
        waiting.clear()
    if not any(descent.sources for descent in descents):
        return []
    for block in waiting:
        keys.extend(keys_of(block, by))
        descents += [descent_of(row.values) for row in block.rows()]
    return [keys[place] for place in together_by(keys, families(descents))]


def _check_place(out: Path, sides: Iterable[str], suffix: str) -> None:
    """Raises ConfigError if the directory has rows of a side in another format, which readers would
    include."""
    files_by_split = splits_of(out) if out.is_dir() else {}
    for side in sides:
        for file in files_by_split.pop(side, []):
            if file != out / f"{side}{suffix}" if suffix else file.parent != out / "data":
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
    try:
        if "=" not in text:
            return check_fractions({"train": 1 - float(text), "validation": float(text)})
        pairs = [part.partition("=") for part in text.split(",")]
        shares = {name.strip(): float(share) for name, _, share in pairs}
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"--fractions takes train=0.9,validation=0.1 or 0.1 (got {text!r})"
        ) from None
    if len(shares) < len(pairs) or any(
        not name or "/" in name or name.startswith(".") for name in shares
    ):
        raise ConfigError(
            f"--fractions must name each side once, with a valid file name (got {text!r})"
        )
    return check_fractions(shares)
