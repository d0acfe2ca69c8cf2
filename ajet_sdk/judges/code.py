"""`CodeJudge`: runs a task's tests on the program in an output, inside the sandbox.

Tests are Python source, a list of statements, HumanEval's `check(candidate)` with `entry_point`,
or, for a program that reads stdin and prints, a list of `{"input": …, "output": …}` or
`{"inputs": […], "outputs": […]}`, also as JSON in a text. Tests and program run in two processes,
so that the program can neither read the tests nor report their result.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import json
import logging
import marshal
import re
import secrets
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

from ajet_sdk.errors import NoReward
from ajet_sdk.judges.rewards import Verdict
from ajet_sdk.judges.text import text_of
from ajet_sdk.sandbox.fence import fenced
from ajet_sdk.sandbox.run import ProgramLimits, Ran, run_code
from ajet_sdk.sandbox.tester import PROGRAM_MODULE
from ajet_sdk.types import Reward, Task

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config

log = logging.getLogger("ajet")

TESTS = ("tests", "test_list", "unit_tests", "test")
"""Keys of a task's metadata that may hold its tests."""
REFERENCES = ("canonical_solution", "reference_solution", "solution")
"""Keys of a task's metadata that may hold a program that passes its tests."""
_TESTER_SECONDS = 5.0
"""Time for the tests beyond the program's limit, so that the latter is reached first."""
_PREPARING = (
    *(ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef),
    *(ast.ClassDef, ast.Assign, ast.AnnAssign),
)
"""Statements that prepare the tests: imports, definitions and assignments."""
_NO_MODULE = re.compile(r"^ModuleNotFoundError: No module named '(\w+)", re.MULTILINE)
_MOST_WARNINGS = 10
_FENCE = "```"
_PYTHON = ("", "python", "py", "python3")
"""Languages of a fenced block with a program."""


@dataclass(frozen=True)
class Tested:
    """Counts of passed tests, and the run of the first that failed."""

    passed: int
    total: int
    failed: Ran | None = None
    fault: str = ""
    """What is wrong with the tests or the sandbox, so that the count says nothing about the
    program."""


class CodeJudge:
    """Rewards a program with 1 if it passes every test, else 0; with `partial`, with the share of
    passed tests.

    The program is the longest fenced block of the output, or all of it. It runs without network,
    files or privileges, within `seconds` and `memory` bytes (`ajet doctor` reports whether this
    machine supports it). Raises NoReward for a task without tests, with tests that cannot all run,
    or whose tests or reference solution import a package that the sandbox lacks. A package that
    only the program imports is the program's own mistake: otherwise a policy could escape every
    failure by an import.
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
        self._missing: set[str] = set()

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
        references = [
            task.metadata[name] for name in REFERENCES if isinstance(task.metadata.get(name), str)
        ]
        tested = await run_tests(
            longest_block(text) or text,
            tests,
            task.metadata.get("entry_point"),
            references=references,
            limits=self.limits,
            unfenced=self.unfenced,
            apart=self.partial,
        )
        if tested.fault:
            raise NoReward(f"task {task.task_id}: {tested.fault}")
        if not tested.total:
            raise NoReward(
                f"the tests of task {task.task_id} are not in a known format, or do not call the"
                f" program (`check` needs entry_point): {str(tests)[:200]}"
            )
        whole = tested.passed == tested.total
        value = tested.passed / tested.total if self.partial else float(whole)
        reason = f"passes {tested.passed} of {tested.total} tests"
        if tested.failed is not None:
            reason += f"; {_why(tested.failed)}"
            self._report_missing(tested.failed)
        return Verdict((Reward(name=self.name, value=value, reason=reason),), whole)

    def _report_missing(self, failed: Ran) -> None:
        """Warns once of a package that programs import and the sandbox lacks: the user may want to
        install it."""
        for name in _NO_MODULE.findall(failed.stderr):
            if name not in self._missing and len(self._missing) < _MOST_WARNINGS:
                self._missing.add(name)
                log.warning(
                    "a program imports %s, which the sandbox of the code judge lacks, and gets 0;"
                    " if tasks may use it, install it beside ajet",
                    name,
                )


def _why(ran: Ran) -> str:
    last = next((line for line in reversed(ran.stderr.splitlines()) if line.strip()), "")
    return (ran.failure if ran.stopped else last or "another output")[:300]


async def run_tests(
    code: str,
    tests: object,
    entry_point: object,
    *,
    limits: ProgramLimits,
    references: Sequence[str] = (),
    unfenced: bool = False,
    apart: bool = False,
) -> Tested:
    """Run tests until one fails; with `apart` all of them, and each statement of a list separately.

    `total` is 0 if they cannot be read, or do not use the program. `references` are programs that
    pass the tests: what they import has to be in the sandbox. Raises as `run_code` does.
    """
    cases = list(_cases(tests, apart))
    if isinstance(entry_point, str) and _tree(entry_point) is not None:
        entry = entry_point
    else:
        entry = ""
    silent = [case for case in cases if _expects_nothing(case)]
    if cases and len(silent) == len(cases):
        return Tested(0, len(cases), fault=_SILENT)
    passed = 0
    with_output = 0
    total = 0
    first: Ran | None = None
    for case in cases:
        outcome = await _run_case(code, case, entry, limits, unfenced=unfenced)
        if isinstance(outcome, Fault):
            return Tested(passed, total + 1, fault=outcome.why)
        if outcome == "unused":
            continue
        total += 1
        if outcome is None:
            passed += 1
            with_output += not _expects_nothing(case)
            continue
        first = first or outcome
        if not apart:
            total = max(total, len(cases))
            break
    if first is not None:
        texts = [case for case in cases if isinstance(case, str)]
        missing = await _missing_packages([*texts, *references], limits, unfenced=unfenced)
        if missing:
            return Tested(passed, total, first, _LACKS.format(", ".join(missing)))
    # A program that does nothing passes all cases that expect no output.
    return Tested(passed if with_output else 0, total, first)


def _expects_nothing(case: str | Mapping[str, object]) -> bool:
    return not isinstance(case, str) and not _lines(_joined(case["output"]))


_SILENT = (
    "each of its cases expects no output, so that an empty program passes: give it a case with"
    " output, or leave the task out"
)


_LACKS = (
    "its tests or its reference solution import {}, which the sandbox lacks: install it beside"
    " ajet, or leave the task out"
)


@dataclass(frozen=True)
class Fault:
    """Why tests say nothing about a program."""

    why: str


async def _run_case(
    code: str,
    case: str | Mapping[str, object],
    entry: str,
    limits: ProgramLimits,
    *,
    unfenced: bool,
) -> Ran | Fault | Literal["unused"] | None:
    """Runs one case: the failed run, or None if it passes."""
    if isinstance(case, str):
        if entry and re.search(r"^def check\(", case, re.MULTILINE):
            case = f"{case}\n\ncheck({entry})"
        return await _run_apart(code, case, entry, limits, unfenced=unfenced)
    expected = _joined(case["output"])
    # A right output is as long as the expected one, and is compared whole.
    length = len(expected.encode("utf-8", "replace")) + limits.shown
    enough = replace(limits, shown=length, output=max(limits.output, 2 * length))
    ran = await run_code(
        code, stdin=_joined(case.get("input", "")), limits=enough, unfenced=unfenced
    )
    if ran.ok and _lines(ran.stdout) == _lines(expected):
        return None
    return ran


async def _missing_packages(
    texts: Sequence[str], limits: ProgramLimits, *, unfenced: bool
) -> list[str]:
    """Packages that texts import and the sandbox lacks."""
    imported = {name for text in texts for name in _imports(text)}
    names = sorted(imported - sys.stdlib_module_names - {PROGRAM_MODULE})
    if not names:
        return []
    code = (
        f"import importlib.util\nprint(*[n for n in {names!r} if importlib.util.find_spec(n) is"
        " None])"
    )
    ran = await run_code(code, limits=limits, unfenced=unfenced)
    return ran.stdout.split() if ran.ok else []


def _imports(text: str) -> set[str]:
    """The packages that a program imports; an import that it may do without, in a `try`, does not
    count."""
    tree = _tree(text)
    names: set[str] = set()
    parts: list[ast.AST] = [] if tree is None else [tree]
    while parts:
        part = parts.pop()
        if isinstance(part, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in part.names)
        elif isinstance(part, ast.ImportFrom) and part.module and not part.level:
            names.add(part.module.partition(".")[0])
        elif not isinstance(part, ast.Try):
            parts += ast.iter_child_nodes(part)
    return names


def _tree(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


async def _run_apart(
    code: str, tests: str, entry: str, limits: ProgramLimits, *, unfenced: bool
) -> Ran | Fault | Literal["unused"] | None:
    """Runs program and tests in two fenced processes (see `sandbox/tester.py`); None if the tests
    pass.

    "unused": the tests cannot be read, or pass without using the program. The verdict comes from
    the tests' process alone, after the program has ended.
    """
    nonce = secrets.token_hex(16)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        program = asyncio.create_task(
            run_code(_side(f"serve({code!r})"), channel=theirs, limits=limits, unfenced=unfenced)
        )
        try:
            tested = await run_code(
                _side(f"test({tests!r}, {nonce!r}, {entry!r})"),
                channel=ours,
                unfenced=unfenced,
                limits=replace(limits, seconds=limits.seconds + _TESTER_SECONDS),
            )
            lines = [
                line.removeprefix(nonce)
                for line in tested.stderr.splitlines()
                if line.startswith(nonce)
            ]
            verdict: dict[str, Any] = {
                "passed": False,
                "gone": False,
                "why": tested.failure,
                "asked": 1,
                "fault": "",
                "cannot": "",
            }
            verdict |= json.loads(lines[0]) if lines else {}
            if verdict["cannot"]:
                return Fault(verdict["cannot"])
            if verdict["gone"]:
                ended = await program
                if ended.stopped:
                    why = ended.stderr
                else:
                    why = f"{ended.stderr}\n{verdict['why']}"
                return replace(ended, code=ended.code or 1, stderr=why)
        finally:
            program.cancel()
            await asyncio.gather(program, return_exceptions=True)
    if verdict["passed"] and verdict["fault"]:
        return Fault(verdict["fault"])
    if not verdict["asked"] or (
        verdict["passed"] and verdict["asked"] == 1
    ):  # the first request loads it
        return "unused"
    if verdict["passed"]:
        return None
    return replace(tested, code=tested.code or 1, stderr=verdict["why"])


_MODULES = ("plain", "collect", "remote", "changes", "peer", "tester")
"""Modules of both processes, each after those that it imports."""


@functools.cache
def _modules() -> bytes:
    """The compiled code of both processes, so that not each of them compiles it again."""
    folder = files("ajet_sdk.sandbox")
    sources = {name: (folder / f"{name}.py").read_text(encoding="utf-8") for name in _MODULES}
    return marshal.dumps(
        {
            f"ajet_sdk.sandbox.{name}": compile(text, "<string>", "exec")
            for name, text in sources.items()
        }
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
    decoded = _decoded(tests) if isinstance(tests, str) else None
    if decoded is not None:
        yield from _cases(decoded, apart)
    elif isinstance(tests, str):
        yield tests
    elif isinstance(tests, Mapping) and not tests.get("fn_name"):
        inputs = tests.get("inputs")
        outputs = tests.get("outputs")
        if isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs):
            yield from (
                {"input": given, "output": expected}
                for given, expected in zip(inputs, outputs, strict=True)
            )
    elif isinstance(tests, list | tuple):
        statements = [test for test in tests if isinstance(test, str)]
        if statements and not apart:
            yield "\n".join(statements)
        elif statements:
            shared = [text for text in statements if _prepares(text)]
            yield from ("\n".join((*shared, text)) for text in statements if text not in shared)
        for test in tests:
            # With `fn_name` they are arguments and result of a function.
            if isinstance(test, Mapping) and "output" in test and not test.get("fn_name"):
                yield test


def _decoded(tests: str) -> list[Any] | dict[str, Any] | None:
    """Tests that a dataset has as JSON in a text; None for Python."""
    try:
        decoded = json.loads(tests)
    except (ValueError, RecursionError):
        return None
    return decoded if isinstance(decoded, list | dict) and decoded else None


def _joined(lines: object) -> str:
    """Input or output, which may be a list of lines."""
    if isinstance(lines, list | tuple):
        return "\n".join(map(str, lines))
    return str(lines)


def _prepares(statement: str) -> bool:
    """Whether a statement only prepares the others."""
    tree = _tree(statement)
    return tree is not None and all(isinstance(part, _PREPARING) for part in tree.body)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def code_in(reply: str) -> str | None:
    """Extracts the program from a reply: its longest fenced block, else the reply itself if it is
    valid Python."""
    block = longest_block(reply)
    if block is not None:
        return block
    return reply if reply.strip() and _tree(reply) is not None else None


def longest_block(reply: str) -> str | None:
    """The longest fenced block of Python in a reply, found in time in proportion to its length."""
    blocks = [code for language, code in _fenced(reply) if language in _PYTHON]
    return max(blocks, key=len) if blocks else None


def _fenced(reply: str) -> Iterator[tuple[str, str]]:
    """Language and content of fenced blocks; the last may be unclosed."""
    start = reply.find(_FENCE)
    while start >= 0:
        line_end = reply.find("\n", start)
        if line_end < 0:
            return
        words = reply[start + len(_FENCE) : line_end].replace("`", " ").split()
        end = reply.find(_FENCE, line_end)
        yield (
            (words[0].lower() if words else ""),
            reply[line_end + 1 : end if end >= 0 else len(reply)],
        )
        start = -1 if end < 0 else reply.find(_FENCE, end + len(_FENCE))


def open_code(config: Config) -> CodeJudge:
    code = config.task_judge.code
    return CodeJudge(
        seconds=code.seconds,
        memory=code.memory_mib << 20,
        partial=code.partial,
        unfenced=code.unfenced,
    )
