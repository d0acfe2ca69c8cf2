"""What a command returns: a dataclass, which `result_output` alone prints, as JSON or as text.

A command is annotated with the `Result` that it returns. It then has the option `--json`, and its
exit code is the result's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from ajet_sdk.reporting.output import echo, json_line

if TYPE_CHECKING:
    from rich.console import Console

HIDDEN = {"json": False}
"""Metadata of a field that is no part of the JSON."""


class Result:
    """Base of the results of commands. The fields of the dataclass are the keys of its JSON."""

    @property
    def exit_code(self) -> int:
        return 0

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
        return self

    def show(self, out: Console) -> None:
        """Prints the result for people."""
        raise NotImplementedError


def print_json(value: object, *, indent: int | None = 2, err: bool = False) -> None:
    """Prints a value as JSON: dataclasses as objects (without fields of metadata `json: False`),
    NaN and infinities as null."""
    echo(json_line(_finite(value), indent=indent), err=err)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field for field in dataclasses.fields(value) if field.metadata.get("json", True)]
        value = {field.name: getattr(value, field.name) for field in fields}
    if isinstance(value, Mapping):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value
