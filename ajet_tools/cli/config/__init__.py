"""`ajet config`: the table of its commands; the module of a command is imported when it runs."""

from __future__ import annotations

import typer

from ajet_tools.cli.lazy import LazyGroup

__all__ = ["app"]


class ConfigCommands(LazyGroup):
    package = "ajet_tools.cli.config"
    table = {
        "show": ("file", "Print each key's effective value and where it came from."),
        "schema": ("schema", "Print every key with its type, its default and what it does."),
        "check": ("file", "Check files: keys and values, then the workflow, judge and tasks that each names."),
        "migrate": ("file", "Print a config that was written for AgentJet by ajet's own names."),
    }


app = typer.Typer(cls=ConfigCommands, no_args_is_help=True, add_completion=False)


@app.callback()
def config() -> None:
    """Show, check and explain the configuration."""
