"""Messages with pictures, under the names of AgentJet's `ajet.utils.multimodal`."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet_sdk.errors import PictureError
from ajet_sdk.pictures import Picture, is_data_url, picture_at, picture_of, read_picture, url_of
from ajet_sdk.types import Json

if TYPE_CHECKING:
    from PIL import Image

ImageLike = Any
"""An image of Pillow, the bytes of a file, `{"bytes": …, "path": …}`, a path, or a URL."""
_LINKS = ("http://", "https://")


def build_multimodal_messages(
    system_prompt: str | None,
    user_text: str,
    image: ImageLike | None = None,
    images: Sequence[ImageLike] | None = None,
) -> list[Json]:
    """Messages of chat completions: the system's, if any, and the user's, whose pictures precede
    its text. Raises PictureError."""
    pictures = [] if image is None else [image]
    pictures += images or ()
    messages: list[Json] = []
    if system_prompt:
        messages.append({"role": "system", "content": system_prompt})
    content: str | list[Json] = user_text
    if pictures:
        content = [
            {"type": "image_url", "image_url": {"url": encode_image_as_data_url(picture)}}
            for picture in pictures
        ]
        content.append({"type": "text", "text": user_text})
    messages.append({"role": "user", "content": content})
    return messages


def task_metadata_to_messages(
    metadata: Mapping[str, Any],
    system_prompt: str | None,
    user_text_key: str = "question",
    user_text: str | None = None,
) -> list[Json]:
    """Messages from the columns of a row: its question and its first picture."""
    text = metadata.get(user_text_key, "") if user_text is None else user_text
    return build_multimodal_messages(system_prompt, text, image=extract_image(metadata))


def extract_image(metadata: Mapping[str, Any]) -> ImageLike | None:
    """The picture of a row: its `image`, else its `images`, of a list the first; None without
    any."""
    found = metadata.get("image", metadata.get("images"))
    if isinstance(found, list | tuple):
        return found[0] if found else None
    return found


def extract_images_from_openai_messages(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The pictures of messages, as they are there, in order."""
    found = []
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, Mapping) else None
            value = None
            if kind == "image_url":
                value = part.get("image_url")
                if isinstance(value, Mapping):
                    value = value.get("url")
            elif kind == "image":
                value = part.get("image") or part.get("url")
            if value is not None:
                found.append(value)
    return found


def encode_image_as_data_url(image: ImageLike) -> str:
    """A picture as a data URL; links stay. Raises PictureError."""
    if isinstance(image, str) and (is_data_url(image) or image.startswith(_LINKS)):
        return image
    url = url_of(image)
    if url is not None:
        return url
    return _picture(image).url


def load_image_to_pil(image: ImageLike) -> Image.Image:
    """A picture as an image of Pillow. Raises PictureError, also for a link."""
    from PIL import Image

    if isinstance(image, Image.Image):
        return image
    url = encode_image_as_data_url(image)
    data = picture_at(url).data  # checked against the limits
    return Image.open(io.BytesIO(data))


def _picture(image: ImageLike) -> Picture:
    if isinstance(image, bytes | bytearray):
        return picture_of(bytes(image))  # no picture, as the caller is told
    path = image.get("path") if isinstance(image, Mapping) else image
    if isinstance(image, Mapping) and isinstance(image.get("bytes"), str):
        return picture_of(base64.b64decode(image["bytes"]))  # as a row of JSON has them
    if not isinstance(path, str | Path) or not str(path):
        raise PictureError(
            'a picture must be an image of Pillow, bytes, {"bytes": …, "path": …}, a path or a URL'
            f" (got {type(image).__name__})"
        )
    try:
        return read_picture(Path(path))
    except OSError as error:
        raise PictureError(f"cannot read the picture {path}: {error.strerror or error}") from error
