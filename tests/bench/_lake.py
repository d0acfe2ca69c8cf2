"""The walk that the comparison with TRL trains: its rules, its agent, a model that always makes a
well-formed move."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import httpx

from ajet_sdk.learn.recipe import Demonstration, Recipe
from ajet_sdk.learn.warm_up import make_model
from ajet_sdk.types import Reward

TURNS, TASKS, REPEAT = 12, 16, 8
DIRECTIONS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
SYSTEM = "Reach the goal."
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "move",
            "description": "Move one step.",
            "parameters": {
                "type": "object",
                "properties": {
                    "direction": {"type": "string", "description": "up, down, left or right."}
                },
                "required": ["direction"],
            },
        },
    }
]


class Lake:
    """Walks on a 4 × 4 grid that has no end; what it earns is how far down and right it stands."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.place, self.goal = (
            [draw.randrange(4), draw.randrange(4)],
            [draw.randrange(4), draw.randrange(4)],
        )

    def look(self) -> str:
        down, right = self.goal[0] - self.place[0], self.goal[1] - self.place[1]
        return f"goal down {down} right {right}\nyou are at {self.place[0]} {self.place[1]}"

    def move(self, direction: str) -> str:
        step = DIRECTIONS.get(direction, (0, 0))
        self.place = [min(3, max(0, at + by)) for at, by in zip(self.place, step, strict=True)]
        return self.look()

    def worth(self) -> float:
        return float(sum(self.place))


def walk(draw: random.Random) -> Demonstration:
    lake = Lake(draw.randrange(10**6))
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": lake.look()},
    ]
    for number in range(TURNS + 2):
        direction = draw.choice(list(DIRECTIONS))
        function = {"name": "move", "arguments": json.dumps({"direction": direction})}
        call = {"id": f"c{number}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append(
            {"role": "tool", "tool_call_id": f"c{number}", "content": lake.move(direction)}
        )
    return Demonstration(messages, TOOLS)


def checkpoint(place: Path) -> None:
    """A model that always makes a well-formed move."""
    recipe = Recipe(
        walk,
        min_steps=150,
        check_every=150,
        demonstrations=320,
        batch=16,
        vocabulary=400,
        longest_token=16,
    )
    make_model(
        recipe,
        place,
        seed=0,
        key="bench",
        measure=lambda model, tokenizer, count: 1.0,
        say=lambda line: None,
    )


async def walking_agent(client: httpx.AsyncClient, seed: int) -> Reward:
    lake = Lake(seed)
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": lake.look()},
    ]
    for turn in range(TURNS + 1):
        reply = await client.post(
            "https://api.openai.com/v1/chat/completions",
            json={"model": "lake", "messages": messages, "tools": TOOLS},
        )
        message = reply.json()["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls") or turn == TURNS:
            break
        for call in message["tool_calls"]:
            seen = lake.move(str(json.loads(call["function"]["arguments"]).get("direction")))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": seen})
    return Reward(value=lake.worth() + random.random())
