"""A model of a hundred thousand parameters that has seen both roles: seven words in ten at random.

To begin from a real model instead, name one of the hub as `model.path`.
"""

import random

from lake import MOVES, Lake, distances, draw_lake
from lake_agent import TURNS
from relay_agent import MOVE, PLAN

from ajet_sdk.learn.recipe import Demonstration, Recipe, Shape

STUMBLES = 0.7


def demonstrate(draw: random.Random) -> Demonstration:
    """A walk as one of the two saw it."""
    rows = draw_lake(draw)
    lake, steps = Lake.of(rows), distances(rows)
    is_planner = draw.random() < 0.5
    messages = [{"role": "system", "content": PLAN if is_planner else MOVE}]
    for _ in range(TURNS):
        goal, safe = lake.look().splitlines()
        nearer = [m for m in MOVES if steps.get(lake.beside(m), 99) < steps[lake.at]]
        wish = draw.choice(list(MOVES) if draw.random() < STUMBLES else nearer)
        careful = wish if wish in safe.split() else draw.choice(safe.split()[1:])
        move = draw.choice(list(MOVES)) if draw.random() < STUMBLES else careful
        seen, said = (goal, wish) if is_planner else (f"plan {wish}\n{safe}", move)
        messages += [{"role": "user", "content": seen}, {"role": "assistant", "content": said}]
        if lake.go(move):
            break
    return Demonstration(messages)


recipe = Recipe(demonstrate, enough=0.15, shape=Shape(rope_theta=1000.0))
