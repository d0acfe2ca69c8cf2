"""What the sampler drew is what the ledger accounts for, whatever of it the agent got."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.gateway.access import ClientGone, Request
from ajet_sdk.gateway.answer import answer
from ajet_sdk.gateway.episode import EpisodeSpec, OpenEpisode
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.samples.build import balance, build
from ajet_sdk.trace.reader import ledger_balance, open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Reward, Run
from tests.sdk.test_call_endings import Present
from tests.sdk.test_call_endings import request as request_of

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("add", "look")
]
CALLS = "".join(
    f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>\n'
    for name in ("add", "look", "look")
)


class Drawing(ScriptedEngine):
    """Counts the tokens of its replies as they are sampled."""

    def __init__(self) -> None:
        super().__init__(lambda ask: CALLS, logprob=self._count)
        self.drawn = 0

    def _count(self, ids: Sequence[int]) -> list[float]:
        self.drawn += len(ids)
        return [-1.0] * len(ids)


@pytest.fixture
def engine() -> Drawing:
    return Drawing()


@pytest.fixture
def episode(engine: Drawing) -> Iterator[OpenEpisode]:
    with Gateway() as gateway:
        yield gateway.open(EpisodeSpec("one", engine))


def ledger(calls: Sequence[Call], **more: Any) -> Counter[str]:
    """Tokens by outcome of two attempts, of which the first is the better one."""
    other = [call.model_copy(update={"call_id": f"{call.call_id}/2"}) for call in calls]
    both = [
        Episode(episode_id=name, group_id="g", calls=tuple(own), rewards=(Reward(value=value),))
        for name, value, own in (("one", 1.0, calls), ("two", 0.0, other))
    ]
    batch = build(both, **more)
    assert balance(batch.ledger, [*calls, *other]) == []
    tokens: Counter[str] = Counter()
    for row in batch.ledger:
        tokens[row.outcome] += row.tokens if row.episode_id == "one" else 0
    return tokens


@pytest.mark.parametrize(
    ("body", "outcomes"),
    [
        ({}, {"trained"}),
        ({"parallel_tool_calls": False}, {"trained", "cut"}),
        ({"parallel_tool_calls": False, "n": 3}, {"trained", "cut"}),
        ({"stop": ["look"]}, {"trained"}),
        ({"stop": ["look"], "n": 2, "parallel_tool_calls": False}, {"trained"}),
        ({"max_tokens": 20}, {"trained"}),
        ({"max_tokens": 120, "parallel_tool_calls": False}, {"trained", "cut"}),
    ],
)
def test_every_drawn_token_has_an_outcome(
    episode: OpenEpisode, engine: Drawing, body: dict[str, Any], outcomes: set[str]
) -> None:
    client = episode.model().openai()
    client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "go"}], tools=TOOLS, **body
    )
    tokens = ledger(episode.calls)
    assert tokens.total() == engine.drawn and set(tokens) == outcomes
    shorter = ledger(episode.calls, max_tokens=len(episode.calls[0].prompt_ids) + 5)
    assert (
        shorter.total() == engine.drawn
        and shorter["cut"] == tokens["cut"]
        and "truncated" in shorter
    )


def test_cut_tokens_are_in_the_trace_and_its_ledger(
    episode: OpenEpisode, engine: Drawing, tmp_path: Path
) -> None:
    client = episode.model().openai()
    create: Any = client.chat.completions.create
    create(
        model="m",
        messages=[{"role": "user", "content": "go"}],
        tools=TOOLS,
        parallel_tool_calls=False,
    )
    [call] = episode.calls
    assert call.cut_tokens and len(call.output_ids) + call.cut_tokens == engine.drawn
    whole = Episode(
        episode_id="one", run_id="r", group_id="g", calls=(call,), rewards=(Reward(value=1.0),)
    )
    with TraceWriter(tmp_path / "t.duckdb") as writer:
        writer.put(Run(run_id="r"), whole, call, *build([whole], estimator="opd").ledger)
    with open_trace(tmp_path / "t.duckdb") as reader:
        assert ledger_balance(reader, "r") == []
        assert reader.query("SELECT cut_tokens FROM calls_full").to_pylist() == [
            {"cut_tokens": call.cut_tokens}
        ]


def test_a_reply_that_came_too_late_is_recorded_with_its_tokens(
    episode: OpenEpisode, engine: Drawing
) -> None:
    """The engine had answered when the client left."""

    async def leave() -> None:
        asked: Request = request_of()
        assert isinstance(asked.client, Present)
        inner = engine.answer

        async def answer_and_lose_the_client(ask: Any) -> Any:
            reply = await inner(ask)
            asked.client.gone.set_result(None)
            return reply

        engine.answer = answer_and_lose_the_client  # type: ignore[method-assign]
        with pytest.raises(ClientGone):
            await answer(episode, asked)

    asyncio.run(leave())
    [call] = episode.calls
    assert call.error == "undelivered" and call.output_ids is not None
    assert ledger([call]) == {"undelivered": engine.drawn}
