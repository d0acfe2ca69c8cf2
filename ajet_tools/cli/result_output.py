"""Prints the result of a command. Apart from `result`, since rich takes long to import."""

from __future__ import annotations

import sys

from ajet_tools.cli.result import Result, print_json
from ajet_tools.text.tables import console, paged


def print_result(result: Result, *, as_json: bool) -> None:
    if as_json:
        indent = None if result.compact else 2
        print_json(result.document(), indent=indent, err=result.compact)
        return
    if sys.stdout is None or sys.stdout.closed:  # closed by users' code
        return
    if result.beside_rows or result.compact:
        result.show(console(stderr=True))
        return
    if not result.paged:
        result.show(console())
        return
    with paged() as out:
        result.show(out)
