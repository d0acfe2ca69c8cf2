"""The model behind a judge: asked for one JSON object by a schema, again where the reply is none, and never twice.

A verdict that cannot be read raises NoReward; nothing is ever made of it, and none of what the reply quotes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import inspect
import json
import math
import os
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from ajet_sdk.addresses import public
from ajet_sdk.agent.agentscope import dashscope_keys
from ajet_sdk.agent.model import Model
from ajet_sdk.config.api_keys import api_key as user_key
from ajet_sdk.config.objects import load_object
from ajet_sdk.dialects.finish import finish_of
from ajet_sdk.engines.budget import Budget, Price, Usage, metered
from ajet_sdk.engines.client import ModelClient
from ajet_sdk.engines.http import Endpoint
from ajet_sdk.engines.reply_cache import IN_MEMORY
from ajet_sdk.engines.scripted import InProcess, ScriptedEngine
from ajet_sdk.errors import (
    AjetError,
    ConfigError,
    ContextOverflow,
    EndpointMisconfigured,
    MissingResource,
    NoReward,
    RequestRefused,
)
from ajet_sdk.judges.reply_objects import object_in

T = TypeVar("T")

DASHSCOPE = "https://dashscope.aliyuncs.com/compatible-mode/v1"
_SHOWN = 160
"""Characters of a reply that an error quotes."""


class JudgeModel:
    """Asks a model for JSON objects.

    The schema goes along as `response_format`; a server that knows none is asked for an object, or else for nothing. A
    reply that `read` makes nothing of is answered with what is wrong with it, `retries` times. An equal request, in
    this process or with `cache` in any, is not made again. Calls within an episode are recorded in its trace as its
    judge's.

    Args:
        model: a handle, or a client with a budget and a cache of its own.
        cache: a file in which the replies to a handle are kept for other processes.
        price: of a handle's tokens.
    """

    def __init__(
        self,
        model: Model | ModelClient,
        *,
        temperature: float = 0.0,
        max_tokens: int = 1024,
        retries: int = 2,
        cache: str | Path | None = None,
        price: Price | None = None,
    ) -> None:
        self.model = model
        self.temperature: float = temperature
        self.max_tokens: int = max_tokens
        self.retries: int = retries
        self.cache: Path | None = None if cache is None else Path(cache)
        self.price = price

    @functools.cached_property
    def client(self) -> ModelClient:
        """The client that sends and counts requests; opened at the first request."""
        if isinstance(self.model, ModelClient):
            return self.model
        model = self.model  # its endpoint waits and sends again
        return ModelClient(
            model.base_url, model.name, transport=model.endpoint, budget=Budget(price=self.price),
            cache=self.cache or IN_MEMORY, concurrency=sys.maxsize, retries=0, patience=None,
        )  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        """What was asked here is not known in another process, unless there is a file."""
        return {name: value for name, value in vars(self).items() if name != "client"}

    @property
    def name(self) -> str:
        return self.model.model if isinstance(self.model, ModelClient) else self.model.name

    @property
    def spent(self) -> Usage:
        """All that the model was asked in this process, with the replies that no verdict could be read of."""
        return self.client.budget.spent

    def __repr__(self) -> str:
        return f"JudgeModel({self.name!r} at {public(self.model.base_url)})"

    async def ask(
        self,
        messages: Sequence[Mapping[str, object]],
        schema: Mapping[str, Any],
        read: Callable[[Mapping[str, Any]], T],
        *,
        quoted: Sequence[str],
        repeat: int = 0,
    ) -> T:
        """What `read` makes of the JSON object in the reply; it raises ValueError with what is wrong with one.

        `quoted`: what is judged, and whatever else of strangers is in the messages; beside a text of these that names a
        field only an object alone is a verdict (`object_in`). `reason` decides nothing. Another `repeat` asks anew.

        Raises NoReward where no reply could be read or the model refuses the request,
        EngineUnavailable where it does not answer, CacheError, BudgetSpent.
        """
        request = {
            "messages": list(messages), "schema": schema, "temperature": self.temperature,
            "max_tokens": self.max_tokens, "repeat": repeat,
        }  # fmt: skip
        fields = [name for name in schema["properties"] if name != "reason"]

        def verdict(text: str) -> T:
            return read(object_in(text, fields, quoted))

        async def answer() -> list[str]:
            return [await self._answer(messages, schema, verdict)]

        # A client's run is repeated with what was kept: a reply that is no verdict is none the next time too.
        kept_errors = (NoReward,) if isinstance(self.model, ModelClient) else ()
        try:
            [text] = await self.client.once(request, answer, kept_errors)
        except RequestRefused as kept:
            raise NoReward(str(kept)) from kept
        with contextlib.suppress(ValueError):  # another version of ajet kept what it took for a verdict
            return verdict(text)
        return verdict(await self._answer(messages, schema, verdict))

    async def _answer(
        self, messages: Sequence[Mapping[str, Any]], schema: Mapping[str, Any], verdict: Callable[[str], object]
    ) -> str:
        """A reply that can be read."""
        conversation, wrong = [dict(message) for message in messages], ""
        by_schema = {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": dict(schema)}}
        for _ in range(self.retries + 1):
            try:
                [reply, *_rest] = await self.client.reply(
                    conversation, temperature=self.temperature, max_tokens=self.max_tokens, response_format=by_schema
                )
            except (ContextOverflow, RequestRefused) as refused:  # the judge's fault, and not the agent's
                raise NoReward(f"the judge's model {self.name} rejected the request: {refused}") from refused
            except EndpointMisconfigured as misconfigured:
                keys = "" if self.model is self.client else " (task_judge.llm: model, base_url, api_key_env)"
                raise EndpointMisconfigured(f"the judge's model {self.name}: {misconfigured}{keys}") from misconfigured
            try:
                if finish_of(reply.finish_reason) == "length":
                    raise ValueError(f"it is cut at {self.max_tokens} tokens (max_tokens)")
                verdict(reply.text)
            except ValueError as error:
                wrong = f"{error} (it said {' '.join(reply.text.split())[:_SHOWN]!r})"
                asked = {"role": "user", "content": f"That is no verdict: {error}. Reply with the JSON object alone."}
                conversation = [
                    *map(dict, messages), {"role": "assistant", "content": reply.text or "(nothing)"}, asked
                ]  # fmt: skip
                continue
            return reply.text
        raise NoReward(f"no verdict from the judge's model {self.name} in {self.retries + 1} replies: {wrong}")


@contextlib.contextmanager
def counted() -> Iterator[Usage]:
    """Counts the usage of a verdict; without a verdict, the error carries it to the episode."""
    with metered() as usage:
        try:
            yield usage
        except AjetError as error:
            error.metrics = usage_metrics(usage)
            raise


async def gather(asked: Sequence[Awaitable[T]]) -> list[T]:
    """Each; where one fails, after the others have come back, for they are paid for. Raises the first error."""
    results = await asyncio.gather(*asked, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast("list[T]", results)


def usage_metrics(usage: Usage) -> dict[str, float]:
    """The usage of a verdict as metrics of its episode; they are logged as means over the episodes of a step."""
    counts = {"judge_calls": usage.calls, "judge_tokens": usage.tokens, "judge_cached": usage.cached}
    cost = {} if usage.cost is None else {"judge_cost": usage.cost}
    return {**{name: float(count) for name, count in counts.items()}, **cost}


class ScriptedModel(Model):
    """A function that replies in place of an endpoint. Its calls are recorded as an endpoint's are.

    Raises ConfigError where `class_path` leads to no function.
    """

    def __init__(self, class_path: str, relative_to: Path | None = None, name: str | None = None) -> None:
        self._given = (class_path, relative_to, name)
        replies = load_object(class_path, relative_to)
        source = inspect.getsourcefile(replies)
        content = Path(source).read_bytes() if source else class_path.encode()
        # A function that was changed is another model to the caches.
        digest = hashlib.blake2b(content, digest_size=8).hexdigest()
        super().__init__(f"http://127.0.0.1/scripted/{digest}/v1", "none", name or "scripted")
        self._engine = InProcess(ScriptedEngine(replies), limited=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return ScriptedModel, self._given

    @functools.cached_property
    def endpoint(self) -> Endpoint:
        import httpx

        async def answer(request: httpx.Request) -> httpx.Response:
            return httpx.Response(200, json=await self._engine.post("chat/completions", json.loads(request.content)))

        return Endpoint(self.base_url, self.api_key, timeout=self.timeout, transport=httpx.MockTransport(answer))


def open_model(
    name: str | None, base_url: str | None = None, api_key: str | None = None, api_key_env: str = "OPENAI_API_KEY"
) -> Model:
    """The model that a judge asks, at `base_url`, OPENAI_BASE_URL, or DashScope where only its key is there.

    Raises ConfigError where no name or no endpoint is given.
    """
    name = name or os.environ.get("OPENAI_MODEL")
    if not name:
        raise ConfigError("the judge needs a model: set task_judge.llm.model or OPENAI_MODEL")
    keys = dashscope_keys()
    url = base_url or os.environ.get("OPENAI_BASE_URL")
    if url is None and not keys:
        raise MissingResource(
            f"no endpoint for the judge's model {name}: set task_judge.llm.base_url or OPENAI_BASE_URL "
            "(https://api.openai.com/v1) and OPENAI_API_KEY, or DASHSCOPE_API_KEY for DashScope"
        )
    key = api_key or user_key(api_key_env) or (keys[0] if keys else "none")
    if url is None or (url == DASHSCOPE and keys):
        url, key = url or DASHSCOPE, api_key or keys[0]
    return Model(url, key, name)


def object_schema(**properties: object) -> dict[str, Any]:
    """The JSON schema of an object that has these properties, all of them and no other."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def number_in(value: object) -> float | None:
    """A finite number, also where it is written as text."""
    try:
        number = float(value) if isinstance(value, str | float | int) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
