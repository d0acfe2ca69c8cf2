"""`CodeJudge`: runs a task's tests on the program in an output, inside the sandbox.

Tests are Python source, a list of statements, HumanEval's `check(candidate)` with `entry_point`, or a list of
`{"input": …, "output": …}` for a program that reads stdin and prints. Tests and program run in two processes, so that
the program can neither read the tests nor report their result.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import json
import marshal
import re
import secrets
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

from ajet_sdk.errors import NoReward
from ajet_sdk.judges.rewards import Verdict
from ajet_sdk.judges.text import text_of
from ajet_sdk.sandbox.fence import fenced
from ajet_sdk.sandbox.run import ProgramLimits, Ran, run_code
from ajet_sdk.types import Reward, Task

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config

TESTS = ("tests", "test_list", "unit_tests", "test")
"""Keys of a task's metadata that may hold its tests."""
_TESTER_SECONDS = 5.0
"""Time for the tests beyond the program's limit, so that the latter is reached first."""
_PREPARING = (
    *(ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef),
    *(ast.ClassDef, ast.Assign, ast.AnnAssign),
)
"""Statements that prepare the tests: imports, definitions and assignments."""
_BLOCK = re.compile(r"```[ \t]*(?P<language>\w*)[^\n]*\n(?P<code>.*?)(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Tested:
    """Counts of passed tests, and the run of the first that failed."""

    passed: int
    total: int
    failed: Ran | None = None


class CodeJudge:
    """Rewards a program with 1 if it passes every test, else 0; with `partial`, with the share of passed tests.

    The program is the longest fenced block of the output, or all of it. It runs without network, files or privileges,
    within `seconds` and `memory` bytes (`ajet doctor` reports whether this machine supports it). Raises NoReward for a
    task without tests: an error of the dataset.
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
        self.limits: ProgramLimits = ProgramLimits(seconds=seconds, memory=memory)
        self.partial: bool = partial
        self.unfenced: bool = unfenced
        self.name: str = name
        self._checked = False

    async def __call__(self, output: object, task: Task) -> Verdict:
        """Judges a program. Raises NoReward; NoFence if this machine cannot isolate it."""
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
            code_in(text) or text, tests, task.metadata.get("entry_point"),
            limits=self.limits, unfenced=self.unfenced, apart=self.partial,
        )  # fmt: skip
        if not tested.total:
            raise NoReward(
                f"the tests of task {task.task_id} are not in a known format, or do not call the program "
                f"(`check` needs entry_point): {str(tests)[:200]}"
            )
        whole = tested.passed == tested.total
        value = tested.passed / tested.total if self.partial else float(whole)
        reason = f"passes {tested.passed} of {tested.total} tests"
        if tested.failed is not None:
            reason += f"; {_why(tested.failed)}"
        return Verdict((Reward(name=self.name, value=value, reason=reason),), whole)


def _why(ran: Ran) -> str:
    last = next((line for line in reversed(ran.stderr.splitlines()) if line.strip()), "")
    return (ran.failure if ran.stopped else last or "another output")[:300]


async def run_tests(
    code: str, tests: object, entry_point: object, *, limits: ProgramLimits, unfenced: bool = False, apart: bool = False
) -> Tested:
    """Run tests until one fails; with `apart` all of them, and each statement of a list separately.

    `total` is 0 if they cannot be read, or do not use the program. Raises as `run_code` does.
    """
    cases = list(_cases(tests, apart))
    passed, total, first = 0, 0, None
    for case in cases:
        if isinstance(case, str):
            if isinstance(entry_point, str) and re.search(r"^def check\(", case, re.MULTILINE):
                case = f"{case}\n\ncheck({entry_point})"
            failed = await _run_apart(code, case, limits, unfenced=unfenced)
            if failed == "unused":
                continue
        else:
            ran = await run_code(code, stdin=str(case.get("input", "")), limits=limits, unfenced=unfenced)
            failed = None if ran.ok and _lines(ran.stdout) == _lines(str(case["output"])) else ran
        total += 1
        passed += failed is None
        if failed is not None:
            first = first or failed
            if not apart:
                return Tested(passed, max(total, len(cases)), first)
    return Tested(passed, total, first)


async def _run_apart(code: str, tests: str, limits: ProgramLimits, *, unfenced: bool) -> Ran | Literal["unused"] | None:
    """Runs program and tests in two fenced processes (see `sandbox/tester.py`); None if the tests pass.

    "unused": the tests cannot be read, or pass without using the program. The verdict comes from the tests' process
    alone, after the program has ended.
    """
    nonce = secrets.token_hex(16)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        program = asyncio.create_task(
            run_code(_side(f"serve({code!r})"), channel=theirs, limits=limits, unfenced=unfenced)
        )
        try:
            tested = await run_code(
                _side(f"test({tests!r}, {nonce!r})"), channel=ours, unfenced=unfenced,
                limits=replace(limits, seconds=limits.seconds + _TESTER_SECONDS),
            )  # fmt: skip
            lines = [line.removeprefix(nonce) for line in tested.stderr.splitlines() if line.startswith(nonce)]
            verdict: dict[str, Any] = {"passed": False, "gone": False, "why": tested.failure, "asked": 1}
            verdict |= json.loads(lines[0]) if lines else {}
            if verdict["gone"]:
                ended = await program
                why = ended.stderr if ended.stopped else f"{ended.stderr}\n{verdict['why']}"
                return replace(ended, code=ended.code or 1, stderr=why)
        finally:
            program.cancel()
            await asyncio.gather(program, return_exceptions=True)
    if not verdict["asked"] or (verdict["passed"] and verdict["asked"] == 1):  # the first request loads it
        return "unused"
    if verdict["passed"]:
        return None
    return replace(tested, code=tested.code or 1, stderr=verdict["why"])


@functools.cache
def _modules() -> bytes:
    """The compiled code of both processes, so that not each of them compiles it again."""
    folder = files("ajet_sdk.sandbox")
    sources = {name: (folder / f"{name}.py").read_text(encoding="utf-8") for name in ("peer", "tester")}
    return marshal.dumps(
        {f"ajet_sdk.sandbox.{name}": compile(text, "<string>", "exec") for name, text in sources.items()}
    )


def _side(call: str) -> str:
    return f"""import marshal, sys, types
for name, code in marshal.loads({_modules()!r}).items():
    module = sys.modules[name] = types.ModuleType(name)
    exec(code, vars(module))
module.{call}
"""


def _cases(tests: object, apart: bool) -> Iterator[str | Mapping[str, object]]:
    """The test cases: one for each input with output; statements together, unless `apart`."""
    if isinstance(tests, str):
        yield tests
    elif isinstance(tests, list | tuple):
        statements = [test for test in tests if isinstance(test, str)]
        if statements and not apart:
            yield "\n".join(statements)
        elif statements:
            shared = [text for text in statements if _prepares(text)]
            yield from ("\n".join((*shared, text)) for text in statements if text not in shared)
        for test in tests:
            if isinstance(test, Mapping) and "output" in test:
                yield test


def _prepares(statement: str) -> bool:
    """Whether a statement only prepares the others."""
    try:
        parts = ast.parse(statement).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return all(isinstance(part, _PREPARING) for part in parts)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def code_in(reply: str) -> str | None:
    """Extracts the program from a reply: its longest fenced block, else the reply itself if it is valid Python."""
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


def open_code(config: Config) -> CodeJudge:
    code = config.task_judge.code
    return CodeJudge(seconds=code.seconds, memory=code.memory_mib << 20, partial=code.partial, unfenced=code.unfenced)
