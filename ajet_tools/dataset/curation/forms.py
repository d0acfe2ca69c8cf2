"""The form of a question, which is what is left without its numbers and names; and questions that say their answer.

"Tom has 5 apples" and "Anna has 7 apples" are two texts and one form: a dataset of five hundred texts and nine forms
teaches nine sentences.
"""

from __future__ import annotations

import re
import unicodedata
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from ajet_sdk.judges.math import number
from ajet_sdk.tasks.lineage import ANSWERS
from ajet_tools.dataset.curation.language import language_of
from ajet_tools.dataset.files.blocks import text_of
from ajet_tools.dataset.similarity.text import normals

_NUMBER = re.compile(
    r"(?<![\w)])-?\d+(?:[.,:/]\d+)*|\d+(?:[.,:/]\d+)*|\b(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|"
    r"(?:thir|four|fif|six|seven|eigh|nine)teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|hundred|thousand)\b",
    re.IGNORECASE,
)
_NEVER = (
    r"(?!(?:What|Which|Who|Whose|Where|When|Why|How|If|The|A|An|This|That|These|Those|There|It|He|She|They|We|You|I|In|"
    r"On|At|Each|Every|All|Some|And|But|Or|So|Then|After|Before|One)\b)"
)
"""Words that begin a sentence and are no names."""
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
"""Blanks in an answer that is long enough to be given away by standing in the sentence that asks."""
_NUMBERS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
_CUE = re.compile(
    r"(?:hint|correct (?:choice|option|value)|"
    r"answer|solution|result|antwort|lösung|ergebnis|réponse|résultat|respuesta|solución|resultado|risposta|resposta|"
    r"ответ|答案|答え|정답)(?:\s+(?:to|of|for)\s+(?:this|that|it|the)(?:\s+\w+)?)?\s*"
    r"(?:is|are|was|equals|ist|lautet|est|es|è|é|是|为|は|[=:：])[\s:]*(?:the\s+|an?\s+)?(?:\\boxed)?"
    r"[\"'`*$({\[“‘\s]*\Z",
    re.IGNORECASE,
)
CUES = (
    r"hint|correct|answer|solution|result|antwort|lösung|ergebnis|réponse|résultat|respuesta|solución|risposta|resposta|"
    r"ответ|答案|答え|정답|=|\u0307"
)
"""One of these is in the normal form of each text that has a cue or a sum; U+0307 is left of a Turkish dotted I."""
_BEHIND = " \t\n=.()[]{}*`\"'$→>-"
_CUE_LENGTH = 200
"""Characters before an answer in which a cue is looked for."""
_IS_CHOICE = re.compile(r"\s*,?\s*(?:or|oder|ou)\b|\s*,\s*\S+,?\s+(?:or|oder|ou)\b", re.IGNORECASE)
_GOES_ON_BEFORE = re.compile(r"[^\W\u3040-\ud7ff]|\.")
"""A character of a word (Chinese, Japanese and Korean stand without blanks), or a decimal point."""
_GOES_ON = re.compile(r"[^\W\u3040-\ud7ff]|[.,]\d")
_EXPRESSION = re.compile(r"\d[\d\s().,]*[-+*/×÷^][-\d\s+*/×÷^().,]*=\s*\Z")
_ENDS = re.compile(r"\W*\Z")
LEAST = 20
"""Fewer rows say nothing of how diverse they are."""
_GATHERED = 1000
"""Forms that are counted one by one."""


def normalize(text: str) -> str:
    """A text without what does not make it another: case, kinds of blanks, forms of one character."""
    return " ".join((text if text.isascii() else unicodedata.normalize("NFKC", text)).casefold().split())


def form_of(text: str, language: str | None = None) -> str:
    """A text with its numbers as 0 and its names and the pronouns for them as X.

    A name is a word with a capital letter within a sentence, or one that begins it before a verb of daily life or comes
    again within. In German, where every noun has one, only numbers are replaced.
    """
    if (language or language_of(text)) not in _NOUNS_ARE_CAPITAL:
        words = {m[0] for m in _NAME.finditer(text) if not _BEGINS.search(text, max(0, m.start() - 8), m.start())}
        text = _NAME.sub(lambda m: "X" if _is_name(m, text, words) else m[0], text)
        text = _PRONOUN.sub("X", text)
    return " ".join(_NUMBER.sub("0", text).split())


def _is_name(match: re.Match[str], text: str, within: Iterable[str]) -> bool:
    if match[0] in within or not _BEGINS.search(text, max(0, match.start() - 8), match.start()):
        return True
    return _AFTER_NAME.match(text, match.end()) is not None


@dataclass(frozen=True)
class Diversity:
    """How many forms some rows have."""

    rows: int
    forms: int
    most: int = 0
    """Rows of the commonest form."""
    example: str = ""

    @property
    def is_low(self) -> bool:
        """At least half of the rows repeat a form."""
        return self.rows >= LEAST and 2 * self.forms <= self.rows

    def as_text(self) -> str:
        sentences = "1 sentence" if self.forms == 1 else f"{self.forms:,} sentences"
        example = " ".join(self.example.split())
        shown = example if len(example) <= 80 else f"{example[:79]}…"
        return (
            f"{self.rows:,} rows are {sentences} with other numbers and names; the most common occurs {self.most:,} "
            f"times: {shown!r}"
        )

    def as_json(self) -> dict[str, object]:
        return {"rows": self.rows, "forms": self.forms, "commonest": self.most, "example": self.example}


class Forms:
    """Counts the forms of texts, of each of which 8 bytes are remembered."""

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


def given_away(values: Mapping[str, object]) -> str | None:
    """Where the question of a row says its answer as such: `(The answer is 2976.)`, `... = 12`; None where it does not.

    A number may be written in another way (`2,976`, `twelve`), and an answer of four words and more may stand in the
    sentence that asks. One that only occurs in the question, as one of several choices does, is not given away.
    """
    question = text_of(values)
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
        if phrase.count(" ") >= _PHRASE and phrase in sentence and not re.search(r"\bor\b|[:|]", sentence):
            return phrase
    return None


def may_give_away(texts: pl.Series, forms: pl.Series, marked: pl.Series, answers: Sequence[pl.Series]) -> pl.Series:
    """Of which rows `given_away` may say something; it says nothing of the others.

    Args:
        texts: the questions, as a polars series.
        forms: their normal forms.
        marked: which of these have one of `CUES`, and maybe others.
        answers: columns of answers as text, numbers as JSON spells them.
    """
    open_ended = (~texts.str.strip_chars_end(_BEHIND).str.ends_with("?")).fill_null(False).arg_true()
    behind_question = open_ended.filter(texts.gather(open_ended).str.contains("?", literal=True))
    has_cue = marked.clone().scatter(behind_question, True)
    plain = texts.str.len_bytes() == texts.str.len_chars()
    gives_away = pl.repeat(False, len(texts), eager=True)
    for answer in answers:
        long = (answer.str.len_bytes() > 2 * _PHRASE).fill_null(False).arg_true()  # words with a blank between them
        phrases = long.filter(answer.gather(long).str.count_matches(r"[^\s\x1c-\x1f]+") > _PHRASE)
        some = (has_cue.clone().scatter(phrases, True) & answer.is_not_null()).arg_true()
        questions = forms.gather(some)
        answer_forms: Any = normals(answer.gather(some)).str.strip_chars(" .")
        digits: Any = answer_forms.str.extract(r"^-?0*([1-9][0-9]{1,14})$").fill_null("")
        whole = (digits != "") & ~digits.is_in([str(number) for number in range(len(_NUMBERS))])
        is_said = (
            questions.str.contains(answer_forms, literal=True)
            | answer_forms.str.contains(r"[0-9]|[^\x00-\x7f]")
            | ~plain.gather(some)
        )
        is_said = pl.select(
            pl.when(whole)
            .then(questions.str.replace_all(",", "", literal=True).str.contains(digits, literal=True))
            .otherwise(is_said)
        ).to_series()
        gives_away = gives_away.scatter(some.filter(is_said.fill_null(False)), True)
    return gives_away


def _cued(answer: str, question: str) -> str | None:
    """An answer behind `the answer is`, or behind a sum and its sign of equality at the end."""
    folded, sought = question.lower(), answer.lower()
    if len(folded) != len(question):  # a letter that is two in lower case
        folded, sought = question, answer
    start = folded.find(sought)
    while start >= 0:
        end, near = start + len(sought), max(0, start - _CUE_LENGTH)
        if not _GOES_ON_BEFORE.match(question, max(0, start - 1), start) and not _GOES_ON.match(question, end):
            cue = None if _IS_CHOICE.match(question, end) else _CUE.search(question, near, start)
            if cue is None and question.startswith(answer, start) and _ENDS.match(question, end):
                cue = _EXPRESSION.search(question, near, start)
            if cue is not None:
                return question[cue.start() : end].strip()
        start = folded.find(sought, start + 1)
    return None


def _answers(values: Mapping[str, object]) -> Iterator[str]:
    metadata = values.get("metadata")
    for mapping in (metadata if isinstance(metadata, Mapping) else {}, values):
        for name in ANSWERS:
            answer = mapping.get(name)
            if isinstance(answer, str | int | float) and not isinstance(answer, bool):
                text = str(answer).strip()
                if 0 < len(text) <= _LONGEST:
                    yield from _spellings(text)


def _spellings(answer: str) -> Iterator[str]:
    """An answer, and a whole number in other ways to write it."""
    yield answer
    value = int(answer) if answer.isdecimal() and answer.isascii() else number(answer)
    if value is not None and value.denominator == 1:
        whole = int(value)
        written = [str(whole), f"{whole:,}", f"{whole}.0", f"{whole}.00"]
        written += [_NUMBERS[whole]] if 0 <= whole < len(_NUMBERS) else []
        yield from (spelling for spelling in written if spelling != answer)
