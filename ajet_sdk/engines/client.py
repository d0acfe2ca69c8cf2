"""`ModelClient`: requests to a model at an endpoint, with limited concurrency, retries, rate, cache
and budget."""

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
"""Parameters that some servers do not support."""


class Halted(EngineError):
    """The request was not sent: the run is ending."""


class Transport(Protocol):
    """Posts JSON: an `Endpoint`, or an engine in this process."""

    def post(
        self, route: str, body: Mapping[str, object]
    ) -> Coroutine[Any, Any, dict[str, Any]]: ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True)
class TextReply:
    """The text of a choice and its finish reason, as the server sent it."""

    text: str
    finish_reason: str | None


class ModelClient:
    """Sends requests to a model, at most `concurrency` at once; any number of tasks may use it.

    Requests are paced and retried by `Pace`. 4xx are not retried, except without a parameter that
    the server refused, which is left out from then on. Every answer is charged to the budget, even
    an unreadable one. `cache` is a file of replies by endpoint, model, messages and parameters;
    cached replies cost nothing.
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
        """If requests wait for `concurrency`, the client belongs to one event loop. `patience`: see
        `Pace`."""
        self.base_url: str = base_url.rstrip("/")
        self.model = model
        self.concurrency = concurrency
        self.budget: Budget = budget if budget is not None else Budget()
        self.retries = retries
        self.cache = cache
        self._transport = transport or Endpoint(
            self.base_url, api_key or "none", timeout=timeout, retries=0
        )
        self._cache = ReplyCache(cache) if cache is not None else None
        self._slots = asyncio.Semaphore(concurrency)
        remedy = (
            "To send fewer requests, lower the model's concurrency or set its rpm, and continue"
            " with --resume"
        )
        self._pace = Pace(
            self.base_url, remedy, retries=retries, patience=patience, per_minute=per_minute
        )
        self._shared = Shared[list[str]]()
        self._unknown: set[str] = set()
        """Parameters of `_OPTIONAL`, and `json_schema`, that the server refused."""

    def counted_apart(self) -> ModelClient:
        """Return a client with the same connections and limits, and its own count of the cost."""
        client = copy.copy(self)
        client.budget = self.budget.part(self.budget.price)
        return client

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        n: int = 1,
        temperature: float = 1.0,
        max_tokens: int = 2048,
        seed: int | None = None,
    ) -> list[str]:
        """Return the texts of `n` replies. Raises BudgetSpent, EngineError, CacheError.

        Equal requests in flight are sent once; requests with different `seed` are not equal.
        """
        request = {
            "messages": list(map(dict, messages)),
            "n": n,
            "temperature": temperature,
            "max_tokens": max_tokens,
            "seed": seed,
        }

        async def ask() -> list[str]:
            texts: list[str] = []
            while len(texts) < n:  # for servers without `n`
                replies = await self.reply(
                    messages,
                    n=n - len(texts),
                    temperature=temperature,
                    max_tokens=max_tokens,
                    seed=None if seed is None else seed + len(texts),
                )
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
        """Return the replies to a request, at least one, without the cache. Raises BudgetSpent,
        EngineError."""
        request = {
            "messages": [dict(message) for message in messages],
            "temperature": temperature,
            "max_tokens": max_tokens,
            **({"n": n} if n != 1 else {}),
            **({"seed": seed} if seed is not None else {}),
            **({"response_format": response_format} if response_format is not None else {}),
        }
        return await self._request(
            "chat/completions", request, messages, max_tokens * n, self._read_choices
        )

    async def embed(self, texts: Sequence[str]) -> list[str]:
        """Return an embedding of each text, as 32-bit floats in base64. Cached and charged as
        `chat`; raises the same.

        An empty text is sent as a blank, as some servers refuse it.
        """
        request = {"input": [text or " " for text in texts]}
        read = functools.partial(_vectors, where=self.base_url, count=len(texts))
        return await self.once(
            request, lambda: self._request("embeddings", request, request["input"], 0, read)
        )

    async def once(
        self,
        request: Mapping[str, object],
        ask: Callable[[], Awaitable[list[str]]],
        kept_errors: tuple[type[AjetError], ...] = (),
    ) -> list[str]:
        """Return the cached result of a request, the result of an equal one in flight, or a new
        one, which is cached.

        Messages of `kept_errors` are cached, too, and raised as RequestRefused the next time.
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
            self.halt(error)  # without a cache, further replies would be paid again
            raise

    def halt(self, why: AjetError | None = None) -> None:
        """Send no further requests: waiting ones raise `why`, or Halted; those in flight
        complete."""
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
        """Send a request within the budget, charge it, and return its answer as read by `read`."""
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
            input_tokens = usage.get("prompt_tokens")
            output_tokens = usage.get("completion_tokens")
            if not isinstance(output_tokens, int):
                output_tokens = min(most_output, _guess_tokens(answer))
            self.budget.settle(
                reserved, input_tokens if isinstance(input_tokens, int) else guessed, output_tokens
            )
            return read(answer)

    async def _post(self, route: str, request: Mapping[str, object]) -> dict[str, Any]:
        """Post a request, replacing or leaving out parameters that the server refuses, from then
        on."""
        while True:
            body = self._body(request)
            try:
                return await self._pace.send(functools.partial(self._transport.post, route, body))
            except RequestRefused as refused:
                if not self._drop_parameter(refused, body):
                    raise

    def _body(self, request: Mapping[str, object]) -> dict[str, Any]:
        body = {
            "model": self.model,
            **{name: value for name, value in request.items() if name not in self._unknown},
        }
        if "max_tokens" in self._unknown and "max_tokens" in request:
            body["max_completion_tokens"] = request["max_tokens"]
        if "json_schema" in self._unknown and "response_format" in body:
            body["response_format"] = {"type": "json_object"}
        return body

    def _drop_parameter(self, refused: RequestRefused, body: Mapping[str, object]) -> bool:
        """Whether the refusal names a parameter to replace or leave out, which is done from now
        on."""
        message = f"{refused.parameter} {refused}"
        sent = [name for name in _OPTIONAL if name in body]
        named = next(
            (
                name
                for name in sent
                if refused.parameter == name or f"'{name}'" in message or f"`{name}`" in message
            ),
            None,
        )
        # many servers only say that a schema is unexpected
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
    """Estimate the tokens of the texts in an answer; 0 for embeddings and malformed answers."""
    try:
        contents = [choice["message"].get("content") or "" for choice in answer["choices"]]
    except (KeyError, TypeError, AttributeError):
        return 0
    return sum(map(tokens_of, contents))


def _vectors(answer: Mapping[str, Any], where: str, count: int) -> list[str]:
    """The vectors of an answer as base64, in the order of the texts."""
    try:
        items = sorted(answer["data"], key=lambda item: item["index"])
        vectors = [array("f", item["embedding"]) for item in items]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise EngineError(f"{where} returned no embeddings: {str(dict(answer))[:120]}") from error
    if len(vectors) != count or len({len(vector) for vector in vectors}) > 1:
        raise EngineError(f"{where} returned {len(vectors)} embeddings for {count} texts")
    if not all(vector and math.isfinite(sum(vector)) for vector in vectors):
        raise EngineUnavailable(
            f"{where} returned an embedding with missing or invalid numbers (NaN)"
        )
    return [base64.b64encode(vector.tobytes()).decode() for vector in vectors]
