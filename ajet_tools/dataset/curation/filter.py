"""The filter language for rows: `metadata.difficulty>=3 text~"train" chars<500 language=en`.

It has the grammar of `ajet trace ls --filter` (`ajet_tools.text.grammar`). A field is a column
(`main_query`), a path (`metadata.answer`, `messages.0.content`), a path with `.chars` or `.count`
(the length of a text or list), or one of `DERIVED`. A bare word is searched for in the row's text.
`none` matches null and missing values; `~ "regex:..."` is a regular expression. A list matches if
one of its items does.
"""

from __future__ import annotations

import difflib
import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from ajet_sdk.errors import AjetError, ConfigError
from ajet_sdk.tasks.questions import text_of
from ajet_sdk.tasks.task_rows import to_task
from ajet_tools.dataset.curation.language import language_of
from ajet_tools.dataset.files.blocks import QUERIES, Block, Irregular, LineBlock, Row, TableBlock
from ajet_tools.dataset.files.lines import Path
from ajet_tools.dataset.files.places import Columns
from ajet_tools.dataset.files.values import ABSENT, POSITION, find_at
from ajet_tools.text.grammar import BareWord, Comparison, FilterError, Node, Token, fold, tree

DERIVED = {
    "text": "the row's question: its query, else its last user message, else all its strings",
    "chars": "number of characters of that text",
    "words": "number of its words, split at white space",
    "language": "its language, such as en or zh; und if undetermined",
    "task_id": "the row's task id; without one, derived from its content",
}
"""Fields derived from a row; a column of the same name takes precedence."""


class _View:
    def __init__(self, values: Mapping[str, object]) -> None:
        self.values = values

    @cached_property
    def text(self) -> str:
        return text_of(self.values)

    def derived(self, name: str) -> object:
        return task_id_of(self.values) if name == "task_id" else _OF_TEXT[name](self.text)


_OF_TEXT: dict[str, Callable[[str], object]] = {
    "text": str,
    "chars": len,
    "words": lambda text: len(text.split()),
    "language": language_of,
}


@dataclass(frozen=True)
class _Condition:
    """A comparison, or a word to search for in a row's text."""

    field: str
    steps: tuple[str, ...]
    """The path of its column; empty for a bare word."""
    tests: Sequence[Callable[[object], bool]]
    values: Sequence[str] = ()
    """The values to compare with; empty for a bare word."""
    by_text: bool = False
    """Whether the spelling of a value matters."""
    is_equal: bool = False
    needle: str | None = None
    """Matches text that contains this, ignoring case."""

    def labeled(self, names: Sequence[str]) -> _Condition:
        """Returns the condition for a column of class labels with these names
        (`datasets.ClassLabel`).

        A value may be a label name, and `~` searches names. Raises ConfigError for an unknown
        label.
        """
        if not names or not self.values:
            return self
        known = {*names, *map(str, range(-1, len(names))), "none"}
        if self.is_equal and (odd := [value for value in self.values if value not in known]):
            raise ConfigError(
                f"{self.field} is a class label, and {odd[0]!r} is not one of: {', '.join(names)}"
            )

        def by_name(test: Callable[[object], bool]) -> Callable[[object], bool]:
            def holds(label: Any) -> bool:
                if isinstance(label, list):
                    return any(map(holds, label))
                return test(
                    names[int(label)]
                    if label is not None and 0 <= int(label) < len(names)
                    else None
                )

            return holds

        named = [self.by_text or (self.is_equal and value in names) for value in self.values]
        tests = [
            by_name(test) if name else test for test, name in zip(self.tests, named, strict=True)
        ]
        return replace(self, tests=tests, by_text=False, needle=None)

    def holds(self, value: object) -> bool:
        return any(test(value) for test in self.tests)

    def holds_of_row(self, row: _View) -> bool:
        value = find_at(row.values, self.steps) if self.steps else ABSENT
        if self.field in DERIVED and (value is ABSENT or value is None):
            value = row.derived(self.field)
        return self.holds(None if value is ABSENT else value)

    def holds_of_texts(self, texts: pl.Series, *, exact: bool) -> npt.NDArray[np.int8]:
        """Evaluates a column of text: 1, 0, or -1 if the kind of value decides. With `exact`,
        values are text."""
        result = pl.repeat(0, len(texts), dtype=pl.Int8, eager=True)
        unsure = None
        if self.needle is not None:
            result = (
                texts.str.to_lowercase()
                .str.contains(self.needle, literal=True)
                .fill_null(False)
                .cast(pl.Int8)
            )
            unsure = (
                texts.str.len_bytes() > texts.str.len_chars()
            )  # non-ASCII letters may have several lower-case forms
            unsure = (unsure if exact else unsure | texts.str.contains(_NOT_TEXT)).arg_true()
            texts = texts.gather(unsure)
        values = texts.to_arrow().dictionary_encode()
        holds = self.holds if exact else self._holds_of_text
        verdicts = np.array(
            [holds(value) for value in (*values.dictionary.to_pylist(), None)], np.int8
        )
        verdicts = verdicts[
            values.indices.fill_null(len(verdicts) - 1).to_numpy(zero_copy_only=False)
        ]
        return (
            verdicts if unsure is None else result.scatter(unsure, pl.Series(verdicts)).to_numpy()
        )

    def _holds_of_text(self, text: str | None) -> int:
        if text is None or not re.match(_NOT_TEXT, text):
            return self.holds(text)
        if self.by_text or not _PLAIN.fullmatch(text):
            return -1
        verdict = self.holds(text)
        return verdict if verdict == self.holds(json.loads(text)) else -1


_NOT_TEXT = r"^(?:[\[{]|-?[0-9][0-9.eE+-]*$|true$|false$)"
"""Matches the text of a list, an object, a number or a boolean."""
_PLAIN = re.compile(r"-?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,15})?|true|false")


@dataclass
class Filter:
    """A parsed filter; `mask` marks the matching rows of a block."""

    text: str
    node: Node | None
    _conditions: Mapping[Node, _Condition]
    fields: dict[str, bool] = field(default_factory=dict)
    """Required fields -> whether a row had them."""
    _known: dict[str, None] = field(default_factory=dict)

    @property
    def _paths(self) -> Sequence[Path]:
        names = list(
            dict.fromkeys(
                condition.steps for condition in self._conditions.values() if condition.steps
            )
        )
        asks_text = any(condition.field in DERIVED for condition in self._conditions.values())
        return names + [path for path in QUERIES if path not in names] if asks_text else names

    def mask(self, block: Block, table: Columns | None = None) -> npt.NDArray[np.bool_]:
        """Marks the matching rows of a block, in a numpy array.

        Rows are read where columns can't decide (a list, an object, a number that may be text).
        `table` has the class labels of columns, if the block does not. Raises ConfigError for an
        unknown label.
        """
        if self.node is None:
            return np.ones(len(block), bool)
        table = block.table if isinstance(block, TableBlock) else table
        of = self._conditions
        if table is not None:
            of = {
                part: condition.labeled(table.labels_at(condition.steps))
                for part, condition in of.items()
            }
        try:
            if has_dotted_key(block, self._paths):
                raise Irregular
            columns = block.columns(self._paths)
        except Irregular:
            return self.mask_rows((row.values for row in block.rows()), of)
        self.fields.update(
            {".".join(path): True for path, c in columns.items() if c.null_count() < len(block)}
        )
        unclear = np.zeros(len(block), bool)

        def leaf(part: Node) -> npt.NDArray[np.bool_]:
            condition = of[part]
            if condition.field not in DERIVED:
                result = condition.holds_of_texts(columns[condition.steps], exact=False)
            else:
                result = condition.holds_of_texts(_derived(block, condition.field), exact=True)
                unclear[:] |= (
                    columns[condition.steps].is_not_null().to_numpy() if condition.steps else False
                )
            unclear[:] |= result < 0
            return result > 0

        result = fold(self.node, leaf, _join)
        if len(undecided := np.flatnonzero(unclear)):
            result[undecided] = self.mask_rows((row.values for row in block.rows(undecided)), of)
        return result

    def mask_rows(
        self, rows: Iterable[Mapping[str, object]], of: Mapping[Node, _Condition] | None = None
    ) -> npt.NDArray[np.bool_]:
        """Marks the matching rows, in a numpy array."""
        views, of = list(map(_View, rows)), of or self._conditions
        if self.node is None:
            return np.ones(len(views), bool)
        return fold(
            self.node, lambda part: np.array([*map(of[part].holds_of_row, views)], bool), _join
        )

    def note(self, block: Block) -> None:
        """Searches the rows for fields that no column has shown so far; call it where `check` would
        fail."""
        for row in block.rows() if self.is_unmet else ():
            for name, met in self.fields.items():
                self.fields[name] = met or find_at(row.values, name.split(".")) is not ABSENT
            if len(self._known) < 1000:
                self._known.update(dict.fromkeys(field_names(row.values)))

    @property
    def is_unmet(self) -> bool:
        """Whether a required field has not occurred yet."""
        return not all(self.fields.values())

    def check(self) -> None:
        """Raises ConfigError for a field that no row had, probably a typing error; call it after
        the last row."""
        for name, met in self.fields.items():
            if not met and self._known:
                raise unknown_field(name, [*self._known, *DERIVED])


def unknown_field(name: str, known: Iterable[str]) -> ConfigError:
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}? There are" if near else "there are"
    return ConfigError(f"no row has a field {name!r}; {hint} {', '.join(names[:40])}")


def _join(word: str, parts: Sequence[npt.NDArray[np.bool_]]) -> npt.NDArray[np.bool_]:
    if word == "not":
        return ~parts[0]
    joined: npt.NDArray[np.bool_] = (np.logical_and if word == "and" else np.logical_or).reduce(
        parts
    )
    return joined


def _derived(block: Block, name: str) -> pl.Series:
    if name == "task_id":
        return pl.Series([task_id_of(row.values) for row in block.rows()], dtype=pl.String)
    if name in ("text", "chars"):
        return block.texts if name == "text" else block.texts.str.len_chars()
    return pl.Series([_OF_TEXT[name](text) for text in block.texts])


def has_dotted_key(block: Block, paths: Sequence[Path]) -> bool:
    """Whether a key may contain a dot, or a path may mean a length, so that rows have to be
    read."""
    if any(
        POSITION.fullmatch(step) or step in ("count", "chars")
        for path in paths
        for step in path[1:]
    ):
        return True
    inner = [
        ".".join(path[i:j])
        for path in paths
        for i in range(len(path))
        for j in range(i + 2, len(path) + 1)
    ]
    if isinstance(block, LineBlock):
        return any(
            bool(block.lines.str.contains(f'"{name}"', literal=True).any()) for name in inner
        )
    return any("." in column for column in block.data.schema.names)


def task_id_of(values: Mapping[str, object]) -> str | None:
    """Returns the task id that a reader would assign; None for an invalid task."""
    try:
        return to_task(Row("", dict(values)), {}).task_id
    except AjetError:
        return None


def field_names(values: Mapping[str, object], before: str = "", depth: int = 0) -> list[str]:
    names = []
    for name, inner in values.items():
        names.append(f"{before}{name}")
        if isinstance(inner, Mapping) and depth < 3:
            names += field_names(inner, f"{before}{name}.", depth + 1)
    return names


def parse(text: str) -> Filter:
    """Parses a filter; an empty one matches every row. Raises FilterError, with the position."""
    node = tree(text, "metadata.answer=42")
    conditions: dict[Node, _Condition] = {}
    fields: dict[str, bool] = {}

    def leaf(part: BareWord | Comparison) -> None:
        if isinstance(part, BareWord):
            text = part.text.text
            conditions[part] = _Condition(
                "text", (), [_contains(text)], by_text=True, needle=text.casefold()
            )
            return
        name, sign = part.field.text, part.operator.text
        tests = [_test_of(sign, value) for value in part.values]
        value = part.values[0].text
        plain = (
            sign == "~"
            and len(tests) == 1
            and not value.startswith(_REGEX)
            and name not in ("chars", "words")
        )
        needle = value.casefold() if plain else None
        values = [token.text for token in part.values]
        conditions[part] = _Condition(
            name, tuple(name.split(".")), tests, values, sign == "~", sign == "=", needle
        )
        if name not in DERIVED and not any(map(_is_none, part.values)):
            fields.setdefault(name, False)

    if node is not None:
        fold(node, leaf, lambda word, parts: None)
    return Filter(text, node, conditions, fields)


_REGEX = "regex:"


def _test_of(sign: str, value: Token) -> Callable[[object], bool]:
    """Returns the comparison with a value; a missing field counts as None."""
    if sign == "~":
        return _matches(value) if value.text.startswith(_REGEX) else _contains(value.text)
    number = _number_of(value.text)
    if sign == "=":
        if _is_none(value):
            return lambda field_value: field_value is None
        return lambda field_value: _equal(field_value, value.text, number)
    compare = _ORDER[sign]
    if number is None:
        return lambda field_value: isinstance(field_value, str) and compare(field_value, value.text)

    def ordered(field_value: object) -> bool:
        known = _number_of(field_value) if isinstance(field_value, str) else field_value
        return (
            isinstance(known, int | float)
            and not isinstance(known, bool)
            and compare(known, number)
        )

    return ordered


_Order = Callable[[Any, Any], Any]
_ORDER: Mapping[str, _Order] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def _is_none(value: Token) -> bool:
    return value.kind == "word" and value.text.lower() == "none"


def _number_of(text: str) -> float | int | None:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return None


def _equal(actual: object, text: str, number: float | None) -> bool:
    if isinstance(actual, list):
        return any(_equal(item, text, number) for item in actual)
    if isinstance(actual, bool):
        return text.lower() == ("true" if actual else "false")
    if isinstance(actual, int | float):
        return actual == number
    return bool(actual == text)


def _matches(value: Token) -> Callable[[object], bool]:
    try:
        pattern = re.compile(value.text.removeprefix(_REGEX))
    except (re.error, OverflowError, RecursionError) as error:
        raise FilterError(f"not a regular expression: {error}", value.at) from None
    return lambda field_value: any(pattern.search(text) for text in _texts(field_value))


def _contains(text: str) -> Callable[[object], bool]:
    needle = text.casefold()
    return lambda field_value: any(needle in text.casefold() for text in _texts(field_value))


def _texts(value: object) -> list[str]:
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for inner in value.values() for text in _texts(inner)]
    if isinstance(value, list):
        return [text for inner in value for text in _texts(inner)]
    return [str(value)]
