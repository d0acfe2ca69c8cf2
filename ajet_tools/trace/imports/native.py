"""ajet's own JSON lines (`ajet trace export --format native`), version 1."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from pydantic import ValidationError

from ajet_sdk.errors import TraceVersionError
from ajet_sdk.tasks.json_rows import BadRows, Row
from ajet_sdk.types import Call, Episode, Feedback, LedgerEntry, Metric, Run, Trained
from ajet_tools.trace.export.native import HEADER, VERSION
from ajet_tools.trace.imports.sink import Parsed


def read(rows: Iterable[Row], bad: BadRows) -> Iterator[Parsed]:
    """Runs, metrics and episodes, equal to those that were exported. Raises TraceVersionError for a newer file."""
    for row in rows:
        if not isinstance(row.value, dict):
            bad.add(row.where, f"is not an object (got {type(row.value).__name__})")
            continue
        version = row.value.get(HEADER)
        if version is not None and version != VERSION:
            raise TraceVersionError(f"{row.where} is version {version}; this ajet reads {VERSION}. Upgrade ajet")
        try:
            parsed = _parsed(row.value)
        except (ValidationError, KeyError, TypeError, ValueError, AttributeError) as error:
            bad.add(row.where, f"is not in ajet's format: {_why(error)}")
            continue
        if parsed is not None:
            yield parsed
        elif version is None:
            bad.add(row.where, f"has none of {HEADER}, run, metrics, episode; it has {', '.join(row.value)[:80]}")


def _parsed(value: Mapping[str, Any]) -> Parsed | None:
    if "run" in value:
        return Parsed(run=Run(**value["run"]))
    if "metrics" in value:
        return Parsed(metrics=tuple(Metric(**metric) for metric in value["metrics"]))
    if "episode" in value:
        return _episode(value)
    return None


def _episode(value: Mapping[str, Any]) -> Parsed:
    plain = dict(value["episode"])
    ended = plain.pop("ended", True)
    calls = tuple(_call(call, plain["episode_id"]) for call in plain.pop("calls"))
    return Parsed(
        episode=Episode(**plain, calls=calls),
        ended=ended,
        superseded=value.get("superseded", False),
        ledger=tuple(LedgerEntry(**entry) for entry in value.get("ledger", ())),
        feedback=tuple(Feedback(**remark) for remark in value.get("feedback", ())),
        trained=tuple(_trained(row) for row in value.get("trained", ())),
    )


def _call(row: Mapping[str, Any], episode_id: str) -> Call:
    plain = dict(row)
    if plain.get("logprobs") is not None:
        plain["logprobs"] = _floats(plain["logprobs"])
    return Call(**plain, episode_id=episode_id)


def _trained(row: Mapping[str, Any]) -> Trained:
    arrays = {name: _floats(row[name]) for name in ("advantages", "logprobs", "entropy")}
    return Trained(**{**row, **arrays})


def _floats(values: list[Any]) -> Any:
    return np.array([np.nan if v is None else float(v) for v in values], np.float32)


def _why(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return f"{type(error).__name__} {error}"
