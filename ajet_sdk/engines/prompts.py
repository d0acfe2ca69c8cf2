"""Messages and tools to token ids, reusing the exact ids of earlier calls of the episode.

A chat template renders a conversation anew at every call, and the same text can be tokenised in more than one way, so
ids that were sampled must be kept and never made again from text. For a call c let F(c) be the template's text of its
prompt and out(c) the ids that were sampled for it. Then:

1. ids(c) = ids(p) + out(p) + new(c) where c goes on from an earlier call p, else ids(c) = new(c) = encode(F(c)).
2. c goes on from p only if F(c) starts with F(p) and continues with p's reply as decode(out(p)) spells it, up to
   blanks, JSON escapes and the spelling of numbers; new(c) encodes the rest of F(c). So a sampled end of turn is never
   doubled and one that was not sampled (a truncated reply) is never lost. Which p are tried is decided by what messages
   mean (`template.meaning`); an earlier tool call is rendered as p had it, everything else as the client sent it.
3. Only the template makes text: no marker of any template is known here.

Every call renders the whole conversation (a later message may change how the template shows an earlier one), but each
token is encoded once and each text is compared once.
"""

from __future__ import annotations

import copy
import hashlib
import marshal
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, partial
from operator import itemgetter
from typing import Any

from ajet_sdk.protocols import Tokenizer
from ajet_sdk.samples.splits import Side, Texts, align, explain
from ajet_sdk.tokens.jinja import Shown
from ajet_sdk.tokens.pieces import CutPoints, PieceEncoder
from ajet_sdk.tokens.template import ChatTemplate, Message, clean, meaning


@dataclass(eq=False)
class Prompt:
    """The prompt of one call: give `ids` to the engine, then the prompt and what was sampled to `commit`."""

    ids: list[int]
    """The exact ids: those of the call it goes on from, its sampled ids, and the newly encoded rest."""
    reused: int
    """How many of the leading ids come from an earlier call."""
    cause: str | None
    """Why it does not go on from the deepest earlier call that its messages extend (a key of `splits.HINTS`)."""
    call: _Call = field(repr=False)

    @property
    def text(self) -> str:
        """The template's text of the whole prompt."""
        return self.call.text_of_prompt()


@dataclass(eq=False)
class _Call:
    side: Side
    formed: list[Message]
    """The messages as the template reads them, earlier tool calls in our own spelling."""
    keys: list[bytes]
    """keys[i] identifies what messages[: i + 1] say, whatever form the client gave them."""
    text: str | None
    """F(call); None once the text of a later call, `holder`, starts with it."""
    size: int
    holder: _Call | None = None
    parent: _Call | None = None
    new_ids: array[int] = field(default_factory=partial(array, "i"))
    output_ids: array[int] = field(default_factory=partial(array, "i"))
    decoded: str | None = None
    """`sampled`, until a later call goes on from this one: others will seldom ask."""
    formed_reply: Message | None = None
    decode: Callable[[Sequence[int]], str] = str
    begun: Message | None = None
    """The assistant message that the reply goes on with: the last of the request's, which `formed` and `keys` lack."""

    @property
    def sampled(self) -> str:
        return self.decode(list(self.output_ids)) if self.decoded is None else self.decoded

    def ids_of_prompt(self) -> array[int]:
        pieces, call = [self.new_ids], self.parent
        while call is not None:
            pieces += [call.output_ids, call.new_ids]
            call = call.parent
        ids = array("i")
        for piece in reversed(pieces):
            ids += piece
        return ids

    def text_of_prompt(self) -> str:
        at = self
        while at.text is None and at.holder is not None:
            at = at.holder
        return (at.text or "")[: self.size]


@dataclass(eq=False)
class _Request:
    """The messages of one request: as sent (a copy), cleaned, as the template reads them, and identified."""

    raw: list[object]
    cleaned: list[Message]
    formed: list[Message]
    keys: list[bytes]

    def until(self, n: int) -> _Request:
        return _Request(self.raw[:n], self.cleaned[:n], self.formed[:n], self.keys[:n])


class PromptBuilder:
    """The token ids of one episode's calls, of all its agents: `prompt` before the engine is asked, `commit` after.

    Calls may overlap in any order and come from any thread. A prompt that is never committed is never gone on from.
    The template is compiled once per tokenizer; the time that a template may ask for is fixed when the episode begins,
    so that it does not change under way. Episodes of one tokenizer may share its `cuts`.
    """

    def __init__(self, tokenizer: Tokenizer, cuts: CutPoints | None = None) -> None:
        self._tokenizer, self._cuts = tokenizer, cuts or CutPoints(tokenizer)
        self._encoder = PieceEncoder(tokenizer, self._cuts)
        self._at = datetime.now()
        self._lock = threading.Lock()
        self._answered: dict[bytes, list[_Call]] = {}
        """By messages and reply: the calls that a request beginning so may go on from."""
        self._seen: dict[bytes, _Call] = {}
        """By messages: the latest call whose messages, with its reply, begin so."""
        self._last: _Call | None = None
        self._recent: deque[_Request] = deque(maxlen=8)
        self._tools: list[Shown] = []
        self._spelling: bytes | None = None
        """The tools of the last request that had some, to the letter."""

    def prompt(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        *,
        continue_last: bool = False,
        **template_kwargs: Any,
    ) -> Prompt:
        """The ids of a request. With `continue_last` the reply goes on with the last message, which ends nothing.

        Raises ConfigError where the tokenizer has no chat template, RequestRefused where the template refuses the
        messages (roles out of order, say).
        """
        template = self._template
        with self._lock:
            request = self._form(template, messages)
            formed, keys = list(request.formed), request.keys
            candidates = self._candidates(request)
            if candidates:
                formed = _respell(formed, [*candidates[0].formed, candidates[0].formed_reply or {}])
            tools = self._known(tools)
            if continue_last:
                text = template.render_begun(formed, tools, at=self._at, **template_kwargs)
            else:
                text = template.render(formed, tools, at=self._at, **template_kwargs)
            side = Side(request.cleaned, tools, template_kwargs)
            call = _Call(side, formed, keys, text, len(text), decode=self._tokenizer.decode)
            cause = self._continue(call, text, candidates)
            if continue_last:
                call.formed, call.keys, call.begun = formed[:-1], keys[:-1], request.cleaned[-1]
            ids = call.ids_of_prompt().tolist()
            return Prompt(ids, len(ids) - len(call.new_ids), cause, call)

    def commit(
        self, prompt: Prompt, output_ids: Sequence[int], reply_message: Mapping[str, object], stop: Sequence[str] = ()
    ) -> None:
        """Note what was sampled after a prompt (until one of `stop`), and the message that the agent was given for it.

        A prompt of which several choices were sampled is committed once for each.
        """
        reply = clean(reply_message)
        with self._lock:
            call = prompt.call
            if call.begun is not None:
                reply = {**call.begun, **reply, "content": str(call.begun["content"]) + str(reply["content"])}
            if call.formed_reply is not None:
                call = copy.copy(call)
                call.text, call.holder, call.side = None, prompt.call, copy.copy(call.side)
            call.output_ids = output_ids if isinstance(output_ids, array) else array("i", output_ids)
            call.decoded = self._tokenizer.decode(list(call.output_ids))
            call.formed_reply = self._template.form_cleaned(reply)
            call.side.reply, call.side.stop = reply, stop
            key = _key(call.keys[-1] if call.keys else b"", reply)
            self._answered.setdefault(key, []).append(call)
            self._seen.update(dict.fromkeys([*call.keys, key], call))
            self._last = call

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate.of(self._tokenizer.chat_template, self._tokenizer.variables)

    def _known(self, tools: Sequence[Mapping[str, object]] | None) -> list[Shown] | None:
        """The tools, as of the last request where they are the same: a template's spelling of them is kept."""
        if tools is None:
            return None
        # Equal is not the same: Python's 1 is True, and its objects have no order.
        spelling = marshal.dumps([dict(tool) for tool in tools], 2)
        if spelling != self._spelling:
            self._spelling, self._tools = spelling, [Shown(_copy(tool)) for tool in tools]
        return self._tools

    def _form(self, template: ChatTemplate, messages: Sequence[Mapping[str, object]]) -> _Request:
        """Clean, form and identify the messages; an echo of a recent request is compared and not done again."""
        known = ((_common(messages, request.raw), request) for request in self._recent)
        echoed, recent = max(known, key=itemgetter(0), default=(0, None))
        if recent is None:
            request = _Request([], [], [], [])
        else:
            request = recent.until(echoed)
            if echoed == len(recent.raw):
                self._recent.remove(recent)
        for message in messages[echoed:]:
            request.raw.append(_copy(message))
            request.cleaned.append(clean(message))
            request.formed.append(template.form_cleaned(request.cleaned[-1]))
            request.keys.append(_key(request.keys[-1] if request.keys else b"", request.cleaned[-1]))
        self._recent.append(request)
        return request

    def _candidates(self, request: _Request) -> list[_Call]:
        """The calls that a request goes on from by what it says, the deepest first.

        Of replies that mean the same, those come first of which the client repeats the ids and the spelling.
        """
        candidates: list[_Call] = []
        for n in range(len(request.keys) - 1, -1, -1):
            calls = self._answered.get(request.keys[n], [])[::-1]
            if len(calls) > 1:
                spelt = [_spelling(m) for m in request.formed[: n + 1]]
                calls.sort(key=partial(_likeness, spelt), reverse=True)
            candidates += calls
        return candidates

    def _continue(self, call: _Call, text: str, candidates: list[_Call]) -> str | None:
        """Find the call that this one goes on from and encode the rest, else encode all; why it is not the deepest."""
        for parent in candidates:
            if not text.startswith(parent.text_of_prompt()):
                continue
            end = align(parent.sampled, text, parent.size)
            if end is None:
                continue
            call.parent, call.new_ids = parent, array("i", self._after(parent, text[end:]))
            parent.decoded = None
            if parent.text is not None:
                parent.text, parent.holder = None, call
            return None if parent is candidates[0] else self._cause(call, text, candidates)
        call.new_ids = array("i", self._encoder.encode(text))
        return self._cause(call, text, candidates)

    def _after(self, parent: _Call, tail: str) -> list[int]:
        """The ids of text that follows a call's sampled ids.

        Text is not tokenised at the start of a text as it is further on (SentencePiece puts a blank before it), and a
        special token may eat the blanks after it: so the tail is encoded behind what it follows, and what was
        encoded is checked to decode to the tail. Where no way decodes so (the tokenizer normalises), the first is it.
        """
        if not tail:
            return []
        before = list((parent.output_ids or parent.new_ids)[-4:])
        shown = self._tokenizer.decode(before)
        first: list[int] | None = None
        for way in self._ways(before, shown, tail):
            if self._tokenizer.decode([*before, *way]) == shown + tail:
                return way
            first = way if first is None else first
        return first or []

    def _ways(self, before: list[int], shown: str, tail: str) -> Iterator[list[int]]:
        special = bool(before) and self._tokenizer.is_special(before[-1])
        # Behind a special token that stands alone, text is not at the start of a text.
        for prefix in (self._tokenizer.decode(before[-1:]) if special else shown, self._cuts.anchor):
            way = self._encoder.behind(prefix, tail) if prefix else None
            if way is not None:
                yield way
        yield self._tokenizer.encode(tail)

    def _cause(self, call: _Call, text: str, candidates: list[_Call]) -> str | None:
        """Why a call does not go on from the deepest earlier call that its messages extend; None for a first call."""
        before = next((self._seen[k] for k in reversed(call.keys) if k in self._seen), self._last)
        old = candidates[0] if candidates else before
        if old is None:
            return None
        last = self._tokenizer.decode(list(old.output_ids[-1:]))
        texts = Texts(old.text_of_prompt() + old.sampled, text, old.size, last)
        return explain(old.side, call.side, texts, self._template)[0]


def _copy(value: object) -> Any:
    """A copy of JSON that shares texts, and nothing which may change."""
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _common(a: Sequence[object], b: Sequence[object]) -> int:
    if a[: len(b)] == b:
        return len(b)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _key(before: bytes, message: Message) -> bytes:
    return hashlib.blake2b(before + meaning(message).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _calls_of(message: Message) -> list[object]:
    calls: list[object] = message.get("tool_calls") or []
    return calls


def _id_of(call: object) -> str | None:
    """The id of a tool call; None where it has none."""
    call_id = call.get("id") if isinstance(call, Mapping) else None
    return call_id if isinstance(call_id, str) else None


def _spelling(message: Message) -> list[tuple[str | None, Any]]:
    """The ids of a message's tool calls, and how their arguments are written."""
    arguments = [call["function"]["arguments"] if isinstance(call, Mapping) else call for call in _calls_of(message)]
    written = [getattr(argument, "spelling", argument) for argument in arguments]
    return list(zip(map(_id_of, _calls_of(message)), written, strict=True))


def _likeness(spelt: Sequence[list[tuple[str | None, object]]], call: _Call) -> tuple[int, int]:
    """How many messages of an earlier call have the ids of these, and how many their spelling too."""
    spelt_before = [_spelling(message) for message in [*call.formed, call.formed_reply or {}]]
    ids = sum([i for i, _ in a] == [i for i, _ in b] for a, b in zip(spelt, spelt_before, strict=True))
    return ids, sum(a == b for a, b in zip(spelt, spelt_before, strict=True))


def _respell(messages: list[Message], earlier: Sequence[Message]) -> list[Message]:
    """The messages with the tool calls of the first ones as `earlier` has them, and results under the ids of these.

    Everything else stays as the client sent it, for the template to show or to ignore.
    """
    ids: dict[str | None, str | None] = {}
    for i, message in enumerate(messages):
        called = _calls_of(message)
        if called:
            ours = _calls_of(earlier[i]) if i < len(earlier) else called
            ids.update(zip(map(_id_of, called), map(_id_of, ours), strict=True))
            messages[i] = {**message, "tool_calls": ours}
        elif ids and isinstance(call_id := message.get("tool_call_id"), str) and ids.get(call_id, call_id) != call_id:
            messages[i] = {**message, "tool_call_id": ids[call_id]}
    return messages
