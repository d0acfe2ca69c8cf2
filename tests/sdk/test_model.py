"""The handle: identity in its base URL, `chat`, and the clients that it makes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk.agent.context import AgentIdentity
from ajet_sdk.agent.model import Model
from ajet_sdk.dialects.json import json_bytes
from ajet_sdk.dialects.openai_chat import read_sampling
from ajet_sdk.engines.http import is_loopback
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.errors import ContextOverflow, EngineError, EngineUnavailable, RequestRefused
from ajet_sdk.gateway.episode import EpisodeSpec, OpenEpisode, SamplingOverride, mix_seed, override
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.protocols import Sampling

USER = [{"role": "user", "content": "hello"}]
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@given(names, st.none() | names, st.booleans(), st.none() | names)
def test_an_identity_survives_its_path_segment(
    agent: str, tag: str | None, trainable: bool, debug: str | None
) -> None:
    identity = AgentIdentity(agent, tag, trainable, debug)
    segment = identity.segment()
    assert AgentIdentity.parse(segment) == identity
    assert segment.isascii() and not set(segment) & set("/?#% \\") - {"%"}


@pytest.fixture
def episode() -> Iterator[OpenEpisode]:
    def reply(ask: Any) -> str:
        text = ask.body["messages"][0]["content"]
        if text == "down":
            raise EngineUnavailable("away")
        return "x" * 50 if text == "long" else f"{ask.agent}: {text}"

    with Gateway() as gateway:
        yield gateway.open(EpisodeSpec("one", ScriptedEngine(reply, max_model_len=200)))


def test_chat_returns_a_message_that_is_a_dict_and_has_attributes(episode: OpenEpisode) -> None:
    async def scenario() -> None:
        model = episode.model()
        message = await model.chat(USER, temperature=0.0)
        assert (
            message["content"] == message.content == "default: hello"
            and message.role == "assistant"
        )
        assert message.tool_calls is None and {**message}["role"] == "assistant"
        follow_up = await model.chat([*USER, message, {"role": "user", "content": "again"}])
        assert follow_up.content == "default: hello"

    asyncio.run(scenario())


def test_chat_raises_what_the_gateway_says(episode: OpenEpisode) -> None:
    async def scenario() -> None:
        model = episode.model()
        with pytest.raises(RequestRefused) as refused:
            await model.chat(USER, use_beam_search=True)
        with pytest.raises(RequestRefused, match="messages must be a list"):
            await model.chat("Hello")  # type: ignore[arg-type]
        with pytest.raises(RequestRefused, match="async_openai"):
            await model.chat(USER, stream=True)
        assert refused.value.parameter == "use_beam_search"
        with pytest.raises(ContextOverflow):
            await model.chat([{"role": "user", "content": "x" * 300}])
        with pytest.raises(EngineUnavailable):
            await model.chat([{"role": "user", "content": "down"}])
        with pytest.raises(EngineError, match="API key"):
            await Model(model.base_url, "sk-foreign", "m").chat(USER)

    asyncio.run(scenario())


def test_agents_are_told_apart_and_clients_work(episode: OpenEpisode) -> None:
    model = episode.model()
    wolf = model.agent("the wolf/1", target_tag="wolf", trainable=False)
    client = wolf.openai()
    reply = client.chat.completions.create(model=wolf.name, messages=USER)  # type: ignore[arg-type]
    assert reply.choices[0].message.content == "the wolf/1: hello"

    async def scenario() -> None:
        async with wolf.agent("seer").async_openai() as other:
            reply = await other.chat.completions.create(model="m", messages=USER)  # type: ignore[arg-type]
            assert reply.choices[0].message.content == "seer: hello"

    asyncio.run(scenario())
    assert [(c.agent, c.target_tag, c.trainable) for c in episode.calls] == [
        ("the wolf/1", "wolf", False),
        ("seer", None, True),
    ]


def test_only_an_episodes_model_has_agents() -> None:
    with pytest.raises(EngineError, match="only be told apart during a run"):
        Model("https://api.openai.com/v1", "sk", "gpt").agent("wolf")


def test_a_runs_sampling_takes_the_place_of_the_agents() -> None:
    requested = read_sampling(
        {"temperature": 0, "top_p": 0.5, "max_tokens": 900, "stop": "END", "seed": 7, "top_k": 3}
    )
    assert requested == Sampling(0.0, 0.5, 3, 900, ("END",), 7, 1)
    run = SamplingOverride(temperature=0.9, top_p=1.0)
    assert override(requested, run, max_tokens=500) == Sampling(0.9, 1.0, 3, 500, ("END",), 7, 1)
    assert override(requested, None, max_tokens=None) == requested
    assert (
        override(
            requested, SamplingOverride(temperature=1.0, greedy=True), max_tokens=None
        ).temperature
        == 0.0
    )
    assert read_sampling({"max_completion_tokens": 5, "max_tokens": 9}).max_tokens == 5


@given(st.none() | st.integers(0, 2**40), st.integers(0, 2**40), names, st.integers(0, 100))
def test_seeds_differ_by_attempt_agent_and_ordinal(
    seed: int | None, attempt: int, agent: str, ordinal: int
) -> None:
    one = mix_seed(seed, attempt, agent, ordinal)
    assert one is not None and 0 <= one < 2**63 and one == mix_seed(seed, attempt, agent, ordinal)
    others = [
        (seed, attempt + 1, agent, ordinal),
        (seed, attempt, agent + "'", ordinal),
        (seed, attempt, agent, -1),
    ]
    assert one not in [mix_seed(*other) for other in others]


def test_a_seed_is_the_same_in_every_process() -> None:
    assert mix_seed(7, 3, "default", 0) == 8817967157869967457
    assert mix_seed(None, None, "default", 0) is None


def test_attempts_get_other_seeds_and_a_request_its_own_where_the_run_leaves_it() -> None:
    def seeds(spec: dict[str, Any], params: dict[str, Any]) -> list[int]:
        with Gateway() as gateway:
            episode = gateway.open(EpisodeSpec("one", ScriptedEngine(lambda ask: "x"), **spec))

            async def scenario() -> None:
                for _ in range(2):
                    await episode.model().chat(USER, **params)

            asyncio.run(scenario())
            return [call.sampling["seed"] for call in episode.calls]

    run = SamplingOverride(temperature=1.0)
    first, second = (
        seeds({"sampling": run, "seed": 1}, {"seed": 5}),
        seeds({"sampling": run, "seed": 2}, {"seed": 5}),
    )
    assert len({*first, *second}) == 4
    assert seeds({"sampling": run, "seed": 1}, {"seed": 5}) == first
    assert seeds({"sampling": None, "seed": 1}, {"seed": 5}) == [5, 5]
    assert len(set(seeds({"sampling": None, "seed": 1}, {}))) == 2


def test_loopback_and_json() -> None:
    assert (
        is_loopback("http://127.0.0.1:80/v1")
        and is_loopback("http://localhost/v1")
        and is_loopback("http://[::1]/")
    )
    assert not is_loopback("https://api.openai.com/v1") and not is_loopback(
        "http://127.0.0.1.evil.example/"
    )
    assert json_bytes({"a": "ü"}) == '{"a":"ü"}'.encode() and json_bytes("\ud800") == b'"\\ud800"'
