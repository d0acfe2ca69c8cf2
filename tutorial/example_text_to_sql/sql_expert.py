"""A scripted model that knows the reference queries: it plays the agent, so that its calls can be
learnt from."""

import json
import re
from functools import cache
from pathlib import Path

TABLE = re.compile(r"\b(?:from|join)\s+(\w+)", re.IGNORECASE)


@cache
def queries() -> dict[str, str]:
    rows = map(json.loads, Path(__file__).with_name("train.jsonl").read_text().splitlines())
    return {row["question"]: row["answer"] for row in rows}


def reply(ask):
    """First the schema of the tables that the query needs, then the query."""
    query = queries()[ask.messages[1]["content"].partition("\n")[0]]
    if ask.messages[-1]["role"] == "tool" or not ask.tools:
        return query
    tables = ", ".join(dict.fromkeys(TABLE.findall(query)))
    return {
        "tool_calls": [
            {
                "type": "function",
                "function": {"name": "schema", "arguments": json.dumps({"tables": tables})},
            }
        ]
    }
