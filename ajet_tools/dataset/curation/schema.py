"""Infers the common shape of seeds, and validates generated rows against it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ajet_sdk.errors import TaskError
from ajet_sdk.tasks.row_names import QUERY_COLUMNS, is_answer
from ajet_tools.dataset.files.blocks import Row
from ajet_tools.dataset.files.values import KINDS, kind_of

OURS = ("task_id", "provenance")
"""Columns that are added to a row, never requested."""
LANGUAGE_FIELDS = ("language", "lang", "locale")
_NUMBER = re.compile(r"\s*[-+]?(\d[\d,]*\.?\d*|\.\d+)([eE][-+]?\d+)?\s*$")
_LONGEST = 4000


class Misfit(ValueError):
    """A generated row does not have the shape of the seeds; the message says where."""


def query_of(values: Mapping[str, object]) -> str | None:
    """Returns the column of a row's question, if any."""
    return next((name for name in QUERY_COLUMNS if isinstance(values.get(name), str)), None)


@dataclass
class _Node:
    """The shape of the values at a path."""

    path: str
    kind: str = "null"
    may_be_null: bool = False
    fields: dict[str, _Node] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    item: _Node | None = None
    allowed: tuple[str, ...] = ()
    """A few texts that recur; others are rejected."""
    constant: Any = None
    is_constant: bool = False
    numeric: bool = False
    """Whether the text is a number in every seed."""
    filled: bool = False
    """Whether the text is never empty."""
    longest: int = 0


class RowShape:
    """The shape of seeds: names, kinds, optional fields, lists of allowed words, numbers written as
    text.

    A field besides question and answer with the same value in every seed is a constant: it is not
    requested, but added to each row. Numbers and text are converted to each other where that is
    lossless.
    """

    def __init__(self, root: _Node, query: str | None) -> None:
        self._root = root
        self.query = query
        """The column of the question; None if it is in messages."""

    @classmethod
    def infer(cls, rows: Sequence[Row], *, free_language: bool = False) -> RowShape:
        """Infers the shape of the seeds. Raises TaskError, with two locations, if they differ in
        shape.

        With `free_language`, a constant field such as `language` is requested nevertheless.
        """
        queries: dict[str | None, str] = {}
        for row in rows:
            queries.setdefault(query_of(row.values), row.where)
        if len(queries) > 1:
            (first_query, first), (second_query, second), *_ = queries.items()
            raise TaskError(
                f"the seeds have different shapes: the question is in {first_query or 'messages'!r}"
                f" in {first} and in {second_query or 'messages'!r} in {second}. Make them"
                " the same (`ajet dataset filter --map`), or expand them separately"
            )
        root = _infer([(row.where, _given(row.values)) for row in rows], "")
        [query] = queries
        _mark_constants(root, query, free_language)
        return cls(root, query)

    def example(self, values: Mapping[str, object]) -> dict[str, object]:
        """Returns a row for a prompt, without fields that are not requested."""
        return _requested_fields(_given(values), self._root)

    def fit(self, values: Any) -> dict[str, object]:
        """Validates a row and adds the constants. Raises Misfit with the reason."""
        if not isinstance(values, Mapping):
            raise Misfit(f"a row is {KINDS[kind_of(values)]}, not an object")
        return _fit(_given(values), self._root)

    def allow(self, path: Sequence[str], values: Sequence[str]) -> None:
        """Allows more values at a path with a list of allowed values."""
        node: _Node | None = self._root if path else None
        for name in path:
            node = node.fields.get(name) if node is not None else None
        if node is not None and node.allowed:
            node.allowed = tuple(dict.fromkeys((*node.allowed, *values)))

    def describe(self) -> list[str]:
        """Returns a line per requested field, for a prompt."""
        return [
            line
            for node in self._root.fields.values()
            for line in _lines(node, node.path in self._root.required)
        ]


def _given(values: Mapping[str, object]) -> dict[str, object]:
    """Returns a row without the columns that are added to it."""
    return {name: value for name, value in values.items() if name not in OURS}


def _infer(values: Sequence[tuple[str, Any]], path: str) -> _Node:
    node = _Node(path, kind=_common_kind(values, path))
    node.may_be_null = any(value is None for _, value in values) and node.kind != "null"
    present = [(where, value) for where, value in values if value is not None]
    if node.kind == "object":
        _infer_fields(node, present)
    elif node.kind == "list":
        items = [(where, item) for where, value in present for item in value]
        node.item = _infer(items, f"{path}[]") if items else None
    elif node.kind == "text":
        texts = [value for _, value in present]
        node.filled = all(text.strip() for text in texts)
        node.longest = max(map(len, texts))
        node.numeric = len(texts) > 1 and all(_NUMBER.match(text) for text in texts)
        counts = Counter(texts)
        if len(texts) >= 4 and not node.numeric and min(counts.values()) >= 2:
            node.allowed = tuple(counts)
    if len(present) > 1 and len(present) == len(values) and node.kind not in ("object", "list"):
        node.is_constant = all(value == present[0][1] for _, value in present)
        node.constant = present[0][1] if node.is_constant else None
    return node


def _common_kind(values: Sequence[tuple[str, Any]], path: str) -> str:
    seen: dict[str, str] = {}
    for where, value in values:
        seen.setdefault(kind_of(value), where)
    seen.pop("null", None)
    if set(seen) == {"integer", "number"}:
        return "number"
    if len(seen) > 1:
        (first_kind, first), (second_kind, second), *_ = seen.items()
        raise TaskError(
            f"the seeds have different shapes: {path or 'the row'} is {KINDS[first_kind]} in"
            f" {first} and {KINDS[second_kind]} in {second}. Make them the same, or expand them"
            " separately"
        )
    return next(iter(seen), "null")


def _infer_fields(node: _Node, rows: Sequence[tuple[str, Any]]) -> None:
    names = dict.fromkeys(name for _, row in rows for name in row)
    _refuse_strangers(node.path, rows)
    for name in names:
        inner = [(where, row[name]) for where, row in rows if name in row]
        node.fields[name] = _infer(inner, f"{node.path}.{name}" if node.path else name)
    node.required = frozenset(name for name in names if all(name in row for _, row in rows))


def _refuse_strangers(path: str, rows: Sequence[tuple[str, Any]]) -> None:
    """Raises TaskError if two rows have no field in common."""
    filled = [(where, row) for where, row in rows if row]
    for where, row in filled[1:]:
        first, known = filled[0]
        if "[]" not in path and not set(row) & set(known):
            raise TaskError(
                f"the seeds have different shapes: {path or 'the row'} has {', '.join(known)} in"
                f" {first} and {', '.join(row)} in {where}. Make them the same (`ajet dataset filter"
                " --map`), or expand them separately"
            )


def _mark_constants(node: _Node, query: str | None, free_language: bool) -> None:
    """Unmarks constants that must be requested: question, answer, and values in lists."""
    for name, inner in node.fields.items():
        is_query = inner.path == query
        is_language = free_language and name.lower() in LANGUAGE_FIELDS
        is_asked = is_query or is_answer(name) or is_language
        if is_asked or name not in node.required:
            inner.is_constant = False
        if is_query or (is_asked and len(inner.allowed) < 2):
            inner.allowed = ()
        _mark_constants(inner, query, free_language)
    if node.item is not None:
        _unmark(node.item)


def _unmark(node: _Node) -> None:
    node.is_constant = False
    for inner in (*node.fields.values(), *([node.item] if node.item else [])):
        _unmark(inner)


def _requested_fields(values: Mapping[str, object], node: _Node) -> dict[str, object]:
    requested: dict[str, object] = {}
    for name, value in values.items():
        inner = node.fields.get(name)
        if inner is None or inner.is_constant:
            continue
        if isinstance(value, Mapping):
            requested[name] = _requested_fields(value, inner)
        else:
            requested[name] = value
    return requested


def _fit(values: Mapping[str, object], node: _Node) -> dict[str, object]:
    fitted: dict[str, object] = {}
    place = f"{node.path}." if node.path else ""
    unknown = [name for name in values if name not in node.fields]
    if unknown:
        raise Misfit(f"{place}{unknown[0]} is no field of the seeds")
    for name, inner in node.fields.items():
        if inner.is_constant:
            fitted[name] = inner.constant
        elif name in values:
            fitted[name] = _fit_value(values[name], inner)
        elif name in node.required:
            is_constant = all(child.is_constant for child in inner.fields.values())
            if inner.kind != "object" or not is_constant:
                raise Misfit(f"{place}{name} is missing")
            fitted[name] = _fit({}, inner)
    return fitted


def _fit_value(value: Any, node: _Node) -> Any:
    if value is None and (node.may_be_null or node.kind == "null"):
        return None
    value = _convert(value, node)
    kind = kind_of(value)
    if kind != node.kind and not (node.kind == "number" and kind == "integer"):
        raise Misfit(f"{node.path} is {KINDS[kind]}, not {KINDS[node.kind]}: {_short(value)}")
    if kind == "object":
        return _fit(value, node)
    if kind == "list" and node.item is not None:
        return [_fit_value(item, node.item) for item in value]
    if kind == "text":
        _check_text(value, node)
    return value


def _convert(value: Any, node: _Node) -> Any:
    """Converts between numbers and numeric text as in the seeds, else returns the value."""
    kind = kind_of(value)
    if node.kind == "text" and node.numeric and kind in ("integer", "number"):
        return json.dumps(value)
    if node.kind in ("integer", "number") and kind == "text" and _NUMBER.match(value):
        text = value.replace(",", "").strip()
        if re.fullmatch(r"[-+]?\d{1,18}", text):
            return int(text)
        return float(text)
    if node.kind == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _check_text(text: str, node: _Node) -> None:
    if node.filled and not text.strip():
        raise Misfit(f"{node.path} is empty")
    if node.numeric and not _NUMBER.match(text):
        raise Misfit(f"{node.path} is not a number, as in the seeds: {_short(text)}")
    if node.allowed and text not in node.allowed:
        raise Misfit(
            f"{node.path} is {_short(text)}, and in the seeds only"
            f" {', '.join(map(repr, node.allowed))}"
        )
    if len(text) > max(_LONGEST, 20 * node.longest):
        raise Misfit(
            f"{node.path} is {len(text):,} characters long, and in the seeds at most"
            f" {node.longest:,}"
        )


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:59] + "…"


def _lines(node: _Node, required: bool) -> Iterator[str]:
    if node.is_constant:
        return
    if node.kind == "object":
        for name, inner in node.fields.items():
            yield from _lines(inner, required and name in node.required)
        return
    description = KINDS[node.kind]
    if node.numeric:
        description = "a number, written as text"
    if node.allowed:
        description = "one of " + ", ".join(
            json.dumps(text, ensure_ascii=False) for text in node.allowed
        )
    ending = "" if required else "; may be left out"
    yield f"{node.path}: {description}{' or null' if node.may_be_null else ''}{ending}"
