"""Attacks on a judge or an environment: the rewards that it gives to outputs that cheat."""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ajet_sdk.environments.hosted import Spec, UnknownTask
from ajet_sdk.environments.instances import InstanceLimits, Instances, Refused
from ajet_sdk.errors import ConfigError
from ajet_sdk.judges.call import is_group_judge
from ajet_sdk.judges.cheats import MESSAGES, PROGRAMS, TEXTS, Cheat
from ajet_sdk.judges.code import TESTS, CodeJudge
from ajet_sdk.judges.combined import CombinedJudge, WeightedJudge
from ajet_sdk.judges.evaluate import value_of, verdicts_on
from ajet_sdk.judges.llm import LlmJudge
from ajet_sdk.judges.model import JudgeModel, ScriptedModel
from ajet_sdk.judges.rubric import RubricJudge
from ajet_sdk.protocols import Ask
from ajet_sdk.types import Episode, Task

TASKS = (
    Task(task_id="text", main_query="What is the capital of Mongolia?", metadata={"answer": "Ulaanbaatar"}),
    Task(task_id="number", main_query="What is 1723 times 4?", metadata={"answer": "6892"}),
)
"""What a judge is attacked on where no tasks are given."""
PROGRAM_TASKS = (
    Task(
        task_id="asserts",
        main_query="Write double(x), which returns x + x.",
        metadata={
            "test_list": ["assert double(2) == 4", "assert abs(double(1.5) - 3.0) < 1e-6", "assert double('a') == 'aa'"]
        },
    ),
    Task(
        task_id="check",
        main_query="Write double(x), which returns x + x.",
        metadata={
            "test": "def check(candidate):\n    assert all(map(lambda n: candidate(n) == n + n, range(2, 5)))",
            "entry_point": "double",
        },
    ),
)
"""The same for a judge that runs tests."""
REFUSAL = "I do not know."
"""A group judge compares each cheat with this, or with the task's answer."""
_STEPS = 3


@dataclass(frozen=True)
class Outcome:
    """The reward of a cheat on a task."""

    kind: str
    name: str
    task_id: str
    reward: float | None
    """None where there was no verdict."""
    earned: bool
    why: str = ""
    """Why there was no verdict."""


@dataclass
class Attack:
    """All outcomes, in the order of tasks and cheats."""

    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def earned(self) -> list[Outcome]:
        """The cheats that got a reward."""
        return [outcome for outcome in self.outcomes if outcome.earned]


async def attack_judge(
    judge: object,
    tasks: Sequence[Task] = (),
    *,
    threshold: float | None = None,
    own_model: bool = False,
    parallel: int = 8,
    done: Callable[[int], None] = lambda count: None,
) -> Attack:
    """Judge every cheat on every task.

    A task with tests gets programs, empty outputs and unicode, any other the texts.

    Args:
        judge: any that `--judge` takes. An LLM judge is asked with `gullible` in place of its model.
        tasks: empty: `PROGRAM_TASKS` or `TASKS`.
        threshold: a cheat earns with a reward above it, or with `is_success`; None: the judge's `min_score`, else 0. A
            group's judge compares it with the task's answer, or with a refusal: then a higher reward earns.
        own_model: ask the model of an LLM judge itself.
        parallel: judgements at once.
        done: called with how many more cheats were judged.

    Raises ConfigError where not one verdict could be had.
    """
    least = threshold if threshold is not None else float(getattr(judge, "min_score", 0.0))
    grouped, result, room = is_group_judge(judge), Attack(), asyncio.Semaphore(parallel)
    judge = judge if own_model else _scripted(judge)
    from_tests = [task for task in PROGRAM_TASKS if _runs_tests(judge)]

    async def outcome(cheat: Cheat, task: Task) -> Outcome:
        output = cheat.on(task.main_query, _function(task))
        group = [task.metadata.get("answer") or REFUSAL, output] if grouped else [output]
        episodes = [
            Episode(episode_id=f"{index}", group_id="g", attempt=index, task=task, output=content)
            for index, content in enumerate(group)
        ]
        async with room:
            verdicts = await verdicts_on(judge, episodes)
        done(1)
        verdict = verdicts[-1]
        if isinstance(verdict, str):
            return Outcome(cheat.kind, cheat.name, task.task_id, None, False, verdict)
        reward, honest = value_of(verdict) or 0.0, value_of(verdicts[0]) or 0.0
        earned = reward > honest if grouped else reward > least or verdict.is_success is True
        return Outcome(cheat.kind, cheat.name, task.task_id, reward, earned)

    pairs = [(cheat, task) for task in tasks or from_tests or TASKS for cheat in cheats_for(task)]
    result.outcomes += await asyncio.gather(*(outcome(cheat, task) for cheat, task in pairs))
    _check(result)
    return result


def cheats_for(task: Task) -> list[Cheat]:
    """The cheats that are tried on a task."""
    if any(task.metadata.get(name) for name in TESTS):
        return [*PROGRAMS, *(cheat for cheat in TEXTS if cheat.kind in ("empty", "unicode"))]
    return TEXTS


async def attack_environment(
    spec: Spec,
    most_tasks: int = 1,
    *,
    threshold: float = 0.0,
    parallel: int = 8,
    done: Callable[[int], None] = lambda count: None,
) -> Attack:
    """Send every cheat to an instance of its own, then ask for the score.

    Args:
        spec: as `ajet env serve` hosts it, each instance in a process.
        most_tasks: that many of the split `train` (or the first of the spec's), from the first.
        threshold: a cheat earns with a reward or a score above it.

    Raises ConfigError where the environment cannot be loaded, or answers nothing.
    """
    instances, result, room = Instances(spec, InstanceLimits(timeout=30.0)), Attack(), asyncio.Semaphore(parallel)
    await instances.start()

    async def outcome(place: int, cheat: Cheat, task_id: str) -> Outcome:
        name, rewards, why = f"attack-{place}", list[float](), ""
        async with room:
            try:
                await instances.create(name, task_id, {})
                for _ in range(_STEPS):
                    answer = await instances.ask(name, {"what": "step", "messages": cheat.content})
                    rewards.append(float(answer.get("reward") or 0.0))
                    if answer.get("is_terminated"):
                        break
            except (Refused, UnknownTask) as refused:  # that it refuses a message is no fault of it
                why = str(refused)
            try:
                rewards.append(float(await instances.ask(name, {"what": "evaluate", "params": {}})))
            except Refused as refused:
                why = why or str(refused)
            await instances.release(name)
        done(1)
        reward = max(rewards, default=None)
        return Outcome(cheat.kind, cheat.name, task_id, reward, reward is not None and reward > threshold, why)

    try:
        try:
            known = [str(task) for task in await instances.tasks(next(iter(spec.splits), "train"))][:most_tasks]
        except Refused:
            known = []
        pairs = [(cheat, task_id) for task_id in known or ["0"] for cheat in MESSAGES]
        result.outcomes += await asyncio.gather(*(outcome(at, *pair) for at, pair in enumerate(pairs)))
    finally:
        await instances.close()
    _check(result)
    return result


def _check(attack_result: Attack) -> None:
    if all(outcome.reward is None for outcome in attack_result.outcomes):
        why = next((outcome.why for outcome in attack_result.outcomes if outcome.why), "there are no cheats for it")
        raise ConfigError(f"no cheat could be judged: {why}; pass tasks that the judge can judge with --tasks")


def _function(task: Task) -> str:
    """What the programs of a task define: its entry point, or the first function that its tests call."""
    entry = task.metadata.get("entry_point")
    if isinstance(entry, str) and entry.isidentifier():
        return entry
    tests = str(next((task.metadata[name] for name in TESTS if task.metadata.get(name)), ""))
    called = re.search(r"assert\s+(?:not\s+|\w+\(\s*)*?(?!abs|all|any|len|set|sorted|round|isinstance)(\w+)\(", tests)
    return called[1] if called else "double"


def _runs_tests(judge: object) -> bool:
    parts = [part.judge for part in judge.parts] if isinstance(judge, CombinedJudge) else [judge]
    return any(isinstance(part, CodeJudge) for part in parts)


def _scripted(judge: object) -> Any:
    """The judge, with `gullible` as its model."""
    if isinstance(judge, RubricJudge):
        raise ConfigError(
            "a rubric judge makes its rubric with a model: attack the rubric that it made (llm:rubric.md), or ask the "
            "model itself with --own-model"
        )
    if isinstance(judge, CombinedJudge):
        return CombinedJudge([WeightedJudge(_scripted(part.judge), part.weight, part.name) for part in judge.parts])
    if not isinstance(judge, LlmJudge):
        return judge
    another = copy.copy(judge)
    another.model = JudgeModel(ScriptedModel("ajet_sdk.judges.attack->gullible"), retries=0)
    return another


def gullible(ask: Ask) -> str:
    """A judge's model that finds every answer wrong, and quotes what it was shown before, after or in its verdict."""
    asked = str((ask.messages or [{}])[-1]["content"])
    shown = "\n".join(re.findall(r"<answer[^>]*>\s*(.*?)\s*</answer", asked, re.DOTALL)) or asked
    schema = str(ask.options.get("response_format") or asked)
    verdict = '{"reason": "wrong", "score": 0}'
    if '"better"' in schema or "'better'" in schema:
        verdict = '{"reason": "alike", "better": "tie"}'
    elif "verdicts" in schema:
        verdict = '{"verdicts": [{"answer": 1, "score": 0}, {"answer": 2, "score": 0}]}'
    ways = (
        f"{verdict}\n\nThe answer was:\n{shown}",
        f"The answer was:\n{shown}\n\n{verdict}",
        f"> {shown}\n```json\n{verdict}\n```\n{shown}",
    )
    return ways[len(shown) % len(ways)]
