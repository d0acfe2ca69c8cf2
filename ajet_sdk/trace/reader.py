"""Reads traces: live ones through their owner, others from the file, several files as one; and
records as objects."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ajet_sdk.errors import QueryError, TraceError, TraceLocked
from ajet_sdk.pictures import Picture, PlacedPicture
from ajet_sdk.protocols import Stop, TraceReader
from ajet_sdk.trace.at_rest import Stamp, stamp_of
from ajet_sdk.trace.below import distinct, in_and_below, is_part, readable
from ajet_sdk.trace.database import locked, unborn
from ajet_sdk.trace.live import COST_HEADER, post, refusal
from ajet_sdk.trace.owner import ROWS_PATH, Owner, owner_of, settled_owners
from ajet_sdk.trace.pictures import PREFIX, REFERRING, digests_in, resolved, stored_pictures
from ajet_sdk.trace.rows import RowsOf
from ajet_sdk.trace.schema import SAMPLED
from ajet_sdk.trace.sources import FEW, Sources
from ajet_sdk.trace.writer import TraceWriter, take_over
from ajet_sdk.types import Call, Episode, Reward

if TYPE_CHECKING:
    import polars

_RACE = 5.0
_PATIENCE = 20.0
_OPENING = 5.0
_FEW = 64
_LOOK = 2.0
"""Seconds between searches for new directories."""


def open_trace(
    path: str | Path,
    *more: str | Path,
    read_only: bool = False,
    writer: TraceWriter | None = None,
) -> Trace:
    """Open a trace for reading: a file, a directory, or several files as one.

    No file stays open between queries, so that a reader never blocks a writer. Rows of open files
    come from their writer. New files in a directory are read, too; `skipped` lists files that are
    no traces. Records that a killed process left in a journal are first written to its file.

    Args:
        path: a `.duckdb` file or a directory.
        more: further files.
        read_only: write no file, so that records left in a journal are not read either.
        writer: of this process: its file is read through it.

    Returns:
        The trace, with a method for each of its tables.

    Raises:
        TraceError: there is no trace.
        TraceVersionError: it was written by another version, or is another kind of DuckDB file.
        TraceLocked: another process has it open and serves no rows.
    """
    paths = [Path(directory) for directory in (path, *more)]
    if not read_only:
        take_over(*paths)
    reader = Trace(paths, writer)
    reader.query("SELECT count(run_id) FROM runs")
    return reader


def trace_files(path: Path) -> list[Path]:
    """The trace files of a path: the file itself, or all in and below a directory."""
    if path.is_dir():
        files = in_and_below(path)
        if not files:
            raise TraceError(
                f"there is no trace (*.duckdb) in or below {path.resolve()}; run an agent first"
                " (`ajet run agent.py:solve ...`), or name a file or an experiment directory"
            )
        return files
    if not path.exists() or unborn(path):
        raise TraceError(
            f"there is no trace at {path}: {'it is empty' if path.exists() else 'no such file'}"
        )
    return [path]


class _Gone(TraceError):
    """The owner of a file ended, or the file was deleted, during the request."""


class Trace(AbstractContextManager["Trace"]):
    """Reads trace files, through their live owners or directly."""

    skipped: Mapping[Path, str]
    """Files below a directory that are not read, with the reason."""

    def __init__(self, paths: Sequence[Path], writer: TraceWriter | None = None) -> None:
        self._paths = paths
        self._writer = writer
        self._cost = _Cost()
        self._sources = Sources(self._ask)
        self._deep: list[Path] = []
        self._looked = -math.inf
        self._readable: tuple[Mapping[Path, Stamp], list[Path]] | None = None
        self._held: tuple[list[Path], dict[Path, Owner]] | None = None
        self.skipped = {}

    @property
    def spent(self) -> float:
        return self._cost.seconds

    def query(
        self, sql: str, parameters: Sequence[object] = (), stop: Stop | None = None
    ) -> pa.Table:
        started = seen = time.monotonic()
        while True:
            try:
                return self._query(sql, parameters, stop)
            except _Gone:
                self._held = None
                if time.monotonic() - started > _PATIENCE:
                    raise
            except (
                TraceLocked
            ):  # a process may have opened the file briefly after the check for an owner
                self._held = None
                at = time.monotonic()
                owners = [owner for owner in map(owner_of, self.files()) if owner]
                if (
                    any(not owner.brief for owner in owners)
                    or at - seen > _RACE
                    or at - started > _PATIENCE
                ):
                    raise
                seen = at if owners else seen
            time.sleep(0.02)

    def of_run(self, run_id: str) -> Trace:
        """A trace of the files of one run alone, if there are many: a query that joins its calls
        then reads no others."""
        files, owned = self._current()
        own = set(self._sources.files_of(run_id))
        if len(files) <= FEW or not own:
            return self
        # What processes of the run have written lies beside its file.
        beside = {file.parent for file in own if is_part(file)}
        parts = [file for file in files if file.parent in beside and is_part(file)]
        trace = Trace(sorted({*own, *parts, *owned}), self._writer)
        trace._cost = self._cost
        return trace

    @contextmanager
    def steady(self) -> Iterator[None]:
        """Within the block, files are looked for once: a command of many queries reads one state of
        many files."""
        self._sources.is_steady = True
        try:
            yield
        finally:
            self._sources.is_steady = False
            self._held = None
            self.close()

    def episodes(self) -> TraceTable:
        """A row per episode, oldest first."""
        return TraceTable(self, "episodes", "episode_id")

    def calls(self) -> TraceTable:
        """A row per call, oldest first, with complete prompts and requests."""
        return TraceTable(self, "calls_full", "call_id")

    def files(self) -> list[Path]:
        """The current files, except for unnamed ones that are no traces, or copies."""
        return self._current()[0]

    def _current(self) -> tuple[list[Path], dict[Path, Owner]]:
        if not self._sources.is_steady:
            return self._look()
        if self._held is None:
            self._held = self._look()
        return self._held

    def _look(self) -> tuple[list[Path], dict[Path, Owner]]:
        """The files, and the settled owners of live ones."""
        folders = [path for path in self._paths if path.is_dir()]
        named = [file for path in self._paths if path not in folders for file in trace_files(path)]
        near = [file for folder in folders for file in in_and_below(folder, 0)]
        if time.monotonic() - self._looked > _LOOK:
            below = [file for folder in folders for file in in_and_below(folder)]
            self._looked = time.monotonic()
            self._deep = [file for file in below if file.parent not in folders]
        deep = [file for file in self._deep if file.exists()]
        files = distinct([*named, *near, *deep]) or trace_files(self._paths[0])
        owned = settled_owners(files)
        if len(files) == len(named):
            return files, owned
        stamps = {file: () if file in owned else stamp_of(file) for file in files}
        if self._readable is None or self._readable[0] != stamps:
            looked = self._sources.look(
                {file: stamp for file, stamp in stamps.items() if file not in owned}
            )
            readable_files, self.skipped = readable(files, owned, named, near, looked)
            self._readable = stamps, readable_files
        files = self._readable[1]
        return files, {file: owned[file] for file in files if file in owned}

    def _query(self, sql: str, parameters: Sequence[object], stop: Stop | None) -> pa.Table:
        files, owned = self._current()
        if self._writer and len(files) == 1 and self._is_own(files[0]):
            self._writer.flush()
            return self._writer.query(sql, parameters, stop)
        if owned and len(files) > 1:
            opening = [file for file in owned if not self._is_own(file) and _opening(owned[file])]
            files = [file for file in files if file not in opening]
            owned = {file: owner for file, owner in owned.items() if file not in opening}
        try:
            return self._sources.query(files, owned, sql, parameters, stop)
        except (OSError, TraceError) as error:
            deleted = next((file for file in files if not file.exists()), None)
            if deleted is None:
                raise
            raise _Gone(f"{deleted} was deleted while it was read") from error

    def _is_own(self, file: Path) -> bool:
        writer = self._writer
        return writer is not None and writer.is_open and file.resolve() == writer.path.resolve()

    def _ask(self, file: Path, owner: Owner, stop: Stop | None, wanted: RowsOf) -> pa.Table:
        """Rows of a live file."""
        if self._writer and self._is_own(file):
            self._writer.flush()
            return wanted.read(self._writer.query)
        return _ask_owner(self._cost, file, owner, stop, wanted)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files, unless a query is running; the next query opens them again."""
        self._sources.close()


class TraceTable:
    """Rows of a trace; each method reads them again. Columns as in `ajet trace sql`."""

    def __init__(self, reader: Trace, table: str, key: str) -> None:
        self._reader = reader
        self._sql = f"SELECT * FROM {table} ORDER BY started_at, {key}"

    def arrow(self) -> pa.Table:
        return self._reader.query(self._sql)

    def pl(self) -> polars.DataFrame:
        import polars

        return polars.DataFrame(self.arrow())


def _opening(owner: Owner) -> bool:
    """Whether it has just announced that it writes the file, and its gateway isn't ready yet."""
    try:
        return (
            not owner.url
            and not owner.brief
            and owner.source is not None
            and time.time() - owner.source.stat().st_mtime < _OPENING
        )
    except OSError:
        return False


class _Cost:
    """CPU seconds that live runs spent on responses."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = threading.Lock()

    def add(self, seconds: float) -> None:
        with self._lock:
            self.seconds += seconds


def _ask_owner(
    cost: _Cost, file: Path, owner: Owner, stop: Stop | None, wanted: RowsOf
) -> pa.Table:
    if not owner.url:
        raise (
            locked(file, owner.pid)
            if owner.stands
            else _Gone(f"{file} has just been closed; try again")
        )
    if stop and stop.is_set:
        raise QueryError("the query was canceled")
    began = time.monotonic()
    answer = post(owner, ROWS_PATH, wanted.model_dump())
    if answer is None or answer.status_code == 503:
        raise _Gone(f"the run that writes {file} has just ended; try again")
    cost.add(float(answer.headers.get(COST_HEADER) or time.monotonic() - began))
    if answer.status_code == 404:
        raise TraceLocked(
            f"the run that writes {file} (pid {owner.pid}) uses another version of ajet and cannot"
            " be queried; use that version, or wait until the run has ended"
        )
    if answer.status_code != 200:
        raise QueryError(refusal(answer))
    return pa.ipc.open_stream(answer.content).read_all()


def calls_of(reader: TraceReader, episode_id: str) -> list[Call]:
    """The calls of an episode in order of completion, with complete prompts and requests."""
    table = reader.query(
        "SELECT * FROM calls WHERE episode_id = ? ORDER BY index, started_at", [episode_id]
    )
    return _calls(reader, table).get(episode_id, [])


def episodes(
    reader: TraceReader,
    run_id: str | None = None,
    step: int | None = None,
    *,
    split: str | None = None,
    episode_ids: Sequence[str] | None = None,
    superseded: bool = False,
) -> list[Episode]:
    """Finished episodes with calls and rewards, oldest first; with `superseded` those rolled back
    by a resume, too."""
    conditions = [] if superseded else ["NOT superseded"]
    values = list[Any]()
    for name, value in (("run_id", run_id), ("step", step), ("split", split)):
        if value is not None:
            conditions.append(f"{name} = ?")
            values.append(value)
    named = list(episode_ids or ())
    few = 0 < len(named) <= _FEW  # as literals, so that only their rows are read of live files
    if few:
        marks = ", ".join("?" * len(named))
    else:
        marks = "SELECT unnest(?::VARCHAR[])"
    if episode_ids is not None:
        conditions.append(f"episode_id IN ({marks})")
        values += named if few else [named]
    where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
    rows = reader.query(
        f"SELECT * FROM episodes {where} ORDER BY started_at, episode_id", values
    ).to_pylist()
    chosen, values = (
        (f"({marks})", named) if few else (f"(SELECT episode_id FROM episodes {where})", values)
    )
    calls = _calls(
        reader,
        reader.query(
            f"SELECT * FROM calls WHERE episode_id IN {chosen} ORDER BY index, started_at", values
        ),
    )
    pictures = stored_pictures(reader, _digests(rows, REFERRING["episodes"]))
    rewards: dict[str, list[Reward]] = {}
    for row in reader.query(
        f"SELECT * FROM rewards WHERE episode_id IN {chosen}", values
    ).to_pylist():
        rewards.setdefault(row.pop("episode_id"), []).append(Reward(**row))
    return [
        _episode(
            row, calls.get(row["episode_id"], []), rewards.get(row["episode_id"], []), pictures
        )
        for row in rows
    ]


def ledger_balance(reader: TraceReader, run_id: str) -> list[str]:
    """Lists a run's trainable calls whose ledger doesn't sum to their sampled tokens; empty if it
    balances."""
    sql = f"""
        WITH booked AS (SELECT call_id, sum(tokens)::BIGINT AS tokens FROM ledger WHERE run_id = $1 GROUP BY call_id),
        sampled AS (
            SELECT call_id, c.episode_id, {SAMPLED} AS tokens
            FROM calls c LEFT JOIN episodes e USING (episode_id) WHERE trainable AND phase = 'rollout' AND e.run_id = $1
              OR call_id IN (SELECT call_id FROM booked))
        SELECT call_id, s.episode_id, coalesce(s.tokens, 0) AS sampled, coalesce(b.tokens, 0) AS booked
        FROM sampled s FULL JOIN booked b USING (call_id)
        WHERE coalesce(s.tokens, 0) <> coalesce(b.tokens, 0) ORDER BY ALL"""
    return [
        f"call {row['call_id']} of episode {row['episode_id'] or 'unknown'}: "
        f"{row['sampled']} tokens sampled, {row['booked']} in the ledger"
        for row in reader.query(sql, [run_id]).to_pylist()
    ]


def _json(text: str, pictures: Mapping[str, Picture]) -> Any:
    """JSON with data URLs in place of references."""
    value = json.loads(text)
    return resolved(value, pictures) if PREFIX in text else value


def _episode(
    row: dict[str, Any],
    calls: Sequence[Call],
    rewards: Sequence[Reward],
    pictures: Mapping[str, Picture],
) -> Episode:
    plain = {name: value for name, value in row.items() if name not in ("task_id", "superseded")}
    if plain["split"] is None:
        plain |= {"split": "", "step": 0}
    parsed = {name: _json(row[name], pictures) for name in ("task", "output", "metrics")}
    parsed["events"] = tuple(_json(row["events"] or "[]", pictures))
    parsed["client"] = row["client"] or ""
    return Episode(**{**plain, **parsed, "calls": tuple(calls), "rewards": tuple(rewards)})


def _digests(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> set[str]:
    """The pictures that rows refer to."""
    digests: set[str] = set()
    for row in rows:
        for column in columns:
            digests |= digests_in(row[column] or "")
        digests.update(place[2] for place in json.loads(row.get("pictures") or "[]"))
    return digests


def _calls(reader: TraceReader, table: pa.Table) -> dict[str, list[Call]]:
    lists = {name: arrays_of(table[name]) for name in ("prompt_suffix", "output_ids", "logprobs")}
    rows = table.drop_columns(list(lists)).to_pylist()
    pictures = stored_pictures(reader, _digests(rows, REFERRING["calls"]))
    whole = rebuild(stored_calls(table), pictures)
    by_episode: dict[str, list[Call]] = {}
    for i, row in enumerate(rows):
        call = _call(
            row,
            {name: values[i] for name, values in lists.items()},
            *whole[row["call_id"]],
            pictures,
        )
        by_episode.setdefault(row["episode_id"], []).append(call)
    return by_episode


def stored_calls(table: pa.Table) -> list[Stored]:
    """Extracts the stored parts of prompts from rows of `calls`, for `rebuild`."""
    prompts = arrays_of(table["prompt_suffix"])
    outputs = arrays_of(table["output_ids"])
    names = ["call_id", "parent_call_id", "prefix_len", "prefix_messages", "messages_suffix"]
    rows = table.select(names).to_pylist()
    return [
        Stored(**row, prompt_suffix=prompts[i], output_ids=outputs[i]) for i, row in enumerate(rows)
    ]


def _call(
    row: dict[str, Any],
    lists: Mapping[str, Any],
    ids: npt.NDArray[np.int32],
    messages: list[object],
    pictures: Mapping[str, Picture],
) -> Call:
    request = _json(row["request"], pictures)
    if row["messages_suffix"] is not None:
        request = {"messages": messages, **request}
    plain = {name: value for name, value in row.items() if name != "messages_suffix"}
    parsed = {
        "request": request,
        "response": _json(row["response"], pictures),
        "sampling": json.loads(row["sampling"]),
        "pictures": [
            PlacedPicture(start, end, pictures[digest], token_id)
            for start, end, digest, token_id in json.loads(row["pictures"] or "[]")
            if digest in pictures
        ],
    }
    prompt = None if lists["prompt_suffix"] is None else ids
    return Call(
        **{**plain, **parsed},
        prompt_ids=prompt,
        output_ids=lists["output_ids"],
        logprobs=lists["logprobs"],
    )


def arrays_of(column: pa.ChunkedArray) -> list[npt.NDArray[Any] | None]:
    """Converts a list column to numpy slices, without a Python object per token."""
    arrays: list[npt.NDArray[Any] | None] = []
    for chunk in column.chunks:
        values = chunk.values.to_numpy(zero_copy_only=False)
        offsets = chunk.offsets.to_numpy()
        valid = chunk.is_valid().to_numpy(zero_copy_only=False)
        arrays += [
            values[offsets[i] : offsets[i + 1]] if valid[i] else None for i in range(len(chunk))
        ]
    return arrays


@dataclass(frozen=True, slots=True)
class Stored:
    """The stored part of a call's prompt."""

    call_id: str
    parent_call_id: str | None
    prefix_len: int
    prefix_messages: int
    prompt_suffix: npt.NDArray[np.int32] | None
    output_ids: npt.NDArray[np.int32] | None
    messages_suffix: str | None
    """A JSON list."""


Whole = tuple[npt.NDArray[np.int32], list[object]]
"""A call's complete prompt and messages; empty without any."""


def rebuild(
    calls: Sequence[Stored], pictures: Mapping[str, Picture] = MappingProxyType({})
) -> dict[str, Whole]:
    """Rebuilds complete prompts and messages by call id; `calls` include parents, in any order.

    With data URLs in place of references to `pictures`.

    Raises TraceError if a parent is missing or calls refer to each other in a circle.
    """
    stored = {call.call_id: call for call in calls}
    whole: dict[str, Whole] = {}
    for call in calls:
        chain: dict[str, Stored] = {}
        at: str | None = call.call_id
        while at is not None and at not in whole:
            if at in chain or at not in stored:
                if at in chain:
                    wrong = "refers to itself"
                else:
                    wrong = f"refers to call {at}, which is missing"
                raise TraceError(
                    f"the prompt of call {call.call_id} cannot be reconstructed: its chain of"
                    f" earlier calls {wrong}; `ajet trace check` lists what is damaged"
                )
            chain[at] = stored[at]
            at = stored[at].parent_call_id
        for link in reversed(chain.values()):
            whole[link.call_id] = _extend(link, stored, whole, pictures)
    return whole


def _extend(
    call: Stored,
    stored: dict[str, Stored],
    whole: dict[str, Whole],
    pictures: Mapping[str, Picture],
) -> Whole:
    ids = np.empty(0, np.int32)
    messages = list[object]()
    parent = call.parent_call_id
    if parent is not None:
        ids, messages = whole[parent]
        output = stored[parent].output_ids
        ids = (ids if output is None else np.concatenate([ids, output]))[: call.prefix_len]
    new_messages = _json(call.messages_suffix or "[]", pictures)
    suffix = call.prompt_suffix
    return (
        ids if suffix is None else np.concatenate([ids, suffix]),
        [*messages[: call.prefix_messages], *new_messages],
    )
