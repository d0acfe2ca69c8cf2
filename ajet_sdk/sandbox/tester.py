"""Runs a program and its tests in two processes: `serve` is the program's side, `test` that of the
tests.

Both are started by `judges/code.py` as source text, since nothing of ajet can be imported in a
fence, with a socket as standard input and output. The verdict goes to standard error of the tests,
which the program cannot access.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib
import importlib.util
import io
import json
import os
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

from ajet_sdk.sandbox.collect import Collected, is_assertion
from ajet_sdk.sandbox.peer import Gone, Peer
from ajet_sdk.sandbox.plain import names_of_plain_data
from ajet_sdk.sandbox.remote import Remote

MODULES = {name: name for name in (*sys.stdlib_module_names, "numpy", "pandas")} | {
    "np": "numpy",
    "pd": "pandas",
}
"""Modules that tests may use without an import, regardless of the program's names."""
COMPARING = (
    "abs",
    "all",
    "any",
    "len",
    "set",
    "sorted",
    "list",
    "tuple",
    "round",
    "isinstance",
    "print",
)
"""Built-in functions that tests call around the program's."""


PROGRAM_MODULE = "solution"
"""The module that tests import the program from, in KodCode's dataset and others."""


class ProgramModule(types.ModuleType):
    """The program, as a module of the tests."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(PROGRAM_MODULE)
        self._peer = peer

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self._peer.ask("name", name, grade=self._peer.grade_of(name))
        except KeyError:
            raise AttributeError(name) from None


def serve(code: str) -> None:
    """Answer requests of the tests: first to run the program, then to call its functions."""
    peer = Peer(code)
    # Not as `__main__`: programs run examples, or read input, if they are.
    peer.module.__name__ = PROGRAM_MODULE
    sys.modules["__main__"] = sys.modules[PROGRAM_MODULE] = peer.module
    try:
        while True:
            peer.answer(*peer.receive()[1:])
    except Gone:
        os._exit(0)


class Names(dict[str, Any]):
    """Global names of the tests: their own, then the program's, then built-in ones."""

    def __init__(self, peer: Peer, tree: ast.Module, entry: str) -> None:
        """`entry`: the program's function or expression that the tests are for, if the task names
        it.
        """
        super().__init__(
            __name__="__main__",
            __begin__=peer.begin,
            __settled__=peer.settled,
            __identity__=peer.identity,
            __type__=type_of,
        )
        loads = {
            node.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        }
        holders = {
            node.value.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        self.peer = peer
        self.modules = {name: MODULES[name] for name in holders & MODULES.keys()}
        names = loads - self.modules.keys()
        # `abs` is the built-in even if the program defines it, unless it is the function under
        # test.
        entry_names = {node.id for node in ast.walk(ast.parse(entry)) if isinstance(node, ast.Name)}
        self.program_names = {
            name for name in names if name in entry_names or not hasattr(builtins, name)
        }
        if not self.program_names - assigned(tree):
            self.program_names |= under_test(tree, names)
        self.peer.makers = constructing(tree)

    def __missing__(self, name: str) -> object:
        if name in self.modules:
            return importlib.import_module(self.modules[name])
        if name not in self.program_names or name.startswith("__"):
            raise KeyError(name)
        return self.peer.ask("name", name, grade=self.peer.grade_of(name))


def assigned(tree: ast.Module) -> set[str]:
    """Names that the tests define anywhere."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
    return names


def under_test(tree: ast.Module, names: set[str]) -> set[str]:
    """The function that tests are for, if all they call is named like built-in ones: the first
    within an assertion.
    """
    if len(names) == 1:
        return names
    called: list[str] = []
    for statement in ast.walk(tree):
        if not isinstance(statement, ast.Assert):
            continue
        for call in ast.walk(statement):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                called.append(call.func.id)
    called = [name for name in called if name in names]
    for name in called:
        if name not in COMPARING:
            return {name}
    return set(called[:1])


def constructing(tree: ast.Module) -> set[str]:
    """Names from which tests get objects, by how they use them; those of methods begin with a dot.

    They are named as classes are; or what they return has an attribute that no plain data has, or
    is compared with an object.
    """
    sources = _sources(tree)

    def source(value: ast.expr) -> str:
        """The function, class or method that an expression comes from, also by way of a
        variable."""
        while isinstance(value, ast.Subscript):
            value = value.value
        if isinstance(value, ast.Name):
            made_by = sources.get(value.id, {value.id})
            return next(iter(made_by)) if len(made_by) == 1 else ""
        return _maker(value)

    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _is_class_name(_maker(node)):
            names.add(_maker(node))
        elif isinstance(node, ast.Name) and _is_class_name(node.id) and not node.id.isupper():
            names.add(node.id)  # a name in capitals alone may be a constant
        elif isinstance(node, ast.Compare) and len(node.comparators) == 1:
            sides = [source(node.left), source(node.comparators[0])]
            if any(map(_is_class_name, sides)):
                names.update(sides)
        elif isinstance(node, ast.Attribute) and node.attr not in names_of_plain_data():
            names.add(source(node.value))
            names.add(_first_maker(node.value))
    return names - {""}


def _sources(tree: ast.Module) -> dict[str, set[str]]:
    """Variables of the tests with the functions, classes and methods that their values come
    from."""
    sources: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        pairs: list[tuple[ast.expr | None, ast.expr]] = []
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.withitem):
            pairs = [(node.optional_vars, node.context_expr)]
        elif isinstance(node, ast.For | ast.comprehension):
            pairs = [(node.target, node.iter)]
        for target, value in pairs:
            if isinstance(target, ast.Name):
                sources.setdefault(target.id, set()).add(_maker(value))
    return sources


def _is_class_name(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _maker(value: ast.expr) -> str:
    """The function, class or method that an expression calls, also for an item of its result."""
    while isinstance(value, ast.Subscript):
        value = value.value
    if not isinstance(value, ast.Call):
        return ""
    if isinstance(value.func, ast.Attribute):
        return f".{value.func.attr}"
    return value.func.id if isinstance(value.func, ast.Name) else ""


def _first_maker(value: ast.expr) -> str:
    """The function or class with which a chain of methods begins: `calc` of `calc(1).add(2)`."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        value = value.func.value
    return _maker(value)


_VALUES: dict[type[ast.AST], str] = {
    ast.Expr: "value",
    ast.Assign: "value",
    ast.AnnAssign: "value",
    ast.AugAssign: "value",
    ast.Return: "value",
    ast.Assert: "test",
    ast.If: "test",
    ast.While: "test",
    ast.For: "iter",
    ast.AsyncFor: "iter",
}
"""Statements with the field of the expression that they evaluate first."""


class Settled(ast.NodeTransformer):
    """Applies what calls changed in their arguments once an expression is evaluated, so that both
    sides of a comparison are of the same state; and lets `is` and `type` see objects behind their
    copies and proxies.
    """

    def visit(self, node: ast.AST) -> ast.AST:
        node = self.generic_visit(node)
        if isinstance(node, ast.Compare):
            _settle_items(node)
            return _with_identities(node)
        if isinstance(node, ast.Attribute) and node.attr == "__class__":
            return _call("__type__", node.value)
        if isinstance(node, ast.Call):
            return _of_objects(node)
        field = _VALUES.get(type(node))
        value = None if field is None else getattr(node, field)
        if field is not None and value is not None:
            setattr(node, field, _settled(value))
        return node


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


def _settled(value: ast.expr) -> ast.expr:
    """An expression after which changes are applied; also after each operand of `and` and `or`."""
    if not any(isinstance(part, ast.Call) for part in ast.walk(value)):
        return value
    if isinstance(value, ast.BoolOp):
        value.values = [_settled(operand) for operand in value.values]
        return value
    return _call("__settled__", _call("__begin__"), value)


def _settle_items(node: ast.Compare) -> None:
    """Apply changes after each item of `(pop(xs), len(xs)) == (3, 2)`, as Python does.

    Only where the other side is constant: a call must not change what its result is compared with.
    """
    sides = [node.left, *node.comparators]
    for place, side in enumerate(sides):
        others = sides[:place] + sides[place + 1 :]
        if isinstance(side, ast.Tuple | ast.List) and all(map(_is_constant, others)):
            side.elts = [
                item if isinstance(item, ast.Starred) else _settled(item) for item in side.elts
            ]


def _is_constant(value: ast.expr) -> bool:
    return not any(isinstance(part, ast.Name | ast.Call) for part in ast.walk(value))


def _with_identities(node: ast.Compare) -> ast.Compare:
    """Let `a is b` compare what a and b stand for."""
    if len(node.ops) == 1 and isinstance(node.ops[0], ast.Is | ast.IsNot):
        node.left = _call("__identity__", node.left)
        node.comparators = [_call("__identity__", node.comparators[0])]
    return node


def _of_objects(node: ast.Call) -> ast.Call:
    """Let calls that ask for identities and types see what their arguments stand for."""
    named = node.func.id if isinstance(node.func, ast.Name) else ""
    if named == "type" and len(node.args) == 1:
        node.func = ast.Name("__type__", ast.Load())
    elif named == "id" and len(node.args) == 1:
        node.args = [_call("__identity__", node.args[0])]
    elif isinstance(node.func, ast.Attribute) and node.func.attr in ("assertIs", "assertIsNot"):
        node.args = [_call("__identity__", argument) for argument in node.args[:2]] + node.args[2:]
    return node


def type_of(value: object) -> object:
    """The type of a value; of a program's object, the program's class."""
    if isinstance(value, Remote):
        return value._peer.ask("type", value)
    return type(value)


def share_seeds(tests: str, peer: Peer) -> None:
    """Let seeds that the tests set be those of the program's random numbers, too."""
    if "seed" not in tests:
        return
    for name in ("random", "numpy.random"):
        if name == "numpy.random" and "numpy" not in sys.modules:
            continue
        module = importlib.import_module(name)
        module.seed = functools.partial(_seed, module.seed, name, peer)  # type: ignore[attr-defined]


def _seed(
    seed: Callable[..., object], module: str, peer: Peer, /, *values: object, **named: object
) -> None:
    seed(*values, **named)
    peer.ask("seed", module, values, named)


def run(tests: str, entry: str, peer: Peer) -> str:
    """Run the tests' text, then the tests in it that it does not run itself; returns why some never
    ran.
    """
    tree = ast.parse(tests)
    for module in (
        "numpy",
        "pandas",
    ):  # what counts as plain data depends on them, before the tests import them
        if module in tests and importlib.util.find_spec(module) is not None:
            importlib.import_module(module)
    names = Names(peer, tree, entry)
    if importlib.util.find_spec(PROGRAM_MODULE) is None:
        sys.modules[PROGRAM_MODULE] = ProgramModule(peer)
    for node in ast.walk(tree):
        if not isinstance(node, ast.With):
            continue
        for statement in node.body:
            if any(map(is_assertion, ast.walk(statement))):
                peer.with_assertions.add(node.lineno)
    collected = Collected(tree, lambda: peer.asked)
    names["__entered__"] = collected.entered.add
    peer.ask("load")
    share_seeds(tests, peer)
    if "unittest" in tests:
        importlib.import_module("unittest").main = lambda *_, **__: None  # type: ignore[attr-defined]
    Settled().visit(tree)
    ast.fix_missing_locations(tree)
    exec(compile(tree, "tests.py", "exec", dont_inherit=True), names)
    return collected.run_remaining(names)


def test(tests: str, nonce: str, entry: str) -> None:
    """Run tests on the program at the other end, and write the verdict to ajet."""
    verdict = os.fdopen(os.dup(2), "w")
    peer = Peer()
    os.dup2(1, 2)
    sys.modules["__main__"] = peer.module
    sys.stdout = sys.stderr = io.StringIO()
    with contextlib.suppress(OSError):  # outside of a fence the program could read it
        os.unlink(sys.argv[0])  # noqa: PTH108
    why = fault = ""
    try:
        fault = run(tests, entry, peer)
    except BaseException as error:  # noqa: BLE001 - SystemExit is no pass
        why = "\n".join(traceback.format_exception_only(error)).strip() or "failed"
    if why and peer.refused and peer.refused not in why:
        why += f" ({peer.refused})"
    if peer.gone:
        why = "the program ended while it was tested"
    report = {
        "passed": not why,
        "why": why[-2000:],
        "gone": peer.gone,
        "asked": peer.asked,
        "fault": fault,
        "cannot": peer.cannot,
    }
    verdict.write(f"{nonce}{json.dumps(report)}\n")
    verdict.flush()
    os._exit(0)
