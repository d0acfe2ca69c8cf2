"""Dialog to save a review."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Button, Input, Static

from ajet_sdk.errors import AjetError
from ajet_sdk.reporting.output import visible
from ajet_tools.dataset.review.review import Review
from ajet_tools.dataset.review.save import Plan, proposed, save
from ajet_tools.tui.base import Dialog

_ROWS = {False: "rows: all but the rejected", True: "rows: the accepted only"}


class SaveScreen(Dialog[Plan]):
    """Asks for a path and shows the files to be written; replacing another file takes enter
    twice."""

    DEFAULT_CSS = """
    SaveScreen {
        & Input { background: $boost; }
        & Button { margin: 1 0; }
        & #plan { height: auto; }
        & #wrong { display: block; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+s", "save", "Save", priority=True),
        Binding("escape", "leave", "Leave"),
    ]

    def __init__(self, review: Review) -> None:
        super().__init__()
        self.review = review
        self.only_accepted = False
        self._confirmed: Plan | None = None
        self._saving = False

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "save"
            box.border_subtitle = "enter saves · tab to which rows · esc leaves"
            yield Input(str(proposed(self.review)), compact=True, select_on_focus=False)
            yield Button(_ROWS[False], compact=True)
            yield Static("", id="plan", markup=False)
            yield Static("", id="wrong", markup=False)

    def on_mount(self) -> None:
        self._update_plan()

    def on_input_changed(self) -> None:
        self._update_plan()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.only_accepted = not self.only_accepted
        event.button.label = _ROWS[self.only_accepted]
        self._update_plan()

    def _plan(self) -> Plan:
        path = Path(self.query_one(Input).value.strip())
        return Plan.of(self.review, path, only_accepted=self.only_accepted)

    def _update_plan(self) -> None:
        """Show the files to be written, or the error."""
        self._confirmed = None
        try:
            text, wrong = self._plan().as_text(), ""
        except AjetError as error:
            text, wrong = "", str(error)
        self.query_one("#plan", Static).update(Content(visible(text)))
        self.show_wrong(wrong)

    def on_input_submitted(self) -> None:
        self.action_save()

    def action_save(self) -> None:
        if self._saving:
            return
        try:
            plan = self._plan()
        except AjetError as error:
            self.show_wrong(str(error))
            return
        if plan.replaces and plan != self._confirmed:
            self._confirmed = plan
            self.show_wrong(f"{plan.target} already exists; press enter again to replace it")
            return
        self._save(plan, self.only_accepted)

    @work(group="save")
    async def _save(self, plan: Plan, only_accepted: bool) -> None:
        """Save and close; a failure changes nothing and is shown."""
        self._saving = True
        self.show_wrong("saving")
        try:
            saved = await asyncio.to_thread(
                save, self.review, plan.target, only_accepted=only_accepted
            )
        except AjetError as error:
            self.show_wrong(str(error))
            return
        finally:
            self._saving = False
        self.dismiss(saved)

    def action_leave(self) -> None:
        if not self._saving:
            self.dismiss(None)
