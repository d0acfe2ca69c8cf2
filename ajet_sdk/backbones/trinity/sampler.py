"""`ServerSampler`: token ids in and out of the model that Trinity serves, by the completions route of vLLM."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING

from ajet_sdk.engines.http import Endpoint
from ajet_sdk.engines.vllm.completions import choices_of, request_body
from ajet_sdk.protocols import Sampled, Sampling

if TYPE_CHECKING:
    from trinity.common.models.model import ModelWrapper

_TIMEOUT = 1800.0


class ServerSampler:
    """A `Sampler` over a Trinity `ModelWrapper`: vLLM's server, or ajet's own service, which speaks as it does.

    The prompt goes as ids and the reply's ids come back, with log-probabilities of the distribution sampled from:
    Trinity starts vLLM with `logprobs_mode: processed_logprobs`. The version is the one that the server names; where it
    names none, that of the engine before the request, which is never newer than the one that sampled.
    """

    def __init__(self, wrapper: ModelWrapper, model: str, max_model_len: int, eos_ids: frozenset[int]) -> None:
        self._wrapper, self.model, self.max_model_len = wrapper, model, max_model_len
        self._eos_ids = eos_ids
        self._ordinal = count()

    @cached_property
    def _endpoint(self) -> Endpoint:
        url = os.environ.get("TINKER_BASE_URL") or self._wrapper.api_address
        return Endpoint(f"{url.rstrip('/')}/v1", self._wrapper.api_key, timeout=_TIMEOUT)

    async def version(self) -> int:
        """Updates behind the weights that the engine has now."""
        return max(0, int(await self._wrapper.model_version_async))

    async def sample(self, prompt_ids: Sequence[int], sampling: Sampling, session: str) -> list[Sampled]:
        """Raises RequestRefused, ContextOverflow, EngineUnavailable, EngineError."""
        before = await self.version()
        body = request_body(
            prompt_ids,
            sampling,
            model=self._wrapper.model_path,
            max_model_len=self.max_model_len,
            eos_ids=self._eos_ids,
            drawn_from=f"{session}/{next(self._ordinal)}",
        )
        reply = await self._endpoint.post("completions", {**body, "session": session})
        version = reply.get("policy_version")
        return choices_of(reply, before if version is None else int(version), sampling.n)

    def forget(self, session: str) -> None:
        """The server drops what it kept in its own time."""

    async def aclose(self) -> None:
        await self._endpoint.aclose()
