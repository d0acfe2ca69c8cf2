"""`RemoteEngine`: any OpenAI-compatible endpoint, with token ids if the server returns them, as
vLLM does."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from ajet_sdk.addresses import public
from ajet_sdk.dialects.fields import WITHOUT_EFFECT
from ajet_sdk.engines.http import Endpoint, check_url
from ajet_sdk.engines.reply_schema import ReplyChoice, read_reply
from ajet_sdk.errors import EngineError, RequestRefused
from ajet_sdk.protocols import Answer, Ask, Choice

log = logging.getLogger("ajet")


class RemoteEngine:
    """Forwards requests to an endpoint, without streaming.

    429, 5xx and lost connections are retried with exponential backoff or after Retry-After; other
    4xx are not. Token ids and log-probabilities are requested until the server refuses or omits
    them, or never with `with_ids=False`. Ids are ignored if their number differs from
    `usage.completion_tokens`. Servers report log-probabilities of the model's own distribution, so
    they are recorded only if the call sampled from it (temperature 1, no limits, penalties or
    bias); an agent that requests them gets them in any case. The policy version is unknown.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str,
        model: str,
        *,
        timeout: float = 600.0,
        retries: int = 4,
        with_ids: bool = True,
        key_source: str = "the API key",
    ) -> None:
        # Imported before agents run: openai looks for httpx in sys.modules and fails on a
        # half-imported one.
        import httpx  # noqa: F401

        check_url(base_url)
        self.base_url = base_url
        self.model = model
        self._ids_given: bool | None = None if with_ids else False
        """None: unknown."""
        self._newer_limit = False
        """The server requires `max_completion_tokens`."""
        self._endpoint = Endpoint(
            base_url,
            api_key,
            timeout=timeout,
            retries=retries,
            of_agent=False,
            key_source=key_source,
        )

    def __repr__(self) -> str:
        return f"RemoteEngine({self.model!r} at {public(self.base_url)})"

    async def answer(self, ask: Ask) -> Answer:
        """Raises RequestRefused, ContextOverflow, EngineUnavailable, EndpointMisconfigured,
        EngineError."""
        wants_ids = self._ids_given is not False
        route = ask.route
        try:
            reply = await self._endpoint.post(route, self._body(ask, wants_ids))
        except RequestRefused as refused:
            reply = await self._second_try(ask, wants_ids, refused)
        return self._answer(ask, reply, route)

    async def _second_try(
        self, ask: Ask, wants_ids: bool, refused: RequestRefused
    ) -> dict[str, Any]:
        """Retry without parameters that the server does not support; else raise the refusal."""
        refusal = f"{refused.parameter} {refused}"
        if (
            not self._newer_limit
            and "max_completion_tokens" in refusal
            and "max_completion_tokens" not in ask.named
        ):
            self._newer_limit = True
            return await self._endpoint.post(ask.route, self._body(ask, wants_ids))
        if self._ids_given is not None or not wants_ids:
            raise refused
        reply = await self._endpoint.post(ask.route, self._body(ask, False))
        self._ids_given = False
        log.info("%r returns no token ids (%s); its calls are recorded without", self, refused)
        return reply

    def _body(self, ask: Ask, with_ids: bool) -> dict[str, Any]:
        sampling = ask.sampling
        subject = "prompt" if ask.messages is None else "messages"
        body: dict[str, object] = {
            "model": self.model,
            subject: ask.prompt if ask.messages is None else ask.messages,
        }
        if ask.tools is not None:
            body["tools"] = ask.tools
        body.update(ask.options)
        for name in ("return_token_ids", WITHOUT_EFFECT):
            body.pop(name, None)
        for name in ("logprobs", "top_logprobs"):
            if body.get(name) is None:
                body.pop(name, None)
        if self._newer_limit or "max_completion_tokens" in ask.named:
            limit = "max_completion_tokens"
        else:
            limit = "max_tokens"
        body["temperature"] = sampling.temperature
        if sampling.top_p != 1.0 or "top_p" in ask.named:  # some models refuse any value
            body["top_p"] = sampling.top_p
        if sampling.top_k > 0:
            body["top_k"] = sampling.top_k
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if sampling.n != 1:
            body["n"] = sampling.n
        if sampling.max_tokens is not None:
            body[limit] = sampling.max_tokens
        if with_ids:
            body["return_token_ids"] = True
            # A vLLM server takes omitted parameters from the model's generation_config.
            body.update(
                temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k
            )
            for name, neutral in (("repetition_penalty", 1.0), ("min_p", 0.0)):
                body.setdefault(name, neutral)
            if not body.get("logprobs"):
                body["logprobs"] = 0 if ask.messages is None else True
        return body

    def _answer(self, ask: Ask, reply: Mapping[str, Any], route: str) -> Answer:
        read = read_reply(reply, route, self.base_url)
        counts = (read.usage or {}).items()
        usage = {name: n for name, n in counts if isinstance(n, (int, float)) and math.isfinite(n)}
        ids = [choice.token_ids for choice in read.choices]
        total = sum(map(len, filter(None, ids)))
        if None in ids or total != usage.get("completion_tokens", total):
            ids = [None] * len(ids)
        if self._ids_given is None:
            self._ids_given = ids[0] is not None
        sampling = ask.sampling
        limited = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
        known = sampling.temperature == 1.0 and not limited and not sampling.processed
        choices = list[Choice]()
        for choice, raw, i in zip(read.choices, reply["choices"], ids, strict=True):
            choices.append(_choice(choice, raw.get("message"), i, ask.logprobs, known))
        if read.prompt_token_ids is None:
            prompt = read.choices[0].prompt_token_ids
        else:
            prompt = read.prompt_token_ids
        if prompt is not None and len(prompt) != usage.get("prompt_tokens", len(prompt)):
            prompt = None
        return Answer(tuple(choices), read.model or self.model, prompt, usage)

    @property
    def takes_pictures(self) -> None:
        """Its server knows."""
        return None

    async def count(self, ask: Ask) -> int:
        """Count by requesting one token from the server. Raises the same errors as `answer`."""
        usage = (
            await self.answer(replace(ask, sampling=replace(ask.sampling, max_tokens=1, n=1)))
        ).usage
        if "prompt_tokens" not in usage:
            raise EngineError(
                f"{self.base_url} does not report the length of prompts (usage.prompt_tokens)"
            )
        return int(usage["prompt_tokens"])

    def forget(self, episode_id: str) -> None:
        """Does nothing."""

    async def aclose(self) -> None:
        """Close every connection."""
        await self._endpoint.aclose()


def _choice(
    choice: ReplyChoice,
    message: Mapping[str, object] | None,
    ids: list[int] | None,
    wanted: bool,
    known: bool,
) -> Choice:
    """`message` is the message as received, as the agent may read any of its keys."""
    whole = bool(choice.values) and None not in choice.values
    shown = wanted and whole
    # Without ids, log-probabilities are passed on to the agent, but not recorded.
    recorded = whole and ids is not None and known
    return Choice(
        message=(
            None
            if message is None
            else {key: value for key, value in message.items() if value is not None}
        ),
        text=choice.text,
        finish_reason=choice.finish_reason or "stop",
        output_ids=ids,
        logprobs=cast("list[float]", choice.values) if shown or recorded else None,
        tokens=[text.encode("utf-8", "surrogatepass") for text in choice.tokens] if shown else None,
        stop=choice.stop_reason if isinstance(choice.stop_reason, str) else None,
        of_policy=known,
    )
