"""Verifies answers by a judge: the user's own, or a model with a rubric."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ajet_sdk.engines.client import ModelClient
from ajet_sdk.errors import AjetError, ConfigError, NoReward, TrainingError
from ajet_sdk.judges.call import call_judge, is_group_judge, workflow_task
from ajet_sdk.judges.llm import LlmJudge
from ajet_sdk.judges.llm_prompts import Material
from ajet_sdk.judges.math import number
from ajet_sdk.judges.model import JudgeModel
from ajet_sdk.judges.rewards import judged
from ajet_sdk.rollout.outcomes import solved
from ajet_sdk.rollout.threads import Workers
from ajet_sdk.tasks.questions import answer_of, plain_question
from ajet_sdk.tasks.task_rows import Row, to_task
from ajet_sdk.types import Episode, Task
from ajet_tools.dataset.files.values import as_text
from ajet_tools.dataset.prompts import load
from ajet_tools.dataset.verify.verdict import RowVerdict, independent, required

log = logging.getLogger("ajet")
_HANGING = 8
"""Maximum number of hanging judge calls before the check is stopped."""
_LONGEST = 500
_TIMEOUT = 60.0
"""Seconds per judge call, unless the judge sets its own limit."""


class JudgeVerifier:
    """Judges the row's answer as an agent's output, or K independent answers.

    A judge that only compares the output with `answer` accepts any row. The first row tests for
    this, with a wrong answer in both places, and logs a warning: then ask for K answers.
    """

    def __init__(self, judge: object, spec: str, *, k: int = 0, seed: int = 0) -> None:
        self.name = spec
        self.calls = k
        self.needs_answer = k == 0
        self._judge = judge
        self._seed = seed
        if is_group_judge(judge):  # also raises SignatureError for a workflow
            raise ConfigError(
                f"--verify {spec}: a group judge compares answers, but a row has only one"
            )
        self._workers = Workers(_HANGING)
        weakref.finalize(self, self._workers.close)
        self._probed = k > 0

    async def check(self, row: Mapping[str, object], endpoint: ModelClient | None) -> RowVerdict:
        try:
            task = to_task(Row("the row", row), {})
        except AjetError as error:
            return RowVerdict(False, "not a valid task", {"error": str(error)})
        if self.calls:
            return await self._independent(row, task, endpoint)
        answer = answer_of(row)
        if answer is None:
            return RowVerdict(False, "no answer to judge")
        outcome = await self._reward(task, _to_output(answer))
        if isinstance(outcome, RowVerdict):
            return outcome
        if outcome[1] and not self._probed:
            self._probed = True
            await self._probe(task, answer)
        details = {"reward": outcome[0]}
        if outcome[1]:
            return RowVerdict(True, f"the judge gives the answer {outcome[0]:g}", details)
        return RowVerdict(False, "the judge rejects the answer", details)

    async def _independent(
        self, row: Mapping[str, object], task: Task, endpoint: ModelClient | None
    ) -> RowVerdict:
        prompt = load("verify/answer")
        text = prompt.render(question=plain_question(row))
        replies = await independent(endpoint, text, self.calls, seed=self._seed, what=self.name)
        outcomes = await asyncio.gather(
            *(self._reward(task, _last_line(reply)) for reply in replies)
        )
        failure = next((outcome for outcome in outcomes if isinstance(outcome, RowVerdict)), None)
        if failure is not None:
            return failure
        accepted = sum(outcome[1] for outcome in outcomes if not isinstance(outcome, RowVerdict))
        details = {
            "accepted": accepted,
            "of": self.calls,
            "replies": replies,
            "prompt": prompt.label,
        }
        if 2 * accepted > self.calls:
            return RowVerdict(
                True, f"the judge accepts {accepted} of {self.calls} independent answers", details
            )
        return RowVerdict(False, "the judge accepts too few independent answers", details)

    async def _probe(self, task: Task, answer: object) -> None:
        wrong = _other_answer(answer)
        wrong_fields = {name: wrong for name, value in task.metadata.items() if value == answer}
        changed = task.model_copy(
            update={"metadata": {**task.metadata, **wrong_fields, "answer": wrong}}
        )
        outcome = await self._reward(changed, _to_output(wrong))
        if not isinstance(outcome, RowVerdict) and outcome[1]:
            log.warning(
                "%s proves little: this judge rewards whatever answer the row gives, even a wrong"
                " one. Verify by independent answers (%s:3) or agreement:3",
                self.name,
                self.name,
            )

    async def _reward(self, task: Task, output: object) -> tuple[float, bool] | RowVerdict:
        """Returns the reward and whether it is full marks; a verdict if the judge failed."""
        try:
            episode = Episode(task=task, output=output)
            call = call_judge(
                self._judge, task, output, episode, given={}, attempt=workflow_task(task, episode)
            )
            limit = call.timeout or _TIMEOUT
            outcome = await self._workers.call(
                call.function, {}, timeout=limit, label=f"judge {call.name}"
            )
            if outcome.error is not None:
                return _failure(outcome.error)
            judge_verdict = judged(outcome.value, call.name)
        except TrainingError:
            raise NoReward(
                f"--verify {self.name}: {_HANGING} judge calls hang; set a time limit for it"
            ) from None
        except AjetError as error:  # an unfilled parameter, or no reward
            return _failure(error)
        episode = Episode(
            task=task, rewards=judge_verdict.rewards, is_success=judge_verdict.is_success
        )
        return episode.reward or 0.0, solved(episode)


def _failure(error: BaseException) -> RowVerdict:
    details = {"error": f"{type(error).__name__}: {error}"[:_LONGEST]}
    return RowVerdict(False, f"the judge failed ({type(error).__name__})", details, failed=True)


def _last_line(reply: str) -> str:
    """Returns the text after the last `ANSWER:`, else the whole reply, as an agent would."""
    _, marked, answer = reply.rpartition("ANSWER:")
    return answer.strip() if marked and answer.strip() else reply.strip()


def _to_output(answer: object) -> Any:
    return str(answer) if isinstance(answer, int | float) else answer


def _other_answer(answer: object) -> Any:
    if isinstance(answer, bool):
        return not answer
    if isinstance(answer, int | float):
        return answer + 1
    value: Fraction | None = number(str(answer))
    if value is not None:
        return str(value + 1)
    return f"{answer} (no, the opposite)"


@dataclass(frozen=True)
class LlmVerifier:
    """An LLM judge that must give the row's answer the full score; `rubric` replaces the built-in
    one."""

    name: str = "llm"
    rubric: str | None = None
    calls: int = 1
    needs_answer: bool = True

    async def check(self, row: Mapping[str, object], endpoint: ModelClient | None) -> RowVerdict:
        answer = answer_of(row)
        if answer is None:
            return RowVerdict(False, "no answer to grade")
        rubric = load("verify/rubric")
        prompt = load("verify/grade")
        details = {"prompt": prompt.label, "rubric": "the user's" if self.rubric else rubric.label}
        judge = LlmJudge(
            self.rubric or rubric.render(),
            model=JudgeModel(required(endpoint, self.name), max_tokens=2048, retries=1),
            prompt=prompt.render(question="{query}", answer="{answer}", rubric="{rubric}"),
        )
        verdict = await graded(judge, Material(plain_question(row), as_text(answer)), 1.0, details)
        if verdict.failed:
            return verdict
        reason = f"the grader finds it {'right' if verdict.ok else 'wrong'}"
        return RowVerdict(
            verdict.ok, reason, {**verdict.details, "grade": verdict.reason[:_LONGEST]}
        )


async def graded(
    judge: LlmJudge, material: Material, least: float, details: Mapping[str, object]
) -> RowVerdict:
    """Returns the verdict of an LLM judge: passed if the score is at least `least`, as a share of
    the maximum."""
    try:
        grade = await judge.grade(material)
    except NoReward as error:
        details = {**details, "error": str(error)[:_LONGEST]}
        return RowVerdict(False, "the grader's reply cannot be read", details, failed=True)
    score = grade.score / judge.max_score
    return RowVerdict(score >= least, grade.reason, {**details, "score": score})
