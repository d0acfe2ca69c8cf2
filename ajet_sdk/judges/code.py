"""`CodeJudge`: a task's tests, run on the program in an output, inside the sandbox.

Tests are Python text, a list of statements, HumanEval's `check(candidate)` with `entry_point`, or a list of
`{"input": …, "output": …}` for a program that reads and prints.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ajet_sdk.errors import NoReward
from ajet_sdk.judges.rewards import Verdict
from ajet_sdk.judges.text import text_of
from ajet_sdk.sandbox.fence import fenced
from ajet_sdk.sandbox.run import Limits, Ran, run_code
from ajet_sdk.types import Reward, Task

__all__ = ["TESTS", "CodeJudge", "Tested", "code_in", "run_tests"]

TESTS = ("tests", "test_list", "unit_tests", "test")
"""Where a task's metadata may have its tests."""
_BLOCK = re.compile(r"```[ \t]*(?P<language>\w*)[^\n]*\n(?P<code>.*?)(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Tested:
    """How many tests a program passed, and what came of the first that it did not."""

    passed: int
    total: int
    failed: Ran | None = None


class CodeJudge:
    """The reward is 1 where the program passes every test, else 0; with `partial` the share that it passes.

    The program is the longest fenced block of the output, or all of it. It runs without a network, files or rights, in
    `seconds` of time and `memory` bytes (`ajet doctor` says whether this machine has the fence). Raises NoReward for a
    task without tests: that is the data's fault.
    """

    def __init__(
        self,
        *,
        seconds: float = 10.0,
        memory: int = 512 << 20,
        partial: bool = False,
        unfenced: bool = False,
        name: str = "tests",
    ) -> None:
        self.limits = Limits(seconds=seconds, memory=memory)
        self.partial, self.unfenced, self.name = partial, unfenced, name
        self._checked = False

    async def __call__(self, output: Any, task: Task) -> Verdict:
        """The verdict on a program. Raises NoReward; NoFence where nothing here keeps a program from harm."""
        tests = next((task.metadata[name] for name in TESTS if task.metadata.get(name)), None)
        if tests is None:
            raise NoReward(
                f"task {task.task_id} has no tests in its metadata ({', '.join(TESTS)}); it has "
                f"{', '.join(task.metadata) or 'nothing'}"
            )
        if not self._checked:
            fenced("The code judge", unfenced=self.unfenced)
            self._checked = True
        text = text_of(output)
        tested = await run_tests(
            code_in(text) or text, tests, task.metadata.get("entry_point"), self._run, apart=self.partial
        )
        if not tested.total:
            raise NoReward(f"the tests of task {task.task_id} are not in a known format: {str(tests)[:200]}")
        whole = tested.passed == tested.total
        value = tested.passed / tested.total if self.partial else float(whole)
        reason = f"passes {tested.passed} of {tested.total} tests"
        if tested.failed is not None:
            reason += f"; {_why(tested.failed)}"
        return Verdict((Reward(name=self.name, value=value, reason=reason),), whole)

    async def _run(self, code: str, stdin: str = "") -> Ran:
        return await run_code(code, stdin=stdin, limits=self.limits, unfenced=self.unfenced)


def _why(ran: Ran) -> str:
    last = next((line for line in reversed(ran.stderr.splitlines()) if line.strip()), "")
    return (ran.failure if ran.stopped else last or "another output")[:300]


async def run_tests(
    code: str, tests: Any, entry_point: Any, run: Callable[..., Awaitable[Ran]], *, apart: bool = False
) -> Tested:
    """Run a program's tests, until one fails; with `apart` all of them, each statement of a list by itself.

    `total` is 0 where they cannot be read.
    """
    cases = list(_cases(tests, apart))
    passed, first = 0, None
    for case in cases:
        if isinstance(case, str):
            ran = await run(f"{code}\n\n{_with_call(case, entry_point)}\n")
            right = ran.ok
        else:
            ran = await run(code, str(case.get("input", "")))
            right = ran.ok and _lines(ran.stdout) == _lines(str(case["output"]))
        passed += right
        if not right:
            first = first or ran
            if not apart:
                break
    return Tested(passed, len(cases), first)


def _cases(tests: Any, apart: bool) -> Iterator[str | Mapping[str, Any]]:
    """Each test by itself where it has an input of its own; statements all together, unless `apart`."""
    if isinstance(tests, str):
        yield tests
    elif isinstance(tests, list | tuple):
        statements = [test for test in tests if isinstance(test, str)]
        if statements:
            yield from statements if apart else ["\n".join(statements)]
        for test in tests:
            if isinstance(test, Mapping) and "output" in test:
                yield test


def _with_call(test: str, entry_point: Any) -> str:
    if isinstance(entry_point, str) and re.search(r"^def check\(", test, re.MULTILINE):
        return f"{test}\n\ncheck({entry_point})"
    return test


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def code_in(reply: str) -> str | None:
    """The program in a reply: its longest fenced block, else the reply itself where it is Python."""
    blocks = [
        match["code"]
        for match in _BLOCK.finditer(reply)
        if match["language"].lower() in ("", "python", "py", "python3")
    ]
    if blocks:
        return max(blocks, key=len)
    try:
        compile(reply, "reply", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
    return reply if reply.strip() else None
