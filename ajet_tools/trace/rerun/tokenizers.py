"""Tokenizers by name, without a download."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ajet_sdk.engines.scripted import ByteTokenizer
from ajet_sdk.errors import ConfigError, MissingExtra
from ajet_sdk.protocols import Tokenizer
from ajet_sdk.tokens.huggingface import HFTokenizer

__all__ = ["LoadedTokenizer", "load_tokenizer"]

_LARGEST_LIMIT = 1 << 30
"""A longer `model_max_length` says that none is known."""


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer, and the longest sequence its model takes (None: not said)."""

    tokenizer: Tokenizer
    limit: int | None


def load_tokenizer(model: str) -> LoadedTokenizer:
    """The tokenizer of a directory, or of a hub name that is in the cache; nothing is downloaded.

    `scripted` is the tokenizer of scripted engines. Raises ConfigError where none can be loaded, MissingExtra.
    """
    if model == "scripted":
        return LoadedTokenizer(ByteTokenizer(), None)
    folder = Path(model).expanduser()
    if not folder.is_dir():
        folder = _cached(model)
    try:
        tokenizer = HFTokenizer(folder)
    except ConfigError:
        raise
    except ImportError as error:
        raise MissingExtra(error.name or "transformers", "local") from error
    except Exception as error:  # the boundary: transformers raises what its file formats raise
        raise ConfigError(f"no tokenizer can be loaded from {model}: {type(error).__name__}: {error}") from error
    return LoadedTokenizer(tokenizer, _limit(folder, tokenizer))


def _cached(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise MissingExtra("huggingface_hub", "local") from error
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, FileNotFoundError, OSError) as error:
        raise ConfigError(
            f"{name} is neither a local directory nor a model in the Hugging Face cache, and nothing is "
            "downloaded; name a directory with tokenizer.json, or download the model first (hf download NAME)"
        ) from error


def _limit(folder: Path, tokenizer: Any) -> int | None:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    section = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    found = section.get("max_position_embeddings") or getattr(tokenizer.hf, "model_max_length", None)
    return int(found) if isinstance(found, int | float) and 0 < found < _LARGEST_LIMIT else None
