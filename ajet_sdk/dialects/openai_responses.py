"""OpenAI's Responses API: converts requests to chat completions, with the state of
`previous_response_id`, and back."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from ajet_sdk.dialects.fields import COMPLETIONS, Field, fields, refuse
from ajet_sdk.dialects.json import Stored, event_bytes
from ajet_sdk.dialects.openai_chat import ChatDialect, pieces
from ajet_sdk.dialects.response_items import ItemReader, items_of, qualified
from ajet_sdk.errors import RequestRefused
from ajet_sdk.types import Json, JsonView

_OTHERWISE = (
    "messages",
    "prompt",
    "tools",
    "n",
    "max_tokens",
    "max_completion_tokens",
    "response_format",
    "logprobs",
    "reasoning_effort",
    "stream_options",
    "continue_final_message",
    "return_tokens_as_token_ids",
)
"""Fields of chat completions that Responses lack or name differently."""

_OF_CHAT = [
    name
    for name, field in COMPLETIONS.items()
    if field.effect == "honoured" and name not in _OTHERWISE
]

RESPONSE_FIELDS = {
    **fields("honoured", " ".join(_OF_CHAT), "not an OpenAI field; as in chat completions"),
    **fields(
        "honoured",
        "model input instructions stream temperature top_p top_logprobs tools parallel_tool_calls",
    ),
    **fields(
        "honoured", "tool_choice", "auto, none, required, a function, a custom tool, allowed_tools"
    ),
    **fields("honoured", "text", "format: text, json_object, json_schema; verbosity has no effect"),
    **fields("honoured", "max_output_tokens", "at this length the response is incomplete"),
    **fields(
        "honoured", "reasoning", "effort; with summary the reasoning is returned as a summary"
    ),
    **fields(
        "honoured",
        "include",
        "message.output_text.logprobs, reasoning.encrypted_content; others have no effect",
    ),
    **fields("honoured", "previous_response_id", "id of a response in the same open episode"),
    **fields("honoured", "store", "with false, later requests cannot refer to the response"),
    **fields(
        "no effect",
        "stream_options metadata user service_tier safety_identifier prompt_cache_key"
        " prompt_cache_retention prompt_cache_options client_metadata max_tool_calls timeout"
        " moderation access_programs",
    ),
    "background": Field(
        "refused", "no response is made in the background; wait for it, or stream", (False,)
    ),
    "personality": Field("refused", "say in the instructions how to write"),
    "background_options": Field("refused", "leave background out", ({},)),
    "conversation": Field("refused", "set previous_response_id, or send its items as input"),
    "prompt": Field("refused", "the template is stored at OpenAI; send its text as instructions"),
    "truncation": Field(
        "refused", "nothing is truncated; shorten the input yourself", ("disabled",)
    ),
    "context_management": Field("refused", "shorten the input yourself", ([],)),
    "image": Field("refused", "the policy produces no images", ({},)),
}
"""Every field of a request."""

AS_THEY_ARE = (
    *_OF_CHAT,
    "metadata",
    "user",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)
"""Fields with the same name in chat completions."""


class Responses(ChatDialect):
    fields = RESPONSE_FIELDS

    def neutral(self, body: Json, stored: Mapping[str, Json]) -> Json:
        refuse(body, RESPONSE_FIELDS)
        chat: Json = {name: body[name] for name in AS_THEY_ARE if body.get(name) is not None}
        chat["messages"] = _messages(body, stored)
        tools = [
            function
            for i, tool in enumerate(_list(body, "tools"))
            for function in _tools(tool, f"tools[{i}]")
        ]
        if tools:
            chat["tools"] = tools
        else:
            chat.pop("parallel_tool_calls", None)  # without effect
        if "tool_choice" in chat:
            chat["tool_choice"] = _tool_choice(body["tool_choice"])
        text = _object(body, "text")
        reasoning = _object(body, "reasoning")
        if text.get("format") is not None:
            chat["response_format"] = _response_format(text["format"])
        if text.get("verbosity") is not None:
            chat["verbosity"] = text["verbosity"]
        if reasoning.get("effort") is not None:
            chat["reasoning_effort"] = reasoning["effort"]
        if body.get("max_output_tokens") is not None:
            chat["max_completion_tokens"] = body["max_output_tokens"]
        if "message.output_text.logprobs" in _list(body, "include") or body.get("top_logprobs"):
            chat["logprobs"] = True
        return chat

    def response(self, completion: Json, request: Json, body: Json, stored: Stored) -> Json:
        """Return the whole response. Unless `store` is false, later requests of the episode can
        continue it."""
        choice = completion["choices"][0]
        request_id = completion["id"].partition("-")[2]
        output = items_of(choice, body, request_id)
        cut = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(
            choice["finish_reason"]
        )
        status = "incomplete" if cut else "completed"
        for item in output:
            item["status"] = "completed"
        if output:
            output[-1]["status"] = status
        response = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": completion["created"],
            "completed_at": None if cut else completion["created"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": cut} if cut else None,
            "model": completion["model"],
            "output": output,
            "usage": _usage(completion["usage"]),
            **{name: body.get(name, default) for name, default in _ECHOED.items()},
        }
        if body.get("return_token_ids"):
            response["prompt_token_ids"] = completion["prompt_token_ids"]
            response["token_ids"] = choice["token_ids"]
        if body.get("store") is not False:
            messages = _without(body.get("instructions"), request["messages"])
            stored[response["id"]] = {
                "messages": [*messages, choice["message"]],
                "response": response,
            }
            stored.update((item["id"], item) for item in output)
        return response

    def count(self, tokens: int) -> Json:
        return {"object": "response.input_tokens", "input_tokens": tokens}

    def look_up(self, method: str, response_id: str, stored: Stored) -> Json | None:
        """Answer GET or DELETE of a response; None if there is no such response."""
        if method == "GET":
            return stored[response_id]["response"] if response_id in stored else None
        deleted = stored.pop(response_id, None)
        return deleted and {"id": response_id, "object": "response", "deleted": True}

    def opening(self, request_id: str, model: str, body: Mapping[str, object]) -> bytes:
        begun = _begun(request_id, model, body)
        return event_bytes({"type": "response.created", "response": begun, "sequence_number": 0})

    def keep_alive(self, request_id: str, model: str, body: Mapping[str, object]) -> bytes:
        """An event, as Codex ends a stream after 300 s that has comments only."""
        begun = _begun(request_id, model, body)
        return event_bytes(
            {"type": "response.in_progress", "response": begun, "sequence_number": 1}
        )

    def events(self, response: Json, body: Mapping[str, object]) -> list[bytes]:
        """Return the response as events, from created to completed."""
        return response_events(response)

    def error_event(self, error: Json) -> bytes:
        """The event of an error in a stream, with the object that OpenAI's clients raise."""
        inner = error["error"]
        details = {name: inner.get(name) for name in ("code", "message", "param")}
        return event_bytes({"type": "error", **details, "error": inner, "sequence_number": 0})


RESPONSES = Responses()

_ECHOED: Json = {
    "background": False, "instructions": None, "max_output_tokens": None, "max_tool_calls": None, "metadata": {},
    "parallel_tool_calls": True, "previous_response_id": None, "prompt_cache_key": None, "reasoning": None,
    "safety_identifier": None, "service_tier": "default", "store": True, "temperature": 1.0,
    "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_logprobs": 0, "top_p": 1.0,
    "truncation": "disabled", "user": None,
}  # fmt: skip
"""Fields that a response repeats from its request, with their defaults."""


def _begun(request_id: str, model: str, body: Mapping[str, object]) -> Json:
    """A response that has no output yet."""
    return {
        "id": f"resp_{request_id}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": [],
        "usage": None,
        **{name: body.get(name, default) for name, default in _ECHOED.items()},
    }


def _list(body: Mapping[str, object], name: str) -> list[object]:
    value = body.get(name) or []
    if not isinstance(value, list):
        raise RequestRefused(f"{name} must be a list (got {str(value)[:100]})", name)
    return value


def _object(body: Mapping[str, object], name: str) -> JsonView:
    value = body.get(name) or {}
    if not isinstance(value, Mapping):
        raise RequestRefused(f"{name} must be an object (got {str(value)[:100]})", name)
    return value


# The conversation


def _messages(body: Mapping[str, object], stored: Mapping[str, Json]) -> list[Json]:
    request_input = body.get("input")
    before = body.get("previous_response_id")
    if request_input is None or (request_input == [] and before is None):
        raise RequestRefused("responses needs input", "input")
    if before is not None and (not isinstance(before, str) or before not in stored):
        raise RequestRefused(
            f"Previous response with id {str(before)!r} not found.",
            "previous_response_id",
            code="previous_response_not_found",
        )
    earlier = [] if before is None else stored[before]["messages"]
    items = (
        [{"role": "user", "content": request_input}]
        if isinstance(request_input, str)
        else _list(body, "input")
    )
    messages = [*earlier, *ItemReader(stored).messages(items)]
    instructions = body.get("instructions")
    if not instructions:
        return messages
    if not isinstance(instructions, str):
        raise RequestRefused("instructions must be a string", "instructions")
    if messages and messages[0]["role"] == "system" and isinstance(messages[0]["content"], str):
        # Many templates accept only one system message, the first.
        return [
            {"role": "system", "content": f"{instructions}\n\n{messages[0]['content']}"},
            *messages[1:],
        ]
    return [{"role": "system", "content": instructions}, *messages]


def _without(instructions: str | None, messages: list[Json]) -> list[Json]:
    """The messages without the instructions, which apply to one response only."""
    if not instructions:
        return messages
    remaining = messages[0]["content"][len(instructions) + 2 :]
    if remaining:
        return [{"role": "system", "content": remaining}, *messages[1:]]
    return messages[1:]


# Tools and formats


def _tools(tool: object, where: str) -> Iterator[Json]:
    """A tool, or the tools of a namespace."""
    if not isinstance(tool, Mapping) or tool.get("type") != "namespace":
        yield _tool(tool, where)
        return
    for i, inner in enumerate(_list(tool, "tools")):
        function = _tool(inner, f"{where}.tools[{i}]")
        function["function"]["name"] = qualified(tool.get("name"), function["function"].get("name"))
        yield function


def _tool(tool: object, where: str) -> Json:
    tool = tool if isinstance(tool, Mapping) else {}
    kind = tool.get("type")
    if kind == "function":
        function = {
            name: tool[name]
            for name in ("name", "description", "parameters")
            if tool.get(name) is not None
        }
        return {
            "type": "function",
            "function": {**function, **({"strict": True} if tool.get("strict") else {})},
        }
    if kind == "custom":
        form = tool.get("format") or {"type": "text"}
        if form.get("type") != "text":
            raise RequestRefused(
                f"{where}.format is a {form.get('type')}; only text is supported", "tools"
            )
        if tool.get("description"):
            described = {"description": tool["description"]}
        else:
            described = {}
        return {
            "type": "function",
            "function": {"name": tool.get("name"), **described, "parameters": CUSTOM},
        }
    raise RequestRefused(
        f"{where} is of type {kind!r}, which runs on OpenAI's servers; leave it out, or give the"
        " policy a function tool instead",
        "tools",
    )


CUSTOM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""The schema of a custom tool, whose text is the only argument."""


def _tool_choice(choice: object) -> object:
    if isinstance(choice, str):
        return choice
    choice = choice if isinstance(choice, Mapping) else {}
    kind = choice.get("type")
    if kind in ("function", "custom"):
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind == "allowed_tools":
        allowed = {
            "mode": choice.get("mode", "auto"),
            "tools": [_tool_choice(tool) for tool in choice.get("tools", ())],
        }
        return {"type": "allowed_tools", "allowed_tools": allowed}
    raise RequestRefused(
        f"tool_choice names a tool of type {kind!r}, which is not supported; name a function",
        "tool_choice",
    )


def _response_format(form: object) -> Json:
    form = form if isinstance(form, Mapping) else {}
    kind = form.get("type")
    if kind == "json_schema":
        return {
            "type": kind,
            "json_schema": {name: value for name, value in form.items() if name != "type"},
        }
    if kind in ("text", "json_object"):
        return {"type": kind}
    raise RequestRefused(
        f"text.format must be of type text, json_object or json_schema (got {kind!r})", "text"
    )


def _usage(usage: Json) -> Json:
    return {
        "input_tokens": usage.get("prompt_tokens", 0),
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage.get("completion_tokens", 0),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.get("total_tokens", 0),
    }


# Events

Event = Json


def response_events(response: Json) -> list[bytes]:
    """The events from `response.created` to `response.completed` (or `incomplete`), with sequence
    numbers."""
    begun = {**response, "status": "in_progress", "output": [], "usage": None, "completed_at": None}
    begun["incomplete_details"] = None
    events: list[Event] = [
        {"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")
    ]
    for index, item in enumerate(response["output"]):
        at = {"output_index": index}
        begun = {
            **item,
            **{key: v for key, v in _EMPTY[item["type"]].items() if key in item},
            "status": "in_progress",
        }
        events.append({"type": "response.output_item.added", **at, "item": begun})
        events += [{**event, **at, "item_id": item["id"]} for event in _SPELT[item["type"]](item)]
        events.append({"type": "response.output_item.done", **at, "item": item})
    events.append({"type": f"response.{response['status']}", "response": response})
    numbers = itertools.count()
    return [event_bytes({**event, "sequence_number": next(numbers)}) for event in events]


def _deltas(kind: str, text: str, done: str, **common: object) -> Iterator[Event]:
    """The text in pieces, or whole with log-probabilities, then the whole text under the key
    `done`."""
    for delta in [text] if common.get("logprobs") else pieces(text):
        yield {"type": f"{kind}.delta", **common, "delta": delta}
    yield {"type": f"{kind}.done", **common, done: text}


def _parts(parts: Iterable[Json], name: str, kind: str, place: str) -> Iterator[Event]:
    """The events of the parts of an item: added, deltas, done."""
    for index, part in enumerate(parts):
        at = {place: index}
        logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        yield {
            "type": f"response.{name}.added",
            **at,
            "part": {**part, "text": "", **{key: [] for key in logprobs}},
        }
        yield from _deltas(f"response.{kind}", part["text"], "text", **at, **logprobs)
        yield {"type": f"response.{name}.done", **at, "part": part}


def _message(item: Json) -> Iterator[Event]:
    return _parts(item["content"], "content_part", "output_text", "content_index")


def _reasoning(item: Json) -> Iterator[Event]:
    yield from _parts(
        item["summary"], "reasoning_summary_part", "reasoning_summary_text", "summary_index"
    )
    yield from _parts(item.get("content", ()), "content_part", "reasoning_text", "content_index")


def _function_call(item: Json) -> Iterator[Event]:
    *deltas, done = _deltas("response.function_call_arguments", item["arguments"], "arguments")
    yield from deltas
    yield {**done, "name": item["name"]}


_SPELT: dict[str, Callable[[Json], Iterator[Event]]] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _function_call,
    "custom_tool_call": lambda item: _deltas(
        "response.custom_tool_call_input", item["input"], "input"
    ),
}
_EMPTY: dict[str, Json] = {
    "message": {"content": []},
    "reasoning": {"summary": [], "content": [], "encrypted_content": None},
    "function_call": {"arguments": ""},
    "custom_tool_call": {"input": ""},
}
"""Fields that are empty in the first event of an item, by type."""
