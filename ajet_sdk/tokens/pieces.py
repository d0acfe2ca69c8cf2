"""Tokenizes text in pieces: finds safe cut points, and caches the ids of pieces."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence

from ajet_sdk.protocols import Tokenizer


class CutPoints:
    """Special tokens before which a text may be cut, learnt as they occur. Thread-safe.

    A token qualifies if it is tokenized separately in any context, so that no merge crosses the
    cut.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._known: set[int] = set()
        self.heads: dict[str, list[int]] = {}
        """Ids by text of each cut token."""
        self._before: re.Pattern[str] | None = None
        self.anchor: str | None = None
        """The text of the first cut token, once known."""
        self.learn(sorted(tokenizer.eos_ids))

    def learn(self, ids: Sequence[int]) -> None:
        """Test new tokens among the ids."""
        unknown = set(ids) - self._known
        if unknown:
            with self._lock:
                for token_id in sorted(unknown - self._known):
                    self._learn(token_id)

    def split(self, text: str) -> list[str]:
        """Splits a text at known cuts."""
        if self._before is None:
            return [text]
        return [piece for piece in self._before.split(text) if piece]

    def _learn(self, token_id: int) -> None:
        self._known.add(token_id)
        if not self._tokenizer.is_special(token_id):
            return
        text = self._tokenizer.decode([token_id])
        if not text or not self._stands_alone(text, token_id):
            return
        self.heads[text] = self._tokenizer.encode(text)
        self.anchor = self.anchor or text
        longest_first = sorted(self.heads, key=len, reverse=True)
        self._before = re.compile("(?=" + "|".join(map(re.escape, longest_first)) + ")")

    def _stands_alone(self, text: str, token_id: int) -> bool:
        """Whether a cut before this token changes nothing in several contexts."""
        encode = self._tokenizer.encode
        for before, after in (("a", "b"), ("a ", " b"), ("a\n", "\nb"), ("a", text)):
            right = encode(text + after)
            if right[:1] != [token_id] or encode(before + text + after) != encode(before) + right:
                return False
        return True


class PieceEncoder:
    """Encodes conversations piece by piece with a cache, so that known text takes only a lookup.

    Calls that don't extend each other (a template that drops reasoning, for example) then cost only
    their new text. The cache is limited to `limit` characters.
    """

    def __init__(self, tokenizer: Tokenizer, cuts: CutPoints, limit: int = 4_000_000) -> None:
        self._tokenizer = tokenizer
        self._cuts = cuts
        self._limit = limit
        self._size = 0
        self._pieces: OrderedDict[str, list[int]] = OrderedDict()

    def encode(self, text: str) -> list[int]:
        """Encodes a text; the ids equal those of the tokenizer."""
        pieces = self._cuts.split(text)
        if len(pieces) == 1:
            ids = self._tokenizer.encode(text)
        else:
            ids = [i for piece in pieces for i in self._piece(piece)]
        self._cuts.learn(ids)
        return ids

    def behind(self, text: str, tail: str) -> list[int] | None:
        """The ids of `tail` after `text`; None if a token crosses the boundary."""
        head = self._cuts.heads.get(text) or self._tokenizer.encode(text)
        whole = self._tokenizer.encode(text + tail)
        return whole[len(head) :] if whole[: len(head)] == head else None

    def _piece(self, piece: str) -> list[int]:
        ids = self._pieces.get(piece)
        if ids is not None:
            self._pieces.move_to_end(piece)
            return ids
        ids = self._tokenizer.encode(piece)
        self._pieces[piece] = ids
        self._size += len(piece)
        while self._size > self._limit:
            self._size -= len(self._pieces.popitem(last=False)[0])
        return ids
