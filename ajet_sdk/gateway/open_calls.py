"""Holds the calls of an open episode, in memory linear in their distinct content.

The prompt and the messages of a turn repeat nearly all of the previous turn's, so whole copies
would take memory quadratic in the number of turns. Token ids are stored once, and equal values are
one object.
"""

from __future__ import annotations

import hashlib
import marshal
from array import array
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ajet_sdk.pictures import unkeyed
from ajet_sdk.samples.prefixes import IdRun, PrefixIndex
from ajet_sdk.types import Call, Json

SHORT = 64
"""Length below which a text is not shared, in characters."""
SPELLING = 2
"""The newest format of `marshal` that encodes equal values equally, whether or not they share
objects."""
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
        self._latest: list[object] = []
        """The messages of the latest request."""

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

    def shared(self, body: Json) -> Json:
        """Return the request's JSON with objects of earlier requests in place of equal values; do
        not modify it."""
        if not self._keep:
            return body
        copy = dict(body)
        for name, value in body.items():
            if name == "messages" and isinstance(value, list):
                copy[name] = self._latest = self._shared_messages(value)
            elif isinstance(value, (list, dict)) or (
                isinstance(value, str) and len(value) >= SHORT
            ):
                copy[name] = self._shared(value)
        return copy

    def _shared_messages(self, messages: list[object]) -> list[object]:
        latest = self._latest
        repeated = 0
        if (
            0 < len(latest) <= len(messages)
        ):  # most requests repeat the latest one: comparing saves the digests
            with suppress(ValueError):
                if marshal.dumps(messages[: len(latest)], SPELLING) == marshal.dumps(
                    latest, SPELLING
                ):
                    repeated = len(latest)
        return [*latest[:repeated], *map(self._shared, messages[repeated:])]

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
