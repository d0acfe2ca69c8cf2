"""The filter language of rows: `metadata.difficulty>=3 text~"train" chars<500 language=en`.

It is the grammar of `ajet trace ls --filter` (`ajet_tools.text.grammar`) over the fields of a row. A field is a column
(`main_query`), a path (`metadata.answer`, `messages.0.content`), such a path with `.chars` or `.count` (the length of a
text, of a list), or one of `DERIVED`. A word alone is looked for in the row's text. `none` is the value of what is null
or not there; `~ "regex:..."` is a regular expression. A list fits where one of its items does.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ajet_sdk.errors import AjetError, ConfigError
from ajet_sdk.tasks.rows import Row as TaskRow
from ajet_sdk.tasks.rows import to_task
from ajet_tools.dataset.files.blocks import Block
from ajet_tools.dataset.files.tables import text_of
from ajet_tools.dataset.rows.language import language_of
from ajet_tools.text.grammar import BareWord, Comparison, FilterError, Node, Token, fold, tree

__all__ = ["DERIVED", "ORDER", "POSITION", "REGEX", "Filter", "is_none", "number_of", "parse", "task_id_of", "value_at"]

DERIVED = {
    "text": "what the row asks: its query, else its last user message, else all its strings",
    "chars": "characters of that text",
    "words": "words of it, between blanks",
    "language": "of it, such as en or zh; und where it is not told",
    "task_id": "the row's, or the one that its content gives it",
}
"""Fields that a row has besides its columns; a column of the same name comes first."""

_ABSENT = object()


class _View:
    """A row, with what is derived from it, once."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    @cached_property
    def text(self) -> str:
        return text_of(self.values)

    @cached_property
    def folded(self) -> str:
        return self.text.casefold()

    @cached_property
    def language(self) -> str:
        return language_of(self.text)

    def derived(self, name: str) -> Any:
        if name == "task_id":
            return task_id_of(self.values)
        if name == "chars":
            return len(self.text)
        if name == "words":
            return len(self.text.split())
        return getattr(self, name)


_Test = Callable[[_View], bool]


@dataclass
class Filter:
    """A parsed filter; `fits` says whether a row does."""

    text: str
    _test: _Test
    fields: dict[str, bool] = field(default_factory=dict)
    """Fields that a row must have somewhere -> whether one had it."""
    node: Node | None = None
    _known: dict[str, None] = field(default_factory=dict)

    def fits(self, values: Mapping[str, Any]) -> bool:
        if not all(self.fields.values()):
            self._note(values)
        return self._test(_View(values))

    def note(self, block: Block) -> None:
        """Look for the fields that no column has shown so far, to be called where `check` would fail."""
        if not all(self.fields.values()):
            for row in block.rows():
                self._note(row.values)

    @property
    def is_unmet(self) -> bool:
        """There is a field that no row was seen to have."""
        return not all(self.fields.values())

    def _note(self, values: Mapping[str, Any]) -> None:
        for name, met in self.fields.items():
            self.fields[name] = met or _at(values, name.split(".")) is not _ABSENT
        if len(self._known) < 1000:
            self._known.update(dict.fromkeys(_names(values)))

    def check(self) -> None:
        """Call it when all rows are through. Raises ConfigError for a field that none of them had: a typing error."""
        for name, met in self.fields.items():
            if not met and self._known:
                near = difflib.get_close_matches(name, [*self._known, *DERIVED], n=1)
                hint = f"did you mean {near[0]}? There are" if near else "there are"
                names = [*self._known, *DERIVED]
                raise ConfigError(f"no row has a field {name!r}; {hint} {', '.join(names[:40])}")


def task_id_of(values: Mapping[str, Any]) -> str | None:
    """The id under which a reader would know the row; None where it is no task."""
    try:
        return to_task(TaskRow("", values), {}).task_id
    except AjetError:
        return None


def value_at(values: Any, path: str) -> Any:
    """What stands at a path such as `metadata.answer` or `messages.0.content`; None where nothing does."""
    found = _at(values, path.split("."))
    return None if found is _ABSENT else found


POSITION = re.compile(r"-?[0-9]{1,9}")


def _at(values: Any, steps: Sequence[str]) -> Any:
    if not steps:
        return values
    if isinstance(values, Mapping):
        whole = ".".join(steps)
        if whole in values:  # a column whose name has a point in it
            return values[whole]
        if steps[0] in values:
            return _at(values[steps[0]], steps[1:])
    if isinstance(values, list):
        if POSITION.fullmatch(steps[0]) and -len(values) <= int(steps[0]) < len(values):
            return _at(values[int(steps[0])], steps[1:])
        if steps == ["count"]:
            return len(values)
    if isinstance(values, str) and steps == ["chars"]:
        return len(values)
    return _ABSENT


def _names(values: Mapping[str, Any], before: str = "", depth: int = 0) -> list[str]:
    found = []
    for name, inner in values.items():
        found.append(f"{before}{name}")
        if isinstance(inner, Mapping) and depth < 3:
            found += _names(inner, f"{before}{name}.", depth + 1)
    return found


def parse(text: str) -> Filter:
    """A filter of rows; of an empty text one that every row fits. Raises FilterError, with the place."""
    found = tree(text, "metadata.answer=42")
    fields: dict[str, bool] = {}

    def leaf(part: BareWord | Comparison) -> _Test:
        if isinstance(part, BareWord):
            needle = part.text.text.casefold()
            return lambda row: needle in row.folded
        if part.field.text not in DERIVED and not any(is_none(value) for value in part.values):
            fields.setdefault(part.field.text, False)
        return _comparison(part)

    return Filter(text, (lambda row: True) if found is None else fold(found, leaf, _join), fields, found)


def _join(word: str, tests: Sequence[_Test]) -> _Test:
    if word == "not":
        return lambda row: not tests[0](row)
    every = all if word == "and" else any
    return lambda row: every(test(row) for test in tests)


def _comparison(part: Comparison) -> _Test:
    name = part.field.text
    steps, derived = name.split("."), name if name in DERIVED else None
    tests = [_test_of(part.operator.text, value) for value in part.values]

    def test(row: _View) -> bool:
        value = _at(row.values, steps)
        if value is _ABSENT or (value is None and derived):
            value = row.derived(derived) if derived else None
        return any(test(value) for test in tests)

    return test


REGEX = "regex:"


def _test_of(sign: str, value: Token) -> Callable[[Any], bool]:
    """A comparison with one value, of what stands at the field (None where nothing does)."""
    if sign == "~":
        return _contains(value)
    number = number_of(value.text)
    if sign == "=":
        if is_none(value):
            return lambda found: found is None
        return lambda found: _equal(found, value.text, number)
    compare = ORDER[sign]
    if number is None:
        return lambda found: isinstance(found, str) and compare(found, value.text)

    def ordered(found: Any) -> bool:
        known = number_of(found) if isinstance(found, str) else found
        return isinstance(known, int | float) and not isinstance(known, bool) and compare(known, number)

    return ordered


ORDER: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def is_none(value: Token) -> bool:
    return value.kind == "word" and value.text.lower() == "none"


def number_of(text: str) -> float | int | None:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return None


def _equal(found: Any, text: str, number: float | None) -> bool:
    if isinstance(found, list):
        return any(_equal(item, text, number) for item in found)
    if isinstance(found, bool):
        return text.lower() == ("true" if found else "false")
    if isinstance(found, int | float):
        return found == number
    return bool(found == text)


def _contains(value: Token) -> Callable[[Any], bool]:
    if value.text.startswith(REGEX):
        try:
            pattern = re.compile(value.text.removeprefix(REGEX))
        except (re.error, OverflowError, RecursionError) as error:
            raise FilterError(f"not a regular expression: {error}", value.at) from None
        return lambda found: any(pattern.search(text) for text in _texts(found))
    needle = value.text.casefold()
    return lambda found: any(needle in text.casefold() for text in _texts(found))


def _texts(found: Any) -> list[str]:
    if found is None:
        return []
    if isinstance(found, str):
        return [found]
    if isinstance(found, Mapping):
        return [text for inner in found.values() for text in _texts(inner)]
    if isinstance(found, list):
        return [text for inner in found for text in _texts(inner)]
    return [str(found)]
