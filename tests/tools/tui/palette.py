"""Runs a command of the viewer's palette."""

from __future__ import annotations

from typing import Any


async def choose(pilot: Any, title: str) -> None:
    """Run the command with this title, as the palette offers it on the current screen."""
    commands = {
        command.title: command for command in pilot.app.get_system_commands(pilot.app.screen)
    }
    commands[title].callback()
    await pilot.pause()
