"""An agent that crosses a frozen lake, one word a turn, in at most twelve turns."""

from lake import MOVES, Lake

import ajet

SYSTEM = "Reach the goal."
TURNS = 12


@ajet.workflow
async def cross(model: ajet.Model, lake: list[str]) -> str:
    """How it ended: `goal`, `hole`, `lost` (turns used up), or `nonsense` (a reply that is no
    move)."""
    world = Lake.of(lake)
    messages = [{"role": "system", "content": SYSTEM}]
    for _ in range(TURNS):
        messages.append({"role": "user", "content": world.look()})
        reply = await model.chat(messages)
        messages.append(reply)
        move = (reply["content"] or "").strip()
        if move not in MOVES:
            return "nonsense"
        end = world.go(move)
        if end:
            return end
    return "lost"


@ajet.judge
def reached(output: str) -> float:
    return float(output == "goal")
