"""The agent of `lake_agent.py` where the lake is elsewhere: it acts through `env`, in a service's
process."""

import asyncio

import ajet


@ajet.workflow
async def cross(model: ajet.Model, env: ajet.GymEnv, task: ajet.Task) -> str:
    """How it ended, as the environment says."""
    messages = list(task.init_messages)
    while True:
        messages.append(await model.chat(messages))
        seen, _, ended, info = await asyncio.to_thread(env.step, messages[-1])
        if ended:
            return info["end"]
        messages.append({"role": "user", "content": seen})


@ajet.judge
def crossed(env: ajet.GymEnv) -> float:
    return env.evaluate()
