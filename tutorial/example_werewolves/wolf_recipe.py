"""Models of a hundred thousand parameters that have seen players who choose with sense four times
in ten.

To begin from a real model instead, name one of the hub as `model.path`.
"""

import random
from contextlib import suppress
from dataclasses import replace
from functools import partial

from wolf_game import NINE, SIX, Game

from ajet_sdk.learn.recipe import Demonstration, Recipe, Shape

SENSE, CLAIMS = 0.4, 0.1
LISTS = ("ally", "wolf", "named")


def choices(text: str) -> tuple[str, dict[str, list[str]]]:
    """What a player is asked, and the choices by list; `other` are those that it knows nothing
    of."""
    *before, last = [line.split() for line in text.splitlines()]
    found = {name: list[str]() for name in LISTS} | {
        line[0]: line[1:] for line in before if line[0] in LISTS
    }
    kinds = {name: [name] for name in LISTS if name in last}
    return last[0], {
        **found,
        **kinds,
        "other": [option for option in last[1:] if option not in kinds],
    }


def every(lists: dict[str, list[str]]) -> list[str]:
    return [option for options in lists.values() for option in options]


def guess(draw: random.Random, text: str) -> str:
    """Any of the choices; now and then somebody claims to be the seer."""
    what, lists = choices(text)
    choice = draw.choice(every(lists))
    return f"{choice} seer" if what == "vote" and draw.random() < CLAIMS else choice


def sensible(draw: random.Random, role: str, text: str) -> str:
    """A choice that helps the player's own side, as far as it can know."""
    what, lists = choices(text)
    if what == "potion":
        return "save" if "save" in lists["other"] else "none"
    if what == "guard":
        return guess(draw, text)
    if lists["wolf"] and what == "vote":
        return f"{lists['wolf'][0]} seer"
    follows = role != "werewolf" and what != "check"
    return draw.choice(
        (follows and lists["named"]) or lists["other"] or lists["named"] or every(lists)
    )


def demonstrate(draw: random.Random, deck: tuple[str, ...] = NINE) -> Demonstration:
    """A game as one player saw it; of nine, who name kinds, one turn of it."""
    while True:
        game = Game(20_000 + draw.randrange(1_000_000), deck, brief=True, kinds=deck is NINE)
        watched = draw.choice([*game.roles])
        messages = [{"role": "system", "content": game.introduction(watched)}]

        async def ask(
            player: int,
            text: str,
            game: Game = game,
            watched: int = watched,
            messages: list[dict[str, str]] = messages,
        ) -> str:
            answer = (
                sensible(draw, game.roles[player], text)
                if draw.random() < SENSE
                else guess(draw, text)
            )
            if player == watched:
                messages += [
                    {"role": "user", "content": text},
                    {"role": "assistant", "content": answer},
                ]
            return answer

        with suppress(StopIteration):
            game.play(ask).send(None)  # nobody here waits for a model: it runs to its end
        turns = len(messages) // 2
        if turns:
            first = 1 + 2 * draw.randrange(turns)
            return Demonstration(
                messages if deck is SIX else [messages[0], *messages[first : first + 2]]
            )


nine = Recipe(
    demonstrate, enough=0.3, min_steps=100, max_steps=300, batch=64, shape=Shape(rope_theta=1000.0)
)
six = replace(
    nine, demonstrate=partial(demonstrate, deck=SIX), min_steps=250, max_steps=500, batch=16
)
