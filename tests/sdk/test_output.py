"""No text that ajet prints can do anything to a terminal."""

from __future__ import annotations

import json
import unicodedata
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from ajet_sdk.reporting import output

EVIL = "a\x1b[2J\x1b]0;title\x07\x9b31m\u202edrow\u2066\r\b\ufdd031\ufdd1b\ufdd2\U000e0041"
FOREIGN = st.text(
    st.characters(codec="utf-16", categories=("Cc", "Cf", "Lu", "Zl", "Co", "Cn", "So")),
    max_size=40,
)


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def obeyed(text: str) -> list[str]:
    return [
        c
        for c in text
        if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp", "Cs") and c not in "\n\t\u200c\u200d"
    ]


@pytest.mark.slow
@given(text=st.one_of(st.just(EVIL), FOREIGN))
def test_whatever_is_printed_no_character_is_left_that_a_terminal_obeys(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for stream in ("stdout", "stderr"):
            patch.setattr("sys." + stream, StringIO())
        output.echo(text)
        output.echo(output.style(text, "red", bold=True), err=True)
        import sys

        assert obeyed(sys.stdout.getvalue() + sys.stderr.getvalue()) == []  # type: ignore[attr-defined]
    shown = StringIO()
    table = Table("one", text.replace("[", ""))
    table.add_row(text.replace("[", ""), "two")
    console = output.console(file=shown, width=300, markup=False)
    console.print(table)
    console.print(text)
    assert obeyed(shown.getvalue()) == []


def test_only_our_own_colours_reach_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", Terminal())
    import sys

    output.echo(f"{output.style('red', 'red', bold=True)} {EVIL}")
    said = sys.stdout.getvalue()  # type: ignore[attr-defined]
    assert said.startswith("\x1b[31;1mred\x1b[0m a\\x1b[2J")
    assert obeyed(said.replace("\x1b[31;1mred\x1b[0m", "").replace("\x1b[31mb\x1b[0m", "")) == []


@pytest.mark.slow
@given(text=st.one_of(st.just(EVIL), FOREIGN))
def test_json_stays_the_same_json(text: str) -> None:
    line = output.json_line({"text": text, text: 1})
    assert json.loads(line) == {"text": text, text: 1} and obeyed(line) == []
