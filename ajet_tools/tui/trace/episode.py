"""Screen of an episode: tree of calls, conversation, rewards, status."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual import events, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.widgets import Footer, Static

from ajet_sdk.dialects.message_parts import pretty
from ajet_sdk.pictures import Picture
from ajet_tools.text.clean import counted, one_line
from ajet_tools.trace.episode.blocks import Block, conversation_blocks, find_blocks, overview_blocks
from ajet_tools.trace.episode.overview import (
    EpisodeOverview,
    explain_forks,
    read_overview,
    refresh_overview,
    summarize,
)
from ajet_tools.tui.trace.dialogs import PictureScreen, TextScreen
from ajet_tools.tui.trace.episode_tree import CallTree
from ajet_tools.tui.trace.screen import TraceScreen
from ajet_tools.tui.widgets.lines import Prompt
from ajet_tools.tui.widgets.messages import Messages

_WIDE = 100


@dataclass(frozen=True, slots=True)
class _Search:
    """A search text and its hits: branch and key of a block."""

    needle: str = ""
    hits: Sequence[tuple[int, str]] = ()
    at: int = -1


class EpisodeScreen(TraceScreen):
    """Shows a finished or running episode, from its beginning or a call."""

    AUTO_FOCUS = "Messages"
    DEFAULT_CSS = """
    EpisodeScreen {
        & > #facts { height: auto; max-height: 25%; background: $panel; padding: 0 1; }
        & > #parts { height: 1fr; layout: vertical; }
        & CallTree { height: auto; max-height: 30%; border-bottom: solid $primary; }
        & Messages { height: 1fr; }
        &.wide #parts { layout: horizontal; }
        &.wide CallTree { width: 36%; max-width: 56; height: 1fr; max-height: 100%; border-bottom: none; }
        &.wide CallTree { border-right: solid $primary; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "message(1)", "Next message", key_display="j"),
        Binding("k", "message(-1)", "Previous message", show=False),
        Binding("b", "jump('fork')", "Next fork"),
        Binding("t", "tokens", "Tokens"),
        Binding("u", "unfold", "Unfold"),
        Binding("enter", "whole", "Open in full"),
        Binding("r", "raw", "JSON"),
        Binding("f", "feedback", "Feedback"),
        Binding("g", "group", "Group"),
        Binding("slash", "find", "Search", key_display="/"),
        Binding("n", "again(1)", "Next match or fork", show=False),
        Binding("N", "again(-1)", "Previous match or fork", show=False),
        Binding("o", "picture", "Open the picture", show=False),
        Binding("y", "copy", "Copy the message", show=False),
    ]
    PALETTE: ClassVar[Sequence[tuple[str, str]]] = [
        ("Next attempt", "attempt(1)"),
        ("Previous attempt", "attempt(-1)"),
        ("Unfold all reasoning", "unfold_all"),
        ("Markdown or as written", "markdown"),
        ("Show the picture", "show_picture"),
        ("Open the picture in a browser", "picture"),
        ("Play again: copy the command that samples from this call", "sample_again"),
        ("Copy the episode's id", "copy_id"),
    ]

    def __init__(self, episode_id: str, call_id: str | None = None, *, needle: str = "") -> None:
        """`needle` is a text to search for at first."""
        super().__init__()
        self.title = f"episode {episode_id[:12]}"
        self.episode_id = episode_id
        self.call_id = call_id
        self.overview: EpisodeOverview | None = None
        self.branch = 0
        self._shown_new = 0
        self._search = _Search(needle)
        self._last_jump = "match"

    def compose(self) -> ComposeResult:
        self.set_class(self.app.size.width >= _WIDE, "wide")
        yield Static("…", id="facts")
        with Container(id="parts"):
            yield CallTree(id="tree")
            yield Messages(id="messages")
        yield Prompt("search", "a text anywhere in the episode", back=Messages)
        yield Footer(compact=True)

    @property
    def messages(self) -> Messages:
        return self.query_one(Messages)

    @property
    def call_tree(self) -> CallTree:
        return self.query_one(CallTree)

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.width >= _WIDE, "wide")

    # Content

    async def read(self) -> None:
        """Show new messages, then the causes of forks that need a tokenizer."""
        if self.overview is None:
            fresh: EpisodeOverview | None = await self.app.ask(read_overview, self.episode_id)
        else:
            fresh = await self.app.ask(refresh_overview, self.overview)
        if fresh is not None:
            await self._show(fresh)
        if self.overview is not None:
            # after the messages, as loading a tokenizer takes seconds
            complete = await self.app.ask(explain_forks, self.overview, self.app.path)
            if complete is not self.overview:
                await self._show(complete)

    async def _show(self, fresh: EpisodeOverview) -> None:
        """Show the episode, keeping the selected call, block and line."""
        first = self.overview is None
        at = self.call_id if first else self._call_id
        branch = fresh.tree.branch_of.get(at or "", 0)
        # the call is common to several branches: stay in the one that is shown
        if not first and at in self._loaded.tree.branches[self.branch].trunk:
            branch = self.branch
        blocks = await asyncio.to_thread(_blocks, fresh, branch)
        self.overview = fresh
        self.branch = branch
        with self.app.batch_update():
            self.call_tree.show(fresh)
            self.messages.show(blocks, stay=not first, grown=not first)
            self._update_facts()
            if first and self.call_id in fresh.calls:
                self._choose_first_of(self.call_id)
        if first and self._search.needle:
            self.search(self._search.needle)
        if first and self.call_id and self.call_id not in fresh.calls:
            self.notify(
                f"call {self.call_id} is not in this episode", severity="warning", markup=False
            )

    def _update_facts(self) -> None:
        """Update the summary with the number of unread messages."""
        self._shown_new = self.messages.new
        self.query_one("#facts", Static).update(summarize(self._loaded, self.messages.new))

    def _show_branch(self) -> None:
        self.messages.show(_blocks(self._loaded, self.branch))

    @property
    def _loaded(self) -> EpisodeOverview:
        assert self.overview is not None
        return self.overview

    def on_screen_resume(self) -> None:
        if self.overview is not None:
            self.load()

    # Navigation

    def on_call_tree_chosen(self, event: CallTree.Chosen) -> None:
        if event.branch is None:
            self.messages.choose(0, top=True, notify=False)
        elif event.call_id is None:
            self._go_to_branch(event.branch, notify=False)
        else:
            self._go_to_call(event.call_id)
        if event.read:
            self.messages.focus()

    def on_messages_moved(self, event: Messages.Moved) -> None:
        self.call_tree.point_at(event.block.call_id)
        if self.messages.new != self._shown_new:
            self._update_facts()

    def _go_to_branch(self, branch: int, *, notify: bool = True) -> None:
        if branch != self.branch:
            self.branch = branch
            self._show_branch()
        self._choose_first_of(self._loaded.tree.branches[branch].calls[0], notify=notify)

    def _go_to_call(self, call_id: str) -> None:
        overview = self._loaded
        if call_id not in overview.tree.branches[self.branch].chain:
            self.branch = overview.tree.branch_of[call_id]
            self._show_branch()
        self._choose_first_of(call_id, notify=False)

    def _choose_first_of(self, call_id: str | None, *, notify: bool = True) -> None:
        """Select the first block of a call: its fork, new messages of its request, or its reply."""
        block = next((n for n, b in enumerate(self.messages.blocks) if b.call_id == call_id), None)
        if block is not None:
            self.messages.choose(block, top=True, notify=notify)

    def action_message(self, by: int) -> None:
        self.messages.choose(self.messages.cursor + by)

    def action_jump(self, to: str) -> None:
        """Go to the next match or fork; `again` repeats it."""
        self._last_jump = to
        self.action_again(1)

    def action_again(self, by: int) -> None:
        """Repeat the last jump, forwards or backwards."""
        if self._last_jump == "fork":
            self._go_to_fork(by)
        else:
            self._go_to_hit(by)

    def _go_to_fork(self, by: int) -> None:
        """Go to the next fork in the order of the tree."""
        if self.overview is None:
            return
        tree = self.overview.tree
        order = tree.call_order()
        forks = [order.index(branch.calls[0]) for branch in tree.branches if branch.fork]
        if not forks:
            self.notify("this episode has no forks", timeout=2)
            return
        if self._call_id in order:
            at = order.index(self._call_id)
        else:
            at = -1
        ahead = sorted(fork for fork in forks if (fork > at if by > 0 else fork < at))
        if not ahead:
            self.notify("no further fork in this direction", timeout=2)
            return
        self._go_to_branch(tree.branch_of[order[ahead[0] if by > 0 else ahead[-1]]])

    @property
    def _chosen(self) -> Block | None:
        return self.messages.chosen

    @property
    def _call_id(self) -> str | None:
        if self._chosen:
            return self._chosen.call_id
        return None

    # Messages

    def action_unfold(self) -> None:
        self.messages.fold()

    def action_unfold_all(self) -> None:
        self.messages.fold(everything=True)

    def action_markdown(self) -> None:
        self.messages.show_markdown(not self.messages.markdown)
        self.notify("Markdown" if self.messages.markdown else "as written", timeout=1)

    def action_whole(self) -> None:
        block = self._chosen
        if block is not None:
            self.app.push_screen(TextScreen(block.title, lambda: block.text))

    def action_picture(self) -> None:
        """Open the pictures of the selected message in a browser."""
        if pictures := self._chosen_pictures():
            self.app.open_pictures(pictures)

    def action_show_picture(self) -> None:
        """Show the pictures of the selected message as large as the terminal is."""
        if pictures := self._chosen_pictures():
            self.app.push_screen(PictureScreen(pictures))

    def _chosen_pictures(self) -> list[Picture]:
        pictures = self._chosen.pictures if self._chosen else []
        if not pictures:
            self.notify("this message has no picture", timeout=2)
        return pictures

    def action_raw(self) -> None:
        call = None
        if self.overview:
            call = self._loaded.calls.get(self._call_id or "")
        if call is None:
            self.notify("this belongs to no call: j goes to the first message", timeout=3)
            return

        def text() -> str:
            whole = {"request": call.request, "response": call.response, "sampling": call.sampling}
            return "\n".join(f"{name}\n{pretty(value)}\n" for name, value in whole.items())

        self.app.push_screen(TextScreen(f"call {call.index} {call.call_id}", text))

    def action_tokens(self) -> None:
        if self.overview is None:
            return
        call_id = self._call_id or next(iter(self.overview.tree.spans), None)
        span = self.overview.tree.spans.get(call_id or "")
        if span is None:
            self.notify(
                "there are no token ids: the engine did not return any",
                severity="warning",
                timeout=3,
            )
            return
        self.app.open_tokens(self.episode_id, span[0], span[1])

    def action_feedback(self) -> None:
        self.app.open_feedback(self.episode_id, self._call_id)

    def action_group(self) -> None:
        self.app.compare_group(self.episode_id)

    def action_attempt(self, by: int) -> None:
        attempts = self.overview.attempts if self.overview else ()
        if self.episode_id in attempts:
            index = attempts.index(self.episode_id) + by
        else:
            index = -1
        if 0 <= index < len(attempts):
            self.app.switch_screen(EpisodeScreen(attempts[index]))
        else:
            self.notify("no further attempt in this direction", timeout=2)

    def action_copy(self) -> None:
        if self._chosen:
            self.app.copy(
                self._chosen.text,
                "the message" if self._chosen.message else f"the {self._chosen.title}",
            )

    def action_copy_id(self) -> None:
        self.app.copy(self.episode_id, "the episode's id")

    def action_sample_again(self) -> None:
        if self._call_id is None:
            self.notify("this belongs to no call: j goes to the first message", timeout=3)
        else:
            self.app.copy_branch(self.episode_id, self._call_id)

    # Search

    def action_find(self) -> None:
        self.query_one(Prompt).open(self._search.needle)

    def on_prompt_submitted(self, event: Prompt.Submitted) -> None:
        self.search(event.text)

    @work(group="search", exclusive=True)
    async def search(self, needle: str) -> None:
        """Search all branches, and go to the first hit after the selected message."""
        if self.overview is None:
            return
        matches = []
        if needle:
            matches = await asyncio.to_thread(find_blocks, self.overview, needle)
        self.messages.highlight(needle)
        if needle and not matches:
            self._search = _Search(needle)
            self.query_one(Prompt).show_error(f"{one_line(needle, 40)} is not in this episode")
            return
        self.query_one(Prompt).close()
        position = {block.key: n for n, block in enumerate(self.messages.blocks)}
        ahead = (
            n
            for n, (branch, key) in enumerate(matches)
            if branch > self.branch or position.get(key, -1) >= self.messages.cursor
        )
        self._search = _Search(needle, matches, next(ahead, 0) - 1)
        self.action_jump("match")

    def _go_to_hit(self, by: int) -> None:
        search = self._search
        if not search.hits:
            self.notify("search for a text first: /" if not search.needle else "no hit", timeout=2)
            return
        at = (search.at + by) % len(search.hits)
        self._search = _Search(search.needle, search.hits, at)
        branch, key = search.hits[at]
        if not any(block.key == key for block in self.messages.blocks):
            self.branch = branch
            self._show_branch()
        self.messages.choose_key(key)
        self.messages.fold(unfold=True)
        self.notify(f"hit {at + 1:,} of {counted(len(search.hits), 'message')}", timeout=1)


def _blocks(overview: EpisodeOverview, branch: int) -> list[Block]:
    """Return the blocks of the overview and of the conversation of a branch."""
    blocks = list(overview_blocks(overview))
    if branch < len(overview.tree.branches):
        blocks += conversation_blocks(overview, branch)
    return blocks
