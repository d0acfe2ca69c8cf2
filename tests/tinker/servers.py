"""`ajet trainer serve` in a thread of this process, to be stopped and started again; and data for
its clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tinker
import uvicorn
from starlette.types import ASGIApp
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from ajet_sdk.gateway.gateway import listening_socket
from ajet_sdk.gateway.http_server import server_config
from ajet_sdk.trainer_service.policies import BaseModel
from ajet_sdk.trainer_service.routes import application
from ajet_sdk.trainer_service.sampling import Samplers
from ajet_sdk.trainer_service.service import Service

IDS = [41, 71, 82, 73, 91, 82, 71, 90, 75, 27, 23, 24, 27, 17, 27, 25, 26]


class Server:
    """A server on one state directory and one port."""

    def __init__(
        self,
        model: Path,
        state: Path,
        api_key: str | None = None,
        port: int = 0,
        around: Callable[[ASGIApp], ASGIApp] = lambda app: app,
        deterministic: bool = False,
    ) -> None:
        self.model, self.state, self._api_key, self._port, self._around = (
            model,
            state,
            api_key,
            port,
            around,
        )
        self._deterministic = deterministic

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        ready.result()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    def _run(self, ready: Future[None]) -> None:
        try:
            asyncio.run(self._serve(ready))
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    async def _serve(self, ready: Future[None]) -> None:
        base = BaseModel(str(self.model))
        samplers = Samplers(base, deterministic=self._deterministic)
        service = Service(base, samplers, self.state, str(self.model))
        service.resume()
        with listening_socket("127.0.0.1", self._port) as listener:
            self._port = listener.getsockname()[1]
            app = self._around(application(service, self._api_key, poll=1.0))
            settings = server_config(app, timeout_graceful_shutdown=1)
            self._server = uvicorn.Server(settings)
            ready.set_result(None)
            await self._server.serve(sockets=[listener])
        await service.aclose()

    def client(self) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.url)

    def post(self, route: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/api/v1/{route}", json=body)

    def send_pass(self, model_id: str, number: int, *data: types.Datum) -> httpx.Response:
        """A `forward_backward` as the SDK sends it, with a number of our choice."""
        given = types.ForwardBackwardInput(data=list(data), loss_fn="cross_entropy")
        request = types.ForwardBackwardRequest(
            forward_backward_input=given, model_id=model_id, seq_id=number
        )
        body = forward_backward_request_to_proto(request).SerializeToString()
        return httpx.post(f"{self.url}/api/v1/forward_backward", content=body)

    def result(self, promise: str) -> httpx.Response:
        """What a promise came to, once it has."""
        while (reply := self.post("retrieve_future", request_id=promise)).status_code == 408:
            pass
        return reply


def train(
    service: tinker.ServiceClient, model: Path, *, rank: int = 4, seed: int = 1, **kinds: bool
) -> Any:
    """A new training client."""
    return service.create_lora_training_client(str(model), rank=rank, seed=seed, **kinds).result()


def datum(ids: list[int] = IDS, **inputs: Any) -> types.Datum:
    """A sequence whose tokens predict each other; `weights` 1 where no inputs are given."""
    size = len(ids) - 1
    values = {
        name: np.asarray(value, np.float32)
        for name, value in (inputs or {"weights": np.ones(size)}).items()
    }
    targets = {"target_tokens": np.asarray(ids[1:], np.int64)}
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={**targets, **values}
    )


def logprobs(trainer: Any, *data: types.Datum) -> list[np.ndarray[Any, Any]]:
    """Those of the targets, by the weights as they are."""
    done = trainer.forward(list(data) or [datum()], "cross_entropy").result()
    return [output["logprobs"].to_numpy() for output in done.loss_fn_outputs]
