"""One row on the whole screen, however long it is, with the keys to decide on it and to go on."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import Screen

from ajet_tools.dataset.journal import Mark
from ajet_tools.tui.dataset.app import DatasetApp
from ajet_tools.tui.dataset.described import as_text, sections
from ajet_tools.tui.widgets.key_line import KeyLine
from ajet_tools.tui.widgets.long_text import LongText
from ajet_tools.tui.widgets.prompt import Prompt
from ajet_tools.tui.widgets.title_line import TitleLine

if TYPE_CHECKING:
    from ajet_tools.tui.dataset.rows import RowsScreen

__all__ = ["RowScreen"]


class RowScreen(Screen[None]):
    """The row under the cursor of the table behind, which goes along."""

    app: DatasetApp
    DEFAULT_CSS = "RowScreen > Vertical { height: 1fr; padding: 0 1; }  RowScreen LongText { height: 1fr; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("a", "mark('accepted')", "Accept"),
        Binding("x", "mark('rejected')", "Reject"),
        Binding("u,ctrl+z", "undo", "Undo"),
        Binding("e", "edit(False)", "Edit"),
        Binding("E", "edit(True)", "Edit as JSON", show=False),
        Binding("j,right", "step(1)", "Next row", key_display="→"),
        Binding("k,left", "step(-1)", "Row before", key_display="←"),
        Binding("slash", "find", "Find", key_display="/"),
        Binding("n", "next(1)", "Next place", show=False),
        Binding("N", "next(-1)", "Place before", show=False),
        Binding("y", "copy", "Copy the row as JSON", show=False),
        Binding("escape,q,enter", "close", "Back", key_display="esc"),
    ]

    def __init__(self, behind: RowsScreen) -> None:
        super().__init__()
        self.behind = behind
        self.number = behind.step(0)

    def compose(self) -> ComposeResult:
        yield TitleLine()
        with Vertical():
            yield LongText(self._text())
        yield Prompt("find")
        yield KeyLine()

    def on_mount(self) -> None:
        self.query_one(LongText).focus()

    def _text(self) -> str:
        return "" if self.number is None else as_text(sections(self.behind.review, self.number))

    async def _show(self) -> None:
        box = self.query_one(Vertical)
        await box.remove_children()
        shown = LongText(self._text())
        await box.mount(shown)
        shown.focus()

    async def action_step(self, by: int) -> None:
        before, self.number = self.number, self.behind.step(by)
        if self.number != before:
            await self._show()

    async def action_mark(self, mark: Mark) -> None:
        """Decide, and show what the table goes on to."""
        self.behind.action_mark(mark)
        await self.action_step(0)
        await self._show()

    async def action_undo(self) -> None:
        self.behind.action_undo()
        self.number = self.behind.step(0)
        await self._show()

    def action_edit(self, as_json: bool) -> None:
        from ajet_tools.tui.dataset.edit import EditScreen

        if self.number is not None:
            self.app.push_screen(EditScreen(self.behind.review, self.number, as_json), self._edited)

    async def _edited(self, changed: bool | None) -> None:
        if changed:
            self.behind.changed()
            await self._show()

    def action_find(self) -> None:
        self.query_one(Prompt).open("")

    def action_next(self, by: int) -> None:
        self.query_one(LongText).go(by)

    def on_prompt_submitted(self, event: Prompt.Submitted) -> None:
        if event.text and not self.query_one(LongText).look_for(event.text):
            event.prompt.say("it is not in this row")
            return
        event.prompt.close()
        self.query_one(LongText).focus()

    def on_prompt_closed(self) -> None:
        self.query_one(LongText).focus()

    def action_copy(self) -> None:
        self.behind.action_copy()

    def action_close(self) -> None:
        self.dismiss()
