"""`ClientSampler`: token ids in and out of the engines that verl keeps, by verl's own client."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ajet_sdk.errors import EngineError, EngineUnavailable
from ajet_sdk.protocols import Sampled, Sampling, Tokenizer

__all__ = ["ClientSampler"]


class ClientSampler:
    """A `Sampler` over verl's `LLMServerClient`.

    Calls of one session go to the same engine while it is there, so its prefix cache serves them. The version is the
    training step after which the engine was given its weights, which is the number of updates.
    """

    def __init__(self, client: Any, tokenizer: Tokenizer, model: str, max_model_len: int) -> None:
        self._client, self._tokenizer = client, tokenizer
        self.model, self.max_model_len = model, max_model_len

    async def sample(self, prompt_ids: Sequence[int], sampling: Sampling, session: str) -> list[Sampled]:
        """Raises EngineUnavailable where the engine failed or gave the call up, EngineError for an answer in part."""
        each = [
            replace(sampling, n=1, seed=None if sampling.seed is None else sampling.seed + index)
            for index in range(sampling.n)
        ]
        return list(await asyncio.gather(*(self._one(prompt_ids, one, session) for one in each)))

    async def _one(self, prompt_ids: Sequence[int], sampling: Sampling, session: str) -> Sampled:
        limit = min(sampling.max_tokens or self.max_model_len, self.max_model_len - len(prompt_ids))
        parameters: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": limit,
            "logprobs": True,
        }
        parameters |= {"stop": list(sampling.stop)} if sampling.stop else {}
        parameters |= {"seed": sampling.seed % 2**63} if sampling.seed is not None else {}
        try:
            said = await self._client.generate(
                session, prompt_ids=[int(i) for i in prompt_ids], sampling_params=parameters
            )
        except Exception as error:  # Ray wraps whatever the engine raised, and verl raises what it likes
            raise EngineUnavailable(f"verl's engine failed: {type(error).__name__}: {_first_line(error)}") from error
        if said.stop_reason == "aborted":
            raise EngineUnavailable("verl's engine gave the call up before its end")
        ids = [int(i) for i in said.token_ids]
        if said.log_probs is None or len(said.log_probs) != len(ids):
            raise EngineError(
                "verl's engine gave no log-probability for each token; actor_rollout_ref.rollout.calculate_log_probs "
                "must be true"
            )
        return self._sampled(ids, said, sampling, limit)

    def _sampled(self, ids: list[int], said: Any, sampling: Sampling, limit: int) -> Sampled:
        """verl does not say what ended a reply: an end-of-turn token, a stop string, or the limit."""
        ended = bool(ids) and ids[-1] in self._tokenizer.eos_ids
        text = None if ended or not sampling.stop else self._before(ids, sampling.stop)
        version = (said.extra_fields or {}).get("global_steps")
        return Sampled(
            output_ids=ids,
            logprobs=[float(value) for value in said.log_probs],
            finish_reason="stop" if ended or text is not None or len(ids) < limit else "length",
            policy_version=None if version is None else int(version),
            text=text,
        )

    def _before(self, ids: Sequence[int], stops: Sequence[str]) -> str | None:
        """The text before the first stop string; None where there is none."""
        text = self._tokenizer.decode(ids)
        places = [at for stop in stops if (at := text.find(stop)) >= 0]
        return text[: min(places)] if places else None

    def forget(self, session: str) -> None:
        """The engines drop what they kept in their own time."""

    async def aclose(self) -> None:
        """The client holds nothing of ours."""


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(getattr(error, "cause", None) or error).splitlines() if line.strip()]
    return lines[0].strip() if lines else "no message"
