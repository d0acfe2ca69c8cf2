"""The interfaces that the dataset viewer's screens use: the application, and the table behind a row."""

from __future__ import annotations

from abc import abstractmethod

from textual.screen import Screen

from ajet_sdk.errors import AjetError
from ajet_tools.dataset.review.journal import Mark
from ajet_tools.dataset.review.review import Review
from ajet_tools.text.clean import one_line
from ajet_tools.tui.base import ViewerApp


class DatasetViewer(ViewerApp):
    """The viewer of one dataset. `failure` is why it ended by itself, where it did."""

    def __init__(self, review: Review) -> None:
        super().__init__()
        self.review = review
        self.sub_title = one_line(review.source)
        self.failure: AjetError | None = None
        self.parting = ""
        """Printed on the terminal after the view."""

    def fail(self, error: AjetError) -> None:
        """Exit; the command reports the error."""
        self.failure = error
        self.exit(return_code=1)

    @abstractmethod
    def reopen(self) -> None:
        """Read the dataset from its file, which has been written."""


class ReviewScreen(Screen[None]):
    """Rows with a cursor on one of them, as the screen sees them that shows that row whole."""

    app: DatasetViewer

    def __init__(self, review: Review) -> None:
        super().__init__()
        self.review = review

    @abstractmethod
    def step(self, by: int) -> int | None:
        """Move the cursor to another row; its number."""

    @abstractmethod
    def update_rows(self) -> None:
        """Show the values that rows have now."""

    @abstractmethod
    def action_mark(self, mark: Mark) -> None:
        """Accept or reject, and go on to the next row."""

    @abstractmethod
    def action_undo(self) -> None:
        """Take back the last decision."""

    @abstractmethod
    def action_copy(self) -> None:
        """Copy the row as JSON."""
