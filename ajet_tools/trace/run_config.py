"""The config that a run recorded, as it was and checked again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ajet_sdk.config import Config, load_config
from ajet_sdk.errors import ConfigError
from ajet_sdk.protocols import TraceReader

__all__ = ["recorded_config", "run_config"]


def recorded_config(reader: TraceReader, run_id: str) -> dict[str, Any]:
    """The document as it stands in `runs`; empty where the run recorded none or is not in this trace."""
    rows = reader.query("SELECT config FROM runs WHERE run_id = ?", [run_id]).to_pylist()
    document = json.loads(rows[0]["config"] or "{}") if rows else {}
    return document if isinstance(document, dict) else {}


def run_config(reader: TraceReader, run_id: str) -> Config:
    """The recorded config, checked; the defaults where there is none (an agent that was only observed).

    Raises ConfigError where this version takes it no longer.
    """
    document = recorded_config(reader, run_id)
    file = document.pop("config_file", None)
    if not isinstance(document.get("ajet"), Mapping):
        return load_config(values={"ajet": {"backbone": "debug"}})
    try:
        return load_config(values=document, beside=Path(file) if isinstance(file, str) else None)
    except ConfigError as error:
        raise ConfigError(f"the config that run {run_id} recorded is not valid in this version:\n{error}") from error
