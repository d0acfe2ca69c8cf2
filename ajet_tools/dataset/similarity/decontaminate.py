"""Finds rows of a dataset that leak a row of an evaluation set, with the evidence.

Kinds of evidence: the same text; a near copy (`likeness`); a shared run of words (13 by default) in
any text of the row, which also finds documents that quote the question; most of the words in the
same order (`altered`), which finds quotations with every sixth word changed; with embeddings, a
similar meaning. A shorter evaluation row counts as one run if it has at least 6 words, or 3 with a number
(unless it is part of a longer sum). Runs in more than a twentieth of the evaluation rows (and in
more than 3) are instructions and ignored.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rapidfuzz.distance import LCSseq

from ajet_sdk.errors import ConfigError
from ajet_sdk.tasks.questions import PART, SYSTEM, Reading, pictures_of, text_of, without_system
from ajet_sdk.tasks.row_texts import strings_of
from ajet_tools.dataset.files.rows import read
from ajet_tools.dataset.similarity.near import Match, NearIndex, OnProgress, Vectors, close_pairs
from ajet_tools.dataset.similarity.text import MARKED, normal

LEAST_WORDS = 6
LEAST_WITH_NUMBER = 3
"""Minimum words of an evaluation row with a number, such as `What is 12 + 34?`."""
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
ALTERED_WORDS = 12
"""Minimum words for `altered`: with two words changed, a shorter row may be a different
question."""
_GRAM = 4
"""Words of a run that makes an evaluation row a candidate for `altered`."""
_KEPT = 0.78
"""Minimum share of an evaluation row's words that an altered text has, in order."""
_COMMON_SHARE = 0.05  # what more evaluation rows have in common is an instruction

# each Chinese, Japanese or Korean character is a word
_WORD = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+|[-+*/^=<>%×÷]"
)
Run = tuple[str, ...]
"""Consecutive words."""


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
        share: for `quotation`, the minimum share of a text's words that occur in order.
        common: a run in more than this many texts, and in more than a twentieth, is an instruction.

    Raises ConfigError without texts.
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
    ) -> None:
        if not known:
            raise ConfigError("there are no evaluation rows: their files are empty")
        texts = _asked_texts([text for _, text in known])
        self.known = [(where, text) for (where, _), text in zip(known, texts, strict=True)]
        self.share = share
        self._near = NearIndex(threshold)
        for number, text in enumerate(texts):
            if text.strip():
                self._near.add(str(number), text)
        self._pictures = [pictures_of(text) for text in texts]
        self._all_pictures = frozenset[str]().union(*self._pictures)
        self._words = [words(text) for text in texts]
        self._alone = _distinct_parts(alone)
        for number, parts in self._alone.items():
            for part in parts:
                self._near.add(str(number), part)
        self._common = max(common, _COMMON_SHARE * len(known))
        self._runs = self._known_runs(ngram)
        self._lengths: dict[Run, set[int]] = defaultdict(set)
        """Lengths of the runs, by their first three words."""
        for run in self._runs:
            self._lengths[run[:LEAST_WITH_NUMBER]].add(len(run))
        self._grams = self._known_grams()

    @classmethod
    def of(cls, evals: Sequence[str | Path], *, threshold: float = 0.8) -> Leaks:
        """Returns a check against the rows of these files."""
        known: list[tuple[str, str]] = []
        alone: list[Sequence[str]] = []
        for path in evals:
            for row in read(path, pictures=True):
                reading = Reading(row.values)
                known.append((row.where, reading.text))
                alone.append(reading.question.asking)
        return cls(known, alone=alone, threshold=threshold)

    def _known_runs(self, size: int) -> dict[Run, int]:
        """Maps each run of words to the first evaluation row that has it."""
        first_row: dict[Run, int] = {}
        rows_with: Counter[Run] = Counter()
        first_of_text: dict[Run, int] = {}
        for index, row_words in enumerate(self._words):
            if first_of_text.setdefault(tuple(row_words), index) != index:
                continue  # a repeated question is not an instruction
            runs = _runs_to_know(row_words, size)
            for part in self._alone.get(index, ()):
                runs |= _runs_to_know(words(part), size)
            rows_with.update(runs)
            for run in runs:
                first_row.setdefault(run, index)
        # what all of a few rows have in common is an instruction too
        most = min(self._common, max(1, len(first_of_text) - 1))
        return {run: index for run, index in first_row.items() if rows_with[run] <= most}

    def _known_grams(self) -> dict[Run, list[tuple[int, int]]]:
        """Maps each run of four words to the evaluation rows that have it, with its position."""
        grams: dict[Run, list[tuple[int, int]]] = defaultdict(list)
        for index, row_words in enumerate(self._words):
            if len(row_words) >= ALTERED_WORDS:
                for position, gram in enumerate(_runs_of(row_words, _GRAM)):
                    grams[gram].append((index, position))
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
            everything: all strings of each row, which may quote a question.
            vectors: normalized embeddings of the rows and of the known texts.
            meaning: minimum cosine.
        """
        leaks: dict[int, Leak] = {}
        known = [text for _, text in self.known]
        asked = [without_system(text) for text in texts]
        for index, found in enumerate(self._near.find_all(asked, on_progress)):
            match = found
            if match is None and SYSTEM in texts[index]:
                match = self._near.find(texts[index])
            if match is None:
                match = self._match_of_part(asked[index])
            if match is not None:
                place = int(match.key)
                leaks[index] = Leak(place, match.kind, match.similarity, known[place])
        for index, text in enumerate(everything):
            leak = None if index in leaks else self.quoted(text)
            if leak is not None:
                leaks[index] = leak
        if vectors is not None:
            rows, theirs = vectors
            pairs = close_pairs((rows, asked), (theirs, known), meaning, _numbers_agree)
            for pair in sorted(pairs, key=lambda pair: -pair.similarity):
                if pair.first not in leaks:
                    evidence = known[pair.second]
                    leaks[pair.first] = Leak(pair.second, "meaning", pair.similarity, evidence)
        return {
            index: leak
            for index, leak in sorted(leaks.items())
            if not self._shows_others(leak.evaluation, texts[index])
        }

    def __call__(self, values: Mapping[str, object]) -> str | None:
        """Returns the evidence that a row leaks a text, or None."""
        leak = self.find([text_of(values)], [strings_of(values)]).get(0)
        return None if leak is None else self._describe(leak)

    def quotation(self, values: Mapping[str, object]) -> str | None:
        """Returns the evidence that a row quotes a text, or None."""
        leak = self.quoted(strings_of(values))
        if leak is None or self._shows_others(leak.evaluation, text_of(values)):
            return None
        known = self._words[leak.evaluation]
        if LCSseq.similarity(known, words(strings_of(values))) < self.share * len(known):
            return None
        return self._describe(leak)

    def _describe(self, leak: Leak) -> str:
        where = self.known[leak.evaluation][0]
        if leak.kind == "words":
            return f"in common with {where}: {leak.evidence!r}"
        if leak.kind == "altered":
            return f"{leak.similarity:.0%} of the words of {where}: {leak.evidence!r}"
        if leak.kind == "exact":
            return f"the same as {where}"
        return f"{leak.similarity:.2f} similar to {where}"

    def _shows_others(self, evaluation: int, text: str) -> bool:
        """Whether a text asks about pictures of which no evaluation row has one, so that words in
        common with a question about a picture are how such questions are asked."""
        shown = pictures_of(text)
        return bool(shown and self._pictures[evaluation]) and not shown & self._all_pictures

    def _match_of_part(self, asked: str) -> Match | None:
        """Returns the evaluation row that one part of a text is, such as the input of an
        instruction."""
        if PART not in asked:
            return None
        parts = [part for part in asked.split(PART) if len(words(part)) >= LEAST_WITH_NUMBER]
        for match in self._near.find_all(parts):
            if match is not None and match.kind == "exact":
                return match
        return None

    def quoted(self, text: str) -> Leak | None:
        """Returns the evaluation row with which a text shares the most words in runs, else one that
        it has altered."""
        text_words = words(text)
        covered: dict[int, set[int]] = defaultdict(set)
        """Positions of the runs of each evaluation row."""
        for position, start in enumerate(_runs_of(text_words, LEAST_WITH_NUMBER)):
            for length in self._lengths.get(start, ()):
                index = self._runs.get(tuple(text_words[position : position + length]))
                if index is None:
                    continue
                if length >= LEAST_WORDS or _stands_alone(text_words, position, length):
                    covered[index].update(range(position, position + length))
        if not covered:
            return self._altered(text_words)
        index = max(covered, key=lambda number: (len(covered[number]), -number))
        places = sorted(covered[index])
        share = min(1.0, len(places) / len(self._words[index]))
        end = places[0]
        while end in covered[index]:
            end += 1
        return Leak(index, "words", share, " ".join(text_words[places[0] : end]))

    def _altered(self, text_words: Sequence[str]) -> Leak | None:
        """Returns the evaluation row most of whose words occur in the text, in order and with the
        same numbers."""
        offsets: dict[int, list[int]] = defaultdict(list)
        for position, gram in enumerate(_runs_of(text_words, _GRAM)):
            for index, place in self._grams.get(gram, ()):
                offsets[index].append(position - place)
        best: Leak | None = None
        for index, places in offsets.items():
            row_words = self._words[index]
            slack = max(2, len(row_words) // 6)
            if len(places) < slack:
                continue
            start = max(0, sorted(places)[len(places) // 2] - slack)
            window = text_words[start : start + len(row_words) + 2 * slack]
            share = LCSseq.similarity(row_words, window) / len(row_words)
            least = max(_KEPT, best.similarity if best else 0.0)
            if share >= least and _same_numbers(row_words, window):
                best = Leak(index, "altered", share, " ".join(window))
        return best


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
    rows_with: Counter[str] = Counter()
    for parts in alone:
        if len(parts) > 1:
            rows_with.update(normal(part) for part in set(parts))
    distinct: dict[int, list[str]] = {}
    for index, parts in enumerate(alone):
        for part in parts:
            if rows_with[normal(part)] == 1 and _runs_to_know(words(part), LEAST_WORDS):
                distinct.setdefault(index, []).append(part)
    return distinct


def _runs_to_know(row_words: Sequence[str], size: int) -> set[Run]:
    """Returns the runs of words of an evaluation row; none if it is too short to tell a leak from
    chance."""
    length = min(size, len(row_words))
    if length < (LEAST_WITH_NUMBER if any(map(_is_figure, row_words)) else LEAST_WORDS):
        return set()
    return set(_runs_of(row_words, length))


def _runs_of(words_of_text: Sequence[str], length: int) -> Iterator[Run]:
    return zip(*(words_of_text[start:] for start in range(length)), strict=False)


def _is_figure(word: str) -> bool:
    return not word[0].isalpha()


def _stands_alone(words_of_text: Sequence[str], at: int, length: int) -> bool:
    """Whether a run is not part of a longer sum, as `What is 1 + 2` is of `What is 1 + 2 + 3?`."""
    beside = *words_of_text[max(0, at - 1) : at], *words_of_text[at + length : at + length + 1]
    return not any(map(_is_figure, beside))


def _same_numbers(known: Sequence[str], window: Sequence[str]) -> bool:
    """Whether the numbers agree; in a long text, a third of them may be altered."""
    numbers = Counter(word for word in known if word[0].isdigit())
    missing = numbers - Counter(word for word in window if word[0].isdigit())
    is_long = sum(map(len, known)) >= MARKED
    return missing.total() <= (numbers.total() // 3 if is_long else 0)


def _numbers_agree(first: str, second: str) -> bool:
    """Whether two wordings agree in their numbers, in any order; one may be spelt out."""
    numbers = Counter(_NUMBER.findall(normal(first)))
    others = Counter(_NUMBER.findall(normal(second)))
    most = max(numbers.total(), others.total())
    different = max((numbers - others).total(), (others - numbers).total())
    return different <= max(1, most // 3)
