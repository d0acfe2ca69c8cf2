"""Databases in memory, which leave nothing in the user's project."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import duckdb

Settings = Mapping[str, str | bool | int | float | list[str]]


def spill_directory() -> Path:
    """A new directory for what doesn't fit into memory. DuckDB makes it when it is needed, and
    removes it when the connection is closed."""
    return Path(tempfile.gettempdir()) / f"ajet-spill-{uuid.uuid4().hex}"


def open_scratch(settings: Settings | None = None) -> duckdb.DuckDBPyConnection:
    """Open a database in memory with DuckDB's `settings`.

    By default DuckDB would spill to `.tmp` in the working directory, where a killed process leaves
    it.
    """
    import duckdb  # commands that only read lines don't need it, and it takes long to load

    config = {"temp_directory": str(spill_directory()), **(settings or {})}
    # Without access to files, the directory can't be set any more.
    has_access = config.pop("enable_external_access", True)
    connection = duckdb.connect(config=config)
    if not has_access:
        connection.execute("SET enable_external_access = false")
    return connection
