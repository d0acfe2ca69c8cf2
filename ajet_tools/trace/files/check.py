"""Checks the invariants of a trace, and detects edited rows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import duckdb
import numpy as np

from ajet_sdk.errors import PictureError
from ajet_sdk.pictures import keyed, picture_of
from ajet_sdk.protocols import TraceReader
from ajet_sdk.samples.prefixes import common_prefix
from ajet_sdk.trace.at_rest import attach
from ajet_sdk.trace.digests import digested, key_of, keyed_digests, table_of, tag_of
from ajet_sdk.trace.owner import settled_owners
from ajet_sdk.trace.pictures import stored_pictures
from ajet_sdk.trace.reader import calls_of, ledger_balance, open_trace, trace_files
from ajet_sdk.trace.schema import COLUMNS, TABLES
from ajet_sdk.trace.scratch import open_scratch
from ajet_sdk.types import Call
from ajet_tools.text.clean import counted
from ajet_tools.trace.files.invariants import CIRCLES, INVARIANTS, SAME_REPLY
from ajet_tools.trace.queries.base import rows

_NAMED = 20
_SAMPLED = 32
"""Number of episodes whose prompts are compared."""
_DECODED = 32
"""Number of pictures in memory at once."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A violated invariant."""

    invariant: str
    says: str
    count: int
    """Number of rows that violate it."""
    ids: tuple[str, ...]
    """Ids of the first ones."""
    deeds: tuple[str, ...] = ()
    """What was done to these rows, where that is known: a sentence a row."""


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
            broken += _ask(reader, "circles", "the prompt of a call is built on itself", CIRCLES)
        broken += _unbalanced(reader)
        broken += _wrong_pictures(reader)
        if not broken:  # calls are readable
            broken += _differing_prompts(reader)
    return broken


def edited(path: Path, *more: Path) -> Broken | None:
    """Detect rows that were changed, added or deleted since ajet wrote them, or return None.

    Files being written are skipped.
    """
    files = [file for item in (path, *more) for file in trace_files(item)]
    rows: list[EditedRow] = []
    removed: Counter[str] = Counter()
    copies: dict[str, str] = {}
    for file in sorted(set(files) - settled_owners(files).keys()):
        with open_scratch() as connection:
            if attach(connection, {0: file})[file]:
                changed, gone = _edited(connection)
                rows += changed
                removed += gone
                copies |= _copies(connection, changed)
    if not rows and not removed:
        return None
    ids = [row.id for row in rows[: _NAMED - 1]]
    deeds = [row.says(copies) for row in rows[: _NAMED - 1]]
    if len(rows) > len(deeds):
        deeds.append(f"and {counted(len(rows) - len(deeds), 'row')} more")
    if removed:
        ids.append(f"{counted(removed.total(), 'row')} more were written and are gone")
        deeds += [
            f"{counted(n, 'row')} of {table} {_was(n)} removed" for table, n in removed.items()
        ]
    return Broken(
        "edited",
        "edited after it was written",
        len(rows) + removed.total(),
        tuple(ids),
        tuple(deeds),
    )


def _was(count: int) -> str:
    return "was" if count == 1 else "were"


_NOUNS = {
    "runs": "run {id}",
    "episodes": "episode {id}",
    "calls": "call {id}",
    "rewards": "reward {name} of {id}",
    "metrics": "metric {name} of step {step} of run {id}",
    "ledger": "ledger entry {outcome} of call {id} in step {step}",
    "trained": "trained values of call {id} in step {step}",
    "feedback": "feedback {id}",
    "pictures": "picture {id}",
}


@dataclass(slots=True)
class EditedRow:
    """A row that is not as it was written."""

    table: str
    keys: dict[str, object]
    """The row's most specific id, as `id`, and its values of `_KEYS`."""
    deed: str = "was changed or added after it was written"
    in_place: bool = False
    """It stands in place of a row with another id, which is gone."""

    @property
    def id(self) -> str:
        values = " ".join(str(value) for value in self.keys.values() if value is not None)
        return f"{self.table} {values}{_REPLACES if self.in_place else ''}"

    def says(self, copies: Mapping[str, str]) -> str:
        """Return what was done to the row. `copies`: the call that a call is a copy of."""
        noun = _NOUNS[self.table].format_map(defaultdict(str, self.keys))
        if self.table == "calls":
            original = copies.get(str(self.keys["id"]))
        else:
            original = None
        if original:
            copied = f": its reply is a copy of that of call {original}"
        else:
            copied = ""
        return f"{noun} {self.deed}{copied}"


def _edited(connection: duckdb.DuckDBPyConnection) -> tuple[list[EditedRow], Counter[str]]:
    """Return the rows of the file `t0` that are not as written, and by table the number of rows
    that are gone."""
    left: Counter[int] = Counter()
    with suppress(duckdb.CatalogException):  # the whole table was dropped
        left.update(
            digest for (digest,) in connection.execute("SELECT digest FROM t0.digests").fetchall()
        )
    edits: list[EditedRow] = []
    unknown: list[int] = []
    tables: dict[int, str] = {}
    has_old = False
    for table in TABLES:
        tables[tag_of(table)] = table
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
                id = next(name for name in _IDS if row.get(name) or name == "run_id")
                edits.append(
                    EditedRow(table, {"id": row[id], **{key: row.get(key) for key in _KEYS}})
                )
    if has_old:
        # digests of before don't tell their table: each changed row is taken to leave one
        remaining = left.total() - len(edits)
        return edits, Counter({"tables": remaining} if remaining > 0 else {})
    gone = [digest for digest, count in left.items() for _ in range(count)]
    keys_gone = Counter(map(key_of, gone))
    tables_gone = Counter(map(table_of, gone))
    added: list[int] = []
    for place, digest in enumerate(unknown):
        if keys_gone[key_of(digest)]:
            keys_gone[key_of(digest)] -= 1
            tables_gone[table_of(digest)] -= 1
            edits[place].deed = "was changed after it was written"
        else:
            added.append(place)
    for place in added:
        edits[place].deed = "was added after the others were written"
        if tables_gone[table_of(unknown[place])]:
            tables_gone[table_of(unknown[place])] -= 1
            edits[place].in_place = True
            edits[place].deed = "stands in place of another row, which was removed"
    removed: Counter[str] = Counter()
    for tag, count in tables_gone.items():
        if count:
            removed[tables.get(tag, "other tables")] += count
    return edits, removed


def _copies(connection: duckdb.DuckDBPyConnection, edits: Sequence[EditedRow]) -> dict[str, str]:
    """Return, for edited calls, another call with the same reply: its id, or its tokens and times."""
    calls = [row.keys["id"] for row in edits if row.table == "calls"]
    if not calls:
        return {}
    sql = f"""
        SELECT c.call_id, min(o.call_id) FROM t0.calls c JOIN t0.calls o ON {SAME_REPLY}
        WHERE list_contains(?, c.call_id) AND NOT list_contains(?, o.call_id) GROUP BY ALL"""
    return dict(connection.execute(sql, [calls, calls]).fetchall())


_REPLACES = " (in place of a row with another id, which is gone)"
_IDS = ("digest", "feedback_id", "call_id", "episode_id", "run_id")
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


def _wrong_pictures(reader: TraceReader) -> Iterator[Broken]:
    """Decode all pictures; their digests are those of their pixels. Removed ones have no file."""
    digests = [row["digest"] for row in rows(reader, "SELECT digest FROM pictures ORDER BY digest")]
    wrong: list[str] = []
    for start in range(0, len(digests), _DECODED):
        for digest, picture in stored_pictures(reader, digests[start : start + _DECODED]).items():
            try:
                is_right = not picture.data or picture_of(picture.data) == picture
            except PictureError:
                is_right = False
            if not is_right:
                wrong.append(digest)
    if wrong:
        says = "a picture cannot be decoded, or is not the one that was stored"
        yield Broken("pictures", says, len(wrong), tuple(wrong[:_NAMED]))


def _begins(call: Call, extended: Call) -> bool:
    if call.prompt_ids is None or extended.prompt_ids is None or extended.output_ids is None:
        return False
    before = keyed(extended.prompt_ids, extended.pictures)
    whole = np.concatenate((before, extended.output_ids))
    return common_prefix(keyed(call.prompt_ids, call.pictures), whole) == len(whole)


def _schema(file: Path) -> Iterator[Broken]:
    """Compare tables and columns of a file with the schema."""
    with open_scratch() as connection:
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
