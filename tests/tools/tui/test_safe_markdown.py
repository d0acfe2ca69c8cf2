"""Markdown of a model's: laid out, and no letter of it lost, whatever it is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ajet_tools.text.markdown import MARKDOWN_THEME, render_markdown

PIECES = [
    "*", "**", "_", "`", "```\n", "~~~\n", "> ", "- ", "1. ", "7) ", "|", "|-|-|\n", "\n", "\n\n", "a", "word ",
    "  ", "\t", "[", "]", "(u)", "![i](u)", "#", "## ", "<b>", "</answer>", "<!-- c -->", "\\", "&lt;", "[x]: http://e.com\n",
    "你好", "---\n", "===\n",
]  # fmt: skip


def shown(text: str, width: int = 60) -> list[str]:
    console = Console(width=width, force_terminal=True)
    with console.use_theme(MARKDOWN_THEME):
        options = console.options.update(width=width, highlight=False, markup=False)
        lines = console.render_lines(render_markdown(text), options, pad=False)
    return ["".join(segment.text for segment in line).rstrip() for line in lines]


def letters(text: str) -> list[str]:
    return sorted(c for c in text if c.isalnum())


@given(st.lists(st.sampled_from(PIECES), max_size=60).map("".join), st.integers(12, 80))
def test_no_letter_is_lost(text: str, width: int) -> None:
    assert letters("".join(shown(text, width))) == letters(text)


def test_what_is_marked_is_laid_out() -> None:
    assert shown("# Title\n\nsome **bold** and `code`") == ["Title", "", "some bold and code"]
    assert shown("- one\n- two") == [" • one", " • two"]
    assert shown("3. three\n4. four") == ["3. three", "4. four"]
    assert shown("| a | b |\n|---|---|\n| 1 | 2 |") == [" a  b", " ────", " 1  2"]
    assert shown("```python\nx = 1\n```") == ["  python", "  x = 1"]


def test_what_a_model_wrote_stays() -> None:
    for text in (
        "<answer>42</answer>",
        "2*3*4 = 24",
        "2**3**2",
        r"\(x\) and \[y\]",
        "&lt;b&gt;",
        "7.",
        "-",
        "[a](http://e.com)",
    ):
        assert shown(text) == [text]
    assert shown("two\nlines") == ["two", "lines"]
    assert shown("[b]red[/b] :smile:") == ["[b]red[/b] :smile:"]


def test_quotes_too_deep_to_lay_out_are_shown_as_they_are() -> None:
    assert shown("> " * 25 + "deep", 80) == ["> " * 25 + "deep"]
