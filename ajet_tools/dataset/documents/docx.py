"""Splits DOCX files into blocks: headings by style, paragraphs, lists and whole tables.

Includes text boxes, controls, insertions, footnotes, and each distinct page header (first) and
footer (last); deletions and hidden text are dropped. If a table contains tables, each cell becomes
text.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from ajet_sdk.errors import MissingExtra, TaskError
from ajet_tools.dataset.documents.blocks import Block, Headings, is_page_number, table_text

_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_LARGEST = 1 << 30  # a small archive may unpack to any size
_HEADING = re.compile(r"heading (\d)$", re.IGNORECASE)
_UNSEEN = ("del", "moveFrom", "Fallback")
"""Elements with deleted text, and fallbacks for older programs, which repeat text."""
_MARKS = {"tab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}


def docx_blocks(path: Path) -> Iterator[Block]:
    """Returns the blocks of a DOCX file. Raises TaskError if it is broken or password-protected."""
    try:
        import docx
    except ImportError:
        raise MissingExtra("python-docx", "documents") from None
    _check(path)
    try:
        document = docx.Document(str(path))
        headings = Headings()
        blocks = [*_beside(document, "/header", headings)]
        blocks += _story(document.element.body, document, headings)
        for kind in ("/footnotes", "/endnotes", "/footer"):
            blocks += _beside(document, kind, headings)
    except Exception as error:
        raise TaskError(
            f"{path} cannot be read as DOCX: {str(error) or type(error).__name__}"
        ) from error
    yield from blocks


def _check(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(8) == _OLE:
            raise TaskError(
                f"{path} is password-protected, or an old .doc. Save it as .docx without a password"
            )
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
    except (zipfile.BadZipFile, OSError) as error:
        raise TaskError(f"{path} cannot be read as DOCX: {error}") from error
    if size > _LARGEST:
        raise TaskError(f"{path} is {size / 1e9:.1f} GB when unpacked, which is too large")


def _beside(document: Any, kind: str, headings: Headings) -> Iterator[Block]:
    """Yields the blocks of headers, footers or notes, without repetitions."""
    from docx.oxml import parse_xml

    seen: set[str] = set()
    for relation in document.part.rels.values():
        if relation.reltype.endswith(kind):
            for block in _story(parse_xml(relation.target_part.blob), document, headings):
                if block.text not in seen and not is_page_number(block.text):
                    seen.add(block.text)
                    yield block


def _story(element: Any, document: Any, headings: Headings) -> Iterator[Block]:
    for child in element:
        name = _name(child)
        if name == "p":
            yield from _paragraph(child, document, headings)
        elif name == "tbl" and not any(_name(inner) == "tbl" for inner in child.iterdescendants()):
            if text := table_text(_cells(child, document)):
                yield Block("table", text, heading=headings.path)
        elif name not in _UNSEEN:
            yield from _story(child, document, headings)


def _paragraph(element: Any, document: Any, headings: Headings) -> Iterator[Block]:
    from docx.text.paragraph import Paragraph

    paragraph = Paragraph(element, document)
    text = _text(element).strip()
    style = ""
    if paragraph.style is not None:
        style = paragraph.style.name or ""
    match = _HEADING.match(style)
    if text and (match or style == "Title"):  # a title has the level of the first heading
        headings.enter(int(match[1]) if match else 1, text)
        yield Block("heading", text, heading=headings.path)
    elif text:
        shown = f"- {text}" if style.startswith("List ") else text
        yield Block("text", shown, heading=headings.path)
    for box in element.iterdescendants():
        if _name(box) == "txbxContent" and not any(
            _name(ancestor) in _UNSEEN for ancestor in box.iterancestors()
        ):
            yield from _story(box, document, headings)


def _text(element: Any) -> str:
    """Returns the text of a paragraph or part of it, except in text boxes."""
    name = _name(element)
    if name == "t":
        return element.text or ""
    if name in _MARKS:
        return _MARKS[name]
    if name in (*_UNSEEN, "txbxContent", "pPr") or (name == "r" and _is_hidden(element)):
        return ""
    return "".join(map(_text, element))


def _is_hidden(run: Any) -> bool:
    properties = (mark for mark in run if _name(mark) == "rPr")
    return any(_name(inner) == "vanish" for inner in chain.from_iterable(properties))


def _cells(table: Any, document: Any) -> list[list[str]]:
    """Returns the texts of a table's cells; a merged cell occurs once per row."""
    from docx.table import Table

    rows = []
    for row in Table(table, document).rows:
        text_by_cell = {id(cell._tc): " ".join(map(_text, cell._tc)) for cell in row.cells}
        rows.append(list(text_by_cell.values()))
    return rows


def _name(element: Any) -> str:
    return str(element.tag).rpartition("}")[2]
