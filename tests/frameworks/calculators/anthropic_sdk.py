"""The Anthropic SDK, with a loop of its own."""

from __future__ import annotations

from typing import Any

from anthropic import AsyncAnthropic

import ajet
from tests.frameworks.calculators import calc

client = AsyncAnthropic()
TOOL: Any = {
    "name": "calc",
    "description": "Evaluate arithmetic",
    "input_schema": {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    },
}


@ajet.workflow
async def solve(question: str) -> str:
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(3):
        reply = await client.messages.create(
            model="claude-sonnet-4-0",
            max_tokens=1024,
            system="Answer with a number.",
            messages=messages,
            tools=[TOOL],
        )
        messages.append({"role": "assistant", "content": reply.content})
        if reply.stop_reason != "tool_use":
            return "".join(block.text for block in reply.content if block.type == "text")
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block.id,
                "content": calc(str(block.input.get("expression", ""))),
            }
            for block in reply.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})
    return ""
