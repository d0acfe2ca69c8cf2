"""Verifies by running code: the row's tests, its program, or a program that a model writes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from ajet_sdk.engines.client import ModelClient
from ajet_sdk.judges.code import TESTS, code_in, run_tests
from ajet_sdk.judges.math import number
from ajet_sdk.sandbox.run import ProgramLimits, Ran, run_code
from ajet_sdk.tasks.questions import answer_of, plain_question
from ajet_tools.dataset.prompts import load
from ajet_tools.dataset.verify.agreement import final_of, same
from ajet_tools.dataset.verify.verdict import RowVerdict, independent

SOLUTIONS = ("solution", "canonical_solution")
PROGRAMS = ("program", "code")
_LONGEST = 500


@dataclass
class ProgramVerifier:
    """Runs the first of these that exists, in metadata or columns:

    `tests` (also test_list, unit_tests, test): the answer, `solution` or `canonical_solution` is
    code and must pass them. Tests are Python text, a list of statements, HumanEval's
    `check(candidate)` with `entry_point`, or a list of `{"input": ..., "output": ...}` for a
    program that reads stdin and prints. `program` (also code): the last line of its output must be
    the answer. Else the endpoint writes a program.
    """

    limits: ProgramLimits = field(default_factory=ProgramLimits)
    seed: int = 0
    name: str = "code"
    calls: int = 1
    needs_answer: bool = True
    unfenced: bool = False
    """Run without a sandbox if there is none."""
    running: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(max(1, os.cpu_count() or 1))
    )

    async def check(self, row: Mapping[str, object], endpoint: ModelClient | None) -> RowVerdict:
        metadata = row.get("metadata")
        have = {**row, **(metadata if isinstance(metadata, Mapping) else {})}
        answer = answer_of(row)
        tests = next((have[name] for name in TESTS if have.get(name)), None)
        if tests is not None:
            solution = next(
                (have[name] for name in SOLUTIONS if isinstance(have.get(name), str)), answer
            )
            if not isinstance(solution, str):
                return RowVerdict(False, "tests but no code to test")
            return await self._run_tests(
                code_in(solution) or solution, tests, have.get("entry_point")
            )
        if answer is None:
            return RowVerdict(False, "no answer to check")
        programs = (
            have[name]
            for name in PROGRAMS
            if isinstance(have.get(name), str) and have[name].strip()
        )
        if (program := next(programs, None)) is not None:
            return _compare(
                await self._run(program), str(answer), "the row's program", {}, failed=False
            )
        return await self._write_program(row, str(answer), endpoint)

    async def _run(self, code: str, stdin: str = "") -> Ran:
        async with self.running:
            return await run_code(code, stdin=stdin, limits=self.limits, unfenced=self.unfenced)

    async def _run_tests(self, code: str, tests: object, entry_point: object) -> RowVerdict:
        async with self.running:
            tested = await run_tests(
                code,
                tests,
                entry_point,
                references=[code],
                limits=self.limits,
                unfenced=self.unfenced,
            )
        if tested.fault:
            return RowVerdict(False, tested.fault, {"tests": str(tests)[:_LONGEST]}, failed=True)
        if not tested.total:
            return RowVerdict(
                False, "the tests cannot be read", {"tests": str(tests)[:_LONGEST]}, failed=True
            )
        if tested.failed is None:
            return RowVerdict(True, "the tests pass", {"passed": tested.passed})
        details = {"passed": tested.passed, **_describe_run(tested.failed)}
        return RowVerdict(
            False, tested.failed.failure if tested.failed.stopped else "the tests fail", details
        )

    async def _write_program(
        self, row: Mapping[str, object], answer: str, endpoint: ModelClient | None
    ) -> RowVerdict:
        prompt = load("verify/program")
        text = prompt.render(question=plain_question(row))
        replies = await independent(
            endpoint, text, 1, seed=self.seed, temperature=0.2, what=self.name
        )
        reply = replies[0] if replies else ""
        code = code_in(reply)
        if code is None:
            details = {"reply": reply[:_LONGEST], "prompt": prompt.label}
            return RowVerdict(False, "the model wrote no program", details, failed=True)
        details = {"program": code, "prompt": prompt.label}
        return _compare(
            await self._run(code), answer, "a program that a model wrote", details, failed=True
        )


def _compare(
    ran: Ran, answer: str, whose: str, details: Mapping[str, object], *, failed: bool
) -> RowVerdict:
    evidence = {**details, **_describe_run(ran)}
    if not ran.ok:
        return RowVerdict(
            False, f"{whose} {ran.failure if ran.stopped else 'fails'}", evidence, failed=failed
        )
    printed = next((line.strip() for line in reversed(ran.stdout.splitlines()) if line.strip()), "")
    right = final_of(answer) or answer
    printed_answer = final_of(printed, numeric=number(right) is not None) or ""
    evidence["printed"] = printed[:_LONGEST]
    if printed_answer and same(printed_answer, right):
        return RowVerdict(True, f"{whose} prints the answer", evidence)
    return RowVerdict(False, f"{whose} prints a different answer", evidence)


def _describe_run(ran: Ran) -> dict[str, object]:
    """Returns the recorded details of a run, without times, so that they are reproducible."""
    last = next((line for line in reversed(ran.stderr.splitlines()) if line.strip()), "")
    return {"failure": ran.failure, "stdout": ran.stdout[-_LONGEST:], "stderr": last[:_LONGEST]}
