"""Splits a document into blocks (headings, paragraphs, tables, code), each with its page and
headings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from markdown_it import MarkdownIt

Kind = Literal["heading", "text", "table", "code"]
_PAGE_NUMBER = re.compile(
    r"(?:page )?(?:\d+|[ivxl]+)(?: (?:of|/) \d+)?|[-–] \d+ [-–]", re.IGNORECASE
)
_FRONT_MATTER = re.compile(r"---[ \t]*\n.*?\n(?:---|\.\.\.)[ \t]*(?:\n|$)", re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_MARKDOWN = MarkdownIt("commonmark").enable("table").disable(["inline", "reference"])
_KINDS: Mapping[str, Kind] = {"heading_open": "heading", "table_open": "table", "fence": "code"}


@dataclass(frozen=True, slots=True)
class Block:
    """A heading, a paragraph or list, a table, or code."""

    kind: Kind
    text: str
    page: int | None = None
    heading: str = ""
    """Path of headings, outermost first: `Guide > Install`. Includes the block itself if it is a
    heading."""


class Headings:
    """The heading path at the current position."""

    def __init__(self) -> None:
        self._levels: dict[int, str] = {}

    def enter(self, level: int, title: str) -> None:
        """Replaces the headings of this level (1 is the outermost) and below."""
        self._levels = {outer: name for outer, name in self._levels.items() if outer < level}
        self._levels[level] = " ".join(title.split())

    @property
    def path(self) -> str:
        return " > ".join(self._levels[level] for level in sorted(self._levels))


def table_text(rows: list[list[str]]) -> str:
    """Formats cells as a Markdown table; the first row is the header."""
    cleaned = []
    for row in rows:
        if any(map(str.strip, row)):
            cleaned.append([" ".join(cell.split()).replace("|", "\\|") for cell in row])
    if not cleaned:
        return ""
    width = max(map(len, cleaned))
    lines = ["| " + " | ".join(row + [""] * (width - len(row))) + " |" for row in cleaned]
    return "\n".join([lines[0], "|" + " --- |" * width, *lines[1:]])


def is_page_number(line: str) -> bool:
    """Whether a line contains only a page number."""
    return _PAGE_NUMBER.fullmatch(line.strip()) is not None


def plain_blocks(text: str, page: int | None = None, heading: str = "") -> Iterator[Block]:
    """Yields the paragraphs of plain text, separated by blank lines."""
    for paragraph in re.split(r"\n[ \t]*(?:\n[ \t]*)+", text):
        if paragraph.strip():
            yield Block("text", paragraph.strip("\n").rstrip(), page, heading)


def markdown_blocks(text: str) -> Iterator[Block]:
    """Yields headings, paragraphs and lists, tables and fenced code; drops front matter and
    comments."""
    if front_matter := _FRONT_MATTER.match(text):
        text = text[front_matter.end() :]
    headings = Headings()
    source = _COMMENT.sub("", text)
    lines = source.split("\n")
    tokens = _MARKDOWN.parse(source)
    for index, token in enumerate(tokens):
        if token.level or token.map is None:
            continue
        kind = _KINDS.get(token.type, "text")
        if kind == "heading":
            body = tokens[index + 1].content
        else:
            body = "\n".join(lines[slice(*token.map)]).strip("\n").rstrip()
        if not body.strip():
            continue
        if kind == "heading":
            headings.enter(int(token.tag[1]), body)
        yield Block(kind, body, heading=headings.path)
