"""An agent that writes dates in one form. Its prompt says nothing of which."""

import ajet

SYSTEM = "Answer the question."


@ajet.workflow
async def solve(question: str, model: ajet.Model) -> str:
    reply = await model.chat(
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    )
    return reply["content"] or ""


@ajet.judge
def exact(output: str, answer: str) -> ajet.Reward:
    right = output == answer
    return ajet.Reward(
        value=float(right), reason="Right." if right else f"Wrong: {answer} was wanted."
    )
