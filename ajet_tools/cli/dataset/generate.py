"""`ajet dataset expand` and `ajet dataset from-docs`: generate rows from examples or documents."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ajet_sdk.errors import ConfigError
from ajet_sdk.learn.recipe import with_model
from ajet_sdk.reporting.output import ProgressBar, echo
from ajet_sdk.run import open_run
from ajet_tools.cli.arguments import AgentOptions
from ajet_tools.cli.dataset.generation import (
    DryRun,
    GenerationOptions,
    VerifyHow,
    confirm,
)
from ajet_tools.cli.dataset.generation_report import GenerationReport, progress
from ajet_tools.cli.dataset.options import SOURCE_HELP, counted
from ajet_tools.dataset.calibrate import Band, Measurements, conditions, task_of_row
from ajet_tools.dataset.documents.corpus import Corpus
from ajet_tools.dataset.files.blocks import Row
from ajet_tools.dataset.from_traces.choice import Choice
from ajet_tools.dataset.from_traces.export import Options, task_rows
from ajet_tools.dataset.from_traces.sources import opened_sources
from ajet_tools.dataset.generate.cells import cells_of
from ajet_tools.dataset.generate.directory import Directory
from ajet_tools.dataset.generate.estimate import Estimate
from ajet_tools.dataset.generate.expand import Expansion
from ajet_tools.dataset.generate.from_docs import FromDocs
from ajet_tools.dataset.generate.learning import LearningValue
from ajet_tools.dataset.generate.pipeline import Source
from ajet_tools.dataset.generate.runs import generate, read_corpus
from ajet_tools.dataset.generate.seeds import read_seeds, select_seeds
from ajet_tools.dataset.generate.settings import DocsConfig, GenerationConfig, strategies_of
from ajet_tools.dataset.similarity.decontaminate import Leaks
from ajet_tools.dataset.similarity.held_out import leaks_of, validation_tasks
from ajet_tools.dataset.verify.combined import Verify
from ajet_tools.text.settings import split_settings


@contextmanager
def _policy(
    spec: str | None, rows: Sequence[Row], directory: Directory, *, dry_run: bool
) -> Iterator[LearningValue | None]:
    """Opens the trials of rows by the policy of `--for`, or yields None without one. Raises
    ConfigError."""
    if spec is None:
        yield None
        return
    names = ("workflow", "judge", "conf", "attempts", "band")
    model_text, settings = split_settings(spec, names)
    if "workflow" not in settings and "conf" not in settings:
        raise ConfigError("--for needs an agent: --for MODEL,workflow=agent.py:solve, or conf=FILE")
    attempts = settings.get("attempts", "8")
    if not attempts.isdecimal() or not 1 <= int(attempts) <= 1000:
        raise ConfigError(f"--for: attempts is a number from 1 to 1000 (got {attempts})")
    k = int(attempts)
    band = Band.parse(settings.get("band", "0.2:0.8"))
    options = AgentOptions(
        conf=Path(settings["conf"]) if "conf" in settings else None,
        judge=settings.get("judge"),
        model=model_text,
        exp_dir=directory.own,
    )
    config = options.config(settings.get("workflow"), more={"experiment_name": "trials"})
    config = asyncio.run(with_model(config))
    tasks = [task_of_row(row.where, row.values) for row in rows]
    with open_run(config, tasks=tasks) as opened:
        yield LearningValue(
            opened,
            model_text,
            Measurements(directory.replies(create=not dry_run), conditions(config, k)),
            k=k,
            band=band,
            seed=config.trainer_common.seed if config.is_seeded else None,
            at_once=max(1, config.rollout.max_env_worker // k),
        )


def expand(
    seeds: Annotated[
        str | None, Argument(metavar="[FILE]", help=SOURCE_HELP, show_default=False)
    ] = None,
    *,
    from_failures: Annotated[Path | None, Option(metavar="TRACE")] = None,
    count: Annotated[int, Option(min=1, help="Number of rows to generate. ")] = 100,
    strategy: Annotated[list[str] | None, Option(metavar="NAME[=WEIGHT]|FILE")] = None,
    cells: Annotated[list[str] | None, Option(metavar="AXIS=A,B|AXIS=FILE")] = None,
    verify: VerifyHow = "agreement:3",
    policy: Annotated[str | None, Option("--for", metavar="MODEL,...")] = None,
    options: GenerationOptions,
) -> GenerationReport | DryRun:
    """Grow a dataset from a few examples: more tasks like them, with verified answers and without
    duplicates.

    Writes train.jsonl, validation.jsonl, rejected.jsonl (with reasons) and a dataset card to --out.
    Exits with 1 if there are fewer rows than requested, 130 after Ctrl-C and 143 after SIGTERM; the
    rows so far are written. With --resume and a larger --count a finished set goes on: its rows
    stay, and none of its calls is repeated.

    Args:
        from_failures: Grow from the tasks that failed in this trace instead.
        strategy: same-style, harder, easier, other-domain, rephrase, compositional, persona; by default a mix of all;
            or a prompt of your own (Jinja).
        cells: What rows should differ in: topic=rates,ages or topic=FILE (a line each). Repeatable.
        policy: Keep only tasks that this model solves sometimes: CHECKPOINT,workflow=agent.py:solve,judge=math; also
            attempts=8, band=0.2:0.8, conf=FILE (a job's config with agent, judge and sampling).

    \b
    ajet dataset expand seeds.jsonl --count 500 --out data/ \\
      --model NAME@http://127.0.0.1:8000/v1
    ajet dataset expand seeds.jsonl --count 500 --out data/ --verify judge:agent.py:exact \\
      --strategy harder=2,persona --language German --eval test.jsonl
    ajet dataset expand seeds.jsonl --count 500 --out data/ --verify agreement:3,code \\
      --verify-model gpt-4o-mini@https://api.openai.com/v1,price=0.15/0.60
    ajet dataset expand seeds.jsonl --count 500 --out data/ --budget calls=2000
    ajet dataset expand seeds.jsonl --count 700 --out data/ --resume --dry-run
    ajet dataset expand seeds.jsonl --dry-run --strategy harder

    Tasks that a model can learn from, and tasks like those that it failed:

    \b
    ajet dataset expand seeds.jsonl --count 500 --out data/ \\
      --for launcher_record/math/checkpoint/RUN/step_40,workflow=agent.py:solve,judge=math
    ajet dataset expand --from-failures launcher_record/math --count 500 --out data/
    """
    settings = options.settings()
    include_validation = settings.pop("include_validation", False)
    unfenced = settings.pop("unfenced", False)
    names, template = _template(strategy or [])
    config = GenerationConfig(
        count,
        strategies_of(names),
        cells=cells_of(cells or []),
        template=template,
        **options.call_settings(settings),
    )
    held_out: Leaks | None = None
    if seeds is not None and from_failures is None:
        rows = read_seeds(seeds, include_validation=include_validation)
    elif seeds is None and from_failures is not None:
        rows, held_out = _failed(from_failures, include_validation)
    else:
        raise ConfigError("nothing to grow from: pass a FILE of seeds, or --from-failures TRACE")
    return _run(
        Expansion(rows, config),
        options.directory(),
        options,
        Verify(verify, options.verify_model, unfenced=unfenced),
        held_out=held_out,
        policy=policy,
        seeds=rows,
    )


def _run(
    source: Source,
    directory: Directory,
    options: GenerationOptions,
    verify: Verify,
    *,
    corpus: Corpus | None = None,
    held_out: Leaks | None = None,
    policy: str | None = None,
    seeds: Sequence[Row] = (),
) -> GenerationReport | DryRun:
    endpoint = options.endpoint(directory)
    chunks = sum(len(entry.chunks) for entry in corpus.held) if corpus is not None else 0
    started = time.monotonic()
    with _policy(policy, seeds, directory, dry_run=options.dry_run) as value:
        run = generate(
            source,
            directory,
            endpoint,
            verify=verify,
            evals=options.eval or [],
            value=value,
            held_out=held_out,
            confirm=lambda estimate: confirm(_cost_lines(estimate, corpus), options),
            dry_run=options.dry_run,
            watching=lambda pipeline: progress(pipeline, source.config.count, chunks),
        )
    if options.dry_run:
        return DryRun(run.estimate, _cost_lines(run.estimate, corpus), source.previews())
    return GenerationReport(run, endpoint.budget, corpus, seconds=time.monotonic() - started)


def _template(names: Sequence[str]) -> tuple[list[str], Path | None]:
    """Returns the names of built-in prompts, and the file of the user's. Raises ConfigError."""
    files = [Path(name) for name in names if name.endswith(".jinja")]
    if len(files) > 1 or (files and len(names) > 1):
        raise ConfigError(f"{files[0]} replaces the built-in prompts; name it alone")
    if files:
        return [], files[0]
    return list(names), None


def _cost_lines(estimate: Estimate, corpus: Corpus | None) -> list[str]:
    """Returns what is left to do, and what it costs."""
    lines = []
    if corpus is not None:
        chunks = sum(len(entry.chunks) for entry in corpus.held)
        pages = sum(entry.document.pages or 0 for entry in corpus.held)
        of_pages = f" ({counted(pages, 'page')} of PDF)" if pages else ""
        documents = counted(len(corpus.held), "document")
        lines.append(f"{documents}{of_pages} in {counted(chunks, 'part')}.")
    if estimate.accepted:
        lines.append(f"{counted(estimate.accepted, 'row')} from stored replies.")
    return [*lines, f"{estimate.as_text()}."]


def _failed(trace: Path, include_validation: bool) -> tuple[list[Row], Leaks | None]:
    """Returns the failed tasks of a trace with answers, and its validation tasks, which rows must
    not repeat."""
    choice = Choice(failures=True, include_validation=include_validation)
    with opened_sources([trace]) as sources:
        result, row_values = task_rows(sources, choice, Options(need_answer=True))
        rows = [Row(f"failed task {number}", values) for number, values in enumerate(row_values, 1)]
        if include_validation:
            held_out = None
        else:
            held_out = leaks_of(validation_tasks(sources.reader))
    if result.rejected:
        left_out = f"; {counted(len(result.rejected_rows), 'task')} left out"
    else:
        left_out = ""
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
    kind: Annotated[list[str] | None, Option(metavar="NAME|FILE")] = None,
    verify: VerifyHow = "llm",
    options: GenerationOptions,
) -> GenerationReport | DryRun:
    """Generate tasks from documents, each with an answer and the passage it comes from.

    With --kind few-shot, and by default where there are --seeds, tasks are made in the style of the
    seeds instead. Documents are cut into parts, and each part is asked for rows; whole documents,
    not rows, go to validation. Copies of a document are asked once. --with also has chunk_size
    (characters of a part), passes (how often a part is asked to reach --count), encoding (of text
    that is not UTF-8), and redact=false, which shows secrets and personal data to the model.

    Args:
        paths: .pdf, .docx, .html, .md, .txt, .rst, directories of them at any depth, or - for Markdown on stdin.
        count: Number of rows to generate. Default: each part is asked once.
        seeds: Example tasks: generate few-shot tasks in their style.
        kind: knowledge or few-shot (the default with --seeds); repeat it to alternate; or a prompt of your own (Jinja).

    \b
    ajet dataset from-docs handbook.pdf --out data/ \\
      --model NAME@http://127.0.0.1:8000/v1
    ajet dataset from-docs docs/ --count 60 --out data/ --model replies.py:reply
    """
    settings = options.settings(chunk_size=int, passes=int, encoding=str, redact=bool)
    include_validation = settings.pop("include_validation", False)
    unfenced = settings.pop("unfenced", False)
    encoding = settings.pop("encoding", None)
    redact = settings.pop("redact", True)
    kinds, template = _template(kind or [])
    if not kinds:
        kinds = ["few-shot"] if seeds else ["knowledge"]
    config = DocsConfig(count, tuple(kinds), template=template, **options.call_settings(settings))
    directory = options.directory()
    rows = read_seeds(seeds, include_validation=include_validation) if seeds else []
    with ProgressBar("Reading documents") as bar:
        corpus = read_corpus(
            paths, config, encoding=encoding, redact=redact, on_progress=bar.update
        )
    verification = Verify(verify, options.verify_model, unfenced=unfenced)
    source = FromDocs(corpus, config, rows)
    return _run(source, directory, options, verification, corpus=corpus)
