"""Look-up of ids by prefix and runs by name, and helpers of all queries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from ajet_sdk.errors import QueryError
from ajet_sdk.protocols import TraceReader
from ajet_sdk.trace.query import rows_of

Kind = Literal["run", "episode", "call"]

USAGE_TOKENS = """sum(CASE WHEN coalesce(response->>'$.choices[0].index', '0') = '0'
  THEN TRY_CAST(response->>'$.usage.completion_tokens' AS BIGINT) END)"""
"""Sampled tokens of calls by `usage`. The choices of a request share it, so only the first one
counts."""


@dataclass(frozen=True, slots=True)
class Found:
    """A run, an episode or a call."""

    kind: Kind
    id: str


def find(reader: TraceReader, prefix: str, kind: Kind | None = None) -> Found:
    """Find the run, episode or call whose id begins with `prefix`, or the newest run of that name.

    `kind` restricts the search. Raises QueryError for no match or several.
    """
    matches = rows(
        reader,
        """
        SELECT kind, id, max(exact) AS exact FROM (
            SELECT 'run' AS kind, run_id AS id, run_id = $1 AS exact FROM runs WHERE starts_with(run_id, $1)
            UNION ALL SELECT 'run', arg_max(run_id, started_at), true FROM runs WHERE name = $1 HAVING count(*) > 0
            UNION ALL SELECT 'episode', episode_id, episode_id = $1 FROM episodes WHERE starts_with(episode_id, $1)
            UNION ALL SELECT 'episode', episode_id, episode_id = $1 FROM calls WHERE starts_with(episode_id, $1)
            UNION ALL SELECT 'call', call_id, call_id = $1 FROM calls WHERE starts_with(call_id, $1))
        WHERE $2::VARCHAR IS NULL OR kind = $2
        GROUP BY kind, id ORDER BY NOT max(exact), kind = 'call', id LIMIT 9""",
        prefix,
        kind,
    )
    exact = [row for row in matches if row["exact"]]
    fitting = exact[:1] or matches
    if len(fitting) == 1:
        return Found(fitting[0]["kind"], fitting[0]["id"])
    if not fitting:
        raise QueryError(
            f"nothing in this trace is named {prefix!r} or has an id that starts with it; see `ajet"
            " trace ls`"
        )
    several = ", ".join(f"{row['kind']} {row['id']}" for row in fitting[:8])
    raise QueryError(f"{prefix!r} is ambiguous: {several}{' and more' if len(fitting) > 8 else ''}")


def find_run(reader: TraceReader, prefix: str | None) -> str:
    """Find the run whose id begins with `prefix`, or the newest run of that name; by default the
    newest run.

    Raises QueryError for no match or several.
    """
    matches = rows(
        reader,
        "SELECT run_id, name FROM runs WHERE starts_with(run_id, $1) OR name = $1 ORDER BY"
        " started_at DESC",
        prefix or "",
    )
    ids: list[str] = [row["run_id"] for row in matches]
    if not ids:
        if prefix:
            which = f"is no run {prefix!r} in this trace, and no path of that name"
        else:
            which = "are no runs in this trace"
        raise QueryError(f"there {which}")
    named = [row["run_id"] for row in matches if row["name"] == prefix]
    if prefix and len(ids) > 1 and prefix not in ids and not named:
        raise QueryError(f"{prefix!r} is ambiguous; runs: {', '.join(ids[:8])}")
    return prefix if prefix in ids else (named or ids)[0]


def episode_of_call(reader: TraceReader, call_id: str) -> str:
    """Return the episode of a call. Raises QueryError for an unknown call."""
    matches = rows(reader, "SELECT episode_id FROM calls WHERE call_id = $1 LIMIT 1", call_id)
    if not matches:
        raise QueryError(f"there is no call {call_id!r} in this trace")
    episode_id: str = matches[0]["episode_id"]
    return episode_id


def rows(reader: TraceReader, sql: str, *parameters: object) -> list[Any]:
    """Run a SELECT and return its rows as dicts; callers annotate them with a TypedDict."""
    return list(rows_of(reader.query(sql, list(parameters))))


_K = TypeVar("_K")
_V = TypeVar("_V")


def grouped(items: Iterable[_V], key: Callable[[_V], _K]) -> dict[_K, list[_V]]:
    """Group items by key, in order of first appearance."""
    groups: dict[_K, list[_V]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def among(column: str, ids: Sequence[str], first: int = 1) -> tuple[str, list[object]]:
    """Return the condition that a column has one of the ids, and its parameters, numbered from
    `first`.

    Up to 64 ids become literals of an IN list, so that only matching rows and files are read.
    """
    if 0 < len(ids) <= 64:
        return f"{column} IN ({', '.join(f'${first + i}' for i in range(len(ids)))})", list(ids)
    return f"{column} IN (SELECT unnest(${first}::VARCHAR[]))", [list(ids)]
