"""A document cut for prompts: by its headings and paragraphs, tables and code whole."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile

from ajet_tools.dataset.documents.blocks import Block
from ajet_tools.dataset.documents.read import Document

WHOLE = 4
"""A table or code may be so many times as long as a chunk before it is cut between its lines."""
_SMALL = 0.25
"""A heading begins a chunk, unless the one before is smaller than this share of the size."""
_SENTENCE = re.compile(r"[.!?。！？\n](?:(?<=[.!?])[\"'”’)\]]*\s+|(?<=[。！？\n]))")
"""One set of characters in front, so that a text of 50 MB is searched in a second."""
_BETWEEN = "\n\n"


@dataclass(frozen=True)
class Chunk:
    """A piece of one document, as it stands in a prompt."""

    document: Document
    number: int
    """From 0, within the document."""
    blocks: tuple[Block, ...]
    text: str

    def block_at(self, offset: int) -> Block:
        """The block that the character at an offset of `text` belongs to."""
        starts, at = [], 0
        for block in self.blocks:
            starts.append(at)
            at += len(_show(block)) + len(_BETWEEN)
        return self.blocks[max(0, bisect_right(starts, offset) - 1)]


def chunks_of(document: Document, size: int) -> Iterator[Chunk]:
    """The document in pieces of at most `size` characters; a table or code longer than that is a piece of its own.

    A paragraph that is too long is cut between sentences. A piece of headings alone is left out.
    """
    taken: list[Block] = []
    length = number = 0
    pieces = [piece for block in document.blocks for piece in _split_block(block, size)]
    for piece in [*pieces, None]:
        more = len(_show(piece)) + len(_BETWEEN) if piece is not None else 0
        full = length + more - len(_BETWEEN) > size
        if taken and (piece is None or full or (piece.kind == "heading" and length >= _SMALL * size)):
            last = reversed(taken) if piece is not None and piece.kind != "heading" else ()
            headings = [*takewhile(lambda block: block.kind == "heading", last)][::-1]  # they go with what follows
            body = taken[: len(taken) - len(headings)]
            if any(block.kind != "heading" for block in body):
                yield Chunk(document, number, tuple(body), _BETWEEN.join(map(_show, body)))
                number += 1
            taken, length = headings, sum(len(_show(block)) + len(_BETWEEN) for block in headings)
        if piece is not None:
            taken.append(piece)
            length += more


def _show(block: Block) -> str:
    if block.kind != "heading":
        return block.text
    level = min(6, block.heading.count(" > ") + 1)
    return f"{'#' * level} {block.text}"


def _split_block(block: Block, size: int) -> Iterator[Block]:
    """The block, in as many pieces as it takes."""
    whole = block.kind in ("table", "code")
    if len(block.text) <= (WHOLE * size if whole else size):
        yield block
        return
    head, units = _units(block, size)
    piece = head
    for unit in units:
        if len(piece) > len(head) and len(piece) + len(unit) > size:
            yield replace(block, text=piece.strip("\n").rstrip())
            piece = head
        piece += unit
    if piece[len(head) :].strip():
        yield replace(block, text=piece.strip("\n").rstrip())


def _units(block: Block, size: int) -> tuple[str, Iterator[str]]:
    """What each piece begins with (a table's head), and what may not be cut any further."""
    if block.kind == "table":
        lines = block.text.splitlines(keepends=True)
        return "".join(lines[:2]), (part for line in lines[2:] for part in _split_text(line, size))
    if block.kind == "code":
        return "", (part for line in block.text.splitlines(keepends=True) for part in _split_text(line, size))
    return "", (part for sentence in sentences_of(block.text) for part in _split_text(sentence, size))


def sentences_of(text: str) -> Iterator[str]:
    """The text cut behind its sentences and lines; the white space stays with them."""
    start = 0
    for match in _SENTENCE.finditer(text):
        yield text[start : match.end()]
        start = match.end()
    if start < len(text):
        yield text[start:]


def _split_text(text: str, size: int) -> Iterator[str]:
    """What is longer than a chunk and has no sentence in it: cut at white space, else anywhere."""
    start = 0
    while len(text) - start > size:
        cut = text.rfind(" ", start + size // 2, start + size)
        cut = cut + 1 if cut > 0 else start + size
        yield text[start:cut]
        start = cut
    yield text[start:]
