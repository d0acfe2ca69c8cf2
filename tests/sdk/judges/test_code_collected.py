# ruff: noqa: E501 - programs, one a line
"""Tests that never run: they are run after all, or the task has no reward; and packages that the
sandbox lacks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ajet_sdk.errors import NoReward
from ajet_sdk.judges import code as code_judge
from ajet_sdk.sandbox.fence import NoFence, fence
from ajet_sdk.sandbox.run import ProgramLimits
from ajet_sdk.types import Task


def _has_fence() -> bool:
    try:
        fence()
    except NoFence:
        return False
    return True


UNFENCED = not _has_fence()
WRONG = "def f(x=None, *others): return 0"
RIGHT = "def f(x): return x * 2"


def ran(code: str, tests: Any, **metadata: Any) -> code_judge.Tested:
    limits = ProgramLimits(seconds=8)
    return asyncio.run(
        code_judge.run_tests(
            code, tests, metadata.get("entry_point"), limits=limits, unfenced=UNFENCED
        )
    )


CASES = "import unittest\nclass T(unittest.TestCase):\n"
RUN = {
    "a class without TestCase": "class TestF:\n    def test_a(self):\n        assert f(2) == 4",
    "a class of any name": "class Checks:\n    def test_a(self):\n        assert f(2) == 4",
    "a class that sets up": "class TestF:\n    def setup_method(self, method): self.x = 2\n    def test_a(self):\n        assert f(self.x) == 4",
    "a static method": "class TestF:\n    @staticmethod\n    def test_a():\n        assert f(2) == 4",
    "an async function": "async def test_a():\n    assert f(2) == 4",
    "an async method": "class TestF:\n    async def test_a(self):\n        assert f(2) == 4",
    "an async case": "import unittest\nclass T(unittest.IsolatedAsyncioTestCase):\n    async def test_a(self):\n        self.assertEqual(f(2), 4)",
    "a default parameter": "def test_a(x=2):\n    assert f(x) == 4",
    "a function of another name": "def run_all():\n    assert f(2) == 4",
    "a name in a list": "def test_a():\n    assert f(2) == 4\nTESTS = [test_a]",
    "a name in a condition": "def test_a():\n    assert f(2) == 4\nassert callable(test_a) and f(0) == 0",
    "a mixin": "import unittest\nclass Checks:\n    def test_a(self):\n        self.assertEqual(f(2), 4)\nclass T(Checks, unittest.TestCase): pass",
    "a definition in an if": "if True:\n    def test_a():\n        assert f(2) == 4",
    "a case of a case": f"{CASES}    x = 0\n    def test_a(self): self.assertEqual(f(self.x), 2 * self.x)\nclass B(T):\n    x = 3",
    "a main": "def main():\n    assert f(2) == 4\nif __name__ == '__main__':\n    main()",
    "a helper": "def near(a, b=4, tolerance=1):\n    assert a == b\ndef test_a():\n    near(f(2))",
    "a skipped test beside another": f"{CASES}    @unittest.skip('slow')\n    def test_a(self): self.assertEqual(f(2), 5)\n    def test_b(self): self.assertEqual(f(2), 4)",
    "a test that skips itself for a result": f"{CASES}    def test_a(self):\n        if f(2) != 4: self.skipTest('no')",
    "a module that is set up": "def setUpModule():\n    global x\n    x = 2\ndef test_a():\n    assert f(x) == 4",
    "an import of the program": "from solution import f\ndef test_a():\n    assert f(2) == 4",
    "the program as a module": "import solution\ndef test_a():\n    assert solution.f(2) == 4",
    "an optional import": "try:\n    import nowhere\nexcept ImportError:\n    nowhere = None\nassert f(2) == 4",
}  # fmt: skip
FAULTS = {
    "a fixture alone": "def test_a(capsys):\n    assert f(2) == 4",
    "a required parameter": "def test_a(x):\n    assert f(x) == 4\nassert f(0) == 0",
    "a method with a parameter": "class TestF:\n    def test_a(self, x):\n        assert f(x) == 4\nassert f(0) == 0",
    "two tests of one name": "def test_a():\n    assert f(2) == 4\ndef test_a():\n    assert f(0) == 0",
    "a generator": "def test_a():\n    assert f(2) == 4\n    yield 1\nassert f(0) == 0",
    "an async test of a case that does not wait": f"{CASES}    async def test_a(self):\n        self.assertEqual(f(2), 4)\n    def test_b(self): self.assertEqual(f(0), 0)",
    "a case that skips all": f"{CASES}    @unittest.skip('slow')\n    def test_a(self): self.assertEqual(f(2), 5)\nassert f(0) == 0",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_a_test_that_nobody_calls_is_run(name: str) -> None:
    assert ran(WRONG, RUN[name]).failed is not None
    right = ran(RIGHT, RUN[name])
    assert right.passed == right.total == 1 and not right.fault


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_test_that_cannot_run_is_a_fault_of_the_task(name: str) -> None:
    assert ran(RIGHT, FAULTS[name]).fault and ran(WRONG, FAULTS[name]).fault


COUNTS = """
import asyncio
async def main():
    seen = []
    async for x in f(3):
        seen.append(x)
    assert seen == [0, 1, 2]
    assert [x async for x in f(2)] == [0, 1]
asyncio.run(main())
"""
COUNTING = {
    "a generator": ("async def f(n):\n    for i in range(n): yield i", 1),
    "a generator that waits": (
        "import asyncio\nasync def f(n):\n    for i in range(n):\n        await asyncio.sleep(0)\n        yield i",
        1,
    ),
    "a class": (
        "class f:\n    def __init__(self, n): self.n, self.i = n, -1\n    def __aiter__(self): return self\n"
        "    async def __anext__(self):\n        self.i += 1\n        if self.i == self.n: raise StopAsyncIteration\n"
        "        return self.i",
        1,
    ),
    "no items": ("async def f(n):\n    return\n    yield", 0),
    "other items": ("async def f(n):\n    for i in range(n): yield 0", 0),
    "items that equal all": (
        "class E:\n    def __eq__(self, other): return True\nasync def f(n):\n    for i in range(n): yield E()",
        0,
    ),
    "no asynchronous iterator": ("def f(n): return range(n)", 0),
    "an end in the function": ("def f(n): raise StopAsyncIteration", 0),
    "no end": ("async def f(n):\n    while True: yield 0", 0),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTING)
def test_items_of_an_asynchronous_iterator_are_read_one_by_one(name: str) -> None:
    code, passed = COUNTING[name]
    tested = ran(code, COUNTS)
    assert (tested.passed, tested.total, tested.fault) == (passed, 1, "")


@pytest.mark.slow
def test_an_asynchronous_loop_may_end_before_its_items_do() -> None:
    tests = (
        "import asyncio\nasync def main():\n    async for x in f():\n        if x > 2: break\n    assert x == 3\n"
        "asyncio.run(main())"
    )
    assert (
        ran(
            "async def f():\n    i = 0\n    while True:\n        yield i\n        i += 1", tests
        ).passed
        == 1
    )


SILENT = [{"input": "1", "output": ""}, {"input": "2", "output": " \n"}]
ECHO = "print(input().strip())"


@pytest.mark.parametrize("tests", [SILENT, SILENT[:1], {"inputs": ["1"], "outputs": [""]}])
def test_cases_that_all_expect_no_output_are_a_fault_of_the_task(tests: Any) -> None:
    for code in ("", "pass", ECHO):
        assert ran(code, tests).fault
    with pytest.raises(NoReward):
        judge("pass", tests=tests)


@pytest.mark.slow
def test_a_case_without_output_earns_no_part_of_the_reward_by_itself() -> None:
    tests = [*SILENT, {"input": "3", "output": "3"}]
    shy = "x = input()\nif x == '3': print(x)"
    by_tests = code_judge.CodeJudge(unfenced=UNFENCED, seconds=8, partial=True)
    earned = {}
    for code in ("pass", ECHO, shy):
        verdict = asyncio.run(by_tests(f"```python\n{code}\n```", Task(metadata={"tests": tests})))
        earned[code] = float(verdict.rewards[0].value)
    assert earned == {"pass": 0.0, ECHO: pytest.approx(1 / 3), shy: 1.0}


def judge(code: str, **metadata: Any) -> float:
    by_tests = code_judge.CodeJudge(unfenced=UNFENCED, seconds=8)
    verdict = asyncio.run(by_tests(f"```python\n{code}\n```", Task(metadata=metadata)))
    return float(verdict.rewards[0].value)


@pytest.mark.slow
@pytest.mark.parametrize("metadata", [
    {"tests": "import nowhere\nassert f(2) == 4"},
    {"tests": "def test_f():\n    from nowhere.inner import x\n    assert f(2) == 4"},
    {"tests": "assert f(2) == 4", "canonical_solution": "import nowhere\ndef f(x): return nowhere.double(x)"},
    {"tests": "def test_f(x):\n    assert f(x) == 4\nassert f(0) == 0"},
])  # fmt: skip
def test_a_task_that_no_program_can_solve_here_has_no_reward(metadata: dict[str, Any]) -> None:
    with pytest.raises(NoReward):
        judge("import nowhere" if "nowhere" in str(metadata) else RIGHT, **metadata)


@pytest.mark.slow
def test_a_name_that_the_program_lacks_cannot_be_imported_from_it() -> None:
    for tests in (
        "from solution import g\nassert g(2) == 4",
        "import solution\nassert solution.g(2) == 4",
    ):
        assert judge(RIGHT, tests=tests) == 0.0


@pytest.mark.slow
def test_a_program_does_not_escape_its_failure_by_an_import() -> None:
    for code in (
        "import nowhere",
        f"import nowhere\n{RIGHT}",
        "def f(x):\n    import nowhere",
        "raise ImportError('x')",
    ):
        assert judge(code, tests="import json\nassert f(2) == 4", canonical_solution=RIGHT) == 0.0
