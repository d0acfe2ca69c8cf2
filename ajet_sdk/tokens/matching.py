"""Matches replies against grammars over a tokenizer's ids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ajet_sdk.errors import MissingExtra, RequestRefused
from ajet_sdk.protocols import Tokenizer


class Matcher:
    """The state of a reply under a grammar."""

    def __init__(self, grammar: str, tokenizer: Tokenizer) -> None:
        """Raises RequestRefused if the grammar can't be compiled."""
        self._matcher = _compiled(grammar, tokenizer).deep_copy()
        self._words = np.zeros((1, (len(tokenizer) + 31) // 32), dtype=np.int32)

    def allowed(self) -> npt.NDArray[np.int32]:
        """Mask of the allowed next tokens: a bit for each id, 32 per word, lowest first. Shape (1, words)."""
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        return self._words

    def take(self, token_id: int) -> bool:
        """Advance by a token; False if it is not allowed, after which none is."""
        return bool(self._matcher.consume_token(token_id))


def admits(grammar: str, tokenizer: Tokenizer, output_ids: Sequence[int]) -> bool:
    """Whether a grammar allows a reply, complete or truncated."""
    return bool(_compiled(grammar, tokenizer).deep_copy().consume_tokens([int(i) for i in output_ids]))


@lru_cache(maxsize=256)
def problem(grammar: str) -> str:
    """The library's error for a grammar without tokens; empty if it compiles."""
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
    """Converts the tokenizer for the library."""
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
    """Imports `llguidance`. Raises MissingExtra."""
    try:
        import llguidance
    except ImportError as error:
        raise MissingExtra("llguidance", "local") from error
    return llguidance
