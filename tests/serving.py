"""An ASGI application as a real HTTP server on loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware

from ajet_sdk.gateway.gateway import listening_socket
from ajet_sdk.trace.live import live_routes
from ajet_sdk.trace.owner import announce, retract
from ajet_sdk.trace.writer import TraceWriter


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
    return replying(lambda path, headers, body: (status, value))


def replying(reply: Callable[[str, Mapping[str, str], Any], tuple[int, Any]]) -> Any:
    """An application whose status and JSON value a function makes of a request's path, headers and
    JSON."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (part := await receive())["type"] == "http.request":
            body += part.get("body", b"")
            if not part.get("more_body"):
                break
        asked = {name.decode(): value.decode() for name, value in scope["headers"]}
        status, value = reply(scope["path"], asked, json.loads(body or "null"))
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(value).encode()})

    return app


@contextmanager
def completing(
    reply: Callable[[dict[str, Any]], str | int], *, usage: tuple[int, int] = (100, 10)
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A model's endpoint whose replies a function makes of the request: its URL, and the requests
    so far.

    A number is the status of a refusal. `usage`: tokens of each prompt and of each reply.
    """
    asked: list[dict[str, Any]] = []

    def completed(path: str, headers: Mapping[str, str], body: dict[str, Any]) -> tuple[int, Any]:
        asked.append(body)
        said = reply(body)
        if isinstance(said, int):
            return said, {"error": {"message": "refused: response_format", "code": None}}
        message = {"role": "assistant", "content": said}
        counted = {
            "prompt_tokens": usage[0],
            "completion_tokens": usage[1],
            "total_tokens": sum(usage),
        }
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        value = {
            "id": "c",
            "object": "chat.completion",
            "created": 0,
            "model": "judge",
            "choices": choices,
        }
        return 200, {**value, "usage": counted}

    with serving(replying(completed)) as url:
        yield f"{url}/v1", asked


@contextmanager
def live_trace(
    writer: TraceWriter, token: str = "s3cret", middleware: Sequence[Middleware] = ()
) -> Iterator[str]:
    """The trace answers over its own loopback route, as in a live run: the server's URL."""
    with serving(Starlette(routes=live_routes(writer, token), middleware=middleware)) as url:
        announce(writer.path, url, token)
        try:
            yield url
        finally:
            retract(writer.path)
