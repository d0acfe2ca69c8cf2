"""`ajet dataset expand`: many tasks out of few."""

from __future__ import annotations

import sys
import time
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
from ajet_tools.cli.dataset.options import AsJson, Map, SkipBad, Source, counted, mapping_of, print_json

if TYPE_CHECKING:
    from ajet_tools.dataset.budget import Budget
    from ajet_tools.dataset.expand import Expansion
    from ajet_tools.dataset.expanded import Expanded
    from ajet_tools.dataset.expansion import Estimate
    from ajet_tools.dataset.growing import Grown
    from ajet_tools.dataset.recipe import Recipe
    from ajet_tools.dataset.tables import Row

__all__ = ["app"]

app = typer.Typer(add_completion=False)


@app.command()
def expand(
    seeds: Source,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="How many rows to make.")] = 100,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="DIR", help="The directory to write.")] = None,
    map: Map = None,
    skip_bad_rows: SkipBad = False,
    base_url: BaseUrl = None,
    model: Model = None,
    api_key_env: ApiKeyEnv = "OPENAI_API_KEY",
    scripted: Scripted = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            metavar="NAME[=WEIGHT]",
            help="same-style, harder, easier, other-domain, rephrase, compositional, persona; by default a mix of all.",
        ),
    ] = None,
    language: Annotated[
        list[str] | None, typer.Option("--language", help="Write in this language; repeatable, they take turns.")
    ] = None,
    template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Your own prompt (Jinja), in place of the strategies.")
    ] = None,
    personas: Annotated[Path | None, typer.Option(metavar="FILE", help="Your own personas, one a line.")] = None,
    domains: Annotated[Path | None, typer.Option(metavar="FILE", help="Your own domains, one a line.")] = None,
    verify: Annotated[
        str,
        typer.Option(
            metavar="HOW", help="agreement:K, judge:FILE:NAME, code, llm or none: how reference answers are checked."
        ),
    ] = "agreement:3",
    eval: Annotated[
        list[str] | None,
        typer.Option("--eval", metavar="FILE", help="Refuse rows that are in this evaluation set; repeatable."),
    ] = None,
    similarity: Annotated[
        float, typer.Option(min=0.5, max=1, help="From this share of equal characters on a row is a near duplicate.")
    ] = 0.8,
    validation: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Of the rows, from seeds of their own; 0.1 from five seeds on."),
    ] = None,
    format: Annotated[str, typer.Option(metavar="jsonl|parquet", help="Of the rows written.")] = "jsonl",
    per_call: Annotated[int, typer.Option(min=1, help="Rows asked for in a call.")] = 4,
    shots: Annotated[int, typer.Option(min=1, help="Examples in a prompt.")] = 4,
    temperature: Annotated[float, typer.Option(min=0, help="Of the model that writes the rows.")] = 1.0,
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
        bool, typer.Option("--show-prompt", help="Print the prompts as they would be sent, and send nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Grow a dataset from a few examples: more tasks like them, with verified answers and without duplicates.

    Writes train.jsonl, validation.jsonl, rejected.jsonl (with reasons) and a card into --out. Exit code 1 where it
    ended before there were as many rows as asked for; what there is, is written.

    \b
    ajet dataset expand seeds.jsonl -n 500 --out data/ \\
      --base-url http://127.0.0.1:8000/v1 --model NAME
    ajet dataset expand seeds.jsonl -n 500 --out data/ --verify judge:agent.py:exact \\
      --strategy harder=2,persona --language German --eval test.jsonl
    ajet dataset expand seeds.jsonl -n 500 --out data/ --max-cost 5 --price 0.15,0.60
    ajet dataset expand seeds.jsonl -n 500 --out data/ --resume
    ajet dataset expand seeds.jsonl --show-prompt --strategy harder
    """
    from ajet_tools.dataset.prompts import lines_of
    from ajet_tools.dataset.recipe import Recipe, strategies_of
    from ajet_tools.dataset.seeds import read_seeds

    recipe = Recipe(
        count,
        strategies_of(strategy or []),
        tuple(language or ()),
        per_call=per_call,
        shots=shots,
        temperature=temperature,
        max_tokens=max_tokens,
        seed=seed,
        validation=validation,
        similarity=similarity,
        window=2 * concurrency,
        template=template,
        personas=lines_of(personas) if personas else (),
        domains=lines_of(domains) if domains else (),
    )
    rows = read_seeds(seeds, mapping=mapping_of(map), skip_bad=skip_bad_rows)
    if show_prompt:
        _show(rows, recipe, model)
        return
    if format not in ("jsonl", "parquet"):
        raise ConfigError(f"--format is jsonl or parquet (got {format})")
    if out is None:
        raise ConfigError("say where to write: --out data/")
    from ajet_tools.dataset.expansion import Directory

    directory = Directory(out, "parquet" if format == "parquet" else "jsonl")
    directory.check(resume=resume)
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
    ask = not yes and scripted is None
    from ajet_tools.dataset.growing import grow

    started = time.monotonic()
    grown = grow(
        rows,
        recipe,
        directory,
        endpoint,
        verify=verify,
        evals=eval or [],
        confirm=lambda taken: _confirm(taken, resume, ask=ask, quiet=as_json),
        watching=_progress,
    )
    _report(grown, budget, time.monotonic() - started, as_json=as_json)


def _show(rows: list[Row], recipe: Recipe, model: str | None) -> None:
    """Each strategy's prompt as its first call would send it."""
    from ajet_tools.dataset.endpoint import Endpoint
    from ajet_tools.dataset.expand import Expansion

    expansion = Expansion(rows, recipe, Endpoint("http://127.0.0.1:9", model or "MODEL"))
    for number, name in enumerate(recipe.strategies):
        asked, prompt = expansion.preview(name), recipe.prompt(name)
        if number == 0:
            typer.echo(f"===== system\n{asked.messages[0]['content']}\n")
        typer.echo(f"===== {prompt.label}\n{asked.messages[1]['content']}\n")


def _confirm(taken: Estimate, resume: bool, *, ask: bool, quiet: bool) -> None:
    """Say what a run may take and, where a person is there, ask. Raises ConfigError where it may not go on."""
    kept = " Replies that are kept cost nothing." if resume else ""
    if ask or not quiet:
        typer.echo(f"{taken.as_text()}.{kept}", err=True)
    if not ask:
        return
    if not sys.stdin.isatty():
        raise ConfigError("nobody is there to ask whether to go on: --yes goes on without asking")
    if not typer.confirm("Go on?", err=True):
        raise typer.Exit(1)


@contextmanager
def _progress(expansion: Expansion) -> Iterator[Callable[[Expanded], None]]:
    """On a terminal: accepted rows of those wanted, time left, refused by reason, calls and money."""
    if not sys.stderr.isatty():
        yield lambda result: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("Accepted"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    budget = expansion.endpoint.budget
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=expansion.recipe.count)

        def tell(result: Expanded) -> None:
            refused = ", ".join(f"{count} {reason}" for reason, count in result.refused.most_common(3))
            waiting = f" · {expansion.endpoint.waiting} held back by 429" if expansion.endpoint.waiting else ""
            description = f"refused: {refused or 'none'} · {budget.summary()}{waiting}"
            progress.update(bar, completed=result.accepted, description=description)

        yield tell


def _report(grown: Grown, budget: Budget, seconds: float, *, as_json: bool) -> None:
    """What there is now, and the error that ended the run early, raised at the end."""
    result, spent = grown.result, budget.spent
    if as_json:
        print_json(
            {
                "accepted": result.accepted,
                "train": len(result.train),
                "validation": len(result.validation),
                "refused": dict(result.refused.most_common()),
                "surplus": result.surplus,
                "calls": spent.calls,
                "cached": spent.cached,
                "input_tokens": spent.input_tokens,
                "output_tokens": spent.output_tokens,
                "money": budget.cost,
                "stopped": str(result.stopped) if result.stopped else None,
                "files": [str(path) for path in grown.files],
            }
        )
    else:
        cached = f" ({spent.cached:,} more were kept from before)" if spent.cached else ""
        typer.echo(
            f"{counted(result.accepted, 'row')} accepted: {len(result.train):,} train, {len(result.validation):,} "
            f"validation; {budget.summary()}{cached}, {seconds:.1f} s"
        )
        for reason, count in result.refused.most_common():
            typer.echo(f"  {count:,} refused: {reason}")
        for path in grown.files:
            typer.echo(f"  {path}")
    from ajet_tools.dataset.expanded import Interrupted

    if isinstance(result.stopped, Interrupted):
        raise KeyboardInterrupt
    if result.stopped is not None:
        raise result.stopped
