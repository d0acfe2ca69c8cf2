"""An episode in a few lines: its outcome, its task and answer, its group, and what the training made of it."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from ajet_tools.text.clean import counted, drop_zero_width, kind_of, one_line
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
    episode = overview.episode
    if overview.status == "succeeded" and episode.reward is not None:  # the reward says more than that it ended
        mark, style = _outcome(episode.reward, episode.is_success)
        line = Text.assemble((f"{mark} reward {number(episode.reward)}", style))
    else:
        mark = _SIGNS.get(overview.status, "·")
        line = Text.assemble((f"{mark} {overview.status}", _COLORS.get(overview.status, "bold yellow")))
        line.append("" if episode.reward is None else f"  reward {number(episode.reward)}", style="bold")
    line.append("  " + " · ".join(fact for fact in _counts(overview) if fact))
    if episode.error or episode.cause:
        error = _first_line(episode.error or "", episode.cause or "")
        line.append(f"\n{drop_zero_width(one_line(error, 200))}", style="red")
    if episode.task.main_query:
        line.append(f"\n{drop_zero_width(one_line(episode.task.main_query, 300))}", style="italic")
    if parts := [part for part in (_answers(overview), _group(overview)) if part]:
        line.append("\n").append_text(Text("   ").join(parts))
    line.append("" if episode.calls or not overview.record.ended else "\nthe episode made no call", style="yellow")
    line.append(f"\n{counted(new, 'message')} new: end goes there and follows" if new else "", style="bold yellow")
    return line


def _answers(overview: EpisodeOverview) -> Text:
    """The answer that the task has beside what the agent returned, where both are short."""
    episode = overview.episode
    shown = [
        str(value)
        for value in (episode.task.metadata.get("answer"), episode.output)
        if isinstance(value, str | int | float)
    ]
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
            line.append(f" [{mark}]" if episode_id == overview.episode.episode_id else f" {mark}", style=style)
    if advantage := overview.record.advantage:
        way = "up" if advantage > 0 else "down"
        line.append(f"{'   ' if line else ''}pushed {way} (advantage {advantage:+.3g})")
    return line


def _first_line(error: str, cause: str) -> str:
    """The line of an error with its message: the last one if the error begins with a traceback."""
    lines = error.strip().splitlines() or [""]
    line = lines[-1] if lines[0].startswith("Traceback") else lines[0]
    return line if cause in line else f"{cause}: {line}"


def _counts(overview: EpisodeOverview) -> Iterator[str]:
    """The episode's status and size."""
    episode, ended = overview.episode, overview.record.ended
    if ended:
        yield f"step {episode.step} {kind_of(episode)}" if episode.split else ""
        group = f" of a group of {len(overview.attempts)}" if len(overview.attempts) > 1 else ""
        yield f"attempt {episode.attempt}{group}"
    yield counted(len(episode.calls), "call")
    agents = len({call.agent for call in episode.calls})
    yield counted(agents, "agent") if agents > 1 else ""
    lines = sum(1 for branch in overview.tree.branches if branch.timeline is not None)
    yield counted(lines, "timeline") if lines else ""
    tokens = sum(len(call.output_ids) for call in episode.calls if call.output_ids is not None)
    yield f"{counted(tokens, 'token')} sampled" if tokens else ""
    yield f"{(episode.ended_at - episode.started_at).total_seconds():,.2f} s" if ended else ""
    yield episode.episode_id[:12]
