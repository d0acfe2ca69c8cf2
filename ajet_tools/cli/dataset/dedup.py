"""`ajet dataset dedup`: removes duplicates, or rows that leak an evaluation set."""

from __future__ import annotations

import asyncio
import importlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar

from typer import Option

from ajet_sdk.errors import ConfigError, TaskError
from ajet_sdk.reporting.output import ProgressBar
from ajet_sdk.tasks.questions import readable
from ajet_sdk.tasks.row_texts import strings_of
from ajet_tools.cli.dataset.options import (
    Out,
    RowsResult,
    Source,
    check_apart,
    counted,
    read_some,
    to_place,
)
from ajet_tools.cli.result import HIDDEN, visible_fields
from ajet_tools.dataset.curation.descent import marker
from ajet_tools.dataset.curation.fields import field_names, unknown_field
from ajet_tools.dataset.files.rows import Rows
from ajet_tools.dataset.files.writer import Writer
from ajet_tools.dataset.similarity.decontaminate import Leaks
from ajet_tools.dataset.similarity.dedup import Duplicate, RowFacts
from ajet_tools.dataset.similarity.dedup import find as find_duplicates
from ajet_tools.dataset.similarity.embedding import Embedding
from ajet_tools.text.clean import one_line

if TYPE_CHECKING:
    from ajet_tools.dataset.similarity.near import Vectors

_SHOWN = 3
_MEANING = 0.9
_MEANING_OF_LEAK = 0.8
"""Cosines from which texts are alike; a leak that stays costs more than a row that goes."""


@dataclass(frozen=True)
class _Removed:
    """A row to remove: its line of the report, and what it repeats."""

    index: int
    line: Mapping[str, object]
    other: str
    """The location of the other row."""
    evidence: str


@dataclass(frozen=True, kw_only=True)
class RemovedRows(RowsResult):
    """What became of rows of which some were removed as copies of others."""

    labels: ClassVar[Mapping[str, str]]
    """What each kind of copy is called."""
    removed: Sequence[_Removed] = field(metadata=HIDDEN)
    report: str | None

    @property
    def kinds(self) -> Mapping[str, int]:
        counts = Counter(each.line["kind"] for each in self.removed)
        return {kind: counts[kind] for kind in self.labels}

    def document(self) -> dict[str, object]:
        dropped = len(self.removed)
        kept = self.rows - dropped
        return {**visible_fields(self), "kept": kept, "dropped": dropped, **self.kinds}

    def lines(self) -> Iterator[str]:
        kept = self.rows - len(self.removed)
        yield f"{counted(kept, 'row')} of {self.rows:,} kept{to_place(self.path)}"
        for kind, number in self.kinds.items():
            if number:
                yield f"  dropped: {counted(number, 'row')} {self.labels[kind]}"
        yield from self.notes()
        inexact = [each for each in self.removed if each.line["kind"] != "exact"]
        for each in inexact[:_SHOWN]:
            line = each.line
            yield f"  {line['similarity']:.2f} {line['row']}: {one_line(line['text'], 72)}"
            yield f"       {each.other}: {one_line(each.evidence, 72)}"
        if self.report:
            yield f"  evidence is in {self.report}"

    def notes(self) -> Iterator[str]:
        yield from ()


@dataclass(frozen=True, kw_only=True)
class DedupResult(RemovedRows):
    labels = {"exact": "(exact)", "near": "(near)", "meaning": "(by meaning)"}
    clusters: int
    answers_differ: int
    """Dropped rows with another answer than the row that was kept."""

    def notes(self) -> Iterator[str]:
        if self.answers_differ:
            yield (
                f"  {counted(self.answers_differ, 'row')} of these had another answer than the row"
                " that was kept; check them"
            )


@dataclass(frozen=True, kw_only=True)
class LeaksResult(RemovedRows):
    labels = {
        "exact": "the same as an evaluation row",
        "near": "nearly the same",
        "words": "with a run of its words",
        "altered": "with most of its words in their order",
        "meaning": "with the same meaning, by embeddings",
    }
    eval_rows: int
    eval_rows_found: int
    """Evaluation rows that a row leaks."""


def dedup(
    source: Source,
    *,
    out: Out = "-",
    near: Annotated[float, Option(min=0.5, max=1.0, metavar="SHARE")] = 0.8,
    keep: str = "first",
    embed: Annotated[str | None, Option(metavar="MODEL")] = None,
    against: Annotated[list[str] | None, Option(metavar="FILE")] = None,
    report: Annotated[str | None, Option(metavar="FILE")] = None,
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
        embed: Also compare meanings, by the embeddings of NAME@URL or of a model's directory; after a comma
            meaning=COSINE from which rows are alike.
        keep: Which row of a cluster to keep: first, last, longest, shortest, answered, max:FIELD or min:FIELD.
        report: File for the removed rows, with the evidence.

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
    if against and (near == 1 or keep != "first"):
        raise ConfigError("--against removes every leak; remove --near 1 and --keep")
    for path in against or (None,):
        check_apart(against=path, out=out, report=report)
    result: DedupResult | LeaksResult
    with ProgressBar("reading") as bar:
        rows = Rows(source, again=True, pictures=True)
        facts: list[RowFacts] = []
        for block in read_some(rows.blocks(), source, bar):
            facts += [RowFacts.of(row.where, row.values, keep) for row in block.rows()]
        if all(row.rank == -math.inf for row in facts):
            raise unknown_field(keep.partition(":")[2], field_names(next(iter(rows)).values))
        texts = [row.text for row in facts]
        if against:
            check = Leaks.of(against, threshold=near)
            known = [text for _, text in check.known]
            vectors = _embedded([*texts, *known], embedding, bar)
            leaks = check.find(
                texts,
                (strings_of(row.values) for row in rows),
                vectors=None if vectors is None else (vectors[: len(texts)], vectors[len(texts) :]),
                meaning=(embedding and embedding.meaning) or _MEANING_OF_LEAK,
                on_progress=bar.show,
            )
            removed = []
            for index, leak in leaks.items():
                where, text = check.known[leak.evaluation]
                line = {
                    "row": facts[index].where,
                    "eval": where,
                    "kind": leak.kind,
                    "similarity": round(leak.similarity, 4),
                    "evidence": leak.evidence,
                    "text": readable(texts[index]),
                    "eval_text": readable(text),
                }
                removed.append(_Removed(index, line, where, leak.evidence))
            result = LeaksResult(
                rows=len(facts),
                path=out,
                report=report,
                removed=removed,
                eval_rows=len(known),
                eval_rows_found=len({leak.evaluation for leak in leaks.values()}),
            )
        else:
            found = find_duplicates(
                facts,
                threshold=near,
                keep=keep,
                vectors=_embedded(texts, embedding, bar),
                meaning=(embedding and embedding.meaning) or _MEANING,
                on_progress=bar.show,
            )
            removed = [_duplicate(each, facts) for each in found.duplicates]
            result = DedupResult(
                rows=len(facts),
                path=out,
                report=report,
                removed=removed,
                clusters=found.clusters,
                answers_differ=sum(each.answers_differ for each in found.duplicates),
            )
    _write_kept(rows, {each.index for each in removed}, len(facts), out)
    if report:
        with Writer(report) as writer:
            for each in removed:
                writer.write(each.line)
    return result


def _duplicate(each: Duplicate, facts: Sequence[RowFacts]) -> _Removed:
    row = facts[each.index]
    kept = facts[each.kept]
    line: dict[str, object] = {
        "row": row.where,
        "kept": kept.where,
        "kind": each.kind,
        "similarity": round(each.similarity, 4),
        "text": readable(row.text),
        "kept_text": readable(kept.text),
    }
    if each.via is not None:
        line["via"] = facts[each.via].where
    if each.answers_differ:
        line["answers"] = [row.answer, kept.answer]
    return _Removed(each.index, line, kept.where, kept.text)


def _embedded(
    texts: Sequence[str], embedding: Embedding | None, bar: ProgressBar
) -> Vectors | None:
    if embedding is None:
        return None
    # imports an HTTP client
    meaning = importlib.import_module("ajet_tools.dataset.similarity.meaning")
    endpoint = meaning.open_embedder(embedding.model)
    vectors: Vectors = asyncio.run(meaning.embed(endpoint, texts, on_progress=bar.show))
    return vectors


def _write_kept(rows: Rows, gone: set[int], total: int, out: str) -> None:
    """Writes all rows except those with the given indices."""
    mark = marker(rows.path, out)
    number = 0
    with Writer(out, schema=mark(rows.empty()).data.schema) as writer:
        for block in rows.blocks():
            kept = [index for index in range(len(block)) if number + index not in gone]
            writer.write_block(mark(block.take(kept)))
            number += len(block)
        if number != total:
            raise TaskError(
                f"the file changed between reads ({total:,} rows, then {number:,}); run the command"
                " again"
            )
