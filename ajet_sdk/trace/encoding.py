"""Converts records to Arrow tables, one per table of the store, without secrets and with prompts as
suffixes."""

from __future__ import annotations

import json
import logging
import marshal
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import BaseModel

from ajet_sdk.addresses import is_address, public
from ajet_sdk.pictures import Picture
from ajet_sdk.secret_keys import LEAVES, masked
from ajet_sdk.trace.pictures import Replacing, StoredPictures, may_refer
from ajet_sdk.trace.schema import COLUMNS
from ajet_sdk.types import Call, Episode, Feedback, LedgerEntry, Metric, Reward, Run, Trained

Record = Run | Episode | Call | Metric | LedgerEntry | Trained | Feedback

REMOVED = "[removed by ajet]"
_LOG = logging.getLogger("ajet.trace")
_TYPES = {
    "VARCHAR": pa.string(),
    "JSON": pa.string(),
    "INTEGER": pa.int32(),
    "DOUBLE": pa.float64(),
    "BOOLEAN": pa.bool_(),
    "TIMESTAMPTZ": pa.timestamp("us", tz="UTC"),
    "INTEGER[]": pa.list_(pa.int32()),
    "FLOAT[]": pa.list_(pa.float32()),
    "BLOB": pa.binary(),
}
Row = dict[str, Any]


def scrub(value: object) -> Any:
    """Removes the text of keys that name a secret (`api_key`, `Authorization`, ...) from JSON.

    Addresses lose their password and keys; other texts are unchanged.
    """
    return masked(value, REMOVED, lambda text, by: public(text, by) if is_address(text) else text)


def storable(value: object) -> Any:
    """The value, or a text with the reason why it cannot be stored as JSON: users' methods may
    raise anything."""
    try:
        _ENCODER.encode(scrub(value))
    except BaseException as error:  # noqa: BLE001  a `__str__` that exits, say
        return (
            f"<{type(value).__name__}, which cannot be stored: {type(error).__name__}:"
            f" {_as_text(error)}>"
        )
    return value


def _as_text(value: object) -> str:
    try:
        return str(value)
    except BaseException as error:  # noqa: BLE001  as above
        return f"<{type(value).__name__}: its __str__ raised {type(error).__name__}>"


def size_of(record: Record) -> int:
    """Estimates a record's size in memory, in bytes."""
    if isinstance(record, Trained):
        return 1024 + record.advantages.nbytes + record.logprobs.nbytes + record.entropy.nbytes
    if not isinstance(record, Call):
        return 1024
    size = 1024
    for ids in (record.prompt_ids, record.output_ids, record.logprobs):
        if ids is not None:
            size += ids.nbytes
    messages = record.request.get("messages")
    if isinstance(messages, list):
        for message in messages[record.prefix_messages :]:  # earlier ones are shared in memory
            content = message.get("content") if isinstance(message, dict) else None
            if isinstance(content, str):
                size += len(content)
            elif isinstance(content, list):
                size += sum(map(_size_of_part, content))
    return size


def _size_of_part(part: object) -> int:
    """Characters of a text or an inline picture."""
    if not isinstance(part, dict):
        return 0
    value = part.get("image_url")
    text = value.get("url") if isinstance(value, dict) else part.get("text")
    return len(text) if isinstance(text, str) else 0


class StoredCalls:
    """Calls and pictures known to be in a file, to which later calls may refer.

    The number of calls is bounded; a call with an unknown parent is stored completely.
    """

    def __init__(self, pictures: StoredPictures | None = None) -> None:
        self.pictures = pictures or StoredPictures()
        self._calls: OrderedDict[tuple[str, str], None] = OrderedDict()

    def add(self, call: Call) -> None:
        self.know(call.episode_id, call.call_id)

    def know(self, episode_id: str, call_id: str) -> None:
        self._calls[episode_id, call_id] = None
        if len(self._calls) > _KNOWN:
            self._calls.popitem(last=False)

    def has(self, episode_id: str, call_id: str | None) -> bool:
        key = (episode_id, call_id or "")
        known = key in self._calls
        if known:
            self._calls.move_to_end(key)
        return known

    def clear(self) -> None:
        """Forget all, since added calls may be lost."""
        self._calls.clear()
        self.pictures.clear()

    def __len__(self) -> int:
        return len(self._calls)


_KNOWN = 65_536


def encode(records: Iterable[Record], stored: StoredCalls) -> dict[str, pa.Table]:
    """Builds an Arrow table for each table of the store. Records that cannot be stored are logged
    and skipped."""
    rows: dict[str, list[Row]] = {}
    for record in records:
        replacing = Replacing(stored.pictures)
        try:
            encoded = _ROWS_OF.get(type(record), _flat)(record, stored, replacing)
        except _CANNOT as error:
            _LOG.warning("Could not store a %s in the trace: %s", type(record).__name__, error)
            continue
        for table, row in encoded:
            rows.setdefault(table, []).append(row)
        if replacing.added:
            added = replacing.added.values()
            rows.setdefault("pictures", []).extend(map(_picture, added))
            stored.pictures.settle(added)
        if isinstance(record, Call):
            stored.add(record)
    if "runs" in rows:
        rows["runs"] = list({row["run_id"]: row for row in rows["runs"]}.values())
    return {table: _safe_table(table, entries) for table, entries in rows.items()}


_CANNOT = (TypeError, ValueError, OverflowError, RecursionError, pa.ArrowException)


def _safe_table(name: str, rows: Sequence[Row]) -> pa.Table:
    """Builds a table without rows that Arrow cannot store (a number too large for its column)."""
    try:
        return _table(name, rows)
    except _CANNOT:
        tables = []
        for row in rows:
            try:
                tables.append(_table(name, [row]))
            except _CANNOT as error:
                _LOG.warning("Could not store a row of %s in the trace: %s", name, error)
        return pa.concat_tables([_table(name, []), *tables])


def _picture(picture: Picture) -> Row:
    return {name: getattr(picture, name) for name in COLUMNS["pictures"]}


def _run(run: Run, _: StoredCalls, __: Replacing) -> list[tuple[str, Row]]:
    return [("runs", {**_plain(run), "config": _json(scrub(run.config))})]


def _episode(episode: Episode, _: StoredCalls, pictures: Replacing) -> list[tuple[str, Row]]:
    row = _plain(episode)
    row |= {
        "task_id": _text(episode.task.task_id),
        "task": _referring(scrub(storable(episode.task.model_dump())), pictures),
        "output": _referring(scrub(storable(episode.output)), pictures),
        "metrics": _json(episode.metrics),
        "events": (
            _referring(scrub([event.model_dump(mode="json") for event in episode.events]), pictures)
            if episode.events
            else None
        ),
        "superseded": False,
        "client": _text(episode.client) or None,
    } | ({} if episode.split else {"split": None, "step": None})
    rewards = [
        ("rewards", {**_plain(r), "episode_id": episode.episode_id}) for r in episode.rewards
    ]
    return [("episodes", row), *rewards]


def _call(call: Call, stored: StoredCalls, pictures: Replacing) -> list[tuple[str, Row]]:
    row = _plain(call)
    request = dict(call.request)
    if isinstance(request.get("messages"), list):
        raw = request.pop("messages")
    else:
        raw = None
    row |= {
        "request": _request(request, pictures, cached=raw is not None),
        "response": _referring(scrub(call.response), pictures),
        "sampling": _json(scrub(call.sampling)),
        "output_ids": call.output_ids,
        "logprobs": call.logprobs,
    }
    if stored.has(call.episode_id, call.parent_call_id):
        parent = call.parent_call_id
    else:
        parent = None
    ids, messages = (0, 0) if parent is None else (call.prefix_len, call.prefix_messages)
    row |= {
        "parent_call_id": parent,
        "prefix_len": ids,
        "prompt_suffix": None if call.prompt_ids is None else call.prompt_ids[ids:],
        "prefix_messages": messages,
        "messages_suffix": None,
        "extends_call_id": (
            call.extends_call_id if stored.has(call.episode_id, call.extends_call_id) else None
        ),
    }
    if raw is not None:
        new = raw[messages:]
        simple = [  # only a role and a text, and therefore no secret keys
            isinstance(m, dict) and m.keys() <= _SPOKEN and type(m.get("content")) in LEAVES
            for m in new
        ]
        texts = [
            _referring(m if plain else scrub(m), pictures)
            for m, plain in zip(new, simple, strict=True)
        ]
        row["messages_suffix"] = f"[{', '.join(texts)}]"
    if call.pictures:
        row["pictures"] = _places(call, pictures)
    if call.weight_updates:
        row["weight_updates"] = call.weight_updates
    return [("calls", row)]


def _places(call: Call, pictures: Replacing) -> str:
    """JSON of a prompt's pictures: `[[start, end, digest, token_id], ...]`."""
    places = []
    for placed in call.pictures:
        pictures.add(placed.picture)
        places.append([placed.start, placed.end, placed.picture.digest, placed.token_id])
    return _json(places)


def _referring(value: object, pictures: Replacing) -> str:
    """JSON with references in place of pictures."""
    text = _json(value)
    return _json(pictures.value(value)) if may_refer(text) else text


def _request(request: Row, pictures: Replacing, *, cached: bool) -> str:
    text = _settings(request) if cached else _json(scrub(request))
    return _referring(scrub(request), pictures) if may_refer(text) else text


def _trained(trained: Trained, _: StoredCalls, __: Replacing) -> list[tuple[str, Row]]:
    arrays = {name: getattr(trained, name) for name in ("advantages", "logprobs", "entropy")}
    return [("trained", _plain(trained) | arrays)]


def _settings(request: Row) -> str:
    """JSON of a chat request without its messages, cached, since it is the same for most calls of a
    run."""
    try:
        return _settings_of(marshal.dumps(request, _WITHOUT_REFERENCES))
    except ValueError:
        return _json(scrub(request))


@lru_cache(maxsize=64)
def _settings_of(spelling: bytes) -> str:
    return _json(scrub(marshal.loads(spelling)))


_WITHOUT_REFERENCES = 2
"""The last `marshal` format without references, so that equal values have equal bytes."""


_SPOKEN = {"role", "content"}


def _flat(record: BaseModel, _: StoredCalls, __: Replacing) -> list[tuple[str, Row]]:
    return [(_TABLE_OF[type(record)], _plain(record))]


_ROWS_OF: dict[type, Callable[[Any, StoredCalls, Replacing], list[tuple[str, Row]]]] = {
    Run: _run, Episode: _episode, Call: _call, Trained: _trained
}  # fmt: skip
"""Other records have a column for every field."""
_TABLE_OF: dict[type[BaseModel], str] = {
    Run: "runs", Episode: "episodes", Call: "calls", Reward: "rewards", Metric: "metrics", LedgerEntry: "ledger",
    Trained: "trained", Feedback: "feedback",
}  # fmt: skip


def _plain(record: BaseModel) -> Row:
    """Fields of a record that are stored unchanged."""
    values = record.__dict__
    texts, plain = _COLUMNS_OF[type(record)]
    row = {name: values[name] for name in plain}
    for name in texts:
        text = values[name]
        if text is not None and name in _OF_AJET:
            text = public(text)
        row[name] = text if text is None or text.isascii() else _text(text)
    return row


_OF_AJET = frozenset(("error", "cause", "model", "name"))
"""Text columns that may contain an address; texts of users and models are stored unchanged."""

_NUMBERS = frozenset(("INTEGER", "DOUBLE", "BOOLEAN", "TIMESTAMPTZ"))


def _columns(record: type[BaseModel], table: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of a record's text columns, and of those with numbers and times."""
    same = [(name, kind) for name, kind in COLUMNS[table].items() if name in record.model_fields]
    texts = tuple(name for name, kind in same if kind == "VARCHAR")
    return texts, tuple(name for name, kind in same if kind in _NUMBERS)


_COLUMNS_OF = {record: _columns(record, table) for record, table in _TABLE_OF.items()}


def _text(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode, by `?`."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


_ENCODER = json.JSONEncoder(ensure_ascii=False, default=str)


def _json(value: object) -> str:
    if type(value) is dict and not value:
        return "{}"
    text = _ENCODER.encode(value)
    if "NaN" in text or "Infinity" in text:  # not JSON: stored as text
        text = _ENCODER.encode(json.loads(text, parse_constant=str))
    return _text(text)


def _table(name: str, rows: Sequence[Row]) -> pa.Table:
    columns = COLUMNS[name]
    arrays = [_array(kind, [row.get(column) for row in rows]) for column, kind in columns.items()]
    return pa.Table.from_arrays(arrays, names=list(columns))


def _array(kind: str, values: list[Any]) -> pa.Array:
    if not kind.endswith("[]"):
        return pa.array(values, type=_TYPES[kind])
    offsets = np.zeros(len(values) + 1, dtype=np.int32)
    np.cumsum([0 if v is None else len(v) for v in values], out=offsets[1:])
    present = [v for v in values if v is not None]
    item = _TYPES[kind].value_type
    flat = pa.array(np.concatenate(present) if present else [], type=item)
    nulls = pa.array([v is None for v in values], type=pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets), flat, type=_TYPES[kind], mask=nulls)
