"""Pictures of a trace: stored once a file, and referred to where they were sent.

A text that is the data URL of a picture is stored as `ajet-picture:DIGEST`, followed by a comma and
the URL's beginning if that is not the usual one; base64 beside its media type, as Anthropic, Google
and MCP have it, as `ajet-picture:DIGEST,base64`. A text that begins like a reference gets a second
colon, so that all texts are read as they were written.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar

from ajet_sdk.errors import PictureError, QueryError
from ajet_sdk.pictures import Picture, is_data_url, mapped, picture_at, remember_line

if TYPE_CHECKING:
    from ajet_sdk.protocols import TraceReader

PREFIX = "ajet-picture:"
REFERENCE = r"ajet-picture:([0-9a-f]{64})"
"""Regular expression of a reference, with the picture's digest."""
REFERRING = {
    "calls": ("request", "response", "messages_suffix", "pictures"),
    "episodes": ("task", "output", "events"),
}
"""The columns that refer to pictures."""

_MEDIA_TYPE = ("media_type", "mimeType", "mime_type")
_IN_JSON = r'(?:^|[^\\])"ajet-picture:([0-9a-f]{64})[",]'
"""The same at the beginning of a text of JSON, where alone it is a reference."""
_REFERENCE = re.compile(rf"{REFERENCE}(,.*)?", re.S)
_DATA = "data:image"
_BESIDE = '"image/'
"""JSON without any of these and `PREFIX` has no text to replace; a data URL in another spelling stays as sent."""
_BARE = {"base64": base64.b64encode, "base64url": base64.urlsafe_b64encode}
"""Spellings of a picture beside its media type, by the end of its reference."""
_FEW = 64
"""Pictures read by one query; their ids are in its text, so that only their rows are read of a live
file."""
_T = TypeVar("_T")


def may_refer(json_text: str) -> bool:
    """Whether JSON may have a text to replace by a reference."""
    # not by any() over the signs, which takes several times as long for the text of most calls
    return _DATA in json_text or PREFIX in json_text or _BESIDE in json_text


def digests_in(json_text: str) -> set[str]:
    """The digests of the pictures that JSON refers to."""
    if PREFIX not in json_text:
        return set()
    return set(re.findall(REFERENCE, json_text))


def references(table: str, id: str, *, source: str = "", where: str = "true") -> str:
    """SQL of the rows of a table that refer to pictures: (id, digest), for `id` a column of it."""
    selects = []
    for column in REFERRING[table]:
        is_list = column == "pictures"
        pattern = '"([0-9a-f]{64})"' if is_list else _IN_JSON
        text = f"{column}::VARCHAR"
        if is_list:
            has = f"{text} IS NOT NULL"
        else:
            has = f"contains({text}, '{PREFIX}')"
        selects.append(
            f"SELECT {id} AS id, unnest(regexp_extract_all({text}, '{pattern}', 1)) AS digest"
            f" FROM {source}{table} WHERE {has} AND {where}"
        )
    return f"SELECT DISTINCT id, digest FROM ({' UNION ALL '.join(selects)})"


class StoredPictures:
    """The pictures of a file that is written.

    Of several files with the same pixels the first is stored, and the others stay where they are.
    """

    def __init__(self, load: Callable[[str], bytes | None] = lambda _: None) -> None:
        self._load = load
        """Loads the bytes of a picture from the file, by digest."""
        self._known: dict[str, bytes] = {}

    def clear(self) -> None:
        """Forget all, since added pictures may be lost."""
        self._known.clear()

    def settle(self, added: Iterable[Picture]) -> None:
        """Know pictures that are stored with the record that has them."""
        for picture in added:
            self._known[picture.digest] = _hash(picture.data)

    def has(self, picture: Picture) -> bool:
        """Whether pixels are stored, of this file or another with the same."""
        return self._stored(picture.digest) is not None

    def stores(self, picture: Picture) -> bool:
        """Whether the stored file is this one, or none is stored yet."""
        return self._stored(picture.digest) in (None, _hash(picture.data))

    def _stored(self, digest: str) -> bytes | None:
        known = self._known.get(digest)
        if known is None:
            data = self._load(digest)
            if data is not None:
                known = self._known[digest] = _hash(data)
        return known


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


class Replacing:
    """Replaces the pictures of one record by references, and collects those that are new."""

    def __init__(self, stored: StoredPictures) -> None:
        self._stored = stored
        self.added: dict[str, Picture] = {}

    def value(self, value: object) -> Any:
        """JSON with references in place of pictures."""
        if isinstance(value, Mapping):
            media_type = next((value[name] for name in _MEDIA_TYPE if name in value), None)
            if isinstance(media_type, str) and media_type.startswith("image/"):
                return {
                    name: self._bare(item) if name == "data" else self.value(item)
                    for name, item in value.items()
                }
            return {name: self.value(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return self._text(value) if isinstance(value, str) else value

    def _bare(self, value: object) -> object:
        """A reference in place of base64."""
        if not isinstance(value, str) or value.startswith(PREFIX) or is_data_url(value):
            return self.value(value)
        try:
            picture = picture_at(f"data:image/png;base64,{value}")
        except PictureError:
            return value
        for spelling, encoded in _BARE.items():
            if encoded(picture.data).decode() == value and self._refers(picture):
                return f"{PREFIX}{picture.digest},{spelling}"
        return value

    def add(self, picture: Picture) -> None:
        """Store a picture unless one with the same pixels is."""
        if picture.data and picture.digest not in self.added and not self._stored.has(picture):
            self.added[picture.digest] = picture

    def _text(self, text: str) -> str:
        if text.startswith(PREFIX):
            return f"{PREFIX}:{text.removeprefix(PREFIX)}"
        if not is_data_url(text):
            return text
        try:
            picture = picture_at(text)
        except PictureError:
            return text
        head, _, body = text.partition(",")
        url = picture.url
        if body != url.partition(",")[2]:  # base64 in lines, for example
            return text
        if not self._refers(picture):
            return text
        tail = "" if text == url else f",{head}"
        return f"{PREFIX}{picture.digest}{tail}"

    def _refers(self, picture: Picture) -> bool:
        """Store a picture; False if another file with its pixels is stored."""
        added = self.added.get(picture.digest)
        if added is not None:
            return added.data == picture.data
        if not self._stored.stores(picture):
            return False
        self.add(picture)
        return True


def resolved(value: _T, pictures: Mapping[str, Picture]) -> _T:
    """JSON with data URLs in place of references. References to unknown or removed pictures
    stay."""
    urls: dict[str, str] = {}

    def text(value: str) -> str:
        if not value.startswith(PREFIX):
            return value
        if value.startswith(f"{PREFIX}:"):
            return PREFIX + value[len(PREFIX) + 1 :]
        match = _REFERENCE.fullmatch(value)
        picture = pictures.get(match[1]) if match else None
        if match is None or picture is None or not picture.data:
            return value
        spelling = _BARE.get((match[2] or "")[1:])
        if spelling is not None:
            return spelling(picture.data).decode()
        url = urls.get(value)
        if url is None:
            if match[2] is None:
                head = f"data:{picture.media_type};base64"
            else:
                head = match[2][1:]
            url = urls[value] = f"{head},{base64.b64encode(picture.data).decode()}"
            remember_line(url, picture.line)
        return url

    return mapped(value, text)  # type: ignore[no-any-return]


def stored_pictures(reader: TraceReader, digests: Iterable[str]) -> dict[str, Picture]:
    """The pictures of a trace by digest; without those that it doesn't have.

    They are not decoded: `ajet trace check` compares bytes and digests.
    """
    wanted = sorted(set(digests))
    pictures: dict[str, Picture] = {}
    for start in range(0, len(wanted), _FEW):
        for row in _rows(reader, wanted[start : start + _FEW]):
            pictures.setdefault(row["digest"], Picture(**row))
    return pictures


def _rows(reader: TraceReader, digests: list[str]) -> list[dict[str, Any]]:
    marks = ", ".join("?" * len(digests))
    sql = f"SELECT * FROM pictures WHERE digest IN ({marks}) ORDER BY digest, md5(data)"
    try:
        return reader.query(sql, digests).to_pylist()  # type: ignore[no-any-return]
    except QueryError:
        if len(digests) == 1:
            raise
    half = len(digests) // 2  # a result has a limit in bytes, and these may be large
    return [*_rows(reader, digests[:half]), *_rows(reader, digests[half:])]
