"""Converts requests of Anthropic's Messages API to chat completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ajet_sdk.dialects.fields import Field, Fields, fields, refuse
from ajet_sdk.dialects.json import assistant, data_url, joined, json_text
from ajet_sdk.errors import RequestRefused
from ajet_sdk.types import Json

MESSAGE_FIELDS: Fields = {
    **fields(
        "honoured", "model messages system max_tokens temperature top_p top_k stop_sequences stream"
    ),
    **fields(
        "honoured",
        "tools",
        "client tools only; tools that Anthropic runs or defines are refused by name",
    ),
    **fields("honoured", "tool_choice", "auto, any, tool, none; disable_parallel_tool_use"),
    **fields(
        "honoured",
        "thinking",
        "enabled and disabled are passed to the chat template; adaptive keeps its default",
    ),
    **fields("honoured", "output_config", "format, effort"),
    **fields("honoured", "output_format", "as output_config.format"),
    **fields(
        "no effect",
        "metadata service_tier inference_geo speed diagnostics user_profile_id workspace_id"
        " anthropic_version anthropic_beta betas billing_policy fallback_credit_token",
    ),
    **fields("no effect", "fallbacks", "the policy answers, and no substitute"),
    **fields(
        "honoured",
        "thread",
        "create, and continue with the id of a message in the same open episode",
    ),
    **fields(
        "no effect",
        "cache_control",
        "accepted anywhere; repeated prefixes are computed once in any case",
    ),
    **fields("no effect", "context_management", "the conversation is always kept whole"),
    "compaction": Field("refused", "summarise the conversation with a request of your own"),
    "container": Field("refused", "run the code in a tool of the agent", ({}, "")),
    "mcp_servers": Field(
        "refused", "connect to them in the agent, and pass their tools as tools", ([],)
    ),
}
"""Every field of a request."""


TOOL_FIELDS: Fields = {
    **fields("honoured", "name description input_schema strict type"),
    **fields("no effect", "cache_control eager_input_streaming"),
    "allowed_callers": Field("refused", "the model calls tools itself", (["direct"], [])),
    "defer_loading": Field("refused", "every tool is shown to the model", (False,)),
    "input_examples": Field("refused", "write the examples into the tool's description", ([],)),
}
"""Every field of a tool."""


def read(
    body: Mapping[str, object], *, counts: bool, stored: Mapping[str, Json] | None = None
) -> Json:
    """Convert a request to the body of a chat completion. Raises RequestRefused.

    With `counts`, only its tokens are counted. `stored` has the threads by the ids of their last
    messages.
    """
    refuse(body, MESSAGE_FIELDS)
    if not counts and body.get("max_tokens") is None:
        raise RequestRefused("max_tokens: field required", "max_tokens")
    thread = _thread(body.get("thread"), stored or {})
    chat: Json = {
        "model": body.get("model", ""),
        "messages": [*thread["messages"], *_messages(body)],
    }
    if not chat["messages"]:
        raise RequestRefused("messages: at least one message is required", "messages")
    if thread["tools"]:
        chat["tools"] = thread["tools"]
    for name in ("max_tokens", "temperature", "top_p", "top_k", "stream"):
        if body.get(name) is not None:
            chat[name] = body[name]
    if body.get("stop_sequences"):
        chat["stop"] = body["stop_sequences"]
    if body.get("tools"):
        chat["tools"] = [
            _tool(tool, f"tools.{index}") for index, tool in enumerate(_list(body, "tools"))
        ]
    if body.get("tool_choice"):
        chat.update(_tool_choice(body["tool_choice"]))
    chat.update(_thinking(body.get("thinking")))
    chat.update(_output(body))
    if chat["messages"][-1]["role"] == "assistant":
        chat.update(continue_final_message=True, add_generation_prompt=False)
    return chat


def _thread(value: object, stored: Mapping[str, Json]) -> Json:
    """Messages and tools of the thread that a request continues; empty for a new thread."""
    if value is None or value == {"type": "create"}:
        return {"messages": [], "tools": None}
    if isinstance(value, dict) and value.get("type") == "continue":
        named = value.get("previous_message_id")
    else:
        named = None
    if named is None:
        raise RequestRefused(
            'thread must be {"type": "create"} or {"type": "continue", "previous_message_id":'
            f' "msg_…"}} (got {value!r:.100})',
            "thread",
        )
    if named not in stored:
        raise RequestRefused(
            f"thread: there is no message {named!r} in this episode to continue from; send the"
            " whole conversation",
            "thread",
            code="thread_not_found",
        )
    return stored[named]


def _list(holder: Mapping[str, object], name: str, where: str = "") -> list[object]:
    value = holder.get(name)
    if not isinstance(value, list):
        raise RequestRefused(f"{where}{name} must be a list (got {value!r:.100})", name)
    return value


def _messages(body: Mapping[str, object]) -> list[Json]:
    messages = list[Json]()
    if body.get("system"):
        messages.append({"role": "system", "content": _text(body["system"], "system")})
    for index, message in enumerate(_list(body, "messages")):
        where = f"messages.{index}"
        if not isinstance(message, dict) or message.get("role") not in (
            "user",
            "assistant",
            "system",
        ):
            raise RequestRefused(f"{where}.role must be user, assistant or system", "messages")
        role = message["role"]
        content = message.get("content")
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
        elif role == "system":
            messages.append({"role": role, "content": _text(content, f"{where}.content")})
        elif role == "assistant":
            messages.append(_assistant(_list(message, "content", f"{where}."), where))
        else:
            messages.extend(_user(_list(message, "content", f"{where}."), where))
    return messages


def _text(value: object, where: str) -> str:
    if isinstance(value, str):
        return value
    blocks = value if isinstance(value, list) else [value]
    return "\n".join(
        str(_block(block, ("text",), f"{where}.{index}")["text"])
        for index, block in enumerate(blocks)
    )


def _block(block: object, kinds: tuple[str, ...], where: str) -> Json:
    """Check that a content block is of one of these kinds. Raises RequestRefused."""
    if isinstance(block, dict):
        kind = block.get("type")
    else:
        kind = type(block).__name__
    if not isinstance(block, dict) or kind not in kinds:
        raise RequestRefused(
            f"{where}: content blocks of type {kind!r} are not supported ({', '.join(kinds)} are)",
            "messages",
        )
    missing = [name for name in _NEEDED.get(str(kind), ()) if name not in block]
    if missing:
        raise RequestRefused(f"{where}.{missing[0]}: field required", "messages")
    return block


_NEEDED = {
    "text": ("text",),
    "image": ("source",),
    "document": ("source",),
    "tool_use": ("id", "name"),
    "tool_result": ("tool_use_id",),
}


def _assistant(blocks: list[object], where: str) -> Json:
    texts = list[str]()
    thoughts = list[str]()
    calls = list[Json]()
    for index, value in enumerate(blocks):
        block = _block(
            value, ("text", "thinking", "redacted_thinking", "tool_use"), f"{where}.content.{index}"
        )
        if block["type"] == "text":
            texts.append(str(block["text"]))
        elif block["type"] == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif block["type"] == "tool_use":
            arguments = json_text(block.get("input") or {})
            function = {"name": block["name"], "arguments": arguments}
            calls.append({"id": block["id"], "type": "function", "function": function})
    return assistant(texts, "".join(thoughts), calls)


def _user(blocks: list[object], where: str) -> Iterator[Json]:
    """Split a user message: tool results become separate messages, with the other content between
    and after them."""
    parts = list[Json]()
    for index, value in enumerate(blocks):
        path = f"{where}.content.{index}"
        block = _block(value, ("text", "image", "document", "tool_result"), path)
        if block["type"] != "tool_result":
            parts.append(_part(block, path))
            continue
        if parts:
            yield {"role": "user", "content": joined(parts)}
            parts = []
        yield {
            "role": "tool",
            "tool_call_id": block["tool_use_id"],
            "content": _result(block, path),
        }
    if parts or not blocks:
        yield {"role": "user", "content": joined(parts)}


def _result(block: Json, where: str) -> object:
    content = block.get("content") or ""
    if not isinstance(content, str):
        if not isinstance(content, list):
            raise RequestRefused(f"{where}.content must be a string or a list", "messages")
        kinds = ("text", "image", "document")
        content = joined(
            [_part(_block(b, kinds, f"{where}.content.{i}"), where) for i, b in enumerate(content)]
        )
    if (
        block.get("is_error")
        and isinstance(content, str)
        and not content.lower().startswith("error")
    ):
        return f"Error: {content}"
    return content


def _part(block: Json, where: str) -> Json:
    if block["type"] == "text":
        return {"type": "text", "text": str(block["text"])}
    source = block["source"] if isinstance(block["source"], dict) else {}
    if block["type"] == "document":
        if source.get("type") != "text":
            raise RequestRefused(
                f"{where}: documents of type {source.get('type')!r} are not supported; send text",
                "messages",
            )
        return {"type": "text", "text": str(source.get("data", ""))}
    if source.get("type") == "base64":
        url = data_url(source.get("media_type"), source.get("data"))
    elif source.get("type") == "url":
        url = str(source.get("url"))
    else:
        raise RequestRefused(
            f"{where}: images of type {source.get('type')!r} are not supported; send base64",
            "messages",
        )
    return {"type": "image_url", "image_url": {"url": url}}


def _tool(tool: object, where: str) -> Json:
    kind = tool.get("type") if isinstance(tool, dict) else type(tool).__name__
    if not isinstance(tool, dict) or kind not in (None, "custom"):
        raise RequestRefused(
            f"{where}: tools of type {kind!r} run on or are defined by Anthropic's servers; define"
            " your own tool with name, description and input_schema",
            "tools",
        )
    refuse(tool, TOOL_FIELDS)
    if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), dict):
        raise RequestRefused(f"{where} needs a name and an input_schema", "tools")
    function: Json = {"name": tool["name"]}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    function["parameters"] = tool["input_schema"]
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def _tool_choice(choice: object) -> Json:
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if not isinstance(choice, dict) or (
        kind not in _CHOICES and not (kind == "tool" and choice.get("name"))
    ):
        raise RequestRefused(
            f"tool_choice must be auto, any, none, or tool with a name (got {choice!r})",
            "tool_choice",
        )
    named = {"type": "function", "function": {"name": choice.get("name")}}
    options: Json = {"tool_choice": _CHOICES.get(str(kind), named)}
    if choice.get("disable_parallel_tool_use"):
        options["parallel_tool_calls"] = False
    return options


def _thinking(value: object) -> Json:
    kind = value.get("type") if isinstance(value, dict) else value
    if kind not in (None, "enabled", "disabled", "adaptive", "between_tools"):
        raise RequestRefused(
            f"thinking.type must be enabled, disabled or adaptive (got {kind!r})", "thinking"
        )
    if kind in (None, "adaptive"):
        return {}
    return {"chat_template_kwargs": {"enable_thinking": kind != "disabled"}}


def _output(body: Mapping[str, object]) -> Json:
    config = body.get("output_config") or {}
    if not isinstance(config, dict):
        raise RequestRefused("output_config must be an object", "output_config")
    unknown = set(config) - {"effort", "format"}
    if unknown:
        raise RequestRefused(
            f"output_config.{min(unknown)} is not supported; leave it out", "output_config"
        )
    if config.get("effort") is None:
        options = {}
    else:
        options = {"reasoning_effort": config["effort"]}
    form = config.get("format") or body.get("output_format")
    if form is None:
        return options
    if (
        not isinstance(form, dict)
        or form.get("type") != "json_schema"
        or not isinstance(form.get("schema"), dict)
    ):
        raise RequestRefused(
            'output_config.format must be {"type": "json_schema", "schema": {…}}', "output_config"
        )
    schema = {"name": "output", "schema": form["schema"], "strict": True}
    return {**options, "response_format": {"type": "json_schema", "json_schema": schema}}
