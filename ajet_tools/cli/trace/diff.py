"""`ajet trace compare A B`: compares two episodes or two runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from ajet_sdk.errors import QueryError
from ajet_sdk.reporting.output import visible
from ajet_sdk.reporting.paired import Paired
from ajet_sdk.types import Episode
from ajet_tools.cli.options import pick
from ajet_tools.cli.result import Result
from ajet_tools.text import tables as render
from ajet_tools.text.clean import one_line
from ajet_tools.text.tables import diff_text
from ajet_tools.trace import queries
from ajet_tools.trace.compare.attempts import ComparedMessage
from ajet_tools.trace.compare.changes import finding_lines
from ajet_tools.trace.compare.diff import (
    At,
    DiffPart,
    EpisodeDiff,
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
_MESSAGES = 3
_LINES = 24


@dataclass(frozen=True)
class EpisodePairResult(Result):
    episodes: EpisodeDiff

    def document(self) -> object:
        return _episodes_json(self.episodes)

    def show(self, out: Console) -> None:
        _print_episodes(self.episodes, out)


@dataclass(frozen=True)
class RunPairResult(Result):
    runs: RunDiff

    def document(self) -> object:
        return _runs_json(self.runs)

    def show(self, out: Console) -> None:
        _print_runs(self.runs, out)


def compare_two(
    a: str,
    b: str,
    path: Path | None,
    path_b: Path | None,
    split: Split | None,
    decoding: Decoding | None,
) -> EpisodePairResult | RunPairResult:
    """Compares two episodes message by message, or two runs or steps by their rewards on shared
    tasks."""
    with ExitStack() as stack:
        (a, step_a) = _step_of(a)
        (b, step_b) = _step_of(b)
        named = _open_both(a, b, path, path_b)
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


def _open_both(a: str, b: str, path: Path | None, path_b: Path | None) -> tuple[Named, Named]:
    """Open what two names stand for; a trace that has both is opened once."""
    first = open_named(a or None, path)
    if path_b in (None, path) and first.id is not None and b and not Path(b).exists():
        return first, Named(first.reader, first.where, b)
    return first, open_named(b or None, path_b or path)


_STEP = re.compile(r"@(\d{1,9}|last)$")


def _step_of(name: str) -> tuple[str, At]:
    """Splits `NAME@STEP`."""
    match = None if Path(name).exists() else _STEP.search(name)
    if match is None:
        return name, None
    return name[: match.start()], "last" if match[1] == "last" else int(match[1])


def _episodes_json(result: EpisodeDiff) -> dict[str, object]:
    first = result.first_difference
    return {
        "a": _facts(result.a),
        "b": _facts(result.b),
        "same_messages": result.same_messages,
        "first_difference": None if first is None else {"a": first.a, "b": first.b},
        "parts": [
            {"same": part.same, "a": part.a, "b": [] if part.same else part.b}
            for part in result.parts
        ],
        "rewards": result.rewards(),
        "shared_tokens": result.shared_tokens,
        "other_settings": result.other_settings,
    }


def _facts(episode: Episode) -> dict[str, object]:
    calls = [call for call in episode.calls if call.phase == "rollout"]
    prompts = [len(call.prompt_ids) for call in calls if call.prompt_ids is not None]
    outputs = [len(call.output_ids) for call in calls if call.output_ids is not None]
    return {
        **pick(episode, "episode_id", "run_id"),
        "task_id": episode.task.task_id,
        **pick(episode, "attempt", "step", "split", "decoding", "status", "cause", "reward"),
        "calls": len(calls),
        "agents": len({call.agent for call in calls}),
        "longest_prompt": max(prompts, default=None),
        "sampled_tokens": sum(outputs) if outputs else None,
        "seconds": round((episode.ended_at - episode.started_at).total_seconds(), 3),
        "output": episode.output,
    }


def _print_episodes(result: EpisodeDiff, out: Console) -> None:
    sides = _facts(result.a), _facts(result.b)
    rows = [
        {"": name, "A": _cell(sides[0][name]), "B": _cell(sides[1][name])}
        for name in sides[0]
        if sides[0][name] is not None or sides[1][name] is not None
    ]
    rows += [
        {"": f"reward {one_line(r['reward'])}", "A": _cell(r["a"]), "B": _cell(r["b"])}
        for r in result.rewards()
    ]
    out.print(render.table(rows, out.width))
    out.print()
    if result.other_settings:
        out.print(
            f"The first requests differ in {', '.join(map(one_line, result.other_settings))}."
        )
    if result.shared_tokens is not None:
        if "tools" in result.other_settings:
            rendered = " (what is no message is rendered, too)"
        else:
            rendered = ""
        tokens = render.counted(result.shared_tokens, "token")
        out.print(f"Identical start of their first timelines: {tokens}{rendered}")
    first = result.first_difference
    if first is None:
        out.print(f"Identical messages: all {result.same_messages:,}.")
        return
    before = sum(len(part.a) for part in result.parts[: result.parts.index(first)])
    out.print(f"First difference of the messages after {render.counted(before, 'message')}:")
    _print_apart(first, out)
    apart = sum(not part.same for part in result.parts)
    if apart > 1:
        out.print(f"{apart - 1} further messages differ; --json has all.", style="dim")


def _print_apart(part: DiffPart, out: Console) -> None:
    """Prints replaced messages; if both start with the same role, the first as a line diff."""
    a = part.a[:1]
    b = part.b[:1]
    if not a or not b or (a[0].agent, a[0].role) != (b[0].agent, b[0].role):
        _print_messages(part.a, "-", "red", out)
        _print_messages(part.b, "+", "green", out)
        return
    agent = "" if a[0].agent == "default" else f" ({a[0].agent})"
    out.print(one_line(f"{a[0].role}{agent}"), style="bold")
    out.print(diff_text(text_diff(a[0].text, b[0].text)))
    more = [
        f"{render.counted(len(messages) - 1, 'more message')} {of}"
        for messages, of in ((part.a, "in A"), (part.b, "in B"))
    ]
    if len(part.a) > 1 or len(part.b) > 1:
        out.print(f"… and {' and '.join(more)} replaced by each other", style="dim")


def _cell(value: object) -> str | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return render.number(value)
    return None if value is None else one_line(value, 60)


def _print_messages(
    messages: Sequence[ComparedMessage], sign: str, style: str, out: Console
) -> None:
    for entry in messages[:_MESSAGES]:
        agent = "" if entry.agent == "default" else f" ({entry.agent})"
        out.print(one_line(f"{sign} {entry.role}{agent}"), style=f"bold {style}")
        lines = entry.text.splitlines() or ["(empty)"]
        for line in lines[:_LINES]:
            out.print(f"{sign}   {visible(line[:2000])}", style=style)
        if len(lines) > _LINES:
            out.print(f"{sign}   … and {len(lines) - _LINES} more lines", style="dim")
    if len(messages) > _MESSAGES:
        out.print(
            f"{sign} … and {render.counted(len(messages) - _MESSAGES, 'more message')}", style="dim"
        )
    if not messages:
        out.print(f"{sign} (nothing)", style="dim")


def _runs_json(result: RunDiff) -> dict[str, object]:
    return {
        "a": _side_json(result.a),
        "b": _side_json(result.b),
        "tasks": [
            {"task_id": task_id, "a": before, "b": after, "change": after - before}
            for task_id, before, after in result.tasks
        ],
        "tasks_only_in_a": result.only_a,
        "tasks_only_in_b": result.only_b,
        "test": (
            None
            if result.test is None
            else {
                "name": "sign-flip permutation test of the mean, paired by task",
                **asdict(result.test),
            }
        ),
        "changes": result.changes,
        "config": [{"key": key, "a": before, "b": after} for key, before, after in result.config],
    }


def _side_json(side: RunSide) -> dict[str, object]:
    return {
        **pick(side, "run_id", "split", "step", "decoding"),
        "episodes": len(side.facts),
        "reward": side.mean("reward"),
        "solved": side.solved,
        "calls": side.mean("calls"),
        "sampled_tokens": side.mean("tokens"),
        "seconds": side.mean("seconds"),
        "failures": dict(side.failures),
    }


def _print_runs(result: RunDiff, out: Console) -> None:
    a = _side_json(result.a)
    b = _side_json(result.b)
    names = {
        "reward": "mean reward",
        "calls": "calls per episode",
        "sampled_tokens": "sampled tokens per episode",
    }
    names["reward"] += (
        f" ({result.a.of})" if result.a.of == result.b.of else f" ({result.a.of}; {result.b.of})"
    )
    names["seconds"] = "seconds per episode"
    rows = [
        {"": names.get(name, name), "A": _cell(a[name]), "B": _cell(b[name])}
        for name in a
        if name != "failures"
    ]
    failures = result.a.failures, result.b.failures
    for cause in sorted({*failures[0], *failures[1]}):
        counts = [str(side[cause]) for side in failures]
        rows.append({"": one_line(f"failed: {cause}"), "A": counts[0], "B": counts[1]})
    out.print(render.table(rows, out.width))
    out.print(f"\n{_verdict(result)}", soft_wrap=True)
    if result.only_a or result.only_b:
        out.print(
            f"Not paired: {result.only_a} tasks only in A, {result.only_b} only in B", style="dim"
        )
    if result.changes:
        out.print("\nlargest changes of tasks, and of behaviour", style="italic")
    for line in finding_lines(result.changes):
        out.print(line, soft_wrap=True)
    if result.config:
        out.print("\nconfig differences", style="italic")
    for key, before, after in result.config:
        out.print(one_line(f"{key}: {before!r} → {after!r}", 400), soft_wrap=True)


def _verdict(result: RunDiff) -> str:
    """Describes the difference and its test."""
    test = result.test
    if test is None:
        return "They share no task with a reward in both, so their rewards cannot be compared."
    better = sum(after > before for _, before, after in result.tasks)
    worse = sum(after < before for _, before, after in result.tasks)
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
