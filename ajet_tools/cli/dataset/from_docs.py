"""`ajet dataset from-docs`: tasks out of documents."""

from __future__ import annotations

import time
from collections import Counter
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
from ajet_tools.cli.dataset.options import AsJson, counted
from ajet_tools.cli.groups import spelt_out

if TYPE_CHECKING:
    from ajet_tools.dataset.budget import Budget
    from ajet_tools.dataset.corpus import Corpus
    from ajet_tools.dataset.docs_job import Made
    from ajet_tools.dataset.docs_recipe import DocsRecipe
    from ajet_tools.dataset.tables import Row

__all__ = ["app"]

app = typer.Typer(add_completion=False)


@app.command(name="from-docs")
@spelt_out
def from_docs(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...",
            help=".pdf, .docx, .html, .md, .txt, .rst, directories of them at any depth, or - for Markdown on stdin.",
            show_default=False,
        ),
    ],
    *,
    count: Annotated[
        int | None,
        typer.Option("-n", "--count", min=1, help="How many rows to make; without it each part is asked once."),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option("--seeds", metavar="FILE", help="Example tasks: make few-shot tasks in their style.")
    ] = None,
    writing: Writing,
    kind: Annotated[
        list[str] | None,
        typer.Option(help="knowledge or few-shot; repeatable, they take turns. few-shot where there are --seeds."),
    ] = None,
    chunk_size: Annotated[int, typer.Option(help="Longest part of a document in a prompt, in characters.")] = 5120,
    encoding: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of text, Markdown and HTML that is not UTF-8, such as latin-1.")
    ] = None,
    passes: Annotated[int, typer.Option(min=1, help="How often a part is asked at most, to reach -n.")] = 3,
    verify: Verify = "llm",
    unfenced: Unfenced = False,
    temperature: Temperature = 0.7,
    asking: Asking,
    as_json: AsJson = False,
) -> None:
    from ajet_tools.cli.trace.progress import progress_told
    from ajet_tools.dataset.docs_job import make_tasks, read_corpus
    from ajet_tools.dataset.docs_recipe import DocsRecipe

    recipe = DocsRecipe(
        count,
        tuple(kind or (["few-shot"] if seeds else ["knowledge"])),
        tuple(writing.language or ()),
        chunk_size=chunk_size,
        per_call=writing.per_call,
        shots=writing.shots,
        temperature=temperature,
        max_tokens=writing.max_tokens,
        seed=writing.seed,
        validation=writing.validation,
        similarity=writing.similarity,
        max_same_form=writing.max_same_form,
        window=2 * asking.concurrency,
        passes=passes,
        template=writing.template,
    )
    directory = None if writing.show_prompt else writing.directory()
    rows = writing.seeds(seeds) if seeds else []
    with progress_told("Reading documents") as told:
        corpus = read_corpus(paths, recipe, encoding=encoding, told=told)
    if directory is None:
        _show(corpus, recipe, rows, asking.model)
        return
    endpoint = asking.endpoint(directory.cache)
    started = time.monotonic()
    made = make_tasks(
        corpus,
        recipe,
        directory,
        endpoint,
        seeds=rows,
        verify=verify,
        unfenced=unfenced,
        evals=writing.eval or [],
        meanings=writing.meanings(endpoint, asking.cache or directory.cache),
        confirm=lambda taken: confirm(
            taken, writing, ask=asking.scripted is None, quiet=as_json, before=[_read(corpus)]
        ),
        watching=lambda run: progress(run, count, len(run.chunks)),
    )
    _report(made, endpoint.budget, time.monotonic() - started, as_json=as_json)
    if made.failure is not None:
        raise made.failure


def _show(corpus: Corpus, recipe: DocsRecipe, seeds: list[Row], model: str | None) -> None:
    from ajet_tools.dataset.endpoint import Endpoint
    from ajet_tools.dataset.from_docs import FromDocs

    run = FromDocs(corpus, recipe, Endpoint("http://127.0.0.1:9", model or "MODEL"), seeds=seeds)
    show_prompts((run.preview(run.chunks[0], n), recipe.prompt(kind)) for n, kind in enumerate(recipe.kinds))


def _read(corpus: Corpus) -> str:
    chunks = sum(len(one.chunks) for one in corpus.held)
    pages = sum(one.document.pages or 0 for one in corpus.held)
    of_pages = f" ({counted(pages, 'page')} of PDF)" if pages else ""
    return f"{counted(len(corpus.held), 'document')}{of_pages} in {counted(chunks, 'part')}."


def _report(made: Made, budget: Budget, seconds: float, *, as_json: bool) -> None:
    corpus = made.corpus
    sides = Counter(one.side for one in corpus.held)
    documents = {side: sides[side] for side in ("train", "validation")}
    report(
        made.result,
        made.files,
        budget,
        seconds,
        as_json=as_json,
        origins={side: f" (from {counted(number, 'document')})" for side, number in documents.items()},
        more={
            "documents": documents,
            "copies": [{"document": name, "of": other} for name, other in corpus.copies],
            "unreadable": [{"document": one.name, "problem": one.problem} for one in corpus.unreadable],
        },
    )
