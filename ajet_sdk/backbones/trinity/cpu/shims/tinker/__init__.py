"""ajet's stand-in for the package `tinker`: the part that Trinity-RFT 0.6.0 calls, over a service on this machine.

Not Thinking Machines' client, and nothing leaves the machine. The folder above is on PYTHONPATH in a CPU run of ajet
only, with the service's address in TINKER_BASE_URL. One service has one set of sampling weights: a sampling client
that is made of a snapshot loads it for all, and every client samples with what is loaded.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from ajet_sdk.backbones.trinity.cpu.wire import ServiceConnection
from ajet_sdk.engines.http import is_loopback

from . import types

__all__ = ["SamplingClient", "ServiceClient", "TrainingClient", "types"]
__version__ = "0+ajet.stand.in"

_log = logging.getLogger("ajet.tinker")
T = TypeVar("T")


def _address(base_url: str | None) -> str:
    url = base_url or os.environ.get("TINKER_BASE_URL", "")
    if not is_loopback(url):
        raise ImportError(
            f"this `tinker` ({Path(__file__).parent}) is ajet's replacement for CPU runs and needs the address of "
            f"ajet's service in TINKER_BASE_URL (got {url!r}). Outside such a run, remove this directory from "
            "PYTHONPATH; to use the real Tinker, also install it"
        )
    return url


_address(None)


class _Done(Generic[T]):
    """A future whose result is there."""

    def __init__(self, value: T) -> None:
        self._value = value

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    async def result_async(self) -> T:
        return self._value


class SamplingClient:
    """Samples with the weights that are loaded; scores with those that it was made of."""

    def __init__(self, service: ServiceConnection, model: str, snapshot: str | None) -> None:
        self._service, self._model, self._snapshot = service, model, snapshot

    def get_tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._model, trust_remote_code=False)

    async def sample_async(
        self,
        prompt: types.ModelInput,
        sampling_params: types.SamplingParams | Mapping[str, object],
        num_samples: int = 1,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int | None = 0,
    ) -> types.SampleResponse:
        """`num_samples` continuations, each with log-probabilities of the distribution sampled from.

        The seed is not passed on: Trinity sends the same one with every request, which would make a group's
        attempts equal. The service draws one for each request from its own.
        """
        if include_prompt_logprobs:
            raise NotImplementedError("ajet's service returns log-probabilities of sampled tokens only")
        parameters = asdict(sampling_params) if isinstance(sampling_params, types.SamplingParams) else sampling_params
        sent = {name: value for name, value in parameters.items() if name != "seed" and value is not None}
        body = {"prompt": prompt.to_ints(), "n": num_samples, "logprobs": 0, "return_token_ids": True, **sent}
        reply = await self._service.post("v1/completions", body)
        return types.SampleResponse(
            [
                types.SampledSequence(c["token_ids"], c["logprobs"]["token_logprobs"], c["finish_reason"])
                for c in reply["choices"]
            ]
        )

    async def compute_logprobs_async(self, prompt: types.ModelInput) -> list[float | None]:
        """The log-probability of each token at the run's temperature; None for the first."""
        body = {"prompt": prompt.to_ints(), "snapshot": self._snapshot}
        arrays = await self._service.arrays("logprobs", body)
        return [None, *arrays["logprobs_N"].tolist()]


class TrainingClient:
    """Trains the service's one trained copy."""

    def __init__(self, service: ServiceConnection) -> None:
        self._service = service

    async def get_info_async(self) -> SimpleNamespace:
        return SimpleNamespace(model_id="ajet")

    async def forward_backward_custom_async(
        self,
        data: list[types.Datum],
        loss_fn: Callable[[list[types.Datum], list[object]], tuple[Any, dict[str, float]]],
    ) -> Awaitable[SimpleNamespace]:
        """Log-probabilities of the targets to `loss_fn`, and its gradient to the weights.

        Targets of weight 0 are not scored: their log-probability is 0, and a loss that depends on one is an error.
        """
        import torch

        lengths = [len(datum.model_input.to_ints()) for datum in data]
        needed = np.concatenate([_needed(datum, length) for datum, length in zip(data, lengths, strict=True)])
        reply = await self._service.arrays(
            "train/forward",
            lengths_B=np.array(lengths, np.int64),
            ids_N=np.concatenate([np.asarray(datum.model_input.to_ints(), np.int32) for datum in data]),
            targets_N=np.concatenate([np.asarray(d.loss_fn_inputs["target_tokens"], np.int32) for d in data]),
            needed_N=needed,
        )
        leaves = [part.clone().requires_grad_() for part in torch.from_numpy(reply["logprobs_N"]).split(lengths)]
        loss, metrics = loss_fn(data, leaves)
        loss.backward()
        gradients = torch.cat([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]).numpy()
        if np.any(gradients[~needed]):
            raise ValueError("the loss depends on tokens of weight 0, which ajet's service does not score")
        await self._service.arrays("train/backward", gradients_N=gradients)
        return _Done(SimpleNamespace(metrics=dict(metrics)))

    async def optim_step_async(self, adam_params: types.AdamParams) -> Awaitable[SimpleNamespace]:
        """One AdamW step with the gradients gathered since the last."""
        done = await self._service.post("train/update", asdict(adam_params))
        metrics = {"actor/grad_norm": done["grad_norm"], "actor/lr": adam_params.learning_rate}
        return _Done(SimpleNamespace(metrics=metrics))

    async def save_state_async(self, name: str) -> Awaitable[SimpleNamespace]:
        return _Done(SimpleNamespace(path=(await self._service.post("train/save_state", {"name": name}))["path"]))

    async def save_weights_for_sampler_async(self, name: str) -> Awaitable[SimpleNamespace]:
        return _Done(SimpleNamespace(path=(await self._service.post("train/save_weights", {"name": name}))["path"]))


def _needed(datum: types.Datum, length: int) -> npt.NDArray[np.generic]:
    weights = datum.loss_fn_inputs.get("weights")
    return np.ones(length, np.bool_) if weights is None else np.asarray(weights) != 0


class _RestClient:
    def __init__(self, service: ServiceConnection) -> None:
        self._service = service

    async def delete_checkpoint_async(self, model_id: str, checkpoint_name: str) -> None:
        """Delete a snapshot; the service keeps the one deleted last until the next."""
        await self._service.delete(f"checkpoints/{checkpoint_name}")


class ServiceClient:
    """The way in. Raises an error that explains where no service of ajet answers at the address."""

    def __init__(self, base_url: str | None = None) -> None:
        self._service = ServiceConnection(_address(base_url))
        self._info = self._service.info()

    def get_server_capabilities(self) -> SimpleNamespace:
        return SimpleNamespace(supported_models=[SimpleNamespace(model_name=self._info["model"])])

    def create_rest_client(self) -> _RestClient:
        return _RestClient(self._service)

    async def create_lora_training_client_async(self, base_model: str, **lora: object) -> TrainingClient:
        """A client that trains all weights from the base model on; there is no LoRA here."""
        self._check(base_model)
        _log.warning("The CPU learner trains all weights; Trinity's LoRA settings for tinker are ignored.")
        await self._service.post("train/start", {})
        return TrainingClient(self._service)

    async def create_training_client_from_state_with_optimizer_async(self, path: str) -> TrainingClient:
        await self._service.post("train/start", {"path": path})
        return TrainingClient(self._service)

    async def create_sampling_client_async(
        self, base_model: str | None = None, model_path: str | None = None
    ) -> SamplingClient:
        """A client of the base model, or of a snapshot, which is loaded for every client."""
        if model_path is None:
            self._check(base_model)
            return SamplingClient(self._service, self._info["model"], None)
        await self._service.post("sampler", {"path": model_path})
        return SamplingClient(self._service, self._info["model"], Path(model_path).name)

    def _check(self, base_model: str | None) -> None:
        served = self._info["model"]
        if base_model is None or Path(base_model).resolve() != Path(served).resolve():
            raise ValueError(f"ajet's service serves only {served} (asked for {base_model!r})")
