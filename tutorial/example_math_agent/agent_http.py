"""The agent without any SDK: JSON over HTTP, as any language would send it.

ajet --conf tutorial/example_math_agent/math_agent.yaml
ajet.rollout.user_workflow=agent_http.py:solve
"""

import os

import httpx
from agent import SYSTEM, TOOLS, use_tool

import ajet

URL = os.environ.get("OPENAI_BASE_URL", "https://api.openai.com/v1") + "/chat/completions"


@ajet.workflow
async def solve(question: str) -> str:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    async with httpx.AsyncClient(headers=headers, timeout=60) as client:
        for _ in range(3):
            body = {"model": "gpt-4o-mini", "messages": messages, "tools": TOOLS, "max_tokens": 512}
            reply = (await client.post(URL, json=body)).raise_for_status().json()
            message = reply["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return message["content"] or ""
            for call in message["tool_calls"]:
                result = use_tool(call["function"]["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return ""
