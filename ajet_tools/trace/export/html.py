"""Exports episodes as a single web page with messages, rewards and coloured tokens.

The page is static: no scripts or fonts, and a content security policy forbids them, as it does all
pictures but those within the page. All texts are escaped. Its text is in `page.html.jinja`.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ajet_sdk.dialects.message_parts import parts_of, pictures_in, without_pictures
from ajet_sdk.pictures import Picture
from ajet_sdk.reporting.output import visible
from ajet_sdk.samples.timelines import merge
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.types import Episode, Timeline
from ajet_tools.text.clean import kind_of
from ajet_tools.trace.decoding import Vocabulary, known_vocabulary, shown
from ajet_tools.trace.export.conversations import Conversation, conversations
from ajet_tools.trace.export.job import Job
from ajet_tools.trace.queries.records import Record
from ajet_tools.trace.tokens.view import EpisodeTokens, TokenView, timeline_view


@cache
def _page() -> Any:
    """Returns the macros of the template."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=_text,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template("page.html.jinja").module


def _text(value: object) -> object:
    """Returns a value as text, with control characters replaced; it is escaped afterwards."""
    if hasattr(value, "__html__"):
        return value  # the result of a macro
    if not isinstance(value, str):
        value = json.dumps(without_pictures(value), ensure_ascii=False, default=str)
    return visible(value)


def write(job: Job, file: BinaryIO) -> None:
    """Write a page with a section for each episode."""
    known = lru_cache(maxsize=4)(
        lambda run_id: known_vocabulary(job.reader, run_id, trace=job.trace)
    )
    file.write(_page().start().encode())
    for record in job.records(whole=True):
        section = _section(record, *known(record.episode.run_id))
        file.write(section.encode("utf-8", "replace"))
        job.wrote(record)
    file.write(_page().end().encode())


def cell(episode: Episode, directory: Path | None) -> str:
    """Render an episode as an iframe for a notebook; `directory` is that of its trace, if any."""
    sections: list[str] = []
    if directory is not None and (directory / "trace.duckdb").exists():
        with open_trace(directory) as reader:
            job = Job(reader, [episode.episode_id], redact=False, trace=directory / "trace.duckdb")
            for loaded in job.records(whole=True):
                known = known_vocabulary(reader, loaded.episode.run_id, trace=job.trace)
                sections.append(_section(loaded, *known))
    if not sections:
        why = "the trace that has its tokenizer is not known"
        sections.append(_section(Record(episode), None, why))
    page = "".join((_page().start(), *sections, _page().end()))
    return (
        f'<iframe srcdoc="{html.escape(page)}" style="width: 100%; height: 30em; border:'
        ' 0"></iframe>'
    )


def pictures_page(pictures: Sequence[Picture]) -> str:
    """A page with pictures alone, each below its line."""
    page = _page()
    return "".join((page.head(), page.pictures_alone(pictures), page.end()))


def _section(record: Record, known: Vocabulary | None, why_ids: str) -> str:
    episode = record.episode
    tokens = EpisodeTokens(record, merge(episode.calls), known, why_ids)
    timelines = []
    remark = ""
    if record.redacted:
        remark = (
            "Text of this episode was redacted; its tokens are left out because they would reveal"
            " it."
        )
    else:
        for number, timeline in enumerate(tokens.merged.timelines):
            view = timeline_view(tokens, number)
            timelines.append(
                {"agent": timeline.agent, "size": _size(timeline), "tokens": _tokens(view)}
            )
        if len(tokens) and known is None:
            remark = f"Tokens are shown as ids: {why_ids}"
    section: str = _page().section(
        episode,
        _facts(record),
        notes=record.feedback,
        conversations=map(_conversation, conversations(episode)),
        timelines=timelines,
        remark=remark,
    )
    return section


def _facts(record: Record) -> list[tuple[str, object]]:
    episode = record.episode
    task = episode.task
    facts: list[tuple[str, object]] = [
        ("run", episode.run_id if record.ended else None),
        ("task", task.main_query or task.init_messages or task.task_id),
        ("status", episode.status if record.ended else "not ended"),
        ("cause", episode.cause),
        ("reward", episode.reward),
        ("step", f"{episode.step} ({kind_of(episode)})" if episode.split else ""),
        ("group", f"{episode.group_id}, attempt {episode.attempt}" if episode.group_id else None),
        ("output", episode.output),
    ]
    if record.ended:
        seconds = (episode.ended_at - episode.started_at).total_seconds()
        facts.append(("seconds", round(seconds, 2)))
    return facts


def _conversation(conversation: Conversation) -> dict[str, object]:
    call_ids = {index: call_id for call_id, index in conversation.turns}
    messages = []
    for index, message in enumerate(conversation.messages):
        messages.append(
            {
                "role": str(message.get("role", "")),
                "text": parts_of(message).text,
                # decoded before, so that each is a picture of its media type and no SVG
                "pictures": pictures_in(message),
                "call_id": call_ids.get(index),
            }
        )
    return {"agent": conversation.agent, "messages": messages}


def _size(timeline: Timeline) -> str:
    size = f"{len(timeline.token_ids):,} tokens, {int(timeline.loss_mask.sum()):,} sampled"
    if timeline.policy_version is None:
        return size
    return f"{size}, policy version {timeline.policy_version}"


@dataclass(frozen=True)
class _Token:
    text: str
    title: str
    sampled: bool = False
    style: str = ""


def _tokens(view: TokenView) -> Iterator[_Token]:
    largest = float(np.nanmax(np.abs(view.advantage), initial=0.0)) or 1.0
    pictures = {placed.start: placed for placed in view.pictures}
    end = 0
    for i, token in enumerate(view.ids.tolist()):
        if i in pictures:
            end = pictures[i].end
            yield _Token(f"[{pictures[i].picture.line}]", f"{end - i} tokens of a picture, prompt")
        if i < end:
            continue
        if view.spelled is None:
            text = f"{token} "
        else:
            text = view.spelled.of(i)
        text = "\n".join(map(shown, text.split("\n")))
        if not view.mask[i]:
            yield _Token(text, f"id {token}, prompt")
            continue
        logprob = float(view.sampler[i])
        advantage = float(view.advantage[i])
        style = ""
        title = f"id {token}, sampled"
        if np.isfinite(logprob):
            style += f"--l:{100 * (1 - np.exp(min(logprob, 0.0))):.0f}%;"
            title += f", log-probability {logprob:.4f}"
        if np.isfinite(advantage):
            kind = "p" if advantage > 0 else "n"
            style += f"--{kind}:{100 * abs(advantage) / largest:.0f}%;"
            title += f", advantage {advantage:.4g}"
        yield _Token(text, title, sampled=True, style=style)
