"""An episode in a few lines: its outcome, its task and answer, its group, and what the training made of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from rich.text import Text

from ajet_tools.text.clean import counted, drop_zero_width, one_line
from ajet_tools.text.tables import number
from ajet_tools.trace.episode.overview import EpisodeOverview

_COLORS = {"failed": "bold red", "running": "bold cyan"}
_SIGNS = {"failed": "✗", "running": "▶", "timeout": "‖", "aborted": "‖", "cut off": "‖"}
_GROUP = 16
"""Attempts of a group that are shown one by one."""
_ANSWER = 60


def _outcome(reward: float | None, solved: bool | None = None) -> tuple[str, str]:
    """A mark and its style: solved, no reward, something in between, none known."""
    if reward is None:
        return "·", ""
    if solved or reward >= 1 - 1e-9:
        return "✓", "bold green"
    return ("✗", "bold red") if reward <= 0 else ("~", "bold")


def summarize(overview: EpisodeOverview, new: int = 0) -> Text:
    """The episode in a few lines; `new` is the number of unread messages."""
    row, calls = overview.row, list(overview.calls.values())
    if overview.status == "succeeded" and overview.reward is not None:  # the reward says more than that it ended
        mark, style = _outcome(overview.reward, row["is_success"] if row else None)
        line = Text.assemble((f"{mark} reward {number(overview.reward)}", style))
    else:
        mark = _SIGNS.get(overview.status, "·")
        line = Text.assemble((f"{mark} {overview.status}", _COLORS.get(overview.status, "bold yellow")))
        line.append("" if overview.reward is None else f"  reward {number(overview.reward)}", style="bold")
    line.append("  " + " · ".join(fact for fact in _counts(overview) if fact))
    if row and (row["error"] or row["cause"]):
        line.append(
            f"\n{drop_zero_width(one_line(_first_line(row['error'] or '', row['cause'] or ''), 200))}", style="red"
        )
    query = overview.task.get("main_query") or ""
    if query:
        line.append(f"\n{drop_zero_width(one_line(query, 300))}", style="italic")
    if parts := [part for part in (_answers(overview), _group(overview)) if part]:
        line.append("\n").append_text(Text("   ").join(parts))
    line.append("" if calls or row is None else "\nthe episode made no call", style="yellow")
    line.append(f"\n{counted(new, 'message')} new: end goes there and follows" if new else "", style="bold yellow")
    return line


def _answers(overview: EpisodeOverview) -> Text:
    """The answer that the task has beside what the agent returned, where both are short."""
    metadata = overview.task.get("metadata")
    expected = metadata.get("answer") if isinstance(metadata, Mapping) else None
    output = json.loads(overview.row["output"] or "null") if overview.row else None
    shown = [str(value) for value in (expected, output) if isinstance(value, str | int | float)]
    if len(shown) < 2 or max(map(len, shown)) > _ANSWER:
        return Text()
    return Text(f"expected {one_line(shown[0], _ANSWER)}   got {one_line(shown[1], _ANSWER)}")


def _group(overview: EpisodeOverview) -> Text:
    """How the attempts of its group did, this one in brackets, and which way its tokens were pushed."""
    line = Text()
    if 1 < len(overview.attempts) <= _GROUP:
        line.append("group")
        for episode_id, reward in zip(overview.attempts, overview.group_rewards, strict=True):
            mark, style = _outcome(reward)
            line.append(f" [{mark}]" if episode_id == overview.episode_id else f" {mark}", style=style)
    if overview.advantage:
        way = "up" if overview.advantage > 0 else "down"
        line.append(f"{'   ' if line else ''}pushed {way} (advantage {overview.advantage:+.3g})")
    return line


def _first_line(error: str, cause: str) -> str:
    """The line of an error with its message: the last one if the error begins with a traceback."""
    lines = error.strip().splitlines() or [""]
    line = lines[-1] if lines[0].startswith("Traceback") else lines[0]
    return line if cause in line else f"{cause}: {line}"


def _counts(overview: EpisodeOverview) -> Iterator[str]:
    """The episode's status and size."""
    row, calls = overview.row, list(overview.calls.values())
    if row:
        decoding = row["decoding"] if row["split"] == "val" or row["decoding"] == "greedy" else None
        yield " ".join(filter(None, (f"step {row['step']}", row["split"], decoding)))
        yield f"attempt {row['attempt']}" + (
            f" of a group of {len(overview.attempts)}" if len(overview.attempts) > 1 else ""
        )
    yield counted(len(calls), "call")
    agents = len({call.agent for call in calls})
    yield counted(agents, "agent") if agents > 1 else ""
    lines = sum(1 for branch in overview.tree.branches if branch.timeline is not None)
    yield counted(lines, "timeline") if lines else ""
    tokens = sum(len(call.output_ids) for call in calls if call.output_ids is not None)
    yield f"{counted(tokens, 'token')} sampled" if tokens else ""
    yield f"{row['seconds']:,.2f} s" if row and row["seconds"] is not None else ""
    yield overview.episode_id[:12]
