"""DSPy."""

from __future__ import annotations

import json
import re
from typing import Any

import dspy

import ajet
from ajet_sdk.protocols import Ask
from tests.frameworks.agents.weather import Forecast, get_weather

lm = dspy.LM("openai/gpt-4o-mini", cache=False)


def reply(case: str, ask: Ask) -> Any:
    """DSPy's adapter wants marked fields in text, and names them in the last message."""
    text = str((ask.messages or [{}])[-1].get("content"))
    marker = (re.findall(r"marker-\w+", text) or [""])[0]
    done = "sunny in" in text
    values = {
        "answer": f"It is sunny. {marker}",
        "forecast": json.dumps({"city": "Paris", "degrees": 21}),
        "next_tool_name": "finish" if done else "get_weather",
        "next_tool_args": json.dumps({} if done else {"city": "Paris"}),
    }
    names = re.findall(r"\[\[ ## (\w+) ## \]\]", text[text.rindex("Respond with") :])
    return "\n\n".join(f"[[ ## {name} ## ]]\n{values.get(name, '')}" for name in names)


@ajet.workflow
def chat_plain(question: str) -> Any:
    with dspy.context(lm=lm):
        return dspy.Predict("question -> answer")(question=question).answer


@ajet.workflow
async def chat_plain_async(question: str) -> Any:
    with dspy.context(lm=lm):
        return (await dspy.Predict("question -> answer").acall(question=question)).answer


@ajet.workflow
async def chat_stream(question: str) -> Any:
    with dspy.context(lm=lm):
        program = dspy.streamify(dspy.Predict("question -> answer"))
        async for value in program(question=question):
            if isinstance(value, dspy.Prediction):
                return value.answer
    return None


@ajet.workflow
def chat_tools(question: str) -> Any:
    with dspy.context(lm=lm):
        return dspy.ReAct("question -> answer", tools=[get_weather])(question=question).answer


@ajet.workflow
def chat_typed(question: str) -> Any:
    signature = dspy.Signature(
        "question: str -> forecast: Forecast", custom_types={"Forecast": Forecast}
    )
    with dspy.context(lm=lm):
        return dspy.Predict(signature)(question=question).forecast
