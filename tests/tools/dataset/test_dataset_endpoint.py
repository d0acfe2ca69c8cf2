"""The endpoint that writes data, over real HTTP: what is asked again, what is not, what is paid
for."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse

from ajet_sdk.engines import pace
from ajet_sdk.engines.budget import Budget, BudgetSpent, Price, tokens_of
from ajet_sdk.engines.client import ModelClient
from ajet_sdk.engines.reply_cache import CacheError
from ajet_sdk.errors import ConfigError, EndpointMisconfigured, EngineUnavailable
from ajet_tools.dataset.model.open import open_endpoint

ASK = [{"role": "user", "content": "Say something."}]


def asked(server: Any, *requests: dict[str, Any], **options: Any) -> list[Any]:
    """What each request came to, texts or the error; all are made at once."""

    async def run() -> list[Any]:
        endpoint = ModelClient(server.url, "writer", options.pop("key", "k"), **options)
        try:
            calls = [endpoint.chat(one.pop("messages", ASK), **one) for one in requests]
            return await asyncio.gather(*calls, return_exceptions=True)
        finally:
            await endpoint.aclose()

    return asyncio.run(run())


def test_a_reply_is_asked_for_with_the_model_key_and_parameters(model_server) -> None:
    server = model_server(lambda body, number: "hello")
    assert asked(server, {"temperature": 0.5, "max_tokens": 9, "seed": 3}) == [["hello"]]
    [request] = server.requests
    assert (request["model"], request["temperature"], request["max_tokens"], request["seed"]) == (
        "writer",
        0.5,
        9,
        3,
    )
    assert server.headers[0]["authorization"] == "Bearer k"


def test_never_more_at_once_than_the_concurrency(model_server) -> None:
    server = model_server(lambda body, number: (0.05, "x"))
    assert asked(server, *({"seed": i} for i in range(20)), concurrency=4) == [["x"]] * 20
    assert server.most_at_once == 4


def test_429_is_waited_out_as_retry_after_says(model_server) -> None:
    def say(body: Any, number: int) -> Any:
        return (
            "x"
            if number >= 6
            else model_server.refusal(429, "slow down", headers={"retry-after": "0.2"})
        )

    server = model_server(say)
    started = time.monotonic()
    assert asked(server, *({"seed": i} for i in range(3))) == [["x"]] * 3
    assert time.monotonic() - started >= 0.4
    assert len(server.requests) == 9


def test_429_holds_back_the_requests_that_have_not_been_made_yet(model_server) -> None:
    def say(body: Any, number: int) -> Any:
        return (
            "x"
            if number
            else model_server.refusal(429, "slow down", headers={"retry-after": "0.5"})
        )

    server = model_server(say)

    async def run() -> float:
        endpoint = ModelClient(server.url, "writer")
        first = asyncio.create_task(endpoint.chat(ASK, seed=1))
        while not server.requests:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        started = time.monotonic()
        await endpoint.chat(ASK, seed=2)
        waited = time.monotonic() - started
        await first
        await endpoint.aclose()
        return waited

    assert asyncio.run(run()) >= 0.3


def test_429_past_the_patience_says_what_to_do(model_server) -> None:
    server = model_server(
        lambda body, number: model_server.refusal(429, "slow", headers={"retry-after": "0.2"})
    )
    [error] = asked(server, {}, patience=0.5)
    assert isinstance(error, EngineUnavailable) and error.status == 429
    assert "429: slow" in str(error) and "concurrency" in str(error)


def test_a_spent_quota_is_not_waited_for(model_server) -> None:
    server = model_server(
        lambda body, number: model_server.refusal(429, "You exceeded your current quota, see")
    )
    [error] = asked(server, {})
    assert isinstance(error, EngineUnavailable) and error.status == 429
    assert len(server.requests) == 1


def test_500_is_tried_again_and_then_given_up(
    model_server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "FIRST_WAIT", 0.01)
    server = model_server(lambda body, number: model_server.refusal(500, "broken"))
    [error] = asked(server, {}, retries=2)
    assert isinstance(error, EngineUnavailable) and error.status == 500
    assert "500: broken" in str(error) and "3 attempts" in str(error)
    assert len(server.requests) == 3


def test_a_wrong_key_is_not_tried_again(model_server) -> None:
    server = model_server(lambda body, number: model_server.refusal(401, "Incorrect API key"))
    [error] = asked(server, {})
    assert isinstance(error, EndpointMisconfigured)
    assert "401: Incorrect API key" in str(error) and "check the API key" in str(error)
    assert len(server.requests) == 1


def test_a_parameter_that_the_server_names_as_unknown_is_left_out(model_server) -> None:
    def say(body: Any, number: int) -> Any:
        if "max_tokens" in body:
            return model_server.refusal(
                400,
                "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens'.",
                param="max_tokens",
            )
        if "seed" in body:
            return model_server.refusal(400, "Extra inputs are not permitted", param="seed")
        return "x"

    server = model_server(say)
    assert asked(server, {"seed": 1, "max_tokens": 7}) == [["x"]]
    assert server.requests[-1]["max_completion_tokens"] == 7


def test_a_server_that_knows_no_n_is_asked_once_for_each(model_server) -> None:
    server = model_server(lambda body, number: f"reply {number}")
    assert asked(server, {"n": 3, "seed": 10}) == [["reply 0", "reply 1", "reply 2"]]
    assert [request["seed"] for request in server.requests] == [10, 11, 12]


def test_a_cached_reply_is_not_paid_for_again(model_server, tmp_path: Path) -> None:
    server = model_server(lambda body, number: f"reply {number}")
    kept = {"cache": tmp_path / "replies.sqlite"}
    first = asked(server, {"seed": 1}, **kept)
    assert asked(server, {"seed": 1}, **kept) == first
    assert len(server.requests) == 1
    for changed in ({"seed": 2}, {"seed": 1, "temperature": 0.1}, {"seed": 1, "max_tokens": 5}):
        asked(server, changed, **kept)
    asked(server, {"seed": 1, "messages": [{"role": "user", "content": "Other."}]}, **kept)
    assert len(server.requests) == 5


def test_equal_requests_at_once_are_one_request(model_server) -> None:
    server = model_server(lambda body, number: (0.05, f"reply {number}"))
    assert asked(server, *({"seed": 1} for _ in range(5))) == [["reply 0"]] * 5
    assert len(server.requests) == 1


def test_when_the_one_who_asked_is_cancelled_the_other_asks(model_server) -> None:
    server = model_server(lambda body, number: (0.1, f"reply {number}"))

    async def run() -> list[str]:
        endpoint = ModelClient(server.url, "writer")
        first = asyncio.create_task(endpoint.chat(ASK))
        await asyncio.sleep(0.02)
        second = asyncio.create_task(endpoint.chat(ASK))
        await asyncio.sleep(0.02)
        first.cancel()
        said = await second
        await endpoint.aclose()
        return said

    assert asyncio.run(run())[0].startswith("reply")


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CacheError, match="cannot store replies"):
        ModelClient("http://127.0.0.1:9/v1", "m", cache=tmp_path / "file" / "replies.sqlite")


@pytest.mark.parametrize("at_once", [1, 8])
def test_a_budget_of_calls_is_exact(model_server, at_once: int) -> None:
    server = model_server(lambda body, number: (0.01, "x"))
    got = asked(
        server, *({"seed": i} for i in range(20)), budget=Budget(calls=7), concurrency=at_once
    )
    assert sum(one == ["x"] for one in got) == 7 == len(server.requests)
    assert all(one == ["x"] or isinstance(one, BudgetSpent) for one in got)
    assert "7 calls" in str(next(one for one in got if isinstance(one, BudgetSpent)))


def test_a_budget_of_calls_counts_each_request_for_several_replies(model_server) -> None:
    server = model_server(lambda body, number: "x")
    [error] = asked(server, {"n": 5}, budget=Budget(calls=3))
    assert isinstance(error, BudgetSpent) and len(server.requests) == 3


def test_a_budget_of_tokens_or_money_stops_near_it(model_server) -> None:
    server = model_server(lambda body, number: "x")  # 150 tokens each
    for budget in (Budget(tokens=1500), Budget(money=1.5, price=Price(1000.0, 1000.0))):
        got = asked(
            server,
            *({"seed": i, "max_tokens": 200} for i in range(30)),
            budget=budget,
            concurrency=8,
        )
        answered = sum(one == ["x"] for one in got)
        assert 7 <= answered <= 10
        assert budget.spent.tokens == 150 * answered
    assert budget.cost == pytest.approx(0.15 * answered)


def test_after_vectors_too_a_call_sets_aside_all_that_it_may_say(model_server, embedder) -> None:
    usage = {"prompt_tokens": 100, "completion_tokens": 600}
    long = {"choices": [{"message": {"role": "assistant", "content": "x"}}], "usage": usage}
    writer, maker = model_server(lambda body, number: JSONResponse(long)), embedder(str)

    async def run() -> Budget:
        budget = Budget(tokens=1000)
        vectors, texts = (
            ModelClient(maker.url, "m", budget=budget),
            ModelClient(writer.url, "m", budget=budget),
        )
        assert len(await vectors.embed(["a", ""])) == 2
        assert (budget.spent.calls, budget.spent.tokens) == (1, 20)
        calls = (texts.chat(ASK, seed=number, max_tokens=600) for number in range(4))
        assert (
            sum(one == ["x"] for one in await asyncio.gather(*calls, return_exceptions=True)) == 1
        )
        await vectors.aclose()
        await texts.aclose()
        return budget

    assert asyncio.run(run()).spent.tokens == 720


def test_an_answer_that_cannot_be_read_was_paid_for(model_server) -> None:
    usage = {"prompt_tokens": 100, "completion_tokens": 50}
    server = model_server(lambda body, number: JSONResponse({"choices": [], "usage": usage}))
    budget = Budget(price=Price(1.0, 2.0))
    [error] = asked(server, {}, budget=budget)
    assert isinstance(error, EngineUnavailable) and (budget.spent.calls, budget.spent.tokens) == (
        1,
        150,
    )
    assert budget.cost == pytest.approx(200 / 1e6)


def test_money_needs_a_price() -> None:
    with pytest.raises(ConfigError, match="--price"):
        Budget(money=1.0)
    with pytest.raises(ConfigError, match=r"0\.15,0\.60"):
        Price.parse("cheap")
    assert Price.parse("0.15,0.60").of(1e6, 2e6) == pytest.approx(1.35)


def test_a_rate_spaces_requests_out(model_server) -> None:
    server = model_server(lambda body, number: "x")
    started = time.monotonic()
    asked(server, *({"seed": i} for i in range(4)), per_minute=600)
    assert time.monotonic() - started >= 0.3


def test_a_scripted_endpoint_needs_no_network_and_keeps_its_replies_by_content(
    tmp_path: Path,
) -> None:
    script = tmp_path / "replies.py"
    script.write_text(
        "def reply(ask):\n    return f\"{ask.body['messages'][-1]['content']}"
        " {ask.body.get('seed')}\"\n"
    )

    async def run() -> list[str]:
        endpoint = open_endpoint(
            None, None, scripted=f"{script}:reply", cache=tmp_path / "kept.sqlite"
        )
        said = [*await endpoint.chat(ASK, seed=4), *await endpoint.chat(ASK, seed=4, n=2)]
        assert endpoint.budget.spent.calls == 2
        await endpoint.aclose()
        return said

    assert asyncio.run(run()) == ["Say something. 4"] * 3


def test_tokens_are_guessed_by_script() -> None:
    assert tokens_of("a" * 400) == 100
    assert tokens_of("漢字") == 2
