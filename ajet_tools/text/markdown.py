"""Renders a model's Markdown in a terminal without losing characters.

Links, images, HTML, entities and escapes stay as written: a trace shows exactly the model's output.
Asterisks and underscores inside words (`2*3*4`) are not emphasis.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markdown import CodeBlock, Heading, ListItem, Markdown, MarkdownElement
from rich.padding import Padding
from rich.segment import Segment
from rich.text import Text
from rich.theme import Theme

_STYLES = {
    "bold underline": ("h1", "h2"),
    "bold": ("h3", "h4", "item.bullet", "table.header"),
    "italic": ("h5", "h6", "block_quote"),
    "cyan": ("code", "code_block"),
    "dim": ("hr", "table.border"),
}
MARKDOWN_THEME = Theme(
    {f"markdown.{name}": style for style, names in _STYLES.items() for name in names}
)
_AS_WRITTEN = [
    "link",
    "image",
    "autolink",
    "html_inline",
    "html_block",
    "entity",
    "escape",
    "reference",
    "lheading",
]
_MARKED = re.compile(r"[*_`#>|~]|^\s*(?:[-+]|\d{1,9}[.)])\s|^(?: {4}|\t)|^-{3,}\s*$", re.MULTILINE)


def render_markdown(text: str) -> RenderableType:
    """Render Markdown, or plain text if it has no markup. The caller has replaced control
    characters."""
    return _LosslessMarkdown(text) if _MARKED.search(text) else Text(text)


class _LosslessMarkdown:
    """Markdown that falls back to its source text where rendering would lose a letter or digit."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(SafeMarkdown(self.text), options, pad=False)
        shown = Counter(
            c for line in lines for segment in line for c in segment.text if c.isalnum()
        )
        if shown != Counter(c for c in self.text if c.isalnum()):
            yield Text(self.text)
            return
        filled = [
            n for n, line in enumerate(lines) if any(segment.text.strip() for segment in line)
        ]
        for line in lines[filled[0] : filled[-1] + 1] if filled else ():
            yield from line
            yield Segment.line()


class _Heading(Heading):
    """A left-aligned heading."""

    LEVEL_ALIGN = {f"h{level}": "left" for level in range(1, 7)}


class _Code(CodeBlock):
    """Code without highlighting, indented below the name of its language."""

    @classmethod
    def create(cls, markdown: Markdown, token: Token) -> _Code:
        return cls(token.info.strip(), "")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        name = f"{self.lexer_name}\n" if self.lexer_name else ""
        shown = Text.assemble(
            (name, "dim"), (str(self.text).rstrip("\n"), console.get_style("markdown.code_block"))
        )
        yield Padding(shown, (0, 0, 0, 2))


class _Item(ListItem):
    """A list item with its original number."""

    def __init__(self, number: str) -> None:
        super().__init__()
        self.number = number

    @classmethod
    def create(cls, markdown: Markdown, token: Token) -> _Item:
        return cls(f"{token.info}{token.markup} " if token.info else "")

    def render_bullet(self, console: Console, options: ConsoleOptions) -> RenderResult:
        return self._render(console, options, " • ")

    def render_number(
        self, console: Console, options: ConsoleOptions, number: int, last_number: int
    ) -> RenderResult:
        return self._render(console, options, self.number.rjust(len(str(last_number)) + 2))

    def _render(self, console: Console, options: ConsoleOptions, mark: str) -> RenderResult:
        narrower = options.update(width=max(1, options.max_width - len(mark)))
        lines = console.render_lines(self.elements, narrower, style=self.style, pad=False)
        for n, line in enumerate(lines or [[]]):
            yield (
                Segment(" " * len(mark))
                if n
                else Segment(mark, console.get_style("markdown.item.bullet"))
            )
            yield from line
            yield Segment.line()


class SafeMarkdown(Markdown):
    """Rich's Markdown without hyperlinks and without rules that drop parts of the source."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "heading_open": _Heading,
        "list_item_open": _Item,
        "fence": _Code,
        "code_block": _Code,
    }

    def __init__(self, text: str) -> None:
        super().__init__("", hyperlinks=False)
        self.markup = text
        self.parsed = MarkdownIt("commonmark").enable("table").disable(_AS_WRITTEN).parse(text)
        for token in self.parsed:
            if token.children:
                token.children = _keep_inner_marks(token.children)


def _keep_inner_marks(tokens: Sequence[Token]) -> list[Token]:
    """Keep line breaks, and emphasis marks inside words."""
    result: list[Token] = []
    inner: list[bool] = []
    before = ""
    for token in tokens:
        marks = token.type in ("em_open", "strong_open", "em_close", "strong_close")
        if token.nesting == 1 and marks:
            inner.append(before[-1:].isalnum())
        if token.type == "softbreak":
            token.type = "hardbreak"
        if marks and inner and inner[-1]:
            result.append(Token("text", "", 0, content=token.markup))
        else:
            result.append(token)
        if token.nesting == -1 and marks:
            inner.pop()
        before = (
            token.content or before
            if token.type in ("text", "code_inline")
            else ""
            if not marks
            else before
        )
    return result
