"""What ajet's own Parquet files say of their columns, so that a row comes back as it was written.

A column of a table has one type and a value in each row; rows of a dataset need not. `ajet dataset` writes a place
whose values have several types as JSON text, and a key that some rows lack as null, and lists both under `KEY` in the
schema's metadata: a tree of `{"json": true, "absent": true, "fields": {name: tree}, "item": tree}`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["KEY", "decoded", "decoder"]

KEY = b"ajet.encoding"


def decoder(schema: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A row as pyarrow gives it -> the row as it was. Rows of files that ajet did not write pass unchanged."""
    text = (schema.metadata or {}).get(KEY)
    if text is None:
        return lambda row: row
    tree = json.loads(text)
    return lambda row: decoded(row, tree)  # type: ignore[no-any-return]


def decoded(value: Any, tree: Mapping[str, Any]) -> Any:
    """What stands at a place that is encoded so, as it was."""
    if value is None:
        return None
    if tree.get("json"):
        return json.loads(value)
    if "item" in tree:
        return [decoded(item, tree["item"]) for item in value]
    if "fields" not in tree:
        return value
    fields = tree["fields"]
    made = {}
    for name, inner in value.items():
        below = fields.get(name)
        if below is None:
            made[name] = inner
        elif inner is not None or not below.get("absent"):
            made[name] = decoded(inner, below)
    return made
