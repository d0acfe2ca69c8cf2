"""An agent that answers a question with one call, and the judge of its answer."""

from __future__ import annotations

from openai import AsyncOpenAI

import ajet

client = AsyncOpenAI()


@ajet.workflow
async def solve(question: str) -> str:
    """Answer a question. `question` is filled from the task."""
    reply = await client.chat.completions.create(
        model="gpt-4o-mini",
        messages=[
            {"role": "system", "content": "Answer with a number and nothing else."},
            {"role": "user", "content": question},
        ],
    )
    return reply.choices[0].message.content or ""


@ajet.judge
def exact(output: str, answer: str) -> float:
    """1 for the right answer. `output` is what the agent returned, `answer` is filled from the task."""
    return float(output.strip() == answer)
