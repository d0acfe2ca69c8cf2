"""A model of a hundred thousand parameters that has seen somebody walk: seven steps in ten at
random.

To begin from a real model instead, name one of the hub as `model.path`.
"""

import random

from lake import MOVES, Lake, distances, draw_lake
from lake_agent import SYSTEM, TURNS

from ajet_sdk.learn.recipe import Demonstration, Recipe, Shape

STUMBLES = 0.7


def demonstrate(draw: random.Random) -> Demonstration:
    rows = draw_lake(draw)
    lake, steps = Lake.of(rows), distances(rows)
    messages = [{"role": "system", "content": SYSTEM}]
    for _ in range(TURNS):
        nearer = [m for m in MOVES if steps.get(lake.beside(m), 99) < steps[lake.at]]
        move = draw.choice(list(MOVES) if draw.random() < STUMBLES else nearer)
        messages += [
            {"role": "user", "content": lake.look()},
            {"role": "assistant", "content": move},
        ]
        if lake.go(move):
            break
    return Demonstration(messages)


recipe = Recipe(demonstrate, enough=0.25, shape=Shape(rope_theta=1000.0))
