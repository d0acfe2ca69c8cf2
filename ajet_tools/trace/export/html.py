"""Exports episodes as a single web page with messages, rewards and coloured tokens.

The page is static: no scripts or fonts, and a content security policy forbids them, as it does all
pictures but those within the page. All texts are escaped.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ajet_sdk.dialects.message_parts import parts_of, pictures_in, without_pictures
from ajet_sdk.pictures import Picture
from ajet_sdk.reporting.output import visible
from ajet_sdk.samples.timelines import merge
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.types import Episode
from ajet_tools.text.clean import kind_of
from ajet_tools.trace.decoding import Vocabulary, known_vocabulary, shown
from ajet_tools.trace.export.conversations import Conversation, conversations
from ajet_tools.trace.export.job import Job
from ajet_tools.trace.queries.records import Record
from ajet_tools.trace.tokens.view import EpisodeTokens, TokenView, timeline_view


def write(job: Job, file: BinaryIO) -> None:
    """Write a page with a section for each episode."""
    known = lru_cache(maxsize=4)(
        lambda run_id: known_vocabulary(job.reader, run_id, trace=job.trace)
    )
    file.write(_START.encode())
    for record in job.records(whole=True):
        for part in _section(record, *known(record.episode.run_id)):
            file.write(part.encode("utf-8", "replace"))
        job.wrote(record)
    file.write(_END.encode())


def cell(episode: Episode, directory: Path | None) -> str:
    """Render an episode as an iframe for a notebook; `directory` is that of its trace, if any."""
    parts: list[str] = []
    if directory is not None and (directory / "trace.duckdb").exists():
        with open_trace(directory) as reader:
            job = Job(reader, [episode.episode_id], redact=False, trace=directory / "trace.duckdb")
            for loaded in job.records(whole=True):
                parts += _section(
                    loaded, *known_vocabulary(reader, loaded.episode.run_id, trace=job.trace)
                )
    parts = parts or [
        *_section(Record(episode), None, "the trace that has its tokenizer is not known")
    ]
    page = "".join((_START, *parts, _END))
    return (
        f'<iframe srcdoc="{html.escape(page)}" style="width: 100%; height: 30em; border:'
        ' 0"></iframe>'
    )


def pictures_page(pictures: Sequence[Picture]) -> str:
    """A page with pictures alone, each below its line."""
    shown = (f"<p>{_esc(picture.line)}</p>{_image(picture)}" for picture in pictures)
    return "".join((_HEAD, *shown, _END))


def _esc(value: object) -> str:
    """Escape a value as HTML, with control characters replaced."""
    return html.escape(
        visible(
            value
            if isinstance(value, str)
            else json.dumps(without_pictures(value), ensure_ascii=False, default=str)
        )
    )


def _section(record: Record, known: Vocabulary | None, why_ids: str) -> Iterator[str]:
    episode = record.episode
    yield f"<section><h2>Episode {_esc(episode.episode_id)}</h2>"
    facts: list[tuple[str, object]] = [
        ("run", episode.run_id if record.ended else None),
        ("task", episode.task.main_query or episode.task.init_messages or episode.task.task_id),
        ("status", episode.status if record.ended else "not ended"),
        ("cause", episode.cause),
        ("reward", episode.reward),
        ("step", f"{episode.step} ({kind_of(episode)})" if episode.split else ""),
        ("group", f"{episode.group_id}, attempt {episode.attempt}" if episode.group_id else None),
        ("output", episode.output),
        (
            "seconds",
            (
                round((episode.ended_at - episode.started_at).total_seconds(), 2)
                if record.ended
                else None
            ),
        ),
    ]
    yield _facts(facts)
    if episode.error:
        yield f'<pre class="error">{_esc(episode.error)}</pre>'
    yield from _rewards(episode)
    if record.feedback:
        yield "<h3>Feedback</h3>"
    for note in record.feedback:
        names = {"author": "by", "score": "score", "comment": "comment", "correction": "correction"}
        yield _facts([(title, getattr(note, name)) for name, title in names.items()])
    for number, conversation in enumerate(conversations(episode), 1):
        yield from _conversation(number, conversation)
    yield from _timelines(EpisodeTokens(record, merge(record.episode.calls), known, why_ids))
    yield "</section>"


def _facts(pairs: Sequence[tuple[str, object]]) -> str:
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


_ROLES = ("system", "user", "assistant", "tool")


def _conversation(number: int, conversation: Conversation) -> Iterator[str]:
    yield f"<h3>Conversation {number}, agent {_esc(conversation.agent)}</h3>"
    replies = {index: call_id for call_id, index in conversation.turns}
    for i, message in enumerate(conversation.messages):
        role = str(message.get("role", ""))
        style = role if role in _ROLES else "other"
        call = f" <small>call {_esc(replies[i])}</small>" if i in replies else ""
        body = html.escape(visible(parts_of(message).text)) or "<i>empty</i>"
        yield f'<div class="message {style}"><b>{_esc(role)}</b>{call}<pre>{body}</pre>'
        yield from map(_image, pictures_in(message))
        yield "</div>"


def _image(picture: Picture) -> str:
    # decoded before, so that it is a picture of its media type and no SVG or other document
    size = f'width="{picture.width}" height="{picture.height}"'
    return (
        f'<img src="{picture.url}" alt="{_esc(picture.line)}" title="{_esc(picture.line)}" {size}>'
    )


def _timelines(tokens: EpisodeTokens) -> Iterator[str]:
    if tokens.record.redacted:
        yield (
            "<p><i>Text of this episode was redacted; its tokens are left out because they would"
            " reveal it.</i></p>"
        )
        return
    if len(tokens) and tokens.known is None:
        yield f"<p><i>Tokens are shown as ids: {_esc(tokens.why_ids)}</i></p>"
    for number, timeline in enumerate(tokens.merged.timelines):
        masked = int(timeline.loss_mask.sum())
        size = f"{len(timeline.token_ids):,} tokens, {masked:,} sampled"
        version = (
            "" if timeline.policy_version is None else f", policy version {timeline.policy_version}"
        )
        yield (
            f"<h3>Timeline {number + 1}, agent {_esc(timeline.agent)}"
            f" <small>{size}{version}</small></h3>"
        )
        yield '<div class="tokens">'
        yield from _tokens(timeline_view(tokens, number))
        yield "</div>"


def _tokens(view: TokenView) -> Iterator[str]:
    largest = float(np.nanmax(np.abs(view.advantage), initial=0.0)) or 1.0
    pictures = {placed.start: placed for placed in view.pictures}
    end = 0
    for i, token in enumerate(view.ids.tolist()):
        if i in pictures:
            end = pictures[i].end
            line = html.escape(pictures[i].picture.line)
            yield f'<span title="{end - i} tokens of a picture, prompt">[{line}]</span>'
        if i < end:
            continue
        text = f"{token} " if view.spelled is None else view.spelled.of(i)
        body = (
            "".join("<wbr>\u23ce\n" if c == "\n" else html.escape(shown(c)) for c in text)
            or "\u00b7"
        )
        if not view.mask[i]:
            yield f'<span title="id {token}, prompt">{body}</span>'
            continue
        logprob, advantage = float(view.sampler[i]), float(view.advantage[i])
        style, title = "", f"id {token}, sampled"
        if np.isfinite(logprob):
            style += f"--l:{100 * (1 - np.exp(min(logprob, 0.0))):.0f}%;"
            title += f", log-probability {logprob:.4f}"
        if np.isfinite(advantage):
            kind = "p" if advantage > 0 else "n"
            style += f"--{kind}:{100 * abs(advantage) / largest:.0f}%;"
            title += f", advantage {advantage:.4g}"
        yield f'<span class="m" style="{style}" title="{title}">{body}</span>'


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

_STYLE = """
:root { color-scheme: light dark; --text: #1c1d20; --back: #fdfdfc; --line: #d9d9d6; --dim: #63666b;
  --mask: #2f7de1; --weak: #d9822b; --good: #2e9e5b; --bad: #d0413e; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e6e3; --back: #17181a; --line: #3a3c40; --dim: #9da0a6;
  --mask: #5b9df0; --weak: #e39a4f; --good: #49b877; --bad: #e8645f; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 62rem;
  margin: 0 auto; padding: 1rem 1rem 5rem; }
h2 { font-size: 1.15rem; overflow-wrap: anywhere; } h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
section + section { border-top: 2px solid var(--line); margin-top: 3rem; }
small, dt, th { color: var(--dim); font-weight: normal; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; }
dd { margin: 0; overflow-wrap: anywhere; }
table { border-collapse: collapse; } td, th { border-bottom: 1px solid var(--line); padding: .15rem .8rem .15rem 0;
  text-align: left; vertical-align: top; overflow-wrap: anywhere; }
pre { font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: .2rem 0; }
img { background: #fff; max-width: 100%; max-height: 24rem; width: auto; height: auto; display: block;
  margin: .3rem 0; }
.error { color: var(--bad); }
.message { border-left: 3px solid var(--line); padding: .1rem 0 .1rem .8rem; margin: .6rem 0; }
.assistant { border-color: var(--mask); } .tool { border-color: var(--weak); } .user { border-color: var(--good); }
.tokens { font: 13px/1.9 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; color: var(--dim); }
.tokens .m { color: var(--text); border-radius: 2px; border-bottom: 1px solid var(--line); }
#colour { position: sticky; top: 0; background: var(--back); padding: .5rem 0; border-bottom: 1px solid var(--line); }
#colour label { margin-right: 1rem; }
body:has(#by-mask:checked) .m { background: color-mix(in srgb, var(--mask) 30%, transparent); }
body:has(#by-logprob:checked) .m { background: color-mix(in srgb, var(--weak) var(--l, 0%), transparent); }
body:has(#by-advantage:checked) .m { background: color-mix(in srgb, var(--good) calc(var(--p, 0%) * .7), transparent);
  box-shadow: inset 0 0 0 2em color-mix(in srgb, var(--bad) calc(var(--n, 0%) * .7), transparent); }
"""

_HEAD = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>ajet episodes</title><style>{_STYLE}</style></head><body>
"""

_START = f"""{_HEAD}<form id="colour">Tokens coloured by
<label><input type="radio" name="by" id="by-mask" checked> what was sampled</label>
<label><input type="radio" name="by" id="by-logprob"> improbability</label>
<label><input type="radio" name="by" id="by-advantage"> advantage</label>
<small>Point at a token for its id and values.</small></form>
"""

_END = "</body></html>\n"
