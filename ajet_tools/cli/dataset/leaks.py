"""`ajet dataset dedup --against`: removes rows that leak an evaluation set."""

from __future__ import annotations

import asyncio
import importlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ajet_sdk.reporting.output import ProgressBar
from ajet_sdk.tasks.questions import readable
from ajet_sdk.tasks.row_texts import strings_of
from ajet_tools.cli.dataset.options import (
    KeptRows,
    RowOptions,
    check_apart,
    read_some,
    write_kept,
    write_report,
)
from ajet_tools.dataset.similarity.decontaminate import Leak, Leaks
from ajet_tools.dataset.similarity.embedding import Embedding
from ajet_tools.dataset.similarity.near import OnProgress
from ajet_tools.text.clean import one_line

if TYPE_CHECKING:
    from ajet_tools.dataset.similarity.near import Vectors

_SHOWN = 3
_MEANING = 0.8
"""Cosine from which a row may be a paraphrase of an evaluation row."""
_KINDS = {
    "exact": "the same as an evaluation row",
    "near": "nearly the same",
    "words": "with a run of its words",
    "altered": "with most of its words in their order",
    "meaning": "with the same meaning, by embeddings",
}


@dataclass(frozen=True, kw_only=True)
class LeaksResult(KeptRows):
    labels = _KINDS
    eval_rows: int
    eval_rows_found: int
    """Evaluation rows that a row leaks."""


def remove_leaks(
    source: str,
    evaluation: Sequence[str],
    *,
    out: str,
    similarity: float,
    ignore_numbers: bool,
    embedding: Embedding | None,
    report: str | None,
    rows: RowOptions,
) -> LeaksResult:
    """Removes rows that leak an evaluation set, with the evidence for each."""
    for path in evaluation:
        check_apart(against=path, out=out, report=report)
    kept_out = Leaks.of(
        evaluation,
        skip_bad=rows.skip_bad_rows,
        threshold=similarity,
        numbers=not ignore_numbers,
    )
    known = kept_out.known
    with ProgressBar("reading") as bar:
        read = rows.rows(source, again=True, pictures=True)
        texts: list[tuple[str, str]] = []
        for block in read_some(read.blocks(), source, bar):
            places = map(block.where, range(len(block)))
            texts += zip(places, block.texts, strict=True)
        questions = [text for _, text in texts]
        vectors = None
        meaning = _MEANING
        if embedding is not None:
            meaning = embedding.meaning or meaning
            both = asyncio.run(
                embedded([*questions, *(text for _, text in known)], embedding, bar.show)
            )
            vectors = both[: len(questions)], both[len(questions) :]
        everything = (strings_of(row.values) for row in read)
        leaks = kept_out.find(
            questions, everything, vectors=vectors, meaning=meaning, on_progress=bar.show
        )
    write_kept(read, set(leaks), len(texts), out)
    if report:
        write_report(report, (_leak_row(*leak, texts, known) for leak in leaks.items()))
    counts = Counter[str](leak.kind for leak in leaks.values())
    examples = [
        f"{leak.similarity:.2f} {texts[index][0]} has {known[leak.evaluation][0]}:"
        f" {one_line(leak.evidence, 72)}"
        for index, leak in list(leaks.items())[:_SHOWN]
    ]
    return LeaksResult(
        rows=len(texts),
        path=out,
        bad=rows.bad,
        kinds={kind: counts[kind] for kind in _KINDS},
        report=report,
        eval_rows=len(known),
        eval_rows_found=len({leak.evaluation for leak in leaks.values()}),
        examples=examples,
    )


def _leak_row(
    index: int, leak: Leak, texts: Sequence[tuple[str, str]], known: Sequence[tuple[str, str]]
) -> dict[str, object]:
    return {
        "row": texts[index][0],
        "eval": known[leak.evaluation][0],
        "kind": leak.kind,
        "similarity": round(leak.similarity, 4),
        "evidence": leak.evidence,
        "text": readable(texts[index][1]),
        "eval_text": readable(known[leak.evaluation][1]),
    }


async def embedded(texts: Sequence[str], embedding: Embedding, on_progress: OnProgress) -> Vectors:
    meaning = importlib.import_module(
        "ajet_tools.dataset.similarity.meaning"
    )  # imports an HTTP client
    endpoint = meaning.open_embedder(embedding.model)
    try:
        vectors: Vectors = await meaning.embed(endpoint, texts, on_progress=on_progress)
        return vectors
    finally:
        await endpoint.aclose()
