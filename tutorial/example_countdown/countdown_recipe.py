"""A model of a hundred thousand parameters that has seen somebody play, every second move at
random.

To begin from a real model instead, name one of the hub as `model.path`.
"""

import random
from string import ascii_lowercase

from countdown_agent import SYSTEM, TURNS
from numbers_game import after, chosen, draw_task, look, moves, solutions

from ajet_sdk.learn.recipe import Demonstration, Recipe, Shape

GUESSES = 0.5


def demonstrate(draw: random.Random) -> Demonstration:
    numbers, target = draw_task(draw)
    messages = [{"role": "system", "content": SYSTEM}]
    for _ in range(TURNS):
        good = [] if draw.random() < GUESSES else [*solutions(numbers, target)]
        move = draw.choice(good or [*moves(numbers)])
        letter = next(one for one in ascii_lowercase if chosen(numbers, one) == move)
        messages += [
            {"role": "user", "content": look(numbers, target)},
            {"role": "assistant", "content": letter},
        ]
        if moves(numbers)[move] == target:
            break
        numbers = after(numbers, move)
    return Demonstration(messages)


recipe = Recipe(
    demonstrate, enough=0.1, min_steps=200, max_steps=500, shape=Shape(rope_theta=1000.0)
)
