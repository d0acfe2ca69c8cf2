"""The one JSON object that a judge's reply states, and never one that it quotes."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

_BROKEN = re.compile(r"\{\s*\"")
_TAGGED = re.compile(
    r"<(task|query|question|answer|response|output|reference|rubric|example|quote)\b[^>]*>.*?</\1>", re.DOTALL
)
_FENCE = re.compile(r"```\w*|~~~\w*")
_MARKS = tuple("\"'`“”‘’«»")


def object_in(reply: str, fields: Collection[str] = (), quoted: Sequence[str] = ()) -> dict[str, Any]:
    """The object that a reply consists of or states, whatever prose or fence is around it.

    What stands in a block quote, in quotation marks, between tags of the question or, as a value, in a text of `quoted`
    is none; beside other words neither is what gives a field the value that such a text gives it. Raises ValueError
    where there is no object with one of `fields`, where two differ, and where one is broken off by what it quotes: it
    is not JSON, names a field twice, or a field stands outside.

    Args:
        reply: what the model said, its thoughts too.
        fields: an object that has none of them is passed over; empty: none is.
        quoted: what the reply may quote: what is judged, and its task.
    """
    text = _TAGGED.sub(lambda match: " " * len(match[0]), _without_thoughts(reply, quoted))
    shown = {
        _key(json_object)
        for quoted_text in quoted
        for text_of in (quoted_text, quoted_text.replace('\\"', '"'))
        for json_object in _within(text_of)
    }
    stated, was_quoted, outside, end = dict[str, dict[str, Any]](), False, list[str](), 0
    for start, behind, value in _objects(text):
        outside.append(text[end:start])
        end = behind
        if fields and not any(name in value for name in fields):
            continue
        if _is_quoted(text, start) or _key(value) in shown:
            was_quoted = True
        else:
            stated[_key(value)] = value
    outside_text = "".join([*outside, text[end:]])
    if _FENCE.sub("", outside_text).strip():
        repeated = [
            key
            for key, json_object in stated.items()
            if any(n in json_object and _is_claimed(n, json_object[n], quoted) for n in fields)
        ]
        was_quoted = was_quoted or bool(repeated)
        for key in repeated:
            del stated[key]
    if any(re.search(rf'"{re.escape(name)}"\s*:', outside_text) for name in fields):
        raise ValueError("the JSON object in it is not whole: one of its fields stands outside")
    if len(stated) > 1:
        raise ValueError(f"{len(stated)} JSON objects in it differ")
    if not stated:
        raise ValueError("the JSON object in it is a quote" if was_quoted else "there is no JSON object in it")
    return next(iter(stated.values()))


def _without_thoughts(reply: str, quoted: Sequence[str]) -> str:
    """The reply behind its thoughts. A mark of their end that may be quoted ends nothing."""
    before, mark, behind = reply.partition("</think>")
    begun = before.lstrip().startswith("<think>")
    alone = "</think>" not in behind and not any("</think>" in quoted_text for quoted_text in quoted)
    return behind if mark and (begun or alone) else reply


def _objects(text: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The outermost objects of a text, with their places. Raises ValueError for one that is not JSON."""
    decoder, position = json.JSONDecoder(strict=False, object_pairs_hook=_once), 0  # a model breaks lines in strings
    while (start := text.find("{", position)) >= 0:
        try:
            value, position = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            if _BROKEN.match(text, start):
                raise ValueError("an object in it is not valid JSON") from None
            position = start + 1
            continue
        yield start, position, value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("an object names a field twice")
    return fields


def _is_quoted(text: str, start: int) -> bool:
    before = text[:start].rstrip(" ")
    line = before.rpartition("\n")[2].lstrip()
    return line.startswith(">") or (before.endswith(_MARKS) and not before.endswith("```"))


def _is_claimed(name: str, value: Any, quoted: Sequence[str]) -> bool:
    """Whether a text gives a field this value, however it is spelt: as JSON, escaped, in Python, in words.

    Of a list it is enough that a text has the field.
    """
    pattern = re.compile(rf"{re.escape(name)}\W{{1,12}}?(-?\d[\d.]*(?:e[+-]?\d+)?|\w+)", re.IGNORECASE)
    claims = {_scalar(claim.rstrip(".")) for text in quoted for claim in pattern.findall(html.unescape(text))}
    return bool(claims) if isinstance(value, (list, Mapping)) else _scalar(value) in claims


def _scalar(value: Any) -> float | str:
    text = str(value).strip().lower()
    try:
        return float(text)
    except ValueError:
        return text


def _within(text: str) -> Iterator[dict[str, Any]]:
    """Every object that begins anywhere in a text, also inside of others."""
    decoder, position = json.JSONDecoder(strict=False), -1
    while (position := text.find("{", position + 1)) >= 0:
        try:
            yield decoder.raw_decode(text, position)[0]
        except (ValueError, RecursionError):
            continue


def _key(value: Mapping[str, Any]) -> str:
    """The same for objects whose values are equal: by any order of fields, kind of number, and blanks in text."""
    try:
        return json.dumps(_plain(value), sort_keys=True)
    except RecursionError:
        return "too deep to be a verdict"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, str):
        return " ".join(value.split())
    return value + 0.0 if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53 else value
