"""Holds the calls of an open episode, in memory linear in their distinct content.

The prompt and the messages of a turn repeat nearly all of the previous turn's, so whole copies
would take memory quadratic in the number of turns. Token ids are stored once, and equal values are
one object.
"""

from __future__ import annotations

import hashlib
import json
import marshal
import re
from array import array
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ajet_sdk.dialects.json import json_value
from ajet_sdk.pictures import unkeyed
from ajet_sdk.samples.prefixes import IdRun, PrefixIndex
from ajet_sdk.types import Call, FixedMessages, Json

SHORT = 64
"""Length below which a text is not shared, in characters."""
SPELLING = 2
"""The newest format of `marshal` that encodes equal values equally, whether or not they share
objects."""
_value_at = json.JSONDecoder().raw_decode
_SIGN = re.compile(r"[ \t\n\r]*([{:,\[\]}])[ \t\n\r]*")
HEADER = 5
"""Length of a list's type and size before its values in this format, in bytes."""
Ids = npt.NDArray[np.int32]
NO_IDS: Ids = np.empty(0, np.int32)


class _Bare:
    """The values of a call in the order of its fields; a `Call` takes eight times the memory."""

    __slots__ = ("values",)
    names = tuple(Call.model_fields)
    place: ClassVar[dict[str, int]] = {name: place for place, name in enumerate(names)}

    def __init__(self, call: Call, **changed: object) -> None:
        self.values = tuple(map({**call.__dict__, **changed}.__getitem__, self.names))

    def __getitem__(self, name: str) -> Any:
        return self.values[self.place[name]]

    def whole(self, **changed: object) -> Call:
        return Call.model_construct(
            **{**dict(zip(self.names, self.values, strict=True)), **changed}
        )


@dataclass(frozen=True, slots=True)
class _Read:
    """A request of chat completions as it was read."""

    body: Json
    length: int
    """Bytes up to the end of its last message."""
    digest: bytes
    """Their hash."""
    tail: bytes
    """The bytes behind them."""


class OpenCalls:
    """Compresses calls when they are added and restores them; prompts of a conversation are then
    views of one array."""

    def __init__(self, *, keep: bool = True) -> None:
        self._keep = keep
        """False: calls get their place and are not stored."""
        self._index = PrefixIndex()
        self._calls: list[tuple[_Bare, IdRun | None, int]] = []
        """Each call without its prompt ids, the run that begins with these ids, and their number
        (-1: no ids)."""
        self._values: dict[bytes, object] = {}
        self._read: dict[str, _Read] = {}
        """The latest request of each agent."""
        self._latest: list[object] = []
        """The messages of the latest request."""
        self._spelling: tuple[int, bytes | None] = (0, None)
        """The length of their encoding, and its hash; None if they cannot be encoded."""

    def add(self, call: Call, engine_ids: array[int] | None = None) -> Call:
        """Add a call and return it with its place among the earlier calls. Thread-safe. See
        `PrefixIndex.find`."""
        place, run = self._index.find(call, engine_ids)
        call = call.model_copy(update=place._asdict())
        if not self._keep:
            return call
        for choice in call.response.get("choices") or ():
            for text in (choice.get("message") or {}).values():
                if text and (not isinstance(text, str) or len(text) >= SHORT):
                    self._shared(text)  # the next request repeats it
        bare = _Bare(call, prompt_ids=None, sampling=self._shared(call.sampling))
        self._calls.append((bare, run, -1 if call.prompt_ids is None else len(call.prompt_ids)))
        return call

    def undelivered(self, request_id: str, error: str) -> None:
        """Set the error of a request's calls that have none."""
        for place, (bare, run, length) in enumerate(self._calls):
            if bare["request_id"] == request_id and bare["error"] is None:
                self._calls[place] = _Bare(bare.whole(), error=error), run, length

    def all(self) -> tuple[Call, ...]:
        """The calls in order of completion."""
        entries = sorted(self._calls, key=lambda entry: entry[0]["index"])
        whole: dict[IdRun | None, Ids] = {None: NO_IDS}
        for run in sorted(
            {run for _, run, _ in entries if run is not None}, key=lambda run: -run.end
        ):
            if run not in whole:
                ids = run.whole()
                for part, end in run.chain():
                    if end == part.end:
                        whole.setdefault(part, ids)
        return tuple(
            (
                bare.whole()
                if length < 0
                else bare.whole(prompt_ids=unkeyed(whole[run][:length], bare["pictures"]))
            )
            for bare, run, length in entries
        )

    # Requests

    def read(self, data: bytes, agent: str) -> Json | None:
        """Parse a request of chat completions that repeats the agent's latest one and adds messages;
        only these are parsed. None if it does not.

        The bytes up to the last message that both have are the same, and so are those behind the
        messages. What is between them is a list of messages, so that it can't end the list.
        """
        last = self._read.get(agent)
        if last is None or not data.endswith(last.tail):
            return None
        start, end = last.length, len(data) - len(last.tail)
        hashed = hashlib.sha256(memoryview(data)[:start])
        if start > end or hashed.digest() != last.digest:
            return None
        added = data[start:end].lstrip()
        new: list[object] = []
        if added:
            try:
                new = json_value(b"[" + added[1:] + b"]")
            except (ValueError, RecursionError):
                return None
            if added[:1] != b"," or not new:
                return None
        messages = FixedMessages([*last.body["messages"], *map(self._shared, new)])
        body = {**last.body, "messages": messages}
        hashed.update(memoryview(data)[start:end])
        self._read[agent] = _Read(body, end, hashed.digest(), last.tail)
        return body

    def keep_read(self, data: bytes, body: Json, agent: str) -> Json:
        """Note a request that was parsed as a whole, for the next to be read from its end."""
        if not self._keep:
            return body
        body = self.shared(body)
        try:
            text = data.decode()
            head = text[: _end_of_messages(text)].encode()
        except (ValueError, IndexError, RecursionError):
            return body
        self._read[agent] = _Read(body, len(head), hashlib.sha256(head).digest(), data[len(head) :])
        return body

    def shared(self, body: Json) -> Json:
        """Return the request's JSON with objects of earlier requests in place of equal values; do
        not modify it."""
        if not self._keep:
            return body
        copy = dict(body)
        for name, value in body.items():
            if isinstance(value, FixedMessages):
                continue
            if name == "messages" and isinstance(value, list):
                self._latest = self._shared_messages(value)
                copy[name] = FixedMessages(self._latest)
            elif isinstance(value, (list, dict)) or (
                isinstance(value, str) and len(value) >= SHORT
            ):
                copy[name] = self._shared(value)
        return copy

    def _shared_messages(self, messages: list[object]) -> list[object]:
        """The messages, with the latest request's objects where they repeat it: nearly all requests
        do, and comparing saves the digests."""
        repeated = 0
        length, latest = self._spelling
        try:
            spelling = memoryview(marshal.dumps(messages, SPELLING))[HEADER:]
        except ValueError:  # nested too deeply
            self._spelling = (0, None)
        else:
            hashed = hashlib.sha256(spelling[:length])
            if len(spelling) >= length and hashed.digest() == latest:
                repeated = len(self._latest)
            hashed.update(spelling[length:])
            self._spelling = (len(spelling), hashed.digest())
        return [*self._latest[:repeated], *map(self._shared, messages[repeated:])]

    def _shared(self, value: object) -> object:
        if not isinstance(value, (str, list, dict)) or len(value) < (
            SHORT if isinstance(value, str) else 1
        ):
            return value
        try:
            spelling = marshal.dumps(value, SPELLING)
        except ValueError:
            return value
        key = hashlib.blake2b(spelling, digest_size=16).digest()
        if key not in self._values:
            if isinstance(value, dict):
                value = dict(value)
                for name, text in value.items():
                    if isinstance(text, str) and len(text) >= SHORT:
                        value[name] = self._shared(text)
            self._values[key] = value
        return self._values[key]


def _end_of_messages(text: str) -> int:
    """The end of the last message in the JSON of a request that has only one list of messages.
    Raises ValueError."""
    fields = set[object]()
    end = 0
    sign, at = _sign(text, 0)
    while sign != "}":
        name, at = _value_at(text, at)
        _, at = _sign(text, at)
        if name in fields:
            raise ValueError("a field has two values")
        fields.add(name)
        if name == "messages" and text[at] == "[":
            sign, at = _sign(text, at)
            while sign != "]":
                _, end = _value_at(text, at)
                sign, at = _sign(text, end)
        else:
            _, at = _value_at(text, at)
        sign, at = _sign(text, at)
    if not end:
        raise ValueError("there are no messages")
    return end


def _sign(text: str, at: int) -> tuple[str, int]:
    """A sign between values, and the place of the next value. Raises ValueError."""
    match = _SIGN.match(text, at)
    if match is None:
        raise ValueError("no JSON")
    return match[1], match.end()
