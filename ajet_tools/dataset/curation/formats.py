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

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Literal

from ajet_sdk.tasks.questions import messages_of_reply, question_of, reply_of, truth_of
from ajet_sdk.tasks.row_texts import chat_of
from ajet_tools.dataset.curation.fields import task_id_of

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
