"""`Model`: a handle of an LLM, which in a run is the policy as one agent of an episode."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.request import ProxyHandler, Request, build_opener

from ajet_sdk.addresses import public
from ajet_sdk.agent.context import AgentIdentity, current_episode
from ajet_sdk.engines.http import Endpoint, is_loopback, without_certificates
from ajet_sdk.engines.reply_schema import read_reply
from ajet_sdk.errors import EngineError, EngineUnavailable, RequestRefused
from ajet_sdk.types import Json, JsonView

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

TIMEOUT = 600.0
"""Seconds that a handle waits for a reply."""

STATUS_TIMEOUT = 10.0


class Message(dict[str, Any]):
    """An assistant message as a dict; keys are attributes too, with None for absent keys."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)


class Model:
    """A handle of an LLM: an OpenAI-compatible endpoint, its key and the model's name.

    In a run it is the policy, as one agent of an episode. Any framework that takes a base URL can
    use it.

    Args:
        base_url: the endpoint, up to and including `/v1`.
        api_key: sent as `Authorization: Bearer`.
        name: the model's name in requests.
        timeout: seconds to wait for a reply.
    """

    def __init__(self, base_url: str, api_key: str, name: str, *, timeout: float = TIMEOUT) -> None:
        self.base_url: str = base_url.rstrip("/")
        self.api_key = api_key
        self.name = name
        self.timeout = timeout

    def __repr__(self) -> str:
        return f"Model({self.name!r} at {public(self.base_url)})"

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle without the connections."""
        return functools.partial(Model, timeout=self.timeout), (
            self.base_url,
            self.api_key,
            self.name,
        )

    def agent(
        self,
        name: str,
        target_tag: str | None = None,
        trainable: bool = True,
        debug_model: str | None = None,
    ) -> Model:
        """Return a handle of the same model for another agent of the episode; agents never share a
        timeline.

        `trainable_targets` selects agents by `target_tag`, which defaults to the agent's name.
        `debug_model` answers calls outside of the targets. Raises EngineError for a model without
        an episode.
        """
        head, separator, path = self.base_url.partition("/episodes/")
        pieces = path.split("/")
        if not separator or len(pieces) != 3:
            raise EngineError(
                f"{self!r} belongs to no episode; agents can only be told apart during a run"
            )
        segment = AgentIdentity(name, target_tag, trainable, debug_model).segment()
        active = current_episode.get()
        if active is not None and active.phase == "rollout":
            active.recorder.takes_handle(name)
        return Model(
            f"{head}/episodes/{pieces[0]}/{segment}/{pieces[2]}",
            self.api_key,
            self.name,
            timeout=self.timeout,
        )

    async def chat(
        self,
        messages: Sequence[JsonView],
        tools: Sequence[JsonView] | None = None,
        **params: object,
    ) -> Message:
        """Request the model's next message. `params` are those of `chat/completions`, except
        `stream`.

        Raises RequestRefused (400), ContextOverflow, EngineUnavailable (429 and 5xx after every
        retry), EngineError.
        """
        reply = await self.complete(messages, tools, **params)
        return Message(reply["choices"][0]["message"])

    async def complete(
        self,
        messages: Sequence[JsonView],
        tools: Sequence[JsonView] | None = None,
        **params: object,
    ) -> Json:
        """Request a reply and return its whole JSON, with `usage`. Raises the same errors as
        `chat`."""
        if params.get("stream"):
            raise RequestRefused(
                "replies are returned whole; to stream, use openai() or async_openai()", "stream"
            )
        if isinstance(messages, str):
            raise RequestRefused(
                'messages must be a list, [{"role": "user", "content": "..."}] (got text)',
                "messages",
            )
        body: dict[str, object] = {
            "model": self.name,
            "messages": [dict(m) for m in messages],
            **params,
        }
        if tools:
            body["tools"] = list(tools)
        reply = await self.endpoint.post("chat/completions", body)
        read_reply(reply, "chat/completions", self.base_url)
        return reply

    @functools.cached_property
    def endpoint(self) -> Endpoint:
        """The endpoint that receives its requests."""
        return Endpoint(self.base_url, self.api_key, timeout=self.timeout)

    def overflowed(self) -> bool:
        """Ask the gateway whether a call of the episode exceeded the context length. Raises
        EngineUnavailable."""
        request = Request(
            f"{self.base_url}/episode", headers={"authorization": f"Bearer {self.api_key}"}
        )
        try:
            with build_opener(ProxyHandler({})).open(request, timeout=STATUS_TIMEOUT) as response:
                return bool(json.load(response)["context_overflow"])
        except OSError as error:
            raise EngineUnavailable(
                f"the episode's gateway at {self.base_url} did not answer: {error}"
            ) from error

    def openai(self) -> OpenAI:
        """Return an `openai.OpenAI` client for this model."""
        import openai

        return openai.OpenAI(**self._client_arguments("DefaultHttpxClient"))

    def async_openai(self) -> AsyncOpenAI:
        """Return an `openai.AsyncOpenAI` client for this model."""
        import openai

        return openai.AsyncOpenAI(**self._client_arguments("DefaultAsyncHttpxClient"))

    def _client_arguments(self, client: str) -> Json:
        arguments: dict[str, object] = {
            "base_url": self.base_url,
            "api_key": self.api_key,
            "timeout": self.timeout,
        }
        if is_loopback(self.base_url):
            import openai

            # Plain HTTP needs no proxy and no certificates; loading the system's takes 30 ms.
            arguments["http_client"] = getattr(openai, client)(
                trust_env=False, verify=without_certificates(), timeout=self.timeout
            )
        return arguments
