"""A Qwen3-VL of a quarter of a million parameters that has seen somebody walk: three steps in ten
at random.

To begin from a real model instead, name one of the hub as `model.path`.
"""

import random

from drawn_lake import MOVES, Lake
from lake import distances, draw_lake
from lake_agent import show

from ajet_sdk.learn.recipe import PICTURE_TEMPLATE, Demonstration, PictureShape, Recipe, Shape

STUMBLES = 0.3
TURNS = 4


def demonstrate(draw: random.Random) -> Demonstration:
    rows = draw_lake(draw)
    lake, steps = Lake.of(rows), distances(rows)
    messages = []
    for _ in range(TURNS):
        nearer = [m for m in MOVES if steps.get(lake.beside(m), 99) < steps[lake.at]]
        move = draw.choice(list(MOVES) if draw.random() < STUMBLES else nearer)
        messages += [show(lake), {"role": "assistant", "content": move}]
        if lake.go(move):
            break
    return Demonstration(messages)


recipe = Recipe(
    demonstrate,
    enough=0.4,
    min_steps=1000,
    max_steps=1200,
    demonstrations=8192,
    lr=1e-3,
    chat_template=PICTURE_TEMPLATE,
    pictures=PictureShape(),
    shape=Shape(max_length=1024),
)
