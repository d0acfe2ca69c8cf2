"""Asks what becomes of decisions that are not saved."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from ajet_tools.dataset.review import Review
from ajet_tools.trace.text import visible

__all__ = ["LeaveScreen"]


class LeaveScreen(ModalScreen[str]):
    """Ends with save, keep, discard, or nothing: stay."""

    DEFAULT_CSS = """
    LeaveScreen {
        align: center middle;
        & > Vertical {
            width: 76; max-width: 96%; height: auto; padding: 0 1;
            border: round $accent; background: $surface;
        }
        & Static { height: auto; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s,ctrl+s", "leave('save')", "Save"),
        Binding("q,k", "leave('keep')", "Leave"),
        Binding("d", "leave('discard')", "Discard"),
        Binding("escape", "dismiss", "Stay"),
    ]

    def __init__(self, review: Review) -> None:
        super().__init__()
        self.review = review

    def compose(self) -> ComposeResult:
        kept = self.review.is_kept
        leaving = f"leave; {self.review.journal.path.name} keeps them for the next time"
        with Vertical() as box:
            box.border_title = "not saved"
            yield Static(
                Content(
                    visible(
                        f"{self.review.said()} since it was last saved.\n\n"
                        "s    save them\n"
                        f"q    {leaving if kept else 'leave; THEY ARE LOST'}\n"
                        f"d    {'discard them and leave' if kept else 'the same'}\n"
                        "esc  stay"
                    )
                )
            )

    def action_leave(self, how: str) -> None:
        self.dismiss(how if how != "keep" or self.review.is_kept else "discard")
