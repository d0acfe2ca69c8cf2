"""A Hugging Face tokenizer for exact ids: adds and drops no special tokens, and knows each token's
exact bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet_sdk.config.model_source import adapter_base, check_source, refuse_code, tokenizer_source
from ajet_sdk.errors import ConfigError
from ajet_sdk.tokens.pictures import picture_processor
from ajet_sdk.types import JsonView

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerBase


_PROBE = "Qx7"


def byte_alphabet() -> dict[str, int]:
    """The byte of each letter in a byte-level vocabulary (GPT-2's `bytes_to_unicode`, inverted)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(unprintable)}


def exact_bytes(token: str, alphabet: Mapping[str, int] | None) -> bytes:
    """The bytes of a token in a vocabulary: byte-level letters, or SentencePiece's with its byte
    fallback."""
    if alphabet is not None:
        known = [alphabet.get(letter) for letter in token]
        if None in known:
            return token.encode()
        return bytes(b for b in known if b is not None)
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()  # SentencePiece's letter for a space


def is_byte_level(tokenizer: str | bytes) -> bool:
    """Whether a `tokenizer.json` is byte-level."""
    state = json.loads(tokenizer)
    return '"ByteLevel"' in json.dumps([state.get("decoder"), state.get("pre_tokenizer")])


def _load(path: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    path = tokenizer_source(path)
    check_source(path)
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        refuse_code(path, error)
        raise ConfigError(
            f"model.path: the tokenizer of {path} cannot be loaded: {error}"
        ) from error


class HFTokenizer:
    """Implements `protocols.Tokenizer` by a tokenizer of transformers: an object, a directory or a
    name."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | str | Path, *, trust_remote_code: bool = False
    ) -> None:
        path = str(tokenizer) if isinstance(tokenizer, str | Path) else None
        if isinstance(tokenizer, str | Path):
            self.hf = _load(str(tokenizer), trust_remote_code)
        else:
            self.hf = tokenizer
        template = self.hf.chat_template
        self.chat_template: str | None = (
            template.get("default") if isinstance(template, dict) else template
        )
        self.variables: JsonView = {
            name: str(value)
            for name, value in self.hf.special_tokens_map.items()
            if isinstance(value, str)
        }
        self._backend: tokenizers.Tokenizer | None = getattr(self.hf, "backend_tokenizer", None)
        byte_level = self._backend is not None and is_byte_level(self._backend.to_str())
        self._alphabet = byte_alphabet() if byte_level else None
        self._special = frozenset(self.hf.all_special_ids) | {
            i for i, token in self.hf.added_tokens_decoder.items() if token.special
        }
        self._added = {i: str(token) for i, token in self.hf.added_tokens_decoder.items()}
        self._bytes: list[bytes | None] = [None] * len(self.hf)
        self.eos_ids: frozenset[int] = frozenset(self._turn_ends(path))
        if path is None:
            self.pictures = None
        else:
            self.pictures = picture_processor(path, self.decode)

    def __len__(self) -> int:
        return len(self.hf)

    def encode(self, text: str) -> list[int]:
        """Encodes text, with special tokens in it recognized and none added."""
        if self._backend is not None:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
            return ids
        return list(self.hf.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids with special tokens; invalid UTF-8 becomes U+FFFD."""
        known = self._bytes
        try:
            parts: list[bytes] = [known[i] or self.token_bytes(i) for i in ids]
        except IndexError:
            parts = [self.token_bytes(i) for i in ids]
        return b"".join(parts).decode(errors="replace")

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a token; empty for an id beyond the vocabulary (models round its size
        up)."""
        if not 0 <= token_id < len(self._bytes):
            return b""
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._look_up(token_id)
        return known

    def _look_up(self, token_id: int) -> bytes:
        if (added := self._added.get(token_id)) is not None:
            return added.encode()
        [token] = self.hf.convert_ids_to_tokens([token_id])
        if token is None:
            return b""
        return exact_bytes(str(token), self._alphabet)

    def _turn_ends(self, path: str | None) -> set[int]:
        end: Any = self.hf.eos_token_id
        ends: set[Any] = {end} - {None}
        if path is not None:
            from transformers import GenerationConfig

            if not (Path(path) / "generation_config.json").is_file():
                path = adapter_base(path) or path
            try:
                config: object = GenerationConfig.from_pretrained(path)
            except OSError:
                config = None
            ids = getattr(config, "eos_token_id", None)
            ends |= set(ids) if isinstance(ids, list) else {ids} - {None}
        return {int(i) for i in ends} | self._template_end()

    def _template_end(self) -> set[int]:
        """The special token that the template writes right after an assistant's text, if any."""
        if self.chat_template is None:
            return set()
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}]
        try:
            text = self.hf.apply_chat_template(messages, tokenize=False)
        except Exception:  # noqa: BLE001  (a template may raise anything)
            return set()
        ids = self.encode(str(text).rpartition(_PROBE)[2])
        return {ids[0]} if ids and self.is_special(ids[0]) else set()
