"""Drawn pictures for tests, and an engine that takes them."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

from ajet_sdk.protocols import Answer, Ask, Choice


def drawn(seed: int = 0, width: int = 8, height: int = 8) -> Image.Image:
    """A picture of noise; another one for each seed."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """A picture's file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png(seed: int = 0, width: int = 8, height: int = 8) -> bytes:
    """The file of a drawn picture."""
    return file_of(drawn(seed, width, height))


def url_of(data: bytes, media_type: str = "image/png") -> str:
    """A data URL, as the SDKs of vendors send it."""
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def part(data: bytes | str, **more: Any) -> dict[str, Any]:
    """A picture in a message, as OpenAI's chat completions have it."""
    url = data if isinstance(data, str) else url_of(data)
    return {"type": "image_url", "image_url": {"url": url, **more}}


def text(content: str) -> dict[str, Any]:
    """A text beside pictures in a message."""
    return {"type": "text", "text": content}


class Seeing:
    """An engine that answers without a tokenizer, as one of another server."""

    model = "m"
    takes_pictures = True

    def __init__(self, reply: str = "left") -> None:
        self._reply = reply

    async def answer(self, ask: Ask) -> Answer:
        message = {"role": "assistant", "content": self._reply}
        return Answer((Choice(message, None, "stop", [1], [-0.5]),), self.model, prompt_ids=[2])

    async def count(self, ask: Ask) -> int:
        return 1

    def forget(self, episode_id: str) -> None:
        return

    async def aclose(self) -> None:
        return
