"""Checks the invariants of a trace, and detects edited rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import duckdb
import numpy as np

from ajet_sdk.protocols import TraceReader
from ajet_sdk.samples.prefixes import common_prefix
from ajet_sdk.trace.digests import digested, key_of, keyed_digests, table_of
from ajet_sdk.trace.gathered import attach
from ajet_sdk.trace.owner import settled_owners
from ajet_sdk.trace.reader import calls_of, ledger_balance, open_trace, trace_files
from ajet_sdk.trace.schema import COLUMNS, TABLES
from ajet_sdk.types import OUTCOMES, Call
from ajet_tools.text.clean import counted
from ajet_tools.trace.queries.base import rows

_NAMED = 20
_SAMPLED = 32
"""Number of episodes whose prompts are compared."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A violated invariant."""

    invariant: str
    says: str
    count: int
    """Number of rows that violate it."""
    ids: tuple[str, ...]
    """Ids of the first ones."""


def check(path: Path, *more: Path) -> list[Broken]:
    """Return the violated invariants of a trace of one or more files, live or not.

    Unfinished work of a killed or running process (calls of unfinished episodes, missing ledger
    entries) is no violation. Raises TraceError for an unreadable trace.
    """
    files = [file for item in (path, *more) for file in trace_files(item)]
    owned = settled_owners(files)  # a writer checks its own schema
    broken = [item for file in files if file not in owned for item in _schema(file)]
    if broken:
        return broken
    with open_trace(*files) as reader:
        live = bool(owned)
        for name, (says, sql) in INVARIANTS.items():
            broken += _ask(reader, name, says, sql.replace("$live", str(live).lower()))
        if not any(item.invariant == "prefixes" for item in broken):
            broken += _ask(reader, "circles", "the prompt of a call is built on itself", _CIRCLES)
        broken += _unbalanced(reader)
        if not broken:  # calls are readable
            broken += _differing_prompts(reader)
    return broken


def edited(path: Path, *more: Path) -> Broken | None:
    """Detect rows that were changed, added or deleted since ajet wrote them, or return None.

    Files being written are skipped.
    """
    files = [file for item in (path, *more) for file in trace_files(item)]
    ids: list[str] = []
    gone = 0
    for file in sorted(set(files) - settled_owners(files).keys()):
        with duckdb.connect() as connection:
            if attach(connection, {0: file})[file]:
                changed, missing = _edited(connection)
                ids += changed
                gone += missing
    shown = [
        *ids[: _NAMED - 1],
        *([f"{counted(gone, 'row')} more were written and are gone"] if gone else []),
    ]
    return (
        Broken("edited", "edited after it was written", len(ids) + gone, tuple(shown))
        if shown
        else None
    )


def _edited(connection: duckdb.DuckDBPyConnection) -> tuple[list[str], int]:
    """Return the rows of the file `t0` that are not as written, and the number of rows that are
    gone."""
    left: Counter[int] = Counter()
    with suppress(duckdb.CatalogException):  # the whole table was dropped
        left.update(
            digest for (digest,) in connection.execute("SELECT digest FROM t0.digests").fetchall()
        )
    ids: list[str] = []
    unknown: list[int] = []
    has_old = False
    for table in TABLES:
        for batch, old_digests in digested(connection, table, schema="t0."):
            for i, digest in enumerate(keyed_digests(table, batch)):
                if left[digest] > 0:
                    left[digest] -= 1
                    continue
                if left[old_digests[i]] > 0:
                    left[old_digests[i]] -= 1
                    has_old = True
                    continue
                unknown.append(digest)
                row = batch.slice(i, 1).to_pylist()[0]
                names = (next(name for name in _IDS if row.get(name) or name == "run_id"), *_KEYS)
                ids.append(
                    " ".join(
                        [table, *(str(row[name]) for name in names if row.get(name) is not None)]
                    )
                )
    remaining = left.total()
    if (
        has_old
    ):  # their digests don't tell which row they are of: each changed row is taken to leave one
        return ids, max(0, remaining - len(ids))
    gone = [digest for digest, count in left.items() for _ in range(count)]
    keys_gone = Counter(map(key_of, gone))
    tables_gone = Counter(map(table_of, gone))
    added: list[int] = []
    for place, digest in enumerate(unknown):
        if keys_gone[key_of(digest)]:
            keys_gone[key_of(digest)] -= 1
            tables_gone[table_of(digest)] -= 1
        else:
            added.append(place)
    for place in added:
        if tables_gone[table_of(unknown[place])]:
            tables_gone[table_of(unknown[place])] -= 1
            ids[place] += _REPLACES
    return ids, tables_gone.total()


_REPLACES = " (in place of a row with another id, which is gone)"
_IDS = ("feedback_id", "call_id", "episode_id", "run_id")
"""Id columns, most specific first; a row is named by its first id and by `_KEYS`."""
_KEYS = ("outcome", "name", "step")


def _ask(reader: TraceReader, name: str, says: str, sql: str) -> Iterator[Broken]:
    result = rows(
        reader,
        f"SELECT count(*) AS n, list(id)[:{_NAMED}] AS ids FROM (SELECT id FROM ({sql}) ORDER"
        " BY id)",
    )
    if result[0]["n"]:
        yield Broken(name, says, result[0]["n"], tuple(map(str, result[0]["ids"])))


def _differing_prompts(reader: TraceReader) -> Iterator[Broken]:
    """Find calls whose prompts do not begin with the call that they extend, in a sample of
    episodes."""
    sql = (
        "SELECT DISTINCT episode_id AS id FROM calls WHERE extends_call_id IS NOT NULL ORDER BY"
        " hash(id), id"
    )
    wrong: list[str] = []
    for row in rows(reader, f"{sql} LIMIT {_SAMPLED}"):
        calls = {call.call_id: call for call in calls_of(reader, row["id"])}
        for call in calls.values():
            extended = calls.get(call.extends_call_id or "")
            if extended is not None and not _begins(call, extended):
                wrong.append(call.call_id)
    if wrong:
        says = "the prompt of a call does not begin with the call that it extends"
        yield Broken("extended prompts", says, len(wrong), tuple(wrong[:_NAMED]))


def _begins(call: Call, extended: Call) -> bool:
    if call.prompt_ids is None or extended.prompt_ids is None or extended.output_ids is None:
        return False
    whole = np.concatenate((extended.prompt_ids, extended.output_ids))
    return common_prefix(call.prompt_ids, whole) == len(whole)


def _schema(file: Path) -> Iterator[Broken]:
    """Compare tables and columns of a file with the schema."""
    with duckdb.connect() as connection:
        if not attach(connection, {0: file})[
            file
        ]:  # its owner was killed before creating the tables
            return
        sql = (
            "SELECT table_name, column_name, data_type FROM duckdb_columns() WHERE database_name ="
            " 't0'"
        )
        there = {
            (table, column): kind for table, column, kind in connection.execute(sql).fetchall()
        }
    wrong = []
    for table in TABLES:
        for column, kind in COLUMNS[table].items():
            has = there.get((table, column), "missing").replace(
                "TIMESTAMP WITH TIME ZONE", "TIMESTAMPTZ"
            )
            if has != kind:
                wrong.append(f"{table}.{column} ({has}, not {kind})")
    if wrong:
        yield Broken(
            "schema", f"{file.name} has missing or wrong columns", len(wrong), tuple(wrong[:_NAMED])
        )


def _unbalanced(reader: TraceReader) -> Iterator[Broken]:
    runs = rows(
        reader,
        "SELECT run_id FROM runs WHERE status = 'finished' AND (run_id IN (SELECT run_id FROM"
        " ledger) OR backbone IN ('local', 'tinker', 'trinity', 'verl')) ORDER BY started_at",
    )
    for row in runs:
        lines = ledger_balance(reader, row["run_id"])
        if lines:
            says = f"the ledger of run {row['run_id']} does not match the sampled tokens"
            yield Broken("ledger", says, len(lines), tuple(lines[:_NAMED]))


def _twice(table: str, *keys: str) -> str:
    shown = " || ' ' || ".join(f"coalesce({key}::VARCHAR, '')" for key in keys)
    return f"SELECT {shown} AS id FROM {table} GROUP BY {', '.join(keys)} HAVING count(*) > 1"


def _absent(
    table: str, column: str, others: str, where: str = "true", id: str | None = None
) -> str:
    return (
        f"SELECT DISTINCT {id or column} AS id FROM {table} WHERE {column} IS NOT NULL AND {where} "
        f"AND {column} NOT IN ({others})"
    )


_EPISODES = "SELECT episode_id FROM episodes WHERE episode_id IS NOT NULL"
_CALLS = "SELECT call_id FROM calls WHERE call_id IS NOT NULL"
_RUNS = "SELECT run_id FROM runs WHERE run_id IS NOT NULL"
_KNOWN = f"{_EPISODES} UNION SELECT episode_id FROM calls WHERE episode_id IS NOT NULL"
_LEFT_OPEN = """
SELECT c.call_id AS id FROM (SELECT * FROM calls WHERE NOT $live) c ANTI JOIN episodes e USING (episode_id)
ASOF JOIN runs r ON c.started_at >= r.started_at
WHERE r.status IN ('finished', 'failed')
  AND r.run_id NOT IN (SELECT run_id FROM ledger WHERE outcome = 'superseded')"""
_CIRCLES = """
WITH RECURSIVE late AS (
    SELECT DISTINCT c.episode_id
    FROM calls c JOIN calls p ON p.call_id = c.parent_call_id AND p.episode_id = c.episode_id
    WHERE (p.ended_at, p.index) >= (c.ended_at, c.index)),
candidates AS MATERIALIZED (SELECT call_id, parent_call_id, episode_id FROM calls WHERE episode_id IN (FROM late)),
reached AS (
    SELECT call_id, episode_id FROM candidates WHERE parent_call_id IS NULL
    UNION
    SELECT o.call_id, o.episode_id
    FROM candidates o JOIN reached r ON r.call_id = o.parent_call_id AND r.episode_id = o.episode_id)
SELECT call_id AS id FROM candidates WHERE call_id NOT IN (SELECT call_id FROM reached)"""
"""Calls in a cycle. Only episodes in `late`, with a parent that ended after its child, can have
one."""

INVARIANTS: dict[str, tuple[str, str]] = {
    "run ids": ("a run occurs twice", _twice("runs", "run_id")),
    "episode ids": (
        "an episode occurs twice: it must have one final status",
        _twice("episodes", "episode_id"),
    ),
    "call ids": ("a call occurs twice", _twice("calls", "call_id")),
    "feedback ids": ("a feedback occurs twice", _twice("feedback", "feedback_id")),
    "ledger rows": (
        "an outcome of a call is in the ledger twice",
        _twice("ledger", "run_id", "call_id", "outcome"),
    ),
    "trained rows": (
        "a call is trained twice in one step",
        _twice("trained", "run_id", "step", "call_id"),
    ),
    "run status": (
        "the status of a run is unknown, or it has ended without an end time",
        (
            "SELECT run_id AS id FROM runs WHERE status IS NULL OR status NOT IN ('running',"
            " 'finished', 'failed', 'interrupted') OR status = 'finished' AND ended_at IS NULL OR"
            " status = 'running' AND ended_at IS NOT NULL"
        ),
    ),
    "episode status": (
        "the status or split of an episode is unknown",
        (
            "SELECT episode_id AS id FROM episodes WHERE status IS NULL OR (split IS NULL) <> (step"
            " IS NULL) OR status NOT IN ('succeeded', 'failed', 'timeout', 'aborted') OR split NOT"
            " IN ('train', 'val', 'trial')"
        ),
    ),
    "outcomes": (
        "a ledger entry has an unknown outcome or a negative number of tokens",
        (
            "SELECT call_id AS id FROM ledger WHERE tokens IS NULL OR tokens < 0 OR outcome IS"
            f" NULL OR outcome NOT IN {OUTCOMES}"
        ),
    ),
    "runs of episodes": (
        "an episode belongs to a run that does not exist",
        _absent("episodes", "run_id", _RUNS, "run_id <> ''", id="episode_id"),
    ),
    "runs of metrics": (
        "a metric belongs to a run that does not exist",
        _absent("metrics", "run_id", _RUNS),
    ),
    "episodes of calls": ("a call of a run that has ended belongs to no episode", _LEFT_OPEN),
    "episodes of rewards": (
        "a reward belongs to an episode that does not exist",
        _absent("rewards", "episode_id", _EPISODES),
    ),
    "calls of rewards": (
        "a reward names a call that does not exist",
        _absent("rewards", "call_id", _CALLS),
    ),
    "calls of the ledger": (
        "the ledger names a call that does not exist",
        _absent("ledger", "call_id", _CALLS),
    ),
    "calls of trained": (
        "a trained row names a call that does not exist",
        _absent("trained", "call_id", _CALLS),
    ),
    "episodes of feedback": (
        "feedback on an episode that does not exist",
        _absent("feedback", "episode_id", _KNOWN),
    ),
    "calls of feedback": (
        "feedback on a call that does not exist",
        _absent("feedback", "call_id", _CALLS),
    ),
    "prefixes": (
        (
            "a prompt cannot be reconstructed: its earlier call is not in the episode, or is"
            " shorter than the part taken from it"
        ),
        """
        SELECT c.call_id AS id FROM calls c
        LEFT JOIN calls p ON p.call_id = c.parent_call_id AND p.episode_id = c.episode_id
        WHERE c.prefix_len IS NULL OR c.prefix_len < 0 OR c.prefix_messages IS NULL OR c.prefix_messages < 0
          OR CASE WHEN c.parent_call_id IS NULL THEN c.prefix_len > 0 OR c.prefix_messages > 0
             ELSE p.call_id IS NULL
               OR c.prefix_len > p.prefix_len + coalesce(len(p.prompt_suffix), 0) + coalesce(len(p.output_ids), 0)
               OR c.prefix_messages > p.prefix_messages + coalesce(json_array_length(p.messages_suffix), 0) END""",
    ),
    "extended calls": (
        "a call extends one that is not in its episode, or is of another agent or phase",
        (
            "SELECT c.call_id AS id FROM calls c LEFT JOIN calls p ON p.call_id = c.extends_call_id"
            " AND p.episode_id = c.episode_id WHERE c.extends_call_id IS NOT NULL AND (p.call_id IS"
            " NULL OR p.agent <> c.agent OR p.phase <> c.phase)"
        ),
    ),
    "log-probabilities": (
        "a call does not have one log-probability per sampled token",
        (
            "SELECT call_id AS id FROM calls WHERE logprobs IS NOT NULL AND len(logprobs) IS"
            " DISTINCT FROM len(output_ids)"
        ),
    ),
    "trained arrays": (
        "a trained row is not as long as its call's sampled tokens",
        (
            "SELECT t.call_id AS id FROM trained t JOIN calls c USING (call_id) WHERE"
            " len(advantages) IS DISTINCT FROM len(c.output_ids) OR len(t.logprobs) IS DISTINCT"
            " FROM len(c.output_ids) OR len(entropy) IS DISTINCT FROM len(c.output_ids)"
        ),
    ),
    "trained tokens": (
        "the number of advantages of a trained row differs from the trained tokens in the ledger",
        (
            "SELECT t.call_id AS id FROM trained t LEFT JOIN (FROM ledger WHERE outcome ="
            " 'trained') l USING (run_id, step, call_id) WHERE list_count(list_filter(advantages,"
            " lambda a: isfinite(a))) IS DISTINCT FROM l.tokens"
        ),
    ),
    "superseded": (
        "a call of a rolled-back episode has another outcome in the ledger, or is trained",
        (
            "SELECT call_id AS id FROM ledger JOIN episodes USING (episode_id) "
            "WHERE superseded AND outcome <> 'superseded' "
            "UNION SELECT call_id FROM trained JOIN episodes USING (episode_id) WHERE superseded"
        ),
    ),
    "times": (
        "something ends before it starts",
        " UNION ALL ".join(
            f"SELECT {id} AS id FROM {table} WHERE ended_at < started_at"
            for table, id in (("runs", "run_id"), ("episodes", "episode_id"), ("calls", "call_id"))
        ),
    ),
    "times of calls": (
        "a call starts before its episode, or an episode before its run",
        (  # 0: not known
            "SELECT c.call_id AS id FROM calls c JOIN episodes e USING (episode_id) "
            "WHERE c.started_at < e.started_at - INTERVAL 1 SECOND AND epoch(c.started_at) <> 0 "
            "UNION ALL SELECT e.episode_id FROM episodes e JOIN runs r USING (run_id) "
            "WHERE e.started_at < r.started_at - INTERVAL 1 SECOND AND epoch(e.started_at) <> 0"
        ),
    ),
}
"""Message of a violation, and query of the violating ids, by name."""
