# ruff: noqa: E501 - programs, one a line
"""What crosses the fence of the code judge: plain data by value, and objects only where the tests
construct them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ajet_sdk.errors import NoReward
from ajet_sdk.judges.code import CodeJudge
from ajet_sdk.judges.rewards import Verdict
from ajet_sdk.sandbox.fence import NoFence, fence
from ajet_sdk.types import Task


def _has_fence() -> bool:
    try:
        fence()
    except NoFence:
        return False
    return True


UNFENCED = not _has_fence()


def judge(code: str, tests: Any, **metadata: Any) -> Verdict:
    code_judge = CodeJudge(unfenced=UNFENCED, seconds=8)
    return asyncio.run(
        code_judge(f"```python\n{code}\n```", Task(metadata={"tests": tests, **metadata}))
    )


def reward(code: str, tests: Any, **metadata: Any) -> float:
    return float(judge(code, tests, **metadata).rewards[0].value)


OBJECT = (
    "class Any:\n    def __init__(self, *a): pass\n    def __call__(self, *a, **k): return True\n  "
    "  {member}\n"
)
ANSWERING: dict[str, tuple[str, str]] = {
    "a field of a namedtuple": (
        "from collections import namedtuple\ndef f(x): return namedtuple('T', 'startswith')(lambda s: True)",
        "assert f('ab').startswith('abab')",
    ),
    "a method that finds": (
        "class T:\n    def find(self, s): return 0\ndef f(x): return T()",
        "assert f('ab').find('abab') == 0",
    ),
    "reflected addition": (
        "class T:\n    def __radd__(self, other): return 0\ndef f(x): return T()",
        "assert -4 + f(2) == 0",
    ),
    "addition": (
        "class T:\n    def __add__(self, other): return 0\ndef f(x): return T()",
        "assert abs(f(2) + -4.0) < 1e-6",
    ),
    "multiplication": (
        "class T:\n    def __mul__(self, other): return 0\n    __rmul__ = __mul__\ndef f(x): return T()",
        "assert 3 * f(2) - 3 * f(2) == 0 and f(2) * 4 == 16 - 16",
    ),
    "an exception with attributes": (
        "def f(x):\n    error = ValueError()\n    error.startswith = lambda s: True\n    return error",
        "assert f('ab').startswith('abab')",
    ),
    "a class of exceptions as a method": (
        "class T:\n    startswith = ValueError\ndef f(x): return T()",
        "assert f('ab').startswith('abab')",
    ),
    "the tests' own callback as a method": (
        "def f(x, key):\n    class T: pass\n    t = T()\n    t.startswith = key\n    return t",
        "assert f('ab', lambda s: s * 2).startswith('abab')",
    ),
    "a set that differs from nothing": (
        "class T:\n    def difference(self, other): return set()\n    def __iter__(self): return iter([])\n    __rsub__ = difference\n    symmetric_difference = issubset = difference\ndef f(x): return T()",
        "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n        self.assertSetEqual(f('ab'), {'a', 'b'})",
    ),
    "no difference": (
        "class T:\n    def difference(self, other): return set()\ndef f(x): return T()",
        "assert not f('ab').difference({'a', 'b'})",
    ),
    "a solution that returns itself": (
        "class Solution:\n    def f(self, x): return self\n    def startswith(self, s): return True\n    def find(self, s): return 0",
        "assert Solution().f('ab').startswith('abab') and Solution().f('ab').find('abab') == 0",
    ),
    "a class in place of the function": (
        "class f:\n    def __init__(self, x): pass\n    def startswith(self, s): return True",
        "assert f('ab').startswith('abab')",
    ),
    "a method that echoes": (
        "class T:\n    def union(self, other): return other\n    intersection = union\ndef f(x): return T()",
        "assert f('ab').union({'a'}) == {'a'}",
    ),
    "an item for every key": (
        "class T:\n    def __getitem__(self, key): return 1\ndef f(x): return T()",
        "assert f('ab')['a'] == 1 and f('ab')['b'] == 1",
    ),
    "membership": (
        "class T:\n    def __contains__(self, other): return True\n    def __iter__(self): return iter([])\ndef f(x): return T()",
        "assert 'ab' in f('ab')",
    ),
    "a manager that swallows the failure": (
        "class f:\n    def __enter__(self): return self\n    def __exit__(self, *raised): return True",
        "with f() as value:\n    assert value == 4",
    ),
    "a manager that swallows what a helper raises": (
        "class Ctx:\n    def __enter__(self): return self\n    def __exit__(self, *raised): return True\ndef f(x): return {}",
        "def check():\n    assert f(2)['x'] == 4\nwith Ctx() as value:\n    check()",
    ),
    "a length without items": (
        "class T:\n    def __len__(self): return 3\n    def __iter__(self): return iter([])\ndef f(x): return T()",
        "r = f('abc')\nassert len(r) == 3 and all(a == b for a, b in zip(r, 'abc'))",
    ),
    "other items each time": (
        "class T:\n    n = 0\n    def __iter__(self):\n        self.n += 1\n        return iter([] if self.n == 1 else 'abcde')\ndef f(x): return T()",
        "r = f('abc')\nassert all(a in 'abc' for a in r) and all(a in r for a in 'abc')",
    ),
    "an iterator that begins anew": (
        "class T:\n    n = 0\n    def __iter__(self): return self\n    def __next__(self):\n        self.n += 1\n        if self.n % 5 == 1: raise StopIteration\n        return 'eabcd'[self.n % 5]\ndef f(x): return T()",
        "r = f('abc')\nassert all(a in 'abc' for a in r) and all(a in r for a in 'abc')",
    ),
    "a str of one's own": (
        "class S(str):\n    def __eq__(self, other): return True\n    startswith = __contains__ = __eq__\ndef f(x): return S('x')",
        "assert f('ab').startswith('abab')",
    ),
    "a list of one's own": (
        "class L(list):\n    def __eq__(self, other): return True\n    count = lambda self, x: 2\ndef f(x): return L([1])",
        "assert f('ab').count('a') == 2",
    ),
    "a dict of one's own": (
        "class D(dict):\n    def __eq__(self, other): return True\n    def get(self, key, default=None): return default\n    __missing__ = lambda self, key: 2\ndef f(x): return D()",
        "assert f('ab').get('a', 2) == 2 and f('ab') == {'a': 2}",
    ),
    "a metaclass": (
        "class M(type):\n    def __eq__(cls, other): return True\n    def startswith(cls, s): return True\n    __hash__ = None\nclass C(metaclass=M): pass\ndef f(x): return C",
        "assert f('ab').startswith('abab')",
    ),
    "a module": ("import math\nmath.startswith = lambda s: True\ndef f(x): return math", "assert f('ab').startswith('abab')"),
    "a partial": (
        "import functools\ndef f(x):\n    p = functools.partial(bool)\n    p.startswith = lambda s: True\n    return p",
        "assert f('ab').startswith('abab')",
    ),
    "an equal dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass Point:\n    x: int\n    y: int\n    def __eq__(self, other): return True\ndef move(p): return Point(0, 0)",
        "assert move(Point(1, 2)) == Point(2, 3)",
    ),
    "a dataclass with a field that answers": (
        "from dataclasses import dataclass\n@dataclass\nclass T:\n    startswith: object\ndef f(x): return T(lambda s: True)",
        "assert f('ab').startswith('abab')",
    ),
    "an object inside a list": (
        "class T:\n    def startswith(self, s): return True\n    def __eq__(self, other): return True\ndef f(x): return [T()]",
        "assert f('ab')[0].startswith('abab') or f('ab') == ['abab']",
    ),
    "a mock": ("from unittest.mock import MagicMock\nf = MagicMock()", "assert f('ab').startswith('abab')"),
    "subtraction of two": (
        "class T:\n    def __sub__(self, other): return 0\ndef f(x): return T()", "assert f(2) - 4 == 0",
    ),
    "a frame of pandas": (
        "class T:\n    def equals(self, other): return True\n    def eq(self, other): return self\n    def all(self): return True\ndef f(x): return T()",
        "import pandas as pd\nassert f(2).equals(pd.DataFrame({'a': [1]}))",
    ),
    "chained methods": (
        "class T:\n    def lower(self): return self\n    def strip(self): return self\n    def startswith(self, s): return True\ndef f(x): return T()",
        "assert f('ab').strip().lower().startswith('abab')",
    ),
    "an object of a function named like a class": (
        "class E:\n    def __sub__(s, o): return s\n    def __abs__(s): return s\n    def __lt__(s, o): return True\ndef Add(a, b): return E()",
        "assert abs(Add(1, 2) - 3) < 1e-9",
    ),
    "a hash like that of the result": (
        "class E:\n    def __hash__(s): return 1\n    def __eq__(s, o): return True\ndef f(x): return [E()]",
        "assert set(f(0)) == {1} and {1: 2}[f(0)[0]] == 2",
    ),
    "the list that the result is compared with": (
        "def f(xs):\n    xs.clear()\n    return xs",
        "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n        xs = [3, 1]\n        self.assertEqual(f(xs), sorted(xs))",
    ),
    "the list that the result is compared with, in a condition": (
        "def f(xs):\n    xs.clear()\n    return xs",
        "xs = [3, 1]\nif f(xs) != sorted(xs):\n    raise ValueError('no')",
    ),
    "the list that a helper compares with": (
        "def f(xs):\n    xs.clear()\n    return []",
        "def expected(xs):\n    n = len(xs)\n    if print(n): pass\n    return sorted(xs)\nxs = [3, 1]\nassert f(xs) == expected(xs)",
    ),
    "the list that a helper passes to the program": (
        "def f(xs):\n    xs.clear()\n    return []\ndef size(xs): return len(xs)\ndef fail(): raise ValueError",
        "def expected(xs):\n    n = size(xs)\n    try: fail()\n    except ValueError: pass\n    return sorted(xs)\nxs = [3, 1]\nassert f(xs) == expected(xs)",
    ),
    "the rows that the result is compared with": (
        "def f(rows):\n    for row in rows: row.clear()\n    return [[] for _ in rows]",
        "rows = [[3, 1]]\nassert all(a == sorted(b) for a, b in zip(f(rows), rows))",
    ),
    "the argument in place of a copy": (
        "def copy(xs): return xs",
        "xs = [[1]]\nys = copy(xs)\nassert ys == xs and ys is not xs",
    ),
    "an argument that is changed where it must not be": (
        "def f(xs):\n    xs.sort()\n    return list(xs)",
        "xs = [2, 1]\nassert f(xs) == [1, 2]\nassert xs == [2, 1]",
    ),
    "an object in place of an exception": (
        "class T: pass\ndef f(x): return T()",
        "import unittest\nclass C(unittest.TestCase):\n    def test_f(self):\n        with self.assertRaises(TypeError): f('a') + 1",
    ),
    "a record in place of an exception": (
        "from collections import namedtuple\ndef f(x): return namedtuple('T', 'count')(lambda: 1)",
        "import unittest\nclass C(unittest.TestCase):\n    def test_f(self):\n        self.assertRaises(TypeError, f, 'a')",
    ),
    "an asynchronous function that empties what it is compared with": (
        "async def f(xs):\n    xs.clear()\n    return []",
        "import asyncio\nasync def main():\n    xs = [3, 1]\n    assert await f(xs) == sorted(xs)\nasyncio.run(main())",
    ),
    "a type that equals everything": (
        "class Meta(type):\n    def __eq__(self, other): return True\n    def __hash__(self): return 1\nclass int(metaclass=Meta): pass\ndef f(x): return int",
        "assert f(1) == 5",
    ),
    "a type with the name of another": (
        "int = type('int', (), {})\ndef f(x): return int",
        "assert f(1) is int or f(1) == int",
    ),
    "a tuple of what was emptied": (
        "def f(xs):\n    xs.clear()\n    return []",
        "xs = [3, 1]\nassert (f(xs), 1) == (sorted(xs), 1)",
    ),
    "an asynchronous manager that swallows the failure": (
        "class f:\n    async def __aenter__(self): return self\n    async def __aexit__(self, *raised): return True",
        "import asyncio\nasync def main():\n    async with f() as value:\n        assert value == 4\nasyncio.run(main())",
    ),
    "a type of its own": (
        "class M(type):\n    def __eq__(cls, other): return True\n    __hash__ = None\nclass C(metaclass=M): pass\ndef f(x): return C()",
        "assert type(f(1)) is list",
    ),
    "a method of the tests' object that is replaced": (
        "def total(p):\n    p.total = lambda: 0\n    return 0",
        "class P:\n    x = 4\n    def total(s): return s.x * 2\np = P()\nassert total(p) == p.total()",
    ),
}  # fmt: skip
HONEST: dict[str, tuple[str, str]] = {
    "a type as a result": (
        "def f(x): return type(x)\ndef kinds(xs): return {type(x): x for x in xs}",
        "assert f(1) is int and f('a') == str and f([]) is not tuple and isinstance(3, f(1))\nassert kinds([1, 'a']) == {int: 1, str: 'a'} and f(None) is type(None)",
    ),
    "changes between the items of a tuple": (
        "def pop(xs): return xs.pop()\ndef push(xs, x): xs.append(x)",
        "xs = [1, 2, 3]\nassert (pop(xs), len(xs)) == (3, 2)\nassert [4, 2] == [push(xs, 4) or xs[-1], pop(xs) - 2] and xs == [1, 2]\nassert [*xs, pop(xs), *xs] == [1, 2, 2, 1]",
    ),
    "seeds of the tests": (
        "import random\ndef f(): return [random.randint(0, 99) for _ in range(4)]",
        "import random\nrandom.seed(7)\nfirst = f()\nrandom.seed(7)\nassert first == [random.randint(0, 99) for _ in range(4)]\nrandom.seed(7)\nassert f() == first and f() != first",
    ),
    "seeds by keyword": (
        "import random\nimport numpy as np\ndef f(): return random.random(), float(np.random.rand())",
        "import random\nimport numpy as np\nrandom.seed(a=5)\nnp.random.seed(seed=5)\nfirst = f()\nrandom.seed(5, version=2)\nnp.random.seed(seed=5)\nassert f() == first",
    ),
    "seeds of numpy": (
        "import numpy as np\ndef f(): return np.random.rand(3)",
        "import numpy as np\nnp.random.seed(3)\nfirst = f()\nfrom numpy.random import seed\nseed(3)\nassert (np.random.rand(3) == first).all()",
    ),
    "an asynchronous function that changes its argument": (
        "import asyncio\nasync def push(xs, x):\n    await asyncio.sleep(0)\n    xs.append(x)\nasync def same(xs):\n    xs.sort()\n    return xs",
        "import asyncio\nasync def main():\n    xs, ys = [2], [5, 4]\n    await push(xs, 1)\n    assert xs == [2, 1]\n    await asyncio.gather(push(xs, 3), push(ys, 9))\n    assert xs == [2, 1, 3] and ys == [5, 4, 9]\n    assert await same(ys) is ys and ys == [4, 5, 9]\nasyncio.run(main())\nzs = []\nasyncio.run(push(zs, 0))\nassert zs == [0]",
    ),
    "most_common": (
        "from collections import Counter\ndef f(x): return Counter(x)",
        "assert f('aab').most_common(1) == [('a', 2)] and f('aab')['z'] == 0 and f('aab') == {'a': 2, 'b': 1}",
    ),
    "defaultdict and OrderedDict": (
        "from collections import defaultdict, OrderedDict\ndef f(x):\n    d = defaultdict(list)\n    d['a'].append(x)\n    return d\ndef g(): return OrderedDict(a=1, b=2)",
        "d = f(1)\nassert d == {'a': [1]} and d['new'] == [] and list(g().items()) == [('a', 1), ('b', 2)]\nfrom collections import OrderedDict\nassert g() != OrderedDict(b=2, a=1) and isinstance(g(), OrderedDict)",
    ),
    "asdict": (
        "from dataclasses import dataclass\n@dataclass\nclass Span:\n    start: int\n    count: int\n    tags: list\ndef f(x): return Span(0, len(x), [x])",
        "import dataclasses\nassert dataclasses.asdict(f('ab')) == {'start': 0, 'count': 2, 'tags': ['ab']}\nassert dataclasses.is_dataclass(f('a')) and [field.name for field in dataclasses.fields(f('a'))] == ['start', 'count', 'tags']\nassert dataclasses.astuple(f('a')) == (0, 1, ['a'])",
    ),
    "fields named like methods": (
        "from collections import namedtuple\nfrom dataclasses import dataclass\nN = namedtuple('N', 'count index')\n@dataclass\nclass D:\n    count: int\n    values: list\ndef f(x): return N(2, 1)\ndef g(x): return D(2, [1])",
        "assert f(1).count == 2 and f(1).index == 1 and g(1).count == 2 and g(1).values == [1]",
    ),
    "a dataclass compares its fields": (
        "from dataclasses import dataclass\n@dataclass\nclass Point:\n    x: int\n    y: int\ndef move(p): return Point(p.x + 1, p.y + 1)",
        "assert move(Point(1, 2)) == Point(2, 3) and move(Point(1, 2)) != Point(2, 2)",
    ),
    "prints": (
        "def f(x):\n    for n in range(9000): print('a line of thoughts', n)\n    return x\nprint('x' * 70000)",
        "assert f(1) == 1 and f(2) == 2",
    ),
    "prints to standard error": (
        "import sys, os\ndef f(x):\n    sys.stderr.write('y' * 70000)\n    os.write(2, b'z' * 70000)\n    os.write(1, b'z' * 70000)\n    return x",
        "assert f(1) == 1",
    ),
    "a queue whose methods are those of lists": (
        "class Stack:\n    def __init__(self): self.xs = []\n    def append(self, x): self.xs.append(x)\n    def pop(self): return self.xs.pop()\n    def index(self, x): return self.xs.index(x)\n    def copy(self):\n        s = Stack()\n        s.xs = self.xs[:]\n        return s",
        "s = Stack()\ns.append(1)\ns.append(2)\nassert s.index(2) == 1 and s.pop() == 2 and s.copy().pop() == 1",
    ),
    "a cache": (
        "class LRUCache:\n    def __init__(self, n): self.d = {}\n    def put(self, k, v): self.d[k] = v\n    def get(self, k): return self.d.get(k, -1)",
        "c = LRUCache(2)\nc.put(1, 1)\nassert c.get(1) == 1 and c.get(2) == -1",
    ),
    "a factory of objects": (
        "class _Stack:\n    def __init__(self): self.xs = []\n    def push(self, x): self.xs.append(x)\n    def pop(self): return self.xs.pop()\ndef make(): return _Stack()",
        "s = make()\ns.push(1)\nassert s.pop() == 1",
    ),
    "linked nodes": (
        "class Node:\n    def __init__(self, val, next=None): self.val, self.next = val, next\ndef build(xs):\n    node = None\n    for x in reversed(xs): node = Node(x, node)\n    return node",
        "n = build([1, 2, 3])\nassert n.val == 1 and n.next.val == 2 and n.next.next.next is None",
    ),
    "a class that is ordered against numbers": (
        "import functools\n@functools.total_ordering\nclass Money:\n    def __init__(self, n): self.n = n\n    def __eq__(self, o): return self.n == getattr(o, 'n', o)\n    def __lt__(self, o): return self.n < getattr(o, 'n', o)\n    def __sub__(self, o): return Money(self.n - getattr(o, 'n', o))\n    def __rsub__(self, o): return Money(o - self.n)\n    def __contains__(self, x): return x == self.n",
        "m = Money(5)\nassert m < 6 and m > 4 and (m - 2).n == 3 and (7 - m).n == 2 and 5 in m and 6 not in m and Money(1) < Money(2)",
    ),
    "views of a dictionary": (
        "def keys(d): return d.keys()\ndef values(d): return d.values()\ndef items(d): return d.items()",
        "assert keys({'a': 1}) == {'a'} and sorted(values({'a': 1})) == [1] and dict(items({'a': 1})) == {'a': 1} and list(keys({'b': 1})) == ['b']",
    ),
    "other values": (
        "import uuid, pathlib, enum\nclass Color(enum.Enum):\n    RED = 1\ndef f(): return uuid.UUID(int=3)\ndef g(): return pathlib.Path('a') / 'b'\ndef h(): return Color.RED\ndef ellipsis(): return ...",
        "import uuid, pathlib\nassert f() == uuid.UUID(int=3) and g() == pathlib.Path('a/b') and g().name == 'b'\nassert h() == Color.RED and h() is Color.RED and h().name == 'RED' and h().value == 1 and ellipsis() is ...",
    ),
    "a manager that suppresses": (
        "class ignore:\n    def __init__(self, kind): self.kind = kind\n    def __enter__(self): return self\n    def __exit__(self, kind, error, trace): return kind is not None and issubclass(kind, self.kind)",
        "with ignore(ValueError):\n    raise ValueError('no')\nassert isinstance(ignore(KeyError), ignore)",
    ),
    "linked lists of a solution": (
        'class ListNode:\n    def __init__(s, val=0, next=None): s.val=val; s.next=next\nclass Solution:\n    def reverse(self, head):\n        prev=None\n        while head: head.next, prev, head = prev, head, head.next\n        return prev',
        'h = ListNode(1, ListNode(2, ListNode(3)))\nr = Solution().reverse(h)\nassert (r.val, r.next.val, r.next.next.val) == (3,2,1) and r.next.next.next is None',
    ),
    "a class in small letters": (
        'class stack:\n    def __init__(s): s.x=[]\n    def push(s, v): s.x.append(v)\n    def pop(s): return s.x.pop()\n    def __len__(s): return len(s.x)',
        's = stack()\ns.push(1)\nassert s.pop() == 1 and len(s) == 0',
    ),
    "matrices": (
        'class Matrix:\n    def __init__(s, r): s.r=r\n    def __matmul__(s, o): return Matrix([[sum(a*b for a,b in zip(x,y)) for y in zip(*o.r)] for x in s.r])\n    def __getitem__(s, i): return s.r[i]\n    def __eq__(s, o): return s.r == o.r\n    def __rmul__(s, k): return Matrix([[k*x for x in r] for r in s.r])\n    @classmethod\n    def identity(cls, n): return cls([[int(i==j) for j in range(n)] for i in range(n)])\n    def T(s): return Matrix([list(x) for x in zip(*s.r)])',
        'a = Matrix([[1,2],[3,4]])\nassert a @ Matrix.identity(2) == a and (2 * a)[0][1] == 4 and (a @ a)[0] == [7, 10] and a.T()[0] == [1, 3]',
    ),
    "items of a list": (
        "from dataclasses import dataclass, field\n@dataclass(order=True)\nclass Item:\n    price: float\n    name: str = field(compare=False)\n    def total(self, n): return self.price * n\ndef make(n): return [Item(1.0, n), Item(2.0, 'b')]",
        'xs = make(\'a\')\nassert xs[0].name == \'a\' and xs[0] < xs[1] and xs[0].total(3) == 3.0 and xs[0] == Item(1.0, \'zz\') and max(xs).name == \'b\' and repr(xs[1]) == "Item(price=2.0, name=\'b\')"',
    ),
    "a chain of methods": (
        'class _C:\n    def __init__(s, v): s.v=v\n    def add(s, x): s.v += x; return s\n    def value(s): return s.v\ndef calc(v): return _C(v)',
        'assert calc(1).add(2).add(3).value() == 6',
    ),
    "an enumeration": (
        'import enum\nclass Color(enum.Enum):\n    RED = 1\n    BLUE = 2\ndef parse(s): return Color[s]',
        "assert parse('RED') is Color.RED and parse('BLUE') == Color.BLUE and parse('RED') != Color.BLUE and Color(1) is Color.RED and [c.name for c in Color] == ['RED','BLUE'] and parse('RED').value == 1",
    ),
    "a queue in a class of tests": (
        'class Queue:\n    def __init__(s): s.q=[]\n    def put(s,x): s.q.append(x)\n    def get(s): return s.q.pop(0)\n    def __len__(s): return len(s.q)\n    def __contains__(s,x): return x in s.q\n    def __bool__(s): return bool(s.q)',
        'class TestQueue:\n    def setup_method(self): self.q = Queue()\n    def test_a(self):\n        self.q.put(1)\n        assert len(self.q) == 1 and 1 in self.q and self.q\n        assert self.q.get() == 1 and not self.q',
    ),
    "iterators": (
        'class Range:\n    def __init__(s, n): s.i=0; s.n=n\n    def __iter__(s): return s\n    def __next__(s):\n        if s.i >= s.n: raise StopIteration\n        s.i += 1\n        return s.i\ndef gen(n):\n    x = yield 1\n    yield x',
        'r = Range(3)\nassert next(r) == 1 and list(r) == [2,3] and list(Range(2)) == [1,2]\ng = gen(1)\nassert next(g) == 1 and g.send(5) == 5',
    ),
    "objects in order": (
        "class P:\n    def __init__(s, n): s.n = n\n    def __lt__(s, o): return s.n < o.n\n    def __repr__(s): return f'P({s.n})'",
        "assert [p.n for p in sorted([P(2), P(1)])] == [1, 2] and repr(P(3)) == 'P(3)' and str([P(1)]) == '[P(1)]' and max(P(1), P(2)).n == 2",
    ),
    "map, filter, zip and generators": (
        "def f(x): return map(str, x)\ndef g(x): return (n for n in x)\ndef h(x): return zip(x, x)",
        "assert list(f([1, 2])) == ['1', '2'] and 2 in g([1, 2]) and list(h('ab')) == [('a', 'a'), ('b', 'b')]",
    ),
    "objects with a hash": (
        "class V:\n    def __init__(s, x): s.x = x\n    def __eq__(s, o): return isinstance(o, V) and s.x == o.x\n    def __hash__(s): return hash(s.x)\n"
        "def points(xs): return [V(x) for x in xs]\ndef count(xs): return len(set(xs))",
        "assert len({V(1), V(1), V(2)}) == 2 and {V(1): 'a'}[V(1)] == 'a' and hash(V(1)) == hash(V(1)) and set(points([1, 1])) == {V(1)}\n"
        "class Own:\n    def __eq__(s, o): return True\n    def __hash__(s): return 1\nassert count([Own(), Own()]) == 1",
    ),
    "copies of objects": (
        "import copy\nclass P:\n    def __init__(s, x): s.x = x\ndef clone(p): return copy.deepcopy(p)",
        "import copy\np = P([1])\nq, r = copy.deepcopy(p), copy.copy(p)\nq.x = [2]\nassert p.x == [1] == r.x and q.x == [2]\n"
        "class Own:\n    x = 3\nown = Own()\nassert clone(own).x == 3 and clone(own) is not own",
    ),
    "the size of a vector": (
        "class Vec:\n    def __init__(s, x, y): s.x=x; s.y=y\n    def __abs__(s): return (s.x**2 + s.y**2) ** .5\n    def __sub__(s, o): return Vec(s.x-o.x, s.y-o.y)",
        "assert abs(Vec(3, 4)) == 5.0 and abs(Vec(3, 4) - Vec(3, 4)) < 1e-9",
    ),
    "a program that runs its examples": (
        "def f(n): return n + 1\nif __name__ == '__main__':\n    import unittest\n    print(f(int(input())))\n    unittest.main()",
        "assert f(1) == 2",
    ),
    "arguments changed by statements of each kind": (
        "def pop(xs): return xs.pop()",
        "xs = [1, 2]\nlast: int = pop(xs)\nlast += pop(xs)\nassert last == 3 and xs == []",
    ),
    "arguments changed in conditions": (
        "def pop(xs): return xs.pop()\ndef sort(xs): xs.sort()",
        "xs = [3, 1, 2]\nassert sort(xs) is None and xs == [1, 2, 3]\nassert pop(xs) == 3 and pop(xs) == 2 and xs == [1]\nassert not xs[1:] and sort(xs) or xs == [1]",
    ),
    "arguments changed within other calls": (
        "def pop(xs): return xs.pop()\ndef sort(xs): xs.sort()",
        "xs = [3, 1, 2]\nprint(sort(xs))\nassert xs == [1, 2, 3]\nassert [pop(xs), pop(xs), pop(xs)] == [3, 2, 1]\nassert xs == []\nxs = [1, 2]\nassert [pop(xs) for _ in range(2)] == [2, 1]\nassert xs == []",
    ),
    "arguments changed in methods of unittest": (
        "def sort(xs): xs.sort()",
        "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n        xs = [2, 1]\n        self.assertIsNone(sort(xs))\n        self.assertEqual(xs, [1, 2])",
    ),
    "arguments changed in loops and returns": (
        "def take(xs):\n    xs.pop()\n    return [1, 2]\ndef empty(xs): xs.clear()",
        "def helper(xs):\n    return take(xs)\nxs = [5, 6, 7]\nfor y in take(xs):\n    assert len(xs) == 2\nassert helper(xs) == [1, 2]\nassert xs == [5]\nwhile xs and empty(xs): pass\nassert xs == []",
    ),
    "a keyword argument is changed": (
        "def fill(n, out): out.extend(range(n))\ndef put(d, *, key): d[key] = 1",
        "xs = []\nfill(3, out=xs)\nassert xs == [0, 1, 2]\nd = {}\nput(d=d, key='a')\nassert d == {'a': 1}",
    ),
    "an argument is changed before an exception": (
        "def f(xs):\n    xs.append(1)\n    raise ValueError",
        "xs = []\ntry:\n    f(xs)\n    assert False\nexcept ValueError:\n    pass\nassert xs == [1]",
    ),
    "the argument is returned": (
        "def sort(xs):\n    xs.sort()\n    return xs\ndef same(x): return x\ndef copy(xs): return list(xs)\ndef first(xs): return xs[0]",
        "x = [2, 1]\ny = sort(x)\nassert y is x and y == [1, 2] and id(y) == id(x)\nassert same(x) is x and copy(x) is not x and copy(x) == x\ny.append(3)\nassert x == [1, 2, 3]\nd = {}\nassert same(d) is d\nrows = [[1]]\nassert first(rows) is rows[0]",
    ),
    "the argument is returned to unittest": (
        "def same(x): return x\ndef copy(xs): return xs[:]",
        "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n        xs = [1]\n        self.assertIs(same(xs), xs)\n        self.assertIsNot(copy(xs), xs)",
    ),
    "objects that refer to each other": (
        "class Node:\n    def __init__(s, v): s.v = v; s.next = None; s.parent = None\n    def add(s, other):\n        s.next = other\n        other.parent = s\n        return s\ndef tail(n):\n    while n.next: n = n.next\n    return n",
        "a, b = Node(1), Node(2)\nassert a.add(b) is a and a.next is b and b.parent is a and tail(a) is b and a is not b and a.next is not a",
    ),
    "objects sorted in place": (
        "class P:\n    def __init__(s, n): s.n = n\n    def __lt__(s, o): return s.n < o.n\ndef sort(ps): ps.sort()",
        "ps = [P(2), P(1)]\nsort(ps)\nassert ps[0].n == 1 and ps[0] < ps[1]",
    ),
    "types of objects": (
        "class Base: pass\nclass Stack(Base):\n    def twin(self): return Stack()\ndef make(x): return [x]",
        "s = Stack()\nassert type(s) is Stack and type(s) == Stack and type(s).__name__ == 'Stack' and s.__class__ is Stack\nassert type(s) is type(s.twin()) and type(s) is not Base and type(make(1)) is list and s.__class__.__name__ == 'Stack'\nassert type('X', (), {}).__name__ == 'X'",
    ),
    "operators in place": (
        "class V:\n    def __init__(s, x): s.x = x\n    def __iadd__(s, o): s.x += o.x; return s\n    def __imul__(s, k): s.x *= k; return s\n    def __lshift__(s, k): return V(s.x << k)\n    def __divmod__(s, k): return divmod(s.x, k)\n    def __round__(s, n=0): return V(round(s.x, n))\n    def __index__(s): return s.x",
        "v = V(2)\nw = v\nv += V(3)\nv *= 2\nassert v.x == 10 and w.x == 10 and (v << 1).x == 20 and divmod(v, 3) == (3, 1) and round(V(1.26), 1).x == 1.3 and [0, 1, 2][V(2)] == 2",
    ),
    "a decorator that keeps the name": (
        "import functools\ndef logged(f):\n    @functools.wraps(f)\n    def g(*a): return f(*a)\n    return g\ndef area(r):\n    'The area.'\n    return r",
        "assert area.__doc__ == 'The area.' and area.__name__ == 'area'\ndef add(a, b):\n    'Adds.'\n    return a + b\nassert logged(add).__name__ == 'add' and logged(add)(1, 2) == 3",
    ),
    "an asynchronous manager": (
        "class Pool:\n    is_open = False\n    async def __aenter__(self):\n        self.is_open = True\n        return self\n    async def __aexit__(self, *raised): self.is_open = False",
        "import asyncio\nasync def main():\n    async with Pool() as pool:\n        assert pool.is_open\n    assert not pool.is_open\nasyncio.run(main())",
    ),
    "a callback that changes its argument": (
        "def each(f, rows):\n    for row in rows: f(row)\n    return rows",
        "assert each(lambda row: row.append(0), [[1], [2]]) == [[1, 0], [2, 0]]",
    ),
    "a file in memory": (
        "import csv\ndef rows(f): return list(csv.reader(f))\ndef upper(f, g): g.write(f.read().upper())",
        "import io\nassert rows(io.StringIO('a,b')) == [['a', 'b']]\nout = io.StringIO()\nupper(io.StringIO('ab'), out)\nassert out.getvalue() == 'AB'",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ANSWERING)
def test_an_object_of_the_program_does_not_answer_for_the_result(name: str) -> None:
    code, tests = ANSWERING[name]
    if "import pandas" in tests:
        pytest.importorskip("pandas")
    assert reward(code, tests) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("name", HONEST)
def test_an_honest_result_passes(name: str) -> None:
    assert reward(*HONEST[name]) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("code", ["class Animal:\n    def speak(self): return '...'", "Animal = 3"])
def test_a_class_that_the_tests_derive_from_the_programs_is_a_fault_of_the_task(code: str) -> None:
    """No program can be judged by them, so that none earns 0."""
    tests = "class Dog(Animal):\n    def speak(self): return 'Woof'\nassert Dog().speak() == 'Woof'"
    if code.startswith("class"):
        with pytest.raises(NoReward, match="derive a class"):
            judge(code, tests)
    else:
        assert reward(code, tests) == 0.0


@pytest.mark.slow
def test_tables_cross_by_value() -> None:
    pytest.importorskip("pandas")
    code = (
        "import pandas as pd\ndef f(n): return pd.DataFrame({'a': range(n), 'b': ['x'] * n},"
        " index=list('pqr'[:n]))\ndef total(frame): return frame['a'].sum()\ndef column(frame):"
        " return frame['a']"
    )
    tests = (
        "import pandas as pd\nexpected = pd.DataFrame({'a': [0, 1], 'b': ['x', 'x']}, index=['p',"
        " 'q'])\npd.testing.assert_frame_equal(f(2), expected)\nassert f(2).equals(expected) and"
        " f(3).shape == (3, 2)\nassert total(expected) == 1 and list(column(expected)) == [0, 1]"
        " and f(2)['b'].tolist() == ['x', 'x']"
    )
    assert reward(code, tests) == 1.0
    assert reward(code.replace("range(n)", "[7] * n"), tests) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("test", [
    {"tests": "def check(candidate):\n    assert candidate([1, 2], 3) == 6 and sum([len('a'), 1]) == 2", "entry_point": "max"},
    {"tests": "def check(candidate):\n    assert candidate([1, 2], 3) == 6", "entry_point": "sum"},
    {"tests": "assert max([1, 2], 3) == abs(6)\nassert max([], 0) == len([])"},
])  # fmt: skip
def test_a_function_may_be_named_like_a_built_in_one(test: dict[str, Any]) -> None:
    name = test.get("entry_point", "max")
    code = f"import builtins\ndef {name}(xs, start): return builtins.sum(xs) + start"
    assert reward(code, **test) == 1.0
    assert reward(f"def {name}(xs, start): return 7", **test) == 0.0


@pytest.mark.slow
def test_a_long_output_is_compared_whole() -> None:
    code = "for n in range(int(input())): print('line', n)"
    expected = "\n".join(f"line {n}" for n in range(12_000))
    assert reward(code, [{"input": "12000", "output": expected}]) == 1.0
    assert reward(code, [{"input": "12001", "output": expected}]) == 0.0


@pytest.mark.slow
def test_the_verdict_says_that_a_result_is_no_plain_data() -> None:
    verdict = judge(
        "class T:\n    def __eq__(self, other): return True\ndef f(x): return T()",
        "assert f(1) == 1",
    )
    assert "plain data" in str(verdict.rewards[0].reason) and "T" in str(verdict.rewards[0].reason)


@pytest.mark.slow
@pytest.mark.parametrize("tests", [
    '[{"input": "2", "output": "4"}]', '{"inputs": ["2", "3"], "outputs": ["4", "6"]}',
    {"inputs": [["2"], ["3"]], "outputs": [["4"], ["6"]]}, [{"input": ["2", "1"], "output": ["4"]}],
])  # fmt: skip
def test_inputs_and_outputs_as_datasets_have_them(tests: Any) -> None:
    assert reward("print(2 * int(input()))", tests) == 1.0
    assert reward("print(3 * int(input()))", tests) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("tests", [
    [{"input": [2], "output": 4, "fn_name": "f"}], {"inputs": [[2]], "outputs": [4], "fn_name": "f"},
])  # fmt: skip
def test_arguments_of_a_function_are_no_input(tests: Any) -> None:
    with pytest.raises(NoReward):
        judge("def f(x): return 2 * x", tests)
