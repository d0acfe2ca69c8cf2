"""A call's messages: examples drawn for variety, in the prompt of a strategy."""

from __future__ import annotations

import functools
import random

from ajet_tools.dataset import prompts
from ajet_tools.dataset.drawing import Pool
from ajet_tools.dataset.expanded import Asked
from ajet_tools.dataset.recipe import CIRCUMSTANCE, Recipe
from ajet_tools.dataset.shape import RowShape

__all__ = ["compose", "compose_as"]


def compose(recipe: Recipe, shape: RowShape, model: str, pool: Pool, side: str, number: int, count: int) -> Asked:
    """Call `number`, which asks `model` for `count` rows; everything about it is drawn by its number."""
    chance = random.Random(f"{recipe.seed}:{number}")
    strategy = chance.choices(list(recipe.strategies), list(recipe.strategies.values()))[0]
    return compose_as(strategy, recipe, shape, model, pool, side, number, count)


def compose_as(
    strategy: str, recipe: Recipe, shape: RowShape, model: str, pool: Pool, side: str, number: int, count: int
) -> Asked:
    """The same with a strategy that is given."""
    chance = random.Random(f"{recipe.seed}:{number}:{strategy}")
    examples = pool.draw(recipe.shots, chance)
    language = recipe.languages[number % len(recipe.languages)] if recipe.languages else ""
    drawn = {"persona": chance.choice(recipe.personas), "domain": chance.choice(recipe.domains)}
    form = _form(tuple(shape.describe()), count, language)
    prompt = recipe.prompt(strategy)
    text = prompt.render(
        examples=[shape.example(one.values) for one in examples],
        count=count,
        form=form,
        strategy=strategy,
        language=language,
        **drawn,
    )
    text = text if form in text else f"{text}\n\n{form}"
    seed = chance.getrandbits(31)
    parameters = {
        "strategy": strategy,
        **({"language": language} if language else {}),
        **({name: drawn[name]} if (name := CIRCUMSTANCE.get(strategy)) else {}),
        "temperature": recipe.temperature,
        "max_tokens": recipe.max_tokens,
        "seed": seed,
    }
    provenance = {
        "source": "expand",
        "seeds": list(dict.fromkeys(seed_id for one in examples for seed_id in one.seeds)),
        "examples": [one.id for one in examples],
        "prompt": {"name": prompt.name, "version": prompt.version},
        "model": model,
        "parameters": parameters,
    }
    messages = [
        {"role": "system", "content": _system()},
        {"role": "user", "content": text},
    ]
    return Asked(number, side, count, messages, seed, provenance)


@functools.lru_cache(maxsize=256)
def _form(fields: tuple[str, ...], count: int, language: str) -> str:
    """What a reply has to look like: the same text for most calls of a run."""
    return prompts.load("expand/form").render(fields=fields, count=count, language=language)


@functools.cache
def _system() -> str:
    return prompts.load("expand/system").render()
