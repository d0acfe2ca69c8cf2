"""The filter language: SQL as after WHERE, with macros; a text without any operator is searched for.

`ajet_tools.trace.queries.filters` has the columns and macros of episodes,
`ajet_tools.dataset.curation.sql` those of rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping

from ajet_sdk.errors import QueryError

_LONGEST = 10_000
_STRING = r"'(?:[^']|'')*'"
_OPERATOR = re.compile(
    r"[=<>()']|^\s*not\s+\S|\S\s+(?:and|or|is|in|like|ilike|between|not)\s+\S", re.I
)
_TOKEN = re.compile(
    rf"(?P<string>{_STRING})|\"(?:[^\"]|\"\")*\"|\b(?P<name>\w+)\s*\(\s*(?P<argument>{_STRING})?\s*\)",
    re.S,
)


def literal(text: str) -> str:
    """Return a text as a literal of SQL."""
    doubled = text.replace("'", "''")
    return f"'{doubled}'"


def condition(
    text: str, macros: Mapping[str, Callable[[str], str]], columns: Collection[str] = ()
) -> str:
    """Return a filter as a condition in SQL, with the macros replaced; an empty one is `true`.

    A macro is called with its text, or an empty one: `has('text')`, `age()`. A filter without any
    operator that is no column becomes `has`, and so does a single text in quotes. Raises
    QueryError.
    """
    if len(text) > _LONGEST:
        raise QueryError(f"a filter has at most {_LONGEST:,} characters")
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise QueryError("a filter has a character that SQL does not take")
    stripped = text.strip()
    if not stripped:
        return "true"
    if not _OPERATOR.search(stripped) and stripped.lower() not in columns:
        return macros["has"](stripped.strip('"'))
    if re.fullmatch(_STRING, stripped, re.S):
        return macros["has"](stripped[1:-1].replace("''", "'"))

    def replaced(match: re.Match[str]) -> str:
        macro = macros.get((match["name"] or "").lower())
        if macro is None:
            return match[0]
        argument = match["argument"] or "''"
        return macro(argument[1:-1].replace("''", "'"))

    # the line break ends a comment at the end of the filter
    return f"({_TOKEN.sub(replaced, stripped)}\n)"
