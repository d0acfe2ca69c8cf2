"""A whole run of `expand`, from seeds in memory to the files of a directory: what a command and a job call."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet_tools.dataset.endpoint import Endpoint
from ajet_tools.dataset.expand import Expansion
from ajet_tools.dataset.expanded import Expanded
from ajet_tools.dataset.expansion import Directory, Estimate, digest_of, estimate, write
from ajet_tools.dataset.leaks import leaks_of
from ajet_tools.dataset.making import to_the_end
from ajet_tools.dataset.recipe import Recipe
from ajet_tools.dataset.tables import Row
from ajet_tools.dataset.verify import open_verifier

if TYPE_CHECKING:
    from ajet_tools.dataset.meanings import Meanings

__all__ = ["Grown", "grow"]


@dataclass(frozen=True)
class Grown:
    """What a run came to, and the files that it wrote."""

    result: Expanded
    files: list[Path]


def grow(
    seeds: Sequence[Row],
    recipe: Recipe,
    directory: Directory,
    endpoint: Endpoint,
    *,
    verify: str = "none",
    unfenced: bool = False,
    evals: Sequence[str | Path] = (),
    meanings: Meanings | None = None,
    confirm: Callable[[Estimate], None] | None = None,
    watching: Callable[[Expansion], AbstractContextManager[Callable[[Expanded], None]]] | None = None,
) -> Grown:
    """Run to the end and write what there is; `grown.result.stopped` says why it ended early, where it did.

    Args:
        seeds: as `seeds.read_seeds` gives them.
        directory: its `check` was called. What was begun there is gone on with, if it was the same.
        endpoint: closed at the end. Its cache should be `directory.cache`, or no run can be resumed.
        verify, unfenced: what `verify.open_verifier` is given.
        evals: files of evaluation sets; a row that is in one is refused.
        meanings: refuses rows that say the same as another in other words; closed at the end.
        confirm: told what the run may take before the first call; it raises to call it off.
        watching: a context around the run, whose value is called after each call that was taken in.

    Ctrl-C in the main thread ends the run as a spent budget does. Raises ConfigError and TaskError before the first
    call; what fails afterwards is in `stopped`, but for a disk that does not take the files.
    """
    begun = directory.begun()
    if begun is not None:
        recipe = dataclasses.replace(recipe, window=begun["recipe"]["window"])
    verifier = open_verifier(verify, seed=recipe.seed, unfenced=unfenced) if verify != "none" else None
    facts: dict[str, Any] = {
        "recipe": recipe.as_json(),
        "seeds": digest_of(seeds),
        "endpoint": endpoint.base_url,
        "model": endpoint.model,
        "verify": verify,
        "eval": [str(path) for path in evals],
        "embeddings": meanings.as_json() if meanings is not None else None,
    }
    leaks = leaks_of(evals) if evals else None
    told: list[Callable[[Expanded], None]] = []
    facts["counts"] = counts = directory.counts(recipe.count)
    expansion = Expansion(
        seeds, recipe, endpoint, verifier=verifier, leaks=leaks, meanings=meanings, counts=counts,
        on_change=lambda result: _tell(told, result),
    )  # fmt: skip
    if confirm is not None:
        confirm(estimate(expansion, verifier, meanings, endpoint.budget.price))
    directory.begin(facts)
    with watching(expansion) if watching is not None else nullcontext(_unheard) as hear:
        told.append(hear)
        result = asyncio.run(to_the_end(expansion))
    parameters: dict[str, Any] = {"model": endpoint.model, "verify": verify, "seed": recipe.seed}
    parameters["strategies"] = ", ".join(f"{name} {weight:g}" for name, weight in recipe.strategies.items())
    parameters["prompts"] = ", ".join(recipe.prompt(name).label for name in recipe.strategies)
    if meanings is not None:
        parameters["embeddings"] = meanings.in_words()
    files = write(directory, result, {"seeds": len(seeds), "parameters": parameters}, seeds)
    return Grown(result, files)


def _tell(told: list[Callable[[Expanded], None]], result: Expanded) -> None:
    for one in told:
        one(result)


def _unheard(result: Expanded) -> None:
    return
