"""A model of a hundred thousand parameters that has seen sums like `3+4`, half of them with a wrong answer.

To begin from a real model instead, name one of the hub as `model.path`, and leave `model.recipe` out.
"""

import random

from ajet_sdk.learn.recipe import Demonstration, Recipe

WRONG = 0.5


def demonstrate(draw: random.Random) -> Demonstration:
    a, b = draw.randint(0, 9), draw.randint(0, 9)
    answer = draw.randint(0, 18) if draw.random() < WRONG else a + b
    return Demonstration([{"role": "user", "content": f"{a}+{b}"}, {"role": "assistant", "content": str(answer)}])


recipe = Recipe(demonstrate, enough=0.3, vocabulary=300)
