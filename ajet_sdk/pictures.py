"""Pictures in messages: decoded once, within limits, and identified by their pixels.

Two files with the same pixels are one picture, and two pictures of one size have the same token
ids. So whatever compares prompts by ids compares them by `keyed` ids.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote
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
_OF_SEVERAL = {"MPO": "image/jpeg"}
"""What Pillow calls a JPEG file with several pictures, as phones write them; the first one counts."""

_REMEMBERED_BYTES = 128 << 20
"""Bytes of the pictures that were decoded last, at least those of the largest request: each request
of a conversation sends all of its pictures again, and with less room none of them would be found."""
_OVERHEAD = 1000
"""Bytes that a remembered picture takes besides its file."""


class _Key:
    """Holds the number of a digest while a picture with it lives."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number


Ids = npt.NDArray[np.int32]
_next_key = count(1)
_keys: WeakValueDictionary[str, _Key] = WeakValueDictionary()
_lines: OrderedDict[bytes, str] = OrderedDict()
_LINES = 10_000
_lock = threading.Lock()
_decoding = threading.Lock()
_LARGE = 8_000_000
"""Pixels of a picture that is decoded alone: in each of 32 threads the largest would take 6 GB."""
_STRIP = 64


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture as sent. Two are equal if they have the same pixels."""

    data: bytes = field(repr=False)
    """The file; empty if it was removed from a trace."""
    media_type: str
    digest: str
    """SHA-256 of size and RGBA pixels, in hexadecimal; what a model sees is the same if it is."""
    width: int
    height: int
    """In pixels, after the turn that the file's EXIF data asks for."""
    _key: _Key = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_key", _key_of(self.digest))

    @property
    def key(self) -> int:
        """A negative number in place of the picture's token ids, which equal pictures share and
        different ones do not, in this process (`keyed`)."""
        return self._key.number

    @property
    def url(self) -> str:
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode()}"

    @property
    def line(self) -> str:
        """The picture in a line of text, such as `picture 64×64 PNG 307 B a1b2c3`."""
        kind = self.media_type.removeprefix("image/").upper()
        size = _size(len(self.data)) if self.data else "removed"
        return f"picture {self.width}×{self.height} {kind} {size} {self.digest[:6]}"

    def png(self) -> bytes:
        """A PNG file of `image`. Raises PictureError."""
        file = io.BytesIO()
        self.image().save(file, "PNG")
        return file.getvalue()

    def image(self) -> Image.Image:
        """The RGB pixels, turned as EXIF says, on white where the picture is transparent: as vLLM
        and transformers decode it. Raises PictureError."""
        return _on_white(_decoded(self.data))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Picture) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[Any, ...]:  # keys differ between processes
        return Picture, (self.data, self.media_type, self.digest, self.width, self.height)


def _key_of(digest: str) -> _Key:
    with _lock:
        key = _keys.get(digest)
        if key is None:
            key = _keys[digest] = _Key(-next(_next_key))
        return key


def _size(count: int) -> str:
    if count < 1000:
        return f"{count} B"
    if count < 1_000_000:
        return f"{count / 1000:.0f} kB"
    return f"{count / 1e6:.1f} MB"


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
    _check_size(len(data))
    opened = _open(data)
    media_type = (FORMATS | _OF_SEVERAL)[str(opened.format)]
    one_at_a_time = _decoding if opened.width * opened.height > _LARGE else nullcontext()
    with one_at_a_time:
        image = _decoded(data)
        digest = hashlib.sha256(f"{image.width}x{image.height}\n".encode())
        for top in range(0, image.height, _STRIP):  # in strips: its pixels take up to 200 MB
            bottom = min(top + _STRIP, image.height)
            digest.update(image.crop((0, top, image.width, bottom)).tobytes())
        return Picture(data, media_type, digest.hexdigest(), image.width, image.height)


def read_picture(path: Path) -> Picture:
    """Decode the file at a path; one that is too large is not read. Raises PictureError, OSError."""
    _check_size(path.stat().st_size)
    return picture_of(path.read_bytes())


def _check_size(size: int) -> None:
    if size > MAX_BYTES:
        raise PictureError(
            f"the picture has {size / 1e6:.1f} MB; at most {MAX_BYTES / 1e6:.0f} MB are"
            " accepted: send it smaller or more compressed"
        )


def picture_in(part: Mapping[str, object]) -> Picture | None:
    """The picture of a part of a message in the form of OpenAI's chat completions; None if it has
    another type.

    Raises PictureError.
    """
    if part.get("type") != "image_url":
        return None
    return picture_at(url_in(part))


def url_in(part: Mapping[str, object]) -> str:
    """The URL of a part of type `image_url`. Raises PictureError."""
    value = part.get("image_url")
    url = value.get("url") if isinstance(value, Mapping) else value
    if not isinstance(url, str):
        raise PictureError('image_url must be {"url": "data:image/png;base64,…"}')
    return url


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
    """The picture in a data URL, decoded once. Raises PictureError for other URLs, too."""
    if not is_data_url(url):
        raise PictureError(
            f"a picture must be sent in the request, as a data URL (data:image/png;base64,…);"
            f" {url[:80]!r} is not loaded"
        )
    if len(url) > 2 * MAX_BYTES:  # base64 takes 4/3 of the bytes, and wrapped lines a little more
        raise PictureError(
            f"the picture's data URL has {len(url) / 1e6:.1f} MB; a picture may have at most"
            f" {MAX_BYTES / 1e6:.0f} MB: send it smaller or more compressed"
        )
    name = _name(url)
    picture = _recent.find(name)
    if picture is None:
        picture = picture_of(_bytes_in(url))
        _recent.add(name, picture)
    return picture


class _Recent:
    """The pictures that were decoded last, by the hash of their URL, and all that anybody has, such
    as an episode. Thread-safe."""

    def __init__(self) -> None:
        self._pictures: OrderedDict[bytes, Picture] = OrderedDict()
        self._alive: WeakValueDictionary[bytes, Picture] = WeakValueDictionary()
        self._size = 0
        self._lock = threading.Lock()

    def find(self, name: bytes) -> Picture | None:
        with self._lock:
            picture = self._alive.get(name)
            if name in self._pictures:
                self._pictures.move_to_end(name)
            return picture

    def add(self, name: bytes, picture: Picture) -> None:
        with self._lock:
            if name in self._pictures:  # another thread decoded it meanwhile
                return
            self._alive[name] = self._pictures[name] = picture
            self._size += len(picture.data) + _OVERHEAD
            while self._size > _REMEMBERED_BYTES and len(self._pictures) > 1:
                _, forgotten = self._pictures.popitem(last=False)
                self._size -= len(forgotten.data) + _OVERHEAD


_recent = _Recent()


def line_at(url: str) -> str:
    """The picture in a data URL in a line of text (`Picture.line`). Raises PictureError."""
    with _lock:
        line = _lines.get(_name(url))
    if line is None:
        line = picture_at(url).line
        remember_line(url, line)
    return line


def remember_line(url: str, line: str) -> None:
    """Know the line of a picture without decoding it, as a trace has it."""
    with _lock:
        _lines[_name(url)] = line
        if len(_lines) > _LINES:
            _lines.popitem(last=False)


def _name(url: str) -> bytes:
    return hashlib.blake2b(url.encode("utf-8", "replace"), digest_size=16).digest()


def is_data_url(url: str) -> bool:
    """Whether it has the data itself; schemes are written in any case (RFC 3986, 3.1)."""
    return url[:5].lower() == "data:"


def mapped(value: object, text: Callable[[str], str]) -> Any:
    """A copy of JSON with each text replaced; names of objects stay."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, Mapping):
        return {name: mapped(item, text) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [mapped(item, text) for item in value]
    return value


_OTHER_ALPHABET = str.maketrans("-_", "+/")


def _bytes_in(url: str) -> bytes:
    """The data of a data URL: RFC 2397, with parameters of the media type; and base64 as clients
    write it, also in lines, with the URL-safe alphabet, percent signs or without padding."""
    head, comma, body = url.partition(",")
    if not comma or not head.rstrip().lower().endswith(";base64"):
        raise PictureError("a picture's data URL must begin with data:image/…;base64,")
    media_type = head[5:].strip().lower()
    if not media_type.startswith(("image/", "application/octet-stream", ";")):
        raise PictureError(f"a picture's data URL must have the media type image/…: {head[:80]!r}")
    try:
        return base64.b64decode(body, validate=True)  # as nearly all are: without a copy
    except (binascii.Error, ValueError):
        text = unquote(body) if "%" in body else body
        text = "".join(text.split()).translate(_OTHER_ALPHABET).rstrip("=")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise PictureError(f"a picture's data URL is not valid base64: {error}") from error


_BEGINNINGS = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
}


def url_of(value: object) -> str | None:
    """The data URL of a picture in a row of a dataset, not decoded: a file's bytes, alone or in
    `{"bytes": …, "path": …}` (Hugging Face), or an image of Pillow. None for anything else."""
    if isinstance(value, Mapping) and value.keys() <= {"bytes", "path"}:
        value = value.get("bytes")
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        for beginning, media_type in _BEGINNINGS.items():
            if data.startswith(beginning) and (beginning != b"RIFF" or data[8:12] == b"WEBP"):
                return f"data:{media_type};base64,{base64.b64encode(data).decode()}"
        return None
    module = sys.modules.get("PIL.Image")  # not loaded: nothing is an image of Pillow
    if module is None or not isinstance(value, module.Image):
        return None
    file = io.BytesIO()
    has_mode = value.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
    (value if has_mode else value.convert("RGB")).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


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
