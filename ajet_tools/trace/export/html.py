"""A page to look at and to send: episodes with their messages, rewards and coloured tokens, in one file.

Nothing is fetched and nothing runs: no script, no font, no picture, and a policy in the page that forbids them. Every
text of a model, an agent or a person is escaped.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ajet_sdk.errors import ConfigError
from ajet_sdk.timelines import merge
from ajet_sdk.types import Episode, Feedback, Timeline
from ajet_tools.trace.decoding import Vocabulary, shown, token_text, vocabulary
from ajet_tools.trace.export.conversations import Conversation, conversations
from ajet_tools.trace.export.job import Job
from ajet_tools.trace.export.page import END, START
from ajet_tools.trace.export.record import Record
from ajet_tools.trace.text import kind_of, message_text, visible

__all__ = ["write"]

_Floats = npt.NDArray[np.float32]


def write(job: Job, file: BinaryIO) -> None:
    """One page with a section for each episode."""
    known = lru_cache(maxsize=4)(lambda run_id: _vocabulary(job, run_id))
    file.write(START.encode())
    for record in job.records(whole=True):
        for part in _section(record, known(record.episode.run_id)):
            file.write(part.encode("utf-8", "replace"))
        job.wrote(record)
    file.write(END.encode())


def _vocabulary(job: Job, run_id: str) -> Vocabulary | str:
    try:
        return vocabulary(job.reader, run_id, trace=job.trace)
    except ConfigError as error:
        return str(error)


def _esc(value: Any) -> str:
    """Text as it can stand anywhere in the page, what would move or hide text spelled out."""
    return html.escape(visible(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)))


def _section(record: Record, known: Vocabulary | str) -> Iterator[str]:
    episode = record.episode
    yield f"<section><h2>Episode {_esc(episode.episode_id)}</h2>"
    yield _facts(_head(record))
    if episode.error:
        yield f'<pre class="error">{_esc(episode.error)}</pre>'
    yield from _rewards(episode)
    yield from _said(record.feedback)
    for number, conversation in enumerate(conversations(episode), 1):
        yield from _conversation(number, conversation)
    yield from _timelines(record, known)
    yield "</section>"


def _head(record: Record) -> list[tuple[str, Any]]:
    episode = record.episode
    task = episode.task.main_query or episode.task.init_messages or episode.task.task_id
    return [
        ("run", episode.run_id),
        ("task", task),
        ("status", episode.status if record.ended else "not ended"),
        ("cause", episode.cause),
        ("reward", episode.reward),
        ("step", f"{episode.step} ({kind_of(episode)})" if episode.split else ""),
        ("group", f"{episode.group_id}, attempt {episode.attempt}" if episode.group_id else None),
        ("output", episode.output),
        ("seconds", round((episode.ended_at - episode.started_at).total_seconds(), 2) if record.ended else None),
    ]


def _facts(pairs: Sequence[tuple[str, Any]]) -> str:
    shown_pairs = [(name, value) for name, value in pairs if value not in (None, "", [], {})]
    lines = "".join(f"<dt>{_esc(name)}</dt><dd>{_esc(value)}</dd>" for name, value in shown_pairs)
    return f"<dl>{lines}</dl>"


def _rewards(episode: Episode) -> Iterator[str]:
    if not episode.rewards:
        return
    yield "<h3>Rewards</h3><table><tr><th>name<th>value<th>weight<th>of<th>reason</tr>"
    for reward in episode.rewards:
        of = reward.call_id or reward.agent or ""
        cells = (reward.name, f"{reward.value:g}", f"{reward.weight:g}", of, reward.reason or "")
        yield "<tr>" + "".join(f"<td>{_esc(cell)}</td>" for cell in cells) + "</tr>"
    yield "</table>"


def _said(feedback: Sequence[Feedback]) -> Iterator[str]:
    if feedback:
        yield "<h3>Feedback</h3>"
    for said in feedback:
        pairs = [("by", said.author), ("score", said.score), ("comment", said.comment), ("correction", said.correction)]
        yield _facts(pairs)


_ROLES = ("system", "user", "assistant", "tool")


def _conversation(number: int, conversation: Conversation) -> Iterator[str]:
    yield f"<h3>Conversation {number}, agent {_esc(conversation.agent)}</h3>"
    replies = {place: call_id for call_id, place in conversation.turns}
    for place, message in enumerate(conversation.messages):
        role = str(message.get("role", ""))
        style = role if role in _ROLES else "other"
        whose = f" <small>call {_esc(replies[place])}</small>" if place in replies else ""
        body = html.escape(message_text(message)) or "<i>empty</i>"
        yield f'<div class="message {style}"><b>{_esc(role)}</b>{whose}<pre>{body}</pre></div>'


def _timelines(record: Record, known: Vocabulary | str) -> Iterator[str]:
    if record.redacted:
        yield "<p><i>Text of this episode was redacted; its tokens, which would spell it, are left out.</i></p>"
        return
    timelines = merge(record.episode.calls).timelines
    if timelines and isinstance(known, str):
        yield f"<p><i>Tokens are shown as ids: {_esc(known)}</i></p>"
    trained = {row["call_id"]: row["advantages"] for row in record.trained}
    for number, timeline in enumerate(timelines, 1):
        masked = int(timeline.loss_mask.sum())
        size = f"{len(timeline.token_ids):,} tokens, {masked:,} sampled"
        version = "" if timeline.policy_version is None else f", policy version {timeline.policy_version}"
        yield f"<h3>Timeline {number}, agent {_esc(timeline.agent)} <small>{size}{version}</small></h3>"
        yield '<div class="tokens">'
        yield from _tokens(timeline, known, trained)
        yield "</div>"


def _tokens(timeline: Timeline, known: Vocabulary | str, trained: Mapping[str, Sequence[float]]) -> Iterator[str]:
    ids = timeline.token_ids.tolist()
    spelled = None if isinstance(known, str) else token_text(ids, known)
    advantages = _advantages(timeline, trained)
    largest = float(np.nanmax(np.abs(advantages), initial=0.0)) or 1.0
    for i, token in enumerate(ids):
        text = f"{token} " if spelled is None else spelled.of(i)
        body = _token_body(text)
        if not timeline.loss_mask[i]:
            yield f'<span title="id {token}, prompt">{body}</span>'
            continue
        logprob, advantage = float(timeline.logprobs[i]), float(advantages[i])
        style, title = "", f"id {token}, sampled"
        if np.isfinite(logprob):
            style += f"--l:{100 * (1 - np.exp(min(logprob, 0.0))):.0f}%;"
            title += f", log-probability {logprob:.4f}"
        if np.isfinite(advantage):
            kind = "p" if advantage > 0 else "n"
            style += f"--{kind}:{100 * abs(advantage) / largest:.0f}%;"
            title += f", advantage {advantage:.4g}"
        yield f'<span class="m" style="{style}" title="{title}">{body}</span>'


def _token_body(text: str) -> str:
    """A token's text: line breaks stay and are marked, other control characters are spelled out."""
    return "".join("<wbr>\u23ce\n" if c == "\n" else html.escape(shown(c)) for c in text) or "\u00b7"


def _advantages(timeline: Timeline, trained: Mapping[str, Sequence[float]]) -> _Floats:
    found = np.full(len(timeline.token_ids), np.nan, np.float32)
    for span in timeline.spans:
        known = trained.get(span.call_id)
        if known is not None and len(known) == span.end - span.start:
            found[span.start : span.end] = np.array(known, np.float32)
    return found
