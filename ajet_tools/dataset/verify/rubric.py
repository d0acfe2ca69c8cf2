"""Verification by a model that grades question and answer by a rubric."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ajet_sdk.errors import NoReward
from ajet_sdk.judges.model import JudgeModel, number_in, object_schema
from ajet_tools.dataset.files.values import answer_of
from ajet_tools.dataset.model.endpoint import Endpoint
from ajet_tools.dataset.prompts import load
from ajet_tools.dataset.verify.verdict import Verdict, question_of, required

__all__ = ["Grader"]

_LONGEST = 500
_SCHEMA = object_schema(correct={"type": "boolean"}, score={"type": "number"}, reason={"type": "string"})


@dataclass(frozen=True)
class Grader:
    """A model's yes or no, with a score and a reason; `rubric` is the user's text, or ours."""

    name: str = "llm"
    rubric: str | None = None
    calls: int = 1

    async def check(self, row: Mapping[str, Any], endpoint: Endpoint | None) -> Verdict:
        answer = answer_of(row)
        if answer is None:
            return Verdict(False, "no answer to grade")
        rubric, asked = load("verify/rubric"), load("verify/grade")
        text = asked.render(question=question_of(row), answer=_text(answer), rubric=self.rubric or rubric.render())
        details: dict[str, Any] = {"prompt": asked.label, "rubric": "the user's" if self.rubric else rubric.label}
        model = JudgeModel(required(endpoint, self.name), max_tokens=2048, retries=1)
        try:
            grade = (await model.ask([{"role": "user", "content": text}], _SCHEMA, _grade)).value
        except NoReward as error:
            details["error"] = str(error)[:_LONGEST]
            return Verdict(False, "the grader's reply cannot be read", details, failed=True)
        verdict = "right" if grade["correct"] else "wrong"
        return Verdict(grade["correct"], f"the grader finds it {verdict}", {**details, **grade})


def _text(answer: Any) -> str:
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)


def _grade(found: Mapping[str, Any]) -> dict[str, Any]:
    """`correct`, and `score` and `reason` where they are sound. Raises ValueError where there is no clear yes or no."""
    if not isinstance(found.get("correct"), bool):
        raise ValueError('"correct" must be true or false')
    given = found.get("score")
    score = None if isinstance(given, str) else number_in(given)
    return {
        "correct": found["correct"],
        **({"score": score} if score is not None else {}),
        "grade": str(found.get("reason", ""))[:_LONGEST],
    }
