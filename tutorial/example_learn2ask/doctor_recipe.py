"""A model of a hundred thousand parameters that has read consultations whose doctor asked at random
six times in ten.

To begin from a real model instead, name one of the hub as `model.path`.
"""

import random

from dialogues import ASK, consultation, held_out

from ajet_sdk.learn.recipe import Demonstration, Recipe

AT_RANDOM = 0.6


def demonstrate(draw: random.Random) -> Demonstration:
    messages, topic = consultation(draw)
    while held_out(messages):
        messages, topic = consultation(draw)
    asked = draw.choice(list(ASK)) if draw.random() < AT_RANDOM else topic
    return Demonstration([*messages, {"role": "assistant", "content": ASK[asked]}])


recipe = Recipe(demonstrate, enough=0.15)
