"""Screen of an episode's timelines as coloured tokens, with a legend and the facts of the token
under the cursor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Static

from ajet_sdk.reporting.output import visible
from ajet_tools.text.clean import kind_of, one_line
from ajet_tools.trace.queries.episodes import attempts_of
from ajet_tools.trace.queries.records import mark_of, recomputed_advantages
from ajet_tools.trace.tokens.colors import SHADINGS, ColorScale
from ajet_tools.trace.tokens.facts import (
    facts_of,
    find_tokens,
    fork_words,
    lowest,
    next_place,
    next_ranked,
    why,
    widest_gaps,
)
from ajet_tools.trace.tokens.layout import labels
from ajet_tools.trace.tokens.view import EpisodeTokens, TokenView, open_tokens, timeline_view
from ajet_tools.tui.trace.screen import TraceScreen
from ajet_tools.tui.widgets.lines import Prompt
from ajet_tools.tui.widgets.token_text import TokenText, tone_styles

_RANKINGS: Mapping[str, tuple[str, Callable[[TokenView], list[int]]]] = {
    "lowest": ("log-probability", lowest),
    "gap": ("trainer's log-probability", widest_gaps),
}
"""Jumps to the next token of a ranking, and the value that they need."""


class TokensScreen(TraceScreen):
    """Shows a timeline of an episode, with the cursor on `token`."""

    EMPTY_HEAD = "episode {0.episode_id}"
    DEFAULT_CSS = """
    TokensScreen #head { height: auto; max-height: 2; padding: 0 1; background: $surface; }
    TokensScreen.empty Legend, TokensScreen.empty TokenText, TokensScreen.empty TokenPanel { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("m", "jump('span')", "Trained span"),
        Binding("l", "jump('lowest')", "Least likely"),
        Binding("b", "jump('fork')", "Next fork"),
        Binding("x", "jump('gap')", "Largest sampler-trainer gap", show=False),
        Binding("v", "next_shading", "View: colours"),
        Binding(
            "right_square_bracket", "timeline(1)", "Next timeline", show=False, key_display="]"
        ),
        Binding(
            "left_square_bracket", "timeline(-1)", "Previous timeline", show=False, key_display="["
        ),
        Binding("slash", "search", "Search", key_display="/"),
        Binding("n", "again", "Next match, span, fork, …", show=False),
        Binding("N", "again(True)", "Previous match, span, fork, …", show=False),
        Binding("y", "copy", "Copy the token", show=False),
        Binding("enter", "episode", "Open the episode", show=False),
        Binding("escape", "leave", "Cancel, or back", show=False),
    ]
    PALETTE: ClassVar[Sequence[tuple[str, str]]] = [
        ("Go to a position", "goto"),
        *((f"Colour by {name}", f"shade('{name}')") for name in SHADINGS),
        ("Copy the timeline's text", "copy_all"),
        ("Play again: copy the command that samples from here", "branch"),
        ("Compare the attempts of the group", "compare"),
    ]

    def __init__(self, episode_id: str, timeline: int = 0, token: int = 0) -> None:
        super().__init__()
        self.episode_id = episode_id
        self.timeline = timeline
        self.token = token
        self.title = f"tokens of {episode_id[:12]}"
        self.opened: EpisodeTokens | None = None
        self._mark: tuple[int, ...] = ()
        self.view: TokenView | None = None
        self._matches: list[int] = []
        self._needle = ""
        self._ranked: dict[str, list[int]] = {}
        self._last_jump = "match"

    def compose_body(self) -> ComposeResult:
        yield Static(Text("reading …"), id="head")
        yield Legend()
        yield TokenText()
        yield Static(id="empty")
        yield TokenPanel()
        yield Prompt("search", "a text, whatever its case", back=TokenText, id="search")
        yield Prompt(
            "go to", "a token's position, or a share such as 50%", back=TokenText, id="goto"
        )

    @property
    def text(self) -> TokenText:
        return self.query_one(TokenText)

    # Reading

    async def read(self) -> None:
        mark = await self.app.ask(mark_of, self.episode_id)
        if mark == self._mark:
            return
        opened = await self.app.ask(open_tokens, self.episode_id, self.app.tokenizer, self.app.path)
        reloaded = self.opened is not None
        if self.opened is None or self.view is None:
            opener = ""
        else:
            opener = self.opened.openers[self.view.index]
        self.opened = opened
        self._mark = mark
        if not len(opened):
            self.show_empty(_explain_empty(opened))
            return
        if opener in opened.openers:  # new timelines may precede it
            self.timeline = opened.openers.index(opener)
        await self._show(keep=reloaded)

    async def _show(self, *, keep: bool = False) -> None:
        """Show the timeline from its start, or (`keep`) update the current one."""
        assert self.opened is not None
        self.timeline = max(0, min(self.timeline, len(self.opened) - 1))
        self.view = await asyncio.to_thread(timeline_view, self.opened, self.timeline)
        # rankings are of the timeline before
        self._ranked.clear()
        self.remove_class("empty")
        if keep:
            self.text.update_view(self.view)
            if self._matches:
                self._matches = find_tokens(self.view, self._needle)
                self.text.mark(frozenset(self._matches))
        else:
            self.text.show(self.view, self.token)
        self._describe()
        if self.view.unknown_advantages:
            self._recompute(self.view)

    @work(exclusive=True, group="recompute")
    async def _recompute(self, view: TokenView) -> None:
        """Recompute missing advantages from the group."""
        values = await self.app.ask(recomputed_advantages, self.episode_id)
        # another timeline may be shown by now
        if self.view is view:
            self.view = view.with_advantages(values)
            self.text.update_view(self.view)
            self._describe()

    # Showing

    def _describe(self) -> None:
        view = self.view
        opened = self.opened
        if view is None or opened is None:
            return
        self.query_one("#head", Static).update(Text(_head(opened, view)))
        shade = self.text.shade
        if shade is not None:
            styles = tone_styles(self.app.current_theme.dark, not self.app.no_color)
            self.query_one(Legend).show(shade, styles)
        self.query_one(TokenPanel).show(view, self.text.cursor)

    def on_token_text_moved(self, event: TokenText.Moved) -> None:
        self.token = event.token
        if self.view is not None and event.token < len(self.view):
            self.query_one(TokenPanel).show(self.view, event.token)

    # Jumps

    def action_jump(self, to: str) -> None:
        """Go to the next of what a key stands for; `again` repeats it."""
        self._last_jump = to
        self.action_again()

    def action_again(self, back: bool = False) -> None:
        """Repeat the last jump or search, forwards or backwards."""
        view = self.view
        if view is None:
            return
        here = self.text.cursor
        jump = self._last_jump
        if jump in _RANKINGS:
            what, rank = _RANKINGS[jump]
            if jump not in self._ranked:
                self._ranked[jump] = rank(view)
            place = next_ranked(self._ranked[jump], here, back)
            self._jump(place, f"no {what} is known in this timeline")
            return
        places = self._matches
        nothing = "no match; / searches"
        if jump == "span":
            places = view.span_starts.tolist()
            nothing = "no token of this timeline is masked in"
        elif jump == "fork":
            places = sorted({fork.at for fork in view.forks})
            nothing = "this timeline has no forks"
        self._jump(next_place(places, here, back), nothing)

    def _jump(self, to: int | None, nothing: str) -> None:
        if to is None:
            self.app.notify(nothing, markup=False, timeout=3)
        else:
            self.text.move(to)

    # Search and positions

    def action_search(self) -> None:
        self.query_one("#search", Prompt).open(self._needle)

    def action_goto(self) -> None:
        self.query_one("#goto", Prompt).open("")

    def on_prompt_submitted(self, event: Prompt.Submitted) -> None:
        if self.view is None:
            return
        if event.prompt.id == "search":
            self._last_jump = "match"
            self._needle, self._matches = event.text, find_tokens(self.view, event.text)
            self.text.mark(frozenset(self._matches))
            if event.text and not self._matches:
                event.prompt.show_error("none in this timeline")
                return
            event.prompt.close()
            here = self.text.cursor
            self._jump(here if here in self._matches else next_place(self._matches, here), "")
            return
        position = _position(event.text, len(self.view))
        if position is None:
            event.prompt.show_error(
                f"enter a position from 0 to {len(self.view) - 1:,}, or a share such as 50%"
            )
            return
        event.prompt.close()
        self.text.move(position)

    # Colours, timelines, other screens

    def action_next_shading(self) -> None:
        index = SHADINGS.index(self.text.shading) + 1
        self.action_shade(SHADINGS[index % len(SHADINGS)])

    def action_shade(self, name: str) -> None:
        self.text.shade_by(name)
        self._describe()

    async def action_timeline(self, step: int) -> None:
        if self.opened is None or not len(self.opened):
            return
        if len(self.opened) == 1:
            self.app.notify("the episode has only one timeline", timeout=2)
            return
        self.timeline = (self.timeline + step) % len(self.opened)
        self.token = 0
        self._matches = []
        await self._show()

    def action_copy(self) -> None:
        if self.view is not None:
            self.app.copy(
                _clipboard_text(self.view, [self.text.cursor]), f"token {self.text.cursor:,}"
            )

    def action_copy_all(self) -> None:
        if self.view is not None:
            self.app.copy(_clipboard_text(self.view, range(len(self.view))), "the timeline")

    def action_episode(self) -> None:
        call = None
        if self.view is not None:
            call = self.view.turns[self.view.turn[self.text.cursor]].call.call_id
        self.app.open_episode(self.episode_id, call)

    def action_branch(self) -> None:
        if self.view is not None:
            turn = self.view.turns[self.view.turn[self.text.cursor]]
            self.app.copy_branch(self.episode_id, turn.call.call_id, self.text.cursor - turn.start)

    async def action_compare(self) -> None:
        ids = await self.app.ask(attempts_of, self.episode_id)
        self.app.open_compare([self.episode_id, *(i for i in ids if i != self.episode_id)])

    async def action_leave(self) -> None:
        if self._matches:
            self._matches = []
            self.text.mark(frozenset())
        else:
            await self.app.action_back()


def _head(opened: EpisodeTokens, view: TokenView) -> str:
    """Describe the timeline in a line, followed by the reason for showing ids."""
    episode = opened.record.episode
    without = opened.without_ids
    parts = [f"timeline {view.index + 1} of {len(opened)}", f"agent {one_line(view.agent, 24)}"]
    parts += [f"{view.phase}" if view.phase != "rollout" else "", f"{len(view):,} tokens"]
    parts.append(f"{int(view.mask.sum()):,} masked in")
    parts.append(
        f"step {episode.step} ({kind_of(episode)})" if opened.record.ended else "still running"
    )
    parts.append(f"{without} calls without ids" if without else "")
    line = " · ".join(part for part in parts if part)
    if opened.why_ids:
        return f"{line}\nids, not text: {one_line(opened.why_ids, 300)}"
    return line


def _explain_empty(opened: EpisodeTokens) -> str:
    calls = opened.record.episode.calls
    if not calls:
        return "The episode made no calls, so there are no tokens to show."
    return (
        f"None of the episode's {len(calls)} calls has token ids, because the engine did not return"
        " any. They cannot be trained; press enter to see the messages."
    )


def _position(text: str, size: int) -> int | None:
    """Parse a position in a timeline: `1,234`, `50%`."""
    plain = text.strip().replace(",", "").replace("_", "")
    if plain.endswith("%") and plain[:-1].isdecimal():
        return min(size - 1, int(plain[:-1]) * size // 100)
    if plain.isdecimal() and len(plain) < 12 and int(plain) < size:
        return int(plain)
    return None


def _clipboard_text(view: TokenView, tokens: Sequence[int]) -> str:
    """Return the text of tokens for the clipboard, or their ids."""
    if view.spelled is None:
        return " ".join(str(view.ids[token]) for token in tokens)
    if len(tokens) == len(view):
        return view.spelled.text.encode(errors="surrogateescape").decode(errors="backslashreplace")
    return "".join(labels(view)[token] for token in tokens).replace("⏎\n", "\n").replace("⇥", "\t")


class TokenPanel(Static):
    """Shows the facts of a token, and the reason why it was trained or not."""

    DEFAULT_CSS = """
    TokenPanel { height: auto; min-height: 6; max-height: 9; padding: 0 1; background: $panel; color: $foreground; }
    """

    def show(self, view: TokenView, token: int) -> None:
        """Show a token."""
        text = Text()
        for line in facts_of(view, token):
            for name, value in line:
                if text.plain and not text.plain.endswith("\n"):
                    text.append("   ")
                text.append(f"{name} ", style="dim").append(visible(value))
            if line:
                text.append("\n")
        text.append(visible(why(view, token)), style="bold")
        for fork in view.forks:
            if fork.at == token:
                text.append(f"\n{visible(fork_words(fork))}", style="magenta")
        self.update(text)


class Legend(Static):
    """Legend of the colours, in one or two lines."""

    DEFAULT_CSS = "Legend { height: auto; max-height: 2; padding: 0 1; color: $foreground; }"

    def show(self, shade: ColorScale, tones: Mapping[str, Style]) -> None:
        """Show the levels of the visible timeline."""
        text = Text(f"{shade.name}: ")
        for level in shade.present:
            text.append(f" {level.label} ", style=tones[level.tone]).append(" ")
        if shade.note:
            text.append(f" {shade.note}", style="dim")
        self.update(text)
