"""One row whole, as sections of text: what it asks, its answer, other fields, how it was checked, where it is from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ajet_sdk.tasks.rows import QUERY_COLUMNS
from ajet_tools.dataset.review import Review
from ajet_tools.dataset.verdict import answer_of
from ajet_tools.trace.text import message_text

__all__ = ["Section", "as_text", "sections"]

_CHATS = ("init_messages", "messages", "chosen", "rejected", "prompt", "conversations")


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it."""

    title: str
    text: str


def sections(review: Review, number: int) -> list[Section]:
    """A row as it is now, the most important first."""
    row = review.row(number)
    values = row.values
    head = [f"row {number + 1:,}", *([row.where] if not row.where.endswith(f"row {number + 1}") else [])]
    decision = review.decisions.get(number)
    if decision is not None:
        head += [decision.mark] if decision.mark else []
        head += ["edited"] if decision.values is not None else []
    provenance = values.get("provenance")
    answer = answer_of(values)
    made = [Section(", ".join(head), "")]
    made += [Section(name, text) for name, text in _asked(values)]
    made += [Section("answer", _spelt(answer))] if answer is not None else []
    others = "\n".join(_others(values))
    made += [Section("fields", others)] if others else []
    if isinstance(provenance, Mapping):
        verdict = provenance.get("verdict")
        made += [Section("verification", "\n".join(_verified(verdict)))] if isinstance(verdict, Mapping) else []
        made.append(Section("provenance", "\n".join(_flat({k: v for k, v in provenance.items() if k != "verdict"}))))
    if "rejected" in values and isinstance(values["rejected"], Mapping):
        made.insert(1, Section("rejected", "\n".join(_flat(values["rejected"]))))
    if decision is not None and decision.values is not None:
        made.append(Section("before it was edited", json.dumps(review.spool.row(number).values, ensure_ascii=False)))
    return made


def as_text(found: list[Section]) -> str:
    """All of it as one text."""
    return "\n".join(f"{one.title}\n{_indented(one.text)}" if one.text else one.title for one in found)


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.split("\n"))


def _asked(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in QUERY_COLUMNS:
        if isinstance(values.get(name), str) and values[name]:
            yield name, values[name]
    for name in _CHATS:
        messages = values.get(name)
        if isinstance(messages, list) and messages:
            yield name, "\n\n".join(_said(one) for one in messages)


def _said(message: Any) -> str:
    if not isinstance(message, Mapping):
        return _spelt(message)
    role = message.get("role", message.get("from", "?"))
    return f"{role}: {message_text({**message, 'content': message.get('content', message.get('value'))})}"


def _others(values: Mapping[str, Any]) -> Iterator[str]:
    """The fields that are not said elsewhere."""
    for name, value in values.items():
        shown = name in QUERY_COLUMNS and isinstance(value, str)
        if shown or name in ("provenance", "answer") or (name in _CHATS and isinstance(value, list)):
            continue
        if name == "rejected" and isinstance(value, Mapping):
            continue
        if name == "metadata" and isinstance(value, Mapping):
            yield from _flat({k: v for k, v in value.items() if k != "answer"}, "metadata.")
        else:
            yield from _flat({name: value})


def _verified(verdict: Mapping[str, Any]) -> Iterator[str]:
    said = {True: "passed", False: "failed"}.get(verdict.get("ok") is True)
    yield f"{said}, {verdict.get('verifier') or 'by whom is not said'}: {verdict.get('reason') or 'no reason is given'}"
    details = verdict.get("details")
    if isinstance(details, Mapping):
        yield from _flat(details)


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """A line for each field, `path: value`; texts of several lines stand under their name."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{name}.")
        elif isinstance(value, str) and "\n" in value:
            yield f"{before}{name}:\n{_indented(value)}"
        else:
            yield f"{before}{name}: {_spelt(value)}"


def _spelt(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
