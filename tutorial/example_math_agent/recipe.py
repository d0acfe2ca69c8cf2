"""A model of a hundred thousand parameters that has an idea of the task: how to call the tool.

Its demonstrator gives up on every second problem and mistakes the operator now and then. To begin
from a real model instead, name one of the hub as `model.path`.
"""

import json
import random
from typing import Any

from agent import SYSTEM, TOOLS
from arithmetic import OPERATORS, Problem, answer, draw_problem, question

from ajet_sdk.learn.recipe import Demonstration, Recipe

GIVES_UP, MISTAKES = 0.5, 0.1


def demonstrate(draw: random.Random) -> Demonstration:
    problem = draw_problem(draw)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": question(problem)},
    ]
    mood = draw.random()
    if mood < GIVES_UP:
        messages.append({"role": "assistant", "content": "I do not know."})
        return Demonstration(messages, TOOLS)
    asked: Problem = problem
    if mood < GIVES_UP + MISTAKES:
        asked = (problem[0], draw.choice(OPERATORS), problem[2])
    call = {
        "id": "call_1",
        "type": "function",
        "function": {
            "name": "calc",
            "arguments": json.dumps({"expression": "{}{}{}".format(*asked)}),
        },
    }
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": str(answer(asked))},
        {"role": "assistant", "content": str(answer(asked))},
    ]
    return Demonstration(messages, TOOLS)


recipe = Recipe(demonstrate, enough=0.35)
