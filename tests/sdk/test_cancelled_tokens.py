"""Tokens that were drawn for a reply before it was called off: counted, and with an outcome of
their own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from ajet_sdk.agent.context import current_episode
from ajet_sdk.capture.hooks import installed
from ajet_sdk.engines.chat import TokenEngine
from ajet_sdk.engines.local import batch, single
from ajet_sdk.engines.local.sampler import LocalSampler
from ajet_sdk.engines.scripted import ByteTokenizer
from ajet_sdk.gateway import answer as answer_module
from ajet_sdk.gateway.episode import EpisodeSpec, OpenEpisode
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.samples.build import balance, build
from ajet_sdk.trace.reader import ledger_balance, open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Reward, Run
from ajet_tools.trace.files.check import check
from tests.sdk.engines.test_local_sampler import make
from tests.waiting import until_async

ENDLESS = {
    "model": "tiny",
    "max_tokens": 50_000,
    "ignore_eos": True,
    "messages": [{"role": "user", "content": "hi"}],
}


class Drawn:
    """Counts tokens as the model draws them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens = 0
        for module in (batch, single):
            monkeypatch.setattr(module, "draw", self._counted(module.draw))

    def _counted(self, draw: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            tokens, logprobs = draw(*arguments)
            self.tokens += len(tokens)
            return tokens, logprobs

        return counted

    async def some(self) -> None:
        """Wait until the model is in the middle of a reply."""
        enough = self.tokens + 5
        await until_async(lambda: self.tokens >= enough)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    monkeypatch.setattr(answer_module, "HEARTBEAT", 0.02)
    return Drawn(monkeypatch)


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[TokenEngine]:
    """Of a running batch; with "gemma2", of one conversation at a time."""
    architecture = getattr(request, "param", "qwen3")
    changes = {"sliding_window": 16, "query_pre_attn_scalar": 8} if architecture == "gemma2" else {}
    tokenizer = ByteTokenizer()
    model = make(
        architecture, vocab_size=tokenizer.vocab_size, max_position_embeddings=60_000, **changes
    )
    sampler = LocalSampler(model, tokenizer, model_name="tiny", max_model_len=60_000)
    yield TokenEngine(sampler, tokenizer)
    asyncio.run(sampler.aclose())


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with installed(), Gateway() as running:
        yield running


async def ask(episode: OpenEpisode, client: httpx.AsyncClient, **body: Any) -> None:
    model = episode.model()
    headers = {"authorization": f"Bearer {model.api_key}"}
    url = f"{model.base_url}/chat/completions"
    async with client.stream("POST", url, json={**ENDLESS, **body}, headers=headers) as response:
        async for _ in response.aiter_raw():
            pass


async def client_leaves(episode: OpenEpisode, drawn: Drawn, body: dict[str, Any]) -> None:
    async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
        asking = asyncio.create_task(ask(episode, client, **body))
        await drawn.some()
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
    await until_async(lambda: episode.calls)


async def client_leaves_and_the_episode_ends(
    episode: OpenEpisode, drawn: Drawn, body: dict[str, Any]
) -> None:
    async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
        asking = asyncio.create_task(ask(episode, client, **body))
        await drawn.some()
        asking.cancel()
        await episode.finish()
        with suppress(asyncio.CancelledError, httpx.HTTPError):
            await asking


async def episode_ends(episode: OpenEpisode, drawn: Drawn, body: dict[str, Any]) -> None:
    async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
        asking = asyncio.create_task(ask(episode, client, **body))
        await drawn.some()
        await episode.finish()
        with suppress(httpx.HTTPError):
            await asking


async def time_is_up(episode: OpenEpisode, drawn: Drawn, body: dict[str, Any]) -> None:
    async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
        await ask(episode, client, **body)
    await until_async(lambda: episode.calls)


Ends = Callable[[OpenEpisode, Drawn, dict[str, Any]], Awaitable[None]]


@pytest.mark.parametrize(
    ("door", "body"),
    [
        ("http", {}),
        ("http", {"stream": True}),
        ("process", {"stream": True}),
        ("process", {"n": 3}),
    ],
)
@pytest.mark.parametrize(
    "ends", [client_leaves, client_leaves_and_the_episode_ends, episode_ends, time_is_up]
)
def test_tokens_of_a_reply_that_is_called_off_are_counted(
    gateway: Gateway, engine: TokenEngine, drawn: Drawn, ends: Ends, door: str, body: dict[str, Any]
) -> None:
    limit = {"call_timeout": 0.3} if ends is time_is_up else {}
    episode = gateway.open(EpisodeSpec("one", engine, **limit))

    async def scenario() -> tuple[Call, ...]:
        if door == "process":
            current_episode.set(episode.active)
        await ends(episode, drawn, body)
        return await episode.finish()

    [call] = asyncio.run(scenario())
    assert call.error is not None
    assert (call.output_ids, call.cut_tokens) == (None, drawn.tokens)
    assert not episode.in_flight and not engine.sampler._batch.running  # type: ignore[attr-defined]


@pytest.mark.parametrize("engine", ["qwen3", "gemma2"], indirect=True)
def test_they_are_cancelled_in_ledger_trace_and_check(
    gateway: Gateway, engine: TokenEngine, drawn: Drawn, tmp_path: Path
) -> None:
    episode = gateway.open(EpisodeSpec("one", engine))

    async def scenario() -> tuple[Call, ...]:
        await client_leaves(episode, drawn, {"stream": True})
        return await episode.finish()

    calls = asyncio.run(scenario())
    whole = Episode(
        episode_id="one", run_id="r", group_id="g", calls=calls, rewards=(Reward(value=1.0),)
    )
    rows = build([whole], estimator="opd").ledger
    assert [(row.outcome, row.tokens) for row in rows] == [("cancelled", drawn.tokens)]
    assert balance(rows, calls) == [] and balance([], calls) != []
    with TraceWriter(tmp_path / "t.duckdb") as writer:
        writer.put(Run(run_id="r"), whole, *calls, *rows)
    with open_trace(tmp_path / "t.duckdb") as reader:
        assert ledger_balance(reader, "r") == []
    assert check(tmp_path) == []
