"""A run's tokenizer, where it is at hand, to read token ids as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from ajet_sdk.errors import ConfigError
from ajet_sdk.protocols import TraceReader

__all__ = ["decoder"]


def decoder(reader: TraceReader, run_id: str) -> Callable[[Sequence[int]], str]:
    """Ids to text, with the tokenizer that the run's recorded config names.

    A relative `model.path` is looked for from here, for the trace does not say where the config file stood. Nothing is
    downloaded. Raises ConfigError where the tokenizer is not at hand.
    """
    rows = reader.query("SELECT config FROM runs WHERE run_id = ?", [run_id]).to_pylist()
    config = json.loads(rows[0]["config"] or "{}") if rows else {}
    model = (config.get("ajet") or {}).get("model") or {}
    if model.get("scripted"):
        from ajet_sdk.engines.scripted import ByteTokenizer

        return ByteTokenizer().decode
    path = model.get("path")
    if not path:
        raise ConfigError("the run's config names no model.path")
    if not Path(path).expanduser().is_dir():
        raise ConfigError(f"model.path {path} is not a directory here")
    try:
        from ajet_sdk.engines.local import HFTokenizer
    except ImportError as error:
        raise ConfigError(f"the tokenizer needs the extra `local` ({error})") from error
    return HFTokenizer(Path(path).expanduser()).decode
