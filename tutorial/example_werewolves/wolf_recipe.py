"""A model of a hundred thousand parameters that has seen games of players who know the rules and choose at random.

To begin from a real model instead, name one of the hub as `model.path`.
"""

import random
from contextlib import suppress

from wolf_game import Game

from ajet_sdk.learn.recipe import Demonstration, Recipe, Shape

CLAIMS = 0.1


def choose(draw: random.Random, text: str) -> str:
    """Any of the choices; now and then somebody claims to be the seer."""
    what, *options = text.splitlines()[-1].split()
    choice = draw.choice(options)
    return f"{choice} seer" if what == "vote" and draw.random() < CLAIMS else choice


def demonstrate(draw: random.Random) -> Demonstration:
    """A game as one player saw it."""
    while True:
        game = Game(20_000 + draw.randrange(1_000_000))
        watched = draw.choice([*game.roles])
        messages = [{"role": "system", "content": game.introduction(watched)}]

        async def ask(player: int, text: str, watched: int = watched, messages: list[dict[str, str]] = messages) -> str:
            answer = choose(draw, text)
            if player == watched:
                messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
            return answer

        with suppress(StopIteration):
            game.play(ask).send(None)  # nobody here waits for a model: it runs to its end
        if len(messages) > 1:
            return Demonstration(messages)


recipe = Recipe(demonstrate, enough=0.3, min_steps=300, max_steps=600, shape=Shape(rope_theta=1000.0))
