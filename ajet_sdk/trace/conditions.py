"""What the filter of a scan says: the columns that it names, and the ids of all rows that it lets
through.

DuckDB gives it as an Arrow expression, of which pyarrow shows no parts. Its serialized form has
them: https://arrow.apache.org/docs/cpp/api/compute.html (`compute::Serialize`). Constants are the
columns of a record batch, whose metadata spell the expression.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

_IDS = ("episode_id", "call_id", "run_id", "digest")
_ID = re.compile(r"[0-9A-Za-z_-]+")
_ENTRY = re.compile(r"^(\w+): '(.*)'$", re.MULTILINE)
_AND = ("and", "and_kleene")


@dataclass
class _Part:
    """A call, a column or a constant of an expression."""

    kind: str
    """The name of the function of a call, else `field_ref` or `literal`."""
    value: Any = None
    """The column's name, the constant, or the options of a call."""
    arguments: list[_Part] = field(default_factory=list)


def columns_in(condition: Any) -> set[str]:
    """The columns that an expression names."""
    return {part.value for part in _all_parts(_parsed(condition)) if part.kind == "field_ref"}


def ids_in(condition: Any) -> tuple[str | None, tuple[str, ...]]:
    """A column with the ids of all rows that an expression lets through; None if it names none."""
    for part in _conjuncts(_parsed(condition)):
        column, ids = _ids_of(part)
        if column in _IDS and all(_is_id(value) for value in ids):
            return column, tuple(map(str, ids))
    return None, ()


def _is_id(value: object) -> bool:
    return isinstance(value, str) and _ID.fullmatch(value) is not None


def _ids_of(part: _Part) -> tuple[str | None, Sequence[object]]:
    """The column and the values of `column = value` or `column IN (values)`."""
    kinds = [argument.kind for argument in part.arguments]
    if part.kind == "equal" and kinds == ["field_ref", "literal"]:
        return part.arguments[0].value, [part.arguments[1].value]
    if part.kind == "if_else" and kinds[1:] == ["is_in", "literal"]:
        # `column IN (values)` is NULL for a NULL
        otherwise = part.arguments[2].value
        return (None, []) if otherwise else _ids_of(part.arguments[1])
    if part.kind == "is_in" and kinds == ["field_ref"]:
        return part.arguments[0].value, list((part.value or {}).get("value_set") or [])
    return None, []


def _conjuncts(part: _Part) -> Iterator[_Part]:
    """The parts that must all hold."""
    if part.kind in _AND:
        for argument in part.arguments:
            yield from _conjuncts(argument)
    else:
        yield part


def _all_parts(part: _Part) -> Iterator[_Part]:
    yield part
    for argument in part.arguments:
        yield from _all_parts(argument)


def _parsed(condition: Any) -> _Part:
    _, (serialized,) = condition.__reduce__()
    batch = pa.ipc.open_file(serialized).get_batch(0)
    constants = [column[0].as_py() for column in batch.columns]
    open_calls = [_Part("expression")]
    # Not `schema.metadata`, which is a dict: the keys repeat.
    for key, value in _ENTRY.findall(batch.schema.to_string(truncate_metadata=False)):
        if key == "call":
            open_calls.append(_Part(value))
        elif key == "end":
            ended = open_calls.pop()
            open_calls[-1].arguments.append(ended)
        elif key == "options":
            open_calls[-1].value = constants[int(value)]
        elif key in ("literal", "field_ref"):
            known = constants[int(value)] if key == "literal" else value
            open_calls[-1].arguments.append(_Part(key, known))
    [whole] = open_calls[0].arguments
    return whole
