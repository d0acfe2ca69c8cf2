"""Checks a row against itself: its fields state one answer, and a calculation has its result."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction

from ajet_sdk.judges.math import number
from ajet_sdk.tasks.questions import PART, Reading, plain_question, without_system
from ajet_sdk.tasks.row_texts import text_of_message
from ajet_tools.dataset.verify.agreement import same, stated_answer
from ajet_tools.dataset.verify.arithmetic import computed, is_rounded
from ajet_tools.dataset.verify.verdict import RowVerdict

_STATING = (
    "answer", "final_answer", "ground_truth", "gold", "gold_answer", "expected_answer",
    "correct_answer", "reference_answer", "solution", "target",
)  # fmt: skip
"""Fields that hold the answer itself, and no index, label or list."""
_CODE = re.compile(r"\b(?:def|return|import|print|select|lambda)\b|[{};]|=>", re.IGNORECASE)


def inconsistency(row: Mapping[str, object]) -> RowVerdict | None:
    """Returns a refusal of a row whose fields state different numbers, or another than its question
    computes to."""
    reading = Reading(row)
    question = plain_question(row)
    stated = list(_stated_numbers(reading, question))
    for answer in stated[1:]:
        if not same(answer, stated[0]):
            return RowVerdict(
                False, "the row states different answers", {"answers": [stated[0], answer]}
            )
    result = computed(without_system(reading.text).replace(PART, ""))
    if result is None:
        return None
    answers = stated or [stated_answer(str(reading.answer), question)]
    for answer in answers:
        value: Fraction | None = number(answer)
        if value is not None and not is_rounded(answer, value, result):
            details = {"answer": answer, "computed": str(result)}
            return RowVerdict(False, "the answer is not the result of the calculation", details)
    return None


def _stated_numbers(row: Reading, question: str) -> Iterator[str]:
    """Yields the answers that fields of the row state as a number."""
    texts = [next(row.truths_in((name,)), None) for name in _STATING]
    if row.reply is not None:
        texts.append(text_of_message(row.reply.messages[-1]))
    for text in texts:
        if isinstance(text, bool) or not isinstance(text, str | int | float):
            continue
        if _CODE.search(str(text)):
            answer = str(text)
        else:
            answer = stated_answer(str(text), question)
        if number(answer) is not None:
            yield answer
