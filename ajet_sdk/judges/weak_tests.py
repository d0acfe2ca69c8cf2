"""Names the assertions in a task's tests that a program passes, each run without the others."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

from ajet_sdk.judges.code import run_tests
from ajet_sdk.sandbox.collect import is_assertion
from ajet_sdk.sandbox.run import ProgramLimits

_MOST = 20
"""Assertions of a task that are run one by one."""
_LONGEST = 200


async def passed_by(
    code: str, tests: object, entry_point: object, *, limits: ProgramLimits, unfenced: bool
) -> list[str]:
    """The assertions of tests that a program passes, at most the first 20 of which are tried."""
    passed = []
    for name, text in _single_assertions(tests):
        tested = await run_tests(code, text, entry_point, limits=limits, unfenced=unfenced)
        if tested.total and tested.passed == tested.total and not tested.fault:
            passed.append(name)
    return passed


def _single_assertions(tests: object) -> Iterator[tuple[str, str]]:
    """Each assertion as text, with the tests without all other assertions."""
    if isinstance(tests, list | tuple):
        tests = "\n".join(test for test in tests if isinstance(test, str))
    try:
        tree = ast.parse(str(tests))
    except (SyntaxError, ValueError):
        return
    count = sum(map(_is_checking, ast.walk(tree)))
    for place in range(min(count, _MOST)):
        single = _Single(place)
        alone = single.visit(copy.deepcopy(tree))
        yield single.name, ast.unparse(ast.fix_missing_locations(alone))


def _is_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.Assert) or (isinstance(node, ast.Expr) and is_assertion(node.value))


class _Single(ast.NodeTransformer):
    """Leaves one assertion of a tree in it."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.count = 0
        self.name = ""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return self._statement(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return self._statement(node) if is_assertion(node.value) else node

    def _statement(self, node: ast.stmt) -> ast.AST:
        self.count += 1
        if self.count - 1 != self.place:
            return ast.copy_location(ast.Pass(), node)
        self.name = ast.unparse(node)[:_LONGEST]
        return node
