"""The texts in the values of a row: messages, contexts, choices."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence

from ajet_sdk.tasks.row_names import ROLES
from ajet_sdk.tasks.row_pictures import digest_in

_SHORT = 20
"""A shorter text occurs within another by chance, so that it is a part of its own."""


def strings_of(values: Mapping[str, object]) -> str:
    """Returns all strings of a row, except ids and provenance."""
    return "\n".join(
        strings({k: v for k, v in values.items() if k not in ("task_id", "id", "provenance")})
    )


def strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)


def chat_of(value: object) -> list[dict[str, object]]:
    """Returns messages in OpenAI's or ShareGPT's format; empty if the value is no list of
    messages."""
    if not isinstance(value, list) or not value:
        return []
    if not all(isinstance(message, Mapping) for message in value):
        return []
    if all("role" in message for message in value):
        return [
            {**message, "role": ROLES.get(message["role"], message["role"])} for message in value
        ]
    if all("from" in message and "value" in message for message in value):
        return [{"role": ROLES.get(m["from"], m["from"]), "content": m["value"]} for m in value]
    return []


def distinct(texts: Sequence[str], known: Sequence[str]) -> list[str]:
    """Returns the texts that are not contained in another, in order."""
    folded = [fold(text) for text in texts]
    others = [fold(text) for text in known]
    kept = []
    for index, text in enumerate(texts):
        form = folded[index]
        earlier = folded[:index] + others
        longer = [other for other in folded[index + 1 :] if len(other) > len(form)] + earlier
        is_contained = len(form) >= _SHORT and any(form in other for other in longer)
        if form and form not in earlier and not is_contained:
            kept.append(text)
    return kept


def fold(text: str) -> str:
    return " ".join(text.casefold().split())


def is_system(message: Mapping[str, object]) -> bool:
    return message.get("role") in ("system", "developer")


def text_of_message(message: Mapping[str, object]) -> str:
    content = message.get("content")
    texts = [
        text
        for part in (content if isinstance(content, list) else [content])
        for text in _content(part)
    ]
    if message.get("tool_calls"):
        texts.append(encoded(message["tool_calls"]))
    return "\n".join(texts)


def _content(part: object) -> Iterator[str]:
    """Yields the text of a part of a message, and a number for any other part, such as an image."""
    text = part.get("text") if isinstance(part, Mapping) else part
    if isinstance(text, str):
        yield text
    elif part is not None:
        yield number_of(part)


def text_of_context(value: object) -> str:
    """Returns a text, the texts of a list, or JSON."""
    if isinstance(value, str):
        return value if value.strip() else ""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return "\n".join(value)
    return encoded(value) if value not in (None, [], {}) else ""


def texts_of_choices(value: object) -> list[str]:
    if isinstance(value, Mapping):
        texts = value.get("text")
        if isinstance(texts, list):  # ARC, CommonsenseQA
            return [str(text) for text in texts]
        return [text_of_context(text) or str(text) for text in value.values()]
    if isinstance(value, list):
        return [_text_of_choice(item) for item in value]
    return [value] if isinstance(value, str) and value.strip() else []


def _text_of_choice(item: object) -> str:
    if isinstance(item, Mapping) and "text" in item:
        return str(item["text"])
    return text_of_context(item) or str(item)


def encoded(value: object) -> str:
    if value is None:
        return ""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def number_of(value: object) -> str:
    """A number that is the same for equal values, of pictures for equal pixels."""
    digest = digest_in(value)
    if digest is not None:
        return str(int(digest[:16], 16))
    if isinstance(value, list):
        value = [digest_in(item) or item for item in value]
    data = json.dumps(value, sort_keys=True, default=str).encode("utf-8", "surrogatepass")
    return str(int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big"))
