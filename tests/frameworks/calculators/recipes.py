"""A starting model for each calculator:
`model.recipe: tests.frameworks.calculators.recipes->langgraph`.

A framework sends tool schemas and messages of its own, so what is demonstrated is what it really
sends: the agent runs once on scripted replies, and each demonstration is that conversation with
another problem put in. Whoever demonstrates gives up on every second problem and mistakes the
operator now and then, as in the math tutorial.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from ajet_sdk.config.config import Config
from ajet_sdk.config.objects import load_object
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.learn.recipe import Demonstration, Recipe
from ajet_sdk.protocols import Ask
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.rollout.episode import run_episode
from ajet_sdk.tokens.template import clean
from ajet_sdk.types import Task
from tests.frameworks.probe import calls_of

ROOT = Path(__file__).parents[3]
TUTORIAL = ROOT / "tutorial/example_math_agent"
GIVES_UP, MISTAKES = 0.5, 0.1
EXPRESSION, RESULT = "12345+67890", "80235"
"""Of the recorded problem; they stand nowhere else in a prompt."""
CLOCK = re.compile(r"\d\d:\d\d:\d\d")
"""The time of day, which AgentScope 2 tells the model."""


def reply(ask: Ask) -> Any:
    """What the recorded model says: a call of the calculator, then what that gave."""
    if (ask.messages or [{}])[-1].get("role") == "tool":
        return RESULT
    name = next(one["function"]["name"] for one in ask.tools if "calc" in one["function"]["name"])
    return calls_of([(name, {"expression": EXPRESSION})])


async def record(name: str) -> dict[str, Any]:
    """The last request of a framework's agent, with the reply to it: its messages and tools."""
    solve = importlib.import_module(f"tests.frameworks.calculators.{name}").solve
    right = load_object(f"{TUTORIAL}/agent.py->right")
    question = f"What is {EXPRESSION}?"
    task = Task(main_query=question, metadata={"question": question, "answer": RESULT})
    with Gateway() as gateway:
        episode = await run_episode(
            solve,
            right,
            Attempt(task),
            engine=ScriptedEngine(reply),
            gateway=gateway,
            config=Config(),
        )
    if not episode.reward:
        raise SystemExit(
            f"{name} does not solve the recorded problem: {episode.error or episode.output}"
        )
    request = episode.calls[-1].request
    messages = [
        clean(message)
        for message in [*request["messages"], {"role": "assistant", "content": RESULT}]
    ]
    return {"messages": messages, "tools": request["tools"]}


@functools.cache
def recipe_of(name: str) -> Recipe:
    """The recipe of a framework's agent, which is recorded in a process and an event loop of its
    own."""
    command = [sys.executable, "-m", "tests.frameworks.calculators.recipes", name]
    recorded = json.loads(
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    )
    text, tools = json.dumps(recorded["messages"]), recorded["tools"]
    draw_problem, operators, answer = (
        load_object(f"{TUTORIAL}/arithmetic.py->{one}")
        for one in ("draw_problem", "OPERATORS", "answer")
    )

    def demonstrate(draw: random.Random) -> Demonstration:
        problem = draw_problem(draw)
        mood = draw.random()
        used = (
            problem
            if mood >= GIVES_UP + MISTAKES
            else (problem[0], draw.choice(operators), problem[2])
        )
        clocked = CLOCK.sub(
            lambda _: "{:02}:{:02}:{:02}".format(*map(draw.randrange, (24, 60, 60))), text
        )
        messages = json.loads(
            clocked.replace(f"What is {EXPRESSION}", "What is {}{}{}".format(*problem))
            .replace(EXPRESSION, "{}{}{}".format(*used))
            .replace(RESULT, str(answer(used)))
        )
        if mood < GIVES_UP:
            first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
            messages = [*messages[:first], {"role": "assistant", "content": "I do not know."}]
        return Demonstration(messages, tools)

    return Recipe(demonstrate)


def __getattr__(name: str) -> Recipe:
    if name.startswith("_"):
        raise AttributeError(name)
    return recipe_of(name)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(record(sys.argv[1]))))
