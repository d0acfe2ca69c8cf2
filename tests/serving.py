"""An ASGI application as a real HTTP server on loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from ajet_sdk.gateway.gateway import listening_socket


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """The server's URL; it ends with the block."""
    listener = listening_socket("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, interface="asgi3", lifespan="off", log_config=None))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def answering(value: Any, status: int = 200) -> Any:
    """An application that answers every request with one JSON value."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(value).encode()})

    return app


@contextmanager
def completing(
    reply: Callable[[dict[str, Any]], str | int], *, usage: tuple[int, int] = (100, 10)
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A model's endpoint whose replies a function makes of the request: its URL, and the requests so far.

    A number is the status of a refusal. `usage`: tokens of each prompt and of each reply.
    """
    asked: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (part := await receive())["type"] == "http.request":
            body += part.get("body", b"")
            if not part.get("more_body"):
                break
        asked.append(json.loads(body))
        said = reply(asked[-1])
        if isinstance(said, int):
            await answering({"error": {"message": "refused: response_format", "code": None}}, said)(
                scope, receive, send
            )
            return
        message = {"role": "assistant", "content": said}
        counted = {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        value = {
            "id": "c",
            "object": "chat.completion",
            "created": 0,
            "model": "judge",
            "choices": choices,
            "usage": counted,
        }
        await answering(value)(scope, receive, send)

    with serving(app) as url:
        yield f"{url}/v1", asked
