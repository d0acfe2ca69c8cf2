"""Computes the form of a question, its text without numbers and names; and detects questions that
contain their answer.

"Tom has 5 apples" and "Anna has 7 apples" have the same form: a dataset of five hundred texts and
nine forms teaches nine sentences.
"""

from __future__ import annotations

import re
import unicodedata
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ajet_sdk.judges.math import number
from ajet_sdk.tasks.questions import answer_of, text_of, truths_of
from ajet_tools.dataset.curation.language import language_of

_NUMBER = re.compile(
    r"(?<![\w)])-?\d+(?:[.,:/]\d+)*|\d+(?:[.,:/]\d+)*|\b(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|"
    r"(?:thir|four|fif|six|seven|eigh|nine)teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|hundred|thousand)\b",
    re.IGNORECASE,
)
_NEVER = (
    r"(?!(?:What|Which|Who|Whose|Where|When|Why|How|If|The|A|An|This|That|These|Those|There|It|He|She|They|We|You|I|In|"
    r"On|At|Each|Every|All|Some|And|But|Or|So|Then|After|Before|One)\b)"
)
"""Words that start a sentence and are not names."""
_WORD = rf"{_NEVER}[A-ZÀ-ÖØ-ÞΑ-ΩА-Я][\w-]*"
_NAME = re.compile(rf"(?<![\w'’]){_WORD}(?: {_WORD})*(?:['’](?!s\b)\w+)?")
_PRONOUN = re.compile(r"\b(?:he|she|his|her|hers|him|himself|herself)\b", re.IGNORECASE)
_BEGINS = re.compile(r"(?:^|[.!?:\n])[\s\"“'(]*$")
_AFTER_NAME = re.compile(
    r"['’]s\b|\s+(?:has|had|have|is|was|and|will|can|wants?|needs?|buys|bought|gives|gave|sells|sold|makes|made|reads|"
    r"walks|walked|runs|ran|eats|ate|works|worked|earns|earned|takes|took|starts|started|picks|picked|saves|saved|"
    r"spends|spent|drives|drove|collects|collected|bakes|baked)\b"
)
_NOUNS_ARE_CAPITAL = ("de",)
_LONGEST = 200
_PHRASE = 3
"""Minimum number of blanks in an answer that is given away by occurring in the sentence that
asks."""
_NUMBERS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
    "twenty",
]
_CUE = re.compile(
    r"(?:hint|correct (?:choice|option|value)|total|sum|difference|product|quotient|remainder|"
    r"answer|solution|result|antwort|lösung|ergebnis|réponse|résultat|respuesta|solución|resultado|risposta|resposta|"
    r"ответ|答案|答え|정답)(?:\s+(?:to|of|for)\s+(?:this|that|it|the)(?:\s+\w+)?)?\s*"
    r"(?:is|are|was|equals|ist|lautet|est|es|è|é|是|为|は|[=:：])[\s:]*(?:the\s+|an?\s+)?(?:\\boxed)?"
    r"[\"'`*$({\[“‘\s]*\Z",
    re.IGNORECASE,
)
_BEHIND = " \t\n=.()[]{}*`\"'$→>-"
_CUE_LENGTH = 200
"""Characters before an answer to search for a cue."""
_IS_CHOICE = re.compile(r"\s*,?\s*(?:or|oder|ou)\b|\s*,\s*\S+,?\s+(?:or|oder|ou)\b", re.IGNORECASE)
_GOES_ON_BEFORE = re.compile(r"[^\W\u3040-\ud7ff]|\.")
"""A word character (Chinese, Japanese and Korean don't separate words), or a decimal point."""
_GOES_ON = re.compile(r"[^\W\u3040-\ud7ff]|[.,]\d")
_EXPRESSION = re.compile(r"\d[\d\s().,]*[-+*/×÷^][-\d\s+*/×÷^().,]*=\s*\Z")
_ENDS = re.compile(r"\W*\Z")
LEAST = 20
"""Minimum number of rows to judge diversity."""
_GATHERED = 1000
"""Maximum number of forms counted individually."""


def normalize(text: str) -> str:
    """Normalizes case, white space and Unicode form."""
    return " ".join(
        (text if text.isascii() else unicodedata.normalize("NFKC", text)).casefold().split()
    )


def form_of(text: str, language: str | None = None) -> str:
    """Replaces the numbers of a text by 0, and its names and their pronouns by X.

    A name is a capitalized word within a sentence, or at its start if a verb of daily life follows
    or the name recurs. In German, where all nouns are capitalized, only numbers are replaced.
    """
    if (language or language_of(text)) not in _NOUNS_ARE_CAPITAL:
        words = {
            m[0]
            for m in _NAME.finditer(text)
            if not _BEGINS.search(text, max(0, m.start() - 8), m.start())
        }
        text = _NAME.sub(lambda m: "X" if _is_name(m, text, words) else m[0], text)
        text = _PRONOUN.sub("X", text)
    return " ".join(_NUMBER.sub("0", text).split())


def _is_name(match: re.Match[str], text: str, within: Iterable[str]) -> bool:
    if match[0] in within or not _BEGINS.search(text, max(0, match.start() - 8), match.start()):
        return True
    return _AFTER_NAME.match(text, match.end()) is not None


@dataclass(frozen=True)
class Diversity:
    """The number of forms of some rows."""

    rows: int
    forms: int
    most: int = 0
    """Rows with the most common form."""
    example: str = ""

    @property
    def is_low(self) -> bool:
        """Whether at least half of the rows repeat a form."""
        return self.rows >= LEAST and 2 * self.forms <= self.rows

    def as_text(self) -> str:
        sentences = "1 sentence" if self.forms == 1 else f"{self.forms:,} sentences"
        example = " ".join(self.example.split())
        shown = example if len(example) <= 80 else f"{example[:79]}…"
        return (
            f"{self.rows:,} rows are {sentences} with other numbers and names; the most common"
            f" occurs {self.most:,} times: {shown!r}"
        )

    def as_json(self) -> dict[str, object]:
        return {
            "rows": self.rows,
            "forms": self.forms,
            "commonest": self.most,
            "example": self.example,
        }


class Forms:
    """Counts the forms of texts, with 8 bytes per text."""

    def __init__(self) -> None:
        self._rows = 0
        self._hashes = array("q")
        self._counts: dict[str, int] = {}
        self._examples: dict[str, str] = {}

    def add(self, text: str, language: str | None = None) -> None:
        form = form_of(text, language)
        self._rows += 1
        self._hashes.append(hash(normalize(form)))
        if form in self._counts:
            self._counts[form] += 1
        elif len(self._counts) < _GATHERED:
            self._counts[form] = 1
            self._examples[form] = text

    def diversity(self) -> Diversity:
        if not self._counts:
            return Diversity(0, 0)
        commonest = max(self._counts, key=lambda form: self._counts[form])
        forms = len(np.unique(np.frombuffer(self._hashes, np.int64)))
        return Diversity(self._rows, forms, self._counts[commonest], self._examples[commonest])


def diversity_of(rows: Iterable[Mapping[str, object]]) -> Diversity:
    forms = Forms()
    for values in rows:
        forms.add(text_of(values))
    return forms.diversity()


def given_away(values: Mapping[str, object], question: str | None = None) -> str | None:
    """Returns the part of a question that contains its answer, such as `(The answer is 2976.)` or
    `... = 12`, or None.

    Numbers may be written differently (`2,976`, `twelve`), and an answer of at least four words may
    occur in the sentence that asks. An answer that is only mentioned, such as one of several
    choices, does not count.
    """
    question = text_of(values) if question is None else question
    folded = " ".join(question.casefold().split())
    for answer in _answers(values):
        if " ".join(answer.casefold().strip(" .").split()) not in folded:
            continue
        if (cued := _cued(answer, question)) is not None:
            return cued
        before, asked, after = question.rpartition("?")
        if asked and before and after.strip(_BEHIND).casefold() == answer.casefold():
            return after.strip()
        sentence = " ".join(re.split(r"[.!?\n]\s", before)[-1].casefold().split())
        phrase = " ".join(answer.casefold().strip(" .").split())
        if (
            phrase.count(" ") >= _PHRASE
            and phrase in sentence
            and not re.search(r"\bor\b|[:|]", sentence)
        ):
            return phrase
    return None


def _cued(answer: str, question: str) -> str | None:
    """Returns an answer after `the answer is`, or after a sum and an equals sign at the end."""
    folded, sought = question.lower(), answer.lower()
    if len(folded) != len(question):  # lower-casing changed the length
        folded, sought = question, answer
    start = folded.find(sought)
    while start >= 0:
        end, near = start + len(sought), max(0, start - _CUE_LENGTH)
        if not _GOES_ON_BEFORE.match(question, max(0, start - 1), start) and not _GOES_ON.match(
            question, end
        ):
            cue = None if _IS_CHOICE.match(question, end) else _CUE.search(question, near, start)
            if cue is None and question.startswith(answer, start) and _ENDS.match(question, end):
                cue = _EXPRESSION.search(question, near, start)
            if cue is not None:
                return question[cue.start() : end].strip()
        start = folded.find(sought, start + 1)
    return None


def _answers(values: Mapping[str, object]) -> Iterator[str]:
    for answer in (*truths_of(values), answer_of(values)):
        if isinstance(answer, str | int | float) and not isinstance(answer, bool):
            text = str(answer).strip()
            if 0 < len(text) <= _LONGEST:
                yield from _spellings(text)


def _spellings(answer: str) -> Iterator[str]:
    """Yields an answer, and other spellings of a whole number."""
    yield answer
    value = int(answer) if answer.isdecimal() and answer.isascii() else number(answer)
    if value is not None and value.denominator == 1:
        whole = int(value)
        written = [str(whole), f"{whole:,}", f"{whole}.0", f"{whole}.00"]
        written += [_NUMBERS[whole]] if 0 <= whole < len(_NUMBERS) else []
        yield from (spelling for spelling in written if spelling != answer)
