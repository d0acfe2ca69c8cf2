"""Answers a request: asks the engine, records the calls and builds the reply, independent of the
transport.

Engines reply without streaming; this module splits replies into events. Each request becomes one
`Call` per choice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, replace

from ajet_sdk.dialects.fields import WITHOUT_EFFECT, without_effect
from ajet_sdk.dialects.json import json_bytes
from ajet_sdk.dialects.openai_chat import CHAT, remove_secrets
from ajet_sdk.engines.reply_schema import checked_answer
from ajet_sdk.errors import (
    AjetError,
    ConfigError,
    EngineUnavailable,
    TraceError,
)
from ajet_sdk.gateway.access import (
    ClientGone,
    HTTPError,
    Request,
    has_pictures,
    headers_of,
    refusal,
    unknown_route,
)
from ajet_sdk.gateway.episode import OpenEpisode, mix_seed, override
from ajet_sdk.gateway.pictures import checked
from ajet_sdk.protocols import Answer, Ask, Engine, Sampling, SamplingCancelled
from ajet_sdk.types import Call, Json, Phase, new_id, now

HEARTBEAT = 10.0
"""Seconds between two keep-alive comments on a stream."""
Chunks = AsyncGenerator[tuple[bytes, bool], None]
"""Chunks of a response's body, each with a flag for the last."""

UNDELIVERED = "undelivered"
CUT_OFF = f"{UNDELIVERED}: the client disconnected before the end"

log = logging.getLogger("ajet")


class CallInFlight:
    """A request in flight; however it ends, it is recorded exactly once, as one `Call` per
    choice."""

    def __init__(self, episode: OpenEpisode, request: Request) -> None:
        self.episode = episode
        self.identity = request.identity
        self.target = request.identity.target_tag or request.identity.agent
        self.phase: Phase = request.phase
        self.body = self.neutral = request.body
        """The JSON as sent, and in the format of completions, which is recorded."""
        self.client = request.client
        self.dialect = request.dialect or CHAT
        self.request_id = new_id()
        self.started_at = now()
        self.engine: Engine = episode.spec.engine
        self.trainable = request.phase == "rollout" and request.identity.trainable
        self.sampling = Sampling()
        self.asked: Ask
        self.work: asyncio.Future[Answer] | None = None
        self.response: Json = {}
        """The response to the client."""
        self._completion: Json = {}
        self.is_sent = False
        """Whether a part of the answer was sent."""
        loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = loop.create_future()
        """Done when the episode is over."""
        self.settled: asyncio.Future[None] = loop.create_future()
        """Done when the wait is over: by an answer, a time-out, the client's leaving, or the
        episode's end."""
        self._timer = loop.call_later(episode.spec.call_timeout, self.settle)
        self.client.gone.add_done_callback(self.settle)
        self._recorded = self._ended = False
        self._answer: Answer | None = None
        self._error = UNDELIVERED
        self._drawn = 0
        """Tokens sampled before the engine was cancelled."""
        episode.in_flight.add(self)
        if request.identity.child:
            episode.called_by_child(request.identity.child)

    def settle(self, _: object = None) -> None:
        """End the wait."""
        if not self.settled.done():
            self.settled.set_result(None)

    async def ask(self) -> Answer:
        """Ask the engine. Raises the engine's errors."""
        try:
            if self.engine is self.episode.spec.engine and has_pictures(self.asked.messages):
                await self._check_pictures()
            return await self.engine.answer(self.asked)
        except SamplingCancelled as cancelled:
            self._drawn = cancelled.tokens
            raise
        except Exception as error:
            if self._ended:
                log.debug("The engine failed after the end of call %s: %r", self.request_id, error)
            raise
        finally:
            if not self.settled.done():
                self.settled.set_result(None)

    async def _check_pictures(self) -> None:
        """Decode the request's pictures. Raises RequestRefused."""
        if self.engine.takes_pictures is False:
            return  # it refuses them all, whether they are broken or not
        asked = await checked(self.asked, self.episode.spec.picture_hosts, self.episode.loaded)
        if asked is not self.asked:  # links were loaded: the record has the pictures
            shared = self.episode.kept.shared({"messages": asked.messages})["messages"]
            self.asked = replace(asked, messages=shared)
            self.neutral = {**self.neutral, "messages": shared}

    def choose_engine(self, ask: Ask) -> Sampling:
        """Choose the engine and the sampling parameters, which may override the request's. Raises
        ConfigError."""
        sampling = ask.sampling
        spec = self.episode.spec
        name = self.target
        outside = spec.trainable_targets is not None and name not in spec.trainable_targets
        if (
            not self.identity.trainable
        ):  # the policy answers, untrained, unless the config names another model
            outside = (
                self.identity.debug_model is not None or spec.frozen(self.identity) is not None
            )
        if outside and (self.phase == "rollout" or self.identity.debug_model is not None):
            self.trainable = False
            self.engine = spec.frozen(self.identity) or self._debug_engine(name)
        self.episode.asked[id(self.engine)] = self.engine
        content = ask.digest() if spec.seed_by_content else ""
        ordinal = next(self.episode.ordinals[self.identity.agent, content])
        own_seed = sampling.seed is not None and (spec.sampling is None or not self.trainable)
        if own_seed:
            seed = sampling.seed
        else:
            seed = mix_seed(sampling.seed, spec.seed, self.identity.agent, ordinal, content)
        if self.phase == "rollout" and self.engine is spec.engine:
            overrides = spec.sampling if self.trainable else None
            sampling = override(sampling, overrides, max_tokens=spec.max_tokens)
        if seed == sampling.seed:
            self.sampling = sampling
        else:
            self.sampling = replace(sampling, seed=seed)
        return self.sampling

    def _debug_engine(self, name: str) -> Engine:
        debug = self.identity.debug_model
        spec = self.episode.spec
        if debug is not None and spec.open_debug_model is not None:
            return spec.open_debug_model(debug)
        targets = ", ".join(spec.trainable_targets or ())
        if debug:
            wanted = f"its debug model {debug!r} is not configured"
        else:
            wanted = "it has no debug model"
        raise ConfigError(
            f"{name!r} is not a trainable target ({targets}), and {wanted}; add it to"
            " trainable_targets, give it a debug model, or set rollout.opponent"
        )

    def keep_answer(self) -> dict[str, object]:
        """Store the engine's answer and return the response to send.

        Raises HTTPError if the episode is over, ClientGone, EngineUnavailable (too late), and the
        engine's errors.
        """
        assert self.work is not None
        if self.over.done():
            raise HTTPError(410, f"episode {self.episode.episode_id} is over", "episode_finished")
        if self.client.gone.done():
            raise ClientGone
        if not self.work.done():
            limit = self.episode.spec.call_timeout
            raise EngineUnavailable(f"the engine did not answer within {limit:g} s (call_timeout)")
        completion = self._take_answer(self.work)
        self.response = self.dialect.response(
            completion, self.neutral, self.body, self.episode.stored
        )
        self._completion = {**completion, "id": self.response.get("id", completion["id"])}
        return self.response

    def _take_answer(self, work: asyncio.Future[Answer]) -> dict[str, object]:
        """Store the engine's answer for the record. Raises the engine's errors."""
        answer = checked_answer(work.result(), self.asked, repr(self.engine.model))
        completion = self.dialect.form.completion(answer, self.asked, self.request_id)
        self._answer = answer
        self._completion = completion
        return completion

    def record(self, error: str | None = None) -> None:
        """Record the calls; only the first invocation has an effect.

        Without an error it is called before the last chunk, after the client has read the others,
        so that a client with the whole reply finds the call. Raises ClientGone if the client has
        left or the episode is over.
        """
        if self._recorded:
            return
        if error is None:
            if self.client.gone.done() or self.over.done():
                raise ClientGone
            self.episode.unconfirmed.add(self)
        self._recorded = True
        work = self.work
        if (
            self._answer is None
            and work is not None
            and work.done()
            and not work.cancelled()
            and not work.exception()
        ):
            with suppress(AjetError):  # too late to be sent, but its tokens were sampled
                self._take_answer(work)
        common: Json = {
            "episode_id": self.episode.episode_id,
            "agent": self.identity.agent,
            "target_tag": self.identity.target_tag,
            "trainable": self.trainable,
            "request": remove_secrets(
                self.neutral if self.dialect.form is self.dialect else self._recorded_request()
            ),
            "started_at": self.started_at,
            "ended_at": now(),
            "error": error,
            "request_id": self.request_id,
            "phase": self.phase,
        }
        answer = self._answer
        grammar = "" if answer is None else answer.grammar
        common["sampling"] = (
            replace(self.sampling, grammar=grammar) if grammar else self.sampling
        ).as_dict()
        if answer is None:
            index = next(self.episode.indices)
            model = self.engine.model
            drawn = self._drawn
            self.episode.add(
                Call(
                    **common, index=index, model=model, response=self._completion, cut_tokens=drawn
                )
            )
            return
        for index, choice in enumerate(answer.choices):
            known: Json = {
                "index": next(self.episode.indices),
                "model": answer.model,
                "policy_version": choice.policy_version,
                "response": {**self._completion, "choices": [self._completion["choices"][index]]},
                "prompt_ids": answer.prompt_ids,
                "output_ids": choice.output_ids,
                "logprobs": (
                    choice.logprobs if choice.of_policy and choice.output_ids is not None else None
                ),
                "cut_tokens": choice.cut_tokens,
                "finish_reason": choice.finish_reason,
            }
            if answer.pictures:
                known["pictures"] = answer.pictures
            if choice.weight_updates:
                known["weight_updates"] = choice.weight_updates
            self.episode.add(Call(**common, **known), answer.new_ids)

    def _recorded_request(self) -> Json:
        """The request in the format of completions, with the fields of its dialect that don't
        affect sampling."""
        if self.neutral is self.body:  # not converted
            return self.neutral
        unused = {
            k: v
            for k, v in without_effect(self.body, self.dialect.fields).items()
            if k not in self.neutral
        }
        if unused:
            return {**self.neutral, WITHOUT_EFFECT: unused}
        return self.neutral

    def end(self, error: str | None = None) -> None:
        """Cancel the engine's work, then record the calls with the error, by default as
        undelivered."""
        if self._ended:
            return
        self._ended = True
        self._timer.cancel()
        self.client.gone.remove_done_callback(self.settle)
        if self._recorded:
            self.episode.in_flight.discard(self)
            return
        self._error = error or self._undelivered()
        if self.work is None or self.work.done():
            self.close()
        else:
            self.work.cancel()
            self.work.add_done_callback(self.close)

    def close(self, _: object = None) -> None:
        """Record the calls unless they are recorded, without waiting for the engine."""
        if not self._recorded:
            with suppress(TraceError):  # the writer raises it again at its next record
                self.record(self._error)
        self.episode.in_flight.discard(self)

    def cancel(self) -> None:
        """End the call, as the episode is over."""
        self.end()
        if not self.over.done():
            self.over.set_result(None)
            self.settle()

    def confirm(self, is_read: bool) -> None:
        """Note whether the client read the whole reply, whose call was recorded as delivered before
        its last chunk. Only the first invocation counts, by the client or the episode's end."""
        if self in self.episode.unconfirmed:
            self.episode.unconfirmed.discard(self)
            if not is_read:
                self.episode.undelivered(self.request_id, CUT_OFF)

    def _undelivered(self) -> str:
        if self.is_sent:
            return CUT_OFF
        if self.work is None or not self.work.done():
            failed = None
        else:
            failed = self.work.exception()
        if failed is None:
            return UNDELIVERED
        return f"{UNDELIVERED}: the answer was an error: {failed}"


@dataclass(slots=True)
class Reply:
    """The response for a door to send: it enters `async with reply` and sends all of `chunks`.

    If the block ends before the last chunk, the call is undelivered. `chunks` raises ClientGone.
    """

    chunks: Chunks
    call: CallInFlight
    headers: list[tuple[bytes, bytes]]
    is_stream: bool = False

    async def __aenter__(self) -> Reply:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.chunks.aclose()  # no effect before the first chunk
        self.call.end()


async def answer(episode: OpenEpisode, request: Request) -> Reply:
    """Ask the engine once and return the reply. Cancelling this, or leaving the reply early,
    cancels the engine's work.

    Raises HTTPError for responses other than 200, and ClientGone.
    """
    call = CallInFlight(episode, request)
    try:
        call.asked = _read(call, request)
        call.work = asyncio.ensure_future(call.ask())
        if call.dialect.streams(request.body):
            await asyncio.wait((call.settled,), timeout=HEARTBEAT)
            if call.settled.done():
                call.keep_answer()
            return Reply(
                _events(call), call, headers_of(200, None, call.dialect.media_type), is_stream=True
            )
        await call.settled
        body = json_bytes(call.keep_answer())
        return Reply(_whole(call, body), call, headers_of(200, len(body)))
    except (ClientGone, asyncio.CancelledError):
        call.end()
        raise
    except Exception as error:
        refused = refusal(call.episode, error)
        call.end(str(refused))
        raise refused from error


def _read(call: CallInFlight, request: Request) -> Ask:
    dialect = request.dialect
    body = call.body
    if dialect is None:
        raise unknown_route(request.route)
    if call.episode.stopped is not None and request.phase == "rollout":
        why = (
            f"a reply was mad: {call.episode.stopped} (rollout.compute_madness_checklist); this"
            " ended the episode"
        )
        raise HTTPError(400, why, "episode_stopped")
    call.neutral = neutral = call.episode.kept.shared(dialect.neutral(body, call.episode.stored))
    if request.captured:
        model = str(neutral.get("model", ""))
        verdict = call.episode.answers(model)
        if verdict == "ambiguous":
            raise call.episode.ambiguous(model)
        if verdict == "other":
            raise HTTPError(
                400,
                f"model {model!r} is not the policy, and a process that was only given a base URL"
                " has no other endpoint; add it to rollout.policy_models, or call it at its own"
                " base URL",
                "not_the_policy",
                "model",
            )
    ask = dialect.form.ask(neutral, call.episode.episode_id, request.identity.agent)
    sampling = call.choose_engine(ask)
    return replace(ask, sampling=sampling, target=call.target)


async def _whole(call: CallInFlight, body: bytes) -> Chunks:
    call.is_sent = True
    if call.client.in_parts:
        yield body[:-1], False
        await _drain(call)
        body = body[-1:]
    call.record()
    yield body, True


async def _events(call: CallInFlight) -> Chunks:
    dialect = call.dialect
    about = (call.request_id, call.engine.model, call.body)
    is_open = False
    opening = b""
    try:
        while not call.response:
            waiting = dialect.keep_alive(*about)
            if not is_open:
                is_open = True
                opening = dialect.opening(*about)
                waiting = opening + waiting
            yield waiting, False
            await asyncio.wait((call.settled,), timeout=HEARTBEAT)
            if call.settled.done():
                call.keep_answer()
    except ClientGone:
        raise
    except Exception as error:  # noqa: BLE001  # sent to the client as an error event
        refused = refusal(call.episode, error)
        call.end(str(refused))
        yield call.dialect.error_event(refused.body_in(call.dialect)), True
        return
    *events, last = dialect.events(call.response, call.body)
    if opening:
        del events[0]  # was sent
    call.is_sent = True
    yield b"".join(events), False
    await _drain(call)
    call.record()
    yield last, True


async def _drain(call: CallInFlight) -> None:
    """Wait until the client has read all but the last chunk, so that it can't read that one by the
    way. Raises ClientGone, also if the episode ends before."""
    reading = asyncio.ensure_future(call.client.drain())
    try:
        await asyncio.wait(
            (reading, call.over),
            timeout=call.episode.spec.call_timeout,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not reading.done():
            raise ClientGone
    finally:
        reading.cancel()


def refuse_unread(episode: OpenEpisode, request: Request, error: HTTPError) -> HTTPError:
    """The error for a request with an unreadable or too large body; the latter is recorded, without
    the body."""
    if request.dialect is None:  # for an uploaded file, say, the error is the route
        return unknown_route(request.route)
    if error.status == 413:
        CallInFlight(episode, request).end(str(error))
    return error
