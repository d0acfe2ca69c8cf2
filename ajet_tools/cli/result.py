"""What a command returns: a dataclass, which `print_result` alone prints, as JSON or as text.

A command is annotated with the `Result` that it returns. It then has the option `--json`, and its
exit code is the result's.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from ajet_sdk.reporting.output import echo, json_line

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from rich.console import Console

HIDDEN = {"json": False}
"""Metadata of a field that is no part of the JSON."""


class Result:
    """Base of the results of commands. The fields of the dataclass are the keys of its JSON."""

    @property
    def exit_code(self) -> int:
        return 0

    @property
    def failure(self) -> BaseException | None:
        """What is raised after the result was printed."""
        return None

    paged: ClassVar[bool] = False
    """Whether text that is longer than the terminal goes through a pager."""
    beside_rows: ClassVar[bool] = False
    """Whether the command writes a file, which may be stdout: the text goes to stderr."""

    @property
    def compact(self) -> bool:
        """Whether stdout has the command's rows: the JSON is one line of stderr."""
        return False

    def document(self) -> object:
        """Returns what `--json` prints; a subclass overrides it if that is no object of fields."""
        return visible_fields(self)

    def show(self, out: Console) -> None:
        """Prints the result for people."""
        raise NotImplementedError


class TextResult(Result):
    """A result whose text is lines. Rich, which takes long to import, isn't needed for them."""

    def lines(self) -> Iterable[str]:
        raise NotImplementedError


def print_result(result: Result, *, as_json: bool) -> None:
    to_stderr = result.beside_rows or result.compact
    if as_json:
        indent = None if result.compact else 2
        print_json(result.document(), indent=indent, err=result.compact)
        return
    if isinstance(result, TextResult):
        for line in result.lines():
            echo(line, err=to_stderr)
        return
    if sys.stdout is None or sys.stdout.closed:  # closed by users' code
        return
    tables = importlib.import_module("ajet_tools.text.tables")  # loads rich
    if result.paged and not to_stderr:
        with tables.paged() as out:
            result.show(out)
    else:
        result.show(tables.console(stderr=to_stderr))


def visible_fields(value: DataclassInstance | Result) -> dict[str, object]:
    """Returns the fields of a dataclass by name, but for those with the metadata `HIDDEN`."""
    fields = dataclasses.fields(value)  # type: ignore[arg-type]  # a result is a dataclass
    return {field.name: getattr(value, field.name) for field in fields if field.metadata != HIDDEN}


def print_json(value: object, *, indent: int | None = 2, err: bool = False) -> None:
    """Prints a value as JSON: dataclasses as objects (without fields of metadata `json: False`),
    NaN and infinities as null."""
    echo(json_line(_finite(value), indent=indent), err=err)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = visible_fields(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value
