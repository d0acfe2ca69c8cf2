"""Computes the form of a question, its text without numbers and names; and detects questions that
contain their answer.

"Tom has 5 apples" and "Anna has 7 apples" have the same form: a dataset of five hundred texts and
nine forms teaches nine sentences.
"""

from __future__ import annotations

import re
import unicodedata
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ajet_sdk.judges.math import number
from ajet_sdk.tasks.questions import Reading, text_of
from ajet_tools.dataset.curation.language import language_of
from ajet_tools.text.number_words import TENS, UNITS

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
_NUMBERS = [*UNITS, TENS[0]]
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
_LISTS = re.compile(r"\bor\b|[:|]")
"""Matches a sentence that lists choices."""
LEAST = 20
"""Minimum number of rows to judge diversity."""
_GATHERED = 1000
"""Maximum number of forms counted individually."""


def normalize(text: str) -> str:
    """Normalizes case, white space and Unicode form."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    return _folded(text)


def form_of(text: str, language: str | None = None) -> str:
    """Replaces the numbers of a text by 0, and its names and their pronouns by X.

    A name is a capitalized word within a sentence, or at its start if a verb of daily life follows
    or the name recurs. In German, where all nouns are capitalized, only numbers are replaced.
    """
    if (language or language_of(text)) not in _NOUNS_ARE_CAPITAL:
        matches = list(_NAME.finditer(text))
        inside = {match[0] for match in matches if not _begins_sentence(match)}
        text = _NAME.sub(lambda match: "X" if _is_name(match, inside) else match[0], text)
        text = _PRONOUN.sub("X", text)
    return " ".join(_NUMBER.sub("0", text).split())


def _begins_sentence(match: re.Match[str]) -> bool:
    return _BEGINS.search(match.string, max(0, match.start() - 8), match.start()) is not None


def _is_name(match: re.Match[str], inside: Collection[str]) -> bool:
    """`inside` are the names that occur within a sentence."""
    if match[0] in inside or not _begins_sentence(match):
        return True
    return _AFTER_NAME.match(match.string, match.end()) is not None


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
        if self.forms == 1:
            sentences = "1 sentence"
        else:
            sentences = f"{self.forms:,} sentences"
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


def given_away(row: Reading) -> str | None:
    """Returns the part of a question that contains its answer, such as `(The answer is 2976.)` or
    `... = 12`, or None.

    Numbers may be written differently (`2,976`, `twelve`), and an answer of at least four words may
    occur in the sentence that asks. An answer that is only mentioned, such as one of several
    choices, does not count.
    """
    question = row.text
    folded = _folded(question)
    before, asked, after = question.rpartition("?")
    for answer in _spellings_of(row):
        phrase = _folded(answer.strip(" ."))
        if phrase not in folded:
            continue
        cued = _cued(answer, question)
        if cued is not None:
            return cued
        if asked and before and after.strip(_BEHIND).casefold() == answer.casefold():
            return after.strip()
        sentence = _folded(re.split(r"[.!?\n]\s", before)[-1])
        is_long = phrase.count(" ") >= _PHRASE
        if is_long and phrase in sentence and not _LISTS.search(sentence):
            return phrase
    return None


def _folded(text: str) -> str:
    return " ".join(text.casefold().split())


def _cued(answer: str, question: str) -> str | None:
    """Returns an answer after `the answer is`, or after a sum and an equals sign at the end."""
    folded = question.lower()
    sought = answer.lower()
    if len(folded) != len(question):  # lower-casing changed the length
        folded = question
        sought = answer
    start = folded.find(sought)
    while start >= 0:
        end = start + len(sought)
        cue = _cue(question, answer, start, end)
        if cue is not None:
            return question[cue.start() : end].strip()
        start = folded.find(sought, start + 1)
    return None


def _cue(question: str, answer: str, start: int, end: int) -> re.Match[str] | None:
    """Returns what leads to an answer at this place of a question."""
    if _GOES_ON_BEFORE.match(question, max(0, start - 1), start) or _GOES_ON.match(question, end):
        return None  # the answer is a part of a longer word or number
    near = max(0, start - _CUE_LENGTH)
    cue = None
    if not _IS_CHOICE.match(question, end):
        cue = _CUE.search(question, near, start)
    if cue is None and question.startswith(answer, start) and _ENDS.match(question, end):
        cue = _EXPRESSION.search(question, near, start)
    return cue


def _spellings_of(row: Reading) -> Iterator[str]:
    """Yields the short answers of a row; of whole numbers also other spellings."""
    seen: set[str] = set()
    for answer in (*row.truths, row.answer):
        text = str(answer).strip()
        is_plain = isinstance(answer, str | int | float) and not isinstance(answer, bool)
        if not is_plain or text in seen or not 0 < len(text) <= _LONGEST:
            continue
        seen.add(text)
        yield text
        value = int(text) if text.isdecimal() and text.isascii() else number(text)
        if value is None or value.denominator != 1:
            continue
        whole = int(value)
        written = [str(whole), f"{whole:,}", f"{whole}.0", f"{whole}.00"]
        if 0 <= whole < len(_NUMBERS):
            written.append(_NUMBERS[whole])
        yield from (spelling for spelling in written if spelling != text)
