"""An agent that plays the numbers game of Countdown: a move a turn, until the target is there or
two are made."""

from numbers_game import after, chosen, look, moves

import ajet

SYSTEM = "Reach the target."
TURNS = 2


@ajet.workflow
async def play(model: ajet.Model, numbers: list[int], target: int) -> str:
    """How it ended: `reached`, `missed`, or `nonsense` (a reply that is no move)."""
    left = tuple(numbers)
    messages = [{"role": "system", "content": SYSTEM}]
    for _ in range(TURNS):
        messages.append({"role": "user", "content": look(left, target)})
        reply = await model.chat(messages)
        messages.append(reply)
        move = chosen(left, (reply["content"] or "").strip())
        if move is None:
            return "nonsense"
        if moves(left)[move] == target:
            return "reached"
        left = after(left, move)
    return "missed"


@ajet.judge
def reached(output: str) -> float:
    return float(output == "reached")
