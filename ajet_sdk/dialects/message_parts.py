"""Splits messages of any dialect into parts and converts them to text: completions, Anthropic's
Messages, Responses.

Unknown forms are shown as JSON, so that nothing is left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ajet_sdk.errors import PictureError
from ajet_sdk.pictures import Picture, is_data_url, line_at, mapped, picture_at

_PRETTY = 1_000_000
"""Maximum characters of JSON to format."""
_ONE_LINE = 64
_STORED = "ajet-picture:"
"""Beginning of a reference to a picture in rows of a trace."""
_LINK = 120
"""Maximum characters of a link to show."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of a model."""

    id: str
    name: str
    written: str
    """The arguments as sent."""

    @property
    def arguments(self) -> str:
        """The formatted arguments; unchanged if they are not JSON."""
        return lay_out(self.written)


@dataclass(frozen=True, slots=True)
class MessageParts:
    """The parts of a message."""

    role: str
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    answers: str = ""
    """The id of the call, for the result of a tool."""

    @property
    def text(self) -> str:
        """The whole message: reasoning, content, and tool calls with the arguments as sent."""
        reasoning = f"(reasoning) {self.reasoning}" if self.reasoning else ""
        calls = (f"→ {call.name}({call.written})" for call in self.tool_calls)
        return "\n".join(part for part in (reasoning, self.content, *calls) if part)


def parts_of(raw: object) -> MessageParts:
    """Split a message of any dialect, or an item of OpenAI's Responses, into its parts."""
    if not isinstance(raw, Mapping):
        return MessageParts("?", pretty(raw))
    role = raw.get("role", "?" if "content" in raw and "type" not in raw else None)
    if not isinstance(role, str):
        return _item(raw)
    answers = _word(raw.get("tool_call_id"))
    texts = list[str]()
    calls = list[ToolCall]()
    reasoning = [next((text for key in _REASONING if isinstance(text := raw.get(key), str)), "")]
    for part in _listed(raw.get("content")):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping):
            texts.append(_part(part))
        elif kind == "tool_use":
            calls.append(
                ToolCall(_word(part.get("id")), _word(part.get("name")), _word(part.get("input")))
            )
        elif kind == "tool_result":
            answers = answers or _word(part.get("tool_use_id"))
            role = "tool" if role == "user" else role
            texts.append(_joined(part.get("content")))
        elif kind == "thinking" and isinstance(part.get("thinking"), str):
            reasoning.append(part["thinking"])
        else:
            texts.append(_part(part))
    if isinstance(raw.get("refusal"), str) and raw["refusal"]:
        texts.append(f"[refusal] {raw['refusal']}")
    calls += map(_tool_call, _listed(raw.get("tool_calls")))
    if isinstance(raw.get("function_call"), Mapping):
        calls.append(_tool_call({"function": raw["function_call"]}))
    return MessageParts(role, _lines(texts), _lines(reasoning), tuple(calls), answers)


def _item(raw: Mapping[str, object]) -> MessageParts:
    """Split an item of OpenAI's Responses other than a message."""
    kind = raw.get("type")
    if kind == "function_call":
        call = ToolCall(
            _word(raw.get("call_id")), _word(raw.get("name")), _word(raw.get("arguments"))
        )
        return MessageParts("assistant", tool_calls=(call,))
    if kind == "function_call_output":
        return MessageParts("tool", _joined(raw.get("output")), answers=_word(raw.get("call_id")))
    if kind == "reasoning":
        thought = _joined(raw.get("content")) or _joined(raw.get("summary"))
        return MessageParts("assistant", reasoning=thought or "[not shown by the provider]")
    return MessageParts("?", pretty(raw))


_REASONING = ("reasoning_content", "reasoning", "thinking")
_MEDIA = ("image", "audio", "video", "file", "document")


def request_messages(request: Mapping[str, object]) -> list[object]:
    """Return the messages of a request of any dialect, as sent."""
    if "messages" in request:
        messages = request["messages"]
        system = request.get("system")
    elif "input" in request:
        messages = request["input"]
        system = request.get("instructions")
    else:
        messages = request.get("prompt")
        system = None
    before: list[object] = (
        [] if system in (None, "", []) else [{"role": "system", "content": system}]
    )
    if messages is None:
        return before
    if (
        "prompt" in request
        and isinstance(messages, list)
        and all(isinstance(part, int) for part in messages)
    ):
        return [*before, {"role": "user", "content": f"[{len(messages):,} token ids]"}]
    listed = messages if isinstance(messages, list) else [messages]
    return [
        *before,
        *({"role": "user", "content": part} if isinstance(part, str) else part for part in listed),
    ]


def reply_messages(response: Mapping[str, object], *, failed: bool = False) -> list[object]:
    """Return the messages of a reply: one, or the items of OpenAI's Responses; none without a
    reply.

    `failed`: the call ended with an error, so that an empty reply counts as none.
    """
    reply = reply_of(response)
    content = reply.get("content")
    if "choices" not in response and "content" not in response and isinstance(content, list):
        return list(content)
    empty = not response or (failed and not any(v for k, v in reply.items() if k != "role"))
    return [] if empty else [reply]


def _listed(content: object) -> Iterable[object]:
    if content is None:
        return ()
    return content if isinstance(content, list) else (content,)


def _lines(texts: Iterable[str]) -> str:
    return "\n".join(text for text in texts if text)


def _joined(content: object) -> str:
    return _lines(map(_part, _listed(content)))


def _part(part: object) -> str:
    """A part of a content as text; media as a placeholder."""
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        if isinstance(part.get("text"), str):
            return str(part["text"])
        kind = str(part.get("type", ""))
        medium = next((medium for medium in _MEDIA if medium in kind), None)
        url = picture_url(part)
        if url is not None:
            try:
                return f"[{line_at(url)}]"
            except PictureError:  # shown as it was sent, by its size
                medium = "image"
        if medium:
            return f"[{medium}{_source(part)}]"
    return pretty(part)


PICTURE_KEYS = ("data", "image_url", "inlineData", "inline_data", "source")
"""Keys of a part that may have the data of its picture."""


def picture_url(part: object) -> str | None:
    """The data URL of a part that is a picture, in the forms of chat completions, Responses,
    Messages, Gemini and MCP; None for any other part."""
    if not isinstance(part, Mapping):
        return None
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, Mapping) else image
    if isinstance(url, str):
        return url if is_data_url(url) else None
    inline = part.get("inlineData", part.get("inline_data", part.get("source", part)))
    if not isinstance(inline, Mapping) or not isinstance(inline.get("data"), str):
        return None
    media_type = inline.get("mimeType", inline.get("mime_type", inline.get("media_type")))
    if not isinstance(media_type, str) or not media_type.startswith("image/"):
        return None
    return f"data:{media_type};base64,{inline['data']}"


def pictures_in(raw: object) -> list[Picture]:
    """The pictures of a message or a part of it, in order; without those that cannot be decoded."""
    if isinstance(raw, list):
        return [picture for item in raw for picture in pictures_in(item)]
    if not isinstance(raw, Mapping):
        return []
    url = picture_url(raw)
    if url is not None:
        try:
            return [picture_at(url)]
        except PictureError:
            return []
    nested = (raw.get(name) for name in ("content", "output", "parts", "images"))
    return [picture for content in nested for picture in pictures_in(content)]


def _source(part: Mapping[str, object]) -> str:
    """The source of an image: its link, or its size with a digest to distinguish images."""
    texts = list(_strings(part))
    stored = next((text for text in texts if text.startswith(_STORED)), None)
    if stored is not None:
        return f" {stored.removeprefix(_STORED)[:6]}"
    data = next((text for text in texts if text.startswith("data:")), None)
    if data is not None:
        return f", {data[5:60].partition(';')[0]}, {_bytes(data)}"
    link = next((text for text in texts if text.startswith(("http://", "https://", "file:"))), None)
    if link is not None:
        return f", {link if len(link) <= _LINK else f'{link[:_LINK]}… {_digest(link)}'}"
    largest = max(texts, key=len, default="")
    return f", {_bytes(largest)}" if len(largest) > 200 else ""


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _strings(inner)


def _bytes(base64: str) -> str:
    size = len(base64) * 3 // 4
    return (
        f"{f'{size / 1e6:.1f} MB' if size >= 1e6 else f'{max(1, size // 1000)} kB'},"
        f" {_digest(base64)}"
    )


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=3).hexdigest()


def _tool_call(call: object) -> ToolCall:
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return ToolCall("", "?", pretty(call))
    return ToolCall(
        _word(call.get("id")), _word(function.get("name")), _word(function.get("arguments"))
    )


def _word(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else _json(value)


def lay_out(text: str) -> str:
    """Format JSON text; return other text unchanged."""
    if len(text) > _PRETTY:
        return text
    try:
        return pretty(json.loads(text))
    except (ValueError, RecursionError):
        return text


def pretty(value: object) -> str:
    """Format a value as JSON, on one line if it is short; pictures in it as a line of text."""
    short = _json(value)
    if "data:image/" in short:
        value = without_pictures(value)
        short = _json(value)
    return short if len(short) <= _ONE_LINE else _json(value, indent=2)


def without_pictures(value: object) -> object:
    """JSON with a line of text in place of each picture."""
    return mapped(value, _line)


def _line(text: str) -> str:
    if not is_data_url(text):
        return text
    try:
        return f"[{line_at(text)}]"
    except PictureError:
        return text


def _json(value: object, indent: int | None = None) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=str, indent=indent)
    except RecursionError:
        return "[nested too deeply to show]"


def content_text(content: object) -> str:
    """The complete content of a message as text: the text of each part, else its JSON."""
    return "\n".join(
        (
            part
            if isinstance(part, str)
            else (
                part["text"]
                if isinstance(part, Mapping) and isinstance(part.get("text"), str)
                else _json(part)
            )
        )
        for part in _listed(content)
    )


def reply_of(response: Mapping[str, object]) -> Mapping[str, object]:
    """The message in a response of any dialect."""
    choices = response.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
        first = choices[0]
    else:
        first = {}
    if isinstance(first.get("message"), Mapping):
        return {"role": "assistant", **first["message"]}
    if isinstance(first.get("text"), str):
        return {"role": "assistant", "content": first["text"]}
    if "content" in response:
        return {"role": "assistant", "content": response["content"]}
    if "output" in response:
        return {"role": "assistant", "content": response["output"]}
    return {"role": "assistant", "content": dict(response) if response else None}
