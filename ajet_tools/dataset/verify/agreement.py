"""Verifies by agreement of independent answers, and defines when two answers are equal."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ajet_sdk.engines.client import ModelClient
from ajet_sdk.judges.math import final_answer, math, number
from ajet_sdk.tasks.questions import answer_of, plain_question
from ajet_tools.dataset.prompts import load
from ajet_tools.dataset.verify.verdict import RowVerdict, independent

LONGEST = 400
"""Maximum characters of a reply without a marked answer that counts as an answer."""
_MARKED = re.compile(r"^[\s*_`#>]*ANSWER\s*[*_`]*\s*:[ \t]*[*_`]*[ \t]*(\S.*?)\s*$", re.MULTILINE)
_NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:\d+(?:,\d{3})+|\d+)(?:\.\d+)?(?:\s*/\s*\d+)?(?![\w.]*\d)\s*(?:\\?%)?"
)
_NEGATION = re.compile(r"\b(?:not?|never|cannot|nicht|kein\w*|pas|non)\b|n['’]t\b", re.IGNORECASE)
_OPEN = "\"'“”‘’`*_([{"
_CLOSE = "\"'“”‘’`*_)]}.,;:!"


def same(a: str, b: str) -> bool:
    """Whether two answers are equal: numbers, fractions and percentages by value, else as
    normalized text.

    Text is compared without letter case, white space, Unicode form, surrounding quotes and
    punctuation, and number formats (`5.0 km` equals `5 km`). Paraphrases and equivalent formulas
    are not recognized.
    """
    first_number = number(a)
    second_number = number(b)
    if first_number is not None and second_number is not None:
        return math(a, b)
    return (first_number is None) == (second_number is None) and _normal(a) == _normal(b)


def _normal(text: str) -> str:
    text = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    text = text.lstrip(_OPEN).rstrip(_CLOSE)
    return " ".join(_NUMBER.sub(_value, text).split())


def _value(match: re.Match[str]) -> str:
    value: Fraction | None = number(match[0])
    if value is None:
        return match[0]
    return f" {value} % " if "%" in match[0] else f" {value} "


def final_of(reply: str, *, numeric: bool = False) -> str | None:
    """Returns the final answer of a reply, or None if it is empty or unclear.

    Looks for the last line `ANSWER: ...`; else an answer found by the math judge (a box, `####`,
    "the answer is"); else takes a short reply as a whole. With `numeric`, takes the reply's last
    number.
    """
    marked = _MARKED.findall(reply)
    answer = final_answer(marked[-1] if marked else reply, numeric=numeric).strip()
    if not answer or (not marked and len(answer) > LONGEST):
        return None
    return answer


def stated_answer(reference: str, question: str) -> str:
    """Returns the answer in a row's reference: marked, or the only number of a sentence that the
    question lacks."""
    final = final_of(reference)
    is_marked = final is not None and _normal(final) != _normal(reference)
    if final is not None and (is_marked or number(final) is not None):
        return final
    if _NEGATION.search(reference) is None:
        asked = {number(numeral) for numeral in _NUMBER.findall(question)}
        stated = {number(numeral): numeral for numeral in _NUMBER.findall(reference)}
        new: list[str] = [
            numeral.strip()
            for value, numeral in stated.items()
            if value is not None and value not in asked
        ]
        if len(new) == 1:
            return new[0]
    return final or reference


@dataclass(frozen=True)
class Votes:
    """The largest group of equal answers. `margin` is its lead over the second, as a share of all
    asked."""

    answer: str | None
    count: int
    second: int
    asked: int

    @property
    def majority(self) -> bool:
        """Whether more than half of all replies agree, including unreadable ones."""
        return 2 * self.count > self.asked

    @property
    def margin(self) -> float:
        return (self.count - self.second) / self.asked


def votes(answers: Sequence[str | None]) -> Votes:
    """Returns the largest group of equal answers; of equal sizes, the earlier group."""
    groups: list[list[str]] = []
    for answer in answers:
        if answer is None:
            continue
        group = next((group for group in groups if same(group[0], answer)), None)
        if group is None:
            groups.append([answer])
        else:
            group.append(answer)
    if not groups:
        return Votes(None, 0, 0, len(answers))
    first, *rest = sorted(groups, key=len, reverse=True)
    return Votes(first[0], len(first), len(rest[0]) if rest else 0, len(answers))


class AgreementVerifier:
    """Requires a majority of K independent answers to equal the row's answer; a row without one is
    refused unasked."""

    needs_answer = True

    def __init__(self, k: int = 3, seed: int = 0) -> None:
        self.name = f"agreement:{k}"
        self.calls = k
        self._seed = seed

    async def check(self, row: Mapping[str, object], endpoint: ModelClient | None) -> RowVerdict:
        answer = answer_of(row)
        if answer is None:
            return RowVerdict(False, "no answer to compare")
        question = plain_question(row)
        right = stated_answer(str(answer), question)
        prompt = load("verify/answer")
        text = prompt.render(question=question)
        replies = await independent(endpoint, text, self.calls, seed=self._seed, what=self.name)
        numeric = number(right) is not None
        answers = [final_of(reply, numeric=numeric) for reply in replies]
        counted = votes([*answers, *[None] * (self.calls - len(answers))])
        details = {
            "answers": answers, "answer": counted.answer, "votes": counted.count, "of": self.calls,
            "margin": round(counted.margin, 4), "prompt": prompt.label,
        }  # fmt: skip
        if counted.answer is None:
            return RowVerdict(False, "no independent answer could be read", details, failed=True)
        if not counted.majority:
            return RowVerdict(False, "independent answers disagree", details)
        if not same(counted.answer, right):
            return RowVerdict(False, "independent answers agree on a different answer", details)
        return RowVerdict(
            True, f"{counted.count} of {self.calls} independent answers agree", details
        )
