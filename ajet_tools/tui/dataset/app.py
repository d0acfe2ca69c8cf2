"""`ajet dataset view`: the application around the table of rows."""

from __future__ import annotations

from ajet_tools.dataset.review.review import Review
from ajet_tools.tui.dataset.row_list import RowsScreen
from ajet_tools.tui.dataset.screen import DatasetViewer


class DatasetApp(DatasetViewer):
    """The viewer with its table of rows, narrowed by a filter where one is given."""

    TITLE = "ajet dataset"
    LEAST_SIZE = (60, 16)

    def __init__(self, review: Review, filter_text: str = "") -> None:
        super().__init__(review)
        self.first_filter = filter_text

    def on_mount(self) -> None:
        self.push_screen(RowsScreen(self.review, self.first_filter))

    def reopen(self) -> None:
        before = self.review
        self.review = Review(
            before.source, mapping=before.mapping, skip_bad=before.bad.skip, sample=before.sample_size, seed=before.seed
        )
        self.switch_screen(RowsScreen(self.review, ""))
        before.close()

    async def action_quit(self) -> None:
        """Ctrl-Q leaves by the same way as q: by the table, which asks where something was decided."""
        while not isinstance(self.screen, RowsScreen) and len(self.screen_stack) > 1:
            self.pop_screen()
        if isinstance(self.screen, RowsScreen):
            self.screen.action_leave()
