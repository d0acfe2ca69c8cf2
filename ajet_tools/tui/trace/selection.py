"""What is done with the episodes that are selected in a list, or with the one under its cursor."""

from __future__ import annotations

from collections.abc import Sequence

from ajet_tools.tui.trace.screen import MAX_COMPARED, TraceScreen
from ajet_tools.tui.widgets.listing import ListingTable


class SelectionScreen(TraceScreen):
    """A screen with a table of episodes; its subclass says what marks stand beside them."""

    def __init__(self, run_id: str | None) -> None:
        super().__init__()
        self.run_id = run_id

    @property
    def table(self) -> ListingTable:
        return self.query_one(ListingTable)

    def update_marks(self) -> None:
        """Show what is marked now."""
        raise NotImplementedError

    @property
    def all_ids(self) -> Sequence[str]:
        """All that the list has."""
        raise NotImplementedError

    @property
    def selected_ids(self) -> list[str]:
        """The selection in the order of the list, then what isn't listed; without one, the row under the cursor."""
        places, selected = self.table.places, self.table.selected
        if not selected:
            return [self.table.cursor_id] if self.table.cursor_id else []
        return [*sorted(selected & places.keys(), key=lambda id: places[id]), *sorted(selected - places.keys())]

    def action_group(self) -> None:
        if (id := self.table.cursor_id) is not None:
            self.app.compare_group(id)

    def action_compare(self) -> None:
        chosen = self.selected_ids
        if len(chosen) == 1 and self.table.cursor_id not in (None, chosen[0]):
            chosen.append(str(self.table.cursor_id))
        if 2 <= len(chosen) <= MAX_COMPARED:
            self.app.open_compare(chosen)
        else:
            self.notify(f"select 2 to {MAX_COMPARED} episodes with space (now {len(self.table.selected):,})")

    def action_feedback(self) -> None:
        if (id := self.table.cursor_id) is not None:
            self.app.open_feedback(id)

    def action_copy(self) -> None:
        if chosen := self.selected_ids:
            self.app.copy("\n".join(chosen), chosen[0] if len(chosen) == 1 else f"{len(chosen):,} ids")
