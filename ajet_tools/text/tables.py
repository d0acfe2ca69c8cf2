"""A trace on a terminal: tables and conversations. No text of a model's is ever taken for markup.

Lines of a diff as coloured text.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ajet_sdk.reporting import output
from ajet_sdk.reporting.output import visible
from ajet_tools.text.clean import counted, kind_of, message_text, one_line, reply_of, short_ids, spoken

if TYPE_CHECKING:
    from ajet_sdk.types import Episode

__all__ = [
    "call_view",
    "compact",
    "console",
    "conversation",
    "counted",
    "diff_text",
    "episode_head",
    "failures_in_words",
    "fields",
    "lasting",
    "number",
    "paged",
    "quiet_seconds",
    "seconds_of",
    "steps_of",
    "table",
]

_ROLES = {"system": "dim", "user": "green", "assistant": "cyan", "tool": "magenta"}

_PIPE_WIDTH = 160

_NARROW = 12

_FIRST, _LAST = 10, 30

_LONG, _LINES = 4000, 60

_STATUS = {
    "succeeded": "green",
    "finished": "green",
    "trained": "green",
    "running": "cyan",
    "failed": "red",
    "timeout": "yellow",
    "aborted": "yellow",
    "interrupted": "yellow",
    "cancelled": "yellow",
    "undelivered": "yellow",
    "superseded": "dim",
}


def console() -> Console:
    """Where the commands print: as wide as the terminal, and nothing in a text is highlighted or replaced."""
    result: Console = output.console(highlight=False, markup=False, emoji=False)
    if not result.is_terminal and "COLUMNS" not in os.environ:
        result.width = _PIPE_WIDTH
    return result


@contextmanager
def paged(no_pager: bool = False) -> Iterator[Console]:
    """Where to print; what is longer than the terminal goes through $PAGER, or `less`, when all of it is there.

    Piped, without a pager, or with an empty $PAGER it is printed as it comes.
    """
    out = console()
    command = None if no_pager or not (out.is_terminal and sys.stdin.isatty()) else _command()
    if command is None:
        yield out
        return
    with out.capture() as captured:
        yield out
    text = captured.get()
    if text.count("\n") < out.height:
        out.file.write(text)
        return
    _page(command, text, out)


def _command() -> list[str] | None:
    named = shlex.split(os.environ.get("PAGER", "less"))
    if not named or not shutil.which(named[0]):
        return None
    return [*named, "-R"] if Path(named[0]).name == "less" else named  # colours as colours


def _page(command: list[str], text: str, out: Console) -> None:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, encoding="utf-8", errors="replace")
    try:
        process.communicate(text)
    except BrokenPipeError:  # it was left before the end
        process.wait()
    except KeyboardInterrupt:  # the pager's own key; it goes on until it is left
        process.wait()
    if process.returncode == 127:
        out.file.write(text)


def number(value: Any) -> str:
    """A number in few characters; nothing where there is none."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"


def table(
    rows: Sequence[Mapping[str, Any]], width: int, *, title: str = "", right: Iterable[str] = ()
) -> RenderableType:
    """Rows as a table of at most `width` characters, one line each; columns that have no room are named below it.

    Text gives way first; numbers, and the columns named in `right`, stand on the right and are not cut.
    """
    names = list(rows[0]) if rows else []
    cells = {name: [cell(row[name]) for row in rows] for name in names}
    numeric = {n for n in names if n in right or any(isinstance(r[n], int | float) for r in rows)}
    needed = {n: max(len(n), *(c.cell_len for c in cells[n])) for n in names}
    room, shown = width, list[str]()
    for name in names:
        room -= (needed[name] if name in numeric else min(needed[name], _NARROW)) + 2
        if room < -2 and shown:
            break
        shown.append(name)
    grid = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in shown:
        rigid = name in numeric or needed[name] <= _NARROW
        grid.add_column(Text(name, no_wrap=True), justify="right" if name in numeric else "left", no_wrap=rigid)
    for i in range(len(rows)):
        grid.add_row(*(cells[name][i] for name in shown))
    parts: list[RenderableType] = [Text(title, style="italic")] if title else []
    left = names[len(shown) :]
    more = [Text(one_line(f"no room for {', '.join(left)}; use a wider terminal or --json", width), style="dim")]
    return Group(*parts, grid, *(more if left else []))


def cell(value: Any) -> Text:
    """A value in a table: one line, status words in colour."""
    if value is None:
        return Text("")
    if isinstance(value, bool):
        return Text("yes" if value else "no")
    if isinstance(value, int | float):
        return Text(number(value))
    if isinstance(value, datetime):
        return Text(value.strftime("%Y-%m-%d %H:%M:%S"), no_wrap=True, overflow="ellipsis")
    text = one_line(value, 400)
    return Text(text, style=_STATUS.get(text, ""), no_wrap=True, overflow="ellipsis")


def fields(pairs: Iterable[tuple[str, Any]]) -> Table:
    """Names and values, one a line; those without a value are left out."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        if value is not None and value != "" and value != [] and value != {}:
            grid.add_row(Text(name), Text(visible(value)) if isinstance(value, str) else cell(value))
    return grid


def episode_head(episode: Episode, ledger: Sequence[Mapping[str, Any]], live: bool = False) -> RenderableType:
    """What an episode was, how it ended and what it was worth; `live`: it has not ended yet."""
    outcomes: dict[str, int] = {}
    for entry in ledger:
        outcomes[entry["outcome"]] = outcomes.get(entry["outcome"], 0) + entry["tokens"]
    pairs: list[tuple[str, Any]] = [
        ("episode", episode.episode_id),
        ("run", episode.run_id),
        ("group", f"{episode.group_id}, attempt {episode.attempt}" if episode.group_id else None),
        ("step", f"{episode.step} ({kind_of(episode)})" if episode.split else None),
        ("task", f"{episode.task.task_id}  {one_line(episode.task.main_query)}"),
        ("status", "running, or cut off before it ended" if live else episode.status),
        ("error", f"{episode.cause}: {episode.error}" if episode.cause and episode.error else episode.error),
        ("output", None if episode.output is None else one_line(episode.output, 400)),
        ("reward", number(episode.reward)),
    ]
    for reward in episode.rewards:
        of = f" of {reward.call_id}" if reward.call_id else f" of agent {reward.agent}" if reward.agent else ""
        weight = f" × {number(reward.weight)}" if reward.weight != 1 else ""
        why = f"  {reward.reason}" if reward.reason else ""
        pairs.append((f"  {reward.name}", f"{number(reward.value)}{weight}{of}{why}"))
    for event in episode.events:
        seconds = (event.ended_at - event.started_at).total_seconds()
        came = f"error: {event.error}" if event.error else event.result
        pairs.append((event.kind, f"{event.name} {one_line(event.arguments)} → {one_line(came)} in {seconds:.3g} s"))
    pairs += [(name, number(value)) for name, value in episode.metrics.items()]
    pairs.append(("ledger", ", ".join(f"{counted(n, 'token')} {outcome}" for outcome, n in outcomes.items())))
    return fields(pairs)


def conversation(
    rows: Sequence[Mapping[str, Any]], ledger: Sequence[Mapping[str, Any]], *, full: bool = False
) -> Iterator[RenderableType]:
    """The calls of an episode: of each the messages that an earlier call has not, and its reply.

    Unless `full`, the first and last calls of many and the beginning of a long message, and how much was left out.
    """
    ids = short_ids([row["call_id"] for row in rows])
    booked: dict[str, list[str]] = {}
    for entry in ledger:
        booked.setdefault(entry["call_id"], []).append(f"{entry['tokens']:,} {entry['outcome']}")
    replies: dict[str, Any] = {}
    left_out = range(0) if full or len(rows) <= _FIRST + _LAST else range(_FIRST, len(rows) - _LAST)
    for i, row in enumerate(rows):
        if i in left_out:
            if i == left_out.start:
                note = f"\n{counted(len(left_out), 'call')} left out here; --full shows all\n"
                yield Text(note, style="yellow")
            continue
        reply = reply_of(json.loads(row["response"]))
        replies[row["call_id"]] = reply
        parent = row["parent_call_id"]
        yield _call_title(row, ids, booked.get(row["call_id"], []))
        for message in _new_messages(row, replies.get(parent) if parent else None):
            yield _message(message, full)
        yield _message(reply, full)
        if row["error"]:
            yield Text(_shortened(f"error: {row['error']}", full), style="red")


def _call_title(row: Mapping[str, Any], ids: Mapping[str, str], booked: Sequence[str]) -> Text:
    parts = [f"call {row['index']}  {ids[row['call_id']]}", row["agent"], row["model"]]
    if row["policy_version"] is not None:
        parts.append(f"version {row['policy_version']}")
    if row["output_tokens"] is not None:
        parts.append(f"{number(row['prompt_tokens'])} → {counted(row['output_tokens'], 'token')}")
    parts += [row["finish_reason"], f"{row['seconds']:.2f} s"]
    parts += [row["phase"] if row["phase"] != "rollout" else "", "" if row["trainable"] else "not trained", *booked]
    return Text(visible("\n" + "  ".join(part for part in parts if part)), style="bold underline")


def _new_messages(row: Mapping[str, Any], echoed: Mapping[str, Any] | None) -> list[Any]:
    """The messages that are new in this call, without the parent's reply where it comes back as it was."""
    if row["messages_suffix"] is None:
        request = json.loads(row["request"])
        asked = request.get("prompt", request.get("input"))
        return [] if asked is None else [{"role": "user", "content": asked}]
    messages = list(json.loads(row["messages_suffix"]))
    first = messages[0] if messages else None
    if echoed is None or not isinstance(first, Mapping) or first.get("role") != "assistant":
        return messages
    return messages[1:] if message_text(first) == message_text(echoed) else messages


def _shortened(text: str, full: bool) -> str:
    """A text safe to show; unless `full`, the beginning of a long one."""
    lines = text[: _LONG + 1].split("\n", _LINES)
    shown = "\n".join(lines[:_LINES])[:_LONG]
    if full or len(shown) == len(text):
        return visible(text)
    return f"{visible(shown)}… ({len(text) - len(shown):,} more characters; --full shows all)"


def _message(message: Any, full: bool) -> RenderableType:
    if not isinstance(message, Mapping):
        message = {"role": "?", "content": message}
    role = str(message.get("role", "?"))
    name = f" {message['name']}" if isinstance(message.get("name"), str) else ""
    body = _shortened(spoken(message), full) or "(empty)"
    return Group(
        Text(one_line(f"{role}{name}"), style=f"bold {_ROLES.get(role, '')}"), Padding(Text(body), (0, 0, 0, 2))
    )


def call_view(row: Mapping[str, Any], *, full: bool = False) -> Iterator[RenderableType]:
    """One call: what it was, every message of its request, its reply; unless `full`, the beginning of long ones."""
    request = json.loads(row["request"])
    messages = request.pop("messages", None)
    yield fields(
        [
            ("call", row["call_id"]),
            ("episode", row["episode_id"]),
            ("extends", row["parent_call_id"]),
            ("agent", f"{row['agent']}{' ' + row['target_tag'] if row['target_tag'] else ''}"),
            ("model", row["model"]),
            ("version", row["policy_version"]),
            ("phase", row["phase"]),
            ("trainable", row["trainable"]),
            ("prompt", counted(len(row["prompt_ids"]), "token") if row["prompt_ids"] is not None else None),
            ("reply", counted(len(row["output_ids"]), "token") if row["output_ids"] is not None else None),
            ("log-probability", f"{sum(row['logprobs']):.4f} in all" if row["logprobs"] else None),
            ("finish reason", row["finish_reason"]),
            ("sampling", row["sampling"]),
            ("request", _shortened(json.dumps(request, ensure_ascii=False), full)),
            ("started", row["started_at"]),
            ("ended", row["ended_at"]),
            ("error", row["error"]),
            ("ledger", ", ".join(row["ledger"] or [])),
        ]
    )
    for message in messages or ():
        yield _message(message, full)
    yield Rule(Text("reply"), align="left", style="dim")
    yield _message(reply_of(json.loads(row["response"])), full)


_STYLES = {"-": "red", "+": "green"}


def diff_text(lines: Sequence[str], most: int = 60) -> Text:
    """Lines that begin with `-`, `+` or a blank, at most so many of them; nothing in them is markup."""
    shown = Text("\n").join(Text(visible(line), style=_STYLES.get(line[:1], "dim")) for line in lines[:most])
    if len(lines) > most:
        shown.append(f"\n… and {len(lines) - most} more lines (--json has more)", style="dim")
    return shown


_THOUSANDS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def compact(count: float | None) -> str:
    """A count in at most five characters: 950, 12.3k, 4.56M."""
    if count is None:
        return ""
    for size, unit in _THOUSANDS:
        if abs(count) >= size:
            return f"{count / size:.3g}{unit}" if count / size < 999.5 else f"{count / size:.0f}{unit}"
    return f"{count:.0f}"


def lasting(seconds: float | None) -> str:
    """A duration in two units: 42 s, 3m 05s, 2h 10m."""
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    whole = round(seconds)
    days, hours, minutes, rest = whole // 86_400, whole // 3_600 % 24, whole // 60 % 60, whole % 60
    if days:
        return f"{days}d {hours:02d}h"
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {rest:02d}s"


def steps_of(run: Mapping[str, Any]) -> str:
    """`12/60`, or `12` where the run's config does not say how many there will be."""
    if run["last_step"] is None:
        return "" if run["total_steps"] is None else f"0/{run['total_steps']}"
    return f"{run['last_step']}/{run['total_steps']}" if run["total_steps"] else str(run["last_step"])


def seconds_of(run: Mapping[str, Any], now: datetime) -> float | None:
    """How long a run took: to its end, or to now while it runs, or to its last sign of life where it was cut off."""
    end = run["ended_at"] or (now if run["status"] == "running" else run["last_at"])
    return None if end is None or run["started_at"] is None else max(0.0, (end - run["started_at"]).total_seconds())


def quiet_seconds(run: Mapping[str, Any], now: datetime) -> float | None:
    """How long ago a running run last finished an episode or logged a step; None for one that has ended."""
    since = run["last_at"] or run["started_at"]
    return (now - since).total_seconds() if run["status"] == "running" and since else None


def failures_in_words(run: Mapping[str, Any], width: int = 80) -> str:
    """`12 TimeoutError, 3 NoReward`, the most frequent first."""
    return one_line(", ".join(f"{cause['episodes']:,} {cause['cause']}" for cause in run["causes"]), width)
