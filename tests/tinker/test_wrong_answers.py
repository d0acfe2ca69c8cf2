"""A service that answers wrongly, through the official SDK: the error names the service and what is
wrong."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tinker.proto import tinker_public_pb2 as pb

from ajet_sdk.config.config import load_config
from ajet_sdk.engines.tinker.sdk import SdkService, Session
from ajet_sdk.engines.tinker.service import Datum, wait
from ajet_sdk.errors import EngineUnavailable, TrainingError
from tests.tinker.servers import IDS, Server

pytestmark = pytest.mark.slow
STALL = 6.0


class Tampering:
    """Changes the results of a server's promises, or refuses to be unpaid."""

    def __init__(self) -> None:
        self.change: Callable[[bytes], bytes] | None = None
        self.unpaid = False

    def around(self, app: ASGIApp) -> ASGIApp:
        async def tampered(scope: Scope, receive: Receive, send: Send) -> None:
            result = scope["type"] == "http" and scope["path"].endswith("retrieve_future")
            if (
                self.unpaid
                and scope["type"] == "http"
                and (result or scope["path"].endswith("asample"))
            ):
                await JSONResponse({"detail": "there is no credit left"}, 402)(scope, receive, send)
                return
            if not result or self.change is None:
                await app(scope, receive, send)
                return
            sent: list[Message] = []

            async def keep(message: Message) -> None:
                sent.append(message)

            await app(scope, receive, keep)
            headers = dict(sent[0]["headers"])
            body = b"".join(message.get("body", b"") for message in sent)
            media = headers[b"content-type"].decode()
            if "protobuf" in media:
                body = self.change(body)
            await Response(body, sent[0]["status"], media_type=media)(scope, receive, send)

        return tampered


@pytest.fixture
def tampering() -> Tampering:
    return Tampering()


@pytest.fixture
def wrong(tiny: Path, tmp_path: Path, tampering: Tampering) -> Iterator[SdkService]:
    with Server(tiny, tmp_path / "state", around=tampering.around) as server:
        tinker = {"base_url": server.url, "stall_timeout": STALL}
        service = SdkService(
            Session(load_config(values={"model": {"path": str(tiny)}, "tinker": tinker}))
        )
        yield service
        tampering.change, tampering.unpaid = None, False
        service.close()


def datum(size: int) -> Datum:
    return Datum(IDS[:size], np.ones(size - 1, np.float32))


def sample(service: SdkService, weights: Any) -> Any:
    asked = {"max_tokens": 20, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "seed": 1, "stop": []}
    return asyncio.run(weights.sample(IDS[:4], 1, **asked, vocabulary=300))


def test_the_result_of_an_older_promise_is_no_index_error(
    wrong: SdkService, tampering: Tampering
) -> None:
    older: list[bytes] = []

    def first(body: bytes) -> bytes:
        older.append(body)
        return older[0]

    tampering.change = first
    assert [len(values) for values in wait(wrong.forward([datum(9)]), STALL, "forward", wrong)] == [
        8
    ]
    for data in ([datum(5)], [datum(9), datum(5)]):
        with pytest.raises(TrainingError, match=wrong.name):
            wait(wrong.forward(data), STALL, "forward", wrong)


def changed(**fields: Callable[[int], Any]) -> Callable[[bytes], bytes]:
    def change(body: bytes) -> bytes:
        response = pb.SampleResponse.FromString(body)
        for sequence in response.sequences:
            size = len(sequence.tokens) // 4
            for name, make in fields.items():
                setattr(sequence, name, make(size).tobytes())
        return bytes(response.SerializeToString())

    return change


@pytest.mark.parametrize(
    "change",
    [
        changed(tokens=lambda size: np.full(size, 10**6, np.int32)),
        changed(tokens=lambda size: np.full(size, -1, np.int32)),
        changed(logprobs=lambda size: np.full(size, -0.5, np.float32)),
        changed(logprobs=lambda size: np.full(size, 0.5, np.float32)),
        changed(logprobs=lambda size: np.full(size, np.nan, np.float32)),
        changed(logprobs=lambda size: np.full(size - 1, -0.5, np.float32)),
    ],
    ids=["beyond the vocabulary", "negative", "all equal", "above 0", "not a number", "too few"],
)
def test_a_wrong_sample_is_a_fault_of_the_service(
    wrong: SdkService, tampering: Tampering, change: Callable[[bytes], bytes]
) -> None:
    weights = wrong.publish()
    assert len(sample(wrong, weights)[0].output_ids) == 20
    tampering.change = change
    with pytest.raises(EngineUnavailable, match=wrong.name):
        sample(wrong, weights)


def test_an_account_without_credit_is_said(wrong: SdkService, tampering: Tampering) -> None:
    """Also if another session of the process, whose service is gone, complains all the time."""
    weights = wrong.publish()
    tampering.unpaid = True
    is_over = threading.Event()

    def complain() -> None:
        while not is_over.wait(0.02):
            logging.getLogger("tinker.lib").warning(
                "Session heartbeat failed for 120 seconds for session of-another."
            )

    complaining = threading.Thread(target=complain)
    complaining.start()
    try:
        with pytest.raises(EngineUnavailable, match="credit") as caught:
            sample(wrong, weights)
    finally:
        is_over.set()
        complaining.join()
    assert wrong.name in str(caught.value)
