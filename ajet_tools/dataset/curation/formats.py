"""Converts rows to the formats of training libraries.

| format | columns | source rows |
|---|---|---|
| `tasks` | unchanged | any |
| `messages` | `messages`, ending in the assistant's reply | chats; a query and its answer |
| `sharegpt` | `conversations` of `from` and `value` | as for `messages` |
| `trl-prompt` | `prompt` (messages), and metadata as columns for reward functions | any |
| `trl-preference` | `prompt`, `chosen`, `rejected` (messages) | rows with a better and a worse reply |

Other columns are kept.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from itertools import groupby
from typing import Any, Literal

import polars as pl

from ajet_sdk.errors import TaskError
from ajet_sdk.tasks.questions import messages_of_reply, question_of, reply_of, truth_of
from ajet_sdk.tasks.row_names import is_reply
from ajet_sdk.tasks.row_texts import chat_of
from ajet_sdk.tasks.task_rows import FIELDS
from ajet_tools.dataset.curation.fields import task_id_of
from ajet_tools.dataset.files.blocks import Irregular, LineBlock, json_line
from ajet_tools.dataset.files.lines import (
    Structure,
    as_json,
    asking,
    kind_at,
    kind_in,
    leaves,
    structures,
)

Format = Literal["tasks", "messages", "sharegpt", "trl-prompt", "trl-preference"]
OPENING = ("trl-prompt",)
"""Formats with the metadata as columns."""
_FORMS = "ajet_tools.trace.export.conversations"
"""Loaded for `sharegpt` only: it reads traces."""
_Values = Mapping[str, object]


class Unfit(Exception):
    """A row can't be converted; the message says why and is a category to count by."""


def converter(format: Format) -> Callable[[_Values], dict[str, object]]:
    """Returns the conversion function of a format. It raises Unfit for rows that can't be
    converted."""
    known: dict[Format, Callable[[_Values], dict[str, object]]] = {
        "tasks": dict,
        "messages": _messages,
        "sharegpt": _sharegpt,
        "trl-prompt": _trl_prompt,
        "trl-preference": _trl_preference,
    }
    return known[format]


def _messages(values: _Values) -> dict[str, object]:
    messages, used = _conversation(values)
    row: dict[str, object] = {"messages": messages}
    if values.get("tools"):
        row["tools"] = values["tools"]
    return {**row, **_other_columns(values, {*used, "messages", "tools"})}


def _sharegpt(values: _Values) -> dict[str, object]:
    messages, used = _conversation(values)
    tools = values.get("tools")
    form = import_module(_FORMS).sharegpt(messages, tools if isinstance(tools, list) else None)
    return {**form, **_other_columns(values, {*used, "conversations", "tools"})}


def _trl_prompt(values: _Values) -> dict[str, object]:
    asked, used = _prompt_of(values)
    metadata = values.get("metadata")
    columns = dict(metadata) if isinstance(metadata, Mapping) else {}
    other_columns = _other_columns(values, {*used, "metadata", "prompt"})
    return {
        "prompt": asked,
        **{name: value for name, value in columns.items() if name != "prompt"},
        **other_columns,
    }


def _trl_preference(values: _Values) -> dict[str, object]:
    chosen, rejected = _whole_reply(values.get("chosen")), _whole_reply(values.get("rejected"))
    if not chosen or not rejected:
        raise Unfit("without a chosen and a rejected reply")
    if chosen == rejected:
        raise Unfit("whose chosen and rejected replies are the same")
    try:
        asked, used = _prompt_of(values)
    except Unfit:  # TRL's implicit prompts: both replies begin with it
        shared = next(
            (i for i, (x, y) in enumerate(zip(chosen, rejected, strict=False)) if x != y), 0
        )
        if not shared:
            raise
        asked, used = chosen[:shared], set()
        chosen, rejected = chosen[shared:], rejected[shared:]
    if chosen[: len(asked)] == asked:
        chosen = chosen[len(asked) :]
    if rejected[: len(asked)] == asked:
        rejected = rejected[len(asked) :]
    if not chosen or not rejected:
        raise Unfit("one of whose replies is empty")
    other_columns = _other_columns(values, {*used, "prompt", "chosen", "rejected"})
    return {"prompt": asked, "chosen": chosen, "rejected": rejected, **other_columns}


def _conversation(values: _Values) -> tuple[list[dict[str, object]], set[str]]:
    """Returns a chat that ends in a reply, and the columns it is built from."""
    for name in ("messages", "conversations"):
        if (messages := chat_of(values.get(name))) and messages[-1].get("role") != "assistant":
            raise Unfit("whose last message is not the assistant's")
    asked, used = _prompt_of(values)
    if asked[-1].get("role") == "assistant":
        return asked, used
    reply = reply_of(values)
    if reply is not None:
        return [*asked, *map(dict, reply.messages)], {*used, reply.column}
    answer = truth_of(values)
    if answer is None:
        raise Unfit("without a reply or an answer")
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    return [*asked, {"role": "assistant", "content": text}], used


def _prompt_of(values: _Values) -> tuple[list[dict[str, object]], set[str]]:
    """Returns the prompt as messages, and the columns it is built from."""
    question = question_of(values)
    if not question.messages:
        raise Unfit("that ask nothing")
    return [dict(message) for message in question.messages], {*question.columns, "init_messages"}


def _whole_reply(value: object) -> list[dict[str, object]]:
    """Returns a reply that may begin with the prompt."""
    return chat_of(value) or messages_of_reply(value)


def _other_columns(values: _Values, used: set[str]) -> dict[str, object]:
    """Returns the unused columns, with the task id that the row would otherwise lose."""
    columns = {name: value for name, value in values.items() if name not in used}
    if "task_id" not in columns and (task_id := task_id_of(values)):
        columns["task_id"] = task_id
    return columns


_encode = json.JSONEncoder(ensure_ascii=False).encode
_Path = tuple[str, ...]
_Part = str | pl.Series
"""Text that is the same in all rows, or a series."""


def as_messages(block: LineBlock, left_out: Counter[str]) -> tuple[LineBlock, Any]:
    """Converts a block; returns also the indices of converted rows; `left_out` counts the reasons
    for the others."""
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
    """Converts lines by columns; null for lines that have to be parsed."""
    result = pl.repeat(None, len(block), dtype=pl.String, eager=True)
    groups = [
        (of, rows) for of, rows in structures(block.lines) if of is not None and _is_plain(of)
    ]
    paths = list(dict.fromkeys(path for of, _ in groups for path, _ in leaves(of)))
    try:
        columns = block.columns(paths) if paths else {}
    except Irregular:  # a field is a value in one structure and an object in another
        return result
    for structure, rows in groups:
        values = {path: columns[path].gather(rows) for path, _ in leaves(structure)}
        result = result.scatter(rows, _lines(structure, values))
    return result


def _is_plain(structure: Structure) -> bool:
    """Whether columns suffice to convert rows of this structure."""
    answer = kind_at(structure, _answer_in(structure))
    return (
        asking(structure) is not None
        and answer in ("text", "integer", "bool")
        and isinstance(structure.get("metadata", {}), dict)
        and kind_in(structure.get("main_query", "null")) in ("text", "null")
        and kind_in(structure.get("prompt", "null")) in ("text", "null")
        and not any(name in structure for name in ("tools", "env_type", "init_messages"))
        and not any(is_reply(path[-1]) for path, _ in leaves(structure))
        and not any(kind in ("list", "number") for _, kind in leaves(structure))
    )


def _answer_in(structure: Structure) -> _Path:
    inner = ("metadata", "answer")
    return inner if kind_at(structure, inner) != "null" else ("answer",)


def _lines(structure: Structure, values: Mapping[_Path, pl.Series]) -> pl.Series:
    """Converts rows of one structure; null without a question or an answer."""
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
    """Returns the task ids derived from the content, equal to those of `Task`."""
    metadata = {name: (inner, (name,)) for name, inner in structure.items() if name not in FIELDS}
    metadata |= {
        name: (inner, ("metadata", name)) for name, inner in structure.get("metadata", {}).items()
    }
    items = [
        [f"{_encode(name)}: ", *_spelt(*metadata[name], known, sort=True)]
        for name in sorted(metadata)
    ]
    asked = known[asking(structure) or "",]
    texts = _joined(['{"main_query": ', asked, ', "metadata": ', *_object(items), "}"])
    ids = [
        hashlib.blake2b(text, digest_size=12).hexdigest()
        for text in texts.cast(pl.Binary).to_list()
    ]
    return pl.Series(ids, dtype=pl.String)


def _spelt(
    inner: object, path: _Path, known: Mapping[_Path, _Part], *, sort: bool = False
) -> list[_Part]:
    """Encodes a value as `json.dumps` does."""
    if not isinstance(inner, dict):
        return [known[path]]
    names = sorted(inner) if sort else inner
    return _object(
        [
            [f"{_encode(name)}: ", *_spelt(inner[name], (*path, name), known, sort=sort)]
            for name in names
        ]
    )


def _object(items: Sequence[Sequence[_Part]]) -> list[_Part]:
    parts: list[_Part] = []
    for item in items:
        parts += [", " if parts else "{", *item]
    return [*(parts or ["{"]), "}"]


def _joined(parts: Sequence[_Part]) -> pl.Series:
    """Concatenates the parts of each row; at least one is a series."""
    some: list[Any] = []
    for is_text, group in groupby(parts, key=lambda part: isinstance(part, str)):
        same = list(group)
        some += ["".join(map(str, same))] if is_text else same
    series = [pl.lit(part, pl.String) if isinstance(part, str) else part for part in some]
    return pl.select(pl.concat_str(series)).to_series()
