"""Collects the tests in a text, runs those that the text does not run itself, and compares both
counts.

A test that never ran cannot fail, so that a wrong program would pass. Tests are: functions and
methods whose name begins with `test`, and functions without parameters that contain an assertion.
Each of them records that it was entered. What is left after the text has run is run here; what
cannot be run is reported.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

_ASSERTING = ("assert", "fail")
"""Beginnings of the names of unittest's and numpy's methods that check something."""
_SET_UP = ("setup_method", "setUp")
_TEAR_DOWN = ("teardown_method", "tearDown")


def is_assertion(node: ast.AST) -> bool:
    """Whether a node checks something: an `assert` statement, or a call such as
    `self.assertEqual`.
    """
    if isinstance(node, ast.Assert):
        return True
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr.startswith(_ASSERTING)
    )


class Collected:
    """The tests of a text: their names, and those that were entered."""

    def __init__(self, tree: ast.Module, asked: Callable[[], int]) -> None:
        """Marks each test in `tree`, so that it records that it was entered. `asked` counts
        requests of the program.
        """
        self.names: list[str] = []
        self.entered: set[int] = set()
        self.left_out: set[str] = set()
        """Tests that skip themselves without having asked the program anything."""
        self.asked = asked
        self._collect(tree.body, "", of_class=False)

    def _collect(self, body: list[ast.stmt], place: str, *, of_class: bool) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                named = node.name.startswith("test")
                # A function with parameters is a helper of the tests.
                alone = (
                    not of_class
                    and not _has_parameters(node)
                    and any(map(is_assertion, ast.walk(node)))
                )
                if named or alone:
                    self._mark(node, place + node.name)
            elif isinstance(node, ast.ClassDef):
                self._collect(node.body, f"{place}{node.name}.", of_class=True)
            elif isinstance(
                node, ast.If | ast.Try | ast.With
            ):  # definitions may depend on a version or an import
                for field in ("body", "orelse", "finalbody"):
                    self._collect(getattr(node, field, []), place, of_class=of_class)

    def _mark(self, node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> None:
        call = ast.Call(ast.Name("__entered__", ast.Load()), [ast.Constant(len(self.names))], [])
        has_docstring = isinstance(node.body[0], ast.Expr) and isinstance(
            node.body[0].value, ast.Constant
        )
        node.body.insert(int(has_docstring), ast.Expr(call))
        self.names.append(name)

    def run_remaining(self, names: Mapping[str, Any]) -> str:
        """Run the tests that were not entered; returns why some cannot run, or an empty text.

        Raises what a test raises.
        """
        set_up = names.get("setUpModule") or names.get("setup_module")
        if callable(set_up):
            set_up()
        values = list(names.values())
        for value in values:
            if (
                isinstance(value, types.FunctionType)
                and self._is_left(value.__name__)
                and not _required_of(value)
            ):
                _finish(value())
        classes = [
            value for value in values if isinstance(value, type) and value.__module__ == "__main__"
        ]
        for kind in classes:
            if _is_case(kind) and self._has_tests(kind):
                self._run_case(kind)
        for (
            kind
        ) in classes:  # last, since the tests of a mixin run with the case that it is mixed into
            if not _is_case(kind) and self._has_tests(kind):
                self._run_class(kind)
        for tear_down in (names.get("tearDownModule"), names.get("teardown_module")):
            if callable(tear_down):
                tear_down()
        left = [name for name in self._left() if name not in self.left_out]
        if left:
            return f"{len(left)} of {len(self.names)} tests never ran: {', '.join(left[:5])}"
        if self.names and self.left_out.issuperset(self.names):
            return f"all {len(self.names)} tests skip themselves"
        return ""

    def _left(self) -> list[str]:
        return [name for number, name in enumerate(self.names) if number not in self.entered]

    def _is_left(self, name: str) -> bool:
        return name in self._left()

    def _has_tests(self, kind: type) -> bool:
        """Whether a class has a test of its own or of a base that has not run."""
        names = {
            f"{base.__name__}.{name}"
            for base in kind.__mro__
            for name in vars(base)
            if name.startswith("test")
        }
        # A subclass runs the tests of its bases anew, as unittest does.
        return bool(names & set(self.names if _is_case(kind) else self._left()))

    def _run_class(self, kind: type) -> None:
        if inspect.signature(kind).parameters:
            return
        for name in [name for name in dir(kind) if name.startswith("test")]:
            method = getattr(kind(), name)
            instance = method.__self__ if inspect.ismethod(method) else None
            if _required_of(method):
                continue
            _call(instance, _SET_UP, method)
            _finish(method())
            _call(instance, _TEAR_DOWN, method)

    def _run_case(self, kind: type) -> None:
        unittest: Any = importlib.import_module("unittest")
        for test in unittest.defaultTestLoader.loadTestsFromTestCase(kind):
            before = self.asked()
            result = unittest.TestResult()
            unittest.TestSuite([test]).run(result)
            if not result.wasSuccessful():
                failed = (*result.failures, *result.errors, (None, "a test passes that must not"))
                raise AssertionError(failed[0][1])
            if result.skipped and self.asked() > before:
                # Otherwise a program could have its tests skipped.
                raise AssertionError(
                    f"a test skips itself after it has used the program: {result.skipped[0][1]}"
                )
            if result.skipped:
                name = test.id().rpartition(".")[2]
                self.left_out |= {f"{base.__name__}.{name}" for base in kind.__mro__}


def _is_case(kind: type) -> bool:
    return "unittest" in sys.modules and issubclass(
        kind, importlib.import_module("unittest").TestCase
    )


def _has_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(isinstance(part, ast.arg) for part in ast.walk(node.args))


def _required_of(function: Any) -> bool:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return any(
        parameter.default is parameter.empty and parameter.kind not in kinds
        for parameter in parameters
    )


def _call(instance: object, names: tuple[str, ...], method: object) -> None:
    for name in names:
        function = getattr(instance, name, None)
        if callable(function):
            function(*([method] if _required_of(function) else []))


def _finish(result: Any) -> None:
    """Runs a test that is a coroutine."""
    if inspect.iscoroutine(result):
        importlib.import_module("asyncio").run(result)  # 40 ms that few tests need
