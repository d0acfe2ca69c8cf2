"""`Recording`: an engine that returns the recorded replies of an episode.

A recorded episode's workflow, run again with the recorded completions: does it make the same calls?

The workflow runs as in a run, through the gateway and the capture, and only the model is a recording. Nothing is
written to the trace.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ajet_sdk.backbones.debug import stop_at_tags
from ajet_sdk.config.config import Config
from ajet_sdk.errors import ContextOverflow, EngineError, QueryError
from ajet_sdk.gateway.episode import EpisodeSpec, OpenEpisode
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.protocols import Answer, Ask, Choice, TraceReader
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.rollout.episode import run_episode
from ajet_sdk.trace.reader import calls_of, episodes
from ajet_sdk.types import Call, Episode
from ajet_tools.trace.compare.requests import Asked, Difference, compare, likeness, requests_of
from ajet_tools.trace.rerun.rejudge import workflow_returned

_UNDELIVERED = "undelivered"

_TOO_LONG = "maximum context length"


class Recording:
    """Answers each request with its recorded reply.

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

    async def count(self, ask: Ask) -> int:
        """Raises EngineError: a trace holds no counts."""
        raise EngineError(f"agent {ask.agent!r} asked for the number of tokens of a request, which is not recorded")

    async def answer(self, ask: Ask) -> Answer:
        """Raises EngineError where nothing is left to answer with, and where the recorded call failed."""
        place = self._find(ask)
        if place is None:
            raise EngineError(f"agent {ask.agent!r} made a call that was not recorded, and no recorded one is left")
        calls = self._recorded[place].calls
        error = calls[0].error
        lost = error is not None and error.startswith(_UNDELIVERED)
        if lost and not calls[0].response:
            await asyncio.Event().wait()
        if error is not None and not lost:  # a reply that was left half read is given whole: the agent leaves it again
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
        equal = [i for i, entry in enumerate(self._recorded) if entry.content == content]
        same_agent = [i for i in equal if self._recorded[i].agent == ask.agent]
        for index in [*(i for i in same_agent if i in self._left), *(i for i in same_agent if i in self._lent)]:
            return self._take(index)
        for index in (i for i in equal if i in self._left):
            return self._take(index)
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
    trained = [entry for entry in recorded if any(call.trainable for call in entry.calls)] or list(recorded)
    named = (entry.body.get("model") or entry.calls[0].model for entry in trained)
    return next((str(name) for name in named if name), "recorded")


def _choice(call: Call) -> Choice:
    choice = _said(call)
    logprobs, tokens = _logprobs(choice.get("logprobs"))
    message, text = choice.get("message"), choice.get("text")
    ids = None if call.output_ids is None else call.output_ids.tolist()
    if logprobs is None and call.logprobs is not None:
        logprobs = call.logprobs.tolist()
    return Choice(
        dict(message) if isinstance(message, Mapping) else None,
        text if isinstance(text, str) else None,
        call.finish_reason or str(choice.get("finish_reason") or "stop"),
        ids,
        logprobs,
        tokens if logprobs is not None and tokens is not None and len(tokens) == len(logprobs) else None,
    )


def _said(call: Call) -> Mapping[str, object]:
    choices = call.response.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(first, Mapping) or not ("message" in first or "text" in first):
        raise QueryError(
            f"call {call.call_id} has no reply of the chat/completions or completions route; only these can be replayed"
        )
    return first


def _logprobs(value: object) -> tuple[list[float] | None, list[bytes] | None]:
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


def _token(entry: Mapping[str, object]) -> bytes:
    data = entry.get("bytes")
    return bytes(data) if isinstance(data, list) else str(entry.get("token", "")).encode("utf-8", "replace")


_A_WEEK = 7 * 24 * 3600.0


@dataclass(frozen=True)
class Replay:
    """The result of a replay."""

    recorded: Episode
    replayed: Episode
    differences: tuple[Difference, ...]
    """In the order of the recording; empty: the workflow made the same calls."""
    requests: int
    """As recorded."""
    requests_now: int

    @property
    def error(self) -> str | None:
        """The workflow's failure, if the recorded run had none or another cause."""
        now = None if workflow_returned(self.replayed) else self.replayed.cause
        then = None if workflow_returned(self.recorded) else self.recorded.cause
        return self.replayed.error if now is not None and now != then else None

    @property
    def same(self) -> bool:
        """Whether the calls are the same and the workflow ended as recorded."""
        return not self.differences and self.error is None

    @property
    def same_output(self) -> bool:
        return bool(self.recorded.output == self.replayed.output)


def recorded_episode(reader: TraceReader, episode_id: str) -> Episode:
    """An episode that can be replayed. Raises QueryError where it has not ended, or its calls cannot be answered."""
    matches = episodes(reader, episode_ids=[episode_id], superseded=True)
    if not matches:
        raise QueryError(
            f"episode {episode_id} has not ended, or its run was killed: it has "
            f"{len(calls_of(reader, episode_id))} calls and no task to start the workflow with"
        )
    episode = matches[0]
    foreign = [c for c in episode.calls if c.phase == "rollout" and c.error is None and not _answerable(c.response)]
    if foreign:
        raise QueryError(
            f"call {foreign[0].call_id} of episode {episode_id} was answered in another dialect than chat/completions "
            f"or completions ({', '.join(sorted(foreign[0].response)[:6]) or 'nothing was recorded'}); a replay "
            "answers these two"
        )
    return episode


def _answerable(response: dict[str, object]) -> bool:
    choices = response.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return isinstance(first, dict) and ("message" in first or "text" in first)


async def replay(
    recorded: Episode,
    workflow: object,
    config: Config,
    *,
    timeout: float | None = None,
    debug_tags: Collection[str] = (),
) -> Replay:
    """Run `workflow` on the task of a recorded episode, with its completions.

    `timeout` is in seconds; None: the config's. With debug tags there is none, since a person may sit at a breakpoint.
    Judges are not run. Never raises for what the workflow does.
    """
    requests = requests_of(recorded.calls)
    recording = Recording(requests)
    limit = _A_WEEK if debug_tags else timeout or config.rollout.timeout
    rollout = config.rollout.model_copy(update={"timeout": limit, "max_env_worker": 1})
    attempt = Attempt(
        task=recorded.task,
        run_id=recorded.run_id,
        group_id=recorded.group_id,
        attempt=recorded.attempt,
        step=recorded.step,
        split=recorded.split or "train",
    )
    with stop_at_tags(debug_tags), RecordingGateway(recording) as gateway:
        replayed = await run_episode(
            workflow,
            _unjudged,
            attempt,
            engine=recording,
            gateway=gateway,
            config=config.model_copy(update={"rollout": rollout}),
        )
    now = requests_of(replayed.calls)
    return Replay(recorded, replayed, tuple(compare(requests, now)), len(requests), len(now))


def _unjudged() -> float:
    """A replay checks calls; it needs no reward."""
    return 0.0
