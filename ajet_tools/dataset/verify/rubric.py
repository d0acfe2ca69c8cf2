"""Verification by a model that grades question and answer by a rubric."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ajet_sdk.judges.model import number_in, object_in
from ajet_tools.dataset.prompts import load
from ajet_tools.dataset.verify.verdict import Chat, Verdict, answer_of, independent, question_of

__all__ = ["Grader", "ask_for_grade"]

T = TypeVar("T")

TRIES = 2
"""A reply that cannot be read is asked for once more."""
_LONGEST = 500


@dataclass(frozen=True)
class Grader:
    """A model's yes or no, with a score and a reason; `rubric` is the user's text, or ours."""

    name: str = "llm"
    rubric: str | None = None
    seed: int = 0
    calls: int = 1

    async def check(self, row: Mapping[str, Any], endpoint: Chat | None) -> Verdict:
        answer = answer_of(row)
        if answer is None:
            return Verdict(False, "it has no answer to grade")
        rubric = load("verify/rubric")
        given = self.rubric or rubric.render()
        asked = load("verify/grade")
        text = asked.render(question=question_of(row), answer=_text(answer), rubric=given)
        details: dict[str, Any] = {"prompt": asked.label, "rubric": "the user's" if self.rubric else rubric.label}

        async def ask(attempt: int) -> str:
            replies = await independent(
                endpoint, text, 1, seed=self.seed + attempt, temperature=0.0, max_tokens=2048, what=self.name
            )
            return replies[0] if replies else ""

        grade, reply = await ask_for_grade(ask, _grade)
        if grade is None:
            return Verdict(
                False, "the grader's reply cannot be read", {**details, "reply": reply[:_LONGEST]}, failed=True
            )
        verdict = "right" if grade["correct"] else "wrong"
        return Verdict(grade["correct"], f"the grader finds it {verdict}", {**details, **grade})


async def ask_for_grade(
    ask: Callable[[int], Awaitable[str]], read: Callable[[Mapping[str, Any]], T | None]
) -> tuple[T | None, str]:
    """What `read` makes of the JSON object in a reply, and the last reply. A reply without a grade is asked for again.

    `ask` is given the number of the attempt.
    """
    reply = ""
    for attempt in range(TRIES):
        reply = await ask(attempt)
        found = object_in(reply)
        grade = None if found is None else read(found)
        if grade is not None:
            return grade, reply
    return None, reply


def _text(answer: Any) -> str:
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)


def _grade(found: Mapping[str, Any]) -> dict[str, Any] | None:
    """`correct`, and `score` and `reason` where they are sound; None where there is no clear yes or no."""
    if not isinstance(found.get("correct"), bool):
        return None
    given = found.get("score")
    score = None if isinstance(given, str) else number_in(given)
    return {
        "correct": found["correct"],
        **({"score": score} if score is not None else {}),
        "grade": str(found.get("reason", ""))[:_LONGEST],
    }
