"""Columns of lines say what the rows themselves say: their structures."""

from __future__ import annotations

import json
from itertools import permutations
from typing import Any

import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ajet_tools.dataset.files.arrays import infer
from ajet_tools.dataset.files.blocks import LineBlock, as_table, json_line
from ajet_tools.dataset.files.lines import kind_in, kinds_of, read_columns, structures

TEXTS = st.sampled_from(["q", "", ' say "ä\n', "\\\x07\t\x7f", "七 \u2028", "1", "true"])
WHOLE = st.sampled_from([0, -5, 2**53, 2**53 + 1, 2**63 - 1, -(2**63), 2**63, 2**64 - 1, 2**64])
NUMBERS = st.sampled_from([0, 3, 1.5, -0.0, 1e22, 1e-9, 2**60])
NAMES = st.sampled_from(["a", "b", "a/b", "~", "", "0", '"', "'", "$", "*", "é"])
ANY = st.recursive(
    TEXTS | WHOLE | NUMBERS | st.sampled_from([True, None, [], ["x"], {}]),
    lambda inner: st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=4,
)
KINDS = st.sampled_from(
    [
        TEXTS,
        WHOLE,
        NUMBERS,
        st.booleans(),
        st.none(),
        TEXTS | WHOLE,
        TEXTS | st.booleans() | st.none(),
        WHOLE | st.none(),
    ]
)


@st.composite
def alike(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Rows whose fields are of a kind or two."""
    one, two = draw(KINDS), draw(KINDS)
    inner = st.fixed_dictionaries({}, optional={"c": two, "d": one})
    return draw(
        st.lists(
            st.fixed_dictionaries({}, optional={"a": one, "b": inner | st.none(), "é": two}),
            min_size=1,
        )
    )


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    alike() | st.lists(st.dictionaries(NAMES, ANY, max_size=4), min_size=1, max_size=6),
    st.booleans(),
)
def test_columns_say_what_the_rows_say(rows: list[dict[str, Any]], escaped: bool) -> None:
    lines = pl.Series([json.dumps(row, ensure_ascii=escaped) for row in rows])
    for structure, indices in structures(lines):
        for row in (rows[index] for index in indices if structure is not None):
            assert kinds_of(structure or {}, kind_in) == kinds_of(row)
            assert list(structure or {}) == list(row)


def test_each_order_of_keys_is_a_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ajet_tools.dataset.files.lines._paths", {})  # what earlier lines had
    orders = [(one, two) for one in permutations("abc") for two in permutations("abcd")]
    rows = [
        {name: dict.fromkeys(inner, 1) if name == "a" else 1 for name in outer}
        for outer, inner in orders
    ]
    found = structures(pl.Series([json.dumps(row) for row in rows]))
    assert [(list(one or {}), list((one or {})["a"])) for one, _ in found] == [
        (list(outer), list(inner)) for outer, inner in orders
    ]


def test_a_key_that_comes_twice_and_lines_with_hundreds_of_keys_have_no_structure() -> None:
    assert structures(pl.Series(['{"a": 1}', '{"a": 1, "a": 2}']))[1][0] is None
    [(found, indices)] = structures(
        pl.Series([json.dumps({str(number): 1}) for number in range(300)])
    )
    assert (found, len(indices)) == (None, 300)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(rows=alike())
@example(rows=[{}, {"a": None}, {"a": "\x7f"}])
def test_columns_of_lines_have_the_types_and_values_that_their_rows_have(
    rows: list[dict[str, Any]],
) -> None:
    lines = [json_line(row)[:-1].decode() for row in rows]
    block = LineBlock("rows", pl.Series("line", lines, pl.String), [""] * len(lines))
    data, columns = infer("rows", [json.loads(line) for line in lines])
    table = as_table(block)
    assert table.data.equals(data)
    assert (table.table.row, table.table.schema) == (columns.row, columns.schema)


def test_plain_lines_become_a_table_without_being_parsed_in_python() -> None:
    lines = [
        '{"a": 1, "m": {"b": "x", "c": 2}}',
        '{"a": null, "m": {"b": 3}}',
        '{"a": 5, "m": {"b": null, "d": 0.5}}',
    ]
    block = LineBlock("rows", pl.Series("line", lines, pl.String), [""] * len(lines))
    batch, columns = read_columns(block.name, block.lines, block.whole) or pytest.fail(
        "parsed in Python"
    )
    assert batch.to_pylist()[1] == {"a": None, "m": {"b": "3", "c": None, "d": None}}
    assert columns.notes == {"fields": {"m": {"fields": {
        "b": {"json": True}, "c": {"absent": True}, "d": {"absent": True}}}}}  # fmt: skip
