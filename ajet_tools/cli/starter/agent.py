from openai import OpenAI

import ajet


@ajet.workflow
def solve(question: str) -> str:
    client = OpenAI()  # ajet answers its calls: no key is needed
    reply = client.chat.completions.create(
        model="gpt-4o-mini",
        messages=[
            {"role": "system", "content": "Answer with a number and nothing else."},
            {"role": "user", "content": question},
        ],
    )
    return reply.choices[0].message.content or ""


@ajet.judge
def exact(output: str, answer: str) -> float:
    return float(output.strip() == answer)
