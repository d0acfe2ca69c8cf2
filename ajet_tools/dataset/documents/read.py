"""Finds documents below the given paths and extracts their text, by file suffix.

Reads PDF, DOCX, HTML, Markdown and plain text. Documents are identified by a digest of their text,
so copies under two names count as one.
"""

from __future__ import annotations

import codecs
import hashlib
import logging
import os
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ajet_sdk.errors import ConfigError, TaskError
from ajet_tools.dataset.documents.blocks import Block, markdown_blocks, plain_blocks
from ajet_tools.dataset.documents.docx import docx_blocks
from ajet_tools.dataset.documents.html import html_blocks
from ajet_tools.dataset.documents.pdf import pdf_blocks

SUFFIXES = {
    ".pdf": "pdf", ".docx": "docx", ".html": "html", ".htm": "html", ".xhtml": "html", ".md": "markdown",
    ".markdown": "markdown", ".txt": "text", ".text": "text", ".rst": "text",
}  # fmt: skip
_UNREAD = (
    ".pptx",
    ".ppt",
    ".xlsx",
    ".xls",
    ".doc",
    ".odt",
    ".odp",
    ".ods",
    ".rtf",
    ".epub",
    ".pages",
    ".key",
    ".numbers",
    ".csv",
    ".tsv",
    ".tex",
    ".ipynb",
    ".eml",
    ".msg",
    ".xml",
    ".json",
)
"""Documents that are not read; in a directory they are named, unlike pictures and programs."""
LARGEST = 256 << 20
"""Size limit of a file, in bytes."""
_NAMED = 10
_SLICE = 1 << 20
log = logging.getLogger("ajet.dataset")
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass(frozen=True)
class Document:
    name: str
    """Path below the argument on the command line, without the parent directories of this
    machine."""
    format: str
    blocks: tuple[Block, ...]
    digest: str
    """Of the text, ignoring white space."""

    @property
    def characters(self) -> int:
        return sum(len(block.text) for block in self.blocks)

    @property
    def pages(self) -> int | None:
        """Number of pages with text, if the format has pages."""
        return len({block.page for block in self.blocks if block.page is not None}) or None


@dataclass(frozen=True)
class Unreadable:
    """A document that could not be read, with the reason."""

    name: str
    problem: str


def find_documents(paths: Iterable[str | Path]) -> list[tuple[str, Path]]:
    """Returns name and path of each document: files, files in directories by suffix, and stdin
    (`-`).

    Hidden files and directories are skipped. Raises ConfigError for a missing path, an unsupported
    file, and a directory without documents.
    """
    documents: dict[Path, tuple[str, Path]] = {}
    for named_path in paths:
        path = Path(named_path).expanduser()
        if str(named_path) == "-":
            documents[path] = ("stdin", path)
            continue
        if path.is_dir():
            inside = []
            unread: list[str] = []
            for file in _walk(path):
                if file.suffix.lower() in SUFFIXES:
                    inside.append(file)
                elif file.suffix.lower() in _UNREAD:
                    unread.append(file.relative_to(path).as_posix())
            if unread:
                names = ", ".join(unread[:_NAMED]) + (", ..." if len(unread) > _NAMED else "")
                log.warning(
                    "%s: %d documents of formats that are not read are left out: %s. Save them as"
                    " PDF, DOCX or text",
                    *(named_path, len(unread), names),
                )
            if not inside:
                raise ConfigError(f"{named_path} contains no documents ({', '.join(SUFFIXES)})")
        elif path.is_file():
            if path.suffix.lower() not in SUFFIXES:
                raise ConfigError(
                    f"{named_path} is not a supported document; supported: {', '.join(SUFFIXES)}"
                )
            inside = [path]
        else:
            raise ConfigError(f"there is no file or directory {named_path}")
        for file in inside:
            name = file.relative_to(path).as_posix() if path.is_dir() else file.name
            documents.setdefault(file.resolve(), (name, file))
    return _unique_names(list(documents.values()))


def _walk(folder: Path) -> Iterator[Path]:
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if not name.startswith("."):
                yield Path(here) / name


def _unique_names(documents: list[tuple[str, Path]]) -> list[tuple[str, Path]]:
    counts = Counter(name for name, _ in documents)
    again: Counter[str] = Counter()
    unique = []
    for short, path in documents:
        name = short if counts[short] == 1 else f"{path.resolve().parent.name}/{path.name}"
        again[name] += 1
        unique.append((name if again[name] == 1 else f"{name} ({again[name]})", path))
    return unique


def read_documents(
    paths: Iterable[str | Path], *, encoding: str | None = None
) -> Iterator[tuple[Document | Unreadable, int, int]]:
    """Yields each document or the problem with it, its number, and the number of documents."""
    documents = find_documents(paths)
    for number, (name, path) in enumerate(documents, 1):
        try:
            read: Document | Unreadable = read_document(path, name=name, encoding=encoding)
        except TaskError as error:
            read = Unreadable(name, str(error))
        yield read, number, len(documents)


def read_document(path: Path, *, name: str | None = None, encoding: str | None = None) -> Document:
    """Reads a document; `-` is stdin, as Markdown. `encoding` applies to text without a byte order
    mark.

    Raises TaskError for an unreadable document, MissingExtra if its reader is not installed.
    """
    kind = "stdin" if str(path) == "-" else SUFFIXES.get(path.suffix.lower(), "text")
    try:
        data = sys.stdin.buffer.read() if kind == "stdin" else b""
        size = len(data) if kind == "stdin" else path.stat().st_size
        if not size:
            raise TaskError(f"{'stdin' if kind == 'stdin' else path} is empty")
        if size > LARGEST:
            raise TaskError(
                f"{path} has {size / 1e6:,.0f} MB; the limit per document is"
                f" {LARGEST / 1e6:,.0f} MB"
            )
        blocks = tuple(map(_normalize, _blocks(path, kind, encoding, data)))
    except OSError as error:
        raise TaskError(f"cannot read {path}: {error.strerror or error}") from error
    if not any(block.kind != "heading" and block.text.strip() for block in blocks):
        raise TaskError(f"{path} contains no text" + (" but headings" if blocks else ""))
    digest = hashlib.blake2b(digest_size=12)
    for block in blocks:
        for start in range(0, len(block.text), _SLICE):
            digest.update("".join(block.text[start : start + _SLICE].split()).encode())
    return Document(name or path.name, kind, blocks, digest.hexdigest())


def _normalize(block: Block) -> Block:
    """Normalizes Unicode to NFC, and replaces characters that UTF-8 can't encode."""
    if block.text.isascii() and block.heading.isascii():
        return block
    return replace(block, text=_in_utf8(block.text), heading=_in_utf8(block.heading))


def _in_utf8(text: str) -> str:
    return unicodedata.normalize("NFC", text).encode("utf-8", "replace").decode()


def _blocks(path: Path, kind: str, encoding: str | None, data: bytes) -> Iterable[Block]:
    if kind == "pdf":
        return pdf_blocks(path)
    if kind == "docx":
        return docx_blocks(path)
    data = data or path.read_bytes()
    if kind == "html":
        return html_blocks(path, data, encoding)
    text = _decode(path, data, encoding)
    if kind in ("markdown", "stdin"):
        return markdown_blocks(text)
    return plain_blocks(text)


def _decode(path: Path, data: bytes, encoding: str | None) -> str:
    marked = next((name for mark, name in _MARKS if data.startswith(mark)), None)
    try:
        text = data.decode(marked or encoding or "utf-8")
    except LookupError:
        raise ConfigError(f"--with encoding: unknown encoding {encoding!r}") from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise TaskError(
            f"{path} line {line} is not {marked or encoding or 'UTF-8'} (byte"
            f" 0x{data[error.start]:02x}). Pass --with encoding=latin-1 (or the right one), or convert"
            " it with `iconv -t UTF-8`"
        ) from None
    if "\x00" in text[:4096]:
        raise TaskError(f"{path} is not a text file: it contains zero bytes")
    return text.replace("\r\n", "\n").replace("\r", "\n")
