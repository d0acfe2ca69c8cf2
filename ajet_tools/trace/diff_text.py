"""Lines of a diff as coloured text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from ajet_tools.trace.text import visible

__all__ = ["diff_text"]

_STYLES = {"-": "red", "+": "green"}


def diff_text(lines: Sequence[str], most: int = 60) -> Text:
    """Lines that begin with `-`, `+` or a blank, at most so many of them; nothing in them is markup."""
    shown = Text("\n").join(Text(visible(line), style=_STYLES.get(line[:1], "dim")) for line in lines[:most])
    if len(lines) > most:
        shown.append(f"\n… and {len(lines) - most} more lines (--json has more)", style="dim")
    return shown
