"""Several trace files into one: what they share once, what they contradict each other in named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb

from ajet_sdk.errors import TraceError
from ajet_sdk.trace.database import check_version, explain
from ajet_sdk.trace.schema import COLUMNS, TABLES
from ajet_sdk.whole_file import remove_draft
from ajet_tools.trace.files.placing import PLACES, prompts_of, same
from ajet_tools.trace.files.rewrite import OnStage, bytes_of, copy_rows, draft_of, fresh_trace, has, refuse_live

_IDS = {"runs": "run_id", "episodes": "episode_id", "calls": "call_id", "feedback": "feedback_id"}
"""Tables whose rows have an id of their own."""
_KEYS = {"rewards": "episode_id", "ledger": "episode_id", "trained": "episode_id", "metrics": "run_id"}
"""Of the others, what rows belong to."""
_NAMED = 8
_EPISODES = 200


@dataclass(frozen=True, slots=True)
class Merged:
    """The result of a merge."""

    path: Path
    files: int
    bytes: int
    rows: dict[str, int]
    """Table -> rows in the new file."""
    shared: dict[str, int]
    """Table -> rows that more than one file had, kept once."""


def merge_files(files: Sequence[Path], target: Path, on_stage: OnStage = lambda _: None) -> Merged:
    """Write one file with the rows of several; identical rows once.

    Raises TraceError that names the ids where two files say different things of one id, or `target` exists;
    TraceLocked where one is live. The files stay as they are.
    """
    files = list(dict.fromkeys(file.resolve() for file in files))
    if target.exists():
        raise TraceError(f"{target} already exists; choose another --out")
    for file in files:
        refuse_live(file, "merge")
    draft = draft_of(target.resolve())
    try:
        draft.parent.mkdir(parents=True, exist_ok=True)
        with fresh_trace(draft, files) as connection:
            names = ["source"] if len(files) == 1 else [f"s{i}" for i in range(len(files))]
            shared = dict.fromkeys(TABLES, 0)
            for name, file in zip(names, files, strict=True):
                check_version(connection, file, schema=f"{name}.main")
                for table in TABLES:
                    on_stage(f"{file.name}: {table}")
                    if has(connection, table, name):
                        shared[table] += _add(connection, table, name, file)
            rows = {table: _count(connection, f"fresh.{table}") for table in TABLES}
            connection.execute("CHECKPOINT fresh; DETACH fresh")
            draft.replace(target)
    except (duckdb.Error, OSError) as error:
        raise explain(target, error) from error
    finally:
        for part in (draft, draft.with_name(draft.name + ".wal")):
            remove_draft(part)
    return Merged(target, len(files), bytes_of(target), rows, shared)


def _count(connection: duckdb.DuckDBPyConnection, table: str, where: str = "true") -> int:
    [row] = connection.execute(f"SELECT count(*) FROM {table} WHERE {where}").fetchall()
    return int(row[0])


def _add(connection: duckdb.DuckDBPyConnection, table: str, source: str, file: Path) -> int:
    """Add what is not there yet of one table of one file. Returns how many rows were."""
    key = _IDS.get(table) or _KEYS[table]
    connection.execute(
        f"CREATE OR REPLACE TEMP TABLE both_have AS SELECT DISTINCT {key} AS id FROM {source}.{table} "
        f"WHERE {key} IN (SELECT {key} FROM fresh.{table})"
    )
    there = f"coalesce({key} IN (SELECT id FROM both_have), false)"
    columns = ", ".join(f'"{name}"' for name in COLUMNS[table])
    if _count(connection, "both_have"):
        differing = _DIFFERING.get(table, _rows_differ)(connection, table, key, source)
        if differing:
            named = ", ".join(differing[:_NAMED]) + (" and more" if len(differing) > _NAMED else "")
            raise TraceError(
                f"{file} and an earlier file disagree in {table} on the same {key}: {named}. Leave out one of "
                "them, or prune those from it; nothing was written"
            )
    copied = f"{source}.{table}"
    shared = _count(connection, copied, there)
    copy_rows(connection, table, f"NOT {there}", source)
    if table == "metrics" and shared:
        again = f"SELECT {columns} FROM {copied} WHERE {there} EXCEPT ALL SELECT {columns} FROM fresh.metrics"
        before = _count(connection, "fresh.metrics")
        connection.execute(f"INSERT INTO fresh.metrics {again}")
        shared -= _count(connection, "fresh.metrics") - before
    return shared


def _rows_differ(
    connection: duckdb.DuckDBPyConnection, table: str, key: str, source: str, columns: Sequence[str] = ()
) -> list[str]:
    """The ids whose rows are not the same in both."""
    named = ", ".join(f'"{name}"' for name in columns or COLUMNS[table])
    sums = (
        f"(SELECT {key} AS id, count(*) AS n, sum(hash({named})::HUGEINT) AS h FROM {database}.{table} "
        f"WHERE {key} IN (SELECT id FROM both_have) GROUP BY {key})"
        for database in (source, "fresh")
    )
    sql = f"SELECT a.id FROM {next(sums)} a JOIN {next(sums)} b USING (id) WHERE a.n <> b.n OR a.h <> b.h ORDER BY id"
    return [row[0] for row in connection.execute(sql).fetchall()]


def _calls_differ(connection: duckdb.DuckDBPyConnection, table: str, key: str, source: str) -> list[str]:
    """As for rows; but one prompt may be stored in two ways, and only what it comes to counts."""
    fixed = [name for name in COLUMNS[table] if name not in PLACES]
    differing = _rows_differ(connection, table, key, source, fixed)
    if differing:
        return differing
    elsewhere = _rows_differ(connection, table, key, source, PLACES)
    listed = connection.execute(
        f"SELECT DISTINCT episode_id FROM {source}.calls WHERE call_id IN (SELECT unnest(?)) ORDER BY 1", [elsewhere]
    ).fetchall()
    for start in range(0, len(listed), _EPISODES):
        episode_ids = [row[0] for row in listed[start : start + _EPISODES]]
        ours = prompts_of(connection, ["fresh"], episode_ids)
        theirs = prompts_of(connection, ["fresh", source], episode_ids)
        differing += [
            call_id for call_id in elsewhere if call_id in theirs and not same(ours.get(call_id), theirs[call_id])
        ]
    return differing


def _metrics_differ(connection: duckdb.DuckDBPyConnection, table: str, key: str, source: str) -> list[str]:
    """Files may log different numbers of one run, but not one number twice with two values."""
    sql = (
        f"SELECT DISTINCT run_id || ' ' || name || ' at step ' || step FROM {source}.metrics a "
        'JOIN fresh.metrics b USING (run_id, step, name, "at") WHERE a.value IS DISTINCT FROM b.value ORDER BY 1'
    )
    return [row[0] for row in connection.execute(sql).fetchall()]


_DIFFERING: dict[str, Callable[[duckdb.DuckDBPyConnection, str, str, str], list[str]]] = {
    "calls": _calls_differ,
    "metrics": _metrics_differ,
}
