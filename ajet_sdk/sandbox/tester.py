"""Runs a program and its tests in two processes: `serve` is the program's side, `test` that of the tests.

Both are started by `judges/code.py` as source text, since nothing of ajet can be imported in a fence, with a socket as
standard input and output. The verdict goes to standard error of the tests, which the program cannot access.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import inspect
import io
import json
import os
import sys
import traceback
import types
from typing import Any

from ajet_sdk.sandbox.peer import Gone, Peer, Remote

MODULES = {name: name for name in (*sys.stdlib_module_names, "numpy", "pandas")} | {"np": "numpy", "pd": "pandas"}
"""Modules that tests may use without an import, regardless of the program's names."""


def serve(code: str) -> None:
    """Answer requests of the tests: first to run the program, then to call its functions."""
    peer = Peer(code)
    sys.modules["__main__"] = peer.module
    try:
        while True:
            peer.answer(*peer.receive()[1:])
    except Gone:
        os._exit(0)


class Names(dict[str, Any]):
    """Global names of the tests: their own, then the program's, then built-in ones."""

    def __init__(self, peer: Peer, tree: ast.Module) -> None:
        super().__init__(__name__="__main__", __in_place__=in_place)
        loads = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        holders = {
            node.value.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        self.peer, self.modules = peer, {name: MODULES[name] for name in holders & MODULES.keys()}
        names = loads - self.modules.keys()
        # `abs` is the built-in even if the program defines it, unless the tests use no other name.
        self.program_names = names if len(names) == 1 else {name for name in names if not hasattr(builtins, name)}

    def __missing__(self, name: str) -> object:
        if name in self.modules:
            return importlib.import_module(self.modules[name])
        if name not in self.program_names or name.startswith("__"):
            raise KeyError(name)
        return self.peer.ask("name", name)


class InPlace(ast.NodeTransformer):
    """Lets a call to the program change its arguments if it is a whole statement, but not within an `assert`."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return self.visit_statement(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        return self.visit_statement(node)

    def visit_statement(self, node: ast.Expr | ast.Assign) -> ast.AST:
        if isinstance(node.value, ast.Call):
            node.value.func = ast.Call(ast.Name("__in_place__", ast.Load()), [node.value.func], [])
        return node


def in_place(function: object) -> object:
    if not isinstance(function, Remote):
        return function
    return lambda *arguments, **named: function._peer.ask("in place", function, arguments, named)


def run(tests: str, peer: Peer) -> None:
    """Run the tests' text, then the test functions and test cases that it does not call itself."""
    tree = ast.parse(tests)
    names = Names(peer, tree)
    loads = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    peer.ask("load")
    if "unittest" in tests:
        importlib.import_module("unittest").main = lambda *_, **__: None  # type: ignore[attr-defined]
    exec(compile(ast.fix_missing_locations(InPlace().visit(tree)), "tests.py", "exec", dont_inherit=True), names)
    for name, value in list(names.items()):
        if isinstance(value, types.FunctionType) and name.startswith("test") and name not in loads:
            if not inspect.signature(value).parameters:
                value()
        elif isinstance(value, type) and "unittest" in sys.modules:
            unittest = importlib.import_module("unittest")
            if issubclass(value, unittest.TestCase) and value.__module__ == "__main__":
                result = unittest.TestResult()
                unittest.defaultTestLoader.loadTestsFromTestCase(value).run(result)
                if not result.wasSuccessful():
                    raise AssertionError(
                        (*result.failures, *result.errors, (None, "a test passes that must not"))[0][1]
                    )


def test(tests: str, nonce: str) -> None:
    """Run tests on the program at the other end, and write the verdict to ajet."""
    verdict = os.fdopen(os.dup(2), "w")
    peer = Peer()
    os.dup2(1, 2)
    sys.modules["__main__"] = peer.module
    sys.stdout = sys.stderr = io.StringIO()
    with contextlib.suppress(OSError):  # outside of a fence the program could read it
        os.unlink(sys.argv[0])  # noqa: PTH108
    why = ""
    try:
        run(tests, peer)
    except BaseException as error:  # noqa: BLE001 - SystemExit is no pass
        why = "\n".join(traceback.format_exception_only(error)).strip() or "failed"
    if peer.gone:
        why = "the program ended while it was tested"
    report = {"passed": not why, "why": why[-2000:], "gone": peer.gone, "asked": peer.asked}
    verdict.write(f"{nonce}{json.dumps(report)}\n")
    verdict.flush()
    os._exit(0)
