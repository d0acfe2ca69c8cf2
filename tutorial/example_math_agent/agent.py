"""An arithmetic agent as its author wrote it against the OpenAI SDK; the two decorators are all
that ajet adds."""

import json
import re

from openai import AsyncOpenAI

import ajet

client = AsyncOpenAI()

SYSTEM = "Answer with a number."
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calc",
            "description": "Evaluate arithmetic.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]


def calc(expression: str) -> str:
    """The value of `a+b`, `a-b` or `a*b`."""
    parts = re.fullmatch(r"(\d{1,6})\s*([-+*])\s*(\d{1,6})", expression.strip())
    if parts is None:
        return "error"
    a, b = int(parts[1]), int(parts[3])
    return str({"+": a + b, "-": a - b, "*": a * b}[parts[2]])


def use_tool(arguments: str) -> str:
    try:
        return calc(str(json.loads(arguments)["expression"]))
    except (ValueError, KeyError, TypeError):
        return "error"


@ajet.workflow
async def solve(question: str) -> str:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    for _ in range(3):
        reply = await client.chat.completions.create(
            model="gpt-4o-mini", messages=messages, tools=TOOLS, max_tokens=512
        )
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            result = use_tool(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


@ajet.judge
def right(output: str, answer: str) -> float:
    """1 where the last number of the output is the answer."""
    numbers = re.findall(r"-?\d+", output)
    return float(bool(numbers) and int(numbers[-1]) == int(answer))
