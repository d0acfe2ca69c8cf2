"""The model behind a judge: asked for one JSON object by a schema, again where the reply is none, and never twice.

A verdict that cannot be read raises NoReward; nothing is ever made of it, and none of what the reply quotes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from ajet_sdk.addresses import public
from ajet_sdk.agent.agentscope import dashscope_keys
from ajet_sdk.agent.model import Model
from ajet_sdk.config.api_keys import api_key as user_key
from ajet_sdk.config.objects import load_object
from ajet_sdk.dialects.finish import finish_of
from ajet_sdk.engines.http import Endpoint
from ajet_sdk.engines.reply_cache import Price, ReplyCache, Shared, Usage, tokens_of
from ajet_sdk.engines.scripted import InProcess, ScriptedEngine
from ajet_sdk.errors import (
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
_OPTIONAL = ("response_format", "temperature", "max_tokens")
"""Parameters that a server may not know: they are said otherwise, or left out."""
_SHOWN = 160
"""Characters of a reply that an error quotes."""


@dataclass(frozen=True)
class Asked(Generic[T]):
    """What was read of a reply, and what it took."""

    value: T
    spent: Usage


class Completer(Protocol):
    """What a judge asks: a `Model`, or whatever else answers messages."""

    @property
    def name(self) -> str: ...

    @property
    def base_url(self) -> str: ...

    async def complete(self, messages: Sequence[Mapping[str, Any]], **parameters: Any) -> dict[str, Any]: ...


class JudgeModel:
    """Asks a model for JSON objects.

    The schema goes along as `response_format`; a server that knows none is asked for an object, or else for nothing. A
    reply that `read` makes nothing of is
    answered with what is wrong with it, `retries` times. An equal request, in this process or with `cache` in any, is
    not made again. Calls within an episode are recorded in its trace as its judge's.
    """

    def __init__(
        self,
        model: Completer,
        *,
        temperature: float = 0.0,
        max_tokens: int = 1024,
        retries: int = 2,
        cache: str | Path | None = None,
        price: Price | None = None,
    ) -> None:
        self.model = model
        self.temperature, self.max_tokens, self.retries = temperature, max_tokens, retries
        self.cache = None if cache is None else Path(cache)
        self.price = price
        self._start()

    def _start(self) -> None:
        self._kept: dict[str, str] = {}
        self._shared = Shared[tuple[str, Usage]]()
        self._file: ReplyCache | None = None
        self._asked = Usage()
        self._unknown: set[str] = set()
        """Of `_OPTIONAL`, and schemas (`json_schema`), those that the server refused."""

    def __getstate__(self) -> dict[str, Any]:
        """What was asked here is not known in another process, unless there is a file."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._start()

    @property
    def spent(self) -> Usage:
        """All that the model was asked in this process, with the replies that no verdict could be read of."""
        return self._asked

    def __repr__(self) -> str:
        return f"JudgeModel({self.model.name!r} at {public(self.model.base_url)})"

    async def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        schema: Mapping[str, Any],
        read: Callable[[Mapping[str, Any]], T],
        *,
        repeat: int = 0,
        quoted: Sequence[str] | None = None,
    ) -> Asked[T]:
        """What `read` makes of the JSON object in the reply; it raises ValueError with what is wrong with one.

        An object that stands in a text of `quoted` is no verdict; None: in any message. Another `repeat` asks anew.

        Raises NoReward where no reply could be read or the model refuses the request,
        EngineUnavailable where it does not answer, CacheError.
        """
        key = ReplyCache.key(
            {
                "base_url": self.model.base_url, "model": self.model.name, "messages": list(messages), "schema": schema,
                "temperature": self.temperature, "max_tokens": self.max_tokens, "repeat": repeat,
            }
        )  # fmt: skip
        fields = schema.get("properties") or ()
        shown = [str(message.get("content")) for message in messages] if quoted is None else quoted

        def verdict(text: str) -> T:
            return read(object_in(text, fields, shown))

        cached = Usage(cached=1, cost=0.0 if self.price else None)
        text = self._kept.get(key) or self._from_file(key)
        if text is not None:
            with contextlib.suppress(ValueError):  # another version of ajet kept what it took for a verdict
                return Asked(verdict(text), cached)

        async def answer() -> tuple[str, Usage]:
            found, spent = await self._answer(messages, schema, verdict)
            self._keep(key, found)
            return found, spent

        (text, spent), shared = await self._shared.get(key, answer)
        return Asked(verdict(text), cached if shared else spent)

    def _from_file(self, key: str) -> str | None:
        if self.cache is None:
            return None
        if self._file is None:
            self._file = ReplyCache(self.cache)
        kept = self._file.get(key)
        return kept[0] if isinstance(kept, list) else None

    def _keep(self, key: str, text: str) -> None:
        self._kept[key] = text
        if self._file is not None:
            self._file.put(key, [text])

    async def _answer(
        self, messages: Sequence[Mapping[str, Any]], schema: Mapping[str, Any], verdict: Callable[[str], object]
    ) -> tuple[str, Usage]:
        """A reply that can be read, and what all of them took."""
        spent, said, wrong = Usage(), [dict(message) for message in messages], ""
        for _ in range(self.retries + 1):
            try:
                reply = await self._post(said, schema)
            except (ContextOverflow, RequestRefused) as refused:  # the judge's fault, and not the agent's
                raise NoReward(f"the judge's model {self.model.name} rejected the request: {refused}") from refused
            except EndpointMisconfigured as misconfigured:
                raise EndpointMisconfigured(
                    f"the judge's model {self.model.name}: {misconfigured} (task_judge.llm: model, base_url, "
                    "api_key_env)"
                ) from misconfigured
            text = str(reply["choices"][0]["message"].get("content") or "")
            took = self._spent(reply.get("usage") or {}, said, text)
            spent, self._asked = spent + took, self._asked + took
            try:
                if finish_of(reply["choices"][0].get("finish_reason")) == "length":
                    raise ValueError(f"it is cut at {self.max_tokens} tokens (max_tokens)")
                verdict(text)
            except ValueError as error:
                wrong = f"{error} (it said {' '.join(text.split())[:_SHOWN]!r})"
                asked = {"role": "user", "content": f"That is no verdict: {error}. Reply with the JSON object alone."}
                said = [*map(dict, messages), {"role": "assistant", "content": text or "(nothing)"}, asked]
                continue
            return text, spent
        raise NoReward(f"no verdict from the judge's model {self.model.name} in {self.retries + 1} replies: {wrong}")

    def _spent(self, usage: Mapping[str, Any], asked: Sequence[Any], text: str) -> Usage:
        """Of one reply, as the server counts, else about."""
        read = int(usage.get("prompt_tokens") or tokens_of(asked))
        written = int(usage.get("completion_tokens") or tokens_of(text))
        return Usage(1, read, written, 0, self.price.of(read, written) if self.price else None)

    async def _post(self, messages: Sequence[Mapping[str, Any]], schema: Mapping[str, Any]) -> dict[str, Any]:
        """One reply; a parameter that the server refuses is left out from then on."""
        while True:
            try:
                return await self.model.complete(messages, **self._parameters(schema))
            except RequestRefused as refused:
                said = f"{refused.parameter} {refused}"
                known = [name for name in _OPTIONAL if name not in self._unknown]
                named = next((name for name in known if name in said), None)
                # Servers of many makes say of a schema only that it is unexpected.
                refused_one = named or ("response_format" if "response_format" in known else None)
                if refused_one is None:
                    raise
                schema_only = refused_one == "response_format" and "json_schema" not in self._unknown
                self._unknown.add("json_schema" if schema_only else refused_one)

    def _parameters(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        by_schema = {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": dict(schema)}}
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "response_format": {"type": "json_object"} if "json_schema" in self._unknown else by_schema,
        }
        parameters = {name: value for name, value in given.items() if name not in self._unknown}
        if "max_tokens" in self._unknown:
            parameters["max_completion_tokens"] = self.max_tokens
        return parameters


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
    def _endpoint(self) -> Endpoint:
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


def object_schema(**properties: Any) -> dict[str, Any]:
    """The JSON schema of an object that has these properties, all of them and no other."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def number_in(value: Any) -> float | None:
    """A finite number, also where it is written as text."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
