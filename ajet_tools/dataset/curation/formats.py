"""Rows of a dataset in the forms that training libraries read.

| form | a row has | of |
|---|---|---|
| `tasks` | what it had | any row |
| `messages` | `messages`, ending in the assistant's reply | chats; a query and its answer |
| `sharegpt` | `conversations` of `from` and `value` | the same |
| `trl-prompt` | `prompt` (messages), and metadata as columns, as reward functions get it | any |
| `trl-preference` | `prompt`, `chosen`, `rejected` (messages) | rows with a better and a worse reply |

Columns that a form does not use are kept beside it, so that nothing of a row's origin is lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Literal

from ajet_sdk.tasks.task_rows import QUERY_COLUMNS
from ajet_tools.dataset.curation.filter import task_id_of

Format = Literal["tasks", "messages", "sharegpt", "trl-prompt", "trl-preference"]

OPENING = ("trl-prompt",)
"""Those that have what stands in the metadata as columns."""

_FORMS = "ajet_tools.trace.export.messages"
"""Loaded for `sharegpt` only: it reads traces."""
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
_Values = Mapping[str, object]


class Unfit(Exception):
    """A row has not what a form needs; the text says what is missing, and can be counted by."""


def converter(format: Format) -> Callable[[_Values], dict[str, object]]:
    """The function that puts a row into a form. It raises Unfit for a row that cannot be put into it."""
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
    return {"prompt": asked, **{name: value for name, value in columns.items() if name != "prompt"}, **other_columns}


def _trl_preference(values: _Values) -> dict[str, object]:
    chosen, rejected = _reply(values.get("chosen")), _reply(values.get("rejected"))
    if not chosen or not rejected:
        raise Unfit("without a chosen and a rejected reply")
    if chosen == rejected:
        raise Unfit("whose chosen and rejected replies are the same")
    try:
        asked, used = _prompt_of(values)
    except Unfit:  # TRL's implicit prompts: both replies begin with it
        shared = next((i for i, (x, y) in enumerate(zip(chosen, rejected, strict=False)) if x != y), 0)
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
    """A chat that ends in a reply, and the columns that it is made of."""
    for name in ("messages", "conversations"):
        if messages := _chat(values.get(name)):
            if messages[-1].get("role") != "assistant":
                raise Unfit("whose last message is not the assistant's")
            return messages, {name}
    asked, used = _prompt_of(values)
    if asked[-1].get("role") == "assistant":
        return asked, used
    for name in ("completion", "response", "output", "chosen"):
        if reply := _reply(values.get(name)):
            return [*asked, *reply], {*used, name}
    metadata = values.get("metadata")
    answer = values.get("answer", metadata.get("answer") if isinstance(metadata, Mapping) else None)
    if answer is None or (isinstance(answer, str) and not answer.strip()):
        raise Unfit("without a reply or an answer")
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    return [*asked, {"role": "assistant", "content": text}], used


def _prompt_of(values: _Values) -> tuple[list[dict[str, object]], set[str]]:
    """What the model is asked, as messages, and the columns that it is made of."""
    query = next(((name, values[name]) for name in QUERY_COLUMNS if _is_text(values.get(name))), None)
    for name in ("init_messages", "prompt"):
        if messages := _chat(values.get(name)):
            more = [{"role": "user", "content": query[1]}] if query and messages[-1].get("role") == "system" else []
            return [*messages, *more], {name, *([query[0]] if query else [])}
    if query:
        return [{"role": "user", "content": query[1]}], {query[0], "init_messages"}
    if messages := _chat(values.get("messages")):
        cut = len(messages) - 1 if messages[-1].get("role") == "assistant" else len(messages)
        if cut:
            return messages[:cut], {"messages"}
    raise Unfit("that ask nothing")


def _chat(value: object) -> list[dict[str, object]]:
    """Messages, of OpenAI's or ShareGPT's form; empty where it is no list of messages."""
    if not isinstance(value, list) or not all(isinstance(m, Mapping) for m in value):
        return []
    if all("role" in m for m in value):
        return [dict(m) for m in value]
    if all("from" in m and "value" in m for m in value):
        return [{"role": _SHAREGPT_ROLES.get(m["from"], m["from"]), "content": m["value"]} for m in value]
    return []


def _reply(value: object) -> list[dict[str, object]]:
    return [{"role": "assistant", "content": value}] if _is_text(value) else _chat(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _other_columns(values: _Values, used: set[str]) -> dict[str, object]:
    """The columns beside the form, and the task's id, which the row would no longer have."""
    columns = {name: value for name, value in values.items() if name not in used}
    if "task_id" not in columns and (task_id := task_id_of(values)):
        columns["task_id"] = task_id
    return columns
