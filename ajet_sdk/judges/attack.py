"""Attacks a judge or an environment with outputs that cheat, and reports their rewards."""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ajet_sdk.environments.instances import InstanceLimits, Instances, Refused
from ajet_sdk.environments.spec import Spec, UnknownTask
from ajet_sdk.errors import ConfigError
from ajet_sdk.judges.call import is_group_judge
from ajet_sdk.judges.cheats import MESSAGES, PROGRAMS, TEXTS, Cheat
from ajet_sdk.judges.code import TESTS, CodeJudge, longest_block
from ajet_sdk.judges.combined import CombinedJudge, WeightedJudge
from ajet_sdk.judges.evaluate import value_of, verdicts_on
from ajet_sdk.judges.llm import LlmJudge
from ajet_sdk.judges.model import JudgeModel, ScriptedModel
from ajet_sdk.judges.rewards import Verdict
from ajet_sdk.judges.rubric import RubricJudge
from ajet_sdk.judges.task_cheats import cheats_of, reference_names, text_of_value
from ajet_sdk.judges.weak_tests import passed_by
from ajet_sdk.protocols import Ask
from ajet_sdk.types import Episode, Task

TASKS = (
    Task(
        task_id="text",
        main_query="What is the capital of Mongolia?",
        metadata={"answer": "Ulaanbaatar"},
    ),
    Task(task_id="number", main_query="What is 1723 times 4?", metadata={"answer": "6892"}),
)
"""Default tasks for an attack on a judge."""
PROGRAM_TASKS = (
    Task(
        task_id="asserts",
        main_query="Write double(x), which returns x + x.",
        metadata={
            "test_list": [
                "assert double(2) == 4",
                "assert abs(double(1.5) - 3.0) < 1e-6",
                "assert double('a') == 'aa'",
            ]
        },
    ),
    Task(
        task_id="check",
        main_query="Write double(x), which returns x + x.",
        metadata={
            "test": (
                "def check(candidate):\n    assert all(map(lambda n: candidate(n) == n + n,"
                " range(2, 5)))"
            ),
            "entry_point": "double",
        },
    ),
)
"""Default tasks for an attack on a judge that runs tests."""
REFUSAL = "I do not know."
"""Compared with each cheat by a group judge, if the task has no answer."""
_STEPS = 3
"""Steps of an environment that get the same cheat."""


@dataclass(frozen=True)
class Outcome:
    """The reward of a cheat on a task."""

    kind: str
    name: str
    task_id: str
    reward: float | None
    """None if there was no verdict."""
    earned: bool
    why: str = ""
    """The reason for a missing verdict."""
    paid_by: tuple[str, ...] = ()
    """For a program: the assertions that it passes, each run alone."""


@dataclass
class Attack:
    """All outcomes, in the order of tasks and cheats."""

    outcomes: list[Outcome]

    @property
    def earned(self) -> list[Outcome]:
        """Cheats that earned a reward."""
        return [outcome for outcome in self.outcomes if outcome.earned]


async def attack_judge(
    judge: object,
    tasks: Sequence[Task] = (),
    *,
    seen: Sequence[Task] = (),
    threshold: float | None = None,
    own_model: bool = False,
    parallel: int = 8,
    done: Callable[[int], None] = lambda count: None,
) -> Attack:
    """Judge every cheat on every task.

    A task with tests gets programs, empty outputs and unicode; any other task gets the texts, and
    outputs made from the task itself and from the answers of all tasks. A part of the right answer
    earns if it gets as much as the right one.

    Args:
        judge: as `--judge` takes it. An LLM judge asks `gullible` in place of its model.
        tasks: defaults to `PROGRAM_TASKS` or `TASKS`.
        seen: all tasks, whose answers a policy could learn; empty: `tasks`.
        threshold: a cheat earns with a reward above it, or with `is_success`; None: the judge's `min_score`, else 0. A
            group judge compares the cheat with the task's answer or a refusal, and the higher reward earns.
        own_model: ask the real model of an LLM judge.
        parallel: concurrent verdicts.
        done: called with the number of newly judged cheats.

    Raises ConfigError if there was no verdict at all.
    """
    if threshold is not None:
        least = threshold
    else:
        least = float(getattr(judge, "min_score", 0.0))
    grouped = is_group_judge(judge)
    limit = asyncio.Semaphore(parallel)
    judge = judge if own_model else _scripted(judge)
    if isinstance(judge, CombinedJudge):
        parts = [part.judge for part in judge.parts]
    else:
        parts = [judge]
    if any(isinstance(part, CodeJudge) for part in parts):
        defaults = PROGRAM_TASKS
    else:
        defaults = TASKS

    chosen = list(tasks or defaults)
    names = {task.task_id: reference_names(parts, task) for task in (*chosen, *seen)}
    answers = [_answer(task, names[task.task_id]) for task in seen or chosen]

    async def rewarded(outputs: Sequence[object], task: Task) -> list[Verdict | str]:
        episodes = [
            Episode(episode_id=f"{index}", group_id="g", attempt=index, task=task, output=content)
            for index, content in enumerate(outputs)
        ]
        async with limit:
            return list(await verdicts_on(judge, episodes))

    async def outcome(cheat: Cheat, task: Task) -> Outcome:
        output = cheat.on(task.main_query, _function(task))
        answer = _answer(task, names[task.task_id])
        verdicts = await rewarded([answer or REFUSAL, output] if grouped else [output], task)
        done(1)
        verdict = verdicts[-1]
        if isinstance(verdict, str):
            return Outcome(cheat.kind, cheat.name, task.task_id, None, False, verdict)
        reward = value_of(verdict) or 0.0
        honest = value_of(verdicts[0]) or 0.0
        if grouped:
            earned = reward > honest
        else:
            earned = reward > least or verdict.is_success is True
        if earned and cheat.kind in ("answers", "hollow") and not grouped:
            # A judge may pay a part of an answer, but not as much as all of it.
            form = text_of_value(answer) if isinstance(output, str) else answer
            [right] = await rewarded([form], task)
            earned = isinstance(right, str) or reward >= (value_of(right) or 0.0)
        paid_by: tuple[str, ...] = ()
        if earned and cheat.kind in ("program", "trivial"):
            paid_by = await _paying_tests(parts, output, task)
        return Outcome(cheat.kind, cheat.name, task.task_id, reward, earned, paid_by=paid_by)

    for_programs = [*PROGRAMS, *(cheat for cheat in TEXTS if cheat.kind in ("empty", "unicode"))]
    pairs: list[tuple[Cheat, Task]] = []
    for task in chosen:
        if any(task.metadata.get(name) for name in TESTS):
            cheats = for_programs
        else:
            cheats = [*TEXTS, *cheats_of(task, names[task.task_id], answers)]
        pairs += [(cheat, task) for cheat in cheats]
    return _checked(await asyncio.gather(*(outcome(cheat, task) for cheat, task in pairs)))


def _answer(task: Task, names: Sequence[str]) -> object:
    return next((task.metadata[name] for name in names if name in task.metadata), None)


async def _paying_tests(judges: Sequence[object], output: str, task: Task) -> tuple[str, ...]:
    """The assertions of a task that a program passes, if a judge runs its tests."""
    by_tests = [judge for judge in judges if isinstance(judge, CodeJudge)]
    if not by_tests:
        return ()
    code = longest_block(output) or output
    tests = next(task.metadata[name] for name in TESTS if task.metadata.get(name))
    entry_point = task.metadata.get("entry_point")
    [judge, *_] = by_tests
    return tuple(
        await passed_by(code, tests, entry_point, limits=judge.limits, unfenced=judge.unfenced)
    )


async def attack_environment(
    spec: Spec,
    most_tasks: int = 1,
    *,
    threshold: float = 0.0,
    parallel: int = 8,
    done: Callable[[int], None] = lambda count: None,
) -> Attack:
    """Send every cheat to a new instance, then request the score.

    Args:
        spec: the environment, as `ajet env serve` hosts it: one process for each instance.
        most_tasks: number of tasks, the first of the spec's first split (or of `train`).
        threshold: a cheat earns with a reward or a score above it.

    Raises ConfigError if the environment cannot be loaded, or never answers.
    """
    instances = Instances(spec, InstanceLimits(timeout=30.0))
    limit = asyncio.Semaphore(parallel)
    await instances.start()

    async def outcome(place: int, cheat: Cheat, task_id: str) -> Outcome:
        name = f"attack-{place}"
        rewards = list[float]()
        why = ""
        async with limit:
            try:
                await instances.create(name, task_id, {})
                for _ in range(_STEPS):
                    answer = await instances.ask(name, {"what": "step", "messages": cheat.content})
                    rewards.append(float(answer.get("reward") or 0.0))
                    if answer.get("is_terminated"):
                        break
            except (Refused, UnknownTask) as refused:  # an environment may refuse a message
                why = str(refused)
            try:
                rewards.append(float(await instances.ask(name, {"what": "evaluate", "params": {}})))
            except Refused as refused:
                why = why or str(refused)
            await instances.release(name)
        done(1)
        reward = max(rewards, default=None)
        return Outcome(
            cheat.kind, cheat.name, task_id, reward, reward is not None and reward > threshold, why
        )

    try:
        try:
            known = [str(task) for task in await instances.tasks(next(iter(spec.splits), "train"))][
                :most_tasks
            ]
        except Refused:
            known = []
        pairs = [(cheat, task_id) for task_id in known or ["0"] for cheat in MESSAGES]
        return _checked(
            await asyncio.gather(*(outcome(at, *pair) for at, pair in enumerate(pairs)))
        )
    finally:
        await instances.close()


def _checked(outcomes: list[Outcome]) -> Attack:
    if all(outcome.reward is None for outcome in outcomes):
        why = next(
            (outcome.why for outcome in outcomes if outcome.why), "there are no cheats for it"
        )
        raise ConfigError(
            f"no cheat could be judged: {why}; pass tasks that the judge can judge with --tasks"
        )
    return Attack(outcomes)


def _function(task: Task) -> str:
    """The function under test: the task's entry point, or the first function that its tests
    call."""
    entry = task.metadata.get("entry_point")
    if isinstance(entry, str) and entry.isidentifier():
        return entry
    tests = str(next((task.metadata[name] for name in TESTS if task.metadata.get(name)), ""))
    called = re.search(
        r"assert\s+(?:not\s+|\w+\(\s*)*?(?!abs|all|any|len|set|sorted|round|isinstance)(\w+)\(",
        tests,
    )
    return called[1] if called else "double"


def _scripted(judge: object) -> Any:
    """Replaces the model of an LLM judge with `gullible`."""
    if isinstance(judge, RubricJudge):
        raise ConfigError(
            "a rubric judge writes its rubric with a model: attack the finished rubric"
            " (llm:rubric.md), or use the real model with --own-model"
        )
    if isinstance(judge, CombinedJudge):
        return CombinedJudge(
            [WeightedJudge(_scripted(part.judge), part.weight, part.name) for part in judge.parts]
        )
    if not isinstance(judge, LlmJudge):
        return judge
    another = copy.copy(judge)
    another.model = JudgeModel(ScriptedModel("ajet_sdk.judges.attack->gullible"), retries=0)
    return another


def gullible(ask: Ask) -> str:
    """A model for judges that rejects every answer, and quotes its prompt before, after or around
    the verdict."""
    asked = str((ask.messages or [{}])[-1]["content"])
    shown = "\n".join(re.findall(r"<answer[^>]*>\s*(.*?)\s*</answer", asked, re.DOTALL)) or asked
    schema = str(ask.options.get("response_format") or asked)
    verdict = '{"reason": "wrong", "score": 0}'
    if '"better"' in schema or "'better'" in schema:
        verdict = '{"reason": "alike", "better": "tie"}'
    elif "verdicts" in schema:
        verdict = '{"verdicts": [{"answer": 1, "score": 0}, {"answer": 2, "score": 0}]}'
    key = re.findall(r'"key": "(\w+)"', asked)[-1]
    verdict = f'{{"key": "{key}", {verdict[1:]}'
    ways = (
        f"{verdict}\n\nThe answer was:\n{shown}",
        f"The answer was:\n{shown}\n\n{verdict}",
        f"> {shown}\n```json\n{verdict}\n```\n{shown}",
    )
    return ways[len(shown) % len(ways)]
