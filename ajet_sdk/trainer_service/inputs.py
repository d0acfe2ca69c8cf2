"""The chunks of a model's input in the Tinker API: token ids, and pictures."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ajet_sdk.errors import PictureError, RequestRefused
from ajet_sdk.pictures import PlacedPicture, keyed, picture_of
from ajet_sdk.protocols import Tokenizer

Chunk = Sequence[int] | bytes
"""Token ids, or the file of a picture."""


@dataclass(frozen=True, slots=True)
class ModelInput:
    """The ids of an input, and the pictures in it."""

    ids: npt.NDArray[np.int32]
    pictures: tuple[PlacedPicture, ...] = ()

    @property
    def keyed(self) -> npt.NDArray[np.int32]:
        """The ids with the keys of pictures in place of image tokens."""
        return keyed(self.ids, self.pictures)


def model_input(
    chunks: Iterable[tuple[Chunk, int | None]], tokenizer: Tokenizer, where: str
) -> ModelInput:
    """Join chunks, each with the number of tokens that the client expects of a picture, if any.

    Raises RequestRefused if the model takes no pictures, or not this one, if a picture has another
    number of tokens, and for an image token without a picture.
    """
    ids: list[int] = []
    pictures: list[PlacedPicture] = []
    format_ = tokenizer.pictures
    for chunk, expected in chunks:
        if not isinstance(chunk, bytes):
            if format_ is not None and not set(format_.never_sampled).isdisjoint(chunk):
                raise RequestRefused(f"{where} has an image token without a picture")
            ids += chunk
            continue
        if format_ is None:
            raise RequestRefused(f"{where} has a picture, but the model takes only text")
        try:
            picture = picture_of(chunk)
        except PictureError as error:
            raise RequestRefused(f"{where}: {error}") from error
        shown = tokenizer.encode(format_.text_of(picture)[0])
        if expected is not None and expected != len(shown):
            raise RequestRefused(
                f"{where}: a picture of {picture.width} × {picture.height} pixels has {len(shown)}"
                f" tokens, and the client expects {expected}"
            )
        at = [len(ids) + i for i, token in enumerate(shown) if token == format_.token_id]
        pictures.append(PlacedPicture(at[0], at[-1] + 1, picture, format_.token_id))
        ids += shown
    return ModelInput(np.array(ids, np.int32), tuple(pictures))


def file_of(text: str, where: str) -> bytes:
    """The file of a picture in base64. Raises RequestRefused."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestRefused(f"{where}: the picture is not base64: {error}") from error
