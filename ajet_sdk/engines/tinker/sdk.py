"""Uses a training service through the official SDK of the Tinker API (the package `tinker`, 0.22
and later).

The SDK retries lost requests (429, 5xx, broken connections) under the same number, so that the
service applies them once. Its telemetry is off unless the config enables it.
"""

from __future__ import annotations

import asyncio
import contextvars
import io
import logging
import os
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
import numpy as np

from ajet_sdk.addresses import public
from ajet_sdk.config.api_keys import api_key
from ajet_sdk.config.schema import Prices
from ajet_sdk.engines.http import is_loopback
from ajet_sdk.engines.loop_calls import in_thread
from ajet_sdk.engines.picture_text import PictureSpan
from ajet_sdk.engines.tinker.answers import WrongAnswer, check_logprobs, check_sample
from ajet_sdk.engines.tinker.service import Adam, Continued, Datum, Loss, wait
from ajet_sdk.errors import ConfigError, EngineUnavailable, MissingExtra, TrainingError
from ajet_sdk.types import Floats

if TYPE_CHECKING:
    import tinker
    from tinker import SamplingClient, TrainingClient

    from ajet_sdk.config.config import Config

T = TypeVar("T")
U = TypeVar("U")

_PAUSE = 0.25
"""Seconds between two attempts to reach a service that has not started yet."""
_OF_THE_MODEL = (
    "forward",
    "forward_backward",
    "optim_step",
    "save_state",
    "save_weights_for_sampler",
    "sampling",
)
"""Requests for which a 404 means that the service no longer has the model."""
_BILLED = {"sampling_prefill": "prefill", "sampling_sample": "sample", "training": "train"}
"""Prices by the kind of a billed event."""
_LOCAL_KEY = "tml-local"
"""Key for a local server without keys: the SDK requires this prefix."""


class Session:
    """A connection to the config's service. Raises ConfigError, MissingExtra, TrainingError."""

    def __init__(self, config: Config) -> None:
        if sys.version_info < (3, 11):
            raise ConfigError(
                "backbone tinker needs Python 3.11 or later, as does the package tinker (this is "
                f"{sys.version_info.major}.{sys.version_info.minor})"
            )
        settings = config.tinker
        self.url = settings.base_url or os.environ.get("TINKER_BASE_URL")
        self.stall = settings.stall_timeout
        self.model, self.rank, self.seed = (
            str(config.model.path),
            config.model.lora.r,
            config.trainer_common.seed,
        )
        key = api_key(settings.api_key_env)
        if key is None and not (self.url and is_loopback(self.url)):
            raise ConfigError(
                f"{settings.api_key_env} (tinker.api_key_env) is not set; it has the service's"
                " API key"
            )
        os.environ["TINKER_TELEMETRY"] = str(int(settings.telemetry))  # read as the client is made
        try:
            import tinker
        except ModuleNotFoundError as error:
            raise MissingExtra(str(error.name), "tinker") from error
        self.tinker: ModuleType = tinker
        logging.getLogger("tinker.lib.retry_handler").setLevel(
            logging.CRITICAL
        )  # its errors are raised, and reported
        self._warnings = _Warnings()
        logging.getLogger("tinker").addHandler(self._warnings)
        self.lost = ""
        """The service's error if the session, its model, or one of its requests is gone."""
        self._reach()
        where = self._where = {"base_url": self.url, "api_key": key or _LOCAL_KEY}
        self.client = self.call("opening a session", lambda: tinker.ServiceClient(**where))
        self.newer = hasattr(getattr(tinker, "RestClient", None), "get_server_capabilities")
        """The SDK is 0.38 or later: a REST client needs no session, and adapters are downloaded
        file by file."""
        connect = (
            (lambda: tinker.RestClient(**where)) if self.newer else self.client.create_rest_client
        )
        self.rest = self.call("opening a connection", connect)

    def _reach(self) -> None:
        """Wait until the service answers. The SDK would wait under a process-wide lock and block
        other sessions."""
        if self.url is None:
            return
        deadline = time.monotonic() + self.stall
        while True:
            try:
                contextvars.Context().run(
                    httpx.get, f"{self.url.rstrip('/')}/api/v1/healthz", timeout=self.stall
                )
                return
            except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
                raise ConfigError(
                    f"tinker.base_url: {self.name} is no address of a service: {error}"
                ) from error
            except httpx.TransportError as error:
                if time.monotonic() > deadline:
                    raise TrainingError(
                        f"{self.name} has not answered for {self.stall:g} s (tinker.stall_timeout):"
                        f" {error}; start it, or correct tinker.base_url"
                    ) from error
            time.sleep(_PAUSE)

    @property
    def name(self) -> str:
        """The service's name for messages."""
        return public(self.url) if self.url else "the hosted service"

    @property
    def reason(self) -> str:
        """The newest warning of the SDK, which pauses for example while an account has a billing
        issue (402)."""
        return f": {self._warnings.newest}" if self._warnings.newest else ""

    def call(self, action: str, function: Callable[[], object]) -> Any:
        """Call the SDK and wait, in a context without an episode, as its requests are not an
        agent's."""
        started = in_thread(
            lambda: _future(contextvars.Context().run(function)).result(), f"ajet-tinker {action}"
        )
        try:
            return wait(started, self.stall, action, self)
        except TrainingError:
            raise
        except Exception as error:  # the SDK's errors have no common class
            raise self.failed(action, error) from error

    def send(self, action: str, function: Callable[[], Any], read: Callable[[Any], T]) -> Future[T]:
        """Call the SDK; returns a future of its result, converted by `read`."""
        outcome: Future[T] = Future()

        def done(future: Future[Any]) -> None:
            try:
                outcome.set_result(read(future.result()))
            except WrongAnswer as error:
                outcome.set_exception(error)
            except Exception as error:  # noqa: BLE001  raised where it is waited for
                outcome.set_exception(self.failed(action, error))

        try:
            _future(contextvars.Context().run(function)).add_done_callback(done)
        except Exception as error:
            raise self.failed(action, error) from error
        return outcome

    def failed(self, action: str, error: Exception) -> TrainingError:
        return TrainingError(self.describe(action, error))

    def describe(self, action: str, error: Exception) -> str:
        """The error message of a failed action; sets `lost` if the session is gone."""
        message = f"{self.name} failed at {action}: {type(error).__name__}: {error}"
        if _is_lost(action, error):
            self.lost = self.lost or message
        return message

    def served(self, model: str) -> tuple[str, int | None]:
        """The service's name of a model, which may be another path of a directory, and its context
        length.

        Raises ConfigError if the service does not have the model.
        """
        client = self.rest if self.newer else self.client
        models = self.call(
            "get_server_capabilities", client.get_server_capabilities
        ).supported_models
        known = {str(each.model_name): each for each in models}
        here = Path(model).resolve() if Path(model).is_dir() else None
        if model in known:
            same = [model]
        else:
            same = [name for name in known if here and Path(name).resolve() == here]
        if known and not same:
            raise ConfigError(
                f"model.path: {self.name} has no model {model}; it has {', '.join(known)}"
            )
        name = same[0] if same else model
        self.trainable = getattr(known.get(name), "trainable", None) is not False
        return name, getattr(known.get(name), "max_context_length", None)

    def billed_rates(self, model: str) -> Prices:
        """Dollars per million tokens of a model, as billed by the service in the last 14 days.

        Zeros if the key may not read bills, or a price other than that of cached tokens is missing.
        """
        if not hasattr(self.tinker, "AdminClient"):  # older SDKs
            return Prices()
        now = datetime.now(timezone.utc).replace(minute=0, second=0, microsecond=0)
        try:
            admin = self.call(
                "opening a connection", lambda: self.tinker.AdminClient(**self._where)
            )
            usage = self.call(
                "get_billing_usage", lambda: admin.get_billing_usage(now - timedelta(days=14), now)
            )
        except TrainingError:
            return Prices()
        rates = {}
        for event in usage.data:
            kind = (
                "cached"
                if getattr(event.event_info, "cached", False)
                else _BILLED.get(event.event_info.type)
            )
            rate = event.effective_rate_usd_per_million_tokens
            if event.base_model == model and kind and rate is not None:
                rates[kind] = rate
        if not {"prefill", "sample", "train"} <= rates.keys():
            return Prices()
        return Prices(**{"cached": rates["prefill"], **rates})

    def base_of(self, path: str) -> str:
        info = self.call(
            f"looking up {path}", lambda: self.rest.get_weights_info_by_tinker_path(path)
        )
        return str(info.base_model)

    def weights(self, path: str | None = None) -> SdkWeights:
        """Weights at the service, by default of the base model, to sample from."""
        return SdkWeights(self, self.sampling(path), path)

    def sampling(self, path: str | None) -> SamplingClient:
        which = {"model_path": path} if path else {"base_model": self.model}
        return self.call(
            f"opening {path or self.model}", lambda: self.client.create_sampling_client(**which)
        )

    def renew(self) -> None:
        """Open a new session in place of a lost one."""
        self.client = self.call(
            "opening a session", lambda: self.tinker.ServiceClient(**self._where)
        )
        self.lost = ""

    def close(self) -> None:
        """End the session; errors are ignored."""
        logging.getLogger("tinker").removeHandler(self._warnings)
        close = getattr(self.client, "close", None)  # not in older SDKs
        if close is not None:
            try:
                self.call("finishing the session", lambda: close("success"))
            except TrainingError:
                return


_HEARTBEAT = "Session heartbeat failed"


class _Warnings(logging.Handler):
    """Keeps the newest warning of the SDK, which retries without an error."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.newest = ""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()[:500]
        # The heartbeat of any session in the process, which is no answer to a request of this one.
        if not (self.newest and message.startswith(_HEARTBEAT)):
            self.newest = message


class SdkService:
    """A LoRA adapter in training. The service works in the order of the calls.

    Methods that return a Future return at once, so that calls can be pipelined; others block. Do
    not call them from a thread with a running event loop. All raise TrainingError if the service
    fails. `max_model_len` limits prompt and reply together; None if unknown.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._tinker = session.tinker
        session.model, self.max_model_len = session.served(session.model)
        if not session.trainable:
            raise ConfigError(
                f"model.path: {session.name} samples from {session.model}, but does not train it"
            )
        adapter = {
            "base_model": session.model,
            "rank": session.rank,
            "seed": session.seed,
            "train_unembed": False,
        }
        create = session.client.create_lora_training_client
        self._training: TrainingClient = session.call("create_model", lambda: create(**adapter))

    @property
    def name(self) -> str:
        """The service's name for messages."""
        return self._session.name

    @property
    def reason(self) -> str:
        """Why it may not answer; see `Session.reason`."""
        return self._session.reason

    def forward(self, data: Sequence[Datum]) -> Future[list[Floats]]:
        """Compute the log-probabilities of each datum's targets."""
        batch = [self._datum(datum, "cross_entropy") for datum in data]
        read = partial(_logprobs, self.name, "forward", data)
        return self._session.send(
            "forward", lambda: self._training.forward(batch, "cross_entropy"), read
        )

    def forward_backward(
        self, data: Sequence[Datum], loss: Loss, bounds: tuple[float, float] | None = None
    ) -> Future[list[Floats]]:
        """As `forward`, and add the loss's gradient to the next `optim_step`; `bounds` are those of
        the ratio."""
        batch = [self._datum(datum, loss) for datum in data]
        settings: dict[str, float] | None
        if bounds:
            settings = dict(zip(("clip_low_threshold", "clip_high_threshold"), bounds, strict=True))
        else:
            settings = None
        read = partial(_logprobs, self.name, "forward_backward", data)
        return self._session.send(
            "forward_backward", lambda: self._training.forward_backward(batch, loss, settings), read
        )

    def optim_step(self, adam: Adam) -> Future[Mapping[str, float]]:
        """Apply the gradient, clear it, and return the service's metrics."""
        parameters = self._tinker.AdamParams(
            learning_rate=adam.lr,
            beta1=adam.betas[0],
            beta2=adam.betas[1],
            eps=1e-8,
            weight_decay=adam.weight_decay,
            grad_clip_norm=adam.grad_clip,
        )
        return self._session.send(
            "optim_step",
            lambda: self._training.optim_step(parameters),
            lambda answer: answer.metrics or {},
        )

    def publish(self) -> SdkWeights:
        """Return the current weights, to sample from."""
        sampling = self._session.call(
            "save_weights_for_sampler", self._training.save_weights_and_get_sampling_client
        )
        return SdkWeights(self._session, sampling)

    def base(self) -> SdkWeights:
        """Return the weights without an adapter."""
        return self._session.weights()

    def save(self, name: str) -> str:
        """Save weights and optimizer state at the service; returns their path."""
        return str(self._session.call("save_state", lambda: self._training.save_state(name)).path)

    def load(self, path: str) -> None:
        """Restore a state saved by `save`."""
        create = self._session.client.create_training_client_from_state_with_optimizer
        try:
            self._training = self._session.call("loading a state", lambda: create(path))
        except TrainingError:  # servers with the older protocol
            load = getattr(self._training, "load_state_with_optimizer", self._training.load_state)
            self._session.call("load_weights", lambda: load(path))

    def trial(self) -> SdkService:
        """A new adapter in the same session, for measurements."""
        return SdkService(self._session)

    def keep_sampler(self, name: str) -> str:
        """Save the weights at the service for sampling; returns their path."""
        answer = self._session.call(
            "save_weights_for_sampler", lambda: self._training.save_weights_for_sampler(name)
        )
        return str(answer.path)

    def download(self, name: str, directory: Path) -> str:
        """Write the adapter to a directory in peft's format. Returns its path at the service."""
        if self._session.newer:
            save = self._training.save_weights_external
            path = str(self._session.call("save_weights_external", lambda: save(name)).path)
            client = self._session.rest
            links = self._session.call(
                f"looking up {path}", lambda: client.get_external_weights_urls(path)
            ).urls
            for file, url in links.items():
                target = (directory / file).resolve()
                if not target.is_relative_to(directory.resolve()):
                    raise self._session.failed(
                        f"downloading {path}", ValueError(f"a file named {file}")
                    )
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(self._fetch(url, path))
            return path
        path = self.keep_sampler(name)
        try:
            with tarfile.open(fileobj=io.BytesIO(self._fetch(self._archive(path), path))) as files:
                files.extractall(directory, filter="data")
        except (tarfile.TarError, OSError) as error:
            raise self._session.failed(f"downloading {path}", error) from error
        return path

    def _archive(self, path: str) -> str:
        run, _, checkpoint = path.removeprefix("tinker://").partition("/")
        name = checkpoint.removeprefix("sampler_weights/")
        ask = self._session.rest.get_checkpoint_archive_url
        try:
            return str(
                self._session.call("the adapter", lambda: ask(run, f"sampler_weights/{name}")).url
            )
        except TrainingError:  # a server that names checkpoints without their kind
            return str(self._session.call("the adapter", lambda: ask(run, name)).url)

    def _fetch(self, url: str, path: str) -> bytes:
        try:
            return (
                httpx.get(url, timeout=self._session.stall, follow_redirects=True)
                .raise_for_status()
                .content
            )
        except httpx.HTTPError as error:
            raise self._session.failed(f"downloading {path}", error) from error

    def delete(self, path: str) -> None:
        """Delete a checkpoint of `save`, `keep_sampler` or `download` at the service."""
        run, _, checkpoint = path.removeprefix("tinker://").partition("/")
        self._session.call(
            f"deleting {path}", lambda: self._session.rest.delete_checkpoint(run, checkpoint)
        )

    def close(self) -> None:
        self._session.close()

    def _datum(self, datum: Datum, loss: str) -> tinker.Datum:
        ids = [int(i) for i in datum.token_ids]
        weights = np.asarray(datum.weights, np.float32)
        policy = loss != "cross_entropy"
        inputs = {
            "target_tokens": np.array(target_tokens(ids, datum.pictures), np.int64),
            "advantages" if policy else "weights": weights,
        }
        if policy and datum.logprobs is not None:
            inputs["logprobs"] = np.asarray(datum.logprobs, np.float32)
        tensor = self._tinker.TensorData.from_numpy
        return self._tinker.Datum(
            model_input=model_input(self._tinker, ids[:-1], datum.pictures),
            loss_fn_inputs={name: tensor(values) for name, values in inputs.items()},
        )


class SdkWeights:
    """Immutable weights at the service, to sample from."""

    def __init__(self, session: Session, sampling: SamplingClient, path: str | None = None) -> None:
        """`path`: the weights' path at the service, for sampling in another session."""
        self._session = session
        self._sampling = sampling
        self._tinker = session.tinker
        self._path = path
        self._lost: SamplingClient | None = None
        self._renewing = threading.Lock()

    async def sample(
        self,
        prompt_ids: Sequence[int],
        count: int,
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        seed: int | None,
        stop: Sequence[str] | Sequence[int],
        vocabulary: int | None = None,
        pictures: Sequence[PictureSpan] = (),
    ) -> list[Continued]:
        """`count` continuations. Raises EngineUnavailable."""
        prompt = model_input(self._tinker, prompt_ids, pictures)
        parameters = self._tinker.SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            stop=list(stop),
            seed=None if seed is None else seed % 2**31,
        )
        session = self._session
        sampling = self._sampling
        try:
            if self._path is not None and self._lost is self._sampling:
                await asyncio.to_thread(self._renew)
            sampling = self._sampling
            future = contextvars.Context().run(sampling.sample, prompt, count, parameters)
            answer = await asyncio.wait_for(asyncio.wrap_future(_future(future)), session.stall)
        except (asyncio.TimeoutError, TimeoutError) as error:
            raise EngineUnavailable(
                f"{session.name} has not answered a sample request for {session.stall:g} s "
                f"(tinker.stall_timeout){session.reason}"
            ) from error
        except Exception as error:
            if _is_lost("sampling", error):
                self._lost = sampling
            raise EngineUnavailable(session.describe("sampling", error)) from error
        cached = int(getattr(answer, "prompt_cache_hit_tokens", 0) or 0)
        sequences = answer.sequences
        if len(sequences) != count:
            raise EngineUnavailable(f"{session.name} sent {len(sequences)} samples of {count}")
        if odd := {sequence.stop_reason for sequence in sequences} - {"stop", "length"}:
            raise EngineUnavailable(
                f"{session.name} ended a sample for {', '.join(map(repr, odd))}, which is no end"
            )
        try:
            for s in sequences:
                check_sample(
                    session.name,
                    s.tokens,
                    s.logprobs or (),
                    longest=max_tokens,
                    vocabulary=vocabulary,
                )
        except WrongAnswer as error:
            raise EngineUnavailable(str(error)) from error
        return [
            Continued(list(s.tokens), list(s.logprobs), s.stop_reason == "stop", cached)
            for s in sequences
        ]

    def _renew(self) -> None:
        with self._renewing:
            if self._lost is self._sampling:
                self._session.renew()
                self._sampling = self._session.sampling(self._path)

    def logprobs(
        self, token_ids: Sequence[int], pictures: Sequence[PictureSpan] = ()
    ) -> Future[Floats]:
        """Compute the log-probabilities of all tokens but the first, length T - 1, at temperature
        1; 0 for those of pictures."""
        prompt = model_input(self._tinker, token_ids, pictures)
        size = len(token_ids) - 1

        def read(values: Sequence[float | None]) -> Floats:
            listed = list(values)
            if len(listed) == len(token_ids):  # some servers omit the first value, which is None
                listed = listed[1:]
            logprobs = np.array(
                [np.nan if value is None else value for value in listed], np.float32
            )
            if len(logprobs) == size:
                for span in pictures:
                    logprobs[max(0, span.start - 1) : span.end - 1] = 0
            check_logprobs(self._session.name, "compute_logprobs", [logprobs], [size])
            return logprobs

        return self._session.send(
            "compute_logprobs", lambda: self._sampling.compute_logprobs(prompt), read
        )


def target_tokens(token_ids: Sequence[int], pictures: Sequence[PictureSpan]) -> list[int]:
    """The tokens after each token of an input but the last; 0 in pictures, where the API has
    none."""
    targets = list(token_ids[1:])
    for span in pictures:
        begin = max(0, span.start - 1)
        targets[begin : span.end - 1] = [0] * (span.end - 1 - begin)
    return targets


def model_input(
    sdk: ModuleType, token_ids: Sequence[int], pictures: Sequence[PictureSpan]
) -> tinker.ModelInput:
    """An input with its pictures in place of their tokens."""
    ids = [int(token) for token in token_ids]
    chunks: list[Any] = []
    done = 0
    for span in pictures:
        if span.start > done:
            chunks.append(sdk.types.EncodedTextChunk(tokens=ids[done : span.start]))
        chunks.append(_image_chunk(sdk, span))
        done = span.end
    if not pictures:
        return sdk.ModelInput.from_ints(ids)
    chunks.append(sdk.types.EncodedTextChunk(tokens=ids[done:]))
    return sdk.ModelInput(chunks=chunks)


_FORMATS = {"image/png": "png", "image/jpeg": "jpeg"}
"""Formats of a picture in the API; others are sent as PNG."""


def _image_chunk(sdk: ModuleType, span: PictureSpan) -> Any:
    kind = _FORMATS.get(span.picture.media_type)
    data = span.picture.png() if kind is None else span.picture.data
    return sdk.types.ImageChunk(data=data, format=kind or "png", expected_tokens=len(span))


def _future(value: Any) -> Future[Any]:
    """Convert the SDK's result to a standard future; newer SDKs return futures in more places."""
    if hasattr(value, "future"):
        inner: Future[object] = value.future()
        return inner
    if isinstance(value, Future):
        return value
    outcome: Future[Any] = Future()
    outcome.set_result(value)
    return outcome


def _logprobs(
    service: str, action: str, data: Sequence[Datum], answer: tinker.ForwardBackwardOutput
) -> list[Floats]:
    """The log-probabilities of each datum's targets. Raises WrongAnswer."""
    outputs = [
        getattr(output.get("logprobs"), "to_numpy", None) for output in answer.loss_fn_outputs
    ]
    if None in outputs:
        raise WrongAnswer(f"{service} answered {action} without log-probabilities")
    values = [np.asarray(read(), np.float32) for read in outputs if read is not None]
    check_logprobs(service, action, values, [len(datum.token_ids) - 1 for datum in data])
    return values


def _is_lost(action: str, error: Exception) -> bool:
    """Whether an error means that the session is gone: 410, or 404 to a request to its model."""
    status = {getattr(each, "status_code", None) for each in (error, error.__cause__)}
    return 410 in status or (404 in status and action in _OF_THE_MODEL)
