"""What is done with the episodes that are selected in a list, or with the one under its cursor."""

from __future__ import annotations

from collections.abc import Sequence

from textual import work

from ajet_sdk.errors import AjetError
from ajet_tools.trace.bookmarks import set_bookmark
from ajet_tools.trace.queries.groups import attempts_of
from ajet_tools.tui.screens.export import ExportScreen
from ajet_tools.tui.screens.following import FollowingScreen
from ajet_tools.tui.widgets.listing import ListingTable

__all__ = ["ChosenScreen"]

_SIDE_BY_SIDE = 16


class ChosenScreen(FollowingScreen):
    """A screen with a table of episodes; its subclass says what marks stand beside them."""

    def __init__(self, run_id: str | None) -> None:
        super().__init__()
        self.run_id = run_id
        self.bookmarks: frozenset[str] = frozenset()

    @property
    def table(self) -> ListingTable:
        return self.query_one(ListingTable)

    def mark(self) -> None:
        """Show what is marked now."""
        raise NotImplementedError

    @property
    def every(self) -> Sequence[str]:
        """All that the list has."""
        raise NotImplementedError

    @property
    def chosen(self) -> list[str]:
        """The selection in the order of the list (then what is not in it), or what the cursor is on."""
        places, selected = self.table.places, self.table.selected
        if not selected:
            return [self.table.cursor_id] if self.table.cursor_id else []
        return [*sorted(selected & places.keys(), key=lambda id: places[id]), *sorted(selected - places.keys())]

    def action_bookmark(self) -> None:
        if not (chosen := self.chosen):
            return
        try:
            self.bookmarks = set_bookmark(self.app.where, chosen, not self.bookmarks.issuperset(chosen))
        except AjetError as error:
            self.app.told(error)
        self.mark()

    @work(group="group", exclusive=True)
    async def action_group(self) -> None:
        if (id := self.table.cursor_id) is not None:
            self.app.open_compare((await self.app.ask(attempts_of, id))[:_SIDE_BY_SIDE])

    def action_compare(self) -> None:
        chosen = self.chosen
        if len(chosen) == 1 and self.table.cursor_id not in (None, chosen[0]):
            chosen.append(str(self.table.cursor_id))
        if 2 <= len(chosen) <= _SIDE_BY_SIDE:
            self.app.open_compare(chosen)
        else:
            self.notify(f"select 2 to {_SIDE_BY_SIDE} episodes with space (now {len(self.table.selected):,})")

    def action_feedback(self) -> None:
        if (id := self.table.cursor_id) is not None:
            self.app.give_feedback(id)

    def action_copy(self) -> None:
        if chosen := self.chosen:
            self.app.copy("\n".join(chosen), chosen[0] if len(chosen) == 1 else f"{len(chosen):,} ids")

    def action_export(self, asking: bool) -> None:
        """The selection; with none, whatever the list shows."""
        if ids := self.chosen if self.table.selected else self.every:
            self.app.push_screen(ExportScreen(ids, self.run_id or "", asking=asking))
        else:
            self.notify("there is no episode to export")
