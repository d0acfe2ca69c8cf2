"""A filter of rows as expressions over columns (polars): which rows of a block fit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from ajet_tools.dataset.files.blocks import QUERIES, Block, Irregular, LineBlock, Wanted
from ajet_tools.dataset.rows.filter import DERIVED, ORDER, POSITION, REGEX, Filter, is_none, number_of, task_id_of
from ajet_tools.dataset.rows.language import language_of
from ajet_tools.text.grammar import BareWord, Comparison, Node, Token, Tree, fold

__all__ = ["mask", "wanted_by"]


def wanted_by(wanted: Filter) -> Wanted:
    """The fields that `mask` looks at."""
    names = list(dict.fromkeys(_columns_of(wanted.node)))
    return names + [path for path in QUERIES if path not in names] if _asks_text(wanted.node) else names


def mask(wanted: Filter, block: Block) -> Any:
    """Which rows of a block fit, as a polars series; the same as `Filter.fits` says of each.

    What columns do not decide (a list, an object, a number that may be text) is asked of the row.
    """
    import polars as pl

    paths = wanted_by(wanted)
    if wanted.node is None:
        return pl.repeat(True, len(block), eager=True)
    try:
        if _has_dotted_key(block, paths):
            raise Irregular
        frame = block.columns(paths)
    except Irregular:
        return pl.Series([wanted.fits(row.values) for row in block.rows()], dtype=pl.Boolean)
    for number, path in enumerate(paths):
        name = ".".join(path)
        if wanted.fields.get(name) is False and frame[str(number)].null_count() < len(frame):
            wanted.fields[name] = True
    made = _Expressions(paths, block)
    fitting = fold(wanted.node, made.leaf, made.join)
    unclear = pl.any_horizontal(made.unclear) if made.unclear else pl.lit(False)
    columns = pl.DataFrame([*frame.get_columns(), *made.derived])
    found = columns.select(fits=fitting, unclear=unclear)
    if len(left := found["unclear"].arg_true()):
        return found["fits"].scatter(left, [wanted.fits(row.values) for row in block.rows(left)])
    return found["fits"]


def _columns_of(node: Node | None) -> Iterator[tuple[str, ...]]:
    """The fields that columns can show: not those within a list, and no lengths."""
    if isinstance(node, Tree):
        for part in node.parts:
            yield from _columns_of(part)
    elif isinstance(node, Comparison):
        yield tuple(node.field.text.split("."))


def _asks_text(node: Node | None) -> bool:
    if isinstance(node, Tree):
        return any(map(_asks_text, node.parts))
    return isinstance(node, BareWord) or (isinstance(node, Comparison) and node.field.text in DERIVED)


def _has_dotted_key(block: Block, wanted: Wanted) -> bool:
    """A key may have a point in its name, or be the length of something: what a path means is up to the row."""
    if any(POSITION.fullmatch(step) or step in ("count", "chars") for path in wanted for step in path[1:]):
        return True
    inner = [".".join(path[i:j]) for path in wanted for i in range(len(path)) for j in range(i + 2, len(path) + 1)]
    if isinstance(block, LineBlock):
        return any(bool(block.lines.str.contains(f'"{name}"', literal=True).any()) for name in inner)
    return any("." in one for one in block.data.schema.names)


class _Expressions:
    """A filter as expressions of polars over text columns named by their place in `wanted`."""

    def __init__(self, wanted: Wanted, block: Block) -> None:
        self._at = {".".join(path): str(number) for number, path in enumerate(wanted)}
        self._block = block
        self.derived: list[Any] = []
        self.unclear: list[Any] = []
        self._known: dict[str, Any] = {}

    def leaf(self, part: BareWord | Comparison) -> Any:
        import polars as pl

        if isinstance(part, BareWord):
            return self._holds(self._derive("text"), part.text.text)
        name = part.field.text
        column, own = pl.col(self._at[name]), name not in DERIVED
        self.unclear.append(column.str.contains(r"^[\[{]").fill_null(False) if own else column.is_not_null())
        column = column if own else self._derive(name)
        if name in ("chars", "words"):
            number = number_of(part.values[0].text)
            if part.operator.text in ORDER and isinstance(number, int):
                return ORDER[part.operator.text](column, number)
            column = column.cast(pl.String)
        return pl.any_horizontal([self._test(column, own, part.operator.text, value) for value in part.values])

    def join(self, word: str, parts: Sequence[Any]) -> Any:
        import polars as pl

        if word == "not":
            return ~parts[0]
        return pl.all_horizontal(parts) if word == "and" else pl.any_horizontal(parts)

    def _holds(self, column: Any, text: str) -> Any:
        import polars as pl

        other = pl.when(column.str.len_bytes() > column.str.len_chars()).then(column)
        self.unclear.append(other.str.contains(_FOLDED).fill_null(False))
        return column.str.to_lowercase().str.contains(text.casefold(), literal=True)

    def _derive(self, name: str) -> Any:
        """A column of `DERIVED`, as text."""
        import polars as pl

        if name not in self._known:
            texts = self._block.texts
            if name == "text":
                made = texts
            elif name == "chars":
                made = texts.str.len_chars()
            elif name == "words":
                made = texts.str.count_matches(r"\S+")
            elif name == "language":
                made = pl.Series([language_of(text) for text in texts], dtype=pl.String)
            else:
                made = pl.Series([task_id_of(row.values) for row in self._block.rows()], dtype=pl.String)
            self.derived.append(made.rename(f"derived {name}"))
            self._known[name] = pl.col(f"derived {name}")
        return self._known[name]

    def _test(self, column: Any, own: bool, sign: str, value: Token) -> Any:
        """A comparison with one value. `own`: a number may be shown as text, or text that looks like one be text."""
        import polars as pl

        if sign == "=" and is_none(value):
            return column.is_null()
        text, number = value.text, number_of(value.text)
        plain = pl.when(column.str.contains(_PLAIN_NUMBER)).then(column).cast(pl.Float64, strict=False)
        unclear = column.str.contains(_NOT_TEXT) if own else pl.lit(False)
        if sign == "~" and text.startswith(REGEX):
            pattern = re.compile(text.removeprefix(REGEX))
            found = column.map_batches(lambda some: _searched(pattern, some), return_dtype=pl.Boolean)
        elif sign == "~":
            found = self._holds(column, text)
        elif sign == "=":
            found = column == text
            unclear = (column.str.to_lowercase() == text.lower()) & ~found if own else unclear
            if number is not None:
                unclear |= (plain == number) & ~found | (plain.is_null() & column.str.contains(_ODD_NUMBER))
        elif number is None:
            found = ORDER[sign](column, text)
        else:
            found = ORDER[sign](plain, number)
            unclear = plain.is_null() & column.str.contains(_ODD_NUMBER) | pl.lit(abs(number) >= 1 << 53)
        self.unclear.append(unclear.fill_null(False))
        return found.fill_null(False)


_FOLDED = (
    r"[\u00b5\u00df\u0130\u0149\u017f\u01f0\u0345\u0390\u03b0\u03a3\u03c2\u03d0-\u03d6\u03f0-\u03f5\u0587"
    r"\u13a0-\u13fd\u1c80-\u1c88\u1e96-\u1e9e\u1f50-\u1fff\ufb00-\ufb17\uab70-\uabbf]"
)
"""Characters that have another form in lower case than where case does not matter."""
_PLAIN_NUMBER = r"^-?[0-9]{1,15}(?:\.[0-9]{1,15})?$"
_ODD_NUMBER = r"(?i)\p{Nd}|nan|inf"
_NOT_TEXT = r"^-?[0-9][0-9.eE+-]*$|^true$|^false$"
"""What a number or a truth value is shown as."""


def _searched(pattern: re.Pattern[str], some: Any) -> Any:
    import polars as pl

    return pl.Series([one is not None and pattern.search(one) is not None for one in some], dtype=pl.Boolean)
