"""Splits HTML into blocks: headings, paragraphs, lists, code and tables; drops menus, scripts and
hidden elements."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ajet_sdk.errors import MissingExtra, TaskError
from ajet_tools.dataset.documents.blocks import Block, Headings, table_text

_LEFT_OUT = (
    "script",
    "style",
    "noscript",
    "template",
    "svg",
    "nav",
    "form",
    "button",
    "select",
    "iframe",
    "object",
    "canvas",
    "head",
)
_HEADINGS = {f"h{level}": level for level in range(1, 7)}
_CONTAINERS = {
    "html", "body", "main", "article", "section", "header", "footer", "aside", "div", "p", "pre", "blockquote", "ul",
    "ol", "li", "dl", "dt", "dd", "details", "summary", "figure", "figcaption", "address", "table", *_HEADINGS,
}  # fmt: skip
"""Elements that start a new block."""
_BLOCK_NAMES = sorted(_CONTAINERS)
_HIDING = re.compile(
    r"(?:^|[;\s])(?:display\s*:\s*none|visibility\s*:\s*(?:hidden|collapse))\b", re.IGNORECASE
)
_RULE = re.compile(r"([^{}]+)\{([^{}]*)\}")
_AT_RULE = re.compile(r"@[^{};]*(?:;|\{(?:[^{}]*\{[^{}]*\})*[^{}]*\})")
"""Matches at-rules, for certain screens or for print."""
_CSS_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)


def html_blocks(path: Path, data: bytes, encoding: str | None = None) -> Iterator[Block]:
    """Yields the blocks of a page. Raises TaskError if the declared encoding (default: UTF-8) is
    wrong."""
    try:
        from bs4 import BeautifulSoup
        from bs4.dammit import EncodingDetector
    except ImportError:
        raise MissingExtra("beautifulsoup4", "documents") from None
    declared = encoding or EncodingDetector.find_declared_encoding(
        data, is_html=True, search_entire_document=False
    )
    data, marked = EncodingDetector.strip_byte_order_mark(data)
    try:
        text = data.decode(marked or declared or "utf-8")
    except (UnicodeDecodeError, LookupError) as error:
        if declared:
            says = f"declares {declared}"
        else:
            says = "does not declare its encoding"
        raise TaskError(
            f"{path} {says}, and cannot be decoded: {error}. Convert it to UTF-8 or pass --with encoding="
        ) from None
    soup = BeautifulSoup(text, "html.parser")
    for tag in [*soup.find_all(list(_LEFT_OUT)), *_hidden(soup)]:
        if tag.name not in ("html", "body"):  # scripts may reveal these
            tag.decompose()
    try:
        yield from _walk(soup.find("main") or soup.find("article") or soup.body or soup, Headings())
    except RecursionError:
        raise TaskError(f"{path} is nested too deeply") from None


def _hidden(soup: Any) -> Iterator[Any]:
    """Yields elements hidden by an attribute, their style, or a style rule for all screens."""
    from bs4.css import soupsieve

    yield from soup.select("[hidden], dialog:not([open])")
    yield from (tag for tag in soup.find_all(style=True) if _HIDING.search(tag["style"]))
    sheets = _AT_RULE.sub(
        "", _CSS_COMMENT.sub("", "".join(sheet.get_text() for sheet in soup.find_all("style")))
    )
    for rule in _RULE.finditer(sheets):
        if _HIDING.search(rule[2]):
            try:
                yield from soup.select(rule[1])
            except (soupsieve.SelectorSyntaxError, NotImplementedError):
                continue


def _walk(node: Any, headings: Headings) -> Iterator[Block]:
    from bs4.element import NavigableString

    loose: list[str] = []
    for child in node.children:
        if isinstance(child, NavigableString):
            if type(child) is NavigableString:  # comments are a subclass
                loose.append(str(child))
            continue
        if child.name == "br":
            loose.append("\n")
            continue
        if child.name not in _CONTAINERS and not child.find(_BLOCK_NAMES):
            loose.append(child.get_text())
            continue
        yield from _text("".join(loose), headings)
        loose = []
        yield from _element(child, headings)
    yield from _text("".join(loose), headings, item=node.name == "li")


def _element(tag: Any, headings: Headings) -> Iterator[Block]:
    if tag.name in _HEADINGS:
        if title := " ".join(tag.get_text().split()):
            headings.enter(_HEADINGS[tag.name], title)
            yield Block("heading", title, heading=headings.path)
    elif tag.name == "table" and not tag.find("table"):
        rows = []
        for row in tag.find_all("tr"):
            rows.append([cell.get_text(" ") for cell in row.find_all(["td", "th"])])
        if text := table_text(rows):
            yield Block("table", text, heading=headings.path)
    elif tag.name == "pre":
        if tag.get_text().strip():
            yield Block("code", tag.get_text().strip("\n").rstrip(), heading=headings.path)
    else:
        yield from _walk(tag, headings)


def _text(loose: str, headings: Headings, *, item: bool = False) -> Iterator[Block]:
    text = " ".join(loose.split())
    if text:
        yield Block("text", f"- {text}" if item else text, heading=headings.path)
