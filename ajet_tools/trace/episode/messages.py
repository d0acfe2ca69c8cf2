"""The conversation along some calls: each message once, in the order in which it was first said.

Chat, text completions, Anthropic's messages and OpenAI's responses come to one form. What has no form that is known
here is shown as its JSON, so that nothing a model or a client wrote is left out.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import is_

from ajet_sdk.types import Call
from ajet_tools.text.clean import reply_of

CUT = 12_000
"""Characters of a message that are shown before it is opened whole."""
_PRETTY = 1_000_000
"""Characters of JSON that are parsed to be laid out anew."""
_ONE_LINE = 64


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool that a model asked for; `arguments` laid out to be read."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """One message, read from any dialect."""

    key: str
    """Stays the same while the episode grows."""
    call_id: str
    """The call whose request it first stands in, or whose reply it is."""
    is_reply: bool
    role: str
    name: str
    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    answers: str
    """For the result of a tool: the tool's name, or the id that was asked for where no name is known."""
    note: str
    """Said before the message, where the history it stands in is not what was said before."""
    raw: object
    """As it was sent."""

    @property
    def text(self) -> str:
        """All that the message says, reasoning first."""
        calls = (f"{call.name}({call.arguments})" for call in self.tool_calls)
        return "\n".join(part for part in (self.reasoning, self.content, *calls) if part)


def conversation(chain: Sequence[Call]) -> tuple[Message, ...]:
    """The messages along calls that go on from each other, oldest first.

    Of each request only the messages that were not said before it are new; where a request leaves out or changes what
    was said, the first new message (or the reply) carries a note.
    """
    messages: list[Message] = []
    marks: list[int] = []
    names: dict[str, str] = {}
    known: list[int] = []
    before: list[object] = []
    fingerprints = Fingerprints()
    for call in chain:
        raws = request_messages(call)
        same = len(before) if len(before) <= len(raws) and all(map(is_, before, raws)) else 0
        rest = known[same:]  # what was asked before stands first in `known`: the very same messages are there
        view, fresh = _place(
            [marks[i] for i in rest], rest, [fingerprints.of(raw) for raw in raws[same:]], len(messages)
        )
        view, fresh = [*known[:same], *view], [(same + n, place) for n, place in fresh]
        if call.request.get("previous_response_id"):  # what was said before is known to the server and not sent again
            view = list(dict.fromkeys([*known, *view]))
        note = _note(known, view) if known else ""
        for n, _ in fresh:
            messages.append(_read(raws[n], f"{call.call_id}/{n}", call.call_id, False, "", names, note))
            marks.append(fingerprints.of(raws[n]))
            note = ""
        for n, raw in enumerate(reply_messages(call)):
            view.append(len(messages))
            messages.append(_read(raw, f"{call.call_id}/reply{n}", call.call_id, True, call.agent, names, note))
            marks.append(fingerprints.of(raw))
            note = ""
        known, before = view, [] if call.request.get("previous_response_id") else raws
    return tuple(messages)


class Fingerprints:
    """Fingerprints, each worked out once: requests of one episode share their messages."""

    def __init__(self) -> None:
        self._by_object: dict[int, tuple[object, int]] = {}

    def of(self, raw: object) -> int:
        entry = self._by_object.get(id(raw))
        if entry is None:
            entry = self._by_object[id(raw)] = (raw, hash(fingerprint(raw)))
        return entry[1]


def _place(
    marks: Sequence[int], known: Sequence[int], request_marks: Sequence[int], size: int
) -> tuple[list[int], list[tuple[int, int]]]:
    """Where each message of a request stands: among the known ones, in their order, else new at the end.

    Returns the positions, and of the new ones (their number in the request, their position).
    """
    places: dict[int, list[int]] = {}
    for n, mark in enumerate(marks):
        places.setdefault(mark, []).append(n)
    view, fresh, last = list[int](), list[tuple[int, int]](), -1
    for n, mark in enumerate(request_marks):
        later = next((place for place in places.get(mark, ()) if place > last), None)
        if later is not None:
            last = later
            view.append(known[later])
        else:
            view.append(size + len(fresh))
            fresh.append((n, view[-1]))
    return view, fresh


def _note(known: Sequence[int], view: Sequence[int]) -> str:
    """What became of the history, where it is not as it was said."""
    missing = len(set(known).difference(view))
    if missing:
        return f"from here on, {missing} earlier {'message is' if missing == 1 else 'messages are'} missing or changed"
    moved = any(before > after for before, after in pairwise(view))
    return "inserted before messages that had already been sent" if moved else ""


def request_messages(call: Call) -> list[object]:
    """The messages of a call's request as they were sent, whatever its dialect."""
    request = call.request
    if "messages" in request:
        messages, system = request["messages"], request.get("system")
    elif "input" in request:
        messages, system = request["input"], request.get("instructions")
    else:
        messages, system = request.get("prompt"), None
    before: list[object] = [] if system in (None, "", []) else [{"role": "system", "content": system}]
    if messages is None:
        return before
    if "prompt" in request and isinstance(messages, list) and all(isinstance(part, int) for part in messages):
        return [*before, {"role": "user", "content": f"[{len(messages):,} token ids]"}]
    listed = messages if isinstance(messages, list) else [messages]
    return [*before, *({"role": "user", "content": part} if isinstance(part, str) else part for part in listed)]


def reply_messages(call: Call) -> list[object]:
    """The messages of a call's reply: one, or the items of OpenAI's responses; none where nothing came."""
    reply = reply_of(call.response)
    content = reply.get("content")
    if "choices" not in call.response and "content" not in call.response and isinstance(content, list):
        return list(content)
    empty = not call.response or (call.error is not None and not any(v for k, v in reply.items() if k != "role"))
    return [] if empty else [reply]


def gist(call: Call) -> str:
    """How a call's reply begins: the tools that it asks for, else its text."""
    for raw in reply_messages(call):
        message = _Content.of(raw) if isinstance(raw, Mapping) else _Content(content=pretty(raw))
        tools = ", ".join(tool.name for tool in message.tool_calls)
        if tools or message.content:
            return f"→ {tools}" if tools else message.content[:200]
    return ""


def fingerprint(raw: object) -> Hashable:
    """Equal for messages that say the same: content as parts or a string, arguments as a string or an object.

    Reasoning is left out, for many clients send a reply back without it.
    """
    if not isinstance(raw, Mapping):
        return raw if isinstance(raw, str) else json.dumps(raw, sort_keys=True, default=str)
    parsed = _Content.of(raw)
    return parsed.role, parsed.content, tuple((call.name, call.arguments) for call in parsed.tool_calls), parsed.answers


@dataclass(slots=True)
class _Content:
    """A message taken apart."""

    role: str = ""
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    answers: str = ""

    @classmethod
    def of(cls, raw: Mapping[str, object]) -> _Content:
        role = raw.get("role")
        if not isinstance(role, str):
            return cls._item(raw)
        parsed, texts, calls = cls(role=role), list[str](), list[ToolCall]()
        parsed.reasoning = next((text for k in _REASONING if isinstance(text := raw.get(k), str)), "")
        for part in _parts(raw.get("content")):
            parsed._add(part, texts, calls)
        if isinstance(raw.get("refusal"), str) and raw["refusal"]:
            texts.append(f"[refusal] {raw['refusal']}")
        listed = raw.get("tool_calls")
        for call in listed if isinstance(listed, list) else [] if listed is None else [listed]:
            calls.append(_read_tool_call(call))
        if isinstance(raw.get("function_call"), Mapping):
            calls.append(_read_tool_call({"function": raw["function_call"]}))
        parsed.content, parsed.tool_calls = "\n".join(text for text in texts if text), tuple(calls)
        answers = raw.get("tool_call_id")
        parsed.answers = parsed.answers or (answers if isinstance(answers, str) else "")
        return parsed

    @classmethod
    def _item(cls, raw: Mapping[str, object]) -> _Content:
        """An item of OpenAI's responses that is no message."""
        kind = raw.get("type")
        if kind == "function_call":
            call = ToolCall(_word(raw.get("call_id")), _word(raw.get("name")), _arguments(raw.get("arguments")))
            return cls(role="assistant", tool_calls=(call,))
        if kind == "function_call_output":
            return cls(role="tool", content=_joined(raw.get("output")), answers=_word(raw.get("call_id")))
        if kind == "reasoning":
            thought = _joined(raw.get("content")) or _joined(raw.get("summary"))
            return cls(role="assistant", reasoning=thought or "[not shown by the provider]")
        return cls(role="?", content=pretty(raw))

    def _add(self, part: object, texts: list[str], calls: list[ToolCall]) -> None:
        """One part of a content."""
        if not isinstance(part, Mapping):
            texts.append(_part(part))
        elif (kind := part.get("type")) == "tool_use":
            calls.append(ToolCall(_word(part.get("id")), _word(part.get("name")), _arguments(part.get("input"))))
        elif kind == "tool_result":
            self.answers = self.answers or _word(part.get("tool_use_id"))
            self.role = "tool" if self.role == "user" else self.role
            texts.append(_joined(part.get("content")))
        elif kind == "thinking" and isinstance(part.get("thinking"), str):
            self.reasoning = "\n".join(text for text in (self.reasoning, part["thinking"]) if text)
        else:
            texts.append(_part(part))


_REASONING = ("reasoning_content", "reasoning", "thinking")
_MEDIA = ("image", "audio", "video", "file", "document")


def _read(raw: object, key: str, call_id: str, is_reply: bool, agent: str, names: dict[str, str], note: str) -> Message:
    """A message as it is shown; `names` are the tools asked for so far, by id."""
    message = _Content.of(raw) if isinstance(raw, Mapping) else _Content(role="?", content=pretty(raw))
    name = raw.get("name") if isinstance(raw, Mapping) and "role" in raw else None
    names.update((call.id, call.name) for call in message.tool_calls if call.id)
    return Message(
        key=key,
        call_id=call_id,
        is_reply=is_reply,
        role=message.role,
        name=name if isinstance(name, str) else agent,
        content=_result(message.content) if message.role == "tool" else message.content,
        reasoning=message.reasoning,
        tool_calls=message.tool_calls,
        answers=names.get(message.answers, message.answers),
        note=note,
        raw=raw,
    )


def _parts(content: object) -> Iterable[object]:
    if content is None:
        return ()
    return content if isinstance(content, list) else (content,)


def _joined(content: object) -> str:
    return "\n".join(_part(part) for part in _parts(content))


def _part(part: object) -> str:
    """One part of a content as text; what is no text as a word."""
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        if isinstance(part.get("text"), str):
            text: str = part["text"]
            return text
        kind = str(part.get("type", ""))
        medium = next((medium for medium in _MEDIA if medium in kind), None)
        if medium:
            return f"[{medium}{_source(part)}]"
    return pretty(part)


def _source(part: Mapping[str, object]) -> str:
    """Where an image comes from, or how large it is; never its bytes."""
    for value in _strings(part):
        if value.startswith("data:"):
            return f", {value[5:60].partition(';')[0]}, {_bytes(len(value) * 3 // 4)}"
        if value.startswith(("http://", "https://", "file:")):
            return f", {value[:120]}"
    largest = max((len(value) for value in _strings(part)), default=0)
    return f", {_bytes(largest * 3 // 4)}" if largest > 200 else ""


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _strings(inner)


def _bytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{max(1, size // 1000)} kB"


def _read_tool_call(call: object) -> ToolCall:
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return ToolCall("", "?", pretty(call))
    return ToolCall(_word(call.get("id")), _word(function.get("name")), _arguments(function.get("arguments")))


def _word(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)


def _arguments(value: object) -> str:
    """A tool call's arguments laid out; what is no JSON stays as it was written."""
    if isinstance(value, str):
        return _lay_out(value)
    return "" if value is None else pretty(value)


def _result(text: str) -> str:
    """A tool's result: laid out where it is a JSON object or list."""
    return _lay_out(text) if text.lstrip()[:1] in ("{", "[") else text


def _lay_out(text: str) -> str:
    if len(text) > _PRETTY:
        return text
    try:
        return pretty(json.loads(text))
    except (ValueError, RecursionError):
        return text


def pretty(value: object) -> str:
    """A value as JSON to be read: on one line where it is short."""
    try:
        short = json.dumps(value, ensure_ascii=False, default=str)
        return short if len(short) <= _ONE_LINE else json.dumps(value, ensure_ascii=False, default=str, indent=2)
    except RecursionError:
        return "[nested too deeply to show]"


def cut(text: str, most: int = CUT) -> tuple[str, int]:
    """The beginning of a long text, `most` characters and a line for 30, and how many characters are left out."""
    head = "\n".join(text[:most].split("\n")[: most // 30])
    return head, len(text) - len(head)
