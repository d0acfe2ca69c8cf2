"""Questions with their answers as chats, on columns: `export --format messages` of rows that hold no chat."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import polars as pl

from ajet_sdk.errors import TaskError
from ajet_sdk.tasks.task_rows import FIELDS
from ajet_tools.dataset.curation.formats import Unfit, converter
from ajet_tools.dataset.files.blocks import Irregular, LineBlock, json_line
from ajet_tools.dataset.files.lines import Structure, as_json, asking, kind_at, kind_in, leaves, structures

_CHATS = (
    "messages",
    "conversations",
    "init_messages",
    "tools",
    "completion",
    "response",
    "output",
    "chosen",
    "env_type",
)
"""Columns that may hold the reply, or change the task: only the row tells."""
_encode = json.JSONEncoder(ensure_ascii=False).encode
_Path = tuple[str, ...]
_Part = str | pl.Series
"""Text that is the same in all rows, or a polars series."""


def as_messages(block: LineBlock, left_out: Counter[str]) -> tuple[LineBlock, Any]:
    """A block in that form, and the indices of the rows that have it; `left_out` counts why the others have not."""
    lines, convert, converted = _by_columns(block), converter("messages"), list[str | None]()
    left = lines.is_null().arg_true()
    for row in block.rows(left):
        try:
            converted.append(json_line(convert(row.values))[:-1].decode())
        except Unfit as why:
            left_out[str(why)] += 1
            converted.append(None)
        except ValueError as error:
            raise TaskError(f"{row.where} cannot be written as JSON: {error}") from error
    lines = lines.scatter(left, pl.Series(converted, dtype=pl.String))
    return LineBlock(block.name, lines, block.numbers), lines.is_not_null().arg_true().to_numpy()


def _by_columns(block: LineBlock) -> Any:
    """Lines of that form, as a polars series; null for those that only the row itself tells."""
    result = pl.repeat(None, len(block), dtype=pl.String, eager=True)
    groups = [(of, rows) for of, rows in structures(block.lines) if of is not None and _is_plain(of)]
    paths = list(dict.fromkeys(path for of, _ in groups for path, _ in leaves(of)))
    try:
        columns = block.columns(paths) if paths else {}
    except Irregular:  # what is a value in one structure is an object in another
        return result
    for structure, rows in groups:
        values = {path: columns[path].gather(rows) for path, _ in leaves(structure)}
        result = result.scatter(rows, _lines(structure, values))
    return result


def _is_plain(structure: Structure) -> bool:
    """Columns make its rows messages."""
    answer = kind_at(structure, _answer_in(structure))
    return (
        asking(structure) is not None
        and answer in ("text", "integer", "bool")
        and isinstance(structure.get("metadata", {}), dict)
        and kind_in(structure.get("main_query", "null")) in ("text", "null")
        and kind_in(structure.get("prompt", "null")) in ("text", "null")
        and not any(name in structure for name in _CHATS)
        and not any(kind in ("list", "number") for _, kind in leaves(structure))
    )


def _answer_in(structure: Structure) -> _Path:
    return ("answer",) if "answer" in structure else ("metadata", "answer")


def _lines(structure: Structure, values: Mapping[_Path, pl.Series]) -> pl.Series:
    """Rows of one structure, of which there are at least one; null where they ask or answer nothing."""
    question, answer = asking(structure) or "", _answer_in(structure)
    kinds = dict(leaves(structure))
    known = {path: as_json(column, kinds[path], _encode) for path, column in values.items()}
    reply = [known[answer]] if kinds[answer] == "text" else ['"', known[answer], '"']
    parts = ['{"messages": [{"role": "user", "content": ', known[question,]]
    parts += ['}, {"role": "assistant", "content": ', *reply, "}]"]
    for name in structure:
        if name != question:
            parts += [f", {_encode(name)}: ", *_spelt(structure[name], (name,), known)]
    if "task_id" not in structure:
        parts += [', "task_id": "', _ids(structure, known), '"']
    fits = [values[path].str.contains(r"[^\s\x1c-\x1f]") for path in ((question,), answer)]
    return pl.select(pl.when(fits[0] & fits[1]).then(_joined([*parts, "}"]))).to_series()


def _ids(structure: Structure, known: Mapping[_Path, _Part]) -> pl.Series:
    """The ids that tasks have by their content, as `Task` makes them."""
    metadata = {name: (inner, (name,)) for name, inner in structure.items() if name not in FIELDS}
    metadata |= {name: (inner, ("metadata", name)) for name, inner in structure.get("metadata", {}).items()}
    items = [[f"{_encode(name)}: ", *_spelt(*metadata[name], known, sort=True)] for name in sorted(metadata)]
    asked = known[asking(structure) or "",]
    texts = _joined(['{"main_query": ', asked, ', "metadata": ', *_object(items), "}"])
    ids = [hashlib.blake2b(text, digest_size=12).hexdigest() for text in texts.cast(pl.Binary).to_list()]
    return pl.Series(ids, dtype=pl.String)


def _spelt(inner: object, path: _Path, known: Mapping[_Path, _Part], *, sort: bool = False) -> list[_Part]:
    """A value as `json.dumps` spells it."""
    if not isinstance(inner, dict):
        return [known[path]]
    names = sorted(inner) if sort else inner
    return _object([[f"{_encode(name)}: ", *_spelt(inner[name], (*path, name), known, sort=sort)] for name in names])


def _object(items: Sequence[Sequence[_Part]]) -> list[_Part]:
    parts: list[_Part] = []
    for item in items:
        parts += [", " if parts else "{", *item]
    return [*(parts or ["{"]), "}"]


def _joined(parts: Sequence[_Part]) -> pl.Series:
    """The parts of each row, one after the other; one of them at least is a series."""
    some: list[Any] = []
    for is_text, group in groupby(parts, key=lambda part: isinstance(part, str)):
        same = list(group)
        some += ["".join(map(str, same))] if is_text else same
    return pl.select(
        pl.concat_str([pl.lit(part, pl.String) if isinstance(part, str) else part for part in some])
    ).to_series()
