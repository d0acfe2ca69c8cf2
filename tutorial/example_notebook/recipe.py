"""A model of a hundred thousand parameters that has an idea of the task: to write the sum of a
question down.

Its demonstrator gives up on every second question, and mistakes the operator now and then. To begin
from a real model instead, name one of the hub as `model.path`, and leave `model.recipe` out.
"""

import random

from ajet_sdk.learn.recipe import Demonstration, Recipe

GIVES_UP, MISTAKES = 0.5, 0.1


def demonstrate(draw: random.Random) -> Demonstration:
    a, b = draw.randint(10, 99), draw.randint(10, 99)
    operator = asked = draw.choice("+-*")
    mood = draw.random()
    if mood < GIVES_UP + MISTAKES:
        asked = draw.choice("+-*")
    said = "I do not know." if mood < GIVES_UP else f"{a}{asked}{b}"
    question = {"role": "user", "content": f"What is {a}{operator}{b}?"}
    return Demonstration([question, {"role": "assistant", "content": said}])


recipe = Recipe(demonstrate, enough=0.3)
