"""`ajet dataset from-traces`: builds a dataset from episodes of a deployed agent and their
feedback."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from ajet_sdk.reporting.output import ProgressBar
from ajet_tools.cli.dataset.generation import ModelOptions
from ajet_tools.cli.dataset.options import (
    Out,
    SkipBad,
    check_apart,
    counted,
    print_summary,
    write_report,
)
from ajet_tools.cli.options import AsJson, IncludeValidation
from ajet_tools.dataset.from_traces import run as loop
from ajet_tools.dataset.from_traces.choice import Choice, Split
from ajet_tools.dataset.from_traces.grader import EpisodeGrader, read_rubric
from ajet_tools.dataset.from_traces.run import Kind, Options, TraceRun
from ajet_tools.dataset.from_traces.sources import Sources, opened_sources
from ajet_tools.trace.imports import format_of

_PATHS = (
    "ajet traces (files, directories, live runs), AgentScope Studio databases, OTLP or OpenAI logs;"
    " - is stdin. Default: the newest trace in or below the current directory."
)
_TO = "Rows to make: tasks (for RL), messages (for SFT), preferences (pairs) or tokens."
_FROM = (
    "Format of inputs that are not ajet traces: auto, openai, otlp, studio, tokens or another of"
    " `ajet trace import`."
)


@dataclass(frozen=True)
class ChoiceOptions:
    """Options to choose episodes."""

    filter: Annotated[
        str,
        Option(
            "--filter",
            "-f",
            metavar="EXPR",
            help="Only episodes that match, as in `ajet trace ls`.",
        ),
    ] = ""
    feedback: Annotated[
        list[str] | None,
        Option(metavar="up|down|corrected", help="Only episodes with this feedback; repeatable."),
    ] = None
    failed: Annotated[
        bool, Option("--failed", help="Only failed tasks, the most frequent first.")
    ] = False
    below: Annotated[float, Option(help="--failed: rewards below this count as failures.")] = 0.5
    rubric: Annotated[
        str | None, Option(metavar="FILE|TEXT", help="Let a model grade episodes by this rubric.")
    ] = None
    min_score: Annotated[
        float, Option(min=0, max=1, help="--rubric: minimum score of a good episode.")
    ] = 0.5
    run: Annotated[str | None, Option(metavar="ID", help="Only this run. Default: all.")] = None
    split: Annotated[Split | None, Option(help="Only these. Default: all but trial.")] = None
    include_validation: IncludeValidation = False

    def choice(self) -> Choice:
        feedback, validation = tuple(self.feedback or ()), self.include_validation
        return Choice(
            self.filter, feedback, self.failed, self.below, self.run, self.split, validation
        )

    def grader(self, asking: ModelOptions, out: str, values: bool) -> EpisodeGrader | None:
        """Returns a grader by rubric or for values; its replies are cached beside `out`."""
        if self.rubric is None and not values:
            return None
        words = read_rubric(self.rubric) if self.rubric is not None else None
        beside = Path(out).parent if out != "-" else Path()
        return EpisodeGrader(
            asking.endpoint(beside / ".ajet-replies.sqlite"), words, self.min_score, values=values
        )


@dataclass(frozen=True)
class ConversionOptions:
    """Options to convert episodes to rows.

    Args:
        accept_outputs: Tasks: use an output with a thumb up as the answer.
        read_values: Tasks: as --accept-outputs; where no rule finds an output's value, the model does, asked twice.
        redact: Replace secrets and personal data with placeholders.
    """

    accept_outputs: Annotated[bool, Option("--accept-outputs")] = False
    read_values: Annotated[bool, Option("--read-values")] = False
    need_answer: Annotated[
        bool, Option("--need-answer", help="Tasks: reject those without an answer.")
    ] = False
    per_task: Annotated[
        int, Option(min=0, help="Messages: the best N episodes per task; 0 for all.")
    ] = 1
    margin: Annotated[
        float, Option(min=0, help="Preferences: minimum difference between the rewards of a pair.")
    ] = 0.0
    redact: Annotated[bool, Option("--redact/--no-redact")] = True

    def options(self) -> Options:
        accept_outputs = self.accept_outputs or self.read_values
        return Options(self.redact, self.need_answer, accept_outputs, self.per_task, self.margin)


def from_traces(
    paths: Annotated[
        list[str] | None, Argument(metavar="[PATH]...", help=_PATHS, show_default=False)
    ] = None,
    *,
    to: Annotated[Kind, Option(help=_TO)] = "tasks",
    out: Out = "-",
    choosing: ChoiceOptions,
    asking: ModelOptions,
    turning: ConversionOptions,
    rejected: Annotated[
        Path | None, Option(help="File for rejected tasks.", show_default="OUT.rejected.jsonl")
    ] = None,
    source: Annotated[str, Option("--from", metavar="FORMAT", help=_FROM)] = "auto",
    skip_bad_rows: SkipBad = False,
    as_json: AsJson = False,
) -> None:
    """Build a dataset from a deployed agent's traces and users' feedback.

    A task has its system prompt and history in init_messages, and in metadata.answer the answer: a
    person's correction, else the one that the trace has. The same task is one row. Secrets and
    personal data are replaced and counted. Validation tasks, and tasks that nearly repeat one, are
    left out and counted.

    \b
    ajet dataset from-traces traces/ --feedback corrected --out tasks.jsonl
    ajet dataset from-traces traces/ --accept-outputs --need-answer -o tasks.jsonl
    ajet dataset from-traces traces/ --read-values --model NAME -o tasks.jsonl
    ajet dataset from-traces traces/ --to messages --feedback up -o sft.parquet
    ajet dataset from-traces traces/ --to preferences --margin 0.3 -o pairs.jsonl
    ajet dataset from-traces ~/AgentScope-Studio/database.sqlite logs.jsonl \\
      --rubric "The answer is polite and cites a source." --model NAME -o tasks.jsonl

    What the policy fails at, and more of its kind:

    \b
    ajet dataset from-traces traces/ --failed --out seeds.jsonl
    ajet dataset expand seeds.jsonl --count 500 --out data/
    """
    format = format_of(source)
    check_apart(out=out, rejected=rejected)
    choice, grader = choosing.choice(), choosing.grader(asking, out, turning.read_values)
    with ExitStack() as stack:
        sources = stack.enter_context(
            opened_sources(paths or (), format, skip_bad_rows=skip_bad_rows)
        )
        bar = stack.enter_context(ProgressBar("reading episodes"))
        run = loop.from_traces(
            sources,
            to,
            out,
            choice,
            turning.options(),
            grader=grader,
            progress=lambda what, done, of: bar.show(f"{what} episodes", done, of),
        )
        apart = _write_rejected(run, out, rejected)
        lines = _lines(run, sources, out, apart, turning.redact, choosing.failed)
        print_summary(_summary(run, sources, out, apart), lines, as_json=as_json, out=out)
    if run.stopped:
        raise typer.Exit(1)


def _write_rejected(run: TraceRun, out: str, rejected: Path | None) -> Path | None:
    if rejected is None and out != "-":
        name = Path(out).name.removesuffix(".gz")
        rejected = Path(out).with_name(f"{Path(name).stem}.rejected.jsonl")
    if rejected is None or not run.rejected:
        return None
    write_report(str(rejected), iter(run.rejected))
    return rejected


def _summary(run: TraceRun, sources: Sources, out: str, apart: Path | None) -> dict[str, object]:
    values = {name: value for name, value in vars(run).items() if name != "rejected"}
    return {
        **{
            name: dict(value) if isinstance(value, dict) else value
            for name, value in values.items()
        },
        "left_out": {reason: n for reason, n in run.left_out.items() if n},
        "out": out,
        "rejected": _by_reason(run),
        "rejected_path": str(apart) if apart else None,
        "sources": list(sources.names),
        "imported": sources.formats,
        "bad_rows": sources.imported.bad_rows if sources.imported else 0,
    }


def _by_reason(run: TraceRun) -> dict[str, int]:
    return Counter(
        "rejected by the rubric" if "verdict" in row else str(row["reason"]) for row in run.rejected
    )


def _lines(
    run: TraceRun, sources: Sources, out: str, apart: Path | None, redact: bool, failures: bool
) -> Iterator[str]:
    noun = {
        "tasks": "task",
        "messages": "conversation",
        "preferences": "pair",
        "tokens": "timeline",
    }[run.to]
    into = "" if out == "-" else f" into {out}"
    yield f"{counted(run.rows, noun)}{into}, from {run.chosen:,} of {counted(run.of, 'episode')}"
    for file, format in sources.formats.items():
        yield f"  read {file} as {format}"
    if sources.imported and sources.imported.bad_rows:
        yield (
            f"  skipped: {counted(sources.imported.bad_rows, 'bad row')}, the first:"
            f" {sources.imported.problems[0]}"
        )
    if run.to == "tasks":
        yield (
            "  answers:"
            f" {', '.join(f'{n:,} {_ANSWERS[of]}' for of, n in run.answers.most_common())}"
        )
    if run.graded:
        yield f"  graded by the rubric: {counted(run.graded, 'episode')}"
    if run.usage:
        cost = "" if run.usage["cost"] is None else f", {run.usage['cost']:.4f} in money"
        tokens = run.usage["input_tokens"] + run.usage["output_tokens"]
        yield f"  asked the model: {counted(run.usage['calls'], 'call')}, {tokens:,} tokens{cost}"
    if run.stopped:
        yield f"  stopped asking: {run.stopped}"
    if run.duplicates:
        yield f"  duplicates: {run.duplicates:,}"
    for reason, count in sorted(run.left_out.items()):
        if count:
            yield f"  left out: {count:,} {reason}"
    for reason, count in sorted(_by_reason(run).items()):
        yield f"  rejected: {count:,}: {reason}"
    if apart:
        yield f"  rejected tasks are in {apart}"
    yield f"  {_redaction(run, redact)}"
    if failures and out != "-":
        yield f"To generate more like these: ajet dataset expand {out} --count 500 --out data/"


_ANSWERS = {
    "correction": "corrected by people",
    "task": "from the trace",
    "output": "from a liked output",
    "model": "read from a liked output by the model",
    "wording": "in the words of a liked output",
    "none": "without one",
}


def _redaction(run: TraceRun, redact: bool) -> str:
    if not redact:
        return "not redacted: it may contain secrets and personal data"
    if not run.redacted:
        return "redacted: nothing found; names and addresses in prose are not detected"
    kinds = ", ".join(f"{n:,} {kind}" for kind, n in run.redacted.most_common())
    return f"redacted: {kinds}; names and addresses in prose are not detected"
