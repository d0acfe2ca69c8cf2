"""An episode or a call as text on a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from ajet_sdk.reporting.output import visible
from ajet_sdk.types import Episode
from ajet_tools.text.clean import counted, kind_of, message_text, one_line, reply_of, short_ids, spoken
from ajet_tools.text.tables import fields, number
from ajet_tools.trace.queries.calls import CallRow, LedgerRow, NewInCall

_ROLES = {"system": "dim", "user": "green", "assistant": "cyan", "tool": "magenta"}
"""Colors."""

_FIRST, _LAST = 10, 30
"""Calls of a long episode that are shown."""

_LONG, _LINES = 4000, 60
"""Characters and lines of a message that are shown."""


def episode_head(episode: Episode, ledger: Sequence[LedgerRow], live: bool = False) -> RenderableType:
    """An episode's task, outcome and rewards; `live` if it has not ended."""
    outcomes: dict[str, int] = {}
    for entry in ledger:
        outcomes[entry["outcome"]] = outcomes.get(entry["outcome"], 0) + entry["tokens"]
    pairs: list[tuple[str, object]] = [
        ("episode", episode.episode_id),
        ("run", episode.run_id),
        ("group", f"{episode.group_id}, attempt {episode.attempt}" if episode.group_id else None),
        ("step", f"{episode.step} ({kind_of(episode)})" if episode.split else None),
        ("task", f"{episode.task.task_id}  {one_line(episode.task.main_query)}"),
        ("status", "running, or cut off before it ended" if live else episode.status),
        ("error", f"{episode.cause}: {episode.error}" if episode.cause and episode.error else episode.error),
        ("output", None if episode.output is None else one_line(episode.output, 400)),
        ("reward", number(episode.reward)),
    ]
    for reward in episode.rewards:
        of = f" of {reward.call_id}" if reward.call_id else f" of agent {reward.agent}" if reward.agent else ""
        weight = f" × {number(reward.weight)}" if reward.weight != 1 else ""
        why = f"  {reward.reason}" if reward.reason else ""
        pairs.append((f"  {reward.name}", f"{number(reward.value)}{weight}{of}{why}"))
    for event in episode.events:
        seconds = (event.ended_at - event.started_at).total_seconds()
        came = f"error: {event.error}" if event.error else event.result
        pairs.append((event.kind, f"{event.name} {one_line(event.arguments)} → {one_line(came)} in {seconds:.3g} s"))
    pairs += [(name, number(value)) for name, value in episode.metrics.items()]
    pairs.append(("ledger", ", ".join(f"{counted(n, 'token')} {outcome}" for outcome, n in outcomes.items())))
    return fields(pairs)


def conversation(
    rows: Sequence[NewInCall], ledger: Sequence[LedgerRow], *, full: bool = False
) -> Iterator[RenderableType]:
    """The calls of an episode: the messages that are new in each, and its reply.

    Unless `full`, the middle of many calls and the end of long messages are left out.
    """
    ids = short_ids([row["call_id"] for row in rows])
    booked: dict[str, list[str]] = {}
    for entry in ledger:
        booked.setdefault(entry["call_id"], []).append(f"{entry['tokens']:,} {entry['outcome']}")
    replies: dict[str, Mapping[str, object]] = {}
    left_out = range(0) if full or len(rows) <= _FIRST + _LAST else range(_FIRST, len(rows) - _LAST)
    for i, row in enumerate(rows):
        if i in left_out:
            if i == left_out.start:
                note = f"\n{counted(len(left_out), 'call')} left out here; --full shows all\n"
                yield Text(note, style="yellow")
            continue
        reply = reply_of(json.loads(row["response"]))
        replies[row["call_id"]] = reply
        parent = row["parent_call_id"]
        yield _call_title(row, ids, booked.get(row["call_id"], []))
        for message in _new_messages(row, replies.get(parent) if parent else None):
            yield _message(message, full)
        yield _message(reply, full)
        if row["error"]:
            yield Text(_shortened(f"error: {row['error']}", full), style="red")


def _call_title(row: NewInCall, ids: Mapping[str, str], booked: Sequence[str]) -> Text:
    parts: list[str | None] = [f"call {row['index']}  {ids[row['call_id']]}", row["agent"], row["model"]]
    if row["policy_version"] is not None:
        parts.append(f"version {row['policy_version']}")
    if row["output_tokens"] is not None:
        parts.append(f"{number(row['prompt_tokens'])} → {counted(row['output_tokens'], 'token')}")
    parts += [row["finish_reason"], f"{row['seconds']:.2f} s"]
    parts += [row["phase"] if row["phase"] != "rollout" else "", "" if row["trainable"] else "not trained", *booked]
    return Text(visible("\n" + "  ".join(part for part in parts if part)), style="bold underline")


def _new_messages(row: NewInCall, echoed: Mapping[str, object] | None) -> list[object]:
    """The messages that are new in this call, without the parent's unchanged reply."""
    if row["messages_suffix"] is None:
        request = json.loads(row["request"])
        asked = request.get("prompt", request.get("input"))
        return [] if asked is None else [{"role": "user", "content": asked}]
    messages = list(json.loads(row["messages_suffix"]))
    first = messages[0] if messages else None
    if echoed is None or not isinstance(first, Mapping) or first.get("role") != "assistant":
        return messages
    return messages[1:] if message_text(first) == message_text(echoed) else messages


def _shortened(text: str, full: bool) -> str:
    """A text safe to show; unless `full`, the beginning of a long one."""
    lines = text[: _LONG + 1].split("\n", _LINES)
    shown = "\n".join(lines[:_LINES])[:_LONG]
    if full or len(shown) == len(text):
        return visible(text)
    return f"{visible(shown)}… ({len(text) - len(shown):,} more characters; --full shows all)"


def _message(message: object, full: bool) -> RenderableType:
    if not isinstance(message, Mapping):
        message = {"role": "?", "content": message}
    role = str(message.get("role", "?"))
    name = f" {message['name']}" if isinstance(message.get("name"), str) else ""
    body = _shortened(spoken(message), full) or "(empty)"
    return Group(
        Text(one_line(f"{role}{name}"), style=f"bold {_ROLES.get(role, '')}"), Padding(Text(body), (0, 0, 0, 2))
    )


def call_view(row: CallRow, *, full: bool = False) -> Iterator[RenderableType]:
    """One call: its fields, the messages of its request, its reply. Unless `full`, long messages are cut."""
    request = json.loads(row["request"])
    messages = request.pop("messages", None)
    yield fields(
        [
            ("call", row["call_id"]),
            ("episode", row["episode_id"]),
            ("extends", row["parent_call_id"]),
            ("agent", f"{row['agent']}{' ' + row['target_tag'] if row['target_tag'] else ''}"),
            ("model", row["model"]),
            ("version", row["policy_version"]),
            ("phase", row["phase"]),
            ("trainable", row["trainable"]),
            ("prompt", counted(len(row["prompt_ids"]), "token") if row["prompt_ids"] is not None else None),
            ("reply", counted(len(row["output_ids"]), "token") if row["output_ids"] is not None else None),
            ("log-probability", f"{sum(row['logprobs']):.4f} in all" if row["logprobs"] else None),
            ("finish reason", row["finish_reason"]),
            ("sampling", row["sampling"]),
            ("request", _shortened(json.dumps(request, ensure_ascii=False), full)),
            ("started", row["started_at"]),
            ("ended", row["ended_at"]),
            ("error", row["error"]),
            ("ledger", ", ".join(row["ledger"] or [])),
        ]
    )
    for message in messages or ():
        yield _message(message, full)
    yield Rule(Text("reply"), align="left", style="dim")
    yield _message(reply_of(json.loads(row["response"])), full)
