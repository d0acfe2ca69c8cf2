"""`Recording`: an engine that answers as the model of a recorded episode did, and is no model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ajet_sdk.errors import ContextOverflow, EngineError, QueryError
from ajet_sdk.gateway import EpisodeSpec, Gateway, OpenEpisode
from ajet_sdk.protocols import Answer, Ask, Choice
from ajet_sdk.types import Call
from ajet_tools.trace.request_diff import Asked, likeness

__all__ = ["Recording", "RecordingGateway"]

_UNDELIVERED = "undelivered"
_TOO_LONG = "maximum context length"


class Recording:
    """Answers each request with what was recorded for it.

    A request that was not recorded is answered as the most alike of its agent's that are left, so that the rest of the
    workflow can be seen too; where none is left, EngineError. A request that failed then fails again, and one whose
    client did not wait is never answered.
    """

    def __init__(self, recorded: Sequence[Asked]) -> None:
        self.model = _name(recorded)
        self._recorded = recorded
        self._left = dict.fromkeys(range(len(recorded)))
        self._lent: set[int] = set()
        """Answers given to a request that only looked like theirs: still there for the one that is theirs."""

    async def answer(self, ask: Ask) -> Answer:
        """Raises EngineError where nothing is left to answer with, and where the recorded call failed."""
        place = self._find(ask)
        if place is None:
            raise EngineError(f"agent {ask.agent!r} makes a call that was not recorded, and no recorded one is left")
        calls = self._recorded[place].calls
        error = calls[0].error
        left = error is not None and error.startswith(_UNDELIVERED)
        if left and not calls[0].response:
            await asyncio.Event().wait()
        if error is not None and not left:  # a reply that was left half read is given whole: the agent leaves it again
            raise (ContextOverflow if _TOO_LONG in error else EngineError)(error)
        choices = [_choice(calls[i % len(calls)]) for i in range(max(ask.sampling.n, 1))]
        first = calls[0]
        usage = first.response.get("usage")
        return Answer(
            tuple(choices),
            first.model,
            None if first.prompt_ids is None else first.prompt_ids.tolist(),
            first.policy_version,
            usage if isinstance(usage, Mapping) else {},
        )

    def _find(self, ask: Ask) -> int | None:
        asked = Asked(ask.agent, ask.body, ())
        content = asked.content
        equal = [i for i, one in enumerate(self._recorded) if one.content == content]
        own = [i for i in equal if self._recorded[i].agent == ask.agent]
        for place in [*(i for i in own if i in self._left), *(i for i in own if i in self._lent)]:
            return self._take(place)
        for place in (i for i in equal if i in self._left):
            return self._take(place)
        alike = [i for i in self._left if self._recorded[i].agent == ask.agent]
        if not alike:
            return None
        best = max(alike, key=lambda i: (likeness(self._recorded[i].body, ask.body), -i))
        self._lent.add(best)
        del self._left[best]
        return best

    def _take(self, place: int) -> int:
        self._left.pop(place, None)
        self._lent.discard(place)
        return place

    def forget(self, episode_id: str) -> None:
        return

    async def aclose(self) -> None:
        return


class RecordingGateway(Gateway):
    """A gateway whose episodes reach no model: every captured request, whatever it names, is the recording's."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def open(self, spec: EpisodeSpec) -> OpenEpisode:
        changed = replace(
            spec,
            sampling=None,
            policy_models=_EveryName([self._recording.model]),
            uses_handle=False,
            trainable_targets=None,
            max_tokens=None,
            debug_models={},
            open_debug_model=lambda name: self._recording,
        )
        return super().open(changed)


class _EveryName(frozenset[str]):
    """Names of models, and every other name too."""

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str)


def _name(recorded: Sequence[Asked]) -> str:
    """The name that the `Model` handle gave the policy, so that its requests name it again."""
    own = [one for one in recorded if any(call.trainable for call in one.calls)] or list(recorded)
    named = (one.body.get("model") or one.calls[0].model for one in own)
    return next((str(name) for name in named if name), "recorded")


def _choice(call: Call) -> Choice:
    said = _said(call)
    logprobs, tokens = _logprobs(said.get("logprobs"))
    message, text = said.get("message"), said.get("text")
    ids = None if call.output_ids is None else call.output_ids.tolist()
    if logprobs is None and call.logprobs is not None:
        logprobs = call.logprobs.tolist()
    return Choice(
        dict(message) if isinstance(message, Mapping) else None,
        text if isinstance(text, str) else None,
        call.finish_reason or said.get("finish_reason") or "stop",
        ids,
        logprobs,
        tokens if logprobs is not None and tokens is not None and len(tokens) == len(logprobs) else None,
    )


def _said(call: Call) -> Mapping[str, Any]:
    choices = call.response.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(first, Mapping) or not ("message" in first or "text" in first):
        raise QueryError(
            f"call {call.call_id} holds no answer of the chat/completions or completions route; a replay knows only "
            "these"
        )
    return first


def _logprobs(value: Any) -> tuple[list[float] | None, list[bytes] | None]:
    """Log-probabilities and the tokens' bytes as a response spells them, for chat or for plain text."""
    if not isinstance(value, Mapping):
        return None, None
    if isinstance(content := value.get("content"), list):
        entries = [entry for entry in content if isinstance(entry, Mapping)]
        tokens = [_token(entry) for entry in entries]
        return [float(entry.get("logprob") or 0.0) for entry in entries], tokens
    if isinstance(numbers := value.get("token_logprobs"), list):
        return [float(n or 0.0) for n in numbers], [str(t).encode() for t in value.get("tokens") or ()]
    return None, None


def _token(entry: Mapping[str, Any]) -> bytes:
    data = entry.get("bytes")
    return bytes(data) if isinstance(data, list) else str(entry.get("token", "")).encode("utf-8", "replace")
