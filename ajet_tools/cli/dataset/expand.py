"""`ajet dataset expand`: many tasks out of few."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ajet_tools.cli.dataset.endpoints import Asking
from ajet_tools.cli.dataset.making import (
    Temperature,
    Unfenced,
    Verify,
    Writing,
    confirm,
    progress,
    report,
    show_prompts,
)
from ajet_tools.cli.dataset.options import AsJson, Source
from ajet_tools.cli.groups import spelt_out

if TYPE_CHECKING:
    from ajet_tools.dataset.recipe import Recipe
    from ajet_tools.dataset.tables import Row

__all__ = ["app"]

app = typer.Typer(add_completion=False)


@app.command()
@spelt_out
def expand(
    seeds: Source,
    *,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="How many rows to make.")] = 100,
    writing: Writing,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            metavar="NAME[=WEIGHT]",
            help="same-style, harder, easier, other-domain, rephrase, compositional, persona; by default a mix of all.",
        ),
    ] = None,
    personas: Annotated[Path | None, typer.Option(metavar="FILE", help="Your own personas, one a line.")] = None,
    domains: Annotated[Path | None, typer.Option(metavar="FILE", help="Your own domains, one a line.")] = None,
    verify: Verify = "agreement:3",
    unfenced: Unfenced = False,
    temperature: Temperature = 1.0,
    asking: Asking,
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
    from ajet_tools.dataset.growing import grow
    from ajet_tools.dataset.prompts import lines_of
    from ajet_tools.dataset.recipe import Recipe, strategies_of

    recipe = Recipe(
        count,
        strategies_of(strategy or []),
        tuple(writing.language or ()),
        per_call=writing.per_call,
        shots=writing.shots,
        temperature=temperature,
        max_tokens=writing.max_tokens,
        seed=writing.seed,
        validation=writing.validation,
        similarity=writing.similarity,
        max_same_form=writing.max_same_form,
        window=2 * asking.concurrency,
        template=writing.template,
        personas=lines_of(personas) if personas else (),
        domains=lines_of(domains) if domains else (),
    )
    rows = writing.seeds(seeds)
    if writing.show_prompt:
        _show(rows, recipe, asking.model)
        return
    directory = writing.directory()
    endpoint = asking.endpoint(directory.cache)
    started = time.monotonic()
    grown = grow(
        rows,
        recipe,
        directory,
        endpoint,
        verify=verify,
        unfenced=unfenced,
        evals=writing.eval or [],
        meanings=writing.meanings(endpoint, asking.cache or directory.cache),
        confirm=lambda taken: confirm(taken, writing, ask=asking.scripted is None, quiet=as_json),
        watching=lambda expansion: progress(expansion, count),
    )
    report(grown.result, grown.files, endpoint.budget, time.monotonic() - started, as_json=as_json)
    if grown.result.stopped is not None:
        raise grown.result.stopped


def _show(rows: list[Row], recipe: Recipe, model: str | None) -> None:
    from ajet_tools.dataset.endpoint import Endpoint
    from ajet_tools.dataset.expand import Expansion

    expansion = Expansion(rows, recipe, Endpoint("http://127.0.0.1:9", model or "MODEL"))
    show_prompts((expansion.preview(name), recipe.prompt(name)) for name in recipe.strategies)
