"""Documents made ready for questions: copies left out, cut into chunks, and each on one side of the split.

Documents that have much of their text in common (two versions, the same report as PDF and as HTML) stay on one side,
and a chunk that stands in two documents is asked about once.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ajet_sdk.errors import ConfigError
from ajet_tools.dataset.documents.chunks import Chunk, chunks_of, sentences_of
from ajet_tools.dataset.documents.read import Document, Unreadable
from ajet_tools.dataset.similarity.near import Clusters
from ajet_tools.dataset.similarity.text import normal

RELATED = 0.3
"""Two documents belong together from this share of the smaller one's sentences on."""
SMALL = 5
"""With fewer documents, none is kept apart for validation unless that is asked for."""
_LEAST, _MOST = 40, 2000
"""Characters of a sentence that tells one document from another: at least, and those that are looked at."""


@dataclass(frozen=True)
class Held:
    """One document, and what became of it."""

    document: Document
    chunks: tuple[Chunk, ...]
    side: str
    group: int
    """Documents of one group have much of their text in common."""


@dataclass(frozen=True)
class Corpus:
    held: tuple[Held, ...]
    copies: tuple[tuple[str, str], ...] = ()
    """Documents that say the same as another: name, and the other's."""
    unreadable: tuple[Unreadable, ...] = ()

    def chunks(self, side: str, seed: int) -> list[Chunk]:
        """The chunks of a side in the order in which they are asked: of each document as many as it is long."""
        placed = [
            ((rank + start) / len(entry.chunks), entry.document.digest, chunk)
            for entry in self.held
            if entry.side == side
            for start in [int(_hash(f"{seed}:{entry.document.digest}")[:8], 16) / 0x100000000]
            for rank, chunk in enumerate(
                sorted(entry.chunks, key=lambda chunk: _hash(f"{seed}:{chunk.document.digest}:{chunk.number}"))
            )
        ]
        return [chunk for _, _, chunk in sorted(placed, key=lambda item: item[:2])]

    def share(self, side: str) -> float:
        """Of all chunks."""
        total = sum(len(entry.chunks) for entry in self.held)
        return sum(len(entry.chunks) for entry in self.held if entry.side == side) / total if total else 0.0

    @property
    def digest(self) -> str:
        """A digest of the documents' content."""
        return _hash("\n".join(sorted(entry.document.digest for entry in self.held)))

    def as_rows(self) -> list[dict[str, object]]:
        """The documents as `documents.jsonl` holds them."""
        rows: list[dict[str, object]] = [
            {"document": entry.document.name, "digest": entry.document.digest, "format": entry.document.format,
             "characters": entry.document.characters, "pages": entry.document.pages, "chunks": len(entry.chunks),
             "side": entry.side, "group": entry.group} for entry in self.held
        ]  # fmt: skip
        left_out = [(name, f"is a copy of {original}") for name, original in self.copies]
        left_out += [(entry.name, entry.problem) for entry in self.unreadable]
        return rows + [{"document": name, "problem": problem} for name, problem in left_out]


def prepare(
    read: Iterable[Document | Unreadable], *, size: int, seed: int = 0, validation: float | None = None
) -> Corpus:
    """The documents that were read, in chunks of `size` characters, on their sides.

    `validation` is the share of the chunks that is kept for it; None is a tenth where there are five documents. Raises
    ConfigError where there is nothing to keep apart.
    """
    by_digest: dict[str, Document] = {}
    copies, unreadable = list[tuple[str, str]](), list[Unreadable]()
    for document in read:
        if isinstance(document, Unreadable):
            unreadable.append(document)
        elif by_digest.setdefault(document.digest, document) is not document:
            copies.append((document.name, by_digest[document.digest].name))
    documents = list(by_digest.values())
    first: dict[str, Chunk] = {}
    chunks = [tuple(chunk for chunk in chunks_of(document, size) if _is_first(chunk, first)) for document in documents]
    groups = _groups(documents)
    apart = _choose_validation(groups, list(map(len, chunks)), list(by_digest), seed, validation) if documents else ()
    sides = ("validation" if group in apart else "train" for group in groups)
    return Corpus(tuple(map(Held, documents, chunks, sides, groups)), tuple(copies), tuple(unreadable))


def _groups(documents: Sequence[Document]) -> list[int]:
    """The group of each document, by the sentences that it shares with others."""
    if len(documents) < 2:
        return [0] * len(documents)
    sentences = list(map(_sentences, documents))
    where: dict[bytes, list[int]] = defaultdict(list)
    for index, document_sentences in enumerate(sentences):
        for sentence in document_sentences:
            where[sentence].append(index)
    shared: dict[tuple[int, int], int] = defaultdict(int)
    for places in where.values():
        if 1 < len(places) <= 64:
            for at, one in enumerate(places):
                for other in places[at + 1 :]:
                    shared[one, other] += 1
    clusters = Clusters(len(documents))
    for (one, other), count in shared.items():
        if count >= RELATED * min(len(sentences[one]), len(sentences[other])):
            clusters.join(one, other)
    return [clusters.find(index) for index in range(len(documents))]


def _sentences(document: Document) -> set[bytes]:
    """What tells a document from another, as digests."""
    all_sentences = (sentence for block in document.blocks for sentence in sentences_of(block.text))
    long = (sentence[:_MOST] for sentence in all_sentences if len(sentence) >= _LEAST)
    return {hashlib.blake2b(normal(sentence).encode("utf-8", "replace"), digest_size=8).digest() for sentence in long}


def _choose_validation(
    groups: Sequence[int], sizes: Sequence[int], digests: Sequence[str], seed: int, validation: float | None
) -> set[int]:
    """The groups that are kept for validation: in an order of chance, as many as make up the share."""
    chunks: dict[int, int] = defaultdict(int)
    names: dict[int, str] = {}
    for group, size, digest in zip(groups, sizes, digests, strict=True):
        chunks[group] += size
        names[group] = min(digest, names.get(group, digest))
    share = validation if validation is not None else (0.1 if len(chunks) >= SMALL else 0.0)
    if not share:
        return set()
    if len(chunks) < 2:
        reason = "there is one document" if len(groups) == 1 else "the documents have most of their text in common"
        raise ConfigError(
            f"--validation {share:g}: {reason}, and a document is never used for both sides. Add another document, or "
            "pass 0"
        )
    wanted = share * sum(chunks.values())
    order = sorted(chunks, key=lambda group: _hash(f"{seed}:{names[group]}"))
    chosen: list[int] = []
    for group in order:
        taken = sum(chunks[chosen_group] for chosen_group in chosen)
        if len(chosen) < len(order) - 1 and taken < wanted and taken + chunks[group] <= 1.5 * wanted:
            chosen.append(group)
    return set(chosen) or {min(order, key=lambda group: chunks[group])}


def _is_first(chunk: Chunk, first: dict[str, Chunk]) -> bool:
    return first.setdefault(_hash(normal(chunk.text)), chunk) is chunk


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=12).hexdigest()
