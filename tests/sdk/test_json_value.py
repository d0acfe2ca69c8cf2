"""The quick reading of JSON says what the standard library's says, and refuses what that
refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk.dialects.json import json_value

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.mark.slow
@given(values, st.booleans())
def test_it_reads_what_was_written(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert json_value(text.encode()) == value
    assert json_value(text) == value


ODD = [
    '{"a": 1, "a": 2}', "[-Infinity, Infinity]", "1e400", "-0", '"\\ud800"', "[" * 300 + "]" * 300, "1" * 60,
    "\ufeff{}", '{"a": 1} x', "", "nul", "[1,]", "'a'", '{"a"}',
]  # fmt: skip


def read(how: Any, data: bytes) -> str:
    try:
        return repr(how(data))
    except ValueError:
        return "refused"


@pytest.mark.parametrize("text", ODD)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_what_is_odd_is_read_as_the_standard_library_reads_it(text: str, encoding: str) -> None:
    data = text.encode(encoding)
    assert read(json_value, data) == read(json.loads, data)
