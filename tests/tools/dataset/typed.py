"""A Parquet file with columns of every type that JSON has no word for, and what of it a command has
to leave alone."""

from __future__ import annotations

import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ROWS = 40
FEATURES = {
    "question": {"dtype": "string", "_type": "Value"},
    "answer": {"dtype": "string", "_type": "Value"},
    "image": {"decode": True, "_type": "Image"},
    "tags": {"feature": {"dtype": "int16", "_type": "Value"}, "_type": "Sequence"},
    "metadata": {
        "level": {"dtype": "int8", "_type": "Value"},
        "at": {"dtype": "timestamp[us]", "_type": "Value"},
        "score": {"dtype": "float32", "_type": "Value"},
    },
    "label": {"names": ["easy", "hard"], "_type": "ClassLabel"},
}


def typed_table(rows: int = ROWS, *, first: int = 0) -> pa.Table:
    """Rows of a question and its answer, each column with values and nulls."""
    some = range(first, first + rows)
    day = datetime.datetime(2024, 2, 29, 12, 30, 15, 123456)

    def column(values: list[Any], kind: Any) -> Any:
        return pa.array([None if i % 7 == 3 else value for i, value in enumerate(values)], kind)

    picture = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    inner = pa.struct([("level", pa.int8()), ("at", pa.timestamp("us")), ("score", pa.float32())])
    columns = {
        "question": pa.array(
            [
                f"What is {1000 + i} plus {17 * i}, and which word is number {i} of the list?"
                for i in some
            ]
        ),
        "answer": pa.array([str(1000 + 18 * i) for i in some]),
        "image": column(
            [{"bytes": bytes([i % 256, 0, 255]), "path": f"{i}.png"} for i in some], picture
        ),
        "blob": column([b"\x00\xff" * (i % 3) for i in some], pa.large_binary()),
        "label": column([i % 2 for i in some], pa.int64()),
        "weight": column([0.1 * i for i in some], pa.float32()),
        "loss": pa.array([float("nan") if i % 5 == 0 else i / 3 for i in some], pa.float64()),
        "small": column([i % 100 for i in some], pa.int8()),
        "big": column([2**64 - 1 - i for i in some], pa.uint64()),
        "seen": column(
            [day + datetime.timedelta(hours=i) for i in some], pa.timestamp("us", "Europe/Berlin")
        ),
        "exact": column([1_700_000_000_123_456_789 + i for i in some], pa.timestamp("ns")),
        "born": column([datetime.date(1990, 1, 1 + i % 28) for i in some], pa.date32()),
        "price": column([decimal.Decimal(f"{i}.50") for i in some], pa.decimal128(12, 2)),
        "kind": column([("sum", "product")[i % 2] for i in some], pa.string()).dictionary_encode(),
        "tags": column([[i, None, i + 1] for i in some], pa.list_(pa.int16())),
        "pairs": column([[("k", i)] for i in some], pa.map_(pa.string(), pa.int32())),
        "metadata": column([{"level": i % 5, "at": day, "score": 0.1} for i in some], inner),
        "nothing": pa.nulls(rows, pa.string()),
    }
    noted = {
        name: FEATURES.get(name, {"dtype": str(one.type), "_type": "Value"})
        for name, one in columns.items()
    }
    metadata = {"huggingface": json.dumps({"info": {"features": noted}}), "mine": "kept"}
    fields = [
        pa.field(name, one.type, metadata={"unit": "s"} if name == "weight" else None)
        for name, one in columns.items()
    ]
    return pa.table(list(columns.values()), schema=pa.schema(fields, metadata=metadata))


def write_typed(path: Path, rows: int = ROWS, *, first: int = 0) -> Path:
    pq.write_table(typed_table(rows, first=first), path, row_group_size=16)
    return path


def check_kept(
    source: Path, made: Path, *, more: tuple[str, ...] = (), less: tuple[str, ...] = ()
) -> pa.Table:
    """The rows of `made` are rows of `source`, bit for bit, with the same types, and what the
    schema says of them.

    `more` are columns that were added, `less` those that were changed or left out. Rows are known
    by `small` and `big`.
    """
    before, after = pq.read_table(source), pq.read_table(made)
    names = [name for name in before.schema.names if name not in less]
    assert [name for name in after.schema.names if name not in more] == names
    for name in names:
        assert after.schema.field(name).equals(before.schema.field(name), check_metadata=True), name
    assert after.schema.metadata[b"mine"] == b"kept"
    noted = json.loads(after.schema.metadata[b"huggingface"])["info"]["features"]
    given = json.loads(before.schema.metadata[b"huggingface"])["info"]["features"]
    assert {name: noted[name] for name in names} == {name: given[name] for name in names}
    assert set(noted) == set(after.schema.names)
    places = {text: i for i, text in enumerate(before["answer"].to_pylist())}
    order = pa.array([places[text] for text in after["answer"].to_pylist()], pa.int64())
    expected = before.take(order)
    for name in names:
        assert same(after[name], expected[name]), name
    return after


def same(one: Any, other: Any) -> bool:
    """Equal to the bit: also NaN, and the values of a dictionary."""
    a, b = (x.combine_chunks() for x in (one, other))
    if pa.types.is_dictionary(a.type):
        return bool(a.dictionary_decode().equals(b.dictionary_decode()))
    if pa.types.is_floating(a.type):
        return (
            a.to_numpy(zero_copy_only=False).tobytes() == b.to_numpy(zero_copy_only=False).tobytes()
        )
    return bool(a.equals(b))
