"""Prunes runs of a trace file by age, name or size, and rewrites files safely.

A file is never changed in place: a copy is written next to it, verified, and replaces it
atomically. If the process is killed, either the old or the new file is there, complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import duckdb

from ajet_sdk.errors import TraceError, TraceLocked
from ajet_sdk.protocols import TraceReader
from ajet_sdk.trace.database import explain, open_to_write
from ajet_sdk.trace.digests import every_digest
from ajet_sdk.trace.limits import bytes_of, log_of
from ajet_sdk.trace.owner import process_started, retract, settled_owner
from ajet_sdk.trace.pictures import REFERRING, references
from ajet_sdk.trace.reader import trace_files
from ajet_sdk.trace.schema import COLUMNS, STORAGE_VERSION, TABLES, create_statements
from ajet_sdk.whole_file import remove_draft
from ajet_tools.trace.queries.base import rows

OnStage = Callable[[str], None]
"""Called with the name of each stage."""
_SMALL = 16 << 20
_SMALL_BLOCK = 16384
"""Smaller files get small blocks: a table takes whole blocks, by default of 256 KiB, which would be
mostly empty."""


@dataclass(frozen=True, slots=True)
class RunSize:
    """Contents and size of a run in a file."""

    run_id: str
    name: str
    status: str
    last: datetime
    """Time of its end or last write."""
    episodes: int
    calls: int
    feedback: int
    bytes: int
    """Approximate share of the file."""


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
"""Runs of episodes. An episode cut off by a kill has no row, and belongs to the run that began last
before it."""


def run_sizes(reader: TraceReader, path: Path) -> list[RunSize]:
    """Return the runs of a file, oldest first, with their approximate sizes."""
    run_rows = rows(
        reader,
        _OWNERS
        + """,
        called AS (
            SELECT o.run_id, count(*) AS calls,
              sum(coalesce(4 * len(prompt_suffix), 0) + coalesce(8 * len(output_ids), 0)
              + coalesce(strlen(messages_suffix::VARCHAR), 0) + coalesce(strlen(response::VARCHAR), 0) + 200) AS weight
            FROM calls JOIN owners o USING (episode_id) GROUP BY o.run_id),
        of_episodes AS (
            SELECT run_id, count(*) AS episodes, max(ended_at) AS last,
              sum(strlen(task::VARCHAR) + coalesce(strlen(output::VARCHAR), 0) + 300) AS weight
            FROM episodes GROUP BY run_id),
        remarked AS (
            SELECT o.run_id, count(*) AS feedback FROM feedback JOIN owners o USING (episode_id) GROUP BY o.run_id),
        logged AS (SELECT run_id, max("at") AS last FROM metrics GROUP BY run_id)
        SELECT r.run_id, r.name, r.status, coalesce(r.ended_at, greatest(e.last, l.last, r.started_at)) AS last,
          coalesce(e.episodes, 0) AS episodes, coalesce(h.calls, 0) AS calls, coalesce(s.feedback, 0) AS feedback,
          (coalesce(h.weight, 0) + coalesce(e.weight, 0) + 1000)::BIGINT AS weight
        FROM runs r LEFT JOIN called h USING (run_id) LEFT JOIN of_episodes e USING (run_id)
        LEFT JOIN remarked s USING (run_id) LEFT JOIN logged l USING (run_id)
        ORDER BY last, r.run_id""",
    )
    total = sum(row["weight"] for row in run_rows) or 1
    whole = bytes_of(path)
    sizes: list[RunSize] = []
    for row in run_rows:
        share = whole * row.pop("weight") // total
        sizes.append(RunSize(**row, bytes=share))
    return sizes


def older_than(runs: Sequence[RunSize], limit: datetime) -> list[RunSize]:
    """Return the runs that ended before a time."""
    return [run for run in runs if run.last < limit]


def beyond_size(runs: Sequence[RunSize], limit: int) -> list[RunSize]:
    """Return the oldest runs to drop so that about `limit` bytes remain; the newest run is always
    kept."""
    remaining = sum(run.bytes for run in runs)
    gone = list[RunSize]()
    for run in runs[:-1]:
        if remaining <= limit:
            break
        gone.append(run)
        remaining -= run.bytes
    return gone


def prune(
    path: Path, run_ids: Sequence[str], on_stage: OnStage = lambda _: None
) -> tuple[int, int]:
    """Rewrite a trace without some runs and their records; returns its size before and after in
    bytes.

    Raises TraceLocked for a live trace, and TraceError if the rewrite fails, which leaves the file
    unchanged.
    """
    before = bytes_of(path)
    with rewriting(path, "prune") as connection:
        connection.execute(
            "CREATE TEMP TABLE gone_runs AS SELECT unnest(?) AS run_id", [list(run_ids)]
        )
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
        kept = f"NOT coalesce({_OF_EPISODE}, false)"
        shown = [
            references(table, "episode_id", source="source.", where=kept) for table in REFERRING
        ]
        connection.execute(
            f"CREATE TEMP TABLE kept_pictures AS SELECT digest FROM ({' UNION '.join(shown)})"
        )
        dropped: list[int] = []
        for table, gone in _GONE.items():
            dropped += every_digest(connection, table, gone, schema="source.")
        for table in TABLES:
            on_stage(f"copying {table}")
            _copy_rows(connection, table, f"NOT coalesce({_GONE[table]}, false)")
        sealed = (
            "SELECT digest FROM source.digests WHERE digest NOT IN (SELECT unnest(?::UBIGINT[]))"
        )
        connection.execute(f"INSERT INTO fresh.digests {sealed}", [dropped])
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
    "pictures": "digest NOT IN (SELECT digest FROM kept_pictures)",
}


def refuse_live(path: Path, what: str) -> None:
    """Raise TraceLocked if a live process owns the file."""
    owner = settled_owner(path)
    if owner:
        raise TraceLocked(
            f"{path} is being written by process {owner.pid}; {what} it after the run has ended"
        )


@contextmanager
def rewriting(path: Path, what: str) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a file as `source`, and an empty trace as `fresh` that replaces it at the end.

    `what` names the command in errors. An exception in the block leaves the file unchanged. Disk
    errors raise TraceError.
    """
    [path] = trace_files(path.resolve())
    refuse_live(path, what)
    for left in path.parent.glob(f".{path.name}.*.draft*"):  # of killed processes
        pid = left.name.removeprefix(f".{path.name}.").partition(".")[0]
        if pid.isdigit() and not process_started(int(pid)):
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        open_to_write(path, brief=True).close()  # merges the write-ahead log
        retract(path, writes=True)
        if log_of(path).exists():
            raise TraceError(f"{log_of(path)} could not be merged into {path}; is the disk full?")
        with _fresh_trace(draft, path) as connection:
            yield connection
            connection.execute("CHECKPOINT fresh; DETACH fresh")
            shutil.copymode(path, draft)
            draft.replace(
                path
            )  # the source has been locked until now, so no writer can have opened it
    except (duckdb.Error, OSError) as error:
        raise explain(path, error) from error
    finally:
        remove_draft(draft)
        remove_draft(log_of(draft))


@contextmanager
def _fresh_trace(draft: Path, source: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """Attach a file read-only as `source`, and a new trace as `fresh`."""
    remove_draft(draft)
    spill = draft.with_name(draft.name + ".spill")
    spill.mkdir(exist_ok=True, mode=0o700)
    config = {
        "threads": 2,
        "memory_limit": "512MB",
        "temp_directory": str(spill),
        "autoload_known_extensions": False,
    }
    connection = duckdb.connect(config=config)
    try:
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute(f"ATTACH '{_quoted(source)}' AS source (READ_ONLY)")
        blocks = ""
        if bytes_of(source) < _SMALL:
            blocks = f", BLOCK_SIZE {_SMALL_BLOCK}"
        storage = f"STORAGE_VERSION '{STORAGE_VERSION}'"
        connection.execute(f"ATTACH '{_quoted(draft)}' AS fresh ({storage}{blocks}); USE fresh")
        draft.chmod(0o600)
        for statement in create_statements():
            connection.execute(statement)
        connection.execute("USE memory")
        yield connection
    finally:
        connection.close()
        shutil.rmtree(spill, ignore_errors=True)


def _quoted(path: Path) -> str:
    return str(path).replace("'", "''")


def _copy_rows(connection: duckdb.DuckDBPyConnection, table: str, where: str) -> None:
    """Copy rows of a table into `fresh`. Raises TraceError if the copy differs."""
    columns = ", ".join(f'"{name}"' for name in COLUMNS[table])
    connection.execute(
        f"INSERT INTO fresh.{table} SELECT {columns} FROM source.{table} WHERE {where}"
    )
    sql = (  # equal for equal rows in any order
        f"SELECT count(*), sum(hash({columns})::HUGEINT) FROM "
    )
    copied = connection.execute(f"{sql} fresh.{table}").fetchall()
    if copied != connection.execute(f"{sql} source.{table} WHERE {where}").fetchall():
        raise TraceError(f"the copy of the table {table} differs; nothing was replaced")
