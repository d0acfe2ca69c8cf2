"""Converts messages and tools to token ids, reusing the exact ids of earlier calls of the episode.

A chat template renders the whole conversation for every call, and a text can be tokenized in more
than one way, so sampled ids must be reused and not encoded again. For a call c let F(c) be the
rendered text of its prompt and out(c) its sampled ids. Then:

1. ids(c) = ids(p) + out(p) + new(c) if c continues an earlier call p, else ids(c) = new(c) =
   encode(F(c)).
2. c continues p only if F(c) starts with F(p) and continues with decode(out(p)), up to blanks, JSON
   escapes and the notation of numbers; new(c) encodes the rest of F(c). So a sampled end of turn is
   never doubled, and one that was not sampled (a truncated reply) is never lost. Candidates for p
   are calls whose messages have the same meaning (`template.meaning`); an earlier tool call is
   rendered as in p, everything else as the client sent it.
3. Only the template makes text; this module knows no markers of templates.

Pictures are compared by their pixels, since all of one size have the same ids
(`engines.picture_text`).

A call renders what may differ from the last one's text (`tokens.rendering`: a later message may
change the rendering of an earlier one), each token is encoded once, and each text is compared once.
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
from itertools import chain
from typing import Any

import numpy as np

from ajet_sdk.engines.picture_text import PictureText
from ajet_sdk.pictures import PlacedPicture
from ajet_sdk.protocols import Tokenizer
from ajet_sdk.samples.prefixes import IdHash, common_start
from ajet_sdk.samples.splits import Side, Texts, align, explain
from ajet_sdk.tokens.jinja import Shown
from ajet_sdk.tokens.pieces import CutPoints, PieceEncoder
from ajet_sdk.tokens.rendering import Rendering, same_start
from ajet_sdk.tokens.template import ChatTemplate, Message, clean, meaning
from ajet_sdk.types import FixedMessages


@dataclass(eq=False)
class Prompt:
    """The prompt of a call. The engine samples after `ids`; the prompt and the sampled ids then go
    to `commit`."""

    ids: array[int]
    """The exact ids: those of the continued call, its sampled ids, and the newly encoded rest."""
    reused: int
    """Number of leading ids from an earlier call."""
    cause: str | None
    """Why it does not continue the deepest earlier call that its messages extend (a key of
    `splits.HINTS`)."""
    call: _Call = field(repr=False)
    text: str = field(repr=False)
    """The rendered text of the whole prompt."""

    @property
    def pictures(self) -> tuple[PlacedPicture, ...]:
        """The pictures in `ids`."""
        return self.call.pictures

    @property
    def digest(self) -> bytes:
        """A hash of `ids`."""
        return self.call.hashed.digest()


@dataclass(eq=False)
class _Call:
    side: Side
    raw: Sequence[object]
    """The messages of the request."""
    formed: list[Message]
    """The messages in the form for the template, with earlier tool calls as first rendered."""
    renamed: dict[object, object]
    """The ids in `formed` of tool calls that have others in `raw`."""
    keys: list[bytes]
    """keys[i] identifies the meaning of messages[: i + 1]."""
    text: str | None
    """F(call); None if the text of a later call, `holder`, starts with it."""
    size: int
    decode: Callable[[Sequence[int]], str]
    holder: _Call | None = None
    parent: _Call | None = None
    new_ids: array[int] = field(default_factory=partial(array, "i"))
    hashed: IdHash = field(default_factory=IdHash)
    """Hash of the ids of the prompt."""
    pictures: tuple[PlacedPicture, ...] = ()
    """Those of the whole prompt."""
    output_ids: array[int] = field(default_factory=partial(array, "i"))
    decoded: str | None = None
    """`sampled`; dropped once a later call continues this one, as it is rarely needed then."""
    formed_reply: Message | None = None
    begun: Message | None = None
    """The assistant message that the reply continues: the last message of the request, not in
    `formed` and `keys`."""

    @property
    def sampled(self) -> str:
        if self.decoded is None:
            return self.decode(list(self.output_ids))
        return self.decoded

    def ids_of_prompt(self) -> array[int]:
        pieces = [self.new_ids]
        call = self.parent
        while call is not None:
            pieces += [call.output_ids, call.new_ids]
            call = call.parent
        ids = array("i")
        ids.frombytes(b"".join(reversed(pieces)))  # one copy, whatever the number of turns
        return ids

    def text_of_prompt(self) -> str:
        at = self
        while at.text is None and at.holder is not None:
            at = at.holder
        return (at.text or "")[: self.size]


@dataclass(eq=False)
class _Request:
    """The messages of a request, which nobody changes, cleaned, in the form for the template, and
    their keys."""

    raw: list[object]
    cleaned: list[Message]
    formed: list[Message]
    keys: list[bytes]

    def until(self, n: int) -> _Request:
        return _Request(self.raw[:n], self.cleaned[:n], self.formed[:n], self.keys[:n])


class PromptBuilder:
    """Builds the token ids of an agent's calls in an episode: `prompt` before sampling, `commit`
    after it.

    Calls may overlap in any order and come from any thread. A prompt that is not committed cannot
    be continued. The template is compiled once per tokenizer; the current time for templates is
    fixed when the episode begins. Episodes with the same tokenizer may share its `cuts`.
    """

    def __init__(self, tokenizer: Tokenizer, cuts: CutPoints | None = None) -> None:
        self._tokenizer, self._cuts = tokenizer, cuts or CutPoints(tokenizer)
        self._encoder = PieceEncoder(tokenizer, self._cuts)
        if tokenizer.pictures is None:
            self._seeing = None
        else:
            self._seeing = PictureText(tokenizer.pictures)
        self._at = datetime.now()
        self._lock = threading.Lock()
        self._answered: dict[bytes, list[_Call]] = {}
        """Calls by the key of their messages with the reply, which a request may continue."""
        self._seen: dict[bytes, _Call] = {}
        """The latest call for each key of its messages, with and without its reply."""
        self._last: _Call | None = None
        self._recent: deque[_Request] = deque(maxlen=8)
        self._tools: list[Shown] = []
        self._rendering: Rendering | None = None
        """The last one, which the next may continue."""
        self._spelling: bytes | None = None
        """The exact encoding of the last request's tools."""

    def prompt(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        *,
        continue_last: bool = False,
        **template_kwargs: Any,
    ) -> Prompt:
        """Build the ids of a request. With `continue_last` the reply continues the last message.

        Raises ConfigError without a chat template, RequestRefused if the template refuses the
        messages (for example roles out of order) or shows other pictures than they have.
        """
        template = self._template
        with self._lock:
            request = self._form(template, messages)
            formed = list(request.formed)
            keys = request.keys
            renamed = dict[object, object]()
            candidates = self._candidates(request)
            deepest = next(candidates, None)
            if deepest is not None:
                renamed = _respell(formed, request.raw, deepest)
            tools = self._same_tools(tools)
            if continue_last:
                text = template.render_begun(formed, tools, at=self._at, **template_kwargs)
            else:
                self._rendering = template.rendering(
                    formed, tools, template_kwargs, at=self._at, last=self._rendering
                )
                text = self._rendering.text
            rendered = text
            if self._seeing is not None:
                text = self._seeing.written(text, self._seeing.pictures_of(request.cleaned))
            side = Side(request.cleaned, tools, template_kwargs)
            call = _Call(side, request.raw, formed, renamed, keys, text, len(text), self._decode)
            cause = self._continue(call, text, deepest, candidates)
            if continue_last:
                call.formed = formed[:-1]
                call.keys = keys[:-1]
                call.begun = request.cleaned[-1]
            ids = call.ids_of_prompt()
            return Prompt(ids, len(ids) - len(call.new_ids), cause, call, rendered)

    def commit(
        self,
        prompt: Prompt,
        output_ids: Sequence[int],
        reply_message: Mapping[str, object],
        stop: Sequence[str] = (),
    ) -> None:
        """Store the ids sampled after a prompt (until one of `stop`), and the message that the
        agent got for them.

        A prompt with several choices is committed once per choice.
        """
        reply = clean(reply_message)
        with self._lock:
            call = prompt.call
            if call.begun is not None:
                reply = {
                    **call.begun,
                    **reply,
                    "content": str(call.begun["content"]) + str(reply["content"]),
                }
            if call.formed_reply is not None:
                call = copy.copy(call)
                call.text, call.holder, call.side = None, prompt.call, copy.copy(call.side)
            if isinstance(output_ids, array):
                call.output_ids = output_ids
            else:
                call.output_ids = array("i", output_ids)
            call.decoded = self._decode(list(call.output_ids))
            call.formed_reply = self._template.form_cleaned(self._apart(reply))
            call.side.reply = reply
            call.side.stop = stop
            key = _key(call.keys[-1] if call.keys else b"", reply)
            self._answered.setdefault(key, []).append(call)
            self._seen.update(dict.fromkeys([*call.keys, key], call))
            self._last = call

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate.of(self._tokenizer.chat_template, self._tokenizer.variables)

    def _same_tools(self, tools: Sequence[Mapping[str, object]] | None) -> list[Shown] | None:
        """The tools; those of the last request if they are identical, with their cached
        rendering."""
        if tools is None:
            return None
        # Compared by encoding: in Python 1 equals True, and dictionaries compare without order.
        spelling = marshal.dumps([dict(tool) for tool in tools], 2)
        if spelling != self._spelling:
            self._spelling = spelling
            self._tools = [Shown(self._apart(_copy(tool))) for tool in tools]
        return self._tools

    def _form(self, template: ChatTemplate, messages: Sequence[Mapping[str, object]]) -> _Request:
        """Clean, form and identify the messages; those that repeat a recent request are reused."""
        echoed, recent = self._echoed(messages)
        if recent is None:
            request = _Request([], [], [], [])
        else:
            request = recent.until(echoed)
            if echoed == len(recent.raw):
                self._recent.remove(recent)
        for message in messages[echoed:]:
            cleaned = clean(message)
            if self._seeing is not None:
                cleaned = self._seeing.seen(cleaned)
            request.raw.append(message if isinstance(messages, FixedMessages) else _copy(message))
            request.cleaned.append(cleaned)
            request.formed.append(template.form_cleaned(self._apart(cleaned)))
            request.keys.append(_key(request.keys[-1] if request.keys else b"", cleaned))
        self._recent.append(request)
        return request

    def known(self, messages: Sequence[object]) -> int:
        """The number of leading messages that repeat a recent request's."""
        return self._echoed(messages)[0]

    def _echoed(self, messages: Sequence[object]) -> tuple[int, _Request | None]:
        """The recent request with most of the same leading messages, and their number."""
        most = 0
        best = None
        for request in tuple(self._recent):  # another thread may add one
            if isinstance(messages, FixedMessages):
                count = same_start(messages, request.raw)
            else:
                count = _equal_start(messages, request.raw)
            if count > most:
                most = count
                best = request
        return most, best

    def _apart(self, value: Any) -> Any:
        """A message or tool whose text can't be taken for a picture."""
        return value if self._seeing is None else self._seeing.apart(value)

    def _decode(self, ids: Sequence[int]) -> str:
        """The text of sampled ids, as it is in the text of a later prompt."""
        return str(self._apart(self._tokenizer.decode(ids)))

    def _candidates(self, request: _Request) -> Iterator[_Call]:
        """The calls that a request may continue by the meaning of its messages, the deepest first.

        Of replies with equal meaning, those whose ids and spelling the client repeats come first.
        """
        for n in range(len(request.keys) - 1, -1, -1):
            calls = self._answered.get(request.keys[n], [])[::-1]
            if len(calls) > 1:
                spelt = [_spelling(m) for m in request.formed[: n + 1]]
                calls.sort(key=partial(_likeness, spelt), reverse=True)
            yield from calls

    def _continue(
        self, call: _Call, text: str, deepest: _Call | None, others: Iterator[_Call]
    ) -> str | None:
        """Find the call to continue and encode the rest, else encode all; returns why it is not the
        deepest."""
        for parent in () if deepest is None else chain((deepest,), others):
            if not text.startswith(parent.text_of_prompt()):
                continue
            end = align(parent.sampled, text, parent.size)
            if end is None:
                continue
            call.parent = parent
            self._take_new_ids(call, text[end:])
            parent.decoded = None
            if parent.text is not None:
                parent.text = None
                parent.holder = call
            if parent is deepest:
                return None
            return self._cause(call, text, deepest)
        self._take_new_ids(call, text)
        return self._cause(call, text, deepest)

    def _take_new_ids(self, call: _Call, text: str) -> None:
        """Encode the text that follows the parent's sampled ids, or the whole text without a
        parent, and place its pictures."""
        parent = call.parent
        pieces = [text] if self._seeing is None else self._seeing.pieces(text)
        if parent is None:
            before = []
        else:
            before = list((parent.output_ids or parent.new_ids)[-4:])
        ids = array("i")
        for number, piece in enumerate(pieces):
            if parent is None and number == 0:
                ids.extend(self._encoder.encode(piece))
            else:
                ids.extend(self._after([*before, *ids][-4:], piece))
        call.new_ids = ids
        if parent is not None:
            call.hashed = parent.hashed.copy()
            call.hashed.update(parent.output_ids)
        call.hashed.update(ids)
        if self._seeing is None:
            return
        begin = 0
        if parent is not None:
            begin = len(parent.ids_of_prompt()) + len(parent.output_ids)
            call.pictures = parent.pictures
        if ids:
            new = np.frombuffer(ids, dtype=np.int32)
        else:
            new = np.empty(0, np.int32)
        call.pictures += self._seeing.place(new, text, begin)

    def _after(self, before: list[int], tail: str) -> list[int]:
        """The ids of text that follows other ids, of which `before` are the last.

        Tokenizers encode the start of a text differently (SentencePiece adds a blank), and a
        special token may absorb the blanks after it. So the tail is encoded after the preceding
        text in several ways, until one decodes to the tail. If none does (the tokenizer normalizes
        text), the first is used.
        """
        if not tail:
            return []
        shown = self._tokenizer.decode(before)
        first: list[int] | None = None
        for way in self._ways(before, shown, tail):
            if self._tokenizer.decode([*before, *way]) == shown + tail:
                return way
            first = way if first is None else first
        return first or []

    def _ways(self, before: list[int], shown: str, tail: str) -> Iterator[list[int]]:
        special = bool(before) and self._tokenizer.is_special(before[-1])
        # After a single special token, text is not at the start.
        for prefix in (
            self._tokenizer.decode(before[-1:]) if special else shown,
            self._cuts.anchor,
        ):
            way = self._encoder.behind(prefix, tail) if prefix else None
            if way is not None:
                yield way
        yield self._tokenizer.encode(tail)

    def _cause(self, call: _Call, text: str, deepest: _Call | None) -> str | None:
        """Why a call does not continue the deepest earlier call that its messages extend; None for
        a first call."""
        before = next((self._seen[k] for k in reversed(call.keys) if k in self._seen), self._last)
        old = deepest or before
        if old is None:
            return None
        last = self._tokenizer.decode(list(old.output_ids[-1:]))
        texts = Texts(old.text_of_prompt() + old.sampled, text, old.size, last)
        return explain(old.side, call.side, texts, self._template)[0]


def _equal_start(a: Sequence[object], b: Sequence[object]) -> int:
    """Number of leading messages with equal encodings: in Python 1 equals True, and dictionaries
    compare without order."""
    return common_start(list(map(_encoding, a)), list(map(_encoding, b)))


def _encoding(message: Any) -> object:
    """The bytes of a message; itself if it cannot be encoded."""
    try:
        return marshal.dumps(message, 2)
    except ValueError:  # nested too deeply
        return message


def _copy(value: object) -> Any:
    """Copy a JSON value."""
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value


def _key(before: bytes, message: Message) -> bytes:
    return hashlib.blake2b(
        before + meaning(message).encode("utf-8", "surrogatepass"), digest_size=16
    ).digest()


def _calls_of(message: Message) -> list[object]:
    calls: list[object] = message.get("tool_calls") or []
    return calls


def _id_of(call: object) -> str | None:
    """The id of a tool call, or None."""
    call_id = call.get("id") if isinstance(call, Mapping) else None
    return call_id if isinstance(call_id, str) else None


def _spelling(message: Message) -> list[tuple[str | None, Any]]:
    """The ids and the written arguments of a message's tool calls."""
    arguments = [
        call["function"]["arguments"] if isinstance(call, Mapping) else call
        for call in _calls_of(message)
    ]
    written = [getattr(argument, "spelling", argument) for argument in arguments]
    return list(zip(map(_id_of, _calls_of(message)), written, strict=True))


def _likeness(spelt: Sequence[list[tuple[str | None, object]]], call: _Call) -> tuple[int, int]:
    """Number of an earlier call's messages with the same ids, and with the same spelling, too."""
    spelt_before = [_spelling(message) for message in [*call.formed, call.formed_reply or {}]]
    ids = sum(
        [i for i, _ in a] == [i for i, _ in b] for a, b in zip(spelt, spelt_before, strict=True)
    )
    return ids, sum(a == b for a, b in zip(spelt, spelt_before, strict=True))


def _respell(
    messages: list[Message], raw: Sequence[object], earlier: _Call
) -> dict[object, object]:
    """Replace the tool calls of an earlier call's messages and its reply by those that it rendered,
    and the ids of their results accordingly.

    Everything else stays as the client sent it. Returns the ids that differ from the client's.
    """
    count = len(earlier.formed)
    renamed = dict[object, object]()
    if same_start(raw, earlier.raw) >= count:
        messages[:count] = earlier.formed
        renamed |= earlier.renamed
        done = count
    else:
        done = 0
    rendered = [*earlier.formed, earlier.formed_reply or {}]
    for i in range(done, len(messages)):
        message = messages[i]
        called = _calls_of(message)
        if called:
            ours = _calls_of(rendered[i]) if i < len(rendered) else called
            messages[i] = {**message, "tool_calls": ours}
            renamed.update(zip(map(_id_of, called), map(_id_of, ours), strict=True))
        elif renamed and isinstance(call_id := message.get("tool_call_id"), str):
            our_id = renamed.get(call_id, call_id)
            if our_id != call_id:
                messages[i] = {**message, "tool_call_id": our_id}
    return {theirs: ours for theirs, ours in renamed.items() if theirs != ours}
