"""The model behind a judge: requests a JSON object by schema, retries invalid replies, and caches
valid ones.

A verdict is a reply that is nothing but the object, or an object with the key of the request, which
no judged text can know. Anything else in a reply may be a quote of what is judged. A reply without
a verdict raises NoReward.
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
import re
import secrets
import string
import sys
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
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

T = TypeVar("T")

DASHSCOPE = "https://dashscope.aliyuncs.com/compatible-mode/v1"
_SHOWN = 160
"""Characters of a reply that an error quotes."""


@dataclass(eq=False, repr=False)
class JudgeModel:
    """Requests JSON objects from a model.

    The schema is sent as `response_format`; if the server rejects it, a plain JSON object is
    requested, or nothing. If `read` rejects a reply, the model is told why, up to `retries` times.
    Equal requests are sent once in this process, or with `cache` in all processes. Calls within an
    episode are recorded in its trace as the judge's.

    Args:
        model: a handle, or a client with its own budget and cache.
        cache: a file that shares replies to a handle between processes.
        price: of the tokens of a handle.
    """

    model: Model | ModelClient
    _: KW_ONLY
    temperature: float = 0.0
    max_tokens: int = 1024
    retries: int = 2
    cache: str | Path | None = None
    price: Price | None = None

    @functools.cached_property
    def client(self) -> ModelClient:
        """The client that sends and counts requests; opened at the first request."""
        if isinstance(self.model, ModelClient):
            return self.model
        model = self.model  # its endpoint waits and retries
        return ModelClient(
            model.base_url,
            model.name,
            transport=model.endpoint,
            budget=Budget(price=self.price),
            cache=IN_MEMORY if self.cache is None else Path(self.cache),
            concurrency=sys.maxsize,
            retries=0,
            patience=None,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the client: another process shares replies only by a cache file."""
        return {name: value for name, value in vars(self).items() if name != "client"}

    @property
    def name(self) -> str:
        if isinstance(self.model, ModelClient):
            return self.model.model
        return self.model.name

    @property
    def spent(self) -> Usage:
        """Usage of this model in this process, including invalid replies."""
        return self.client.budget.spent

    def __repr__(self) -> str:
        return f"JudgeModel({self.name!r} at {public(self.model.base_url)})"

    async def ask(
        self,
        messages: Sequence[Mapping[str, object]],
        schema: Mapping[str, Any],
        read: Callable[[Mapping[str, Any]], T],
        *,
        repeat: int = 0,
    ) -> T:
        """Requests a JSON object and parses it with `read`, which raises ValueError for an invalid
        one.

        The field `reason` is free text. A different `repeat` bypasses earlier replies.

        Raises NoReward if no reply is valid or the model refuses the request, EngineUnavailable if
        it does not answer, CacheError, BudgetSpent.
        """
        request = {
            "messages": list(messages), "schema": schema, "temperature": self.temperature,
            "max_tokens": self.max_tokens, "repeat": repeat,
        }  # fmt: skip

        async def answer() -> list[str]:
            return [json.dumps(await self._answer(messages, schema, read))]

        # A client repeats a run from its cache, including failures.
        kept_errors = (NoReward,) if isinstance(self.model, ModelClient) else ()
        try:
            [text] = await self.client.once(request, answer, kept_errors)
        except RequestRefused as kept:
            raise NoReward(str(kept)) from kept
        with contextlib.suppress(
            ValueError
        ):  # another version of ajet may have cached an invalid reply
            return read(object_in(text, _stating(schema)))
        return read(await self._answer(messages, schema, read))

    async def _answer(
        self,
        messages: Sequence[Mapping[str, Any]],
        schema: Mapping[str, Any],
        read: Callable[[Mapping[str, Any]], T],
    ) -> dict[str, Any]:
        """Requests until a reply is valid, and returns its object."""
        key = secrets.token_hex(6)
        *earlier, last = map(dict, messages)
        begin = f'Begin the object with "{KEY}": "{key}".'
        if isinstance(last["content"], list):  # with pictures
            last["content"] = [*last["content"], {"type": "text", "text": begin}]
        else:
            last["content"] = f"{last['content']}\n\n{begin}"
        asked = [*earlier, last]
        conversation = asked
        wrong = ""
        # The schema does not name the key: a server compiles each new schema.
        whole = {**schema, **object_schema(**{KEY: {"type": "string"}, **schema["properties"]})}
        by_schema = {
            "type": "json_schema",
            "json_schema": {"name": "verdict", "strict": True, "schema": whole},
        }
        for _ in range(self.retries + 1):
            try:
                [reply, *_rest] = await self.client.reply(
                    conversation,
                    temperature=self.temperature,
                    max_tokens=self.max_tokens,
                    response_format=by_schema,
                )
            except (
                ContextOverflow,
                RequestRefused,
            ) as refused:  # an error of the judge, not of the agent
                raise NoReward(
                    f"the judge's model {self.name} rejected the request: {refused}"
                ) from refused
            except EndpointMisconfigured as misconfigured:
                if self.model is self.client:
                    keys = ""
                else:
                    keys = " (task_judge.llm: model, base_url, api_key_env)"
                raise EndpointMisconfigured(
                    f"the judge's model {self.name}: {misconfigured}{keys}"
                ) from misconfigured
            try:
                if finish_of(reply.finish_reason) == "length":
                    raise ValueError(f"it is cut at {self.max_tokens} tokens (max_tokens)")
                stated = object_in(reply.text, _stating(schema), key)
                read(stated)
            except ValueError as error:
                wrong = f"{error} (it said {' '.join(reply.text.split())[:_SHOWN]!r})"
                again = f"That is no verdict: {error}. Reply with the JSON object alone."
                conversation = [
                    *asked,
                    {"role": "assistant", "content": reply.text or "(nothing)"},
                    {"role": "user", "content": again},
                ]
                continue
            return stated
        raise NoReward(
            f"no verdict from the judge's model {self.name} in {self.retries + 1} replies: {wrong}"
        )


@contextlib.contextmanager
def counted() -> Iterator[Usage]:
    """Counts the usage of a verdict; if there is none, adds the usage to the error."""
    with metered() as usage:
        try:
            yield usage
        except AjetError as error:
            error.metrics = usage_metrics(usage)
            raise


async def gather(asked: Sequence[Awaitable[T]]) -> list[T]:
    """Awaits all, since each request is paid for, then raises the first error."""
    results = await asyncio.gather(*asked, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast("list[T]", results)


def usage_metrics(usage: Usage) -> dict[str, float]:
    """Usage as metrics of an episode; a step logs their means."""
    counts = {
        "judge_calls": usage.calls,
        "judge_tokens": usage.tokens,
        "judge_cached": usage.cached,
    }
    cost = {} if usage.cost is None else {"judge_cost": usage.cost}
    return {**{name: float(count) for name, count in counts.items()}, **cost}


class ScriptedModel(Model):
    """A function that replies in place of an endpoint. Its calls are recorded in the same way.

    Raises ConfigError if `class_path` leads to no function.
    """

    def __init__(
        self, class_path: str, relative_to: Path | None = None, name: str | None = None
    ) -> None:
        self._given = (class_path, relative_to, name)
        replies = load_object(class_path, relative_to)
        source = inspect.getsourcefile(replies)
        content = Path(source).read_bytes() if source else class_path.encode()
        # The digest keeps caches from using replies of an earlier version of the function.
        digest = hashlib.blake2b(content, digest_size=8).hexdigest()
        super().__init__(f"http://127.0.0.1/scripted/{digest}/v1", "none", name or "scripted")
        self._engine = InProcess(ScriptedEngine(replies), limited=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return ScriptedModel, self._given

    @functools.cached_property
    def endpoint(self) -> Endpoint:
        import httpx

        async def answer(request: httpx.Request) -> httpx.Response:
            return httpx.Response(
                200, json=await self._engine.post("chat/completions", json.loads(request.content))
            )

        return Endpoint(
            self.base_url, self.api_key, timeout=self.timeout, transport=httpx.MockTransport(answer)
        )


def open_model(
    name: str | None,
    base_url: str | None = None,
    api_key: str | None = None,
    api_key_env: str = "OPENAI_API_KEY",
) -> Model:
    """Opens a judge's model at `base_url`, OPENAI_BASE_URL, or DashScope if only its key is set.

    Raises ConfigError without a name, MissingResource without an endpoint.
    """
    name = name or os.environ.get("OPENAI_MODEL")
    if not name:
        raise ConfigError("the judge needs a model: set task_judge.llm.model or OPENAI_MODEL")
    keys = dashscope_keys()
    url = base_url or os.environ.get("OPENAI_BASE_URL")
    if url is None and not keys:
        raise MissingResource(
            f"no endpoint for the judge's model {name}: set task_judge.llm.base_url or"
            " OPENAI_BASE_URL (https://api.openai.com/v1) and OPENAI_API_KEY, or DASHSCOPE_API_KEY"
            " for DashScope"
        )
    key = api_key or user_key(api_key_env) or (keys[0] if keys else "none")
    if url is None or (url == DASHSCOPE and keys):
        url = url or DASHSCOPE
        key = api_key or keys[0]
    return Model(url, key, name)


def object_schema(**properties: object) -> dict[str, Any]:
    """JSON schema of an object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def number_in(value: object) -> float | None:
    """Parses a finite number, also from text."""
    try:
        if isinstance(value, str | float | int) and not isinstance(value, bool):
            number = float(value)
        else:
            number = math.nan
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


KEY = "key"
"""Field with the key of the request."""
_FENCES = ("```", "~~~")
_MOST_OBJECTS = 1000
"""Places in a reply where an object may begin; each is read to the end of the object."""


def _stating(schema: Mapping[str, Any]) -> list[str]:
    return [name for name in schema["properties"] if name not in ("reason", KEY)]


def object_in(reply: str, fields: Collection[str], key: str = "") -> dict[str, Any]:
    """Extracts the verdict of a reply: the reply if it is one JSON object, else the object in it
    with the key.

    A code fence and thoughts between `<think>` tags may stand around an object alone. Any other
    word may belong to a quote of the judged text, whose object then stands for the verdict,
    whatever the quote looks like.

    Args:
        reply: the model's text, with its thoughts.
        fields: names of which an object must have one.
        key: of the request; empty: only an object alone counts.

    Raises ValueError if there is none, if two differ, and if a quote in it breaks the object: it is
    not JSON, repeats a field, or a field stands outside of it.
    """
    alone = _object(_without_fence(_without_thoughts(reply.strip())))
    if alone is not None and any(name in alone for name in fields):
        return alone
    objects, outside = _objects(reply)
    keyed = [
        value
        for value in objects
        if key and value.get(KEY) == key and any(name in value for name in fields)
    ]
    different = [value for place, value in enumerate(keyed) if value not in keyed[:place]]
    if len(different) > 1:
        raise ValueError(f"{len(different)} JSON objects in it differ")
    if not different:
        raise ValueError("it is not one JSON object alone, and no object in it has the key")
    if any(re.search(rf'"{re.escape(name)}"\s{{0,9}}:', outside) for name in fields):
        raise ValueError("the JSON object in it is incomplete: one of its fields is outside it")
    return different[0]


def _without_thoughts(reply: str) -> str:
    """Strips the thoughts that begin a reply; with several closing tags, one may be quoted."""
    if reply.startswith("<think>") and reply.count("</think>") == 1:
        return reply.partition("</think>")[2].strip()
    return reply


def _without_fence(text: str) -> str:
    if len(text) > 6 and text.startswith(_FENCES) and text.endswith(text[:3]):
        return text[3:-3].lstrip(string.ascii_letters + string.digits).strip()
    return text


def _object(text: str) -> dict[str, Any] | None:
    """A text as one JSON object; None for anything else."""
    try:
        value = json.JSONDecoder(strict=False, object_pairs_hook=_once).decode(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _objects(text: str) -> tuple[list[dict[str, Any]], str]:
    """The outermost objects of a text, and the text around them."""
    decoder = json.JSONDecoder(
        strict=False, object_pairs_hook=_once
    )  # a model breaks lines in strings
    objects: list[dict[str, Any]] = []
    outside: list[str] = []
    begun = 0
    position = 0
    for _ in range(_MOST_OBJECTS):
        start = text.find("{", position)
        if start < 0:
            return objects, "".join([*outside, text[begun:]])
        try:
            value, position = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            position = start + 1
            continue
        objects.append(value)
        outside.append(text[begun:start])
        begun = position
    raise ValueError("it has too many braces")


def _once(pairs: list[tuple[str, object]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("an object names a field twice")
    return fields
