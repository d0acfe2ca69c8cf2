"""An episode in a few lines: how it ended, what it was worth, how much there is of it, what it was asked."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from ajet_tools.trace.render import counted, number
from ajet_tools.trace.story import Story
from ajet_tools.trace.text import one_line
from ajet_tools.tui.widgets.cells import steady

__all__ = ["summary"]

_STATUS = {"succeeded": "bold green", "failed": "bold red", "running": "bold cyan", "timeout": "bold yellow"}
_SIGNS = {"succeeded": "✓", "failed": "✗", "running": "▶", "timeout": "‖", "aborted": "‖", "cut off": "‖"}


def summary(told: Story, new: int = 0) -> Text:
    """The episode in a few lines; `new`: so many messages came that the reader has not gone to."""
    row, calls = told.row, list(told.calls.values())
    line = Text.assemble((f"{_SIGNS.get(told.status, '·')} {told.status}", _STATUS.get(told.status, "bold yellow")))
    line.append("" if told.reward is None else f"  reward {number(told.reward)}", style="bold")
    line.append("  " + " · ".join(fact for fact in _counts(told) if fact))
    if row and (row["error"] or row["cause"]):
        line.append(f"\n{steady(one_line(_told_first(row['error'] or '', row['cause'] or ''), 200))}", style="red")
    query = told.task.get("main_query") or ""
    if query:
        line.append(f"\n{steady(one_line(query, 300))}", style="italic")
    line.append("" if calls or row is None else "\nthe episode made no call", style="yellow")
    line.append(f"\n{counted(new, 'message')} new: end goes there and follows" if new else "", style="bold yellow")
    return line


def _told_first(error: str, cause: str) -> str:
    """The line of an error that says what happened: the last one where it begins with its traceback."""
    lines = error.strip().splitlines() or [""]
    line = lines[-1] if lines[0].startswith("Traceback") else lines[0]
    return line if cause in line else f"{cause}: {line}"


def _counts(told: Story) -> Iterator[str]:
    """Where the episode stands, and how much of it there is."""
    row, calls = told.row, list(told.calls.values())
    if row:
        yield f"step {row['step']} {row['split']}"
        yield f"attempt {row['attempt']}" + (f" of a group of {len(told.attempts)}" if len(told.attempts) > 1 else "")
    yield counted(len(calls), "call")
    agents = len({call.agent for call in calls})
    yield counted(agents, "agent") if agents > 1 else ""
    lines = sum(1 for branch in told.tree.branches if branch.timeline is not None)
    yield counted(lines, "timeline") if lines else ""
    tokens = sum(len(call.output_ids) for call in calls if call.output_ids is not None)
    yield f"{counted(tokens, 'token')} sampled" if tokens else ""
    yield f"{row['seconds']:,.2f} s" if row and row["seconds"] is not None else ""
    yield told.episode_id[:12]
