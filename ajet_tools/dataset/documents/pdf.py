"""Splits PDFs into blocks: the text of each page, joined into paragraphs, under the headings of the
outline.

PDF has neither paragraphs nor tables. Lines are joined if a sentence continues; without an outline,
short lines in larger type are headings; running heads and page numbers are dropped; a table becomes
its lines.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ajet_sdk.errors import MissingExtra, TaskError
from ajet_tools.dataset.documents.blocks import Block, Headings, is_page_number, plain_blocks

if TYPE_CHECKING:
    from pypdf import PdfReader

_REPEATED_FROM = 4
"""Minimum number of pages to detect running heads."""
_LARGER = 1.15
"""Type size of a heading relative to body text, at least."""
_LONGEST_HEADING = 120
_SENTENCE_END = re.compile(r"[.!?:;。！？：；…][\"'”’)\]]*$")
_ITEM = re.compile(r"\s*(?:[-•*‣–]|\(?\d{1,3}[.)]|\(?[a-z][.)])\s")


class _Line(NamedTuple):
    text: str
    size: float
    """Type size; 0 if unknown."""


def pdf_blocks(path: Path) -> Iterator[Block]:
    """Yields the blocks of a PDF. Raises TaskError if it is broken, password-protected or a
    scan."""
    try:
        from pypdf import PdfReader
    except ImportError:
        raise MissingExtra("pypdf", "documents") from None
    with path.open("rb") as file, _explain_errors(path):
        reader = PdfReader(file)
        # an empty password often forbids printing
        if reader.is_encrypted and not reader.decrypt(""):
            raise TaskError(
                f"{path} is password-protected; decrypt it (`qpdf --decrypt --password=... in.pdf"
                " out.pdf`)"
            )
        pages = _remove_running_heads([_lines(page) for page in reader.pages])
        if not any(line.text.strip() for line in chain.from_iterable(pages)):
            count = "its 1 page has" if len(pages) == 1 else f"its {len(pages)} pages have"
            raise TaskError(
                f"{path}: {count} no text (a scan or drawing); run OCR first (`ocrmypdf in.pdf"
                " out.pdf`)"
            )
        titles = _titles(reader)
    headings = Headings()
    levels = {} if titles else _levels_by_size(pages)
    for number, page in enumerate(pages, 1):
        page_headings, elsewhere = _find_titles(page, titles.get(number, ()))
        for level, title in elsewhere:
            headings.enter(level, title)
        large = {}
        for index, line in enumerate(page):
            if line.size in levels and line.text.strip() and len(line.text) <= _LONGEST_HEADING:
                large[index] = levels[line.size]
        for level, lines in _parts(page, page_headings or large):
            if level:
                headings.enter(level, lines[0])
                yield Block("heading", lines[0], number, headings.path)
            else:
                yield from plain_blocks(_paragraphs(lines), number, headings.path)


@contextmanager
def _explain_errors(path: Path) -> Iterator[None]:
    """Converts errors of pypdf, and mutes its warnings about broken files."""
    from pypdf.errors import DependencyError

    log = logging.getLogger("pypdf")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    except TaskError:
        raise
    except DependencyError as error:
        raise MissingExtra(f"{error}; what reads encrypted PDF", "documents") from error
    except Exception as error:
        raise TaskError(
            f"{path} cannot be read as PDF: {str(error) or type(error).__name__}"
        ) from error
    finally:
        log.setLevel(level)


def _lines(page: Any) -> list[_Line]:
    """Returns the lines of a page, each with the size of most of its letters."""
    pieces: list[tuple[str, float]] = []

    def collect(text: str, _: Any, matrix: Sequence[float], font: Any, size: float) -> None:
        pieces.append((text, abs(size * matrix[3])))

    page_text = page.extract_text(visitor_text=collect).replace("\x00", "")
    lines = [""]
    sizes = [Counter[float]()]
    for text, size in pieces:
        for index, part in enumerate(text.replace("\x00", "").split("\n")):
            if index:
                lines.append("")
                sizes.append(Counter())
            lines[-1] += part
            sizes[-1][round(size, 1)] += len(part.strip())
    if "\n".join(lines).split() != page_text.split():
        return [_Line(line.rstrip(), 0.0) for line in page_text.split("\n")]
    return [
        _Line(line.rstrip(), most.most_common(1)[0][0] if most else 0.0)
        for line, most in zip(lines, sizes, strict=True)
    ]


def _levels_by_size(pages: Sequence[Sequence[_Line]]) -> dict[float, int]:
    """Returns heading levels by type size, for sizes larger than body text."""
    letters: Counter[float] = Counter()
    for line in chain.from_iterable(pages):
        letters[line.size] += len(line.text)
    body = letters.most_common(1)[0][0]
    larger = sorted((size for size in letters if size >= _LARGER * body > 0), reverse=True)
    return {size: min(level, 3) for level, size in enumerate(larger, 1)}


def _find_titles(
    page: Sequence[_Line], titles: Sequence[tuple[int, str]]
) -> tuple[dict[int, int], list[tuple[int, str]]]:
    """Returns the line of each outline title, with its level; and the titles that occur on no line.

    Section numbers are ignored, since they often occur only in the text or only in the outline.
    """
    level_at: dict[int, int] = {}
    elsewhere = []
    for level, title in titles:
        bare = _strip_title(title)
        after = max(level_at, default=-1)
        for place, line in enumerate(page):
            if place > after and bare and _strip_title(line.text) == bare:
                level_at[place] = level
                break
        else:
            elsewhere.append((level, title))
    return level_at, elsewhere


def _strip_title(title: str) -> str:
    return re.sub(r"^(?:\w{1,3}\.)*\d*[.)]?\s+|\W", "", title.strip().casefold())


def _parts(page: Sequence[_Line], headings: dict[int, int]) -> Iterator[tuple[int, list[str]]]:
    """Yields headings with their level, and the lines between them with level 0."""
    between: list[str] = []
    for index, line in enumerate(page):
        if index in headings:
            yield 0, between
            yield headings[index], [line.text.strip()]
            between = []
        else:
            between.append(line.text)
    yield 0, between


def _remove_running_heads(pages: list[list[_Line]]) -> list[list[_Line]]:
    """Removes first and last lines that occur on most pages, ignoring numbers."""
    if len(pages) < _REPEATED_FROM:
        return pages
    for end in (0, -1):
        forms = []
        for page in pages:
            texts = [line.text for line in page if line.text.strip()]
            form = " ".join(texts[end].split()) if texts else ""
            forms.append(re.sub(r"\d+", "0", form))
        counts = Counter(filter(None, forms))
        for page, form in zip(pages, forms, strict=True):
            if counts[form] > len(pages) / 2 or (form and is_page_number(form)):
                places = [index for index, line in enumerate(page) if line.text.strip()]
                del page[places[end]]
    return pages


def _paragraphs(lines: Sequence[str]) -> str:
    """Joins lines into paragraphs, separated by blank lines.

    A line continues in the next unless it ends a sentence before the page's width, or the next is a
    list item.
    """
    width = max((len(line) for line in lines), default=0)
    paragraphs: list[str] = []
    for index, line in enumerate(lines):
        text = line.strip()
        before = lines[index - 1] if index else ""
        goes_on = (
            bool(paragraphs and paragraphs[-1] and text)
            and not _ITEM.match(line)
            and not _ends(before, width)
        )
        if not goes_on:
            paragraphs.append(text)
        elif re.search(r"[^\W\d_][-\u00ad]$", paragraphs[-1]) and text[:1].islower():
            paragraphs[-1] = paragraphs[-1][:-1] + text
        else:
            paragraphs[-1] += ("\n" if len(before) < 0.6 * width else " ") + text
    return "\n\n".join(paragraphs)


def _ends(line: str, width: int) -> bool:
    return bool(_SENTENCE_END.search(line.strip())) and len(line) < 0.85 * width


def _titles(reader: PdfReader) -> dict[int, list[tuple[int, str]]]:
    """Returns level and title of the outline entries, by page."""
    titles_by_page: dict[int, list[tuple[int, str]]] = {}

    def walk(items: Sequence[Any], level: int) -> None:
        for item in items:
            if isinstance(item, list):
                walk(item, level + 1)
                continue
            number = reader.get_destination_page_number(item)
            title = str(item.title or "").strip()
            if number is not None and number >= 0 and title:
                titles_by_page.setdefault(number + 1, []).append((level, title))

    try:
        walk(reader.outline, 1)
    except Exception as error:  # noqa: BLE001  pypdf on a broken outline; the text can be read without it
        logging.getLogger("ajet.dataset").warning(
            "the outline cannot be read; its headings are left out: %s", error
        )
    return titles_by_page
