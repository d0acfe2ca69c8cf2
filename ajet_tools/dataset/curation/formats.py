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

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

from ajet_sdk.tasks.questions import Reading, messages_of_reply, question_of
from ajet_sdk.tasks.row_texts import chat_of
from ajet_tools.dataset.curation.fields import task_id_of
from ajet_tools.dataset.files.values import as_text

Format = Literal["tasks", "messages", "sharegpt", "trl-prompt", "trl-preference"]
NEW_COLUMNS = (
    "messages",
    "conversations",
    "prompt",
    "completion",
    "chosen",
    "rejected",
    "tools",
    "system",
)
"""Columns that a format writes anew; it passes on all others."""
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


@dataclass(frozen=True)
class _Chat:
    """Messages, and the columns that they are built from."""

    messages: list[dict[str, object]]
    used: set[str]


def _messages(values: _Values) -> dict[str, object]:
    chat = _conversation(values)
    row: dict[str, object] = {"messages": chat.messages}
    if values.get("tools"):
        row["tools"] = values["tools"]
    return {**row, **_other_columns(values, {*chat.used, "messages", "tools"})}


def _sharegpt(values: _Values) -> dict[str, object]:
    chat = _conversation(values)
    tools = values.get("tools")
    sharegpt = import_module(_FORMS).sharegpt
    row = sharegpt(chat.messages, tools if isinstance(tools, list) else None)
    return {**row, **_other_columns(values, {*chat.used, "conversations", "tools"})}


def _trl_prompt(values: _Values) -> dict[str, object]:
    prompt = _prompt_of(values)
    row: dict[str, object] = {"prompt": prompt.messages}
    metadata = values.get("metadata")
    for name, value in metadata.items() if isinstance(metadata, Mapping) else ():
        row.setdefault(name, value)
    return {**row, **_other_columns(values, {*prompt.used, "metadata", "prompt"})}


def _trl_preference(values: _Values) -> dict[str, object]:
    chosen = _whole_reply(values.get("chosen"))
    rejected = _whole_reply(values.get("rejected"))
    if not chosen or not rejected:
        raise Unfit("without a chosen and a rejected reply")
    if chosen == rejected:
        raise Unfit("whose chosen and rejected replies are the same")
    try:
        prompt = _prompt_of(values)
    except Unfit:  # TRL's implicit prompts: both replies begin with it
        prompt = _Chat(_shared_start(chosen, rejected), set())
        if not prompt.messages:
            raise
    chosen = _without_start(chosen, prompt.messages)
    rejected = _without_start(rejected, prompt.messages)
    if not chosen or not rejected:
        raise Unfit("one of whose replies is empty")
    other_columns = _other_columns(values, {*prompt.used, "prompt", "chosen", "rejected"})
    return {"prompt": prompt.messages, "chosen": chosen, "rejected": rejected, **other_columns}


def _shared_start(
    first: list[dict[str, object]], second: list[dict[str, object]]
) -> list[dict[str, object]]:
    """Returns the messages before the first that differs; none if one is the start of the
    other."""
    for index, (message, other) in enumerate(zip(first, second, strict=False)):
        if message != other:
            return first[:index]
    return []


def _without_start(
    messages: list[dict[str, object]], start: list[dict[str, object]]
) -> list[dict[str, object]]:
    if messages[: len(start)] == start:
        return messages[len(start) :]
    return messages


def _conversation(values: _Values) -> _Chat:
    """Returns a chat that ends in a reply."""
    for name in ("messages", "conversations"):
        messages = chat_of(values.get(name))
        if messages and messages[-1].get("role") != "assistant":
            raise Unfit("whose last message is not the assistant's")
    prompt = _prompt_of(values)
    if prompt.messages[-1].get("role") == "assistant":
        return prompt
    row = Reading(values)
    if row.reply is not None:
        messages = [*prompt.messages, *map(dict, row.reply.messages)]
        return _Chat(messages, {*prompt.used, row.reply.column})
    if not row.truths:
        raise Unfit("without a reply or an answer")
    message: dict[str, object] = {"role": "assistant", "content": as_text(row.truths[0])}
    return _Chat([*prompt.messages, message], prompt.used)


def _prompt_of(values: _Values) -> _Chat:
    question = question_of(values)
    if not question.messages:
        raise Unfit("that ask nothing")
    return _Chat(list(map(dict, question.messages)), {*question.columns, "init_messages"})


def _whole_reply(value: object) -> list[dict[str, object]]:
    """Returns a reply that may begin with the prompt."""
    return chat_of(value) or messages_of_reply(value)


def _other_columns(values: _Values, used: set[str]) -> dict[str, object]:
    """Returns the unused columns, with the task id that the row would otherwise lose."""
    columns = {name: value for name, value in values.items() if name not in used}
    if "task_id" not in columns and (task_id := task_id_of(values)):
        columns["task_id"] = task_id
    return columns
