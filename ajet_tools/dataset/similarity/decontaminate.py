"""Rows of a dataset that give away a row of an evaluation set, each with the evidence.

Kinds of evidence: the same text; nearly the same (`likeness`); a run of words in common (13 by default), in any text
of the row, so that a document that quotes the question is found too; most of its words in their order (`altered`), so
that a quotation with every sixth word changed is found; and by vectors, about the same meaning. An evaluation row with
fewer words than a run counts as one, if it has at least 6, or 3 with a number (and then not as part of a longer sum).
Runs that are in more than a twentieth of the evaluation rows (and in more than 3) are instructions, and say nothing.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from rapidfuzz.distance import LCSseq

from ajet_sdk.errors import ConfigError
from ajet_tools.dataset.files.blocks import strings_of
from ajet_tools.dataset.files.tables import read, text_of
from ajet_tools.dataset.similarity.near import NearIndex, OnProgress, Vectors
from ajet_tools.dataset.similarity.text import MARKED, normal

__all__ = ["Evaluation", "Leak", "Leaks", "leaks_of", "nearest", "words"]

U64 = npt.NDArray[np.uint64]

LEAST_WORDS = 6
LEAST_WITH_NUMBER = 3
"""Words of a short evaluation row with a number in it, such as `What is 12 + 34?`."""

ALTERED_WORDS = 12
"""Fewer words may be a question of its own when two of them are changed."""

_GRAM = 4
"""Words of a run that makes an evaluation row a candidate for `altered`."""

_KEPT = 0.78
"""The share of an evaluation row's words that are there, in their order, in a text that alters it."""

_COMMON_SHARE, _COMMON_LEAST = 0.05, 3

_CHUNK = 2000

_NEAREST = 8
"""Evaluation rows whose numbers are compared with a row's, the nearest ones."""

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")

# a sign of Chinese, Japanese or Korean is a word of its own
_WORD = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+|[-+*/^=<>%×÷]"
)


def words(text: str) -> list[str]:
    """The words, numbers and operators of a text in normal form."""
    return _WORD.findall(normal(text))


@dataclass(frozen=True)
class Leak:
    """A row that goes: which evaluation row it gives away, by what evidence."""

    index: int
    evaluation: int
    kind: Literal["exact", "near", "words", "altered", "meaning", "paraphrase"]
    similarity: float
    """Of `words` and `altered`, the share of the evaluation row's words that are there."""
    evidence: str
    """The text of the evaluation row, or the words in common."""


class Evaluation:
    """The evaluation rows' runs of words. Raises ConfigError where there are none or `size` is too small."""

    def __init__(self, texts: Iterable[str], size: int = 13, *, common: int = _COMMON_LEAST) -> None:
        """A run in more than `common` texts, and in more than a twentieth, is an instruction."""
        if size < LEAST_WORDS:
            raise ConfigError(
                f"--ngram must be at least {LEAST_WORDS} words (got {size}); shorter runs occur in any two texts"
            )
        self.texts = list(texts)
        if not self.texts:
            raise ConfigError("there are no evaluation rows: the files of --eval are empty")
        self.size = size
        self._words = [words(text) for text in self.texts]
        self._common = max(common, _COMMON_SHARE * len(self.texts))
        self._runs = self._known()
        self._grams = self._known_grams()
        self._gram_hashes = np.unique(np.array([_run_hash(run) for run in self._grams], np.uint64))
        self.lengths = sorted({len(run) for run in self._runs})
        self._hashes = {
            length: np.unique(np.array([_run_hash(run) for run in self._runs if len(run) == length], np.uint64))
            for length in self.lengths
        }

    def _known(self) -> dict[tuple[str, ...], int]:
        """Run of words -> the first evaluation row that has it."""
        of: dict[tuple[str, ...], int] = {}
        rows_with: Counter[tuple[str, ...]] = Counter()
        first_of_text: dict[tuple[str, ...], int] = {}
        for index, found in enumerate(self._words):
            if first_of_text.setdefault(tuple(found), index) != index:  # the same question twice is no instruction
                continue
            length = min(self.size, len(found))
            if length < (LEAST_WITH_NUMBER if any(map(_is_figure, found)) else LEAST_WORDS):
                continue
            for run in {tuple(found[at : at + length]) for at in range(len(found) - length + 1)}:
                rows_with[run] += 1
                of.setdefault(run, index)
        return {run: index for run, index in of.items() if rows_with[run] <= self._common}

    def _known_grams(self) -> dict[tuple[str, ...], list[tuple[int, int]]]:
        """Run of four words -> the evaluation rows that have it, and where."""
        grams: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
        for index, found in enumerate(self._words):
            if len(found) >= ALTERED_WORDS:
                for at in range(len(found) - _GRAM + 1):
                    grams[tuple(found[at : at + _GRAM])].append((index, at))
        return {gram: places for gram, places in grams.items() if len(places) <= self._common}

    def quoted(self, texts: Sequence[str]) -> list[Quotation | None]:
        """For each text the longest run of words that it has in common with an evaluation row, else one altered."""
        found = [words(text) for text in texts]
        hashes = _hashes([word for each in found for word in each])
        bounds = np.concatenate((np.zeros(1, np.int64), np.cumsum([len(each) for each in found], dtype=np.int64)))
        likely: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for length in self.lengths:
            hits = np.flatnonzero(np.isin(_run_hashes(hashes, length), self._hashes[length]))
            rows = np.searchsorted(bounds, hits, side="right") - 1
            for hit, row in zip(hits.tolist(), rows.tolist(), strict=True):
                at = hit - int(bounds[row])
                if at + length <= len(found[row]) and (length >= LEAST_WORDS or _stands_alone(found[row], at, length)):
                    likely[row].append((at, length))
        runs = [self._longest_run(each, likely[row]) if row in likely else None for row, each in enumerate(found)]
        hits = np.flatnonzero(np.isin(_run_hashes(hashes, _GRAM), self._gram_hashes))
        several = np.bincount(np.searchsorted(bounds, hits, side="right") - 1, minlength=len(found)) > 1
        return [run or (self._altered(found[row]) if several[row] else None) for row, run in enumerate(runs)]

    def share(self, index: int, text: str) -> float:
        """The share of an evaluation row's words that stand in a text in their order."""
        return LCSseq.similarity(self._words[index], words(text)) / len(self._words[index])

    def _altered(self, found: Sequence[str]) -> Quotation | None:
        """The evaluation row most of whose words stand in the text, in their order and with the same numbers."""
        offsets: dict[int, list[int]] = defaultdict(list)
        for at in range(len(found) - _GRAM + 1):
            for index, place in self._grams.get(tuple(found[at : at + _GRAM]), ()):
                offsets[index].append(at - place)
        best: Quotation | None = None
        for index, places in offsets.items():
            known = self._words[index]
            if len(places) < max(2, len(known) // 6):
                continue
            slack = max(2, len(known) // 6)
            start = max(0, sorted(places)[len(places) // 2] - slack)
            window = found[start : start + len(known) + 2 * slack]
            share = LCSseq.similarity(known, window) / len(known)
            if share >= max(_KEPT, best.share if best else 0.0) and _same_numbers(known, window):
                best = Quotation(index, share, " ".join(window), altered=True)
        return best

    def _longest_run(self, found: Sequence[str], likely: Sequence[tuple[int, int]]) -> Quotation | None:
        covered: dict[int, set[int]] = defaultdict(set)
        for at, length in likely:
            index = self._runs.get(tuple(found[at : at + length]))
            if index is not None:
                covered[index].update(range(at, at + length))
        if not covered:
            return None
        index = max(covered, key=lambda number: (len(covered[number]), -number))
        places = sorted(covered[index])
        share = min(1.0, len(places) / len(self._words[index]))
        last = next((place for place in places if place + 1 not in covered[index]), places[-1])
        return Quotation(index, share, " ".join(found[places[0] : last + 1]))


@dataclass(frozen=True)
class Quotation:
    """Words that a text has in common with an evaluation row, and the share of its words that they are."""

    evaluation: int
    share: float
    span: str
    altered: bool = False
    """Most of its words, in their order."""


def _is_figure(word: str) -> bool:
    """A number or an operator."""
    return not word[0].isalpha()


def _stands_alone(found: Sequence[str], at: int, length: int) -> bool:
    """Whether a short run is no part of a longer sum, as `What is 1 + 2` is of `What is 1 + 2 + 3?`."""
    return not any(map(_is_figure, (*found[max(0, at - 1) : at], *found[at + length : at + length + 1])))


def _same_numbers(known: Sequence[str], window: Sequence[str]) -> bool:
    """Other numbers make another task; of a long text, where words are altered too, one in three may be altered."""
    mine, theirs = (Counter(word for word in words if word[0].isdigit()) for words in (known, window))
    missing = (mine - theirs).total()
    return missing <= (mine.total() // 3 if sum(map(len, known)) >= MARKED else 0)


def numbers_agree(one: str, other: str) -> bool:
    """Whether two wordings may be of one task by their numbers, in any order; one number may be there in words."""
    mine, theirs = (Counter(_NUMBER.findall(normal(text))) for text in (one, other))
    return max((mine - theirs).total(), (theirs - mine).total()) <= max(1, max(mine.total(), theirs.total()) // 3)


def _hashes(found: Sequence[str]) -> U64:
    known: dict[str, int] = {}
    for word in found:
        if word not in known:
            known[word] = int.from_bytes(blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
    return np.array([known[word] for word in found], np.uint64)


def _run_hashes(hashes: U64, length: int) -> U64:
    """The hash of each run of that many words, by where it begins."""
    count = max(0, len(hashes) - length + 1)
    rolled = np.zeros(count, np.uint64)
    for place in range(length):
        rolled = rolled * np.uint64(0x9E3779B97F4A7C15) + hashes[place : place + count]
    return rolled


def _run_hash(run: Sequence[str]) -> int:
    return int(_run_hashes(_hashes(run), len(run))[0])


def _find_quotations(everything: Iterable[str], evaluation: Evaluation) -> Iterator[Quotation | None]:
    held: list[str] = []
    for text in everything:
        held.append(text)
        if len(held) == _CHUNK:
            yield from evaluation.quoted(held)
            held.clear()
    yield from evaluation.quoted(held)


def nearest(
    rows: Vectors, known: Vectors, texts: Sequence[str], known_texts: Sequence[str]
) -> Iterator[tuple[int, float]]:
    """For each row the evaluation row whose meaning is nearest, of those whose numbers agree, and the cosine."""
    for start in range(0, len(rows), _CHUNK):
        cosines = rows[start : start + _CHUNK] @ known.T
        for index, each in enumerate(cosines, start):
            order = np.argsort(-each, kind="stable")[:_NEAREST].tolist()
            fit = next((one for one in order if numbers_agree(texts[index], known_texts[one])), None)
            yield (fit, min(1.0, float(each[fit]))) if fit is not None else (0, 0.0)


class Leaks:
    """Texts that no row may give away: `find` looks through the rows of a file, a call at one row.

    Args:
        known: where each text is from, and the text.
        share: of a text's words, at least this share must be there in their order, beside a run of `ngram` words.
    """

    def __init__(
        self,
        known: Sequence[tuple[str, str]],
        *,
        threshold: float = 0.8,
        ngram: int = 13,
        share: float = 0.0,
        common: int = _COMMON_LEAST,
        seed: int = 0,
        numbers: bool = True,
    ) -> None:
        self.known, self.share = known, share
        self._evaluation = Evaluation([text for _, text in known], ngram, common=common)
        self._near = NearIndex(threshold, seed, numbers=numbers)
        for number, (_, text) in enumerate(known):
            if text.strip():
                self._near.add(str(number), text)
        self.vectors: Vectors | None = None
        """Of the texts, where meanings are compared."""

    def find(
        self,
        texts: Sequence[str],
        everything: Iterable[str],
        *,
        vectors: tuple[Vectors, Vectors] | None = None,
        meaning: float = 0.9,
        on_progress: OnProgress | None = None,
    ) -> list[Leak]:
        """The rows that give a text away, in their order; of several kinds of evidence the strongest.

        Args:
            texts: what each row asks.
            everything: all texts of each row, where a question may be quoted; here `share` is that of the run alone.
            vectors: of the rows and of the known texts, each of length 1; alike are those with a cosine of `meaning`.
        """
        found: dict[int, Leak] = {}
        known = [text for _, text in self.known]
        for index, match in enumerate(self._near.find_all(texts, on_progress)):
            if match is not None:
                number = int(match.key)
                found[index] = Leak(index, number, match.kind, match.similarity, known[number])
        for index, quoted in enumerate(_find_quotations(everything, self._evaluation)):
            if quoted is not None and index not in found and quoted.share >= self.share:
                kind: Literal["words", "altered"] = "altered" if quoted.altered else "words"
                found[index] = Leak(index, quoted.evaluation, kind, quoted.share, quoted.span)
        if vectors is not None:
            for index, (number, cosine) in enumerate(nearest(*vectors, texts, known)):
                if index not in found and cosine >= meaning:
                    found[index] = Leak(index, number, "meaning", cosine, known[number])
        return [found[index] for index in sorted(found)]

    def __call__(self, values: Mapping[str, Any]) -> str | None:
        """The evidence that a row gives a text away, or None."""
        match = self._near.find(text_of(values))
        if match is not None:
            how = "the same as" if match.kind == "exact" else f"{match.similarity:.2f} similar to"
            return f"{how} {self.known[int(match.key)][0]}"
        return self.quotation(values)

    def quotation(self, values: Mapping[str, Any]) -> str | None:
        """The evidence that a row has words of a text, as they are or altered."""
        text = strings_of(values)
        [quoted] = self._evaluation.quoted([text])
        if quoted is None or (self.share and self._evaluation.share(quoted.evaluation, text) < self.share):
            return None
        what = f"{quoted.share:.0%} of the words of" if quoted.altered else "in common with"
        return f"{what} {self.known[quoted.evaluation][0]}: {quoted.span!r}"

    def by_meaning(self, text: str, vector: Vectors, least: float) -> str | None:
        """The evidence that a row says in other words what a text says."""
        if self.vectors is None:
            return None
        [(index, cosine)] = nearest(vector[None], self.vectors, [text], [one for _, one in self.known])
        return f"{cosine:.2f} by meaning like {self.known[index][0]}" if cosine >= least else None


def leaks_of(evals: Sequence[str | Path], *, threshold: float = 0.8, ngram: int = 13) -> Leaks:
    """A check against the rows of these files."""
    known = [(row.where, text_of(row.values)) for path in evals for row in read(path)]
    return Leaks(known, threshold=threshold, ngram=ngram)
