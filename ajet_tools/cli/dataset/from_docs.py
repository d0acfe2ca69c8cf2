"""`ajet dataset from-docs`: tasks out of documents."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ajet_sdk.errors import ConfigError
from ajet_tools.cli.dataset.endpoints import (
    ApiKeyEnv,
    BaseUrl,
    Concurrency,
    MaxCalls,
    MaxCost,
    MaxTokens,
    Model,
    PerMinute,
    PriceOf,
    Retries,
    Scripted,
    budget_of,
    endpoint_of,
)
from ajet_tools.cli.dataset.options import AsJson, Map, SkipBad, counted, mapping_of, print_json
from ajet_tools.cli.trace.progress import progress_told

if TYPE_CHECKING:
    from ajet_tools.dataset.budget import Budget
    from ajet_tools.dataset.corpus import Corpus
    from ajet_tools.dataset.docs_job import Made
    from ajet_tools.dataset.docs_recipe import DocsRecipe
    from ajet_tools.dataset.expanded import Expanded
    from ajet_tools.dataset.expansion import Estimate
    from ajet_tools.dataset.from_docs import FromDocs
    from ajet_tools.dataset.tables import Row

__all__ = ["app"]

app = typer.Typer(add_completion=False)


@app.command(name="from-docs")
def from_docs(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...",
            help=".pdf, .docx, .html, .md, .txt, .rst, directories of them at any depth, or - for Markdown on stdin.",
            show_default=False,
        ),
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="DIR", help="The directory to write.")] = None,
    count: Annotated[
        int | None,
        typer.Option("-n", "--count", min=1, help="How many rows to make; without it each part is asked once."),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option("--seeds", metavar="FILE", help="Example tasks: make few-shot tasks in their style.")
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(help="knowledge or few-shot; repeatable, they take turns. few-shot where there are --seeds."),
    ] = None,
    map: Map = None,
    skip_bad_rows: SkipBad = False,
    base_url: BaseUrl = None,
    model: Model = None,
    api_key_env: ApiKeyEnv = "OPENAI_API_KEY",
    scripted: Scripted = None,
    chunk_size: Annotated[int, typer.Option(help="Longest part of a document in a prompt, in characters.")] = 5120,
    encoding: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of text, Markdown and HTML that is not UTF-8, such as latin-1.")
    ] = None,
    language: Annotated[
        list[str] | None,
        typer.Option("--language", help="Of questions and answers; repeatable, they take turns. Else the document's."),
    ] = None,
    template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Your own prompt (Jinja), in place of ours.")
    ] = None,
    verify: Annotated[
        str,
        typer.Option(
            metavar="HOW",
            help="llm, agreement:K, judge:FILE:NAME, code or none: how answers are checked, beside their quotation.",
        ),
    ] = "llm",
    eval: Annotated[
        list[str] | None,
        typer.Option("--eval", metavar="FILE", help="Refuse rows that are in this evaluation set; repeatable."),
    ] = None,
    similarity: Annotated[
        float, typer.Option(min=0.5, max=1, help="From this share of equal characters on a row is a near duplicate.")
    ] = 0.8,
    validation: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="From documents of their own; 0.1 from five documents on."),
    ] = None,
    format: Annotated[str, typer.Option(metavar="jsonl|parquet", help="Of the rows written.")] = "jsonl",
    per_call: Annotated[int, typer.Option(min=1, help="Rows asked for in a call.")] = 4,
    passes: Annotated[int, typer.Option(min=1, help="How often a part is asked at most, to reach -n.")] = 3,
    shots: Annotated[int, typer.Option(min=1, help="Examples in a few-shot prompt.")] = 4,
    temperature: Annotated[float, typer.Option(min=0, help="Of the model that writes the rows.")] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of a reply.")] = 4096,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    concurrency: Concurrency = 16,
    rpm: PerMinute = None,
    retries: Retries = 4,
    price: PriceOf = None,
    max_calls: MaxCalls = None,
    max_total_tokens: MaxTokens = None,
    max_cost: MaxCost = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Where replies are kept, so that none is paid for twice.", show_default="in --out"
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with what was begun in --out; no call is paid for twice.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before the first call.")] = False,
    show_prompt: Annotated[
        bool, typer.Option("--show-prompt", help="Print the first prompt of each kind, and send nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make tasks out of documents: questions whose answers stand in a quotation that is found in the source.

    Writes train.jsonl, validation.jsonl (from documents of its own), rejected.jsonl (with reasons), documents.jsonl and
    a card into --out. Exit code 1 where a document could not be read, or where it ended before there were -n rows; what
    there is, is written.

    \b
    ajet dataset from-docs handbook.pdf --out data/ \\
      --base-url http://127.0.0.1:8000/v1 --model NAME
    ajet dataset from-docs docs/ -n 500 --out data/ --language German
    ajet dataset from-docs docs/ --seeds seeds.jsonl -n 200 --out data/ \\
      --verify agreement:3
    ajet dataset from-docs docs/ --out data/ --max-cost 5 --price 0.15,0.60
    ajet dataset from-docs docs/ --out data/ --resume
    ajet dataset from-docs handbook.pdf --show-prompt
    """
    from ajet_tools.dataset.docs_job import make_tasks, read_corpus
    from ajet_tools.dataset.docs_recipe import DocsRecipe
    from ajet_tools.dataset.expansion import Directory
    from ajet_tools.dataset.seeds import read_seeds

    recipe = DocsRecipe(
        count,
        tuple(kind or (["few-shot"] if seeds else ["knowledge"])),
        tuple(language or ()),
        chunk_size=chunk_size,
        per_call=per_call,
        shots=shots,
        temperature=temperature,
        max_tokens=max_tokens,
        seed=seed,
        validation=validation,
        similarity=similarity,
        window=2 * concurrency,
        passes=passes,
        template=template,
    )
    if format not in ("jsonl", "parquet"):
        raise ConfigError(f"--format is jsonl or parquet (got {format})")
    if out is None and not show_prompt:
        raise ConfigError("say where to write: --out data/")
    directory = Directory(out, "parquet" if format == "parquet" else "jsonl") if out is not None else None
    if directory is not None and not show_prompt:
        directory.check(resume=resume)
    rows = read_seeds(seeds, mapping=mapping_of(map), skip_bad=skip_bad_rows) if seeds else []
    with progress_told("Reading documents") as told:
        corpus = read_corpus(paths, recipe, encoding=encoding, told=told)
    if show_prompt or directory is None:
        _show(corpus, recipe, rows, model)
        return
    budget = budget_of(max_calls, max_total_tokens, max_cost, price)
    endpoint = endpoint_of(
        base_url=base_url,
        model=model,
        scripted=scripted,
        api_key_env=api_key_env,
        concurrency=concurrency,
        per_minute=rpm,
        retries=retries,
        cache=cache or directory.cache,
        budget=budget,
    )
    started = time.monotonic()
    made = make_tasks(
        corpus,
        recipe,
        directory,
        endpoint,
        seeds=rows,
        verify=verify,
        evals=eval or [],
        confirm=lambda taken: _confirm(taken, corpus, resume, ask=not yes and scripted is None, quiet=as_json),
        watching=_progress,
    )
    _report(made, budget, time.monotonic() - started, as_json=as_json)


def _show(corpus: Corpus, recipe: DocsRecipe, seeds: list[Row], model: str | None) -> None:
    """Each kind's prompt as its first call would send it."""
    from ajet_tools.dataset.endpoint import Endpoint
    from ajet_tools.dataset.from_docs import FromDocs

    run = FromDocs(corpus, recipe, Endpoint("http://127.0.0.1:9", model or "MODEL"), seeds=seeds)
    for number, kind in enumerate(recipe.kinds):
        asked, prompt = run.preview(run.chunks[0], number), recipe.prompt(kind)
        if number == 0:
            typer.echo(f"===== system\n{asked.messages[0]['content']}\n")
        typer.echo(f"===== {prompt.label}\n{asked.messages[1]['content']}\n")


def _confirm(taken: Estimate, corpus: Corpus, resume: bool, *, ask: bool, quiet: bool) -> None:
    """Say what there is and what a run may take and, where a person is there, ask."""
    if ask or not quiet:
        chunks = sum(len(one.chunks) for one in corpus.held)
        pages = sum(one.document.pages or 0 for one in corpus.held)
        of_pages = f" ({counted(pages, 'page')} of PDF)" if pages else ""
        kept = " Replies that are kept cost nothing." if resume else ""
        typer.echo(f"{counted(len(corpus.held), 'document')}{of_pages} in {counted(chunks, 'part')}.", err=True)
        typer.echo(f"{taken.as_text()}.{kept}", err=True)
    if not ask:
        return
    if not sys.stdin.isatty():
        raise ConfigError("nobody is there to ask whether to go on: --yes goes on without asking")
    if not typer.confirm("Go on?", err=True):
        raise typer.Exit(1)


@contextmanager
def _progress(run: FromDocs) -> Iterator[Callable[[Expanded], None]]:
    """On a terminal: rows of those wanted (or parts asked), time left, refused by reason, calls and money."""
    if not sys.stderr.isatty():
        yield lambda result: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    by_rows, budget = run.recipe.count is not None, run.endpoint.budget
    columns = (
        TextColumn("Accepted" if by_rows else "Parts asked"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=run.recipe.count or len(run.chunks))

        def tell(result: Expanded) -> None:
            refused = ", ".join(f"{count} {reason}" for reason, count in result.refused.most_common(3))
            waiting = f" · {run.endpoint.waiting} held back by 429" if run.endpoint.waiting else ""
            accepted = "" if by_rows else f"{result.accepted:,} accepted, "
            description = f"{accepted}refused: {refused or 'none'} · {budget.summary()}{waiting}"
            progress.update(bar, completed=result.accepted if by_rows else result.calls, description=description)

        yield tell


def _report(made: Made, budget: Budget, seconds: float, *, as_json: bool) -> None:
    """What there is now, and what went wrong, raised at the end."""
    from ajet_tools.dataset.expanded import Interrupted

    result, corpus, spent = made.result, made.corpus, budget.spent
    sides = Counter(one.side for one in corpus.held)
    if as_json:
        print_json(
            {
                "accepted": result.accepted,
                "train": len(result.train),
                "validation": len(result.validation),
                "refused": dict(result.refused.most_common()),
                "surplus": result.surplus,
                "documents": {side: sides[side] for side in ("train", "validation")},
                "copies": [{"document": name, "of": other} for name, other in corpus.copies],
                "unreadable": [{"document": one.name, "problem": one.problem} for one in corpus.unreadable],
                "calls": spent.calls,
                "cached": spent.cached,
                "input_tokens": spent.input_tokens,
                "output_tokens": spent.output_tokens,
                "money": budget.cost,
                "stopped": str(result.stopped) if result.stopped else None,
                "files": [str(path) for path in made.files],
            }
        )
    else:
        cached = f" ({spent.cached:,} more were kept from before)" if spent.cached else ""
        typer.echo(
            f"{counted(result.accepted, 'row')} accepted: {len(result.train):,} train (from "
            f"{counted(sides['train'], 'document')}), {len(result.validation):,} validation (from "
            f"{counted(sides['validation'], 'document')}); {budget.summary()}{cached}, {seconds:.1f} s"
        )
        for reason, count in result.refused.most_common():
            typer.echo(f"  {count:,} refused: {reason}")
        for path in made.files:
            typer.echo(f"  {path}")
    if isinstance(result.stopped, Interrupted):
        raise KeyboardInterrupt
    if made.failure is not None:
        raise made.failure
