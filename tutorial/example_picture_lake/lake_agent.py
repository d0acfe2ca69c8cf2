"""An agent that crosses a frozen lake which it only sees: a new picture after each move, one word a
turn."""

from drawn_lake import MOVES, Lake, data_url, draw_picture
from openai import AsyncOpenAI

import ajet

TURNS = 12
client = AsyncOpenAI()


def show(lake: Lake) -> dict[str, object]:
    """The message with the picture of the lake as it is now."""
    url = data_url(draw_picture(lake))
    picture = {"type": "image_url", "image_url": {"url": url}}
    return {"role": "user", "content": [picture, {"type": "text", "text": "Which move?"}]}


@ajet.workflow
async def cross(lake: list[str]) -> str:
    """How it ended: `goal`, `hole`, `lost` (turns used up), or `nonsense` (a reply that is no
    move)."""
    world = Lake.of(lake)
    messages = []
    for _ in range(TURNS):
        messages.append(show(world))
        reply = await client.chat.completions.create(model="lake", messages=messages)
        word = (reply.choices[0].message.content or "").strip()
        if word not in MOVES:
            return "nonsense"
        messages.append({"role": "assistant", "content": word})
        end = world.go(word)
        if end:
            return end
    return "lost"


@ajet.judge
def reached(output: str) -> float:
    return float(output == "goal")
