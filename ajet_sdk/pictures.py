"""Pictures in messages: decoded once, within limits, and identified by their pixels.

Two files with the same pixels are one picture, and two pictures of one size have the same token
ids. So whatever compares prompts by ids compares them by `keyed` ids.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from ajet_sdk.errors import PictureError

if TYPE_CHECKING:
    from PIL import Image

MAX_BYTES = 20 << 20
"""Bytes of a picture's file."""
MAX_PIXELS = 50_000_000
"""Pixels of a picture: 50 megapixels decode to 200 MB."""
MAX_PICTURES = 500
"""Pictures of one request."""
FORMATS = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
"""What vendors take, by the names of Pillow."""

Ids = npt.NDArray[np.int32]
_next_key = count(1)
_known: WeakValueDictionary[str, Picture] = WeakValueDictionary()
_lock = threading.Lock()


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture as sent. There is one object for each digest as long as anything refers to it."""

    data: bytes = field(repr=False)
    """The file."""
    media_type: str
    digest: str
    """SHA-256 of size and RGBA pixels, in hexadecimal; what a model sees is the same if it is."""
    width: int
    height: int
    """In pixels, after the turn that the file's EXIF data asks for."""
    key: int
    """A negative number in place of the picture's token ids, unique in this process (`keyed`)."""

    @property
    def url(self) -> str:
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode()}"

    def image(self) -> Image.Image:
        """The RGB pixels, turned as EXIF says, on white where the picture is transparent: as vLLM
        and transformers decode it."""
        return _on_white(_decoded(self.data))

    def __reduce__(self) -> tuple[Any, ...]:
        return picture_of, (self.data,)  # keys differ between processes


@dataclass(frozen=True, slots=True)
class PlacedPicture:
    """A picture in a prompt: the place of its first image token, and the end of its last one."""

    start: int
    end: int
    picture: Picture
    token_id: int
    """The image token. Others may separate the tiles of a picture."""


def picture_of(data: bytes) -> Picture:
    """Decode a file. Raises PictureError if it is too large or not a picture of `FORMATS`."""
    if len(data) > MAX_BYTES:
        raise PictureError(
            f"the picture has {len(data) / 1e6:.1f} MB; at most {MAX_BYTES / 1e6:.0f} MB are"
            " accepted: send it smaller or more compressed"
        )
    image = _decoded(data)
    digest = hashlib.sha256(f"{image.width}x{image.height}\n".encode())
    digest.update(image.tobytes())
    name = digest.hexdigest()
    with _lock:
        picture = _known.get(name)
        if picture is None:
            picture = Picture(
                data=data,
                media_type=FORMATS[_format(data)],
                digest=name,
                width=image.width,
                height=image.height,
                key=-next(_next_key),
            )
            _known[name] = picture
    return picture


def picture_in(part: Mapping[str, object]) -> Picture | None:
    """The picture of a part of a message in the form of OpenAI's chat completions; None if it has
    another type.

    Raises PictureError.
    """
    if part.get("type") != "image_url":
        return None
    value = part.get("image_url")
    url = value.get("url") if isinstance(value, Mapping) else value
    if not isinstance(url, str):
        raise PictureError('image_url must be {"url": "data:image/png;base64,…"}')
    return picture_at(url)


def with_digests(content: object) -> object:
    """The content of a message with the digest of each picture in place of its file, to compare
    it; what is no picture stays."""
    if not isinstance(content, list):
        return content
    parts: list[object] = []
    for part in content:
        try:
            picture = picture_in(part) if isinstance(part, Mapping) else None
        except PictureError:
            picture = None
        parts.append(part if picture is None else image_part(picture))
    return parts


def image_part(picture: Picture) -> dict[str, str]:
    """A picture in a message as chat templates know it, with its digest."""
    return {"type": "image", "image": picture.digest}


def picture_at(url: str) -> Picture:
    """The picture in a data URL. Raises PictureError for other URLs, too."""
    head, comma, body = url.partition(",")
    if not url.startswith("data:"):
        raise PictureError(
            f"a picture must be sent in the request, as a data URL (data:image/png;base64,…);"
            f" {url[:80]!r} is not loaded"
        )
    if not comma or not head.endswith(";base64"):
        raise PictureError("a picture's data URL must begin with data:image/…;base64,")
    try:
        data = base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise PictureError(f"a picture's data URL is not valid base64: {error}") from error
    return picture_of(data)


def keyed(ids: Ids, pictures: Sequence[PlacedPicture]) -> Ids:
    """Token ids with the key of each picture in place of its image tokens; the same array without
    pictures.

    Equal prefixes of keyed ids are equal to a model: same tokens, same pictures, same places.
    """
    if not pictures:
        return ids
    out = ids.copy()
    for placed in pictures:
        part = out[placed.start : placed.end]
        part[part == placed.token_id] = placed.picture.key
    return out


def unkeyed(ids: Ids, pictures: Sequence[PlacedPicture]) -> Ids:
    """The inverse of `keyed`."""
    if not pictures:
        return ids
    out = ids.copy()
    out[out < 0] = pictures[0].token_id
    out.flags.writeable = False
    return out


def within(pictures: Sequence[PlacedPicture], length: int) -> tuple[PlacedPicture, ...]:
    """The pictures in the first `length` ids of a prompt, none of which may be cut."""
    return tuple(placed for placed in pictures if placed.start < length)


def _open(data: bytes) -> Image.Image:
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(data), formats=tuple(FORMATS))
    except UnidentifiedImageError as error:
        raise PictureError(
            f"the data is not a picture in one of the formats {', '.join(FORMATS)}"
        ) from error
    except Exception as error:  # a broken file may raise anything, as may one with too many pixels
        raise PictureError(f"the picture cannot be read: {error}") from error


def _format(data: bytes) -> str:
    return str(_open(data).format)


def _decoded(data: bytes) -> Image.Image:
    """The first frame as RGBA, turned as EXIF says. Raises PictureError."""
    from PIL import ImageOps

    image = _open(data)
    if image.width * image.height > MAX_PIXELS:
        raise PictureError(
            f"the picture has {image.width} × {image.height} pixels; at most"
            f" {MAX_PIXELS // 1_000_000} million are accepted: send it smaller"
        )
    try:
        return ImageOps.exif_transpose(image).convert("RGBA")
    except Exception as error:  # as above
        raise PictureError(f"the picture is broken: {error}") from error


def _on_white(image: Image.Image) -> Image.Image:
    from PIL import Image

    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image).convert("RGB")
