"""`ajet trace export`: chosen episodes, in a format."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ajet_sdk.engines.client import ModelClient
from ajet_sdk.errors import ConfigError
from ajet_sdk.protocols import TraceReader
from ajet_sdk.reporting.output import ProgressBar
from ajet_tools.cli.model_option import CONCURRENCY, parse_budget
from ajet_tools.cli.result import TextResult
from ajet_tools.dataset.files.writer import Writer
from ajet_tools.dataset.from_traces.choice import Choice, Split
from ajet_tools.dataset.from_traces.export import OF_MESSAGES, Format, Options, TraceExport
from ajet_tools.dataset.from_traces.export import export as export_trace
from ajet_tools.dataset.from_traces.grader import EpisodeGrader, read_rubric
from ajet_tools.dataset.from_traces.sources import opened_sources
from ajet_tools.dataset.model.open import ModelSpec
from ajet_tools.text.clean import counted
from ajet_tools.trace.queries.base import find

_PATHS = (
    "ajet traces (files, directories, live runs), AgentScope Studio databases, OTLP or OpenAI logs;"
    " - is stdin. Default: all traces in or below the current directory. A run by its id or name, or"
    " episodes by their ids: only those of the traces."
)
_FORMAT = (
    "tasks (for RL), messages, sharegpt or trl-prompt (for SFT), preferences (pairs), tokens, otlp,"
    " native or html."
)
_MODEL = (
    "The model that grades: NAME@URL (an OpenAI-compatible endpoint; its key is OPENAI_API_KEY), NAME"
    " at OPENAI_BASE_URL, PATH (a checkpoint), or FILE.py:NAME (a function that replies); after commas"
    " price=IN/OUT of a million tokens, key=VARIABLE, concurrency=N, rpm=N, retries=N."
)
_FILES = (".duckdb", ".json", ".jsonl", ".gz", ".parquet", ".sqlite")
"""Suffixes of inputs: a missing file of one isn't taken for the name of a run."""
_OF_FORMAT: dict[str, tuple[Format, ...]] = {
    "--accept-outputs": ("tasks",),
    "--need-answer": ("tasks",),
    "--margin": ("preferences",),
    "--picture-files": OF_MESSAGES,
}
"""Options that have a meaning for these formats only."""


@dataclass(frozen=True)
class ChoiceOptions:
    """Options to choose episodes.

    Args:
        filter: Only episodes that match, as in `ajet trace ls`.
        split: Only these episodes. Default: all but trial.
        feedback: Only episodes with this feedback; repeatable.
        failed: Only failed tasks, the most frequent first.
        include_validation: Also use validation tasks and tasks that nearly repeat one.
        include_failures: Also cut replies and episodes that earned nothing, as of an episode that is named.
    """

    filter: Annotated[str, Option("--filter", "-f", metavar="EXPR")] = ""
    split: Split | None = None
    feedback: Annotated[list[str] | None, Option(metavar="up|down|corrected")] = None
    failed: Annotated[bool, Option("--failed")] = False
    include_validation: Annotated[bool, Option("--include-validation")] = False
    include_failures: Annotated[bool, Option("--include-failures")] = False

    def choice(self, reader: TraceReader, names: Sequence[str]) -> Choice:
        """Returns the choice of these runs and episodes, by id or name."""
        found = [find(reader, name) for name in names]
        runs = [named.id for named in found if named.kind == "run"]
        if len(runs) > 1 or any(named.kind == "call" for named in found):
            raise ConfigError(f"name one run, or episodes (got {', '.join(names)})")
        return Choice(
            filter=self.filter,
            feedback=tuple(self.feedback or ()),
            failures=self.failed,
            run=runs[0] if runs else None,
            split=self.split,
            episodes=[named.id for named in found if named.kind == "episode"],
            include_validation=self.include_validation,
            include_failures=self.include_failures,
        )


@dataclass(frozen=True)
class ConversionOptions:
    """Options to convert episodes to rows.

    Args:
        accept_outputs: tasks: use an output with a thumb up as the answer.
        need_answer: tasks: reject those without an answer.
        margin: preferences: minimum difference between the rewards of a pair.
        redact: Replace secrets, personal data and pictures with placeholders.
        keep_pictures: Redact texts only: nothing looks for faces or texts in pictures.
        picture_files: Rows: write pictures as files into OUT.pictures/, and their names in place of data URLs.
    """

    accept_outputs: Annotated[bool, Option("--accept-outputs")] = False
    need_answer: Annotated[bool, Option("--need-answer")] = False
    margin: Annotated[float, Option(min=0)] = 0.0
    redact: Annotated[bool, Option("--redact/--no-redact")] = True
    keep_pictures: Annotated[bool, Option("--keep-pictures")] = False
    picture_files: Annotated[bool, Option("--picture-files")] = False

    def options(self, format: Format) -> Options:
        given = {
            "--accept-outputs": self.accept_outputs,
            "--need-answer": self.need_answer,
            "--margin": self.margin > 0,
            "--picture-files": self.picture_files,
        }
        for option, is_given in given.items():
            if is_given and format not in _OF_FORMAT[option]:
                formats = ", ".join(_OF_FORMAT[option])
                raise ConfigError(f"{option} is for --format {formats} (got {format})")
        if self.picture_files and self.redact and not self.keep_pictures:
            raise ConfigError("--picture-files needs --keep-pictures, or --no-redact")
        return Options(
            redact=self.redact,
            keep_pictures=self.keep_pictures,
            picture_files=self.picture_files,
            need_answer=self.need_answer,
            accept_outputs=self.accept_outputs,
            margin=self.margin,
        )


@dataclass(frozen=True)
class ExportResult(TextResult):
    done: TraceExport
    redacts: bool
    failures: bool
    """Whether only failures were exported."""

    beside_rows = True

    @property
    def exit_code(self) -> int:
        return int(self.done.stopped is not None)

    @property
    def compact(self) -> bool:
        return self.done.path == "-"

    def document(self) -> object:
        return self.done

    def lines(self) -> Iterator[str]:
        return _lines(self.done, redact=self.redacts, failures=self.failures)


def export(
    paths: Annotated[
        list[str] | None, Argument(metavar="[PATH]...", help=_PATHS, show_default=False)
    ] = None,
    *,
    format: Annotated[Format, Option(help=_FORMAT)] = "messages",
    out: Annotated[str, Option("--out", "-o", metavar="FILE|-")] = "-",
    choosing: ChoiceOptions,
    converting: ConversionOptions,
    rubric: Annotated[
        str | None, Option(metavar="FILE|TEXT", help="Let --model grade episodes by this rubric.")
    ] = None,
    model: Annotated[
        str | None, Option(metavar="NAME@URL|PATH|FILE:NAME", envvar="OPENAI_MODEL", help=_MODEL)
    ] = None,
    budget: Annotated[
        str | None,
        Option(
            metavar="KEY=N,...",
            help="Stop before more than this is spent: calls=500,tokens=2000000,usd=5.",
        ),
    ] = None,
) -> ExportResult:
    """Export episodes as a dataset, a token table, OpenTelemetry, ajet's own JSON lines, or an HTML
    page.

    Secrets, personal data and pictures are replaced and counted (--no-redact keeps them); a reply that had
    any is not learned. Formats to train on leave out validation tasks, and tasks that nearly repeat
    one. Conversations also leave out replies that were cut at their limit, failures, what people
    disliked, and episodes that earned nothing: a reward of 0 or less (without any above 0, the
    lowest), or none in a run that has rewards. A person's correction takes the place of a reply, and
    is the answer of a task. All that is left out is counted. Files are written whole or not at all.

    Args:
        out: Output file; - is stdout. Rows: .jsonl, .jsonl.gz, .parquet or .csv; no suffix makes a Hugging Face
            directory. Rejected rows go to OUT.rejected.jsonl, with the reason.

    \b
    ajet trace export --format messages --out chats.jsonl
    ajet trace export launcher_record/math --format preferences \\
      --filter "step>10" --margin 0.5 --out pairs.jsonl
    ajet trace export --format tokens --split train --out tokens.parquet
    ajet trace export 3f2a91 --format html --out episode.html
    ajet trace export --format native --no-redact -o - | gzip > all.jsonl.gz

    Data from a deployed agent and its users' feedback:

    \b
    ajet trace export traces/ --format tasks --feedback corrected -o tasks.jsonl
    ajet trace export traces/ --format messages --feedback up -o sft.parquet
    ajet trace export ~/AgentScope-Studio/database.sqlite logs.jsonl \\
      --rubric "The answer is polite and cites a source." \\
      --model NAME@http://127.0.0.1:8000/v1 --format tasks -o tasks.jsonl
    ajet trace export traces/ --format tasks --failed --out seeds.jsonl
    ajet dataset expand seeds.jsonl --count 500 --out data/
    """
    grader = None
    if rubric is not None:
        words = read_rubric(rubric)
        cache = (Path(out).parent if out != "-" else Path()) / ".ajet-replies.sqlite"
        grader = EpisodeGrader(_opened(model, budget, cache), words)
    names = [text for text in paths or () if _is_name(text)]
    files = [text for text in paths or () if not _is_name(text)]
    with opened_sources(files) as sources, ProgressBar("reading episodes") as bar:
        done = export_trace(
            sources,
            format,
            out,
            choosing.choice(sources.reader, names),
            converting.options(format),
            grader=grader,
            progress=lambda what, count, of: bar.show(f"{what} episodes", count, of),
        )
        _write_rejected(done)
    return ExportResult(done, redacts=converting.redact, failures=choosing.failed)


def _opened(model: str | None, budget: str | None, cache: Path) -> ModelClient:
    if not model:
        raise ConfigError("no model given: pass --model NAME@URL, --model PATH or FILE.py:NAME")
    spec = ModelSpec.parse(model, "--model")
    return spec.open(
        os.environ.get("OPENAI_BASE_URL", ""),
        concurrency=CONCURRENCY,
        cache=cache,
        budget=parse_budget(budget, spec),
    )


def _is_name(text: str) -> bool:
    """Whether an argument that is no path names a run or an episode, and no missing file."""
    path = Path(text)
    return text == path.name != "-" and path.suffix not in _FILES and not path.exists()


def _write_rejected(done: TraceExport) -> None:
    if done.path == "-" or not done.rejected_rows:
        return
    out = Path(done.path)
    stem = Path(out.name.removesuffix(".gz")).stem
    done.rejected_path = str(out.with_name(f"{stem}.rejected.jsonl"))
    with Writer(done.rejected_path) as writer:
        for row in done.rejected_rows:
            writer.write(row)


_NOUNS = {"tasks": "task", "preferences": "pair", "tokens": "timeline", "otlp": "span"}
_ANSWERS = {
    "correction": "corrected by people",
    "task": "from the trace",
    "output": "from a liked output",
    "wording": "in the words of a liked output",
    "none": "without one",
}


def _lines(done: TraceExport, *, redact: bool, failures: bool) -> Iterator[str]:
    into = "" if done.path == "-" else f" into {done.path}"
    rows = f"{counted(done.rows, 'row')} of {done.format}"
    if done.format in _NOUNS:
        rows = counted(done.rows, _NOUNS[done.format])
    yield f"{rows}{into}, from {done.chosen:,} of {counted(done.of, 'episode')}"
    for file, format in done.imported.items():
        yield f"  read {file} as {format}"
    if done.bad_rows:
        bad_rows = counted(done.bad_rows, "bad row")
        yield f"  skipped: {bad_rows}, the first: {done.first_bad_row}"
    if done.answers:
        origins = (f"{n:,} {_ANSWERS[origin]}" for origin, n in done.answers.most_common())
        yield f"  answers: {', '.join(origins)}"
    if done.graded:
        yield f"  graded by the rubric: {counted(done.graded, 'episode')}"
    if done.usage:
        cost = ""
        if done.usage["cost"] is not None:
            cost = f", {done.usage['cost']:.4f} in money"
        tokens = done.usage["input_tokens"] + done.usage["output_tokens"]
        yield f"  asked the model: {counted(done.usage['calls'], 'call')}, {tokens:,} tokens{cost}"
    if done.stopped:
        yield f"  stopped asking: {done.stopped}"
    if done.duplicates:
        yield f"  duplicates: {done.duplicates:,}"
    for reason, count in sorted(done.left_out.items()):
        yield f"  left out: {count:,} {reason}"
    for reason, count in sorted(done.rejected.items()):
        yield f"  rejected: {count:,}: {reason}"
    if done.rejected_path:
        yield f"  rejected rows are in {done.rejected_path}"
    yield f"  {_redaction(done, redact)}"
    if failures and done.path != "-":
        yield (
            f"To generate more like these: ajet dataset expand {done.path} --count 500 --out data/"
        )


def _redaction(done: TraceExport, redact: bool) -> str:
    if not redact:
        return "not redacted: it may contain secrets and personal data"
    kinds = ", ".join(f"{n:,} {kind}" for kind, n in done.redacted.most_common())
    hint = ""
    if done.redacted["picture"]:
        hint = " (--keep-pictures keeps them)"
    found = f"{kinds or 'nothing found'}{hint}"
    return f"redacted: {found}; names and addresses in prose are not detected"
