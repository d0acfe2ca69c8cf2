"""Sampling sessions over the base model or saved weights, which are loaded at first use."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ajet_sdk.dialects.json import Json
from ajet_sdk.engines.local.sampler import LocalSampler
from ajet_sdk.errors import RequestRefused
from ajet_sdk.protocols import Sampling, Tokenizer
from ajet_sdk.trainer_service.data import sample_result
from ajet_sdk.trainer_service.inputs import Chunk, ModelInput, file_of, model_input
from ajet_sdk.trainer_service.policies import BaseModel, prompt_scores

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOADED = 4
"""Maximum sets of weights that stay loaded."""


class _Slot:
    """Weights that are loaded or loading: a sampler, and a module for scoring one prompt at a
    time."""

    def __init__(
        self, loading: Coroutine[object, None, tuple[LocalSampler, PreTrainedModel]]
    ) -> None:
        self.loading = asyncio.ensure_future(loading)
        self.scoring = asyncio.Lock()
        self.users = 0
        """Number of requests that use them."""


class Samplers:
    """Weights of sampling sessions; the least recently used are unloaded."""

    def __init__(self, base: BaseModel, seed: int = 0, *, deterministic: bool = False) -> None:
        self._base = base
        self._tokenizer = base.tokenizer
        self._how = (seed, deterministic)
        self._slots: OrderedDict[Path | None, _Slot] = OrderedDict()

    def __contains__(self, path: Path | None) -> bool:
        """Whether these weights are loaded, or loading."""
        return path in self._slots

    async def sample(self, path: Path | None, body: Json) -> bytes:
        """Answer a request to sample. Raises RequestRefused, ContextOverflow, CheckpointError."""
        given = _prompt(body, self._tokenizer)
        sampling = _sampling(body)
        prompt = given.ids.tolist()
        if len(prompt) >= self._base.max_model_len:
            raise RequestRefused(
                f"the prompt has {len(prompt)} tokens, but this server takes"
                f" {self._base.max_model_len} with the reply; shorten it, or start the server with"
                " a larger --max-model-len"
            )
        last = body.get("prompt_logprobs_last_n")
        if last is not None and not 1 <= last < len(prompt):
            raise RequestRefused(
                f"prompt_logprobs_last_n must be between 1 and {len(prompt) - 1} (got {last})"
            )
        async with self._use(path) as slot:
            scores, (sampler, module) = None, slot.loading.result()
            # checks the prompt's ids and length
            sampled = await sampler.sample(prompt, sampling, "", given.pictures)
            if body.get("prompt_logprobs") or body.get("topk_prompt_logprobs"):
                top = min(int(body.get("topk_prompt_logprobs") or 0), self._base.vocabulary)
                async with slot.scoring:
                    scores = await asyncio.to_thread(
                        prompt_scores, self._base, module, given, top, last
                    )
        return sample_result(sampled, scores)

    @asynccontextmanager
    async def _use(self, path: Path | None) -> AsyncIterator[_Slot]:
        if path not in self._slots:
            self._slots[path] = _Slot(asyncio.to_thread(self._load, path))
        slot = self._slots[path]
        self._slots.move_to_end(path)
        slot.users += 1
        try:
            await asyncio.shield(slot.loading)
            await self._unload()
            yield slot
        finally:
            slot.users -= 1
            if slot.loading.done() and slot.loading.exception() is not None:
                self._slots.pop(path, None)

    def _load(self, path: Path | None) -> tuple[LocalSampler, PreTrainedModel]:
        module, (seed, deterministic) = self._base.sampling_module(path), self._how
        sampler = LocalSampler(
            module,
            self._tokenizer,
            model_name="the policy",
            max_model_len=self._base.max_model_len,
            seed=seed,
            deterministic=deterministic,
            policy_version=None,
            apart=True,
        )
        return sampler, module

    async def _unload(self) -> None:
        idle = [
            path for path, slot in self._slots.items() if not slot.users and slot.loading.done()
        ]
        for slot in [self._slots.pop(path) for path in idle[: max(0, len(self._slots) - _LOADED)]]:
            await slot.loading.result()[0].aclose()

    async def aclose(self) -> None:
        """Unload all; running requests fail."""
        for slot in self._slots.values():
            if slot.loading.done() and slot.loading.exception() is None:
                await slot.loading.result()[0].aclose()


def _prompt(body: Json, tokenizer: Tokenizer) -> ModelInput:
    chunks: list[tuple[Chunk, int | None]] = []
    for chunk in body["prompt"]["chunks"]:
        kind = chunk.get("type", "encoded_text")
        if kind == "encoded_text":
            chunks.append((chunk["tokens"], None))
        elif kind == "image":
            chunks.append((file_of(chunk["data"], "the prompt"), chunk.get("expected_tokens")))
        else:
            raise RequestRefused(
                f"the prompt has a chunk of type {kind}; this server takes text and pictures",
                "prompt",
            )
    return model_input(chunks, tokenizer, "the prompt")


def _sampling(body: Json) -> Sampling:
    for name in (
        "topk_sample_logprobs",
        "target_prompt_logprobs",
        "prompt_alt_tokens_k",
        "record_stability_info",
    ):
        if body.get(name):
            raise RequestRefused(f"{name} is not supported by this server; leave it out", name)
    parameters = body["sampling_params"]
    stop = parameters.get("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    if parameters.get("temperature", 1.0) < 0 or not 0 < parameters.get("top_p", 1.0) <= 1:
        raise RequestRefused(
            "temperature must not be negative, and top_p above 0 and at most 1", "sampling_params"
        )
    return Sampling(
        temperature=float(parameters.get("temperature", 1.0)),
        top_p=float(parameters.get("top_p", 1.0)),
        top_k=int(parameters.get("top_k", -1)),
        max_tokens=parameters.get("max_tokens"),
        seed=parameters.get("seed"),
        n=int(body.get("num_samples") or 1),
        stop=tuple(text for text in stops if isinstance(text, str)),
        stop_token_ids=tuple(int(token) for token in stops if not isinstance(token, str)),
        ignore_eos=stop is not None,  # in the API a list of stops replaces the end-of-turn token
    )
