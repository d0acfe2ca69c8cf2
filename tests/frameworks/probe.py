"""`python -m tests.frameworks.probe NAME`: run a framework's agents on scripted replies, print a
JSON line a cell."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import ajet
from ajet_sdk.config.api_keys import KEYS, placeholder_keys
from ajet_sdk.config.config import Config
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.protocols import Ask
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.rollout.episode import run_episode
from ajet_sdk.samples.timelines import merge
from ajet_sdk.types import Episode, Task
from tests.frameworks.table import CASES, DIALECTS

CELL = re.compile(rf"({'|'.join(DIALECTS)})_({'|'.join(CASES)})(_\w+)?")
FORECAST = {"city": "Paris", "degrees": 21}
"""What a typed agent is to return, as the fields of its type."""
CITIES = ("Paris", "Rome")


@dataclass
class Cell:
    """What one agent gave."""

    agent: str
    dialect: str
    case: str
    ok: bool
    calls: int
    captured: int
    """Calls that the policy answered."""
    exact: bool
    """Every captured call has the ids that its reply was sampled as, with a log-probability
    each."""
    timelines: int
    splits: list[str]
    """Their causes."""
    error: str


class Script:
    """Replies of a model that does what the case is about: says a word, calls the weather tool,
    fills in a type."""

    def __init__(self, case: str, module: Any) -> None:
        self.case = case
        self.replies: list[Any] = []
        self._own = getattr(module, "reply", None)

    def __call__(self, ask: Ask) -> Any:
        reply = self._own(self.case, ask) if self._own is not None else None
        reply = self.reply(ask) if reply is None else reply
        self.replies.append(reply)
        return reply

    def reply(self, ask: Ask) -> Any:
        functions = [tool["function"] for tool in ask.tools or () if tool.get("type") == "function"]
        weather = next((one["name"] for one in functions if "weather" in one["name"]), None)
        others = [one for one in functions if "weather" not in one["name"]]
        last = (ask.messages or [{}])[-1]
        if (
            weather is not None
            and last.get("role") != "tool"
            and self.case in ("tools", "parallel")
        ):
            cities = CITIES if self.case == "parallel" else CITIES[:1]
            return calls_of([(weather, {"city": city}) for city in cities])
        if self.case == "typed" and others:
            return calls_of([(others[0]["name"], filled(others[0].get("parameters") or {}))])
        if self.case == "typed":
            return json.dumps(FORECAST)
        return f"It is sunny. {self.marker(ask)}"

    def marker(self, ask: Ask) -> str:
        """The word of the task, which the answer has to hold: that the reply is this episode's."""
        found = re.search(r"marker-\w+", json.dumps(ask.messages))
        return found[0] if found else "no marker"


def calls_of(calls: list[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """An assistant's message with tool calls."""
    made = [
        {
            "id": f"call_{i}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for i, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": None, "tool_calls": made}


def filled(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of an output tool: the forecast, or the forecast in its one field."""
    fields = schema.get("properties") or {}
    if set(FORECAST) <= set(fields) or not fields:
        return dict(FORECAST)
    return {
        name: json.dumps(FORECAST) if one.get("type") == "string" else FORECAST
        for name, one in fields.items()
    }


async def run(function: Any, script: Script, marker: str, gateway: Gateway) -> Episode:
    """One episode of an agent."""
    engine = ScriptedEngine(script)
    task = Task(
        main_query=f"How is the weather? {marker}",
        metadata={"question": f"How is the weather? {marker}"},
    )
    config = Config.model_validate({"rollout": {"max_retries": 0, "timeout": 300}})

    @ajet.judge
    def judge() -> float:
        return 1.0

    return await run_episode(
        function, judge, Attempt(task), engine=engine, gateway=gateway, config=config
    )


def cell_of(name: str, episode: Episode, script: Script, marker: str) -> Cell:
    """What an episode shows."""
    found = CELL.fullmatch(name)
    assert found is not None
    engine = ScriptedEngine(script)
    captured = [call for call in episode.calls if call.trainable and call.error is None]
    exact = bool(captured) and all(
        call.prompt_ids is not None
        and call.output_ids is not None
        and call.logprobs is not None
        and len(call.logprobs) == len(call.output_ids)
        and is_reply(engine.tokenizer.decode(list(call.output_ids)), script)
        for call in captured
    )
    merged = merge(episode.calls, engine.tokenizer.decode)
    answered = (
        "21" in json.dumps(episode.output, default=str)
        if found[2] == "typed"
        else marker in str(episode.output)
    )
    error = (
        episode.error or next((call.error for call in episode.calls if call.error), "") or ""
    ).strip()
    if not error and not answered:
        error = f"returned {str(episode.output)[:200]!r}"
    return Cell(
        name,
        found[1],
        found[2],
        episode.status == "succeeded" and answered and exact,
        len(episode.calls),
        len(captured),
        exact,
        len(merged.timelines),
        [split.cause for split in merged.splits],
        error[:1500],
    )


def is_reply(text: str, script: Script) -> bool:
    """Whether decoded ids are one of the script's replies: its text, or the names and arguments
    that it calls with."""
    for reply in script.replies:
        wanted = (
            [reply]
            if isinstance(reply, str)
            else [one["function"]["name"] for one in reply["tool_calls"]]
        )
        if all(part in text for part in wanted):
            return True
    return False


async def cells(module: Any) -> list[Cell]:
    made = []
    with Gateway() as gateway:
        for name, function in inspect.getmembers(module, callable):
            found = CELL.fullmatch(name)
            if found is None:
                continue
            marker, script = f"marker-{name.replace('_', '')}", Script(found[2], module)
            made.append(cell_of(name, await run(function, script, marker, gateway), script, marker))
    return made


def main(name: str) -> None:
    """Print the cells as JSON, one a line. What a framework prints goes to standard error."""
    for key in {name for names in KEYS.items() for name in (names[0], *names[1])}:
        os.environ.pop(key, None)  # as of a user who has none
    os.environ.update(
        CREWAI_TRACING_ENABLED="false",
        OTEL_SDK_DISABLED="true",
        LITELLM_LOCAL_MODEL_COST_MAP="True",
        CREWAI_DISABLE_TELEMETRY="true",
        OPENAI_AGENTS_DISABLE_TRACING="1",
        AGNO_TELEMETRY="false",
        HOME=tempfile.mkdtemp(),
    )
    with contextlib.redirect_stdout(sys.stderr), placeholder_keys():
        made = asyncio.run(cells(importlib.import_module(f"tests.frameworks.agents.{name}")))
    for cell in made:
        print(json.dumps(asdict(cell)))
    sys.stdout.flush()
    os._exit(0)  # frameworks leave threads behind that wait for their telemetry


if __name__ == "__main__":
    main(sys.argv[1])
