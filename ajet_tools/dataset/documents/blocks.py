"""What a document is made of: paragraphs, tables and code, each with the page and the headings that it stands under."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["heading", "text", "table", "code"]

_ATX = re.compile(r" {0,3}(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*$")
_SETEXT = re.compile(r" {0,3}(=+|-{2,})[ \t]*$")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_RULE = re.compile(r"[ \t]*\|?[ \t]*:?-+:?[ \t]*(\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$")
_PAGE_NUMBER = re.compile(r"(?:page )?(?:\d+|[ivxl]+)(?: (?:of|/) \d+)?|[-–] \d+ [-–]", re.IGNORECASE)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a document that is one thing: a heading, a paragraph or list, a table, code."""

    kind: Kind
    text: str
    page: int | None = None
    heading: str = ""
    """The headings that it stands under, outermost first: `Guide > Install`. A heading stands under itself."""


class Headings:
    """The headings in force at the place that was reached."""

    def __init__(self) -> None:
        self._levels: dict[int, str] = {}

    def enter(self, level: int, title: str) -> None:
        """A heading of that level (1 is the outermost) ends all those of its level and below."""
        self._levels = {one: name for one, name in self._levels.items() if one < level}
        self._levels[level] = " ".join(title.split())

    @property
    def path(self) -> str:
        return " > ".join(self._levels[level] for level in sorted(self._levels))


def table_text(rows: list[list[str]]) -> str:
    """Cells as lines of Markdown, the first row as its head."""
    cleaned = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows if any(map(str.strip, row))]
    if not cleaned:
        return ""
    width = max(map(len, cleaned))
    lines = ["| " + " | ".join(row + [""] * (width - len(row))) + " |" for row in cleaned]
    return "\n".join([lines[0], "|" + " --- |" * width, *lines[1:]])


def is_page_number(line: str) -> bool:
    """A line at the top or the bottom of a page that says nothing else."""
    return _PAGE_NUMBER.fullmatch(line.strip()) is not None


def plain_blocks(text: str, page: int | None = None, heading: str = "") -> Iterator[Block]:
    """Paragraphs of text without marks, told by blank lines."""
    for paragraph in re.split(r"\n[ \t]*(?:\n[ \t]*)+", text):
        if paragraph.strip():
            yield Block("text", paragraph.strip("\n").rstrip(), page, heading)


def markdown_blocks(text: str) -> Iterator[Block]:
    """Headings, paragraphs and lists, tables and fenced code of Markdown; front matter and comments are left out."""
    headings = Headings()
    for kind, level, lines in _pieces(_COMMENT.sub("", _strip_front_matter(text)).split("\n")):
        body = "\n".join(lines).strip("\n").rstrip()
        if not body.strip():
            continue
        if kind == "heading":
            headings.enter(level, body)
        yield Block(kind, body, heading=headings.path)


def _strip_front_matter(text: str) -> str:
    found = re.match(r"---[ \t]*\n.*?\n(?:---|\.\.\.)[ \t]*(?:\n|$)", text, re.DOTALL)
    return text[found.end() :] if found else text


def _pieces(lines: list[str]) -> Iterator[tuple[Kind, int, list[str]]]:
    """Kind, level of a heading, and lines; together they are the whole document."""
    open_: list[str] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        fence, atx = _FENCE.match(line), _ATX.match(line)
        is_table = "|" in line and at + 1 < len(lines) and "|" in lines[at + 1] and bool(_RULE.match(lines[at + 1]))
        setext = _SETEXT.match(line) if len(open_) == 1 else None
        if setext:
            yield "heading", 1 if "=" in line else 2, open_
            open_, at = [], at + 1
            continue
        if not (fence or atx or is_table or not line.strip()):
            open_.append(line)
            at += 1
            continue
        if open_:
            yield "text", 0, open_
            open_ = []
        if fence:
            end = _fence_end(lines, at, fence[1])
            yield "code", 0, lines[at:end]
            at = end
        elif is_table:
            end = next((i for i in range(at, len(lines)) if "|" not in lines[i]), len(lines))
            yield "table", 0, lines[at:end]
            at = end
        else:
            if atx:
                yield "heading", len(atx[1]), [atx[2] or ""]
            at += 1
    if open_:
        yield "text", 0, open_


def _fence_end(lines: list[str], at: int, mark: str) -> int:
    closing = re.compile(rf" {{0,3}}{re.escape(mark[0])}{{{len(mark)},}}[ \t]*$")
    return next((i + 1 for i in range(at + 1, len(lines)) if closing.match(lines[i])), len(lines))
