"""Samplers over the model that Trinity serves: by vLLM's completions route, or by the Tinker
API."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING

from ajet_sdk.backbones.trinity.adapters import adapter_name, adapter_versions
from ajet_sdk.config.schema import Tinker
from ajet_sdk.engines.http import Endpoint
from ajet_sdk.engines.tinker.sampler import TinkerSampler
from ajet_sdk.engines.tinker.sdk import Session
from ajet_sdk.engines.tinker.service import Costs
from ajet_sdk.engines.vllm.completions import choices_of, request_body, sampling_parameters
from ajet_sdk.errors import EngineError, EngineUnavailable, RequestRefused, TrainingError
from ajet_sdk.pictures import PlacedPicture
from ajet_sdk.protocols import Sampled, Sampling

if TYPE_CHECKING:
    from trinity.common.models.model import ModelWrapper

    from ajet_sdk.config.config import Config
    from ajet_sdk.protocols import Tokenizer

_TIMEOUT = 1800.0
_VERSION = re.compile(r"-sampler-(\d+)$")
"""The end of Trinity's paths of weights to sample from: the number of the training step."""


class ServiceSampler:
    """A `Sampler` over Trinity's model of the Tinker API, with its current weights.

    It samples by the SDK directly, as Trinity's model accepts texts only and sends the same seed
    with every request.
    """

    def __init__(self, wrapper: ModelWrapper, config: Config, tokenizer: Tokenizer) -> None:
        self._wrapper = wrapper
        self._tokenizer = tokenizer
        self.model = config.model_name
        self.max_model_len = config.rollout.max_model_len
        self.takes_pictures = tokenizer.pictures is not None
        model = config.model.model_copy(update={"path": wrapper.model_name})
        self._config = config.model_copy(update={"model": model, "tinker": Tinker()})
        self._opened: tuple[str, asyncio.Future[TinkerSampler]] | None = None

    @cached_property
    def _session(self) -> Session:
        return Session(self._config)

    async def version(self) -> int:
        """Updates behind the weights that the engine has now."""
        return max(0, int(await self._wrapper.model_version_async))

    async def sample(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        session: str,
        pictures: Sequence[PlacedPicture] = (),
    ) -> list[Sampled]:
        """Raises RequestRefused, ContextOverflow, EngineUnavailable."""
        path = str(await self._wrapper.model.get_model_path.remote())
        if self._opened is None or self._opened[0] != path:
            self._opened = path, asyncio.ensure_future(asyncio.to_thread(self._open, path))
        opening = self._opened[1]
        try:
            sampler = await asyncio.shield(opening)
        except TrainingError as error:
            if self._opened is not None and self._opened[1] is opening:
                self._opened = None  # try again next time
            raise EngineUnavailable(str(error)) from error
        return await sampler.sample(prompt_ids, sampling, session, pictures)

    def _open(self, path: str) -> TinkerSampler:
        """Open the weights at a path of the service, or those of the base model for a local path.

        Raises EngineError if a path of the service has no step in its name.
        """
        at_service = path.startswith("tinker://")
        version = _VERSION.search(path)
        if at_service and version is None:
            raise EngineError(
                f"the step of the weights at {path} is unknown: Trinity's names for them end in"
                " -sampler-N. This release of trinity-rft uses other names; install the release"
                " that ajet[trinity] pins"
            )
        longest = self._session.served(self._session.model)[1] or self.max_model_len
        return TinkerSampler(
            self._session.weights(path if at_service else None),
            self._tokenizer,
            Costs(self._config.tinker.prices),
            model_name=self.model,
            max_model_len=min(self.max_model_len, longest),
            policy_version=int(version[1]) if version else 0,
        )

    def forget(self, session: str) -> None:
        """The service drops what it kept in its own time."""

    async def aclose(self) -> None:
        if "_session" in vars(self):
            await asyncio.to_thread(self._session.close)


class ServerSampler:
    """A `Sampler` over a Trinity `ModelWrapper` of vLLM's server.

    Prompts and replies are token ids, with log-probabilities of the distribution sampled from, as
    Trinity starts vLLM with `logprobs_mode: processed_logprobs`. The version is that of the engine
    before the request, which is never newer than the version that sampled. It takes no pictures:
    vLLM up to 0.23, which Trinity-RFT 0.6 needs, takes none beside token ids.

    With an adapter, a request names its version, so that the version is exact; the base model
    answers only before the first update, which an adapter begins as.
    """

    takes_pictures = False

    def __init__(
        self, wrapper: ModelWrapper, model: str, max_model_len: int, tokenizer: Tokenizer
    ) -> None:
        self._wrapper = wrapper
        self.model = model
        self.max_model_len = max_model_len
        self._has_adapter = bool(wrapper.enable_lora)
        self._eos_ids = tokenizer.eos_ids
        shown = tokenizer.pictures
        self._never_sampled = () if shown is None else shown.never_sampled
        self._ordinal = count()

    @cached_property
    def _endpoint(self) -> Endpoint:
        return Endpoint(
            f"{self._wrapper.api_address.rstrip('/')}/v1", self._wrapper.api_key, timeout=_TIMEOUT
        )

    async def version(self) -> int:
        """Updates behind the weights that the engine has now."""
        if self._has_adapter:
            return max(adapter_versions(await self._endpoint.get("models")), default=0)
        return max(0, int(await self._wrapper.model_version_async))

    async def sample(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        session: str,
        pictures: Sequence[PlacedPicture] = (),
    ) -> list[Sampled]:
        """Raises RequestRefused, ContextOverflow, EngineUnavailable, EngineError."""
        if sampling.bad_words:
            raise RequestRefused(
                "vLLM 0.23, which Trinity-RFT 0.6 needs, ignores bad_words beside token ids; leave"
                " it out",
                "bad_words",
            )
        before = await self.version()
        if self._has_adapter and before:
            served = adapter_name(before)
        else:
            served = self._wrapper.model_path
        parameters = sampling_parameters(
            prompt_ids,
            sampling,
            model=served,
            max_model_len=self.max_model_len,
            eos_ids=self._eos_ids,
            drawn_from=f"{session}/{next(self._ordinal)}",
            never_sampled=self._never_sampled,
        )
        body = {"model": served, **request_body(prompt_ids, parameters)}
        return choices_of(await self._endpoint.post("completions", body), before, sampling.n)

    def forget(self, session: str) -> None:
        """The server drops what it kept in its own time."""

    async def aclose(self) -> None:
        await self._endpoint.aclose()
