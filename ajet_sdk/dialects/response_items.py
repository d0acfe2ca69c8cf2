"""Converts items of OpenAI's Responses to messages, and the message of a reply to items."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping

from ajet_sdk.errors import RequestRefused
from ajet_sdk.types import Json, JsonView

OURS = "ajet:"
"""Prefix of encrypted reasoning made here. Reasoning of other providers can't be decrypted."""
REPLY_ID = re.compile(r"(?:msg|fc|ctc|rs)_([0-9a-f]{32})")
"""Ids of items of replies made here."""


class ItemReader:
    """Converts items to messages; the reasoning, text and tool calls of a reply become one
    message."""

    def __init__(self, stored: Mapping[str, Json]) -> None:
        self._stored = stored
        self._messages: list[Json] = []
        self._reply: Json | None = None
        """The last message, if it is a reply that further items can extend."""
        self._of: str | None = None
        """The request id of that reply."""

    def messages(self, items: Iterable[object]) -> list[Json]:
        for index, item in enumerate(items):
            where = f"input[{index}]"
            if isinstance(item, Mapping) and item.get("type") == "item_reference":
                item = self._stored.get(str(item.get("id")), item)
            if not isinstance(item, Mapping):
                raise RequestRefused(f"{where} must be an item (an object)", "input")
            self._read(item, where)
        return self._messages

    def _read(self, item: JsonView, where: str) -> None:
        kind = item.get("type") or "message"
        if kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            self._begin_or_go_on(item, "content", "tool_calls")
            assert self._reply is not None
            thought = _reasoning(item)
            if thought:
                self._reply["reasoning_content"] = (
                    self._reply.get("reasoning_content", "") + thought
                )
        elif kind in ("function_call", "custom_tool_call"):
            self._begin_or_go_on(item)
            assert self._reply is not None
            if kind == "function_call":
                arguments = item.get("arguments")
            else:
                arguments = json.dumps({"input": item.get("input")})
            function = {
                "name": qualified(item.get("namespace"), item.get("name")),
                "arguments": arguments,
            }
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            self._reply.setdefault("tool_calls", []).append(call)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            content = _content(item.get("output"), f"{where}.output")
            self._append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        else:
            known = (
                "message, reasoning, function_call, custom_tool_call, their outputs, item_reference"
            )
            raise RequestRefused(
                f"{where} of type {kind!r} is not supported ({known} are); leave it out", "input"
            )

    def _message(self, item: JsonView, where: str) -> None:
        role = item.get("role")
        content = _content(item.get("content"), f"{where}.content")
        if role not in ("user", "assistant", "system", "developer"):
            raise RequestRefused(
                f"{where}.role must be user, assistant, system or developer (got {role!r})", "input"
            )
        if role == "assistant":
            self._begin_or_go_on(item, "content", "tool_calls")
            assert self._reply is not None
            self._reply["content"] = content
        else:
            self._append({"role": "system" if role == "developer" else role, "content": content})

    def _append(self, message: Json) -> None:
        self._messages.append(message)
        self._reply = self._of = None

    def _begin_or_go_on(self, item: JsonView, *ended_by: str) -> None:
        """Extend the last reply; begin a new one if it has a field of `ended_by` or the item
        belongs to another."""
        match = REPLY_ID.match(str(item.get("id")))
        of = match[1] if match else None
        another = of is not None and self._of is not None and of != self._of
        if (
            self._reply is None
            or another
            or any(self._reply.get(name) is not None for name in ended_by)
        ):
            reply: Json = {"role": "assistant", "content": None}
            self._append(reply)
            self._reply = reply
        self._of = of or self._of


def _content(value: object, where: str) -> object:
    """The joined text, or the parts of a chat message if one is not text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(part, Mapping) for part in value):
        raise RequestRefused(f"{where} must be text or a list of parts", "input")
    parts = [_part(part, f"{where}[{i}]") for i, part in enumerate(value)]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(part: JsonView, where: str) -> Json:
    kind = part.get("type")
    if kind in ("input_text", "output_text", "text", "refusal"):
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise RequestRefused(f"{where} has no text", "input")
        return {"type": "text", "text": text}
    if kind == "input_image" and part.get("image_url"):
        detail = {"detail": part["detail"]} if part.get("detail") else {}
        return {"type": "image_url", "image_url": {"url": part["image_url"], **detail}}
    if kind == "input_file" and part.get("file_data"):
        return {
            "type": "file",
            "file": {name: part[name] for name in ("filename", "file_data") if part.get(name)},
        }
    if kind == "input_audio":
        return {"type": "input_audio", "input_audio": part.get("input_audio")}
    raise RequestRefused(
        f"{where} is of type {kind!r}; only text and inline images and files are supported", "input"
    )


def _reasoning(item: JsonView) -> str:
    """The reasoning of an item: its content, its summary, or the reasoning encrypted here."""
    for name in ("content", "summary"):
        texts = [part.get("text") for part in item.get(name) or () if isinstance(part, Mapping)]
        if thought := "".join(text for text in texts if isinstance(text, str)):
            return thought
    sealed = item.get("encrypted_content")
    if isinstance(sealed, str) and sealed.startswith(OURS):
        return base64.b64decode(sealed[len(OURS) :]).decode("utf-8", "surrogatepass")
    return ""


def qualified(namespace: object, name: object) -> object:
    """The name of a tool for the model, with its namespace as prefix."""
    return f"{namespace}__{name}" if namespace else name


def items_of(choice: JsonView, body: JsonView, request_id: str) -> list[Json]:
    message = choice["message"]
    output = list[Json]()
    thought = message.get("reasoning_content")
    if thought:
        output.append(_reasoning_item(thought, body, f"rs_{request_id}"))
    content = message.get("content") or ""
    calls = message.get("tool_calls") or ()
    if isinstance(content, list):
        content = "".join(part.get("text") or "" for part in content if isinstance(part, Mapping))
    if content or not (calls or (thought and choice["finish_reason"] == "length")):
        logprobs = (choice.get("logprobs") or {}).get("content") or []
        part = {"type": "output_text", "text": content, "annotations": [], "logprobs": logprobs}
        output.append(
            {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "content": [part]}
        )
    custom = {tool.get("name") for tool in body.get("tools") or () if tool.get("type") == "custom"}
    spaces = [tool for tool in body.get("tools") or () if tool.get("type") == "namespace"]
    within = {
        qualified(s["name"], t["name"]): (s["name"], t["name"])
        for s in spaces
        for t in s.get("tools") or ()
    }
    for index, call in enumerate(calls):
        name = call["function"]["name"]
        arguments = call["function"]["arguments"]
        about = {"call_id": call["id"], "name": name}
        if name in within:
            about["namespace"], about["name"] = within[name]
        if name in custom:
            item = {
                "id": f"ctc_{request_id}_{index}",
                "type": "custom_tool_call",
                **about,
                "input": _input(arguments),
            }
        else:
            item = {
                "id": f"fc_{request_id}_{index}",
                "type": "function_call",
                **about,
                "arguments": arguments,
            }
        output.append(item)
    return output


def _reasoning_item(thought: str, body: JsonView, item_id: str) -> Json:
    reasoning = body.get("reasoning") or {}
    item: Json = {"id": item_id, "type": "reasoning", "summary": []}
    if reasoning.get("summary") or reasoning.get("generate_summary"):
        item["summary"] = [{"type": "summary_text", "text": thought}]
    else:
        item["content"] = [{"type": "reasoning_text", "text": thought}]
    if "reasoning.encrypted_content" in (body.get("include") or ()):
        item["encrypted_content"] = (
            OURS + base64.b64encode(thought.encode("utf-8", "surrogatepass")).decode()
        )
    return item


def _input(arguments: str) -> str:
    """The text for a custom tool."""
    try:
        value = json.loads(arguments)["input"]
    except (ValueError, TypeError, KeyError):
        return arguments
    return value if isinstance(value, str) else json.dumps(value)
