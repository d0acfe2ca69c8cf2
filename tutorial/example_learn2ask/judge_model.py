"""The judge's model as a program, served over HTTP as OpenAI's API: the stand-in for a real one.

By the rubric in `rubric.txt` it compares what was asked with what the doctor asked and with what is known already.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dialogues import ASK, COMPLAINTS


def topic_of(text: str) -> str | None:
    return next((topic for topic, words in ASK.items() if words == text.strip()), None)


def grade(consultation: str, doctors: str, asked: str) -> tuple[float, str]:
    topic = topic_of(asked)
    if topic is None:
        return 0.0, "It is nothing that a doctor would say."
    if topic == topic_of(doctors):
        return 1.0, "The doctor asked the same."
    if ASK[topic] in consultation:
        return 0.0, "It was asked and answered before."
    complaint = next((one for one in COMPLAINTS if one in consultation), None)
    useful = complaint is not None and topic in COMPLAINTS[complaint]
    return (0.3, "It matters, but not yet.") if useful else (0.0, "It is beside the complaint.")


def part(prompt: str, tag: str) -> str:
    found = re.search(rf"<{tag}>\n(.*?)\n</{tag}>", prompt, re.DOTALL)
    return found[1] if found else ""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        prompt = asked["messages"][-1]["content"]
        score, reason = grade(part(prompt, "task"), part(prompt, "reference"), part(prompt, "answer"))
        content = json.dumps({"reason": reason, "score": score})
        choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
        usage = {"prompt_tokens": len(prompt) // 4, "completion_tokens": len(content) // 4}
        body = json.dumps({"id": "1", "model": asked["model"], "choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@contextmanager
def served() -> Iterator[str]:
    """Its base URL, as long as the block lasts."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
