"""Runs a command of the viewer's palette; reads a list of the viewer."""

from __future__ import annotations

from typing import Any

from ajet_tools.tui.widgets.listing import ListingTable


async def choose(pilot: Any, title: str) -> None:
    """Run the command with this title, as the palette offers it on the current screen."""
    commands = {
        command.title: command for command in pilot.app.get_system_commands(pilot.app.screen)
    }
    commands[title].callback()
    await pilot.pause()


def cells(screen: Any) -> list[list[str]]:
    """The texts of a list that is in memory, row by row; empty before it is read."""
    table = screen.query_one(ListingTable)
    rows = table.rows.rows if table.rows is not None else []
    return [[column.text(row) for column in table.columns] for row in rows]
