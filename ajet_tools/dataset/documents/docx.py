"""DOCX as blocks: headings by style, paragraphs, lists, and tables whole."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ajet_sdk.errors import MissingExtra, TaskError
from ajet_tools.dataset.documents.blocks import Block, Headings, table_text

__all__ = ["docx_blocks"]

_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_LARGEST = 1 << 30
_HEADING = re.compile(r"heading (\d)$", re.IGNORECASE)


def docx_blocks(path: Path) -> Iterator[Block]:
    """The blocks of a DOCX. Raises TaskError where it is broken, or needs a password."""
    try:
        import docx
        from docx.table import Table
    except ImportError:
        raise MissingExtra("python-docx", "documents") from None
    _check(path)
    try:
        blocks = list(_blocks(docx.Document(str(path)), Table))
    except Exception as error:
        raise TaskError(f"{path} cannot be read as DOCX: {str(error) or type(error).__name__}") from error
    yield from blocks


def _blocks(document: Any, table: type[Any]) -> Iterator[Block]:
    headings = Headings()
    for item in document.iter_inner_content():
        if isinstance(item, table):
            if text := table_text(_cells(item)):
                yield Block("table", text, heading=headings.path)
            continue
        text, style = item.text.strip(), (item.style.name or "") if item.style is not None else ""
        found = _HEADING.match(style)
        if text and (found or style == "Title"):  # which is as outermost as the first heading
            headings.enter(int(found[1]) if found else 1, text)
            yield Block("heading", text, heading=headings.path)
        elif text:
            yield Block("text", f"- {text}" if style.startswith("List ") else text, heading=headings.path)


def _check(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(8) == _OLE:
            raise TaskError(f"{path} is password-protected, or an old .doc. Save it as .docx without a password")
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(one.file_size for one in archive.infolist())
    except (zipfile.BadZipFile, OSError) as error:
        raise TaskError(f"{path} cannot be read as DOCX: {error}") from error
    if size > _LARGEST:
        raise TaskError(f"{path} is {size / 1e9:.1f} GB when unpacked, which is too large")


def _cells(table: Any) -> list[list[str]]:
    """The texts of a table's cells; one that is merged over several places stands once."""
    return [list({id(cell._tc): cell.text for cell in row.cells}.values()) for row in table.rows]
