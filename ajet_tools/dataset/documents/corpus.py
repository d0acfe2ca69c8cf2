"""Prepares documents for questions: removes copies, splits them into chunks, and assigns each to a
split side.

Documents that share much of their text (two versions, the same report as PDF and as HTML) stay on
one side, and a chunk that occurs in two documents is used once.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from ajet_sdk.errors import AjetError, ConfigError
from ajet_tools.dataset.documents.chunks import Chunk, chunks_of, sentences_of
from ajet_tools.dataset.documents.read import Document, Unreadable
from ajet_tools.dataset.similarity.near import Clusters
from ajet_tools.dataset.similarity.text import normal

RELATED = 0.3
"""Two documents are related if they share this fraction of the smaller one's sentences."""
SMALL = 5
"""With fewer documents, none is held out for validation by default."""
_LEAST = 40
"""Minimum length of a sentence for comparisons."""
_MOST = 2000
"""Characters of a sentence that are compared."""


class DocumentsFailed(AjetError, RuntimeError):
    """Some documents could not be read; the others gave rows."""


@dataclass(frozen=True)
class Held:
    """A document with its chunks and split side."""

    document: Document
    chunks: tuple[Chunk, ...]
    side: str
    group: int
    """Documents of one group share much of their text."""


@dataclass(frozen=True)
class Corpus:
    held: tuple[Held, ...]
    copies: tuple[tuple[str, str], ...] = ()
    """Documents with the same text as another: name, and name of the other."""
    unreadable: tuple[Unreadable, ...] = ()

    def chunks(self, side: str, seed: int) -> list[Chunk]:
        """Returns the chunks of a side in the order of use, which interleaves the documents by
        their length."""

        def order(chunk: Chunk) -> str:
            return _hash(f"{seed}:{chunk.document.digest}:{chunk.number}")

        placed: list[tuple[float, str, Chunk]] = []
        for entry in self.held:
            if entry.side != side:
                continue
            digest = entry.document.digest
            start = int(_hash(f"{seed}:{digest}")[:8], 16) / 0x100000000
            for rank, chunk in enumerate(sorted(entry.chunks, key=order)):
                placed.append(((rank + start) / len(entry.chunks), digest, chunk))
        placed.sort(key=lambda item: item[:2])
        return [chunk for _, _, chunk in placed]

    @property
    def validation_share(self) -> float:
        """The share of all chunks that is held out."""
        chunks: Counter[str] = Counter()
        for entry in self.held:
            chunks[entry.side] += len(entry.chunks)
        return chunks["validation"] / max(1, chunks.total())

    @property
    def failure(self) -> DocumentsFailed | None:
        """The reason why the rows are of fewer documents than were given, if any."""
        if not self.unreadable:
            return None
        bad = len(self.unreadable)
        total = bad + len(self.held) + len(self.copies)
        return DocumentsFailed(
            f"{bad} of {total} documents could not be read (listed above and in documents.jsonl); "
            "the rows are from the others"
        )

    @property
    def digest(self) -> str:
        """A digest of the documents' content."""
        return _hash("\n".join(sorted(entry.document.digest for entry in self.held)))

    def as_rows(self) -> list[dict[str, object]]:
        """Returns the rows of `documents.jsonl`."""
        rows: list[dict[str, object]] = [
            {"document": entry.document.name, "digest": entry.document.digest, "format": entry.document.format,
             "characters": entry.document.characters, "pages": entry.document.pages, "chunks": len(entry.chunks),
             "side": entry.side, "group": entry.group} for entry in self.held
        ]  # fmt: skip
        left_out = [(name, f"is a copy of {original}") for name, original in self.copies]
        left_out += [(entry.name, entry.problem) for entry in self.unreadable]
        return rows + [{"document": name, "problem": problem} for name, problem in left_out]


def prepare(
    read: Iterable[Document | Unreadable],
    *,
    size: int,
    seed: int = 0,
    validation: float | None = None,
) -> Corpus:
    """Splits documents into chunks of `size` characters, and assigns them to sides.

    `validation` is the share of chunks to hold out; None means a tenth if there are five documents.
    Raises ConfigError if no document can be held out.
    """
    by_digest: dict[str, Document] = {}
    copies: list[tuple[str, str]] = []
    unreadable: list[Unreadable] = []
    for document in read:
        if isinstance(document, Unreadable):
            unreadable.append(document)
        elif by_digest.setdefault(document.digest, document) is not document:
            copies.append((document.name, by_digest[document.digest].name))
    documents = list(by_digest.values())
    groups = _groups(documents)
    seen: set[str] = set()
    chunks: list[tuple[Chunk, ...]] = []
    for document in documents:
        new = []
        for chunk in chunks_of(document, size):
            digest = _hash(normal(chunk.text))
            if digest not in seen:
                seen.add(digest)
                new.append(chunk)
        chunks.append(tuple(new))
    apart: set[int] = set()
    if documents:
        sizes = list(map(len, chunks))
        apart = _choose_validation(groups, sizes, list(by_digest), seed, validation)
    held = []
    for document, some, group in zip(documents, chunks, groups, strict=True):
        side = "validation" if group in apart else "train"
        held.append(Held(document, some, side, group))
    return Corpus(tuple(held), tuple(copies), tuple(unreadable))


def _groups(documents: Sequence[Document]) -> list[int]:
    if len(documents) < 2:
        return [0] * len(documents)
    sentences = list(map(_sentences, documents))
    where: dict[bytes, list[int]] = defaultdict(list)
    for index, document_sentences in enumerate(sentences):
        for sentence in document_sentences:
            where[sentence].append(index)
    shared: dict[tuple[int, int], int] = defaultdict(int)
    for places in where.values():
        # what stands in more documents is boilerplate, and its pairs would be too many
        if 1 < len(places) <= 64:
            for pair in combinations(places, 2):
                shared[pair] += 1
    clusters = Clusters(len(documents))
    for (first, second), count in shared.items():
        if count >= RELATED * min(len(sentences[first]), len(sentences[second])):
            clusters.join(first, second)
    return [clusters.find(index) for index in range(len(documents))]


def _sentences(document: Document) -> set[bytes]:
    """Returns the digests of the long sentences."""
    digests = set()
    for block in document.blocks:
        for sentence in sentences_of(block.text):
            if len(sentence) >= _LEAST:
                text = normal(sentence[:_MOST]).encode("utf-8", "replace")
                digests.add(hashlib.blake2b(text, digest_size=8).digest())
    return digests


def _choose_validation(
    groups: Sequence[int],
    sizes: Sequence[int],
    digests: Sequence[str],
    seed: int,
    validation: float | None,
) -> set[int]:
    """Chooses groups at random until they make up the validation share."""
    chunks: dict[int, int] = defaultdict(int)
    names: dict[int, str] = {}
    for group, size, digest in zip(groups, sizes, digests, strict=True):
        chunks[group] += size
        names[group] = min(digest, names.get(group, digest))
    share = validation
    if share is None:
        share = 0.1 if len(chunks) >= SMALL else 0.0
    if not share:
        return set()
    if len(chunks) < 2:
        reason = "the documents have most of their text in common"
        if len(groups) == 1:
            reason = "there is one document"
        raise ConfigError(
            f"--validation {share:g}: {reason}, and no document is on both sides; add documents, or"
            " pass 0"
        )
    wanted = share * sum(chunks.values())
    order = sorted(chunks, key=lambda group: _hash(f"{seed}:{names[group]}"))
    apart: set[int] = set()
    taken = 0
    for group in order:
        fits = taken < wanted and taken + chunks[group] <= 1.5 * wanted
        if fits and len(apart) < len(order) - 1:
            apart.add(group)
            taken += chunks[group]
    return apart or {min(order, key=lambda group: chunks[group])}


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=12).hexdigest()
