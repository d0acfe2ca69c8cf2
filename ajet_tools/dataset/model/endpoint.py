"""An OpenAI-compatible endpoint that writes data: bounded concurrency, retry, a rate, a cache and a budget."""

from __future__ import annotations

import asyncio
import base64
import copy
import functools
import hashlib
import math
import time
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ajet_sdk.engines.http import Endpoint as Wire
from ajet_sdk.engines.http import Refusals, pause
from ajet_sdk.engines.reply_cache import CacheError, ReplyCache, Shared, tokens_of
from ajet_sdk.engines.reply_schema import read_reply
from ajet_sdk.errors import AjetError, ContextOverflow, EngineError, EngineUnavailable, RequestRefused
from ajet_tools.dataset.model.budget import Budget

Message = Mapping[str, Any]


class EndpointError(EngineError):
    """The endpoint did not answer, or refused; `permanent` where no other request will fare better."""

    def __init__(self, message: str, *, permanent: bool = False) -> None:
        super().__init__(message)
        self.permanent = permanent
        self.request: str | None = None
        """The key of the request that failed."""


class Halted(EngineError):
    """The request was not sent: the run is ending."""


class _Wire(Protocol):
    async def post(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]: ...

    async def aclose(self) -> None: ...


@dataclass
class _Pace:
    """When an endpoint may be asked, whoever asks."""

    not_before: float = 0.0
    answered: bool = False
    halted: AjetError | None = None
    limited_until: float = 0.0
    """By a 429."""
    waiting: int = 0
    """Requests that wait because of a 429, or for the rate."""
    retries: dict[int, tuple[str, float]] = field(default_factory=dict)
    """Requests that failed and are sent again: why, and when."""
    sent: dict[int, float] = field(default_factory=dict)
    """Requests under way, with the time at which each was sent."""


class Endpoint:
    """Asks a model, at most `concurrency` requests at once; `chat` may be awaited by any number of tasks.

    429 holds back every request, for as long as Retry-After says, and each waits up to `patience` seconds for its turn;
    5xx and a lost connection are tried again `retries` times with exponential backoff; other 4xx never are, but for a
    parameter that the server names as unknown, which is then left out. `per_minute` spaces requests out. With `cache`,
    a reply is kept in that file by endpoint, model, messages and parameters, and costs nothing the second time. It
    belongs to the event loop in which it is first used.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str | None = None,
        *,
        concurrency: int = 16,
        cache: Path | None = None,
        budget: Budget | None = None,
        retries: int = 4,
        patience: float = 300.0,
        per_minute: float | None = None,
        timeout: float = 600.0,
        wire: _Wire | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.model = model
        self.concurrency = concurrency
        self.budget = budget if budget is not None else Budget()
        self.retries = retries
        self.cache = cache
        self._wire = wire or Wire(self.base_url, api_key or "none", timeout=timeout, retries=0)
        self._cache = ReplyCache(cache) if cache is not None else None
        self._slots = asyncio.Semaphore(concurrency)
        self._patience = patience
        self._apart = 60.0 / per_minute if per_minute else 0.0
        self._pace = _Pace()
        self._refusals = Refusals(self.base_url, "To send fewer requests, lower --concurrency or set --rpm")
        self._shared = Shared[list[str]]()
        self._unknown: set[str] = set()
        """Parameters that the server refused by name."""

    @property
    def name(self) -> str:
        """The model's, as a judge calls it."""
        return self.model

    def counted_apart(self) -> Endpoint:
        """The same endpoint, its connections and limits, for another who asks it: what that one spends is counted."""
        other = copy.copy(self)
        other.budget = self.budget.part(self.budget.price)
        return other

    async def complete(self, messages: Sequence[Message], **parameters: Any) -> dict[str, Any]:
        """One reply as the server's object, as a judge's model is asked. Raises as `chat`."""
        [text] = await self.chat(messages, **parameters)
        return {"choices": [{"message": {"role": "assistant", "content": text}}]}

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        n: int = 1,
        temperature: float = 1.0,
        max_tokens: int = 2048,
        seed: int | None = None,
        response_format: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """The texts of `n` replies. Raises BudgetSpent, EndpointError, ContextOverflow, CacheError, Halted.

        Equal requests under way at the same time are one request. Another `seed` makes it another.
        """
        request = {
            "messages": [dict(message) for message in messages],
            "n": n, "temperature": temperature, "max_tokens": max_tokens, "seed": seed,
            **({"response_format": response_format} if response_format is not None else {}),
        }  # fmt: skip
        return await self._deduplicate(request, self._request_texts)

    async def embed(self, texts: Sequence[str]) -> list[str]:
        """A vector for each text, by `embeddings`: its 32-bit floats in base64. Kept, paid for and raising as `chat`.

        An empty text is sent as a blank: some servers refuse it.
        """
        return await self._deduplicate({"input": [text or " " for text in texts]}, self._request_vectors)

    async def _deduplicate(
        self, request: Mapping[str, Any], asked: Callable[[Mapping[str, Any]], Awaitable[list[str]]]
    ) -> list[str]:
        """What was kept of a request, what an equal one under way comes to, or what is asked now, and kept."""
        key = ReplyCache.key({"base_url": self.base_url, "model": self.model, **request})

        async def ask() -> list[str]:
            if self._cache is not None and (kept := self._cache.get(key)) is not None:
                self.budget.record_cached()
                if isinstance(kept, str):
                    raise EndpointError(kept)
                return kept
            try:
                texts = await asked(request)
                self._keep(key, texts)
                return texts
            except EndpointError as error:
                error.request = key
                raise

        return list((await self._shared.get(key, ask))[0])

    def halt(self, why: AjetError | None = None) -> None:
        """Send nothing more: requests that wait for their turn raise `why`, or Halted; those under way come back."""
        self._pace.halted = self._pace.halted or why or Halted("not sent: the run is ending")

    def describe_wait(self, slow: float = 10.0) -> str:
        """What its requests wait for: a rate limit, a retry, a reply of more than `slow` seconds; else nothing."""
        now, waits = time.monotonic(), list[str]()
        pace = self._pace
        held, due, sent = pace.waiting, list(pace.retries.values()), list(pace.sent.values())
        if held:
            limit = "the rate limit (429)" if pace.limited_until > now else "--rpm"
            waits.append(f"{limit}: {_count(held, 'request')}, {max(0.0, pace.not_before - now):.0f} s")
        if due:
            why, at = min(due, key=lambda one: one[1])
            waits.append(f"a retry after {why}: {_count(len(due), 'request')}, {max(0.0, at - now):.0f} s")
        if sent and now - min(sent) > slow:
            waits.append(f"a slow endpoint: {_count(len(sent), 'request')}, for {now - min(sent):.0f} s")
        return "; ".join(waits)

    def _keep(self, key: str, texts: list[str]) -> None:
        try:
            if self._cache is not None:
                self._cache.put(key, texts)
        except CacheError as error:
            self.halt(error)  # what can't be kept is not to be paid for
            raise

    def keep_failures(self, errors: Sequence[EndpointError]) -> None:
        """Whoever asked went on without what failed: it fails again, without a request, when the run is repeated."""
        for error in errors:
            if self._cache is not None and error.request is not None and self._cache.get(error.request) is None:
                self._cache.put(error.request, str(error))

    async def aclose(self) -> None:
        await self._wire.aclose()
        if self._cache is not None:
            self._cache.close()

    async def _request_texts(self, request: Mapping[str, Any]) -> list[str]:
        """`n` texts. A server that knows no `n` is asked once for each."""
        texts: list[str] = []
        async with self._slots:
            while len(texts) < request["n"]:
                if self._pace.halted is not None:
                    raise self._pace.halted
                left = request["n"] - len(texts)
                seed = None if request["seed"] is None else request["seed"] + len(texts)
                one = {**request, "n": left, "seed": seed}
                most = request["max_tokens"] * left
                texts += (await self._request("chat/completions", one, request["messages"], most, _texts))[:left]
        return texts

    async def _request_vectors(self, request: Mapping[str, Any]) -> list[str]:
        async with self._slots:
            if self._pace.halted is not None:
                raise self._pace.halted
            vectors = functools.partial(_vectors, count=len(request["input"]))
            return await self._request("embeddings", request, request["input"], 0, vectors)

    async def _request(
        self,
        route: str,
        request: Mapping[str, Any],
        sent: Sequence[Any],
        most: int,
        said: Callable[[Mapping[str, Any], str], list[str]],
    ) -> list[str]:
        """What one request comes to, which the budget admits and is charged for: `sent`, and `most` tokens of reply."""
        guessed = tokens_of(sent)
        ticket = await self.budget.admit(guessed, most)
        try:
            reply = await self._post(route, request)
            texts = said(reply, self.base_url)
        except BaseException:
            await asyncio.shield(self.budget.release(ticket))
            raise
        usage = reply.get("usage")
        told = usage if isinstance(usage, dict) else {}
        read, written = told.get("prompt_tokens"), told.get("completion_tokens")
        await self.budget.settle(
            ticket,
            read if isinstance(read, int) else guessed,
            written if isinstance(written, int) else min(most, sum(map(tokens_of, texts))),
        )
        return texts

    async def _post(self, route: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """One answer, after as many attempts as it takes and is allowed."""
        started, failed = time.monotonic(), 0
        while True:
            await self._wait_turn()
            if failed and self._pace.halted is not None:
                raise self._pace.halted
            body = self._body(request)
            self._pace.sent[id(request)] = time.monotonic()
            try:
                reply = await self._wire.post(route, body)
                self._pace.answered = True
                return reply
            except EngineUnavailable as error:
                failed += 1
                del self._pace.sent[id(request)]
                await self._pause(error, failed, time.monotonic() - started, id(request))
            except RequestRefused as refused:
                if not self._drop_parameter(refused, body):
                    # perhaps for what this one says, as a content filter does
                    raise EndpointError(f"{self.base_url} rejected the request: {refused}") from refused
            except EngineError as error:
                if isinstance(error, ContextOverflow):
                    raise
                raise EndpointError(str(error), permanent=True) from error  # the next would fare no better
            finally:
                self._pace.sent.pop(id(request), None)

    async def _wait_turn(self) -> None:
        """Wait for what a 429 said, and for the rate."""
        while (wait := self._pace.not_before - time.monotonic()) > 0:
            self._pace.waiting += 1
            try:
                await asyncio.sleep(wait)
            finally:
                self._pace.waiting -= 1
        if self._apart:
            self._pace.not_before = max(self._pace.not_before, time.monotonic()) + self._apart

    async def _pause(self, error: EngineUnavailable, failed: int, waited: float, request: int) -> None:
        wait = pause(min(failed - 1, 6), error.retry_after)
        if error.status == 429:
            if "exceeded your current quota" in str(error):
                raise EndpointError(str(error), permanent=True) from error
            if waited + wait > self._patience:
                raise EndpointError(
                    f"{error}, for {waited:.0f} s ({failed} attempts); lower --concurrency or set --rpm, and "
                    "continue with --resume",
                    permanent=True,
                ) from error
            self._pace.not_before = self._pace.limited_until = max(self._pace.not_before, time.monotonic() + wait)
            self._refusals.record(429, wait)
            return
        never = error.status is None and not self._pace.answered and failed > 1
        if failed > self.retries or never:
            tried = "" if failed == 1 else f" ({failed} attempts)"
            raise EndpointError(f"{error}{tried}") from error
        if error.status is not None:
            self._refusals.record(error.status, wait)
        why = "a lost connection" if error.status is None else str(error.status)
        self._pace.retries[request] = why, time.monotonic() + wait
        try:
            await asyncio.sleep(wait)
        finally:
            del self._pace.retries[request]

    def _body(self, request: Mapping[str, Any]) -> dict[str, Any]:
        unsaid = {*self._unknown, *(name for name, usual in (("seed", None), ("n", 1)) if request.get(name) == usual)}
        body = {"model": self.model, **{name: value for name, value in request.items() if name not in unsaid}}
        if "max_tokens" in self._unknown and "max_tokens" in request:
            body["max_completion_tokens"] = request["max_tokens"]
        return body

    def _drop_parameter(self, refused: RequestRefused, body: Mapping[str, Any]) -> bool:
        """Whether the refusal names a parameter that can be said otherwise, or left out, from now on."""
        said = f"{refused.parameter} {refused}"
        known = [name for name in ("max_tokens", "temperature", "seed", "n", "response_format") if name in body]
        named = next(
            (one for one in known if refused.parameter == one or f"'{one}'" in said or f"`{one}`" in said), None
        )
        # servers of many makes say of a schema only that it is unexpected
        named = named or ("response_format" if "response_format" in known else None)
        if named is not None:
            self._unknown.add(named)
        return named is not None


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _texts(reply: Mapping[str, Any], where: str) -> list[str]:
    try:
        read = read_reply(reply, "chat/completions", where)
    except EngineUnavailable as wrong:
        raise EndpointError(str(wrong)) from wrong
    contents = [choice.message and choice.message.content for choice in read.choices]
    return [content if isinstance(content, str) else "" for content in contents]


def _vectors(reply: Mapping[str, Any], where: str, count: int) -> list[str]:
    """The vectors of an answer in the order of the texts, as base64."""
    try:
        items = sorted(reply["data"], key=lambda item: item["index"])
        vectors = [array("f", item["embedding"]) for item in items]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise EndpointError(f"{where} returned no embeddings: {str(dict(reply))[:120]}", permanent=True) from error
    if len(vectors) != count or len({len(one) for one in vectors}) > 1:
        raise EndpointError(f"{where} returned {len(vectors)} embeddings for {count} texts", permanent=True)
    if not all(one and math.isfinite(sum(one)) for one in vectors):
        raise EndpointError(f"{where} returned an embedding with missing or invalid numbers (NaN)")
    return [base64.b64encode(one.tobytes()).decode() for one in vectors]


def local_url(checkpoint: Path) -> str:
    """Which checkpoint a reply is of: by the sizes and times of its files, for to read them would take long."""
    files = sorted(file for file in checkpoint.iterdir() if file.is_file())
    told = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return f"local://{hashlib.blake2b(repr(told).encode(), digest_size=8).hexdigest()}"
