"""An agent on any machine: claims episodes by URL and runs its calculator against them.

    python agent.py http://127.0.0.1:10086

`reward.py` is read again for every episode: edit it while the model trains. The program can be
killed and started again at any time, and run on several machines at once.
"""

import importlib
import json
import re
import sys
import threading

import openai
import reward

import ajet
from ajet_sdk.errors import SwarmFinished

ATTEMPTS = 16
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


def calc(arguments: str) -> str:
    """The value of `{"expression": "a+b"}`, or `error`."""
    try:
        expression = str(json.loads(arguments)["expression"])
    except (ValueError, KeyError, TypeError):
        return "error"
    parts = re.fullmatch(r"(\d{1,6})\s*([-+*])\s*(\d{1,6})", expression.strip())
    if parts is None:
        return "error"
    a, b = int(parts[1]), int(parts[3])
    return str({"+": a + b, "-": a - b, "*": a * b}[parts[2]])


def solve(client: openai.OpenAI, model: str, question: str) -> str:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    for _ in range(3):
        reply = client.chat.completions.create(model=model, messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            result = calc(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


def work(swarm: ajet.SwarmClient) -> None:
    """Make attempts at the server's tasks until the training is finished."""
    while True:
        try:
            with swarm.episode() as episode:
                task = episode.task
                client = openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key)
                answer = solve(client, episode.model, task.main_query)
                score = importlib.reload(reward).score(answer, str(task.metadata["answer"]))
                episode.end(score, output=answer)
        except SwarmFinished:
            return
        except openai.APIError as error:  # the server was restarted during this attempt
            print(f"{type(error).__name__}: the attempt is made again", file=sys.stderr)


if __name__ == "__main__":
    with ajet.SwarmClient(sys.argv[1] if len(sys.argv) > 1 else None) as swarm:
        threads = [threading.Thread(target=work, args=(swarm,)) for _ in range(ATTEMPTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
