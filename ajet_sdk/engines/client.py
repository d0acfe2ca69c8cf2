"""`ModelClient`: a model at an endpoint, asked with bounded concurrency, retries, a rate, a cache and a budget."""

from __future__ import annotations

import asyncio
import base64
import copy
import functools
import math
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ajet_sdk.engines.budget import Budget, tokens_of
from ajet_sdk.engines.http import Endpoint
from ajet_sdk.engines.pace import Pace
from ajet_sdk.engines.reply_cache import CacheError, ReplyCache, Shared
from ajet_sdk.engines.reply_schema import read_reply
from ajet_sdk.errors import AjetError, EngineError, EngineUnavailable, RequestRefused

T = TypeVar("T")
Message = Mapping[str, Any]
_OPTIONAL = ("response_format", "max_tokens", "temperature", "seed", "n")
"""Parameters that a server may not know."""


class Halted(EngineError):
    """The request was not sent: the run is ending."""


class Transport(Protocol):
    """Posts JSON: an `Endpoint`, or what answers in this process."""

    def post(self, route: str, body: Mapping[str, object]) -> Coroutine[Any, Any, dict[str, Any]]: ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True)
class TextReply:
    """The text of a choice, and why it ended; `finish_reason` is the server's word."""

    text: str
    finish_reason: str | None


class ModelClient:
    """Asks a model, at most `concurrency` requests at once; it may be awaited by any number of tasks.

    Requests are sent and sent again as `Pace` says; 4xx never are, but for a parameter that the server refuses, which
    is left out from then on. Every answer is charged to the budget, also where nothing can be read of it. With `cache`,
    a reply is kept in that file by endpoint, model, messages and parameters, and costs nothing the second time.
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
        patience: float | None = 300.0,
        per_minute: float | None = None,
        timeout: float = 600.0,
        transport: Transport | None = None,
    ) -> None:
        """Where `concurrency` makes requests wait, the client belongs to one event loop. `patience`: see `Pace`."""
        self.base_url: str = base_url.rstrip("/")
        self.model = model
        self.concurrency = concurrency
        self.budget: Budget = budget if budget is not None else Budget()
        self.retries = retries
        self.cache = cache
        self._transport = transport or Endpoint(self.base_url, api_key or "none", timeout=timeout, retries=0)
        self._cache = ReplyCache(cache) if cache is not None else None
        self._slots = asyncio.Semaphore(concurrency)
        remedy = "To send fewer requests, lower --concurrency or set --rpm, and continue with --resume"
        self._pace = Pace(self.base_url, remedy, retries=retries, patience=patience, per_minute=per_minute)
        self._shared = Shared[list[str]]()
        self._unknown: set[str] = set()
        """Of `_OPTIONAL`, and schemas (`json_schema`), those that the server refused."""

    def counted_apart(self) -> ModelClient:
        """The same client, its connections and limits, for another who asks it: what that one spends is counted."""
        other = copy.copy(self)
        other.budget = self.budget.part(self.budget.price)
        return other

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        n: int = 1,
        temperature: float = 1.0,
        max_tokens: int = 2048,
        seed: int | None = None,
    ) -> list[str]:
        """The texts of `n` replies. Raises BudgetSpent, EngineError, CacheError.

        Equal requests under way at the same time are one request. Another `seed` makes it another.
        """
        request = {"messages": list(map(dict, messages)), "n": n, "temperature": temperature,
                   "max_tokens": max_tokens, "seed": seed}  # fmt: skip

        async def ask() -> list[str]:
            texts: list[str] = []
            while len(texts) < n:  # a server that knows no `n` is asked once for each
                replies = await self.reply(
                    messages, n=n - len(texts), temperature=temperature, max_tokens=max_tokens,
                    seed=None if seed is None else seed + len(texts),
                )  # fmt: skip
                texts += [reply.text for reply in replies]
            return texts[:n]

        return await self.once(request, ask)

    async def reply(
        self,
        messages: Sequence[Message],
        *,
        n: int = 1,
        temperature: float = 1.0,
        max_tokens: int = 2048,
        seed: int | None = None,
        response_format: Mapping[str, object] | None = None,
    ) -> list[TextReply]:
        """The replies to one request, not kept; at least one. Raises BudgetSpent, EngineError."""
        request = {"messages": [dict(message) for message in messages], "temperature": temperature,
                   "max_tokens": max_tokens,
                   **({"n": n} if n != 1 else {}), **({"seed": seed} if seed is not None else {}),
                   **({"response_format": response_format} if response_format is not None else {})}  # fmt: skip
        return await self._request("chat/completions", request, messages, max_tokens * n, self._read_choices)

    async def embed(self, texts: Sequence[str]) -> list[str]:
        """A vector for each text, by `embeddings`: its 32-bit floats in base64. Kept, paid for and raising as `chat`.

        An empty text is sent as a blank: some servers refuse it.
        """
        request = {"input": [text or " " for text in texts]}
        read = functools.partial(_vectors, where=self.base_url, count=len(texts))
        return await self.once(request, lambda: self._request("embeddings", request, request["input"], 0, read))

    async def once(
        self,
        request: Mapping[str, object],
        ask: Callable[[], Awaitable[list[str]]],
        kept_errors: tuple[type[AjetError], ...] = (),
    ) -> list[str]:
        """The cached result of a request, or that of an equal one in flight, or else a new one, which is cached.

        Of `kept_errors` the message is kept too, which RequestRefused says the next time.
        """
        key = ReplyCache.key({"base_url": self.base_url, "model": self.model, **request})

        async def ask_and_keep() -> list[str]:
            if self._cache is not None and (kept := self._cache.get(key)) is not None:
                self.budget.record_cached()
                if isinstance(kept, str):
                    raise RequestRefused(kept)
                return kept
            try:
                texts = await ask()
            except kept_errors as error:
                self._keep(key, str(error))
                raise
            except EngineError as error:
                error.request = key
                raise
            self._keep(key, texts)
            return texts

        texts, shared = await self._shared.get(key, ask_and_keep)
        if shared:
            self.budget.record_cached()
        return list(texts)

    def _keep(self, key: str, texts: list[str] | str) -> None:
        try:
            if self._cache is not None:
                self._cache.put(key, texts)
        except CacheError as error:
            self.halt(error)  # what can't be kept is not to be paid for
            raise

    def keep_failures(self, errors: Sequence[AjetError]) -> None:
        """Whoever asked went on without what failed: it fails again, without a request, when the run is repeated."""
        for error in errors:
            key = error.request if isinstance(error, EngineUnavailable | RequestRefused) else None
            if self._cache is not None and key is not None and self._cache.get(key) is None:
                self._cache.put(key, str(error))

    def halt(self, why: AjetError | None = None) -> None:
        """Send nothing more: requests that wait for their turn raise `why`, or Halted; those under way come back."""
        self._pace.halt(why or Halted("not sent: the run is ending"))

    def describe_wait(self, slow: float = 10.0) -> str:
        """The reason why its requests wait, as in `Pace.describe_wait`."""
        return self._pace.describe_wait(slow)

    async def aclose(self) -> None:
        await self._transport.aclose()
        if self._cache is not None:
            self._cache.close()

    async def _request(
        self,
        route: str,
        request: Mapping[str, object],
        prompt: Sequence[object],
        most_output: int,
        read: Callable[[Mapping[str, object]], list[T]],
    ) -> list[T]:
        """What `read` makes of one answer, which the budget admits and is charged for."""
        async with self._slots:
            self._pace.check_halted()
            guessed = tokens_of(prompt)
            reserved = await self.budget.admit(guessed, most_output)
            try:
                answer = await self._post(route, request)
            except BaseException:
                self.budget.release(reserved)
                raise
            usage = answer.get("usage")
            usage = usage if isinstance(usage, dict) else {}
            input_tokens, output_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
            if not isinstance(output_tokens, int):
                output_tokens = min(most_output, _guess_tokens(answer))
            self.budget.settle(reserved, input_tokens if isinstance(input_tokens, int) else guessed, output_tokens)
            return read(answer)

    async def _post(self, route: str, request: Mapping[str, object]) -> dict[str, Any]:
        """One answer; a parameter that the server refuses is said otherwise, or left out, from then on."""
        while True:
            body = self._body(request)
            try:
                return await self._pace.send(functools.partial(self._transport.post, route, body))
            except RequestRefused as refused:
                if not self._drop_parameter(refused, body):
                    raise

    def _body(self, request: Mapping[str, object]) -> dict[str, Any]:
        body = {"model": self.model, **{name: value for name, value in request.items() if name not in self._unknown}}
        if "max_tokens" in self._unknown and "max_tokens" in request:
            body["max_completion_tokens"] = request["max_tokens"]
        if "json_schema" in self._unknown and "response_format" in body:
            body["response_format"] = {"type": "json_object"}
        return body

    def _drop_parameter(self, refused: RequestRefused, body: Mapping[str, object]) -> bool:
        """Whether the refusal names a parameter that can be said otherwise, or left out, from now on."""
        message = f"{refused.parameter} {refused}"
        sent = [name for name in _OPTIONAL if name in body]
        named = next((name for name in sent if refused.parameter == name or f"'{name}'" in message
                      or f"`{name}`" in message), None)  # fmt: skip
        # servers of many makes say of a schema only that it is unexpected
        named = named or ("response_format" if "response_format" in sent else None)
        if named == "response_format" and "json_schema" not in self._unknown:
            named = "json_schema"
        if named is not None:
            self._unknown.add(named)
        return named is not None

    def _read_choices(self, answer: Mapping[str, object]) -> list[TextReply]:
        choices = read_reply(answer, "chat/completions", self.base_url).choices
        contents = [choice.message and choice.message.content for choice in choices]
        return [
            TextReply(content if isinstance(content, str) else "", choice.finish_reason)
            for choice, content in zip(choices, contents, strict=True)
        ]


def _guess_tokens(answer: Mapping[str, Any]) -> int:
    """Tokens of the texts in an answer, whatever its shape; none of an embedding."""
    try:
        contents = [choice["message"].get("content") or "" for choice in answer["choices"]]
    except (KeyError, TypeError, AttributeError):
        return 0
    return sum(map(tokens_of, contents))


def _vectors(answer: Mapping[str, Any], where: str, count: int) -> list[str]:
    """The vectors of an answer in the order of the texts, as base64."""
    try:
        items = sorted(answer["data"], key=lambda item: item["index"])
        vectors = [array("f", item["embedding"]) for item in items]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise EngineError(f"{where} returned no embeddings: {str(dict(answer))[:120]}") from error
    if len(vectors) != count or len({len(vector) for vector in vectors}) > 1:
        raise EngineError(f"{where} returned {len(vectors)} embeddings for {count} texts")
    if not all(vector and math.isfinite(sum(vector)) for vector in vectors):
        raise EngineUnavailable(f"{where} returned an embedding with missing or invalid numbers (NaN)")
    return [base64.b64encode(vector.tobytes()).decode() for vector in vectors]
