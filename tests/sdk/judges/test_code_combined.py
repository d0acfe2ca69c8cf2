"""Judges that run a task's tests, and several judges side by side."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import ajet
from ajet_sdk.config.config import load_config
from ajet_sdk.errors import ConfigError, NoReward
from ajet_sdk.judges.code import CodeJudge
from ajet_sdk.judges.combined import CombinedJudge, WeightedJudge
from ajet_sdk.judges.load import load_judge, named_judge
from ajet_sdk.judges.text import exact
from ajet_sdk.sandbox.fence import NoFence, fence
from ajet_sdk.types import Episode, Reward, Task


def has_fence() -> bool:
    try:
        fence()
    except NoFence:
        return False
    return True


DOUBLE = "Here it is:\n```python\ndef double(x):\n    return x * 2\n```\n"
WRONG = "```python\ndef double(x):\n    return x + 2\n```"
TASK = Task(
    main_query="double a number",
    metadata={"tests": ["assert double(2) == 4", "assert double(3) == 6"]},
)


def judged(judge: Any, output: Any, task: Task = TASK) -> Any:
    return asyncio.run(judge(output, task))


# Limits hold without the fence too; what it keeps out has tests of its own.
@pytest.fixture
def unfenced() -> bool:
    return not has_fence()


@pytest.mark.slow
def test_a_program_is_judged_by_the_tasks_tests(unfenced: bool) -> None:
    judge = CodeJudge(unfenced=unfenced)
    right, wrong = judged(judge, DOUBLE), judged(judge, WRONG)
    assert (right.rewards[0].value, right.is_success) == (1.0, True)
    assert (wrong.rewards[0].value, wrong.is_success) == (0.0, False)
    assert "AssertionError" in wrong.rewards[0].reason
    part = judged(CodeJudge(unfenced=unfenced, partial=True), WRONG)
    assert (part.rewards[0].value, part.is_success) == (0.5, False)


def test_a_program_without_end_is_wrong_and_a_task_without_tests_is_no_zero(unfenced: bool) -> None:
    found = judged(CodeJudge(unfenced=unfenced, seconds=0.5), "```python\nwhile True: pass\n```")
    assert found.rewards[0].value == 0.0 and "time" in found.rewards[0].reason
    with pytest.raises(NoReward, match="has no tests"):
        judged(CodeJudge(unfenced=unfenced), DOUBLE, Task(main_query="q"))
    with pytest.raises(NoReward, match="not in a known format"):
        judged(CodeJudge(unfenced=unfenced), DOUBLE, Task(main_query="q", metadata={"tests": [3]}))


def length(output: str) -> Reward:
    return Reward(name="length", value=len(output), reason="characters")


def test_rewards_of_several_judges_stand_side_by_side_with_weights() -> None:
    judge = ajet.CombinedJudge([(exact, 1.0), WeightedJudge(length, -0.1, "brief")])
    task = Task(main_query="q", metadata={"answer": "yes"})
    found = asyncio.run(judge("yes", Episode(task=task)))
    assert [(one.name, one.value, one.weight) for one in found.rewards] == [
        ("exact", 1.0, 1.0),
        ("brief", 3.0, -0.1),
    ]
    assert found.is_success is True
    assert Episode(task=task, rewards=found.rewards).reward == pytest.approx(0.7)


def test_one_that_fails_is_the_failure_of_all() -> None:
    def broken(output: str) -> None:
        return None

    with pytest.raises(NoReward, match="broken"):
        asyncio.run(CombinedJudge([(length, 1.0), (broken, 0.1)])("a", Episode(task=TASK)))
    with pytest.raises(ConfigError, match="at least one"):
        CombinedJudge([(broken, 0.0)])


def test_who_only_watches_fails_nobody_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    def even(output: str) -> float | None:
        return 1.0 if len(output) % 2 == 0 else None

    judge = CombinedJudge([(length, 1.0), (even, 0.0)])
    found = [asyncio.run(judge(text, Episode(task=TASK))) for text in ("a", "bb", "ccc")]
    assert [len(one.rewards) for one in found] == [1, 2, 1]
    assert [one.metrics["judge_failed_even"] for one in found] == [
        1,
        0,
        1,
    ], "the mean is the share that failed"
    [line] = [record.message for record in caplog.records if "failed" in record.message]
    assert "the judge even" in line and "judge_failed_even" in line


def test_with_a_judge_of_the_group_among_them_it_is_one() -> None:
    @ajet.judge(group=True)
    def best(episodes: list[Episode]) -> list[float]:
        longest = max(len(episode.output) for episode in episodes)
        return [float(len(episode.output) == longest) for episode in episodes]

    judge = CombinedJudge([(best, 1.0), (length, 0.01)])
    assert judge.group
    group = [Episode(task=TASK, output=text) for text in ("a", "bbb")]
    found = asyncio.run(judge.compute_rewards(group))
    assert [[one.value * one.weight for one in verdict.rewards] for verdict in found] == [
        [0, 0.01],
        [1, 0.03],
    ]


def test_by_yaml_and_by_name(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def length(output): return len(output)\n")
    parts = [
        {"judge": "exact"},
        {"judge": "own.py:length", "weight": 0.5, "name": "l"},
        {"judge": "code"},
    ]
    (tmp_path / "all.yaml").write_text(json.dumps(parts))
    (tmp_path / "job.yaml").write_text(
        json.dumps({"ajet": {"task_judge": {"judge_type": "combined", "combined": parts[:2]}}})
    )
    judge = named_judge(f"combined:{tmp_path / 'all.yaml'}")
    assert [part.weight for part in judge.parts] == [1.0, 0.5, 1.0] and isinstance(
        judge.parts[2].judge, CodeJudge
    )
    assert len(load_judge(load_config(tmp_path / "job.yaml")).parts) == 2
    settings = load_config(
        values={"task_judge": {"judge_type": "code", "code": {"seconds": 3, "memory_mib": 64}}}
    )
    assert (
        load_judge(settings).limits.seconds == 3 and load_judge(settings).limits.memory == 64 << 20
    )
    with pytest.raises(ConfigError, match="is required for judge_type: combined"):
        load_config(values={"task_judge": {"judge_type": "combined"}})


def test_a_combined_judge_that_names_itself_is_an_error(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / f"{name}.yaml").write_text(json.dumps([{"judge": f"combined:{other}.yaml"}]))
    with pytest.raises(ConfigError, match=r"combined:.*\.yaml contains itself"):
        named_judge(f"combined:{tmp_path / 'a.yaml'}")
    with pytest.raises(ConfigError, match=r"code.*rubric:FILE, combined:FILE, .* \(got 'nobody'\)"):
        named_judge("nobody")
