"""Grammars over a tokenizer's ids: which replies they admit, and which tokens they allow next."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ajet_sdk.errors import MissingExtra, RequestRefused
from ajet_sdk.protocols import Tokenizer


class Matcher:
    """The state of one reply under a grammar."""

    def __init__(self, grammar: str, tokenizer: Tokenizer) -> None:
        """Raises RequestRefused where the grammar can't be compiled."""
        self._matcher = _compiled(grammar, tokenizer).deep_copy()
        self._words = np.zeros((1, (len(tokenizer) + 31) // 32), dtype=np.int32)

    def allowed(self) -> npt.NDArray[np.int32]:
        """Which tokens may come next: a bit for each id, 32 to a word, the lowest first. Shape (1, words)."""
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        return self._words

    def take(self, token_id: int) -> bool:
        """Go on by one token; False where it is not allowed, after which nothing is."""
        return bool(self._matcher.consume_token(token_id))


def admits(grammar: str, tokenizer: Tokenizer, output_ids: Sequence[int]) -> bool:
    """Whether a reply, whole or cut off, is one that could be drawn under the grammar."""
    return bool(_compiled(grammar, tokenizer).deep_copy().consume_tokens([int(i) for i in output_ids]))


@lru_cache(maxsize=256)
def problem(grammar: str) -> str:
    """Why the library can't compile a grammar that names no token; empty where it can."""
    failed, messages = library().LLMatcher.validate_grammar_with_warnings(grammar)
    return messages[0].partition("\n   1 |")[0].partition(": ")[2].strip() if failed else ""


@lru_cache(maxsize=256)
def _compiled(grammar: str, tokenizer: Tokenizer) -> Any:
    matcher = library().LLMatcher(_vocabulary(tokenizer), grammar, log_level=0)
    if matcher.is_error():
        raise RequestRefused(f"the structured output cannot be compiled: {matcher.get_error().partition(chr(10))[0]}")
    return matcher


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: Tokenizer) -> Any:
    """The tokenizer as the library knows one: the bytes of each id."""
    return library().LLTokenizer(library().TokenizerWrapper(_Vocabulary(tokenizer)))


class _Vocabulary:
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eos_ids)
        self.tokens = [tokenizer.token_bytes(i) for i in range(len(tokenizer))]
        self.special_token_ids = [i for i in range(len(tokenizer)) if tokenizer.is_special(i)]

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode())


def library() -> Any:
    """The package `llguidance`. Raises MissingExtra."""
    try:
        import llguidance
    except ImportError as error:
        raise MissingExtra("llguidance", "local") from error
    return llguidance
