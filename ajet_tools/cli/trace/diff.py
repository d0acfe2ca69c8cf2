"""`ajet trace compare A B`: compares two episodes or two runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from ajet_sdk.errors import QueryError
from ajet_sdk.reporting.output import visible
from ajet_sdk.reporting.paired import Paired
from ajet_tools.cli.result import Result, visible_fields
from ajet_tools.text import tables as render
from ajet_tools.text.clean import one_line
from ajet_tools.text.tables import diff_text
from ajet_tools.trace import queries
from ajet_tools.trace.compare.attempts import ComparedMessage
from ajet_tools.trace.compare.changes import finding_lines
from ajet_tools.trace.compare.diff import (
    At,
    EpisodeDiff,
    EpisodeFacts,
    RunDiff,
    RunSide,
    diff_episodes,
    diff_runs,
    episode_at,
    text_diff,
)
from ajet_tools.trace.locate import Named, open_named

Split = Literal["train", "val", "trial"]
Decoding = Literal["sampled", "greedy"]
_LINES = 24


@dataclass(frozen=True)
class EpisodePairResult(Result):
    episodes: EpisodeDiff

    def document(self) -> object:
        return self.episodes

    def show(self, out: Console) -> None:
        _print_episodes(self.episodes, out)


@dataclass(frozen=True)
class RunPairResult(Result):
    runs: RunDiff

    def document(self) -> object:
        return self.runs

    def show(self, out: Console) -> None:
        _print_runs(self.runs, out)


def compare_two(
    a: str,
    b: str,
    traces: Sequence[Path],
    split: Split | None,
    decoding: Decoding | None,
) -> EpisodePairResult | RunPairResult:
    """Compares two episodes message by message, or two runs or steps by their rewards on shared
    tasks."""
    with ExitStack() as stack:
        (a, step_a) = _step_of(a)
        (b, step_b) = _step_of(b)
        named = _open_both(a, b, traces)
        reader_a, reader_b = (stack.enter_context(target.reader) for target in named)
        targets = [
            queries.find(target.reader, target.id or queries.find_run(target.reader, None))
            for target in named
        ]
        kinds = {target.kind for target in targets}
        if kinds == {"episode"}:
            episodes = diff_episodes(
                episode_at(reader_a, targets[0].id), episode_at(reader_b, targets[1].id)
            )
            return EpisodePairResult(episodes)
        if kinds == {"run"}:
            runs = diff_runs(
                (reader_a, targets[0].id),
                (reader_b, targets[1].id),
                split=split,
                steps=(step_a, step_b),
                decoding=decoding,
            )
            return RunPairResult(runs)
        description = " and ".join(f"{target.kind} {target.id}" for target in targets)
        raise QueryError(f"give two episodes or two runs (got {description})")


def _open_both(a: str, b: str, traces: Sequence[Path]) -> tuple[Named, Named]:
    """Open what two names stand for; a trace that has both is opened once."""
    first = open_named(a or None, *traces[:1])
    # both are in the first trace
    if len(traces) < 2 and first.id is not None and b and not Path(b).exists():
        return first, Named(first.reader, first.where, b)
    return first, open_named(b or None, *traces[-1:])


_STEP = re.compile(r"@(\d{1,9}|last)$")


def _step_of(name: str) -> tuple[str, At]:
    """Splits `NAME@STEP`."""
    match = None if Path(name).exists() else _STEP.search(name)
    if match is None:
        return name, None
    return name[: match.start()], "last" if match[1] == "last" else int(match[1])


def _print_episodes(result: EpisodeDiff, out: Console) -> None:
    rows = _side_rows(result.a, result.b, {})
    for pair in result.rewards:
        name = f"reward {one_line(pair.reward)}"
        rows.append({"": name, "A": _cell(pair.a), "B": _cell(pair.b)})
    out.print(render.table(rows, out.width))
    out.print()
    if result.other_settings:
        names = ", ".join(map(one_line, result.other_settings))
        out.print(f"The first requests differ in {names}.")
    if result.shared_tokens is not None:
        tokens = render.counted(result.shared_tokens, "token")
        out.print(f"Identical start of their first timelines: {tokens}")
    if result.first_difference is None:
        out.print(f"Identical messages: all {result.same_messages:,}.")
        return
    before = render.counted(result.same_messages, "message")
    out.print(f"First difference of the messages after {before}:")
    a, b = result.message_a, result.message_b
    if a is not None and b is not None and (a.role, a.agent) == (b.role, b.agent):
        out.print(one_line(_speaker(a)), style="bold")
        out.print(diff_text(text_diff(a.text, b.text)))
    else:
        _print_message(a, "-", "red", out)
        _print_message(b, "+", "green", out)


def _side_rows(
    a: EpisodeFacts | RunSide, b: EpisodeFacts | RunSide, names: Mapping[str, str]
) -> list[dict[str, object]]:
    """Rows of a table with the fields of two sides, under other names; one without a name has no
    row."""
    others = visible_fields(b)
    rows: list[dict[str, object]] = []
    for field, value in visible_fields(a).items():
        name = names.get(field, field)
        if name and (value is not None or others[field] is not None):
            rows.append({"": name, "A": _cell(value), "B": _cell(others[field])})
    return rows


def _speaker(message: ComparedMessage) -> str:
    agent = "" if message.agent == "default" else f" ({message.agent})"
    return f"{message.role}{agent}"


def _cell(value: object) -> str | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return render.number(value)
    return None if value is None else one_line(value, 60)


def _print_message(message: ComparedMessage | None, sign: str, style: str, out: Console) -> None:
    if message is None:
        out.print(f"{sign} (nothing)", style="dim")
        return
    out.print(one_line(f"{sign} {_speaker(message)}"), style=f"bold {style}")
    lines = message.text.splitlines() or ["(empty)"]
    for line in lines[:_LINES]:
        out.print(f"{sign}   {visible(line[:2000])}", style=style)
    if len(lines) > _LINES:
        out.print(f"{sign}   … and {len(lines) - _LINES} more lines", style="dim")


def _print_runs(result: RunDiff, out: Console) -> None:
    of = dict.fromkeys((result.a.of, result.b.of))
    names = {
        "of": "",
        "failures": "",
        "reward": f"mean reward ({'; '.join(of)})",
        "calls": "calls per episode",
        "sampled_tokens": "sampled tokens per episode",
        "seconds": "seconds per episode",
    }
    rows = _side_rows(result.a, result.b, names)
    failures = result.a.failures, result.b.failures
    for cause in sorted({*failures[0], *failures[1]}):
        counts = [str(side.get(cause, 0)) for side in failures]
        rows.append({"": one_line(f"failed: {cause}"), "A": counts[0], "B": counts[1]})
    out.print(render.table(rows, out.width))
    out.print(f"\n{_verdict(result)}", soft_wrap=True)
    only_a, only_b = result.tasks_only_in_a, result.tasks_only_in_b
    if only_a or only_b:
        out.print(f"Not paired: {only_a} tasks only in A, {only_b} only in B", style="dim")
    if result.changes:
        out.print("\nlargest changes of tasks, and of behaviour", style="italic")
    for line in finding_lines(result.changes):
        out.print(line, soft_wrap=True)
    if result.config:
        out.print("\nconfig differences", style="italic")
    for pair in result.config:
        out.print(one_line(f"{pair.key}: {pair.a!r} → {pair.b!r}", 400), soft_wrap=True)


def _verdict(result: RunDiff) -> str:
    """Describes the difference and its test."""
    test = result.test
    if test is None:
        return "They share no task with a reward in both, so their rewards cannot be compared."
    better = sum(task.change > 0 for task in result.tasks)
    worse = sum(task.change < 0 for task in result.tasks)
    tasks = "1 task" if test.n == 1 else f"{test.n:,} tasks"
    counts = f"{better} better, {worse} worse, {test.n - better - worse} equal"
    head = f"B - A by task: {test.mean:+.4g} over {tasks} ({counts})."
    if test.p is None:
        return (
            f"{head} Not conclusive: at least 6 tasks are needed (smallest possible p here:"
            f" {test.smallest_p:.2g})."
        )
    return f"{head} {_claim(test)}"


def _claim(test: Paired) -> str:
    if test.exact:
        how = "all sign combinations"
    else:
        how = "20,000 random sign combinations"
    level = f"{100 * (test.level or 0):.1f} %"
    return (
        f"{level} interval {test.low:+.4g} to {test.high:+.4g}, p = {test.p:.3g} "
        f"(sign-flip permutation test of the mean, paired by task, {how})."
    )
