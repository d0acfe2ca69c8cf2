"""Two agents that cross a frozen lake together: a planner knows the way, an executor the holes.

The planner is told where the goal is, and says a word. The executor hears the word, is told which
moves are safe, and moves. Neither can do it alone.
"""

from lake import MOVES, Lake
from lake_agent import TURNS

import ajet

PLAN, MOVE = "Say where to go.", "Move safely."


@ajet.workflow(trainable_targets=["planner", "executor"])
async def cross(model: ajet.Model, lake: list[str]) -> str:
    """How it ended: `goal`, `hole`, `lost` (turns used up), or `nonsense` (a reply that is no
    move)."""
    world = Lake.of(lake)
    planner = model.agent("planner", target_tag="planner")
    executor = model.agent("executor", target_tag="executor")
    plans = [{"role": "system", "content": PLAN}]
    moves = [{"role": "system", "content": MOVE}]
    for _ in range(TURNS):
        goal, safe = world.look().splitlines()
        plans.append({"role": "user", "content": goal})
        plan = await planner.chat(plans)
        plans.append(plan)
        wish = (plan["content"] or "").strip()
        if wish not in MOVES:
            return "nonsense"
        moves.append({"role": "user", "content": f"plan {wish}\n{safe}"})
        move = await executor.chat(moves)
        moves.append(move)
        step = (move["content"] or "").strip()
        if step not in MOVES:
            return "nonsense"
        end = world.go(step)
        if end:
            return end
    return "lost"
