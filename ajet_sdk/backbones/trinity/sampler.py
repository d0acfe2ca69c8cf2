"""`ServerSampler`: token ids in and out of the model that Trinity serves, by the completions route of vLLM."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from ajet_sdk.endpoint import Endpoint
from ajet_sdk.errors import EngineError
from ajet_sdk.protocols import Sampled, Sampling

__all__ = ["ServerSampler"]

_TIMEOUT = 1800.0


class ServerSampler:
    """A `Sampler` over a Trinity `ModelWrapper`.

    The prompt goes as ids and the reply's ids come back, with log-probabilities of the distribution sampled from
    (`logprobs_mode: processed_logprobs`). The version is the one that the server names; where it names none, that of
    the engine before the request, which is never newer than the one that sampled.
    """

    def __init__(self, wrapper: Any, model: str, max_model_len: int) -> None:
        self._wrapper, self.model, self.max_model_len = wrapper, model, max_model_len
        self._endpoints: WeakKeyDictionary[asyncio.AbstractEventLoop, Endpoint] = WeakKeyDictionary()

    def _endpoint(self) -> Endpoint:
        loop = asyncio.get_running_loop()
        if loop not in self._endpoints:
            url = os.environ.get("TINKER_BASE_URL") or self._wrapper.api_address
            self._endpoints[loop] = Endpoint(f"{url.rstrip('/')}/v1", self._wrapper.api_key, timeout=_TIMEOUT)
        return self._endpoints[loop]

    async def version(self) -> int:
        """Updates behind the weights that the engine has now."""
        return max(0, int(await self._wrapper.model_version_async))

    async def sample(self, prompt_ids: Sequence[int], sampling: Sampling, session: str) -> list[Sampled]:
        """Raises RequestRefused, ContextOverflow, EngineUnavailable, EngineError."""
        before = await self.version()
        body = {
            "model": self._wrapper.model_path,
            "prompt": list(prompt_ids),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "n": sampling.n,
            "logprobs": 0,
            "return_token_ids": True,
            "session": session,
        }
        body |= {"stop": list(sampling.stop)} if sampling.stop else {}
        body |= {"seed": sampling.seed} if sampling.seed is not None else {}
        reply = await self._endpoint().post("completions", body)
        version = reply.get("policy_version")
        return [_sampled(choice, before if version is None else int(version)) for choice in reply["choices"]]

    def forget(self, session: str) -> None:
        """The server drops what it kept in its own time."""

    async def aclose(self) -> None:
        for endpoint in list(self._endpoints.values()):
            await endpoint.aclose()


def _sampled(choice: dict[str, Any], version: int) -> Sampled:
    ids, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
    if ids is None or logprobs is None or len(ids) != len(logprobs):
        raise EngineError(
            "the model's server gave no token ids with log-probabilities; it must know return_token_ids (vLLM >= 0.10)"
        )
    stopped = choice.get("finish_reason") == "stop"
    cut = choice.get("stop_reason")
    return Sampled(
        output_ids=ids,
        logprobs=logprobs,
        finish_reason="stop" if stopped else "length",
        policy_version=version,
        text=choice.get("text") if isinstance(cut, str) else None,
    )
