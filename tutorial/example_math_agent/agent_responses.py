"""The agent over OpenAI's Responses API, whose items are the history.

ajet --conf tutorial/example_math_agent/math_agent.yaml
ajet.rollout.user_workflow=agent_responses.py:solve
"""

from agent import SYSTEM, TOOLS, client, use_tool

import ajet

FUNCTIONS = [{"type": "function", **tool["function"]} for tool in TOOLS]


@ajet.workflow
async def solve(question: str) -> str:
    items = [{"role": "user", "content": question}]
    for _ in range(3):
        reply = await client.responses.create(
            model="gpt-4o-mini",
            instructions=SYSTEM,
            input=items,
            tools=FUNCTIONS,
            max_output_tokens=512,
        )
        items += [item.model_dump(exclude_none=True) for item in reply.output]
        calls = [item for item in reply.output if item.type == "function_call"]
        if not calls:
            return reply.output_text
        for call in calls:
            result = use_tool(call.arguments)
            items.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": result}
            )
    return ""
