"""Writes tools, calls and results in the Hermes format, for chat templates that do not render them.

Many templates drop `tools`, render a reply with tool calls as an empty turn, and don't support the
role `tool`. For these, the conversation is written as text: tools in a `<tools>` block of the
system message, calls as `<tool_call>{"name": …, "arguments": …}</tool_call>` in the assistant's
turn, and results as `<tool_response>` in a user's turn. The format is that of NousResearch's Hermes
2 Pro, on which Qwen2.5 and others were trained, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from ajet_sdk.types import Json

Message = Json
Show = Callable[[object], str]

_TOOLS = """# Tools

You can call functions to help with the user's request. Their signatures are between <tools> and </tools>:
<tools>
{tools}
</tools>"""

_FORM = """

To call a function, write its name and its arguments as a JSON object between <tool_call> and </tool_call>:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>
The result follows between <tool_response> and </tool_response>."""


def about_tools(messages: Sequence[Mapping[str, object]]) -> bool:
    """Whether a conversation has tool calls or results."""
    return any(message.get("tool_calls") or message.get("role") == "tool" for message in messages)


def with_tools_as_text(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, object]],
    show: Show,
    role: str,
    *,
    with_form: bool,
) -> list[Message]:
    """Adds the tools to the first message, if it has the given role, else as a new message before
    it.

    Args:
        messages: with text as content, or parts if there are pictures.
        tools: as in a request.
        show: converts a tool to JSON.
        role: `system`, or `user` if the template renders no system message.
        with_form: explain the format of calls.
    """
    block = _TOOLS.format(tools="\n".join(map(show, tools))) + (_FORM if with_form else "")
    if not messages or messages[0].get("role") != role:
        return [{"role": role, "content": block}, *messages]
    first = messages[0]
    following = messages[1:]
    content = first["content"]
    if not content:
        whole: object = block
    elif role == "system":
        whole = _joined(content, f"\n\n{block}")
    else:
        whole = _joined(f"{block}\n\n", content)
    return [{**first, "content": whole}, *following]


def with_calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """Writes calls into the assistant's turns, and consecutive results into a user's turn."""
    written: list[Message] = []
    results: list[object] = []
    for message in messages:
        if message.get("role") == "tool":
            before = "\n" if results else ""
            results += [f"{before}<tool_response>\n", message["content"], "\n</tool_response>"]
            continue
        if results:
            written.append({"role": "user", "content": _joined(*results)})
            results = []
        calls = message.get("tool_calls")
        if calls:
            blocks = [f"<tool_call>\n{_call(call)}\n</tool_call>" for call in calls]
            if message.get("content"):
                content = [message["content"], "\n"]
            else:
                content = []
            message = {key: value for key, value in message.items() if key != "tool_calls"}
            message["content"] = _joined(*content, "\n".join(blocks))
        written.append(message)
    if results:
        return [*written, {"role": "user", "content": _joined(*results)}]
    return written


def _joined(*contents: object) -> object:
    """Contents of messages one after another: text, or parts if one of them has parts."""
    if not any(isinstance(content, list) for content in contents):
        return "".join(map(str, contents))
    parts: list[Json] = []
    for content in contents:
        for part in content if isinstance(content, list) else [_text_part(str(content))]:
            if parts and part["type"] == parts[-1]["type"] == "text":
                part = _text_part(parts.pop()["text"] + part["text"])
            parts.append(part)
    return parts


def _text_part(text: str) -> Json:
    return {"type": "text", "text": text}


def _call(call: Message) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return json.dumps(call, ensure_ascii=False, default=str)
    arguments = function.get("arguments")
    spelling = getattr(arguments, "spelling", None) or json.dumps(
        arguments, ensure_ascii=False, default=str
    )
    return (
        f'{{"name": {json.dumps(function.get("name"), ensure_ascii=False)}, "arguments":'
        f" {spelling}}}"
    )
