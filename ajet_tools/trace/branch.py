"""Forks of a stored episode: replies are replayed up to one of its calls, then sampled, and the
result is judged.

The workflow runs again. If it sends other requests before that call, the attempt counts as no fork,
not as reward 0.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ajet_sdk.config.config import Config
from ajet_sdk.dialects.message_parts import parts_of, request_messages
from ajet_sdk.engines.chat import Conversation, TokenEngine
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.errors import ConfigError, EngineError, QueryError
from ajet_sdk.protocols import Answer, Ask, Choice, Engine, Sampled, TraceReader
from ajet_sdk.reporting.results import Report
from ajet_sdk.run import score_tasks
from ajet_sdk.samples.prefixes import common_start
from ajet_sdk.trace.schema import OF_VALIDATION
from ajet_sdk.types import Call, Episode, JsonView
from ajet_tools.text.clean import one_line
from ajet_tools.trace.compare.attempts import attempt_of
from ajet_tools.trace.compare.changes import excerpt, parting
from ajet_tools.trace.compare.diff import episode_at
from ajet_tools.trace.episode.messages import fingerprint
from ajet_tools.trace.queries.base import grouped
from ajet_tools.trace.queries.records import Record


class NotReplayed(EngineError, ConfigError):
    """The workflow sent other requests than the recorded ones."""


@dataclass(frozen=True)
class BranchPoint:
    """The call from which forks of an episode are sampled."""

    episode: Episode
    call: Call
    of_validation: bool = False
    """The task is held out."""
    keep: int = 0
    """Tokens of the recorded reply to keep."""


def branch_point(reader: TraceReader, episode_id: str, at: str, keep: int = 0) -> BranchPoint:
    """Find a call of an episode's workflow by its number or by the first six or more characters of
    its id.

    Raises QueryError.
    """
    episode = episode_at(reader, episode_id)
    calls = [call for call in episode.calls if call.phase == "rollout"]
    fitting = [call for call in calls if at == str(call.index)]
    if len(at) >= 6:
        fitting = fitting or [call for call in calls if call.call_id.startswith(at)]
    if len(fitting) != 1:
        numbers = ", ".join(str(call.index) for call in calls[:20]) or "none"
        raise QueryError(
            f"--at {at}: {'several calls have' if fitting else 'no call of the workflow has'} that"
            f" number or start of an id in episode {episode_id[:12]}; its calls:"
            f" {numbers}{' …' if len(calls) > 20 else ''}"
        )
    call = fitting[0]
    known = fitting[0].logprobs
    if keep and (known is None or keep >= len(known)):
        if known is None:
            there = "no token ids with log-probabilities"
        else:
            there = f"{len(known)} tokens; keep fewer of them"
        raise QueryError(f"--token {keep}: the reply of call {call.index} has {there}")
    [held_out] = reader.query(
        f"SELECT {OF_VALIDATION} AS held_out FROM episodes e WHERE e.episode_id = ?", [episode_id]
    ).to_pylist() or [{"held_out": False}]
    return BranchPoint(episode, call, bool(held_out["held_out"]), keep)


@dataclass(frozen=True, eq=False)
class _Request:
    """A request of an agent, with the recorded choices of the reply."""

    agent: str
    request: JsonView
    calls: tuple[Call, ...] = ()

    @cached_property
    def messages(self) -> list[Hashable]:
        return [fingerprint(message) for message in request_messages(self.request)]

    @cached_property
    def _key(self) -> str:
        tools = self.request.get("tools")
        prompt = self.request.get("prompt")
        return json.dumps([self.agent, tools, prompt], sort_keys=True, default=str)

    def equals(self, request: _Request) -> bool:
        """Whether both have the same agent, tools and messages; sampling options may differ."""
        return self._key == request._key and self.messages == request.messages

    def difference(self, request: _Request) -> str:
        """Describe the first message in which a new request differs from this one."""
        start = common_start(self.messages, request.messages)
        sides = [request_messages(side.request)[start : start + 1] for side in (self, request)]
        if not any(sides):
            return f"call {self.calls[0].index} had other tools"
        texts = [parts_of(side[0]).text if side else "" for side in sides]
        role = parts_of((sides[1] or sides[0])[0]).role
        shown = [
            excerpt(text, common_start(*texts)) if side else "nothing"
            for side, text in zip(sides, texts, strict=True)
        ]
        return (
            f"message {start} ({role}) of call {self.calls[0].index} was {shown[0]} and is"
            f" {shown[1]}"
        )


@dataclass
class _Progress:
    """Replay state of an attempt."""

    left: list[_Request]
    """Recorded requests before the branch point, not sent yet."""
    branched: bool = False
    difference: str = ""


class BranchingEngine:
    """Replays the recorded replies up to the branch point, then samples with another engine.

    A recorded reply keeps its token ids if the engine encodes its prompt to the recorded ids.
    """

    def __init__(self, point: BranchPoint) -> None:
        self.point = point
        self._at = _Request(point.call.agent, point.call.request, (point.call,))
        calls = point.episode.calls
        answered = (
            c
            for c in calls
            if c.phase == "rollout" and c.error is None and c.response.get("choices")
        )
        by_id = grouped(answered, lambda call: call.request_id or call.call_id)
        self._recorded = [_Request(of[0].agent, of[0].request, tuple(of)) for of in by_id.values()]
        by_start = sorted(self._recorded, key=lambda request: request.calls[0].started_at)
        self._before = [
            request for request in by_start if request.calls[0].started_at < point.call.started_at
        ]
        self._after = by_start[len(self._before) :]
        self._progress: dict[str, _Progress] = {}

    def over(self, engine: Engine) -> Engine:
        """Set the engine that samples, and return self. Raises ConfigError if it cannot continue
        after a token."""
        if self.point.keep and not isinstance(engine, TokenEngine):
            raise ConfigError(
                f"--token: {engine!r} takes messages and not token ids, so it can't go on from a"
                " token; give a local model (--model PATH), or leave --token out to sample the"
                " whole reply"
            )
        self.engine = engine
        self.model = engine.model
        self.tokenizer = getattr(engine, "tokenizer", None)
        return self

    async def answer(self, ask: Ask) -> Answer:
        """Answer a request. Raises NotReplayed, and the errors of the engine."""
        progress = self._progress.setdefault(ask.episode_id, _Progress([*self._before]))
        request = _Request(ask.agent, ask.body)
        if not progress.difference:
            for recorded in progress.left:
                if recorded.equals(request):
                    progress.left.remove(recorded)
                    return self._replay(ask, recorded.calls)
            if not progress.branched and self._at.equals(request):
                progress.branched = True
                return await (
                    self._continue(ask, progress) if self.point.keep else self.engine.answer(ask)
                )
            if progress.branched or any(
                later.equals(request) for later in self._after
            ):  # parallel to the branch point
                return await self.engine.answer(ask)
            expected = next((r for r in (*progress.left, self._at) if r.agent == ask.agent), None)
            unknown = f"agent {ask.agent!r} sent a request that was not recorded"
            if expected is None:
                progress.difference = unknown
            else:
                progress.difference = expected.difference(request)
        raise NotReplayed(progress.difference)

    def _replay(self, ask: Ask, calls: Sequence[Call]) -> Answer:
        first = calls[0]
        engine = self.engine
        chat = None
        if isinstance(engine, TokenEngine | ScriptedEngine):
            chat = engine.chat
        conversation = None if chat is None else chat.begin(ask)
        exact = first.prompt_ids is not None and (
            first.model == engine.model
            if conversation is None
            else _same_prompt(conversation, first)
        )
        choices = tuple(_choice(call, exact) for call in calls)
        if (
            exact
            and chat is not None
            and conversation is not None
            and conversation.prompt is not None
        ):
            builder = chat.tokens(ask.episode_id, ask.agent)
            for choice in choices:
                if choice.output_ids is not None and choice.message is not None:
                    builder.commit(
                        conversation.prompt,
                        choice.output_ids,
                        choice.message,
                        conversation.sampling.stop,
                    )
        ids = None
        if exact and first.prompt_ids is not None:
            ids = first.prompt_ids.tolist()
        return Answer(
            choices,
            first.model,
            ids,
            first.response.get("usage") or {},
            first.pictures if exact else (),
        )

    async def _continue(self, ask: Ask, progress: _Progress) -> Answer:
        """Sample replies that begin with the kept tokens."""
        call = self.point.call
        engine = self.engine
        keep = self.point.keep
        assert (
            isinstance(engine, TokenEngine)
            and call.output_ids is not None
            and call.logprobs is not None
        )
        conversation = engine.chat.begin(ask)
        sampling = conversation.sampling
        kept = call.output_ids[:keep].tolist()
        logprobs = call.logprobs[:keep].tolist()
        if not _same_prompt(conversation, call):
            progress.difference = (
                f"the prompt of call {call.index} has other token ids with this model"
            )
        elif sampling.processed:
            progress.difference = "a grammar, a penalty or a bias needs the whole reply"
        if progress.difference:
            raise NotReplayed(f"{progress.difference}; leave --token out")
        limit = None
        if sampling.max_tokens is not None:
            limit = max(1, sampling.max_tokens - keep)
        prompt = [*conversation.prompt_ids, *kept]
        session = f"{ask.episode_id}/{ask.agent}"
        sampled = []
        for rest in await engine.sample(
            replace(conversation, prompt_ids=prompt, sampling=replace(sampling, max_tokens=limit)),
            session,
        ):
            ids = [*kept, *rest.output_ids]
            behind = engine.tokenizer.decode(rest.output_ids)[len(rest.text or "") :]
            text = None
            if rest.text is not None:
                text = engine.tokenizer.decode(ids).removesuffix(behind)
            both = None
            if rest.logprobs is not None:
                both = [*logprobs, *rest.logprobs]
            sampled.append(Sampled(ids, both, rest.finish_reason, rest.policy_version, text))
        return engine.chat.answer(conversation, sampled, engine.model)

    @property
    def takes_pictures(self) -> bool | None:
        return self.engine.takes_pictures

    async def count(self, ask: Ask) -> int:
        """Count tokens with the engine."""
        return await self.engine.count(ask)

    def forget(self, episode_id: str) -> None:
        self.engine.forget(episode_id)

    async def aclose(self) -> None:
        await self.engine.aclose()

    def in_order(self, episode: Episode) -> Episode:
        """Sort the calls of a fork by their recorded order, as calls may be parallel; new calls
        follow."""

        def position(call: Call) -> int:
            request = _Request(call.agent, call.request)
            recorded = enumerate(self._recorded)
            return next((i for i, known in recorded if known.equals(request)), len(self._recorded))

        return episode.model_copy(update={"calls": tuple(sorted(episode.calls, key=position))})

    def check(self, episode_id: str) -> None:
        """Raise NotReplayed if a workflow has returned without reaching the branch point."""
        progress = self._progress.get(episode_id)
        if progress is None or not progress.branched:
            raise NotReplayed(f"it returned before call {self.point.call.index}")

    def why_not(self, episode: Episode) -> str:
        """Return the reason why an attempt is no fork, or an empty text."""
        progress = self._progress.get(episode.episode_id)
        if progress is not None and (progress.difference or progress.branched):
            return progress.difference
        error = one_line(episode.error or "", 200)
        return f"it ended before call {self.point.call.index}{f': {error}' if error else ''}"


def _same_prompt(conversation: Conversation, call: Call) -> bool:
    """Whether a request has the ids and the pictures of a recorded call."""
    return (
        call.prompt_ids is not None
        and list(conversation.prompt_ids) == call.prompt_ids.tolist()
        and conversation.pictures == call.pictures
    )


def _choice(call: Call, exact: bool) -> Choice:
    """Convert a recorded choice; token ids are kept if `exact`."""
    [raw, *_] = call.response["choices"]
    ids = None
    if exact and call.output_ids is not None:
        ids = call.output_ids.tolist()
    if ids is None or call.logprobs is None:
        logprobs = None
    else:
        logprobs = call.logprobs.tolist()
    finish = call.finish_reason or "stop"
    return Choice(
        raw.get("message"),
        raw.get("text"),
        finish,
        ids,
        logprobs,
        cut_tokens=call.cut_tokens,
        policy_version=call.policy_version,
        weight_updates=call.weight_updates,
    )


@dataclass(frozen=True)
class Fork:
    """An attempt to fork an episode."""

    episode: Episode
    why_not: str
    """Reason of a failed attempt: other requests before the branch point, or it was not reached.
    Empty for a fork."""
    parts: str | None
    """The first difference from the stored episode; None if there is none."""

    @property
    def reward(self) -> float | None:
        """Reward of the fork; None for a failed attempt, or without a judge."""
        if self.why_not:
            return None
        return self.episode.reward


def sample_forks(
    config: Config, point: BranchPoint, k: int, on_episode: Callable[[Episode], None] | None = None
) -> tuple[Report, list[Fork]]:
    """Sample `k` forks with the workflow of a config, recorded as a new run.

    Raises the errors of `ajet_sdk.run.run`.
    """
    engine = BranchingEngine(point)
    report = score_tasks(
        config,
        [point.episode.task],
        k=k,
        of_validation=point.of_validation,
        on_episode=on_episode,
        wrap=engine.over,
        check=engine.check,
    )
    original = attempt_of(Record(point.episode))
    forks = []
    for episode in report.tasks[0].episodes:
        forked = attempt_of(Record(engine.in_order(episode)))
        forks.append(Fork(episode, engine.why_not(episode), parting(original, forked)))
    return report, forks
