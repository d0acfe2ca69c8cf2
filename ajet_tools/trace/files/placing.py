"""Prompts that are stored whole although an earlier call of their episode holds them: found, and stored as suffixes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass, field
from typing import TypedDict

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ajet_sdk.errors import TraceError
from ajet_sdk.samples.prefixes import CallPlace, PrefixIndex
from ajet_sdk.trace.reader import Stored, Whole, rebuild, stored_calls
from ajet_sdk.types import Call, Json

PLACES = ("extends_call_id", "parent_call_id", "prefix_len", "prompt_suffix", "prefix_messages", "messages_suffix")
"""The columns of `calls` that say where it stands and how its prompt is stored."""

_CHUNK_BYTES = 16 << 20
_ENCODER = json.JSONEncoder(ensure_ascii=False)
_PLACED = pa.schema(
    {
        "row": pa.int64(),
        "extends_call_id": pa.string(),
        "parent_call_id": pa.string(),
        "prefix_len": pa.int32(),
        "prompt_suffix": pa.list_(pa.int32()),
        "prefix_messages": pa.int32(),
        "messages_suffix": pa.string(),
    }
)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some episodes, and the rows of `source.calls` among which theirs are."""

    episode_ids: list[str]
    first: int
    last: int


_FACTS = ["agent", "phase", "trainable", "started_at"]
"""What decides, beside the ids, which call is extended."""


@dataclass(frozen=True, slots=True)
class _Episode:
    """The calls of an episode."""

    episode_id: str
    rows: list[int] = field(default_factory=list)
    calls: list[Stored] = field(default_factory=list)
    facts: list[Json] = field(default_factory=list)


def place_again(connection: duckdb.DuckDBPyConnection, on_stage: Callable[[str], None]) -> None:
    """Fill two temporary tables: `placed`, new places of calls by row of `source.calls`, and `moved`, their episodes.

    Only episodes with several prompts stored whole are looked at, some at a time, and only those that get smaller are
    moved, each wholly.
    """
    connection.execute(
        'CREATE TEMP TABLE placed ("row" BIGINT, extends_call_id VARCHAR, parent_call_id VARCHAR, prefix_len INTEGER, '
        "prompt_suffix INTEGER[], prefix_messages INTEGER, messages_suffix JSON); "
        "CREATE TEMP TABLE moved (episode_id VARCHAR)"
    )
    connection.execute(
        """
        CREATE TEMP TABLE candidates AS
        SELECT episode_id, min(rowid) AS first, max(rowid) AS last,
          sum(coalesce(4 * len(prompt_suffix), 0) + coalesce(4 * len(output_ids), 0)
            + coalesce(strlen(messages_suffix::VARCHAR), 0)) AS bytes
        FROM source.calls WHERE episode_id IS NOT NULL GROUP BY episode_id
        HAVING count(*) FILTER (parent_call_id IS NULL) > 1 AND count(*) = count(DISTINCT call_id)"""
    )
    for done, chunk in enumerate(_chunks(connection, "candidates")):
        on_stage(f"placing prompts, part {done + 1}")
        rows: list[dict[str, object]] = []
        moved: list[str] = []
        for episode in _episodes(connection, "source", chunk):
            placed = _smaller(episode)
            if placed is not None:
                moved.append(episode.episode_id)
                rows += [{"row": n, **place} for n, place in zip(episode.rows, placed, strict=True)]
        if rows:
            connection.register("_placed", pa.Table.from_pylist(rows, schema=_PLACED))
            connection.execute("INSERT INTO placed SELECT * FROM _placed")
            connection.unregister("_placed")
            connection.execute("INSERT INTO moved SELECT unnest(?)", [moved])


def compare(connection: duckdb.DuckDBPyConnection, on_stage: Callable[[str], None]) -> None:
    """Raises TraceError unless every prompt of a moved episode is the same in `fresh` as in `source`."""
    bounds = "min(rowid) AS first, max(rowid) AS last"
    connection.execute(
        f"""
        CREATE TEMP TABLE compared AS
        SELECT episode_id, c.first, c.last, c.bytes, f.first AS fresh_first, f.last AS fresh_last
        FROM candidates c JOIN moved USING (episode_id)
        JOIN (SELECT episode_id, {bounds} FROM fresh.calls GROUP BY episode_id) f USING (episode_id)"""
    )
    for done, chunk in enumerate(_chunks(connection, "compared")):
        on_stage(f"comparing prompts, part {done + 1}")
        old = {entry.episode_id: rebuild(entry.calls) for entry in _episodes(connection, "source", chunk)}
        [edges] = connection.execute(
            "SELECT min(fresh_first), max(fresh_last) FROM compared WHERE episode_id IN (SELECT unnest(?))",
            [chunk.episode_ids],
        ).fetchall()
        copies = _Chunk(chunk.episode_ids, edges[0], edges[1])
        new = {entry.episode_id: rebuild(entry.calls) for entry in _episodes(connection, "fresh", copies)}
        for episode_id, prompts in old.items():
            copied = new.get(episode_id, {})
            if prompts.keys() != copied.keys() or not all(same(prompts[entry], copied[entry]) for entry in prompts):
                raise TraceError(f"the prompts of episode {episode_id} would change; nothing was replaced")


def same(one: Whole | None, other: Whole | None) -> bool:
    """Whether two whole prompts are equal."""
    if one is None or other is None:
        return one is other
    return np.array_equal(one[0], other[0]) and _ENCODER.encode(one[1]) == _ENCODER.encode(other[1])


def _chunks(connection: duckdb.DuckDBPyConnection, table: str) -> Iterator[_Chunk]:
    """Episodes that lie near each other, as many as fit into memory at once."""
    listed = connection.execute(f"SELECT episode_id, first, last, bytes FROM {table} ORDER BY first").fetchall()
    chunk, size = _Chunk([], 0, 0), 0
    for episode_id, first, last, weight in listed:
        if chunk.episode_ids and size + weight > _CHUNK_BYTES:
            yield chunk
            chunk, size = _Chunk([], 0, 0), 0
        near = chunk.episode_ids
        chunk = _Chunk([*near, episode_id], min(chunk.first, first) if near else first, max(chunk.last, last))
        size += weight
    if chunk.episode_ids:
        yield chunk


def _episodes(connection: duckdb.DuckDBPyConnection, database: str, chunk: _Chunk) -> Iterator[_Episode]:
    """Each episode's calls in the order in which they were written."""
    table = connection.sql(
        f"""
        SELECT rowid AS number, episode_id, call_id, parent_call_id, prefix_len, prefix_messages, prompt_suffix,
          output_ids, messages_suffix, {", ".join(_FACTS)}
        FROM {database}.calls WHERE rowid BETWEEN ? AND ? AND episode_id IN (SELECT unnest(?)) ORDER BY rowid""",
        params=[chunk.first, chunk.last, chunk.episode_ids],
    ).to_arrow_table()
    numbers, owners = table["number"].to_pylist(), table["episode_id"].to_pylist()
    facts = table.select(_FACTS).to_pylist()
    by_id: dict[str, _Episode] = {}
    for number, owner, call, fact in zip(numbers, owners, stored_calls(table), facts, strict=True):
        episode = by_id.setdefault(owner, _Episode(owner))
        episode.rows.append(number)
        episode.calls.append(call)
        episode.facts.append(fact)
    yield from by_id.values()


class _Placed(TypedDict):
    """Where a call's prompt is stored, and what it adds to the call before it."""

    extends_call_id: str | None
    parent_call_id: str | None
    prefix_len: int
    prompt_suffix: npt.NDArray[np.int32] | None
    prefix_messages: int
    messages_suffix: str | None


def _smaller(episode: _Episode) -> list[_Placed] | None:
    """The places of an episode's calls in the order in which they were written; None where they are no smaller."""
    try:
        whole = rebuild(episode.calls)
    except TraceError:
        return None  # broken already: it stays as it is, for `ajet trace check` to find
    index, spelled = PrefixIndex(), dict[int, str]()
    places: list[_Placed] = []
    gain = 0
    for call, facts in zip(episode.calls, episode.facts, strict=True):
        ids, messages = whole[call.call_id]
        texts = None
        if call.messages_suffix is not None:
            for message in messages:  # those of an earlier call are the same objects
                if id(message) not in spelled:
                    spelled[id(message)] = _ENCODER.encode(message)
            texts = [spelled[id(message)] for message in messages]
        prompt = None if call.prompt_suffix is None else ids
        request = {} if texts is None else {"messages": messages}
        recorded = Call.model_construct(
            **facts, call_id=call.call_id, request=request, prompt_ids=prompt, output_ids=call.output_ids
        )
        new = _row(index.place(recorded), prompt, texts)
        places.append(new)
        gain += _bytes(call.prompt_suffix, call.messages_suffix) - _bytes(new["prompt_suffix"], new["messages_suffix"])
    return places if gain > 0 else None


def _row(place: CallPlace, prompt: npt.NDArray[np.int32] | None, texts: list[str] | None) -> _Placed:
    return {
        "extends_call_id": place.extends_call_id,
        "parent_call_id": place.parent_call_id,
        "prefix_len": place.prefix_len,
        "prompt_suffix": None if prompt is None else prompt[place.prefix_len :],
        "prefix_messages": place.prefix_messages,
        "messages_suffix": None if texts is None else f"[{', '.join(texts[place.prefix_messages :])}]",
    }


def _bytes(ids: Sized | None, text: str | None) -> int:
    return (0 if ids is None else 4 * len(ids)) + len(text or "")
