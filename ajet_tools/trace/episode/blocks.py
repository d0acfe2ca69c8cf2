"""An episode as blocks of text: overview, forks and messages. Blocks are rendered when they become
visible."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.text import Text

from ajet_sdk.dialects.message_parts import pictures_in, pretty, without_pictures
from ajet_sdk.pictures import Picture
from ajet_sdk.reporting.output import visible
from ajet_sdk.types import Call
from ajet_tools.text.clean import drop_zero_width, one_line, short_ids
from ajet_tools.text.markdown import render_markdown
from ajet_tools.text.tables import counted, number
from ajet_tools.trace.episode.messages import CUT, Message, conversation, cut
from ajet_tools.trace.episode.overview import STATUS_STYLES, EpisodeOverview
from ajet_tools.trace.episode.tree import Branch, Fork

Kind = Literal["text", "markdown", "reasoning", "tool", "error", "note", "picture"]
Draw = Callable[[Picture, int], RenderableType | None]
"""Draws a picture at most as many columns wide, or not at all."""
PICTURE_LINES = 14
"""Largest height of a picture within a conversation."""
_PICTURE_COLUMNS = 60
_ROLES = {"system": "dim", "user": "green", "assistant": "cyan", "tool": "magenta", "?": "red"}
_STYLES: Mapping[Kind, str] = {"reasoning": "italic dim", "error": "red", "note": "yellow"}


@dataclass(frozen=True, slots=True)
class Part:
    """A text of a block, and its kind of display."""

    kind: Kind
    text: str
    title: str = ""
    picture: Picture | None = None
    """Of kind `picture`; its line is in the text of the message, too."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A title with text below."""

    key: str
    title: str
    style: str
    facts: str
    parts: tuple[Part, ...]
    call_id: str | None = None
    message: Message | None = None

    @property
    def text(self) -> str:
        """The whole text, for copying and for the full view."""
        texts = (part for part in self.parts if part.picture is None)
        return "\n\n".join(f"{part.title}\n{part.text}".strip("\n") for part in texts)

    @property
    def pictures(self) -> list[Picture]:
        """The pictures of the message."""
        return [part.picture for part in self.parts if part.picture is not None]

    @property
    def has_reasoning(self) -> bool:
        """Whether the block has reasoning to unfold."""
        return any(part.kind == "reasoning" for part in self.parts)

    def estimate_height(self, width: int) -> int:
        """Estimate the height without rendering."""
        shown = (part.text[:_GUESSED] for part in self.parts if part.kind != "reasoning")
        drawn = sum(size_of(picture, width)[1] for picture in self.pictures)
        return 2 + drawn + sum(1 + text.count("\n") + len(text) // max(1, width) for text in shown)

    def render(
        self,
        *,
        markdown: bool,
        unfolded: bool,
        most: int | None = CUT,
        whole: str = "enter opens it whole",
        draw: Draw | None = None,
    ) -> RenderableType:
        """Render the block without interpreting markup.

        Args:
            markdown: render replies as Markdown.
            unfolded: show the reasoning.
            most: maximum number of characters of a text.
            whole: hint for truncated texts.
            draw: draws the pictures.
        """
        head = Text.assemble(
            (drop_zero_width(self.title), f"bold {self.style}".strip()),
            (f"  {drop_zero_width(self.facts)}", "dim"),
        )
        shown: list[RenderableType] = [head]
        for n, part in enumerate(self.parts):
            if part.picture is not None:
                if draw is not None:
                    shown.append(_Drawn(part.picture, draw))
                continue
            if n and part.title and part.kind != "tool":
                shown.append(Text(""))
            shown.append(_part(part, markdown, unfolded, most, whole))
        return Group(*shown, Text(""))


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A picture with its line, as wide as there is space for."""

    picture: Picture
    draw: Draw

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(f"  {self.picture.line}; o opens it", style="dim")
        drawing = self.draw(self.picture, options.max_width - 2)
        if drawing is not None:
            yield Padding(drawing, (0, 0, 0, 2))


def size_of(
    picture: Picture, columns: int, lines: int = PICTURE_LINES, *, enlarged: bool = False
) -> tuple[int, int]:
    """Columns and lines that a picture takes, within a size; a small one is not enlarged, or only
    if asked. A cell is twice as high as it is wide."""
    scale = min(columns / max(picture.width, 1), 2 * lines / max(picture.height, 1))
    if not enlarged:
        scale = min(1.0, scale, _PICTURE_COLUMNS / max(picture.width, 1))
    wide = max(1, round(picture.width * scale))
    high = max(1, (round(picture.height * scale) + 1) // 2)
    return wide, high


_GUESSED = 12_000


def _part(
    part: Part, markdown: bool, unfolded: bool, most: int | None, whole: str
) -> RenderableType:
    if part.kind == "reasoning" and not unfolded:
        lines = part.text.count("\n") + 1
        return Text(
            f"  ▸ reasoning, {counted(lines, 'line')}; space unfolds it", style="italic dim"
        )
    text, more = (part.text, 0) if most is None else cut(part.text, most)
    text = drop_zero_width(visible(text)).expandtabs(4)
    body: RenderableType = (
        render_markdown(text) if part.kind == "markdown" and markdown else Text(text)
    )
    if isinstance(body, Text):
        body.stylize_before(_STYLES.get(part.kind, ""))
    shown: list[RenderableType] = [Padding(body, (0, 0, 0, 2))] if text else []
    if part.kind == "reasoning":
        shown.insert(0, Text("  ▾ reasoning", style="italic dim"))
    elif part.title:
        style = "bold magenta" if part.kind == "tool" else "bold"
        shown.insert(0, Text(f"  {drop_zero_width(one_line(part.title, 200))}", style=style))
    if more:
        shown.append(Text(f"  … {more:,} more characters; {whole}", style="bold yellow"))
    return Group(*shown)


def conversation_blocks(overview: EpisodeOverview, branch: int) -> Iterator[Block]:
    """Yield the messages of a branch without repetitions, and the cause of its fork."""
    at = overview.tree.branches[branch]
    ids = short_ids(list(overview.calls))
    first = {at.fork.call_id: at.fork} if at.fork else {}
    feedback = _feedback(overview)
    seen: set[str] = set()
    for message in overview.conversation(branch):
        fork = first.pop(message.call_id, None)
        if fork:
            yield _fork(fork, overview, ids)
        call = overview.calls[message.call_id]
        yield _message(
            message,
            call,
            overview,
            ids,
            feedback if message.is_reply else {},
            message.call_id in seen,
        )
        if message.is_reply:
            seen.add(message.call_id)
    for call_id in at.chain:
        if call_id not in seen:
            call = overview.calls[call_id]
            if call.error:
                reason = Part("error", call.error, "error")
            else:
                reason = Part("note", "(no reply)")
            yield Block(
                f"{call_id}/none",
                "no reply",
                "red",
                _facts(call, overview, ids),
                (reason,),
                call_id,
            )


def call_blocks(overview: EpisodeOverview, call_id: str) -> Iterator[Block]:
    """Yield the messages of a request, and the reply."""
    call = overview.calls[call_id]
    for message in conversation([call]):
        yield _message(message, call, overview, {call_id: call_id}, {}, False)


def _message(
    message: Message,
    call: Call,
    overview: EpisodeOverview,
    ids: Mapping[str, str],
    given: Mapping[str, Sequence[str]],
    repeated: bool,
) -> Block:
    if message.name in ("", "default"):
        title = message.role
    else:
        title = f"{message.role} {message.name}"
    if message.answers:
        title = f"{message.role}: result of {message.answers}"
    parts = [Part("note", message.note)] if message.note else []
    if message.reasoning:
        parts.append(Part("reasoning", message.reasoning))
    if message.content:
        kind: Kind = "markdown" if message.role == "assistant" else "text"
        parts.append(Part(kind, message.content))
    parts += [
        Part("picture", picture.line, picture=picture)
        for picture in dict.fromkeys(pictures_in(message.raw))
    ]
    parts += [Part("tool", tool.arguments, f"→ {tool.name}") for tool in message.tool_calls]
    if not message.content and not message.tool_calls and not message.reasoning:
        parts.append(Part("note", "(empty)"))
    if message.is_reply and not repeated:
        if call.error:
            parts.append(Part("error", call.error, "error"))
        parts += [Part("note", text, "feedback") for text in given.get(call.call_id, ())]
        parts += _rewards_of(overview, call.call_id)
    return Block(
        key=message.key,
        title=one_line(title, 200),
        style=_ROLES.get(message.role, ""),
        facts=_facts(call, overview, ids) if message.is_reply and not repeated else "",
        parts=tuple(parts),
        call_id=message.call_id,
        message=message,
    )


def _facts(call: Call, overview: EpisodeOverview, ids: Mapping[str, str]) -> str:
    """Summarize a call in a line: id, time, tokens, model, outcome."""
    outcome = overview.outcome(call.call_id)
    facts = (
        f"call {call.index} {ids[call.call_id]}",
        f"{call.ended_at:%H:%M:%S}",
        f"{(call.ended_at - call.started_at).total_seconds():.2f} s",
        format_tokens(call),
        call.finish_reason,
        call.model,
        _format_versions(call),
        "judge" if call.phase == "judge" else "",
        outcome or ("" if call.trainable else "not to be trained"),
    )
    return " · ".join(one_line(fact, 60) for fact in facts if fact)


def _format_versions(call: Call) -> str:
    if call.policy_version is None:
        return ""
    if not call.weight_updates:
        return f"version {call.policy_version}"
    return f"versions {call.policy_version} to {call.last_version}"


def format_tokens(call: Call) -> str:
    """Format token counts, `14 → 2 tokens`; without ids, from the provider's usage."""
    if call.output_ids is not None:
        prompt = ""
        if call.prompt_ids is not None:
            prompt = f"{len(call.prompt_ids):,} → "
        return f"{prompt}{counted(len(call.output_ids), 'token')}"
    usage = call.response.get("usage")
    if not isinstance(usage, Mapping):
        return ""
    # names of the chat completions, and of the Responses and Messages
    asked = usage.get("prompt_tokens", usage.get("input_tokens"))
    got = usage.get("completion_tokens", usage.get("output_tokens"))
    if not isinstance(asked, int) or not isinstance(got, int):
        return ""
    return f"{asked:,} → {counted(got, 'token')}"


def _fork(fork: Fork, overview: EpisodeOverview, ids: Mapping[str, str]) -> Block:
    here = f"call {overview.calls[fork.call_id].index} {ids[fork.call_id]}"
    parent = overview.calls.get(fork.parent_call_id or "")
    text = f"{here} extends no earlier call"
    if parent is not None:
        text = f"{here} does not extend call {parent.index} {ids[parent.call_id]}"
    text += f": the first {fork.unit} that differs is {fork.at:,}."
    if fork.expected or fork.actual:
        text += f"\nthere: {fork.expected or 'the end'}\nhere:  {fork.actual or 'the end'}"
    if fork.extra_tokens:
        text += (
            f"\nTraining needs {counted(fork.extra_tokens, 'more token')}: the prompt is in two"
            " sequences."
        )
    text += f"\n{fork.hint}"
    if fork.cause == "unknown" and overview.unexplained:
        text += f"\nThere is no tokenizer: {overview.unexplained}"
    return Block(
        f"{fork.call_id}/fork",
        f"fork: {fork.cause}",
        "yellow",
        "",
        (Part("note", text),),
        fork.call_id,
    )


def _feedback(overview: EpisodeOverview) -> dict[str, list[str]]:
    """Format feedback by call; feedback on the whole episode has an empty id."""
    by_call: dict[str, list[str]] = {}
    for given in overview.record.feedback:
        score = "" if given.score is None else f"{number(given.score)} "
        remarks = [
            given.comment or "",
            f"corrected: {given.correction}" if given.correction else "",
        ]
        text = f"{score}by {given.author or 'someone'}, {given.at:%Y-%m-%d %H:%M}"
        by_call.setdefault(given.call_id or "", []).append(
            "\n".join(part for part in (text, *remarks) if part)
        )
    return by_call


def _rewards_of(overview: EpisodeOverview, call_id: str | None) -> list[Part]:
    """Return the rewards of a call; for None those of the episode."""
    parts = []
    for reward in overview.episode.rewards:
        if reward.call_id == call_id or (call_id is None and reward.call_id not in overview.calls):
            weight = ""
            if reward.weight != 1:
                weight = f" × {number(reward.weight)}"
            of = f" of agent {reward.agent}" if reward.agent else ""
            if call_id is None or reward.name == "reward":
                name = reward.name
            else:
                name = f"reward {reward.name}"
            parts.append(
                Part("text", reward.reason or "", f"{name} {number(reward.value)}{weight}{of}")
            )
    return parts


def overview_blocks(overview: EpisodeOverview) -> Iterator[Block]:
    """Yield the blocks before the conversation: ids and status, rewards, feedback, output,
    events."""
    episode = overview.episode
    if not overview.record.ended:
        yield Block(
            "about",
            f"episode {episode.episode_id}",
            "",
            "",
            (Part("note", _UNFINISHED[overview.status]),),
        )
        yield from _feedback_blocks(overview)
        return
    pairs = [
        ("episode", episode.episode_id),
        ("run", episode.run_id),
        ("group", f"{episode.group_id}, attempt {episode.attempt}" if episode.group_id else ""),
        ("task", episode.task.task_id),
        ("ended", f"{episode.ended_at:%Y-%m-%d %H:%M:%S} UTC"),
        (
            "ledger",
            ", ".join(
                f"{counted(n, 'token')} {outcome}" for outcome, n in overview.totals().items()
            ),
        ),
        ("metrics", ", ".join(f"{name} {value:g}" for name, value in episode.metrics.items())),
    ]
    facts = "\n".join(f"{name:<8} {value}" for name, value in pairs if value)
    yield Block(
        "about",
        f"episode {episode.status}",
        STATUS_STYLES.get(episode.status, ""),
        "",
        (Part("text", facts),),
    )
    if episode.error or episode.cause:
        of = " (not the agent's doing)" if episode.infrastructure else ""
        title = f"error: {episode.cause or 'unknown'}{of}"
        yield Block("error", title, "red", "", (Part("error", episode.error or ""),))
    yield from _feedback_blocks(overview)
    output = episode.output
    if output is not None:
        shown = without_pictures(output)
        if isinstance(shown, str):
            text = shown
        else:
            text = json.dumps(shown, ensure_ascii=False)
        yield Block("output", "output", "", "", (Part("text", text),))
    if episode.events:
        looked_up = sum(event.kind == "retrieval" for event in episode.events)
        kinds = {"tool call": len(episode.events) - looked_up, "retrieval": looked_up}
        title = ", ".join(counted(n, kind) for kind, n in kinds.items() if n)
        parts = []
        for event in episode.events:
            seconds = (event.ended_at - event.started_at).total_seconds()
            if event.error:
                ended = f"error: {event.error}"
            else:
                ended = pretty(event.result)
            parts.append(
                Part(
                    "tool",
                    f"{pretty(event.arguments)}\n{ended}",
                    f"→ {event.name}  {seconds:.2f} s",
                )
            )
        yield Block("events", title, "magenta", "", tuple(parts))


_UNFINISHED = {
    "running": "The episode is running: its rewards, ledger and task are written when it ends.",
    "cut off": (
        "The run was killed before the episode ended: it has no rewards, and nothing of it was"
        " trained."
    ),
    "absent": "The trace has no episode with this id.",
}


def _feedback_blocks(overview: EpisodeOverview) -> Iterator[Block]:
    """Yield rewards and feedback on the whole episode."""
    rewards = _rewards_of(overview, None)
    if rewards:
        yield Block("rewards", f"reward {number(overview.episode.reward)}", "", "", tuple(rewards))
    texts = _feedback(overview).get("", ())
    if texts:
        yield Block("feedback", "feedback", "", "", tuple(Part("note", text) for text in texts))


def branch_title(branch: Branch) -> str:
    """Return a short title of a branch."""
    if branch.timeline is not None:
        kind = f"timeline {branch.timeline}"
    else:
        kind = "no token ids"
    return f"{branch.agent}{' (judge)' if branch.phase == 'judge' else ''}  {kind}"


def find_blocks(overview: EpisodeOverview, needle: str) -> list[tuple[int, str]]:
    """Find the blocks that contain a text, ignoring case: branch and key of each block."""
    wanted = needle.casefold()
    matches: dict[str, int] = {}
    branches = range(len(overview.tree.branches))
    for branch, blocks in [
        (0, overview_blocks(overview)),
        *((n, conversation_blocks(overview, n)) for n in branches),
    ]:
        for block in blocks:
            if block.key not in matches and wanted in f"{block.title}\n{block.text}".casefold():
                matches[block.key] = branch
    return [(branch, key) for key, branch in matches.items()]
