"""Dropping runs from a trace file: which ones go by age, name or size, and the rewriting without them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ajet_sdk.protocols import TraceReader
from ajet_sdk.trace.digests import digested
from ajet_sdk.trace.limits import bytes_of
from ajet_sdk.trace.schema import TABLES
from ajet_tools.trace.files.rewrite import OnStage, copy_rows, equal, fingerprint, rewriting
from ajet_tools.trace.queries.base import rows


@dataclass(frozen=True, slots=True)
class RunSize:
    """A run of a file with what it holds."""

    run_id: str
    name: str
    status: str
    last: datetime
    """When it ended or last wrote."""
    episodes: int
    calls: int
    feedback: int
    bytes: int
    """About its share of the file."""


_OWNERS = """
WITH ended AS (SELECT episode_id, any_value(run_id) AS run_id FROM episodes GROUP BY episode_id),
unended AS (
    SELECT episode_id, min(started_at) AS started_at FROM calls
    WHERE episode_id NOT IN (SELECT episode_id FROM ended) GROUP BY episode_id),
owners AS (
    FROM ended
    UNION ALL
    SELECT u.episode_id, r.run_id FROM unended u ASOF JOIN runs r ON u.started_at >= r.started_at)
"""
"""Episode -> run. One that a kill cut off has no row: it belongs to the run that had begun last."""


def run_sizes(reader: TraceReader, path: Path) -> list[RunSize]:
    """The runs of one file, oldest first, with their approximate sizes."""
    run_rows = rows(
        reader,
        _OWNERS
        + """,
        held AS (
            SELECT o.run_id, count(*) AS calls,
              sum(coalesce(4 * len(prompt_suffix), 0) + coalesce(8 * len(output_ids), 0)
              + coalesce(strlen(messages_suffix::VARCHAR), 0) + coalesce(strlen(response::VARCHAR), 0) + 200) AS weight
            FROM calls JOIN owners o USING (episode_id) GROUP BY o.run_id),
        of_episodes AS (
            SELECT run_id, count(*) AS episodes, max(ended_at) AS last,
              sum(strlen(task::VARCHAR) + coalesce(strlen(output::VARCHAR), 0) + 300) AS weight
            FROM episodes GROUP BY run_id),
        said AS (
            SELECT o.run_id, count(*) AS feedback FROM feedback JOIN owners o USING (episode_id) GROUP BY o.run_id),
        logged AS (SELECT run_id, max("at") AS last FROM metrics GROUP BY run_id)
        SELECT r.run_id, r.name, r.status, coalesce(r.ended_at, greatest(e.last, l.last, r.started_at)) AS last,
          coalesce(e.episodes, 0) AS episodes, coalesce(h.calls, 0) AS calls, coalesce(s.feedback, 0) AS feedback,
          (coalesce(h.weight, 0) + coalesce(e.weight, 0) + 1000)::BIGINT AS weight
        FROM runs r LEFT JOIN held h USING (run_id) LEFT JOIN of_episodes e USING (run_id)
        LEFT JOIN said s USING (run_id) LEFT JOIN logged l USING (run_id)
        ORDER BY last, r.run_id""",
    )
    total, whole = sum(row["weight"] for row in run_rows) or 1, bytes_of(path)
    return [
        RunSize(**{name: row[name] for name in row if name != "weight"}, bytes=whole * row["weight"] // total)
        for row in run_rows
    ]


def older_than(runs: Sequence[RunSize], limit: datetime) -> list[RunSize]:
    """The runs that were over before a time."""
    return [run for run in runs if run.last < limit]


def beyond_size(runs: Sequence[RunSize], limit: int) -> list[RunSize]:
    """The oldest runs, so many that the rest takes about `limit` bytes; the newest always stays."""
    remaining, gone = sum(run.bytes for run in runs), list[RunSize]()
    for run in runs[:-1]:
        if remaining <= limit:
            break
        gone.append(run)
        remaining -= run.bytes
    return gone


def prune(path: Path, run_ids: Sequence[str], on_stage: OnStage = lambda _: None) -> tuple[int, int]:
    """Rewrite a trace without some runs and all that belongs to them. Returns its bytes before and after.

    Raises TraceLocked where the trace is live, TraceError where it cannot be rewritten; it is whole in any case.
    """
    before = bytes_of(path)
    with rewriting(path, "prune") as connection:
        connection.execute("CREATE TEMP TABLE gone_runs AS SELECT unnest(?) AS run_id", [list(run_ids)])
        for name in ("runs", "episodes", "calls", "ledger"):
            connection.execute(f"CREATE TEMP VIEW {name} AS FROM source.{name}")
        connection.execute(
            f"""
            CREATE TEMP TABLE gone_episodes AS {_OWNERS}
            SELECT episode_id FROM owners WHERE run_id IN (FROM gone_runs)
            UNION SELECT episode_id FROM ledger
            WHERE run_id IN (FROM gone_runs) AND episode_id NOT IN (SELECT episode_id FROM ended)"""
        )
        for name in ("runs", "episodes", "calls", "ledger"):
            connection.execute(f"DROP VIEW temp.{name}")
        dropped = [
            digest
            for table, gone in _GONE.items()
            for _, digests in digested(connection, table, gone, schema="source.")
            for digest in digests
        ]
        for table in TABLES:
            on_stage(f"copying {table}")
            where = f"NOT coalesce({_GONE[table]}, false)"
            copy_rows(connection, table, where)
            equal(connection, table, fingerprint(connection, f"source.{table}", where))
        kept = "SELECT digest FROM source.digests WHERE digest NOT IN (SELECT unnest(?::UBIGINT[]))"
        connection.execute(f"INSERT INTO fresh.digests {kept}", [dropped])
        connection.execute("UPDATE fresh.meta SET batch = (SELECT batch FROM source.meta)")
    return before, bytes_of(path)


_OF_RUN = "run_id IN (FROM gone_runs)"
_OF_EPISODE = "episode_id IN (FROM gone_episodes)"
_GONE = {
    "runs": _OF_RUN,
    "metrics": _OF_RUN,
    "episodes": _OF_EPISODE,
    "calls": _OF_EPISODE,
    "rewards": _OF_EPISODE,
    "feedback": _OF_EPISODE,
    "ledger": f"({_OF_RUN} OR {_OF_EPISODE})",
    "trained": f"({_OF_RUN} OR {_OF_EPISODE})",
}
