"""`ajet dataset expand` and `ajet dataset from-docs`: generate rows from examples or documents."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text
from typer import Argument, Option

from ajet_sdk.engines.budget import Budget
from ajet_sdk.engines.client import ModelClient
from ajet_sdk.errors import ConfigError
from ajet_sdk.learn.recipe import with_model
from ajet_sdk.reporting import output
from ajet_sdk.reporting.output import ProgressBar, echo
from ajet_sdk.run import open_run
from ajet_tools.cli.arguments import JUDGE_HELP, AgentOptions
from ajet_tools.cli.dataset.generation import (
    ModelOptions,
    OutputOptions,
    Temperature,
    VerifyHow,
    VerifyOptions,
    confirm,
    show_prompts,
)
from ajet_tools.cli.dataset.options import SOURCE_HELP, counted
from ajet_tools.cli.options import AsJson, pick, print_json
from ajet_tools.dataset.calibrate import Band, Measurements, conditions, task_of_row
from ajet_tools.dataset.documents.corpus import Corpus
from ajet_tools.dataset.files.blocks import Row
from ajet_tools.dataset.from_traces.choice import Choice
from ajet_tools.dataset.from_traces.export import Options, task_rows
from ajet_tools.dataset.from_traces.sources import opened_sources
from ajet_tools.dataset.generate.coverage import cells_of
from ajet_tools.dataset.generate.examples import select_seeds
from ajet_tools.dataset.generate.expand import Expansion
from ajet_tools.dataset.generate.from_docs import FromDocs
from ajet_tools.dataset.generate.learning import LearningValue
from ajet_tools.dataset.generate.loop import Generation
from ajet_tools.dataset.generate.output import Directory
from ajet_tools.dataset.generate.records import (
    DocsConfig,
    GenerationConfig,
    GenerationResult,
    Interrupted,
    strategies_of,
)
from ajet_tools.dataset.generate.runs import GenerationRun, grow, make_tasks, read_corpus
from ajet_tools.dataset.labels import error_lines, errors_of
from ajet_tools.dataset.similarity.decontaminate import Leaks
from ajet_tools.dataset.similarity.held_out import leaks_of, validation_tasks


@dataclass(frozen=True)
class LearningOptions:
    """The policy that will learn from the rows, and how its pass rate is measured.

    Args:
        policy: Keep only tasks that this model solves sometimes: a directory, NAME@URL or scripted:FILE:NAME.
        workflow: --for: the agent that tries the tasks, agent.py:solve.
        conf: --for: a job's config that names agent, judge and sampling.
        band: --for: range of the pass rate; both ends are kept.
    """

    policy: Annotated[str | None, Option("--for", metavar="CHECKPOINT")] = None
    workflow: Annotated[str | None, Option("--workflow", "-w", metavar="AGENT")] = None
    judge: Annotated[str | None, Option(help=f"--for: {JUDGE_HELP}")] = None
    conf: Annotated[Path | None, Option("--conf", "-c")] = None
    k: Annotated[
        int, Option("--attempts", "-k", min=1, max=1000, help="--for: attempts per task.")
    ] = 8
    band: Annotated[str, Option(metavar="LOW:HIGH")] = "0.2:0.8"

    @contextmanager
    def value(self, rows: list[Row], directory: Directory) -> Iterator[LearningValue | None]:
        """Returns the trial of rows by a policy, or None without a policy. Raises ConfigError."""
        if self.policy is None:
            if policy_options := [
                name for name in ("workflow", "judge", "conf") if getattr(self, name) is not None
            ]:
                raise ConfigError(
                    f"--{policy_options[0]} configures the policy of --for; add --for"
                )
            yield None
            return
        if self.workflow is None and self.conf is None:
            raise ConfigError(
                "--for needs an agent: pass --workflow agent.py:solve, or --conf FILE"
            )
        config = AgentOptions(
            conf=self.conf,
            judge=self.judge,
            model=self.policy.removeprefix("scripted:"),
            exp_dir=directory.own,
        ).config(self.workflow, more={"experiment_name": "trials"})
        config = asyncio.run(with_model(config))
        tasks = [task_of_row(row.where, row.values) for row in rows]
        with open_run(config, tasks=tasks) as opened:
            known = Measurements(directory.own / "measured.jsonl", conditions(config, self.k))
            room = max(1, config.rollout.max_env_worker // self.k)
            seed = config.trainer_common.seed if config.is_seeded else None
            yield LearningValue(
                opened, self.policy, known, self.k, Band.parse(self.band), seed, room
            )


def expand(
    seeds: Annotated[
        str | None, Argument(metavar="[FILE]", help=SOURCE_HELP, show_default=False)
    ] = None,
    *,
    from_failures: Annotated[Path | None, Option(metavar="TRACE")] = None,
    count: Annotated[int, Option(min=1, help="Number of rows to generate. ")] = 100,
    writing: OutputOptions,
    strategy: Annotated[list[str] | None, Option(metavar="NAME[=WEIGHT]")] = None,
    cells: Annotated[list[str] | None, Option(metavar="AXIS=A,B|AXIS=FILE|FILE|none")] = None,
    verify: VerifyHow = "agreement:3",
    verifying: VerifyOptions,
    learning: LearningOptions,
    temperature: Temperature = GenerationConfig.temperature,
    asking: ModelOptions,
    as_json: AsJson = False,
) -> None:
    """Grow a dataset from a few examples: more tasks like them, with verified answers and without
    duplicates.

    Writes train.jsonl, validation.jsonl, rejected.jsonl (with reasons) and a dataset card to --out.
    Exits with 1 if there are fewer rows than requested, 130 after Ctrl-C and 143 after SIGTERM; the
    rows so far are written. With --resume and a larger --count a finished set goes on: its rows
    stay, and none of its calls is repeated.

    Args:
        from_failures: Grow from the tasks that failed in this trace instead.
        strategy: same-style, harder, easier, other-domain, rephrase, compositional, persona; by default a mix of all.
        cells: What rows should differ in: topic=rates,ages or a line each of a file; a YAML file of axes; none. By
            default the seeds' topics, skills, difficulties, lengths. Repeatable.

    \b
    ajet dataset expand seeds.jsonl --count 500 --out data/ \\
      --base-url http://127.0.0.1:8000/v1 --model NAME
    ajet dataset expand seeds.jsonl --count 500 --out data/ --verify judge:agent.py:exact \\
      --strategy harder=2,persona --language German --eval test.jsonl
    ajet dataset expand seeds.jsonl --count 500 --out data/ --verify agreement:3+code \\
      --verify-model gpt-4o-mini@https://api.openai.com/v1 --verify-price 0.15,0.60
    ajet dataset expand seeds.jsonl --count 500 --out data/ --max-cost 5 --price 0.15,0.60
    ajet dataset expand seeds.jsonl --count 700 --out data/ --resume --dry-run
    ajet dataset expand seeds.jsonl --show-prompt --strategy harder

    Tasks that a model can learn from, and tasks like those that it failed:

    \b
    ajet dataset expand seeds.jsonl --count 500 --out data/ \\
      --for launcher_record/math/checkpoint/RUN/step_40 --workflow agent.py:solve --judge math
    ajet dataset expand --from-failures launcher_record/math --count 500 --out data/
    """
    config = GenerationConfig(
        count,
        strategies_of(strategy or []),
        temperature=temperature,
        window=2 * asking.concurrency,
        **writing.settings(),
        cells=cells_of(cells or []),
    )
    held_out: Leaks | None = None
    if seeds is not None and from_failures is None:
        rows = writing.seeds(seeds)
    elif seeds is None and from_failures is not None:
        rows, held_out = _failed(from_failures, writing.include_validation)
    else:
        raise ConfigError("nothing to grow from: pass a FILE of seeds, or --from-failures TRACE")
    if writing.show_prompt:
        expansion = Expansion(
            rows, config, ModelClient("http://127.0.0.1:9", asking.model or "MODEL")
        )
        show_prompts((expansion.preview(name), config.prompt(name)) for name in config.strategies)
        return
    directory = writing.directory()
    endpoint = asking.endpoint(directory.cache, dry_run=writing.dry_run)

    def make(**how: Any) -> GenerationRun:
        with learning.value(rows, directory) as value:
            return grow(
                rows,
                config,
                directory,
                endpoint,
                value=value,
                verify=verifying.of(verify),
                held_out=held_out,
                **how,
            )

    _run(
        make,
        directory,
        endpoint,
        writing,
        asking,
        as_json,
        lambda expansion: progress(expansion, count),
    )


def _run(
    make: Callable[..., GenerationRun],
    directory: Directory,
    endpoint: ModelClient,
    writing: OutputOptions,
    asking: ModelOptions,
    as_json: bool,
    watching: Callable[[Any], AbstractContextManager[Any]],
    *before: str,
) -> None:
    """Generates and reports rows; `before` is printed first. Raises the error that ended generation
    early."""
    started = time.monotonic()
    result = make(
        evals=writing.eval or [],
        meanings=writing.meanings(endpoint, asking.cache or directory.cache),
        confirm=lambda taken: confirm(
            taken, writing, ask=asking.scripted is None, as_json=as_json, before=before
        ),
        dry_run=writing.dry_run,
        watching=watching,
    )
    if writing.dry_run:
        return
    report(result, endpoint.budget, time.monotonic() - started, as_json=as_json)
    if result.failure is not None:
        raise result.failure


def _failed(trace: Path, include_validation: bool) -> tuple[list[Row], Leaks | None]:
    """Returns the failed tasks of a trace with answers, and its validation tasks, which rows must
    not repeat."""
    choice = Choice(failures=True, include_validation=include_validation)
    with opened_sources([trace]) as sources:
        result, row_values = task_rows(sources, choice, Options(need_answer=True))
        rows = [Row(f"failed task {number}", values) for number, values in enumerate(row_values, 1)]
        held_out = None if include_validation else leaks_of(validation_tasks(sources.reader))
    left_out = f"; {counted(len(result.rejected_rows), 'task')} left out" if result.rejected else ""
    echo(
        f"{counted(len(rows), 'task')} with answers of"
        f" {counted(result.chosen, 'failed episode')}{left_out}",
        err=True,
    )
    for reason, count in result.left_out.items():
        if count:
            echo(f"  left out: {count:,} {reason}", err=True)
    seeds = select_seeds(rows, f"{trace}: what failed", include_validation=include_validation)
    return seeds, held_out


def from_docs(
    paths: Annotated[list[str], Argument(metavar="PATH...", show_default=False)],
    *,
    count: Annotated[int | None, Option(min=1)] = None,
    seeds: Annotated[str | None, Option(metavar="FILE")] = None,
    writing: OutputOptions,
    kind: list[str] | None = None,
    chunk_size: int = DocsConfig.chunk_size,
    encoding: Annotated[str | None, Option(metavar="NAME")] = None,
    passes: Annotated[int, Option(min=1)] = DocsConfig.passes,
    redact: Annotated[bool, Option("--redact/--no-redact")] = True,
    verify: VerifyHow = "llm",
    verifying: VerifyOptions,
    temperature: Temperature = DocsConfig.temperature,
    asking: ModelOptions,
    as_json: AsJson = False,
) -> None:
    """Generate tasks from documents, each with an answer and the passage it comes from.

    With --kind few-shot, and by default where there are --seeds, tasks are made in the style of the
    seeds instead. Documents are cut into parts, and each part is asked for rows; whole documents,
    not rows, go to validation. Copies of a document are asked once.

    Args:
        paths: .pdf, .docx, .html, .md, .txt, .rst, directories of them at any depth, or - for Markdown on stdin.
        count: Number of rows to generate. Default: each part is asked once.
        seeds: Example tasks: generate few-shot tasks in their style.
        kind: knowledge or few-shot (the default with --seeds); repeat it to alternate.
        chunk_size: Maximum characters of a document part in a prompt.
        encoding: Encoding of text, Markdown and HTML that is not UTF-8, such as latin-1.
        passes: Maximum number of times that a part is asked to reach --count.
        redact: Replace secrets and personal data in the documents with placeholders before a model sees them.

    \b
    ajet dataset from-docs handbook.pdf --out data/ \\
      --base-url http://127.0.0.1:8000/v1 --model NAME
    ajet dataset from-docs docs/ --count 60 --out data/ --scripted replies.py:reply
    """
    config = DocsConfig(
        count,
        tuple(kind or (["few-shot"] if seeds else ["knowledge"])),
        chunk_size=chunk_size,
        temperature=temperature,
        window=2 * asking.concurrency,
        passes=passes,
        **writing.settings(),
    )
    directory = None if writing.show_prompt else writing.directory()
    rows = writing.seeds(seeds) if seeds else []
    with ProgressBar("Reading documents") as bar:
        corpus = read_corpus(
            paths, config, encoding=encoding, redact=redact, on_progress=bar.update
        )
    if directory is None:
        run = FromDocs(
            corpus, config, ModelClient("http://127.0.0.1:9", asking.model or "MODEL"), seeds=rows
        )
        show_prompts(
            (run.preview(run.chunks[0], n), config.prompt(kind))
            for n, kind in enumerate(config.kinds)
        )
        return
    endpoint = asking.endpoint(directory.cache, dry_run=writing.dry_run)
    make_rows = partial(
        make_tasks, corpus, config, directory, endpoint, seeds=rows, verify=verifying.of(verify)
    )
    _run(
        make_rows,
        directory,
        endpoint,
        writing,
        asking,
        as_json,
        lambda run: progress(run, count, len(run.chunks)),
        _read(corpus),
    )


def _read(corpus: Corpus) -> str:
    chunks = sum(len(entry.chunks) for entry in corpus.held)
    pages = sum(entry.document.pages or 0 for entry in corpus.held)
    of_pages = f" ({counted(pages, 'page')} of PDF)" if pages else ""
    return f"{counted(len(corpus.held), 'document')}{of_pages} in {counted(chunks, 'part')}."


@contextmanager
def progress(
    generation: Generation[Any], rows: int | None, calls: int = 0
) -> Iterator[Callable[[GenerationResult], None]]:
    """On a terminal, shows a progress bar of rows (else calls), and below it `progress_lines`."""
    if not sys.stderr.isatty():
        yield lambda result: None
        return

    class Shown(Progress):
        """The bar, and below it the lines of `progress_lines`."""

        def get_renderables(self) -> Iterable[RenderableType]:
            yield from super().get_renderables()
            for line in progress_lines(generation, rows, console.width):
                yield Text(line, no_wrap=True, overflow="ellipsis")

    console = output.console(stderr=True)
    title = TextColumn("Accepted" if rows else "Parts asked")
    columns = (title, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Shown(*columns, console=console, transient=True) as shown:
        bar = shown.add_task("", total=rows or calls)
        yield lambda result: shown.update(bar, completed=result.accepted if rows else result.calls)


def progress_lines(generation: Generation[Any], rows: int | None, width: int) -> Iterator[str]:
    """Yields cost, waits and rejections (most frequent first), in lines that fit the width."""
    result, wait = generation.result, generation.describe_wait()
    accepted = [] if rows else [f"{result.accepted:,} accepted"]
    yield _fit("", [*accepted, *generation.endpoint.budget.summary().split(", ")], width)
    if wait:
        yield _fit("waiting for ", wait.split("; "), width)
    reasons = [f"{count:,} {reason}" for reason, count in result.refused.most_common()]
    if varied := generation.coverage.parts():
        yield _fit("", varied, width)
    if reasons:
        yield _fit(f"refused {len(result.rejected):,}: ", reasons, width)


def _fit(before: str, items: Sequence[str], width: int) -> str:
    """Joins as many items as fit the width, and counts the others."""
    for shown in range(len(items), 0, -1):
        hidden = len(items) - shown
        line = before + ", ".join([*items[:shown], *([f"{hidden} more"] if hidden else [])])
        if len(line) <= width or shown == 1:
            return line
    return before


def report(made: GenerationRun, budget: Budget, seconds: float, *, as_json: bool) -> None:
    """Prints the result. Raises KeyboardInterrupt, or Exit with 143, if Ctrl-C or SIGTERM ended the
    run."""
    result, files, checks, corpus = made.result, made.files, made.checks, made.corpus
    spent, sides = budget.spent, {"train": result.train, "validation": result.validation}
    documents = (
        {side: sum(entry.side == side for entry in corpus.held) for side in sides}
        if corpus is not None
        else {}
    )
    errors = errors_of(files) if checks else []
    if as_json:
        print_json(
            {
                "accepted": result.accepted,
                **{side: len(rows) for side, rows in sides.items()},
                "refused": dict(result.refused.most_common()),
                "surplus": result.surplus,
                "diversity": {**result.diversity().as_json(), **result.coverage},
                "checks": [entry.as_json() for entry in checks],
                "errors": [entry.as_json() for entry in errors],
                **(_documents(corpus, documents) if corpus is not None else {}),
                **pick(spent, "calls", "cached", "input_tokens", "output_tokens"),
                "money": budget.cost,
                "stopped": str(result.stopped) if result.stopped else None,
                "files": [str(path) for path in files],
            }
        )
    else:
        origins = {
            side: f" (from {counted(number, 'document')})" for side, number in documents.items()
        }
        per_side = ", ".join(
            f"{len(rows):,} {side}{origins.get(side, '')}" for side, rows in sides.items()
        )
        cached = f" ({spent.cached:,} more from the cache)" if spent.cached else ""
        echo(
            f"{counted(result.accepted, 'row')} accepted: {per_side}; {budget.summary()}{cached},"
            f" {seconds:.1f} s"
        )
        for entry in checks:
            took = f"; {entry.budget.summary()}" if entry.budget is not None else ""
            echo(f"  verified by {entry.verifier}: {entry.in_words()}{took}")
        for line in error_lines(errors, files) if checks else ():
            echo(f"  {line}")
        if result.coverage_text:
            echo(f"  {result.coverage_text}")
        for reason, count in result.refused.most_common():
            echo(f"  {count:,} refused: {reason}")
        for path in files:
            echo(f"  {path}")
    if isinstance(result.stopped, Interrupted):
        if result.stopped.signal == signal.SIGINT:
            raise KeyboardInterrupt
        echo(f"Terminated: {result.stopped}", err=True)
        raise typer.Exit(128 + result.stopped.signal)


def _documents(corpus: Corpus, by_side: Mapping[str, int]) -> dict[str, object]:
    return {
        "documents": by_side,
        "copies": [{"document": name, "of": original} for name, original in corpus.copies],
        "unreadable": [
            {"document": document.name, "problem": document.problem}
            for document in corpus.unreadable
        ],
    }
