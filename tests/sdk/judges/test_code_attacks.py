# ruff: noqa: E501 - programs, one a line
"""A task's tests against programs that want to pass without being right, and against honest ones of
every form."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ajet_sdk.errors import NoReward
from ajet_sdk.judges.cheats import PROGRAMS
from ajet_sdk.judges.code import CodeJudge
from ajet_sdk.sandbox.fence import NoFence, fence
from ajet_sdk.types import Task

ASSERTS = [
    "import math", "assert double(2) == 4", "assert abs(double(1.5) - 3.0) < 1e-6", "assert double('a') in ['aa']",
    "assert math.isclose(double(0.25), 0.5)", "assert double(3) == 6, 'six'",
    "assert all(map(lambda n: double(n) == n + n, range(20, 30)))", "assert double([7]).count(7) == 2",
]  # fmt: skip
CHECK = "METADATA = {}\n\ndef check(candidate):\n" + "\n".join(
    f"    {line}" for line in ASSERTS[1:]
).replace("double", "candidate").replace("math.isclose", "__import__('math').isclose")
CASES = """
import unittest

class TestDouble(unittest.TestCase):
    def test_numbers(self):
        self.assertEqual(double(2), 4)
        self.assertAlmostEqual(double(1.5), 3.0)

    def test_text(self):
        self.assertTrue(double("ab").startswith("abab"))

if __name__ == "__main__":
    unittest.main()
"""
FORMS: dict[str, dict[str, Any]] = {
    "asserts": {"test_list": ASSERTS},
    "check": {"test": CHECK, "entry_point": "double"},
    "cases": {"tests": CASES},
    "functions": {
        "tests": "def test_double():\n    assert double(2) == 4\n    assert double('a') == 'aa'"
    },
    "a loop": {"tests": "assert all(map(lambda n: double(n) == n + n, range(2, 5)))"},
    "near": {"tests": "assert abs(double(2) - 4) < 1e-6"},
    "by method": {"tests": "assert double(2).__eq__(4)\nassert double('a').__contains__('aa')"},
    "within": {"tests": "assert 3 < double(2) <= 4 and round(double(2)) == max(double(2), 3) == 4"},
    "read and print": {"tests": [{"input": "2", "output": "4"}, {"input": "15", "output": "30"}]},
}
CHEATS = {cheat.name: str(cheat.content) for cheat in PROGRAMS}
DOUBLE = "def double(x):\n    return x + x\n"
READS = (
    f"{DOUBLE}if __name__ == '__main__':\n    try: print(double(int(input())))\n    except"
    " EOFError: pass"
)


HONEST: dict[str, tuple[str, dict[str, Any]]] = {
    "a class": (
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x); return self\n"
        "    def pop(self):\n        if not self.items: raise IndexError('pop from empty stack')\n"
        "        return self.items.pop()\n    def __len__(self): return len(self.items)\n"
        "    def __iter__(self): return iter(self.items)\n    def __getitem__(self, i): return self.items[i]\n"
        "    def __repr__(self): return f'Stack({self.items})'\n    @property\n    def top(self): return self.items[-1]",
        {"tests": "s = Stack()\nassert not s and len(s) == 0\ns.push(1).push(2)\nassert s.top == 2 and s[0] == 1 and 2 in s\n"
        "assert list(s) == [1, 2] == s.items and str(s) == 'Stack([1, 2])' and isinstance(s, Stack)\n"
        "assert not isinstance(3, Stack) and hasattr(s, 'push') and not hasattr(s, 'shift')\n"
        "assert s.pop() == 2 and s.pop() == 1\ntry:\n    s.pop()\n    assert False\n"
        "except IndexError as error:\n    assert 'empty' in str(error)\ns.limit = 3\nassert s.limit == 3"},
    ),
    "operators": (
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass V:\n    x: int\n    y: int\n"
        "    def __add__(self, o): return V(self.x + o.x, self.y + o.y)\n"
        "    def __sub__(self, o): return V(self.x - o.x, self.y - o.y)\n"
        "    def __mul__(self, k): return V(self.x * k, self.y * k)\n    __rmul__ = __mul__\n"
        "    def __lt__(self, o): return self.x < o.x\n    def __neg__(self): return V(-self.x, -self.y)",
        {"test_list": ["assert V(1, 2) + V(3, 4) == V(4, 6)", "assert V(1, 2) != V(2, 1)", "assert (V(1, 2) * 3).y == 6",
         "assert 3 * V(1, 2) == V(3, 6)", "assert sorted([V(2, 0), V(1, 0)])[0].x == 1", "assert -V(1, 2) == V(-1, -2)",
         "assert V(3, 3) - V(1, 2) == V(2, 1)", "assert V(1, 2) != (1, 2)", "assert [V(1, 2)] == [V(1, 2)]"]},
    ),
    "a generator": (
        "import itertools\ndef count(n):\n    for i in itertools.count(n): yield i\ndef up(n):\n    yield from range(n)",
        {"tests": "g = count(3)\nassert next(g) == 3 and next(g) == 4\nassert list(up(3)) == [0, 1, 2]\n"
         "assert [x for x, _ in zip(count(1), 'ab')] == [1, 2] and sum(up(4)) == 6\nu = up(1)\nnext(u)\ntry:\n    next(u)\n"
         "    assert False\nexcept StopIteration:\n    pass"},
    ),
    "exceptions": (
        "class Base(Exception): pass\nclass TooBig(Base, ValueError):\n    def __init__(self, n):\n"
        "        super().__init__(f'{n} is too big')\n        self.n = n\ndef f(n):\n    if n > 9: raise TooBig(n)\n"
        "    if n < 0: raise ValueError('negative')\n    return {}[n] if n == 3 else open('/no/file') if n == 4 else n",
        {"tests": "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n"
         "        self.assertRaises(ValueError, f, -1)\n        with self.assertRaisesRegex(Base, 'too big') as c: f(10)\n"
         "        self.assertEqual(c.exception.n, 10)\n        self.assertIsInstance(c.exception, TooBig)\n"
         "        with self.assertRaises(KeyError): f(3)\n        with self.assertRaises(FileNotFoundError): f(4)\n"
         "        self.assertEqual(f(2), 2)\nunittest.main()"},
    ),
    "in place": (
        "def rotate(m):\n    m[:] = [list(r) for r in zip(*m[::-1])]\ndef dedupe(xs):\n    xs[:] = sorted(set(xs))\n"
        "    return len(xs)\ndef put(d, k): d.setdefault(k, []).append(1)",
        {"tests": "m = [[1, 2], [3, 4]]\nrow = m\nrotate(m)\nassert m == [[3, 1], [4, 2]] and row is m\nxs = [3, 1, 3]\n"
         "k = dedupe(xs)\nassert xs[:k] == [1, 3]\nd = {'a': []}\na = d['a']\nput(d, 'a')\nput(d, 'b')\n"
         "assert a == [1] and d == {'a': [1], 'b': [1]}"},
    ),
    "callbacks": (
        "def apply(f, xs): return [f(x) for x in xs]\ndef memo(f):\n    seen = {}\n    def g(*a):\n"
        "        if a not in seen: seen[a] = f(*a)\n        return seen[a]\n    return g\n"
        "def take(it, n): return [x for x, _ in zip(it, range(n))]\ndef safe(f):\n    try: return f()\n"
        "    except ValueError as e: return str(e)",
        {"tests": "assert apply(lambda x: x + 1, [1, 2]) == [2, 3] and apply(str, (1,)) == ['1']\ncalls = []\n@memo\n"
         "def slow(x):\n    calls.append(x)\n    return x * x\nassert slow(3) == slow(3) == 9 and calls == [3]\n"
         "import itertools\nassert take(itertools.count(), 3) == [0, 1, 2]\n"
         "def bad(): raise ValueError('no')\nassert safe(bad) == 'no' and apply(lambda x: apply(lambda y: y * x, [x]), [2]) == [[4]]"},
    ),
    "nodes of the tests": (
        "def total(node): return node.value + total(node.left) + total(node.right) if node else 0\n"
        "class Solution:\n    def invert(self, node):\n        if node: node.left, node.right = node.right, node.left\n"
        "        return node",
        {"tests": "class Node:\n    def __init__(self, value, left=None, right=None):\n"
         "        self.value, self.left, self.right = value, left, right\n\ndef check(invert):\n"
         "    root = Node(1, Node(2), Node(3, Node(4)))\n    assert total(root) == 10\n    again = invert(root)\n"
         "    assert again is root and root.left.value == 3", "entry_point": "Solution().invert"},
    ),
    "values": (
        "import datetime, decimal, fractions, collections, enum\nP = collections.namedtuple('P', 'x y')\n"
        "class C(enum.IntEnum):\n    A = 1\nLIMIT = 3\ndef f(n):\n    return [None, True, 1.5, float('inf'), 2j, b'x', (1, [2]), {1, 2},"
        " frozenset('a'), {(1, 2): 'x'}, decimal.Decimal('1.10'), fractions.Fraction(1, 3), datetime.date(2024, 2, 29),"
        " datetime.timedelta(days=1), P(1, 2), C.A, collections.Counter('aab'), collections.deque([1]), range(3),"
        " 10 ** 5000, '\\ud800é', bytearray(b'y'), collections.defaultdict(list, a=[1])][n]\ndef same(x): return x",
        {"tests": "from datetime import date, timedelta\nfrom decimal import Decimal\nfrom fractions import Fraction\n"
         "from collections import deque\nexpected = [None, True, 1.5, float('inf'), 2j, b'x', (1, [2]), {1, 2}, frozenset('a'),"
         " {(1, 2): 'x'}, Decimal('1.10'), Fraction(1, 3), date(2024, 2, 29), timedelta(days=1), (1, 2), 1,"
         " {'a': 2, 'b': 1}, deque([1]), range(3), 10 ** 5000, '\\ud800é', bytearray(b'y'), {'a': [1]}]\n"
         "for n, value in enumerate(expected):\n    assert f(n) == value and same(value) == value, n\n"
         "assert f(14).x == 1 and LIMIT == 3 and type(f(1)) is bool and type(f(2)) is float\n"
         "assert same({1: 'a'}) == {1: 'a'} and f(-1)['a'] == [1]"},
    ),
    "threads": (
        "def f(x, g): return g(x) + sum(range(1000))",
        {"tests": "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(8) as pool:\n"
         "    assert list(pool.map(lambda x: f(x, lambda y: y * 2), range(200))) == [2 * x + 499500 for x in range(200)]"},
    ),
    "a name of a built-in function": ("def sum(a, b): return a + b", {"test_list": ["assert sum(1, 2) == 3"]}),
    "printing": (
        "import sys\ndef hello(name): print('hello', name)\nprint('loaded')",
        {"tests": "import io, contextlib\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n    hello('you')\n"
         "assert out.getvalue() == 'hello you\\n'"},
    ),
    "asyncio": (
        "import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x + 1",
        {"tests": "import asyncio\nasync def main():\n    assert await f(1) == 2\n    assert await asyncio.gather(f(1), f(2)) == [2, 3]\n"
         "asyncio.run(main())"},
    ),
    "a context manager and a closure": (
        "class Lock:\n    held = False\n    def __enter__(self):\n        self.held = True\n        return self\n"
        "    def __exit__(self, *raised): self.held = False\ndef counter():\n    n = 0\n    def up():\n"
        "        nonlocal n\n        n += 1\n        return n\n    return up",
        {"tests": "with Lock() as lock:\n    assert lock.held\nassert lock.held is False\nup = counter()\n"
         "assert [up(), up(), counter()()] == [1, 2, 1]"},
    ),
    "recursion": (
        "def depth(n):\n    return n if n == 0 else depth(n - 1)\ndef nested(n):\n    return [] if n == 0 else [nested(n - 1)]",
        {"tests": "assert depth(900) == 0\nx = nested(150)\nassert len(x) == 1\ntry:\n    depth(10 ** 6)\n    assert False\n"
         "except RecursionError:\n    pass"},
    ),
}  # fmt: skip

NUMPY = (
    (
        "import numpy as np\ndef f(n): return np.arange(n, dtype='float32').reshape(1, n)\ndef"
        " total(a): return np.sum(a)\ndef zero(a): a[:] = 0"
    ),
    {
        "tests": (
            "assert np.allclose(f(3), [[0, 1, 2]]) and f(2).dtype == np.float32 and f(3).shape =="
            " (1, 3)\nassert total(np.ones((2, 2))) == 4 and isinstance(total(np.ones(2)),"
            " np.floating)\na = np.ones(2)\nzero(a)\nassert (a == 0).all()"
        )
    },
)


def reward(code: str, metadata: dict[str, Any], **options: Any) -> float:
    judge = CodeJudge(**{"unfenced": UNFENCED, "seconds": 8, **options})
    value: float = (
        asyncio.run(judge(f"```python\n{code}\n```", Task(metadata=metadata))).rewards[0].value
    )
    return value


def _has_fence() -> bool:
    try:
        fence()
    except NoFence:
        return False
    return True


UNFENCED = not _has_fence()


async def rewarded(form: str, **options: Any) -> dict[str, float]:
    """The cheats that earn something."""
    judge = CodeJudge(unfenced=UNFENCED, seconds=2, **options)
    running = asyncio.Semaphore(4)

    async def value(code: str) -> float:
        async with running:
            verdict = await judge(f"```python\n{code}\n```", Task(metadata=FORMS[form]))
            return float(verdict.rewards[0].value)

    values = await asyncio.gather(*(value(code) for code in CHEATS.values()))
    return {name: earned for name, earned in zip(CHEATS, values, strict=True) if earned}


def test_no_cheat_earns_a_reward() -> None:
    assert asyncio.run(rewarded("check")) == {}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_no_cheat_earns_a_part_of_the_reward(form: str) -> None:
    """Nor all of it: `partial` goes on where a test fails, and tests of one text are run as without
    it."""
    assert asyncio.run(rewarded(form, partial=True)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_right_program_passes_tests_of_every_form(form: str) -> None:
    assert reward(READS, FORMS[form]) == reward(READS, FORMS[form], partial=True) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", HONEST)
def test_an_honest_program_passes(name: str) -> None:
    code, metadata = HONEST[name]
    assert reward(code, metadata) == 1.0


@pytest.mark.slow
def test_arrays_cross_by_value() -> None:
    pytest.importorskip("numpy")
    assert (
        reward(*NUMPY, unfenced=True) == 1.0
    )  # a fence shows what is installed beside this Python only


@pytest.mark.parametrize(
    "tests",
    ["def check(candidate):\n    assert candidate(1) == 2", "pass", "assert 1 == 1", "def f("],
)
def test_tests_that_do_not_call_the_program_are_the_datas_fault(tests: str) -> None:
    with pytest.raises(NoReward, match="do not call the program"):
        reward("candidate = check = lambda *a: 2", {"tests": tests})


PEER = """
import sys
def side():
    frame = sys._getframe()
    while not hasattr(frame.f_locals.get("self"), "perform"):
        frame = frame.f_back
    return type(frame.f_locals["self"])
"""


def test_a_call_within_an_assert_changes_no_argument_whatever_the_program_sends() -> None:
    forged = f"""{PEER}
def order(xs):
    send = side().send
    side().send = lambda self, *message: send(self, *message[:-1], [["list", []]])
    return []
"""
    assert reward(forged, {"tests": "xs = [3, 1, 2]\nassert order(xs) == sorted(xs)"}) == 0.0
