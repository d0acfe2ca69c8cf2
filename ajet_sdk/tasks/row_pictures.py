"""Pictures in rows of a dataset: as data, or as files beside the dataset's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ajet_sdk.errors import PictureError, TaskError
from ajet_sdk.picture_files import PictureFile
from ajet_sdk.pictures import (
    is_data_url,
    mapped,
    picture_at,
    read_picture,
    url_in,
    url_of,
)
from ajet_sdk.tasks.row_names import INNER, PICTURES, squashed

_PLACE = "<image>"
"""The place of the next picture of the column `images` in a text (LLaMA-Factory, ShareGPT)."""
DATA = "data:image/"
"""Begins a picture in a column of any name."""
COLUMNS = ("images", "image")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif")
_NAMES = ("image", "url", "path", "base64")
"""Keys of a part of type `image` that may have its value."""
Json = dict[str, Any]
_COLUMNS = frozenset(map(squashed, PICTURES))


def with_files(values: Mapping[str, Any], directory: Path | None) -> Json:
    """A row in which the names of pictures' files, in columns, metadata and messages, know the
    directory of the dataset's file."""
    row: Json = dict(values)
    if directory is None:
        return row
    for name, value in values.items():
        if isinstance(value, str | list | dict):
            if squashed(name) in _COLUMNS:
                row[name] = _with_files_in(_list_of(value), directory)
            elif name in INNER and isinstance(value, dict):
                row[name] = with_files(value, directory)
            elif isinstance(value, list):
                row[name] = [_with_files_in_message(item, directory) for item in value]
    return row


def with_data(values: Mapping[str, Any], directory: Path) -> Json:
    """A row with data URLs in place of the names of pictures' files. Raises PictureError,
    OSError."""

    def url(text: str) -> str:
        if isinstance(text, PictureFile):
            return read_picture(text.path).url
        return text

    row: Json = mapped(with_files(values, directory), url)
    return row


def _list_of(value: object) -> object:
    """A list of names that is written as JSON, as in tables of text; all else as it is."""
    if isinstance(value, str) and value.startswith("["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _with_files_in(value: object, directory: Path) -> object:
    if isinstance(value, list):
        return [_with_files_in(item, directory) for item in value]
    if isinstance(value, dict):
        if value.get("bytes"):  # Hugging Face's form with the data: the path is where it was
            return value
        return {name: _with_files_in(item, directory) for name, item in value.items()}
    if isinstance(value, str) and value.lower().endswith(SUFFIXES) and "://" not in value:
        return PictureFile(value, directory)
    return value


def _with_files_in_message(message: object, directory: Path) -> object:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(message, dict) or not isinstance(content, list):
        return message
    parts = []
    for part in content:
        is_picture = isinstance(part, dict) and part.get("type") in ("image", "image_url")
        parts.append(_with_files_in(part, directory) if is_picture else part)
    return {**message, "content": parts}


def images_of(row: Mapping[str, object]) -> list[object]:
    """The pictures in a row's column `images` or `image`; other values there, such as the name of a
    container's image, are none."""
    for name in COLUMNS:
        value = row.get(name)
        value = _list_of(value)
        if value is not None:
            if isinstance(value, list | tuple):
                values = list(value)
            else:
                values = [value]
            return [item for item in values if _is_picture(item)]
    return []


def _is_picture(value: object) -> bool:
    if isinstance(value, Mapping):
        value = next((value[name] for name in ("bytes", "path", "url") if value.get(name)), None)
    if isinstance(value, str):
        return is_data_url(value) or value.lower().endswith(SUFFIXES)
    return url_of(value) is not None


def pictures_of(row: Mapping[str, object]) -> tuple[list[str], list[str]]:
    """The digests of a row's pictures, in columns and in messages; and what is wrong with
    others."""
    values = images_of(row)
    for messages in row.values():
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, Mapping):
                content = message.get("content")
            else:
                content = None
            for part in content if isinstance(content, list) else ():
                value = _value_of(part)
                if value is not None:
                    values.append(value)
    known = set(map(id, files_in(values)))
    values += [file for file in files_in(row) if id(file) not in known]
    reader = RowPictures("", ())
    digests: list[str] = []
    problems: list[str] = []
    for value in values:
        try:
            file = _file_in(value)
            digests.append(file.digest if file else picture_at(reader.data_url(value)).digest)
        except (PictureError, TaskError, OSError) as error:
            problems.append(str(error).removeprefix(": "))
    return digests, problems


def files_in(value: object) -> Iterator[PictureFile]:
    """The files of pictures in a row, or in any value of it."""
    if isinstance(value, PictureFile):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from files_in(item)


def unreadable_files(value: object) -> Iterator[str]:
    """What is wrong with the files of a row's pictures that cannot be read."""
    for file in files_in(value):
        try:
            _ = file.digest
        except (PictureError, OSError) as error:
            yield f"has a picture that cannot be read, {file}: {error}"


def _value_of(part: object) -> object:
    """The picture of a part of a message; None if it has none itself."""
    if not isinstance(part, Mapping):
        return None
    if part.get("type") == "image_url":
        image = part.get("image_url")
        return image.get("url") if isinstance(image, Mapping) else image
    named = (part.get(name) for name in _NAMES) if part.get("type") == "image" else ()
    return next((value for value in named if value is not None), None)


class RowPictures:
    """Puts the pictures of a row into its messages, in the form of chat completions.

    A picture is a part of type `image_url` or `image`, or the place `<image>` in a text, whose
    value is in the part or is the next of `images`. Without any place, all pictures precede the
    text of the first user message, as TRL does.
    """

    def __init__(self, where: str, images: Sequence[object], *, load: bool = True) -> None:
        self._where = where
        self._images = list(images)
        self._next = 0
        self._load = load
        """Whether to read files; else they are only looked for."""

    def put(self, messages: Sequence[Json]) -> list[Json]:
        """Messages with their pictures; call it for all lists of a row, in order. Raises
        TaskError."""
        result = []
        for message in messages:
            content = message.get("content")
            parts = list(self._parts(content))
            if any(part["type"] == "image_url" for part in parts):
                message = {**message, "content": parts}
            result.append(message)
        return result

    def put_rest(self, messages: Sequence[Json]) -> list[Json]:
        """Messages with the pictures that have no place. Raises TaskError if only some have one."""
        rest = self._images[self._next :]
        if not rest:
            return list(messages)
        if self._next:
            raise TaskError(
                f"{self._where} has {len(self._images)} pictures, and places for {self._next}; each"
                f" needs a place {_PLACE}, or none has one"
            )
        pictures = [self._part(value, {}) for value in rest]
        self._next = len(self._images)
        result = list(messages)
        for place, message in enumerate(result):
            if message.get("role") == "user":
                content = message.get("content")
                if isinstance(content, list):
                    text = content
                else:
                    text = [_text(str(content or ""))]
                result[place] = {**message, "content": [*pictures, *text]}
                return result
        raise TaskError(f"{self._where} has pictures, but no user message to put them into")

    def _parts(self, content: object) -> Iterator[Json]:
        if isinstance(content, str) and _PLACE in content and self._images:
            for piece in re.split(f"({_PLACE})", content):
                if piece == _PLACE:
                    yield self._part(None, {})
                elif piece:
                    yield _text(piece)
        elif isinstance(content, list):
            for part in content:
                if not isinstance(part, Mapping):
                    yield _text(str(part))
                elif part.get("type") == "image_url":
                    image = part.get("image_url")
                    options = image if isinstance(image, Mapping) else {}
                    yield self._part(self._url(part), options)
                elif part.get("type") == "image":
                    yield self._part(_value_of(part), {})
                elif part.get("type") == "text":
                    # a column of structs has all keys in each part, the others NULL
                    yield {name: value for name, value in part.items() if value is not None}
                else:
                    yield dict(part)

    def _url(self, part: Mapping[str, object]) -> str:
        try:
            return url_in(part)
        except PictureError as error:
            raise TaskError(f"{self._where}: {error}") from error

    def _part(self, value: object, options: Mapping[str, object]) -> Json:
        """A picture; without a value the next of `images`."""
        if value is None:
            if self._next >= len(self._images):
                raise TaskError(
                    f"{self._where} has {len(self._images)} pictures, and more places than that"
                )
            value = self._images[self._next]
            self._next += 1
        rest = {name: item for name, item in options.items() if item is not None}
        return {"type": "image_url", "image_url": {**rest, "url": self.data_url(value)}}

    def data_url(self, value: object) -> str:
        """A picture as a data URL; without `load`, a file as its name. Raises TaskError."""
        url = url_of(value)
        if url is not None:
            return url
        file = _file_in(value)
        if file is not None:
            return self._url_of_file(file)
        if isinstance(value, Mapping):
            value = value.get("path") or value.get("url")
        if not isinstance(value, str) or not value:
            raise TaskError(f"{self._where}: a picture is neither data nor a file ({value!r:.60})")
        if is_data_url(value):
            return value
        if "://" in value:
            raise TaskError(
                f"{self._where}: pictures are not loaded from the network ({value:.80}); save the"
                " file beside the dataset"
            )
        raise TaskError(f"{self._where}: the picture {value:.80} is no data URL")

    def _url_of_file(self, file: PictureFile) -> str:
        try:
            path = file.path
            return read_picture(path).url if self._load else str(file)
        except (PictureError, OSError) as error:
            raise TaskError(f"{self._where}: {file}: {error}") from error


def _text(text: str) -> Json:
    return {"type": "text", "text": text}


def without_places(text: str) -> str:
    """A text without the places of its pictures."""
    return text.replace(_PLACE, "").strip()


def apart(content: object) -> tuple[object, list[object]]:
    """The content of a message without its pictures, and their values; a picture whose value is in
    a column has none."""
    if not isinstance(content, list):
        return content, []
    rest: list[object] = []
    values: list[object] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("image", "image_url"):
            rest.append(part)
            continue
        value = _value_of(part)
        if value is not None:
            values.append(value)
        elif isinstance(part, Mapping) and len(part) > 1:  # a form of another API
            values.append(part)
    return rest, values


def pictures_among(value: object) -> list[str]:
    """The data URLs of pictures in a column of any name: its value, or those of its list."""
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, str) and item.startswith(DATA)]


def by_pixels(value: object) -> object:
    """A value of JSON with the digest of each picture in place of its file, to compare it."""
    return mapped(value, lambda text: digest_in(text) or text)


def _file_in(value: object) -> PictureFile | None:
    """The file of a picture in a row, also in Hugging Face's form; None if it has none."""
    if isinstance(value, Mapping):
        value = value.get("path") or value.get("url")
    return value if isinstance(value, PictureFile) else None


def digest_in(value: object) -> str | None:
    """The digest of a picture in a row, or in a part of a message; None if it is none, or cannot be
    read."""
    file = _file_in(value)
    if file is not None:
        try:
            return file.digest
        except (PictureError, OSError):
            return None
    url = value if isinstance(value, str) else url_of(value)
    if isinstance(value, Mapping) and value.get("type") == "image_url":
        try:
            url = url_in(value)
        except PictureError:
            return None
    if not isinstance(url, str) or not is_data_url(url):
        return None
    try:
        return picture_at(url).digest
    except PictureError:
        return None
