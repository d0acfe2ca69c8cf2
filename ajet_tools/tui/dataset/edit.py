"""Dialog to edit a row, by fields or as JSON. Only valid rows can be saved."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Label, Static, TextArea

from ajet_sdk.errors import TaskError
from ajet_sdk.reporting.output import visible
from ajet_sdk.tasks.questions import answer_of
from ajet_sdk.tasks.row_names import QUERY_COLUMNS
from ajet_tools.dataset.curation.schema import OURS
from ajet_tools.dataset.files.values import value_at
from ajet_tools.dataset.review.review import Review
from ajet_tools.tui.base import Dialog

_MAX_FIELDS = 12
"""Maximum number of fields in a form; larger rows are edited as JSON."""


class EditScreen(Dialog[bool]):
    """Edits a row; ctrl+s saves, escape cancels, twice if there are changes."""

    DEFAULT_CSS = """
    EditScreen {
        & > VerticalScroll { width: 94%; max-height: 92%; }
        & TextArea { height: auto; max-height: 8; background: $boost; }
        & #whole { max-height: 100%; }
        & Label { color: $text-muted; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+s", "keep", "Keep", priority=True),
        Binding("escape", "leave", "Leave", priority=True),
    ]

    def __init__(self, review: Review, number: int, as_json: bool) -> None:
        super().__init__()
        self.review, self.number = review, number
        self.values = review.row(number).values
        self.paths = _paths(self.values)
        self.as_json = as_json or not 0 < len(self.paths) <= _MAX_FIELDS
        self._leave_pressed = False

    def compose(self) -> ComposeResult:
        with VerticalScroll(can_focus=False) as box:
            box.border_title = Content(
                f"row {self.number + 1:,}{' as JSON' if self.as_json else ''}"
            )
            box.border_subtitle = "ctrl+s keeps · tab next field · esc leaves"
            if self.as_json:
                text = json.dumps(self.values, ensure_ascii=False, indent=2)
                yield TextArea(text, id="whole", compact=True, tab_behavior="focus")
            for path in () if self.as_json else self.paths:
                yield Label(Content(visible(path)))
                yield TextArea(
                    _to_text(value_at(self.values, path)), compact=True, tab_behavior="focus"
                )
            yield Static("", id="wrong", markup=False)

    def on_mount(self) -> None:
        """Focus the answer, the field edited most often."""
        areas = list(self.query(TextArea))
        at = next(
            (i for i, path in enumerate(self.paths) if path.rpartition(".")[2] == "answer"), 0
        )
        areas[0 if self.as_json else at].focus()

    def _read_form(self) -> dict[str, object]:
        """Parse the form. Raises TaskError for an invalid field."""
        if self.as_json:
            return _parse_object(self.query_one("#whole", TextArea).text)
        row = json.loads(json.dumps(self.values))
        for path, area in zip(self.paths, self.query(TextArea), strict=True):
            before = value_at(self.values, path)
            if area.text != _to_text(before):
                name, _, inner = path.partition(".")
                in_metadata = inner and name == "metadata"
                fields = row.setdefault("metadata", {}) if in_metadata else row
                fields[inner if in_metadata else path] = _parse_field(area.text, before, path)
        return dict(row)

    def action_keep(self) -> None:
        before = self.review.decisions.get(self.number)
        try:
            self.review.edit(self.number, self._read_form())
        except TaskError as error:
            self.show_wrong(str(error))
            return
        self.dismiss(self.review.decisions.get(self.number) != before)

    def action_leave(self) -> None:
        """Close, with unsaved changes only the second time."""
        try:
            changed = self._read_form() != self.values
        except TaskError:
            changed = True
        if changed and not self._leave_pressed:
            self._leave_pressed = True
            self.show_wrong(
                "not saved: press ctrl+s to keep your changes, or escape again to discard them"
            )
        else:
            self.dismiss(False)

    def on_text_area_changed(self) -> None:
        self._leave_pressed = False
        self.show_wrong("")


def _paths(values: Mapping[str, object]) -> list[str]:
    """Return the fields of the form: question and answer, then others and those of the metadata."""
    paths = [name for name in QUERY_COLUMNS if isinstance(values.get(name), str)]
    metadata = values.get("metadata")
    within = metadata if isinstance(metadata, Mapping) else {}
    if "answer" in within or (
        answer_of(values) is None and "main_query" in values and "answer" not in values
    ):
        paths.append("metadata.answer")
    if "answer" in values:
        paths.append("answer")
    others = [name for name in values if name not in (*OURS, "id", "metadata")]
    others += [f"metadata.{name}" for name in within if "." not in name]
    others += ["metadata"] if "metadata" in values and not isinstance(metadata, Mapping) else []
    return list(
        dict.fromkeys(
            [*paths, *(name for name in others if "." not in name.removeprefix("metadata."))]
        )
    )


def _to_text(value: object) -> str:
    """Format a value for the form: text unchanged, null empty, others as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _parse_field(text: str, before: object, path: str) -> object:
    if isinstance(before, str):
        return text
    if not text.strip():
        return None
    try:
        return json.loads(text, parse_constant=_reject_constant)
    except ValueError as error:
        if before is None:
            return text
        raise TaskError(
            f"{path} was {json.dumps(before)[:40]}, and {text[:40]!r} is not JSON: {error}"
        ) from error


def _reject_constant(text: str) -> object:
    raise ValueError(f"{text} is not a JSON value")


def _parse_object(text: str) -> dict[str, object]:
    try:
        row = json.loads(text, parse_constant=_reject_constant)
    except ValueError as error:
        raise TaskError(f"invalid JSON: {error}") from error
    if not isinstance(row, dict):
        raise TaskError("a row must be an object with keys: { ... }")
    return row
