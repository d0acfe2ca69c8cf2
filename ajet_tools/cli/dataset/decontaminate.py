"""`ajet dataset decontaminate`: removes rows that leak an evaluation set."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from typer import Option

from ajet_sdk.engines.budget import Budget, Price
from ajet_sdk.reporting.output import ProgressBar
from ajet_sdk.tasks.questions import readable
from ajet_sdk.tasks.row_texts import strings_of
from ajet_tools.cli.dataset.options import (
    Embeddings,
    Out,
    RowOptions,
    Source,
    check_apart,
    counted,
    read_some,
    report_kept,
    write_kept,
    write_report,
)
from ajet_tools.cli.dataset.similarity import IgnoreNumbers, Report, Seed, Similarity, embedded
from ajet_tools.dataset.curation.descent import marked
from ajet_tools.dataset.model.open import open_named
from ajet_tools.dataset.similarity.decontaminate import Leak, Leaks
from ajet_tools.dataset.similarity.paraphrase import find_paraphrases
from ajet_tools.text.clean import one_line

_SHOWN = 3
_KINDS = {
    "exact": "the same as an evaluation row",
    "near": "nearly the same",
    "words": "with a run of its words",
    "altered": "with most of its words in their order",
    "meaning": "with the same meaning, by embeddings",
    "paraphrase": "in other words, as the model says",
}


def decontaminate(
    source: Source,
    *,
    evaluation: Annotated[
        list[str], Option("--eval", metavar="FILE", help="Evaluation rows; repeatable.")
    ],
    out: Out = "-",
    similarity: Similarity = 0.8,
    ngram: Annotated[
        int, Option(min=6, help="Consecutive shared words that count as a leak.")
    ] = 13,
    share: Annotated[float, Option(min=0.0, max=1.0)] = 0.0,
    ignore_numbers: IgnoreNumbers = False,
    embeddings: Embeddings = None,
    meaning: Annotated[float, Option(min=0.0, max=1.0)] = 0.8,
    check_model: Annotated[str | None, Option(metavar="NAME@URL")] = None,
    check_price: Annotated[str | None, Option(metavar="IN,OUT")] = None,
    cache: Annotated[Path | None, Option(metavar="FILE")] = None,
    report: Report = None,
    seed: Seed = 0,
    rows: RowOptions,
) -> None:
    """Remove rows that leak an evaluation set, with the evidence for each.

    A row is removed if its question equals or nearly equals that of an evaluation row (as in
    `dedup`), or if any of its texts shares a run of --ngram words with one (for a short row all its
    words: 6 or more, or 3 or more with a number). Runs that more than a twentieth of the evaluation
    rows share are instructions and don't count. Or if it has most of the words of one in the same
    order and the same numbers (a quotation with every sixth word changed); with --embeddings, the
    same meaning. Paraphrases are found best by --check-model, which sees each remaining row with
    the five nearest, by words or, with --embeddings, by meaning.

    Args:
        share: Also require this share of the evaluation row's words.
        meaning: With --embeddings: cosine similarity that counts as a leak.
        check_model: Ask this model whether a row paraphrases an evaluation row (a call per row).
        check_price: Price of a million of its input and output tokens.
        cache: Cache of its replies, so that none is paid for twice.

    \b
    ajet dataset decontaminate tasks.jsonl --eval test.jsonl --out clean.jsonl
    ajet dataset decontaminate tasks.parquet --eval gsm8k.parquet --eval math.jsonl \\
      --ngram 8 --share 0.5 --report leaks.jsonl -o clean.parquet
    ajet dataset decontaminate train.jsonl --eval train.val.jsonl --json -o clean.jsonl
    ajet dataset decontaminate tasks.jsonl --eval test.jsonl \\
      --check-model gpt-4o-mini@https://api.openai.com/v1 -o clean.jsonl
    """
    for path in evaluation:
        check_apart(eval=path, out=out, report=report)
    budget = Budget(price=Price.parse(check_price) if check_price else None)
    kept_out = Leaks.of(
        evaluation,
        skip_bad=rows.skip_bad_rows,
        threshold=similarity,
        ngram=ngram,
        share=share,
        seed=seed,
        numbers=not ignore_numbers,
    )
    known = kept_out.known
    with ProgressBar("reading") as bar:
        again = rows.rereadable(source)
        texts = [
            (block.where(index), text)
            for block in read_some(again(), source, bar)
            for index, text in enumerate(block.texts)
        ]
        asked = [text for _, text in texts]
        vectors = None
        if embeddings:
            both = asyncio.run(
                embedded([*asked, *(text for _, text in known)], embeddings, bar.show)
            )
            vectors = both[: len(asked)], both[len(asked) :]
        everything = (strings_of(row.values) for block in again() for row in block.rows())
        leaks = kept_out.find(
            asked, everything, vectors=vectors, meaning=meaning, on_progress=bar.show
        )
        if check_model is not None:
            url = os.environ.get("OPENAI_BASE_URL", "")
            endpoint = open_named(
                check_model, option="--check-model", base_url=url, cache=cache, budget=budget
            )
            leaks = asyncio.run(
                find_paraphrases(
                    asked, known, leaks, endpoint, vectors=vectors, on_progress=bar.show
                )
            )
    write_kept(marked(again(), source, out), set(leaks), len(texts), out, rows.tables(source))
    if report:
        write_report(report, (_leak_row(*leak, texts, known) for leak in leaks.items()))
    _report_leaks(leaks, texts, known, rows, out, report, budget if check_model else None)


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


def _report_leaks(
    leaks: Mapping[int, Leak],
    texts: Sequence[tuple[str, str]],
    known: Sequence[tuple[str, str]],
    rows: RowOptions,
    out: str,
    report: str | None,
    checking: Budget | None,
) -> None:
    kinds = {kind: sum(leak.kind == kind for leak in leaks.values()) for kind in _KINDS}
    more: dict[str, object] = {
        "eval_rows": len(known),
        "eval_rows_found": len({leak.evaluation for leak in leaks.values()}),
    }
    if checking is not None:
        spent = checking.spent
        more["check"] = {
            "calls": spent.calls,
            "cached": spent.cached,
            "tokens": spent.tokens,
            "cost": spent.cost,
        }
    lines = [
        f"  dropped: {counted(kinds[kind], 'row')} {name}"
        for kind, name in _KINDS.items()
        if kinds[kind]
    ]
    lines += [f"  the model was asked in {checking.summary()}"] if checking is not None else []
    for index, leak in list(leaks.items())[:_SHOWN]:
        lines.append(
            f"  {leak.similarity:.2f} {texts[index][0]} has {known[leak.evaluation][0]}:"
            f" {one_line(leak.evidence, 72)}"
        )
    report_kept(rows, len(texts), kinds, more, lines, out, report)
