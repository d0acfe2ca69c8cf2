"""Whether a row, as it comes, gives away a row of an evaluation set, with the evidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ajet_tools.dataset.decontaminate import Evaluation, quotable
from ajet_tools.dataset.similar import Near
from ajet_tools.dataset.tables import read, text_of

__all__ = ["Leaks", "leaks_of"]

Leaks = Callable[[Mapping[str, Any]], str | None]
"""Evidence that a row is in an evaluation set, or None."""


def leaks_of(evals: Sequence[str | Path], *, threshold: float = 0.8, ngram: int = 13) -> Leaks:
    """A check against the rows of these files: an equal text, a near duplicate, or `ngram` words in a row in common.

    For rows one by one; `decontaminate.find` does a whole file by the same rules.
    """
    rows = [row for path in evals for row in read(path)]
    texts = [text_of(row.values) for row in rows]
    evaluation, near = Evaluation(texts, ngram), Near(threshold)
    for row, text in zip(rows, texts, strict=True):
        near.add(row.where, text)

    def evidence(values: Mapping[str, Any]) -> str | None:
        match = near.find(text_of(values))
        if match is not None:
            return f"{'the same as' if match.kind == 'exact' else f'{match.similarity:.2f} like'} {match.key}"
        [quoted] = evaluation.quoted([quotable(values)])
        if quoted is not None:
            return f"in common with {rows[quoted.evaluation].where}: {quoted.span!r}"
        return None

    return evidence
