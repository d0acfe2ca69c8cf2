"""An agent whose OpenAI client is instrumented with OpenTelemetry keeps its provider, its spans and
how they nest.

Needs `pip install opentelemetry-sdk openinference-instrumentation-openai openai`.
"""

from __future__ import annotations

import asyncio

import pytest

import ajet
from ajet_sdk.config.config import load_config
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.rollout.episode import run_episode

instrumentation = pytest.importorskip("openinference.instrumentation.openai")
openai = pytest.importorskip("openai")
pytestmark = pytest.mark.slow


def test_the_span_of_a_captured_call_stands_in_the_agents_own() -> None:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    if not isinstance(trace.get_tracer_provider(), TracerProvider):  # a process takes one only
        trace.set_tracer_provider(TracerProvider())
    provider, kept = trace.get_tracer_provider(), InMemorySpanExporter()
    assert isinstance(provider, TracerProvider)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    instrumentation.OpenAIInstrumentor().instrument(tracer_provider=provider)

    @ajet.workflow
    async def agent(question: str) -> str:
        client = openai.AsyncOpenAI(api_key="sk-none", base_url="http://model.invalid/v1")
        with provider.get_tracer("agent").start_as_current_span("outer"):
            messages = [{"role": "user", "content": question}]
            reply = await client.chat.completions.create(model="any", messages=messages)
        return str(reply.choices[0].message.content)

    @ajet.judge
    def judge(output: str) -> float:
        return float(output == "pong")

    async def main() -> ajet.Episode:
        with Gateway() as gateway:
            return await run_episode(
                agent,
                judge,
                Attempt(ajet.Task(task_id="one", main_query="ping")),
                engine=ScriptedEngine(["pong"]),
                gateway=gateway,
                config=load_config(values={"ajet": {}}),
            )

    finished = asyncio.run(main())
    instrumentation.OpenAIInstrumentor().uninstrument()
    assert finished.reward == 1.0 and finished.calls[0].output_ids is not None, finished.error
    assert trace.get_tracer_provider() is provider
    chat, outer = kept.get_finished_spans()
    assert (chat.name, outer.name) == ("ChatCompletion", "outer")
    assert (
        chat.parent is not None
        and chat.parent.span_id == outer.context.span_id
        and outer.parent is None
    )
    assert "pong" in str(dict(chat.attributes or {}))
