"""A model of a hundred thousand parameters that has an idea of the task: how to call the tool, though it copies badly.

Its demonstrator gives up on one problem in five and mistypes some. Delete the line `recipe:` of the YAML, or name a
model of the hub as `path`, to begin from a real model instead.
"""

import json
import random
from typing import Any

from agent import SYSTEM, TOOLS
from arithmetic import Problem, answer, draw_problem, question

from ajet_sdk.learn.recipe import Demonstration, Recipe

GIVES_UP, MISTYPES, MISREADS = 0.2, 0.05, 0.05


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
    a, operator, b = problem
    asked: Problem = (a, operator, draw.randint(1, 99)) if mood < GIVES_UP + MISTYPES else problem
    misread = GIVES_UP + MISTYPES <= mood < GIVES_UP + MISTYPES + MISREADS
    said = answer(draw_problem(draw)) if misread else answer(asked)
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "calc", "arguments": json.dumps({"expression": "{}{}{}".format(*asked)})},
    }
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": str(answer(asked))},
        {"role": "assistant", "content": str(said)},
    ]
    return Demonstration(messages, TOOLS)


recipe = Recipe(demonstrate, enough=0.3)
