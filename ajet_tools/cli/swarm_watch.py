"""The screen of `ajet swarm watch`: one look at a swarm's server."""

from __future__ import annotations

import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from ajet_sdk.errors import SwarmError
from ajet_sdk.swarm.client import SwarmClient
from ajet_sdk.swarm.messages import SwarmStatus
from ajet_tools.text.clean import counted, one_line
from ajet_tools.text.tables import lasting, table

_MOST_ROWS = 20


def watch(swarm: SwarmClient, interval: float, console: Console) -> SwarmStatus:
    """Show the server until it is finished, or until Ctrl-C; returns its last state."""
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            try:
                status = swarm.status()
            except SwarmError as error:
                live.update(Text(f"{swarm.url}: {error}", style="yellow"), refresh=True)
            else:
                live.update(screen(status, console.width), refresh=True)
                if status.state == "finished":
                    return status
            time.sleep(interval)


def screen(status: SwarmStatus, width: int) -> RenderableType:
    """The state, what the step waits for, its groups, the open episodes and the clients."""
    steps = f"step {status.step}" if status.step else "no step"
    if status.total_steps is not None and status.total_steps < 1_000_000:
        steps += f" of {status.total_steps}"
    title = f"{status.name or 'swarm'}  {status.state}  {steps}  policy {status.policy_version}"
    parts: list[RenderableType] = [
        Text(title, style="bold"),
        Text(f"waits for: {status.waiting}"),
    ]
    if status.ages:
        ages = ", ".join(
            f"{tokens:,} tokens {counted(int(age), 'update')} old"
            for age, tokens in sorted(status.ages.items(), key=lambda item: int(item[0]))
        )
        parts.append(Text(f"collected: {ages}"))
    for name, rows in (
        ("groups", _groups(status)),
        ("open episodes", _open(status)),
        ("clients", _clients(status)),
    ):
        if not rows:
            continue
        parts.append(Text(f"\n{name} ({len(rows)})", style="italic"))
        parts.append(table(rows[:_MOST_ROWS], width))
        if len(rows) > _MOST_ROWS:
            parts.append(Text(f"and {len(rows) - _MOST_ROWS} more (--json has all)", style="dim"))
    return Group(*parts)


def _groups(status: SwarmStatus) -> list[dict[str, object]]:
    has_kinds = any(group.kind for group in status.groups)
    rows: list[dict[str, object]] = []
    for group in status.groups:
        row: dict[str, object] = {"task": one_line(group.task_id, 30)}
        if has_kinds:
            row["kind"] = group.kind
        row |= {"ended": f"{group.ended}/{group.size}", "open": group.open}
        rewards = ["?" if reward is None else f"{reward:g}" for reward in group.rewards]
        rows.append({**row, "rewards": " ".join(rewards)})
    return rows


def _open(status: SwarmStatus) -> list[dict[str, object]]:
    names = {client.client_id: client.client_name for client in status.clients}
    slowest = sorted(status.open, key=lambda episode: -episode.age)
    return [
        {
            "episode": episode.episode_id[:8],
            "client": names.get(episode.client_id) or episode.client_id,
            "task": one_line(episode.task_id, 30),
            "split": episode.split,
            "calls": episode.calls,
            "idle": f"{lasting(episode.idle)} of {lasting(episode.idle_timeout)}",
            "age": lasting(episode.age),
        }
        for episode in slowest
    ]


def _clients(status: SwarmStatus) -> list[dict[str, object]]:
    return [
        {
            "client": client.client_name or client.client_id,
            "address": client.address,
            "open": client.open,
            "ended": client.ended,
            "failed": client.failed,
            "abandoned": client.abandoned,
            "seen": f"{lasting(client.last_seen)} ago",
        }
        for client in sorted(status.clients, key=lambda client: client.last_seen)
    ]
