"""A row as sections of text (question, answer, fields, verification, provenance), in a pane and on
a screen."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import Static

from ajet_sdk.dialects.message_parts import parts_of
from ajet_sdk.reporting.output import visible
from ajet_sdk.tasks.questions import answer_of
from ajet_sdk.tasks.row_names import QUERY_COLUMNS
from ajet_tools.dataset.review.review import Review
from ajet_tools.text.clean import drop_zero_width
from ajet_tools.tui.dataset.table import RowsTable
from ajet_tools.tui.widgets.lines import KeyLine, Prompt, TitleLine
from ajet_tools.tui.widgets.long_text import FindInText, LongText

_CHATS = ("init_messages", "messages", "chosen", "rejected", "prompt", "conversations")


@dataclass(frozen=True)
class Section:
    title: str
    text: str


def build_sections(review: Review, number: int) -> list[Section]:
    """Return the sections of a row with its edits, most important first."""
    row = review.row(number)
    values = row.values
    head = [f"row {number + 1:,}"]
    if not row.where.endswith(f"row {number + 1}"):
        head.append(row.where)
    decision = review.decisions.get(number)
    if decision is not None and decision.mark:
        head.append(decision.mark)
    if decision is not None and decision.values is not None:
        head.append("edited")
    sections = [Section(", ".join(head), "")]
    sections += [Section(name, text) for name, text in _question_fields(values)]
    if (answer := answer_of(values)) is not None:
        sections.append(Section("answer", _to_text(answer)))
    if others := "\n".join(_other_fields(values)):
        sections.append(Section("fields", others))
    blind = review.is_blind(number)
    if isinstance(provenance := values.get("provenance"), Mapping):
        if not blind and isinstance(verdict := provenance.get("verdict"), Mapping):
            sections.append(Section("verification", "\n".join(_verification_lines(verdict))))
        origin = _flatten({k: v for k, v in provenance.items() if k != "verdict"})
        sections.append(Section("provenance", "\n".join(origin)))
    if not blind and "rejected" in values and isinstance(values["rejected"], Mapping):
        sections.insert(1, Section("rejected", "\n".join(_flatten(values["rejected"]))))
    if decision is not None and decision.values is not None:
        before = json.dumps(review.spool.row(number).values, ensure_ascii=False)
        sections.append(Section("before it was edited", before))
    return sections


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.split("\n"))


def _question_fields(values: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for name in QUERY_COLUMNS:
        if isinstance(text := values.get(name), str) and text:
            yield name, text
    for name in _CHATS:
        messages = values.get(name)
        if isinstance(messages, list) and messages:
            yield name, "\n\n".join(_format_message(message) for message in messages)


def _format_message(message: object) -> str:
    if not isinstance(message, Mapping):
        return _to_text(message)
    role = message.get("role", message.get("from", "?"))
    parts = parts_of(
        {**message, "role": str(role), "content": message.get("content", message.get("value"))}
    )
    return f"{role}: {visible(parts.text)}"


def _other_fields(values: Mapping[str, object]) -> Iterator[str]:
    """Yield the fields that have no other section."""
    for name, value in values.items():
        shown = name in QUERY_COLUMNS and isinstance(value, str)
        if (
            shown
            or name in ("provenance", "answer")
            or (name in _CHATS and isinstance(value, list))
        ):
            continue
        if name == "rejected" and isinstance(value, Mapping):
            continue
        if name == "metadata" and isinstance(value, Mapping):
            yield from _flatten({k: v for k, v in value.items() if k != "answer"}, "metadata.")
        else:
            yield from _flatten({name: value})


def _verification_lines(verdict: Mapping[str, object]) -> Iterator[str]:
    result = {True: "passed", False: "failed"}.get(verdict.get("ok") is True)
    verifier, reason = (
        verdict.get("verifier") or "by an unknown person",
        verdict.get("reason") or "no reason given",
    )
    yield f"{result}, {verifier}: {reason}"
    details = verdict.get("details")
    if isinstance(details, Mapping):
        yield from _flatten(details)


def _flatten(values: Mapping[str, object], before: str = "") -> Iterator[str]:
    """Yield a line `path: value` for each field; longer texts follow their name."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{before}{name}.")
        elif isinstance(value, str) and "\n" in value:
            yield f"{before}{name}:\n{_indent(value)}"
        else:
            yield f"{before}{name}: {_to_text(value)}"


def _to_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_MOST = 3000
"""Characters of a section in the pane."""


class RowPane(VerticalScroll):
    """Shows a row with truncated sections."""

    DEFAULT_CSS = """
    RowPane { height: 45%; background: $surface; padding: 0 1; scrollbar-size-vertical: 1; }
    RowPane:focus { background: $surface-lighten-1; }
    RowPane > Static { height: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "app.focus_previous", "Back to the table", show=False)
    ]

    def __init__(self, review: Review) -> None:
        super().__init__()
        self.review = review
        self._shown: int | None = None

    def compose(self) -> ComposeResult:
        yield Static("", markup=False)

    def show(self, number: int | None) -> None:
        """Show another row from its beginning, or update the current one."""
        if number != self._shown:
            self.scroll_home(animate=False)
        self._shown = number
        sections = build_sections(self.review, number) if number is not None else []
        self.query_one(Static).update(_style_sections(sections))


def _style_sections(sections: list[Section]) -> Text:
    text = Text()
    for at, section in enumerate(sections):
        text.append(
            ("\n" if at else "") + visible(section.title), style="bold" if at else "bold reverse"
        )
        if section.text:
            cut = section.text[:_MOST] + (" … enter shows all" if len(section.text) > _MOST else "")
            for line in drop_zero_width(visible(cut)).split("\n"):
                text.append(f"\n  {line}")
    return text


class RowScreen(FindInText, Screen[None]):
    """Shows the row under the cursor of a table; its keys act on the screen of the table."""

    NOT_FOUND = "not in this row"
    DEFAULT_CSS = "RowScreen LongText { height: 1fr; padding: 0 1; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("a", "behind('mark', 'accepted')", "Accept"),
        Binding("x", "behind('mark', 'rejected')", "Reject"),
        Binding("u,ctrl+z", "behind('undo')", "Undo"),
        Binding("e", "behind('edit', False)", "Edit"),
        Binding("E", "behind('edit', True)", "Edit as JSON", show=False),
        Binding("j,right", "step(1)", "Next row", key_display="→"),
        Binding("k,left", "step(-1)", "Previous row", key_display="←"),
        Binding("slash", "find", "Find", key_display="/"),
        Binding("n", "next(1)", "Next place", show=False),
        Binding("N", "next(-1)", "Previous place", show=False),
        Binding("y", "behind('copy')", "Copy the row as JSON", show=False),
        Binding("escape,q,enter", "dismiss", "Back", key_display="esc"),
    ]

    def __init__(self, table: RowsTable) -> None:
        super().__init__()
        self.table = table
        self._shown = ""

    def compose(self) -> ComposeResult:
        yield TitleLine()
        yield LongText()
        yield Prompt("find", back=LongText)
        yield KeyLine()

    def on_screen_resume(self) -> None:
        """Show the row at first, and after a dialog that may have changed it."""
        self._show()

    def _show(self) -> None:
        number = self.table.number
        sections = [] if number is None else build_sections(self.table.review, number)
        text = "\n".join(f"{s.title}\n{_indent(s.text)}" if s.text else s.title for s in sections)
        if text != self._shown:
            self._shown = text
            self.query_one(LongText).show(text)

    def action_step(self, by: int) -> None:
        self.table.action_move(by)
        self._show()

    async def action_behind(self, name: str, *arguments: object) -> None:
        await self.app.run_action(("", name, arguments), self.table.screen)
        self._show()
