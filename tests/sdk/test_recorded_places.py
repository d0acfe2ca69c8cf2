"""A conversation is a fact in the file: its calls are placed where they are recorded, and SQL walks
them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx

import ajet_sdk
from ajet_sdk.agent.context import ObservedExchange
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.gateway.episode import EpisodeSpec, OpenEpisode
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.samples.prefixes import place_all
from ajet_sdk.trace.reader import calls_of, open_trace
from ajet_sdk.trace.writer import TraceWriter

GUIDE = Path(ajet_sdk.__file__).parents[1] / "docs" / "guide" / "traces.md"
FIRST = [{"role": "user", "content": "one"}]
SECOND = [*FIRST, {"role": "assistant", "content": "reply"}, {"role": "user", "content": "two"}]
EDITED = [{"role": "user", "content": "one, edited"}]


def ask(episode: OpenEpisode, messages: list[Any], agent: str = "default") -> None:
    model = episode.model(agent=agent)
    headers = {"authorization": f"Bearer {model.api_key}"}
    httpx.post(
        f"{model.base_url}/chat/completions",
        json={"messages": messages},
        headers=headers,
        timeout=300,
    )


def walk() -> str:
    """The query of the guide."""
    found = re.search(r'ajet trace sql "(WITH RECURSIVE turns.*?)"', GUIDE.read_text(), re.DOTALL)
    assert found
    return found[1]


def test_calls_are_placed_where_they_are_recorded_and_sql_walks_them(tmp_path: Path) -> None:
    path = tmp_path / "trace.duckdb"
    with TraceWriter(path) as writer, Gateway(writer) as gateway:
        episode = gateway.open(
            EpisodeSpec("e", ScriptedEngine(lambda ask: "reply", max_model_len=4000))
        )
        for messages, agent in ((FIRST, "a"), (SECOND, "a"), (EDITED, "a"), (SECOND, "b")):
            ask(episode, messages, agent)
        calls = episode.calls
    first, second, edited, other = calls
    assert (second.extends_call_id, second.parent_call_id) == (first.call_id, first.call_id)
    assert (
        edited.extends_call_id is None
        and edited.parent_call_id == second.call_id
        and edited.prefix_len > 0
    )
    assert other.extends_call_id is None and other.parent_call_id == second.call_id, (
        "of another agent"
    )
    assert other.prefix_messages == 3
    assert list(calls) == place_all(calls)
    with open_trace(path) as reader:
        assert calls_of(reader, "e") == list(calls)
        rows = reader.query(walk()).to_pylist()
    turns = {(row["first"], row["turn"], row["agent"]) for row in rows}
    assert turns == {(c.call_id, 1, c.agent) for c in (first, edited, other)} | {
        (first.call_id, 2, "a")
    }


def test_calls_that_no_gateway_answered_are_placed_too() -> None:
    with Gateway() as gateway:
        episode = gateway.open(
            EpisodeSpec("e", ScriptedEngine(lambda ask: "reply", max_model_len=4000))
        )
        for messages in (FIRST, SECOND):
            request, response = (
                {"messages": messages},
                {"choices": [{"message": {"role": "assistant"}}]},
            )
            exchange = ObservedExchange(
                route="",
                model="other",
                agent="default",
                target_tag=None,
                phase="rollout",
                request=request,
                response=response,
                started_at=1.0,
                ended_at=2.0,
            )
            episode.observed(exchange)
        first, second = episode.calls
    assert (second.parent_call_id, second.prefix_messages, second.extends_call_id) == (
        first.call_id,
        1,
        None,
    )
