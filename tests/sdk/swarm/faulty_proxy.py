"""A proxy between a client and a server that loses, doubles and replaces requests."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

import httpx

Fault = Literal["refuse", "lose_answer", "twice", "not_found", "web_page"]


class FaultyProxy:
    """Passes requests on; each of `faults` changes one request of the protocol."""

    def __init__(self, url: str, *, prefix: str = "") -> None:
        self.faults: list[Fault] = []
        self.breaks_calls = False
        """Whether calls of the model break off unread."""
        self._open: set[socket.socket] = set()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                is_call = "/episodes/" in self.path and "/swarm/" not in self.path
                fault = proxy.faults.pop() if proxy.faults and not is_call else None
                if fault in ("not_found", "web_page"):
                    self._answer(404 if fault == "not_found" else 200, b"<html>")
                elif fault == "refuse" or (is_call and proxy.breaks_calls):
                    self._drop()
                else:
                    self._forward(body, fault)

            def _forward(self, body: bytes, fault: str | None) -> None:
                kept = {k: v for k, v in self.headers.items() if k.lower() != "content-length"}
                path = self.path.removeprefix(prefix)
                proxy._open.add(self.connection)
                for _ in range(2 if fault == "twice" else 1):
                    with httpx.stream(
                        self.command, url + path, content=body, headers=kept, timeout=60
                    ) as response:
                        if "event-stream" in response.headers.get("content-type", ""):
                            self._stream(response)
                            return
                        content = response.read()
                        status = response.status_code
                if fault == "lose_answer":
                    self._drop()
                else:
                    self._answer(status, content)

            def _stream(self, response: httpx.Response) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("connection", "close")
                self.end_headers()
                with suppress(OSError, httpx.HTTPError):
                    for chunk in response.iter_raw():
                        self.wfile.write(chunk)
                        self.wfile.flush()
                self.close_connection = True

            def _answer(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def _drop(self) -> None:
                self.close_connection = True
                with suppress(OSError):
                    self.connection.shutdown(socket.SHUT_RDWR)

            do_GET = do_POST = do_PUT = _pass

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        assert urlsplit(self.url).port

    def drop_connections(self) -> None:
        """Break every connection that is open."""
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def __enter__(self) -> FaultyProxy:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.drop_connections()
        self._server.shutdown()
        self._server.server_close()
