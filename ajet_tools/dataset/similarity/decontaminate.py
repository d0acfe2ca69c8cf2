"""Finds rows of a dataset that leak a row of an evaluation set, with the evidence.

Kinds of evidence: the same text; a near copy (`likeness`); a shared run of words (13 by default) in
any text of the row, which also finds documents that quote the question; most of the words in the
same order (`altered`), which finds quotations with every sixth word changed; similar embeddings. A
shorter evaluation row counts as one run if it has at least 6 words, or 3 with a number (unless it
is part of a longer sum). Runs in more than a twentieth of the evaluation rows (and in more than 3)
are instructions and ignored.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rapidfuzz.distance import LCSseq

from ajet_sdk.errors import ConfigError
from ajet_sdk.tasks.questions import (
    PART,
    SYSTEM,
    pictures_of,
    question_of,
    text_of,
    without_system,
)
from ajet_sdk.tasks.row_texts import strings_of
from ajet_tools.dataset.files.rows import read
from ajet_tools.dataset.similarity.near import Match, NearIndex, OnProgress, Vectors
from ajet_tools.dataset.similarity.text import MARKED, normal

LEAST_WORDS = 6
LEAST_WITH_NUMBER = 3
"""Minimum words of an evaluation row with a number, such as `What is 12 + 34?`."""
ALTERED_WORDS = 12
"""Minimum words for `altered`: with two words changed, a shorter row may be a different
question."""
_GRAM = 4
"""Words of a run that makes an evaluation row a candidate for `altered`."""
_KEPT = 0.78
"""Minimum share of an evaluation row's words that an altered text has, in order."""
_COMMON_SHARE = 0.05
_CHUNK = 2000
_NEAREST = 8
"""Number of nearest evaluation rows whose numbers are compared with a row's."""
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")

# each Chinese, Japanese or Korean character is a word
_WORD = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+|[-+*/^=<>%×÷]"
)


def words(text: str) -> list[str]:
    """Returns the words, numbers and operators of a text in normal form."""
    return _WORD.findall(normal(text))


@dataclass(frozen=True)
class Leak:
    """The leaked evaluation row and the evidence."""

    evaluation: int
    kind: Literal["exact", "near", "words", "altered", "meaning"]
    similarity: float
    """For `words` and `altered`, the share of the evaluation row's words."""
    evidence: str
    """The text of the evaluation row, or the shared words."""


class Leaks:
    """Texts that no row may contain: `find` checks the rows of a file, a call checks one row.

    Args:
        known: the location and text of each evaluation row.
        alone: the parts of each text that ask by themselves; a row may have one without the others.
        share: minimum share of a text's words that must occur in order, besides a run of `ngram` words.
        common: a run in more than this many texts, and in more than a twentieth, is an instruction.

    Raises ConfigError without texts, or if `ngram` is too small.
    """

    def __init__(
        self,
        known: Sequence[tuple[str, str]],
        *,
        alone: Sequence[Sequence[str]] = (),
        threshold: float = 0.8,
        ngram: int = 13,
        share: float = 0.0,
        common: int = 3,
        seed: int = 0,
        numbers: bool = True,
    ) -> None:
        if ngram < LEAST_WORDS:
            raise ConfigError(
                f"--ngram must be at least {LEAST_WORDS} (got {ngram}); shorter runs occur"
                " everywhere"
            )
        if not known:
            raise ConfigError("there are no evaluation rows: their files are empty")
        self.known = list(
            zip(
                (where for where, _ in known),
                _asked_texts([text for _, text in known]),
                strict=True,
            )
        )
        self.share = share
        self._near = NearIndex(threshold, seed, numbers=numbers)
        for number, (_, text) in enumerate(self.known):
            if text.strip():
                self._near.add(str(number), text)
        self._pictures = [pictures_of(text) for _, text in self.known]
        self._all_pictures = frozenset[str]().union(*self._pictures)
        self._words = [words(text) for _, text in self.known]
        self._alone = _distinct_parts(alone)
        for number, parts in self._alone.items():
            for part in parts:
                self._near.add(str(number), part)
        self._common = max(common, _COMMON_SHARE * len(known))
        self._runs = self._known_runs(ngram)
        self._lengths: dict[tuple[str, ...], set[int]] = defaultdict(set)
        """Lengths of the runs, by their first three words."""
        for run in self._runs:
            self._lengths[run[:LEAST_WITH_NUMBER]].add(len(run))
        self._grams = self._known_grams()
        self.vectors: Vectors | None = None
        """Embeddings of the texts, if meanings are compared."""

    @classmethod
    def of(cls, evals: Sequence[str | Path], *, skip_bad: bool = False, **options: Any) -> Leaks:
        """Returns a check against the rows of these files."""
        known: list[tuple[str, str]] = []
        alone: list[Sequence[str]] = []
        for path in evals:
            for row in read(path, skip_bad=skip_bad):
                known.append((row.where, text_of(row.values)))
                alone.append(question_of(row.values).asking)
        return cls(known, alone=alone, **options)

    def _known_runs(self, size: int) -> dict[tuple[str, ...], int]:
        """Maps each run of words to the first evaluation row that has it."""
        of: dict[tuple[str, ...], int] = {}
        rows_with: Counter[tuple[str, ...]] = Counter()
        first_of_text: dict[tuple[str, ...], int] = {}
        for index, row_words in enumerate(self._words):
            if (
                first_of_text.setdefault(tuple(row_words), index) != index
            ):  # a repeated question is not an instruction
                continue
            runs = _runs_to_know(row_words, size)
            for part in self._alone.get(index, ()):
                runs |= _runs_to_know(words(part), size)
            for run in runs:
                rows_with[run] += 1
                of.setdefault(run, index)
        # what all of a few rows have in common is an instruction too
        most = min(self._common, max(1, len(first_of_text) - 1))
        return {run: index for run, index in of.items() if rows_with[run] <= most}

    def _known_grams(self) -> dict[tuple[str, ...], list[tuple[int, int]]]:
        """Maps each run of four words to the evaluation rows that have it, with its position."""
        grams: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
        for index, row_words in enumerate(self._words):
            if len(row_words) >= ALTERED_WORDS:
                for at, gram in enumerate(_runs_of(row_words, _GRAM)):
                    grams[gram].append((index, at))
        return {gram: places for gram, places in grams.items() if len(places) <= self._common}

    def find(
        self,
        texts: Sequence[str],
        everything: Iterable[str],
        *,
        vectors: tuple[Vectors, Vectors] | None = None,
        meaning: float = 0.9,
        on_progress: OnProgress | None = None,
    ) -> dict[int, Leak]:
        """Returns the rows that leak a text, by index, with the strongest evidence.

        Args:
            texts: the question of each row.
            everything: all strings of each row, which may quote a question; `share` applies to the run only.
            vectors: normalized embeddings of the rows and of the known texts.
            meaning: minimum cosine.
        """
        leaks: dict[int, Leak] = {}
        known = [text for _, text in self.known]
        for index, match in enumerate(
            self._near.find_all([without_system(text) for text in texts], on_progress)
        ):
            match = (
                match or self._match_with_system(texts[index]) or self._match_of_part(texts[index])
            )
            if match is not None:
                leaks[index] = Leak(
                    int(match.key), match.kind, match.similarity, known[int(match.key)]
                )
        for index, text in enumerate(everything):
            if (
                index not in leaks
                and (quoted := self.quoted(text)) is not None
                and quoted.similarity >= self.share
            ):
                leaks[index] = quoted
        if vectors is not None:
            for index, (number, cosine) in enumerate(nearest(*vectors, texts, known)):
                if index not in leaks and cosine >= meaning:
                    leaks[index] = Leak(number, "meaning", cosine, known[number])
        return {
            index: leak
            for index, leak in sorted(leaks.items())
            if not self._shows_others(leak.evaluation, texts[index])
        }

    def _shows_others(self, evaluation: int, text: str) -> bool:
        """Whether a text asks about pictures of which no evaluation row has one, so that words in
        common with a question about a picture are how such questions are asked."""
        shown = pictures_of(text)
        return bool(shown and self._pictures[evaluation]) and not shown & self._all_pictures

    def _match_with_system(self, text: str) -> Match | None:
        return self._near.find(text) if SYSTEM in text else None

    def _match_of_part(self, text: str) -> Match | None:
        """Returns the evaluation row that one part of a text is, such as the input of an
        instruction."""
        asked = without_system(text)
        parts = (
            [part for part in asked.split(PART) if len(words(part)) >= LEAST_WITH_NUMBER]
            if PART in asked
            else []
        )
        for match in self._near.find_all(parts):
            if match is not None and match.kind == "exact":
                return match
        return None

    def quoted(self, text: str) -> Leak | None:
        """Returns the longest run of words shared with an evaluation row, else an altered one."""
        text_words = words(text)
        covered: dict[int, set[int]] = defaultdict(set)
        """Positions of the runs of each evaluation row."""
        for at, start in enumerate(_runs_of(text_words, LEAST_WITH_NUMBER)):
            for length in self._lengths.get(start, ()):
                run = tuple(text_words[at : at + length])
                index = self._runs.get(run) if len(run) == length else None
                if index is not None and (
                    length >= LEAST_WORDS or _stands_alone(text_words, at, length)
                ):
                    covered[index].update(range(at, at + length))
        if not covered:
            return self._altered(text_words)
        index = max(covered, key=lambda number: (len(covered[number]), -number))
        places = sorted(covered[index])
        last = next((place for place in places if place + 1 not in covered[index]), places[-1])
        share = min(1.0, len(places) / len(self._words[index]))
        return Leak(index, "words", share, " ".join(text_words[places[0] : last + 1]))

    def _altered(self, text_words: Sequence[str]) -> Leak | None:
        """Returns the evaluation row most of whose words occur in the text, in order and with the
        same numbers."""
        offsets: dict[int, list[int]] = defaultdict(list)
        for at, gram in enumerate(_runs_of(text_words, _GRAM)):
            for index, place in self._grams.get(gram, ()):
                offsets[index].append(at - place)
        best: Leak | None = None
        for index, places in offsets.items():
            known = self._words[index]
            slack = max(2, len(known) // 6)
            if len(places) < slack:
                continue
            start = max(0, sorted(places)[len(places) // 2] - slack)
            window = text_words[start : start + len(known) + 2 * slack]
            share = LCSseq.similarity(known, window) / len(known)
            if share >= max(_KEPT, best.similarity if best else 0.0) and _same_numbers(
                known, window
            ):
                best = Leak(index, "altered", share, " ".join(window))
        return best

    def __call__(self, values: Mapping[str, object]) -> str | None:
        """Returns the evidence that a row leaks a text, or None."""
        text = text_of(values)
        match = (
            self._near.find(without_system(text))
            or self._match_with_system(text)
            or self._match_of_part(text)
        )
        if match is not None and not self._shows_others(int(match.key), text):
            how = "the same as" if match.kind == "exact" else f"{match.similarity:.2f} similar to"
            return f"{how} {self.known[int(match.key)][0]}"
        return self.quotation(values)

    def quotation(self, values: Mapping[str, object]) -> str | None:
        """Returns the evidence that a row quotes a text, possibly altered, or None."""
        text = strings_of(values)
        leak = self.quoted(text)
        if leak is None or self._shows_others(leak.evaluation, text_of(values)):
            return None
        mine = self._words[leak.evaluation]
        if self.share and LCSseq.similarity(mine, words(text)) / len(mine) < self.share:
            return None
        relation = (
            f"{leak.similarity:.0%} of the words of" if leak.kind == "altered" else "in common with"
        )
        return f"{relation} {self.known[leak.evaluation][0]}: {leak.evidence!r}"

    def by_meaning(self, text: str, vector: Vectors, least: float) -> str | None:
        """Returns the evidence that a row paraphrases a text, or None."""
        if self.vectors is None:
            return None
        [(index, cosine)] = nearest(
            vector[None], self.vectors, [text], [known for _, known in self.known]
        )
        return f"{cosine:.2f} by meaning like {self.known[index][0]}" if cosine >= least else None


def _asked_texts(texts: Sequence[str]) -> list[str]:
    """Returns the texts of evaluation rows without the system prompt, which hides no leak.

    It stays where it makes the question: if another row asks the same under another one.
    """
    different: dict[str, set[str]] = defaultdict(set)
    for text in texts:
        different[normal(without_system(text))].add(text)
    return [
        text if len(different[normal(without_system(text))]) > 1 else without_system(text)
        for text in texts
    ]


def _distinct_parts(alone: Sequence[Sequence[str]]) -> dict[int, list[str]]:
    """Returns the parts, by row, that are long enough to ask by themselves and that no other row
    has.

    A part that several rows have is an instruction or a passage.
    """
    rows_with = Counter(normal(part) for parts in alone if len(parts) > 1 for part in set(parts))
    distinct: dict[int, list[str]] = {}
    for index, parts in enumerate(alone):
        own = [
            part
            for part in parts
            if rows_with[normal(part)] == 1 and _runs_to_know(words(part), LEAST_WORDS)
        ]
        if len(parts) > 1 and own:
            distinct[index] = own
    return distinct


def _runs_to_know(row_words: Sequence[str], size: int) -> set[tuple[str, ...]]:
    """Returns the runs of words of an evaluation row; none if it is too short to tell a leak from
    chance."""
    length = min(size, len(row_words))
    if length < (LEAST_WITH_NUMBER if any(map(_is_figure, row_words)) else LEAST_WORDS):
        return set()
    return {tuple(row_words[at : at + length]) for at in range(len(row_words) - length + 1)}


def _runs_of(words_of_text: Sequence[str], length: int) -> Iterator[tuple[str, ...]]:
    return zip(*(words_of_text[start:] for start in range(length)), strict=False)


def _is_figure(word: str) -> bool:
    return not word[0].isalpha()


def _stands_alone(words_of_text: Sequence[str], at: int, length: int) -> bool:
    """Whether a run is not part of a longer sum, as `What is 1 + 2` is of `What is 1 + 2 + 3?`."""
    beside = *words_of_text[max(0, at - 1) : at], *words_of_text[at + length : at + length + 1]
    return not any(map(_is_figure, beside))


def _same_numbers(known: Sequence[str], window: Sequence[str]) -> bool:
    """Whether the numbers agree; in a long text, a third of them may be altered."""
    mine, theirs = (
        Counter(word for word in words if word[0].isdigit()) for words in (known, window)
    )
    missing = (mine - theirs).total()
    return missing <= (mine.total() // 3 if sum(map(len, known)) >= MARKED else 0)


def numbers_agree(first: str, second: str) -> bool:
    """Whether two wordings agree in their numbers, in any order; one may be spelt out."""
    mine, theirs = (Counter(_NUMBER.findall(normal(text))) for text in (first, second))
    return max((mine - theirs).total(), (theirs - mine).total()) <= max(
        1, max(mine.total(), theirs.total()) // 3
    )


def nearest(
    rows: Vectors, known: Vectors, texts: Sequence[str], known_texts: Sequence[str]
) -> Iterator[tuple[int, float]]:
    """Yields for each row the evaluation row with the nearest meaning and agreeing numbers, and the
    cosine."""
    for start in range(0, len(rows), _CHUNK):
        cosines = rows[start : start + _CHUNK] @ known.T
        for index, each in enumerate(cosines, start):
            order = np.argsort(-each, kind="stable")[:_NEAREST].tolist()
            fit = next(
                (
                    candidate
                    for candidate in order
                    if numbers_agree(texts[index], known_texts[candidate])
                ),
                None,
            )
            yield (fit, min(1.0, float(each[fit]))) if fit is not None else (0, 0.0)
