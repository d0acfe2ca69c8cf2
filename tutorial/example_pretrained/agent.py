"""Asks a model which number a sentence names, with one example; the judge wants the number and
nothing else."""

from __future__ import annotations

from openai import AsyncOpenAI

import ajet

client = AsyncOpenAI()

EXAMPLE = [
    {
        "role": "user",
        "content": (
            'Which number is in this sentence? "The tower has 52 steps." Answer with the number'
            " only."
        ),
    },
    {"role": "assistant", "content": "52"},
]


@ajet.workflow
async def solve(question: str) -> str:
    messages = [*EXAMPLE, {"role": "user", "content": question}]
    reply = await client.chat.completions.create(model="gpt-4o-mini", messages=messages)
    return reply.choices[0].message.content or ""


@ajet.judge
def exact(output: str, answer: str) -> float:
    """1 where the output is the number alone: one that repeats the sentence, or names two numbers,
    gets nothing."""
    return float(output.strip() == answer)
