"""Pictures in the text that a prompt builder compares and encodes.

There, a picture is its digest between two noncharacters, so that texts with other pictures differ,
and a text that only looks like a picture (a user typed the image token) is cut in two, so that it
is encoded as text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ajet_sdk.errors import ConfigError, PictureError, RequestRefused
from ajet_sdk.pictures import (
    MAX_PICTURES,
    Ids,
    Picture,
    PlacedPicture,
    image_part,
    picture_in,
    with_digests,
)
from ajet_sdk.protocols import PictureFormat, Tokenizer
from ajet_sdk.samples.splits import REPLACEMENT
from ajet_sdk.tokens.template import Arguments, Message

_CUT = "\ufdd0"
_EDGE = "\ufdd1"
"""Noncharacters, which Unicode reserves for a program's own use."""
_PICTURE = re.compile(f"{_EDGE}([0-9a-f]{{64}}){_EDGE}")


class PictureText:
    """Writes pictures into the text of an agent's prompts, and expands them for the tokenizer."""

    def __init__(self, format_: PictureFormat) -> None:
        self._format = format_
        self._known: dict[str, Picture] = {}
        self._marks = re.compile("|".join(map(re.escape, format_.marks)))

    def seen(self, cleaned: Message) -> Message:
        """A cleaned message with digests in place of its pictures. Raises RequestRefused."""
        content = cleaned["content"]
        if not isinstance(content, list):
            return cleaned
        parts: list[Any] = []
        for part in content:
            try:
                picture = picture_in(part) if isinstance(part, dict) else None
            except PictureError as error:
                raise RequestRefused(str(error), "messages") from error
            if picture is not None:
                self._known[picture.digest] = picture
                parts.append(image_part(picture))
                continue
            if isinstance(part, str):
                text = part
            else:
                text = str(part.get("text") or "")
            if parts and parts[-1]["type"] == "text":  # a mark may be split over two parts
                text = parts.pop()["text"] + text
            parts.append({"type": "text", "text": text})
        return {**cleaned, "content": parts}

    def pictures_of(self, messages: Sequence[Message]) -> list[Picture]:
        """The pictures of messages that were `seen`, in order. Raises RequestRefused."""
        pictures: list[Picture] = []
        for message in messages:
            content = message["content"]
            for part in content if isinstance(content, list) else ():
                if isinstance(part, dict) and part.get("type") == "image":
                    pictures.append(self._known[part["image"]])
        if len(pictures) > MAX_PICTURES:
            raise RequestRefused(
                f"the request has {len(pictures)} pictures; at most {MAX_PICTURES} are accepted",
                "messages",
            )
        return pictures

    def apart(self, value: Any) -> Any:
        """A value of JSON with its marks cut in two; the same object without any.

        The two noncharacters become U+FFFD: they are not for interchange.
        """
        if isinstance(value, str):
            if _CUT in value or _EDGE in value:
                value = value.replace(_CUT, REPLACEMENT).replace(_EDGE, REPLACEMENT)
            if self._marks.search(value):
                return self._marks.sub(_cut, value)
            return value
        if isinstance(value, Arguments):
            inner = {key: self.apart(item) for key, item in value.items()}
            spelling = self.apart(value.spelling)
            if spelling == value.spelling:
                return value
            return Arguments(inner, spelling)
        if isinstance(value, dict):
            cut = {key: self.apart(item) for key, item in value.items()}
            return value if all(cut[key] is value[key] for key in cut) else cut
        if isinstance(value, list):
            items = [self.apart(item) for item in value]
            if all(a is b for a, b in zip(items, value, strict=True)):
                return value
            return items
        return value

    def written(self, rendered: str, pictures: Sequence[Picture]) -> str:
        """A rendered text with digests in place of the template's placeholders. Raises
        RequestRefused."""
        texts = rendered.split(self._format.placeholder)
        if len(texts) != len(pictures) + 1:
            raise RequestRefused(
                f"the chat template wrote {len(texts) - 1} placeholders for {len(pictures)}"
                " pictures: it shows no pictures in a message of this role, or drops some",
                "messages",
            )
        digests = (f"{_EDGE}{picture.digest}{_EDGE}" for picture in pictures)
        return texts[0] + "".join(
            digest + text for digest, text in zip(digests, texts[1:], strict=True)
        )

    def pieces(self, text: str) -> list[str]:
        """The text as the tokenizer gets it, in pieces that are encoded apart."""
        return [self._expanded(piece) for piece in text.split(_CUT)]

    def place(self, ids: Ids, text: str, begin: int) -> tuple[PlacedPicture, ...]:
        """The places of a text's pictures in its ids, which follow `begin` others.

        Raises RequestRefused if they have another number of image tokens.
        """
        pictures = [self._known[digest] for digest in _PICTURE.findall(text)]
        token_id = self._format.token_id
        at = np.flatnonzero(ids == token_id)
        counts = [self._format.text_of(picture)[1] for picture in pictures]
        if sum(counts) != len(at):
            raise RequestRefused(
                f"the prompt has {len(at)} image tokens, but its {len(counts)} pictures have"
                f" {sum(counts)}",
                "messages",
            )
        placed = []
        done = 0
        for picture, tokens in zip(pictures, counts, strict=True):
            start = int(at[done])
            last = int(at[done + tokens - 1])
            placed.append(PlacedPicture(begin + start, begin + last + 1, picture, token_id))
            done += tokens
        return tuple(placed)

    def _expanded(self, text: str) -> str:
        return _PICTURE.sub(
            lambda match: self._format.text_of(self._known[match.group(1)])[0], text
        )


@dataclass(frozen=True, slots=True)
class PictureSpan:
    """All tokens that stand for a picture in a prompt: its image tokens, and those that the model's
    processor puts around them."""

    start: int
    end: int
    picture: Picture

    def __len__(self) -> int:
        return self.end - self.start


def picture_spans(
    token_ids: Sequence[int], pictures: Sequence[PlacedPicture], tokenizer: Tokenizer
) -> list[PictureSpan]:
    """The spans of pictures in a prompt, for servers that get a picture in place of its tokens.

    Raises RequestRefused if a picture's tokens are not those of its text alone, since the tokenizer
    merged some with the text around it: the server would make other tokens.
    """
    format_ = tokenizer.pictures
    assert format_ is not None
    spans: list[PictureSpan] = []
    done = 0
    for number, placed in enumerate(pictures, 1):
        shown = tokenizer.encode(format_.text_of(placed.picture)[0])
        start = placed.start - shown.index(placed.token_id)
        end = start + len(shown)
        if start < done or list(token_ids[start:end]) != shown:
            raise RequestRefused(
                f"picture {number} of {len(pictures)} shares tokens with the text around it, so"
                " that it cannot be sent to a server apart from it: put a word between them, or use"
                " backbone local with rollout.name: transformers",
                "messages",
            )
        spans.append(PictureSpan(start, end, placed.picture))
        done = end
    return spans


def placeholder_id(tokenizer: Tokenizer) -> int:
    """The token that stands for a picture where a server expands prompts. Raises ConfigError if the
    placeholder is several tokens."""
    format_ = tokenizer.pictures
    assert format_ is not None
    placeholder = tokenizer.encode(format_.placeholder)
    if len(placeholder) != 1:
        raise ConfigError(
            f"model.path: the placeholder of pictures, {format_.placeholder!r}, is"
            f" {len(placeholder)} tokens, and vLLM replaces one: use backbone local with"
            " rollout.name: transformers"
        )
    return placeholder[0]


def with_placeholders(
    token_ids: Sequence[int], spans: Sequence[PictureSpan], placeholder: int
) -> list[int]:
    """The ids of a prompt with one placeholder for each picture."""
    short: list[int] = []
    done = 0
    for span in spans:
        short += [*token_ids[done : span.start], placeholder]
        done = span.end
    return [*short, *token_ids[done:]]


def with_image_parts(messages: Sequence[Message]) -> list[Message]:
    """Messages with their pictures as chat templates know them, for a text without pixels."""
    return [{**message, "content": with_digests(message.get("content"))} for message in messages]


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text without pictures, in which marks of pictures are only text."""
    if tokenizer.pictures is None:
        return tokenizer.encode(text)
    seeing = PictureText(tokenizer.pictures)
    pieces = seeing.pieces(str(seeing.apart(text)))
    return [token for piece in pieces for token in tokenizer.encode(piece)]


def _cut(match: re.Match[str]) -> str:
    mark = match.group()
    middle = len(mark) // 2
    return f"{mark[:middle]}{_CUT}{mark[middle:]}"
