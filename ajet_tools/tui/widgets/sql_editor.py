"""An editor for one query, with its words in colour."""

from __future__ import annotations

import re

from textual.widgets import TextArea

__all__ = ["SqlEditor"]

_WORDS = (
    "all and any anti as asc between by case cast cross desc distinct else end except exclude exists explain false "
    "filter following from full group having in inner intersect is join lateral left like ilike limit not null nulls "
    "offset on or order outer over partition pivot positional preceding qualify range recursive replace right rows "
    "sample select semi struct then true unbounded union unnest unpivot using values when where window with"
)
_PARTS = re.compile(
    r"(?P<comment>--[^\n]*|/\*.*?(?:\*/|\Z))|(?P<string>'(?:[^']|'')*(?:'|\Z))|(?P<property>\"(?:[^\"]|\"\")*(?:\"|\Z))"
    rf"|(?P<number>\b\d+(?:\.\d+)?\b)|(?P<keyword>\b(?:{'|'.join(_WORDS.split())})\b)|(?P<function>\b\w+(?=\())",
    re.I | re.S,
)


class SqlEditor(TextArea):
    """A text area that knows DuckDB's words; no parser has to be installed for it."""

    def _build_highlight_map(self) -> None:
        self._line_cache.clear()
        self._highlights.clear()
        text = self.text
        for found in _PARTS.finditer(text):
            row = text.count("\n", 0, found.start())
            column = found.start() - (text.rfind("\n", 0, found.start()) + 1)
            for line in found.group().split("\n"):
                before = self.document.get_line(row)[:column]
                start = len(before.encode())
                self._highlights[row].append((start, start + len(line.encode()), found.lastgroup or ""))
                row, column = row + 1, 0
