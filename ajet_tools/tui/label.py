"""The screen of `ajet dataset label`: one row of a random sample after the other, to accept, reject
or skip."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Footer, Static

from ajet_sdk.dialects.message_parts import parts_of
from ajet_sdk.errors import AjetError
from ajet_sdk.reporting.output import visible
from ajet_sdk.tasks.row_names import QUESTIONS
from ajet_tools.dataset.files.blocks import Row
from ajet_tools.dataset.labels import ErrorEstimate, Label, Labels
from ajet_tools.tui.base import ViewerApp
from ajet_tools.tui.widgets.lines import TitleLine
from ajet_tools.tui.widgets.long_text import LongText

_HIDDEN = ("provenance.verdict", "rejected")
"""What says whether the row is right: a person labels without it."""


def row_text(values: Mapping[str, object]) -> str:
    """Format a row: the question first, a line `path: value` for each field, longer texts
    below their name."""
    first = {name: values[name] for name in QUESTIONS if name in values}
    return "\n".join(_lines({**first, **values}))


def _lines(values: Mapping[str, object], before: str = "") -> Iterator[str]:
    for name, value in values.items():
        path = f"{before}{name}"
        if path in _HIDDEN and isinstance(value, Mapping):
            continue
        if isinstance(value, Mapping) and value:
            yield from _lines(value, f"{path}.")
        elif isinstance(value, list) and value and all(map(_is_message, value)):
            yield f"{path}:"
            for message in value:
                yield _indented(_message_text(message))
        elif isinstance(value, str) and ("\n" in value or len(value) > 60):
            yield f"{path}:\n{_indented(value)}"
        else:
            if isinstance(value, str):
                text = value
            else:
                text = json.dumps(value, ensure_ascii=False)
            yield f"{path}: {text}"


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.split("\n"))


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and ("role" in value or "from" in value)


def _message_text(message: Mapping[str, object]) -> str:
    role = str(message.get("role", message.get("from")))
    content = message.get("content", message.get("value"))
    return f"{role}: {parts_of({**message, 'role': role, 'content': content}).text}"


class LabelScreen(Screen[None]):
    app: LabelApp

    DEFAULT_CSS = """
    LabelScreen #status { height: 1; background: $panel; padding: 0 1; }
    LabelScreen LongText { height: 1fr; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("a", "label('accepted')", "Accept"),
        Binding("x", "label('rejected')", "Reject"),
        Binding("s", "label('skipped')", "Skip"),
        Binding("u", "undo", "Back"),
        Binding("y", "copy", "Copy the row as JSON", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.sample: list[Row] = []
        self.position = 0
        """Of the row that is shown; after the last one, the number of rows."""

    def compose(self) -> ComposeResult:
        yield TitleLine()
        yield Static("reading …", id="status", markup=False)
        yield LongText()
        yield Footer(compact=True)

    def on_mount(self) -> None:
        self.query_one(LongText).focus()
        self._load()

    @work
    async def _load(self) -> None:
        try:
            self.sample = await asyncio.to_thread(self.app.draw)
        except AjetError as error:
            self.app.fail(error)
            return
        labelled = [self.app.labels.of(row.values) is not None for row in self.sample]
        if False in labelled:
            self.position = labelled.index(False)
        else:
            self.position = len(labelled)
        self.show_row()

    @property
    def row(self) -> Row | None:
        if self.position < len(self.sample):
            return self.sample[self.position]
        return None

    def show_row(self) -> None:
        text = "all rows of the sample are labelled; u goes back, q leaves"
        if self.row is not None:
            text = visible(f"{self.row.where}\n\n{row_text(self.row.values)}")
        self.query_one(LongText).show(text)
        done = min(self.position + 1, len(self.sample))
        status = f"row {done} of {len(self.sample)}"
        label = self.row and self.app.labels.of(self.row.values)
        if label:
            status += f", {label}"
        estimate = self.app.estimate(self.sample)
        if estimate is not None:
            low, high = estimate.interval
            status += (
                f" · {estimate.wrong} of {estimate.labelled} wrong:"
                f" {estimate.wrong / estimate.labelled:.0%} ({low:.0%} to {high:.0%})"
            )
        self.query_one("#status", Static).update(status)

    def action_label(self, label: Label) -> None:
        if self.row is None:
            return
        try:
            self.app.labels.set(self.row.values, label)
        except AjetError as error:
            self.app.show_error(error)
            return
        self.position += 1
        self.show_row()

    def action_undo(self) -> None:
        """Go back to the row before; another key gives it another label."""
        self.position = max(0, self.position - 1)
        self.show_row()

    def action_copy(self) -> None:
        if self.row is not None:
            self.app.copy(json.dumps(self.row.values, ensure_ascii=False), "the row")


class LabelApp(ViewerApp):
    """Labels a sample."""

    TITLE = "ajet dataset label"

    def __init__(
        self,
        source: str,
        labels: Labels,
        draw: Callable[[], list[Row]],
        estimate: Callable[[Sequence[Row]], ErrorEstimate | None],
    ) -> None:
        """`draw` reads the dataset, in a thread; `estimate` is of the rows of the sample."""
        super().__init__()
        self.sub_title = source
        self.labels = labels
        self.draw = draw
        self.estimate = estimate
        self.failure: AjetError | None = None
        """Error that ended the app, reported by the command."""

    def on_mount(self) -> None:
        self.push_screen(LabelScreen())

    def fail(self, error: AjetError) -> None:
        self.failure = error
        self.exit(return_code=1)
