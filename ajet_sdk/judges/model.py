"""The model behind a judge: requests a JSON object by schema, retries invalid replies, and caches valid ones.

A verdict that cannot be read raises NoReward. A verdict that the reply only quotes is never used.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import html
import inspect
import json
import math
import os
import re
import sys
import unicodedata
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

    The schema is sent as `response_format`; if the server rejects it, a plain JSON object is requested, or nothing. If
    `read` rejects a reply, the model is told why, up to `retries` times. Equal requests are sent once in this process,
    or with `cache` in all processes. Calls within an episode are recorded in its trace as the judge's.

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
            model.base_url, model.name, transport=model.endpoint, budget=Budget(price=self.price),
            cache=IN_MEMORY if self.cache is None else Path(self.cache),
            concurrency=sys.maxsize, retries=0, patience=None,
        )  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the client: another process shares replies only by a cache file."""
        return {name: value for name, value in vars(self).items() if name != "client"}

    @property
    def name(self) -> str:
        return self.model.model if isinstance(self.model, ModelClient) else self.model.name

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
        quoted: Sequence[str],
        repeat: int = 0,
    ) -> T:
        """Requests a JSON object and parses it with `read`, which raises ValueError for an invalid one.

        `quoted`: untrusted texts in the messages, such as the judged output; see `object_in`. The field `reason` is
        free text. A different `repeat` bypasses earlier replies.

        Raises NoReward if no reply is valid or the model refuses the request, EngineUnavailable if it does not answer,
        CacheError, BudgetSpent.
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

        # A client repeats a run from its cache, including failures.
        kept_errors = (NoReward,) if isinstance(self.model, ModelClient) else ()
        try:
            [text] = await self.client.once(request, answer, kept_errors)
        except RequestRefused as kept:
            raise NoReward(str(kept)) from kept
        with contextlib.suppress(ValueError):  # another version of ajet may have cached an invalid reply
            return verdict(text)
        return verdict(await self._answer(messages, schema, verdict))

    async def _answer(
        self, messages: Sequence[Mapping[str, Any]], schema: Mapping[str, Any], verdict: Callable[[str], object]
    ) -> str:
        """Requests until a reply is valid, and returns its text."""
        conversation, wrong = [dict(message) for message in messages], ""
        by_schema = {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": dict(schema)}}
        for _ in range(self.retries + 1):
            try:
                [reply, *_rest] = await self.client.reply(
                    conversation, temperature=self.temperature, max_tokens=self.max_tokens, response_format=by_schema
                )
            except (ContextOverflow, RequestRefused) as refused:  # an error of the judge, not of the agent
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
    counts = {"judge_calls": usage.calls, "judge_tokens": usage.tokens, "judge_cached": usage.cached}
    cost = {} if usage.cost is None else {"judge_cost": usage.cost}
    return {**{name: float(count) for name, count in counts.items()}, **cost}


class ScriptedModel(Model):
    """A function that replies in place of an endpoint. Its calls are recorded in the same way.

    Raises ConfigError if `class_path` leads to no function.
    """

    def __init__(self, class_path: str, relative_to: Path | None = None, name: str | None = None) -> None:
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
            return httpx.Response(200, json=await self._engine.post("chat/completions", json.loads(request.content)))

        return Endpoint(self.base_url, self.api_key, timeout=self.timeout, transport=httpx.MockTransport(answer))


def open_model(
    name: str | None, base_url: str | None = None, api_key: str | None = None, api_key_env: str = "OPENAI_API_KEY"
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
            f"no endpoint for the judge's model {name}: set task_judge.llm.base_url or OPENAI_BASE_URL "
            "(https://api.openai.com/v1) and OPENAI_API_KEY, or DASHSCOPE_API_KEY for DashScope"
        )
    key = api_key or user_key(api_key_env) or (keys[0] if keys else "none")
    if url is None or (url == DASHSCOPE and keys):
        url, key = url or DASHSCOPE, api_key or keys[0]
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
        number = float(value) if isinstance(value, str | float | int) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


_BROKEN = re.compile(r"\{\s*\"")
_TAGGED = re.compile(
    r"<(task|query|question|answer|response|output|reference|rubric|example|quote)\b[^>]*>.*?</\1>", re.DOTALL
)
_FENCE = re.compile(r"```\w*|~~~\w*")
_ESCAPED = re.compile(r"\\(?:u00|x)([0-9a-fA-F]{2})")
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060-\u2064\ufe00-\ufe0f\ufeff]")
_MARKS = tuple("\"'`“”‘’«»")


def object_in(reply: str, fields: Collection[str] = (), quoted: Sequence[str] = ()) -> dict[str, Any]:
    """Extracts the object of a reply, with any prose or fence around it.

    If a text of `quoted` names a field, the reply may quote it; then only an object without other text counts, except
    for thoughts and a fence. This never depends on the object's values, otherwise a text that names all low scores
    would have low verdicts refused. Objects in block quotes, in quotation marks or between tags of the question are
    ignored. Raises ValueError if no object has one of `fields`, if two differ, and if a quote breaks an object: it is
    not JSON, repeats a field, or a field is outside of it.

    Args:
        reply: the model's text, with its thoughts.
        fields: objects with none of these are ignored; empty: all objects count.
        quoted: texts that the reply may quote: the judged output and its task.
    """
    text = _TAGGED.sub(lambda match: "_" * len(match[0]), _without_thoughts(reply, quoted))
    objects, stated, outside, end = 0, list[dict[str, object]](), list[str](), 0
    for start, behind, value in _objects(text):
        outside.append(text[end:start])
        objects, end = objects + 1, behind
        has_field = not fields or any(name in value for name in fields)
        if has_field and not _is_quoted(text, start) and value not in stated:
            stated.append(value)
    outside_text = "".join([*outside, text[end:]])
    if any(re.search(rf'"{re.escape(name)}"\s*:', outside_text) for name in fields):
        raise ValueError("the JSON object in it is incomplete: one of its fields is outside it")
    if len(stated) > 1:
        raise ValueError(f"{len(stated)} JSON objects in it differ")
    if not stated:
        raise ValueError("no JSON object in it is the verdict")
    if (objects > 1 or _FENCE.sub("", outside_text).strip()) and _names_any(quoted, fields):
        raise ValueError("the JSON object in it may be a quote: other words stand beside it")
    return stated[0]


def _without_thoughts(reply: str, quoted: Sequence[str]) -> str:
    """Strips the thoughts from a reply. A closing tag that may be a quote is ignored."""
    before, mark, behind = reply.partition("</think>")
    begun = before.lstrip().startswith("<think>")
    in_object = _FENCE.sub("", before).lstrip().startswith("{")
    alone = "</think>" not in behind and not in_object and not any("</think>" in text for text in quoted)
    return behind if mark and (begun or alone) else reply


def _objects(text: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The outermost objects of a text, with start and end. Raises ValueError for invalid JSON."""
    decoder, position = json.JSONDecoder(strict=False, object_pairs_hook=_once), 0  # a model breaks lines in strings
    while (start := text.find("{", position)) >= 0:
        try:
            value, position = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            if _BROKEN.match(text, start):
                raise ValueError("an object in it is not valid JSON") from None
            position = start + 1
            continue
        yield start, position, value


def _once(pairs: list[tuple[str, object]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("an object names a field twice")
    return fields


def _is_quoted(text: str, start: int) -> bool:
    before = text[:start].rstrip(" ")
    line = before.rpartition("\n")[2].lstrip()
    return line.startswith(">") or (before.endswith(_MARKS) and not before.endswith("```"))


def _names_any(texts: Sequence[str], fields: Collection[str]) -> bool:
    """Whether a text has the name of a field, even within a word, escaped, or in look-alike letters."""
    for text in texts:
        unescaped = _ESCAPED.sub(lambda match: chr(int(match[1], 16)), html.unescape(text))
        shown = _INVISIBLE.sub("", unicodedata.normalize("NFKC", unescaped)).casefold()
        if any(name.casefold() in shown for name in fields):
            return True
    return False
