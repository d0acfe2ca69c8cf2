"""Growing a dataset, over real HTTP: what is accepted, refused, split, repeated, and when a run
stops."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.engines.budget import Budget, BudgetSpent
from ajet_sdk.engines.client import ModelClient
from ajet_sdk.engines.reply_cache import ReplyCache
from ajet_sdk.errors import (
    ConfigError,
    EndpointMisconfigured,
    EngineUnavailable,
    RequestRefused,
    TaskError,
)
from ajet_tools.cli.dataset.generation_report import progress_lines
from ajet_tools.dataset.files.blocks import Row
from ajet_tools.dataset.generate.directory import Journal
from ajet_tools.dataset.generate.expand import Expansion
from ajet_tools.dataset.generate.pipeline import NO_PROGRESS, PROBE, Pipeline
from ajet_tools.dataset.generate.records import (
    Checks,
    GenerationResult,
    Interrupted,
    NoProgress,
    Rejected,
)
from ajet_tools.dataset.generate.seeds import as_examples, select_seeds
from ajet_tools.dataset.generate.settings import STRATEGIES, GenerationConfig, strategies_of
from ajet_tools.dataset.similarity.decontaminate import Leaks
from ajet_tools.dataset.verify.combined import CombinedVerifier, VerifierPart
from ajet_tools.dataset.verify.verdict import RowVerdict
from tests.tools.dataset.conftest import Held

Say = Callable[[dict[str, Any], int], Any]


def task(query: str, answer: str) -> dict[str, Any]:
    return {"main_query": query, "metadata": {"answer": answer}}


SEEDS = [
    Row(f"seeds.jsonl line {i}", task(f"What is {i} times {i + 3}?", str(i * (i + 3))))
    for i in range(1, 9)
]


def wanted(body: dict[str, Any]) -> int:
    found = re.search(r"JSON array of (\d+)", body["messages"][-1]["content"])
    assert found is not None
    return int(found.group(1))


def sums(body: dict[str, Any], number: int = 0) -> str:
    """As many sums as are asked for; the same request gives the same ones."""
    chance = random.Random(json.dumps(body["messages"]) + str(body["seed"]))
    pairs = [(chance.randint(100, 999), chance.randint(100, 999)) for _ in range(wanted(body))]
    return json.dumps([task(f"What is {a} plus {b}?", str(a + b)) for a, b in pairs])


def grown(
    server: Any,
    recipe: GenerationConfig,
    *,
    seeds: list[Row] = SEEDS,
    cache: Path | None = None,
    **options: Any,
) -> GenerationResult:
    budget, concurrency = options.pop("budget", None), options.pop("concurrency", 8)
    retries = options.pop("retries", 1)

    async def run() -> GenerationResult:
        endpoint = ModelClient(
            server.url,
            "writer",
            "k",
            concurrency=concurrency,
            cache=cache,
            budget=budget,
            retries=retries,
        )
        journal = Journal(ReplyCache(cache)) if cache is not None else None
        pipeline = Pipeline(Expansion(seeds, recipe), endpoint, Checks(**options), journal)
        try:
            return await pipeline.run()
        finally:
            await pipeline.aclose()

    return asyncio.run(run())


def bytes_of(result: GenerationResult) -> str:
    return json.dumps([result.train, result.validation, [one.as_row() for one in result.rejected]])


def test_it_makes_as_many_rows_as_asked_for_each_with_its_provenance(model_server) -> None:
    result = grown(model_server(sums), GenerationConfig(50))
    assert (len(result.train), len(result.validation), result.stopped) == (45, 5, None)
    row = result.train[0]
    assert list(row) == ["task_id", "main_query", "metadata", "provenance"]
    assert row["provenance"]["source"] == "expand" and row["provenance"]["model"] == "writer"
    assert row["provenance"]["prompt"]["name"].removeprefix("expand/") in STRATEGIES
    assert row["provenance"]["parameters"]["temperature"] == 1.0
    assert set(row["provenance"]["seeds"]) <= {example.id for example in as_examples(SEEDS)}
    assert len({one["task_id"] for one in [*result.train, *result.validation]}) == 50


def test_no_seed_and_no_example_stands_behind_both_sides(model_server) -> None:
    server = model_server(sums)
    result = grown(server, GenerationConfig(60, validation=0.3))
    behind = [
        {s for row in rows for s in row["provenance"]["seeds"]}
        for rows in (result.train, result.validation)
    ]
    assert not behind[0] & behind[1] and all(behind)
    of_val = {row["task_id"] for row in result.validation} | behind[1]
    for row in result.train:
        assert not of_val & set(row["provenance"]["examples"])


def test_accepted_rows_become_examples_beside_the_seeds(model_server) -> None:
    result = grown(model_server(sums), GenerationConfig(60, window=4))
    seeds = {example.id for example in as_examples(SEEDS)}
    last = result.train[-1]["provenance"]
    assert set(last["examples"]) & seeds and set(last["examples"]) - seeds
    assert set(last["seeds"]) <= seeds


def test_one_call_at_a_time_gives_the_same_rows_for_the_same_replies(model_server) -> None:
    def slow(body: dict[str, Any], number: int) -> Any:
        return random.random() / 50, sums(body)

    def config(seed: int) -> GenerationConfig:
        return GenerationConfig(20, seed=seed, window=1)

    fast, slowly = (grown(model_server(say), config(7)) for say in (sums, slow))
    assert bytes_of(fast) == bytes_of(slowly)
    assert bytes_of(grown(model_server(sums), config(8))) != bytes_of(fast)


def test_one_slow_reply_holds_up_no_other(model_server) -> None:
    """The first reply is not given before all other rows are there."""
    enough = threading.Event()

    def say(body: dict[str, Any], number: int) -> Any:
        if number >= 14:
            enough.set()
        return Held(enough, sums(body)) if number == 0 else sums(body)

    result = grown(model_server(say), GenerationConfig(60, window=4), concurrency=4)
    assert (result.accepted, result.stopped) == (60, None)


def messy(body: dict[str, Any], number: int = 0) -> str:
    """A writer that repeats itself, replies prose and has no number; `CHECK` is the verifier's."""
    if body["messages"][-1]["content"].startswith("CHECK"):
        return "checked"
    chance = random.Random(json.dumps(body["messages"]) + str(body["seed"]))
    if chance.random() < 0.2:
        return "Gladly!"
    rows = [chance.randint(10, 150) for _ in range(wanted(body))]
    return json.dumps([task(f"What is {a} plus 7?", str(a + 7)) for a in rows])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("few", "many", "settings"), [(7, 30, {}), (20, 33, {"validation": 0.3, "per_call": 3})]
)
def test_more_rows_go_on_from_those_there_are(
    model_server, tmp_path: Path, few: int, many: int, settings: dict[str, Any]
) -> None:
    server, kept = model_server(messy), {"cache": tmp_path / "replies.sqlite"}
    before = grown(server, GenerationConfig(few, window=6, **settings), verifier=even(), **kept)
    after = grown(server, GenerationConfig(many, window=6, **settings), verifier=even(), **kept)
    assert (before.accepted, after.accepted) == (few, many)
    assert after.train[: len(before.train)] == before.train
    assert after.validation[: len(before.validation)] == before.validation
    assert len({row["task_id"] for row in (*after.train, *after.validation)}) == many
    asked = [json.dumps(body) for body in server.requests]
    assert len(asked) == len(set(asked)), "nothing is paid for twice"
    made = len(asked)
    again = grown(server, GenerationConfig(many, window=2, **settings), verifier=even(), **kept)
    assert bytes_of(again) == bytes_of(after) and len(server.requests) == made


@pytest.mark.slow
def test_whatever_ends_a_process_its_rows_stay_and_no_reply_is_paid_for_twice(
    model_server, tmp_path: Path
) -> None:
    """Each process is cancelled after some requests, as a kill does it: between a reply and its
    verification, or before the outcome is stored."""
    server, rows = model_server(messy), list[dict[str, Any]]()
    cache = tmp_path / "replies.sqlite"

    async def killed(after: int) -> GenerationResult:
        endpoint = ModelClient(server.url, "writer", cache=cache)
        source = Expansion(SEEDS, GenerationConfig(40, validation=0, window=5))
        pipeline = Pipeline(source, endpoint, Checks(even()), Journal(ReplyCache(cache)))
        begun = len(server.requests)
        running = asyncio.create_task(pipeline.run())
        while not running.done() and len(server.requests) - begun < after:
            await asyncio.sleep(0.001)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await pipeline.aclose()
        return pipeline.result

    for number in range(1, 200):  # how far one gets depends on the machine
        result = asyncio.run(killed(1 + number % 7))
        assert result.train[: len(rows)] == rows, "what was accepted stays, in its order"
        rows = list(result.train)
        if result.is_complete:
            break
    assert len({row["task_id"] for row in rows}) == len(rows) == 40
    written = [b["seed"] for b in server.requests if "CHECK" not in b["messages"][-1]["content"]]
    assert len(written) == len(set(written)) or len(written) - len(set(written)) <= 5 * number


def test_it_says_what_it_waits_for(model_server, caplog: pytest.LogCaptureFixture) -> None:
    """The first request is answered once it was said that it is waited for; then come a 503, a 429,
    and the rows."""
    seen, told = list[str](), threading.Event()

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "waiting for" in record.getMessage():
                told.set()

    def say(body: dict[str, Any], number: int) -> Any:
        if number == 0:
            return Held(told, sums(body))
        if number == 1:
            return model_server.refusal(503, "busy")
        if number == 2:
            return model_server.refusal(429, "slow", headers={"retry-after": "0.2"})
        return sums(body)

    async def run() -> GenerationResult:
        endpoint = ModelClient(model_server(say).url, "writer", concurrency=2)
        expansion = Pipeline(Expansion(SEEDS, GenerationConfig(10, validation=0)), endpoint)
        expansion.quiet = 0.02
        running = asyncio.create_task(expansion.run())
        while not running.done():
            seen.append(re.sub(r"[\d.]+ s", "N s", expansion.describe_wait(0.0)))
            await asyncio.sleep(0.005)
        await endpoint.aclose()
        return running.result()

    logging.getLogger("ajet.dataset").addHandler(handler := Told())
    try:
        assert asyncio.run(run()).accepted == 10
    finally:
        logging.getLogger("ajet.dataset").removeHandler(handler)
    waits = {part for one in seen for part in one.split("; ")}
    assert "a retry after 503: 1 request, N s" in waits
    for reason in ("the rate limit (429): ", "a slow endpoint: "):
        assert any(part.startswith(reason) for part in waits)
        assert any(
            "no reply in 0 s: waiting for " in (text := r.getMessage()) and reason in text
            for r in caplog.records
        )


def test_a_progress_line_fits_and_says_how_many_reasons_it_leaves_out() -> None:
    reasons = [
        "exact duplicate",
        "independent answers agree on a different answer",
        "not JSON",
        "wrong format",
        "no reply",
    ]
    endpoint = ModelClient("http://127.0.0.1:9/v1", "m")
    expansion = Pipeline(Expansion(SEEDS, GenerationConfig(500)), endpoint)
    for number, reason in enumerate(reasons):
        expansion.result.rejected += [Rejected(reason, "", None, {})] * (1000 - 100 * number)
    for width in (60, 80, 120, 300):
        spent, refused = progress_lines(expansion, 500, width)
        assert spent == "0 calls, 0 tokens" and refused.startswith(
            "refused 4,000: 1,000 exact duplicate, "
        )
        left = len(reasons) - sum(reason in refused for reason in reasons)
        assert len(refused) <= width and refused.endswith(f"{left} more" if left else "no reply")


def test_what_is_no_row_of_the_dataset_is_refused_with_its_reason(model_server) -> None:
    first = SEEDS[2].values

    def say(body: dict[str, Any], number: int) -> str:
        bad = [
            "I would rather talk about the weather.",
            json.dumps([task("What is 7000 plus 1?", "7001")])[:-15],
            json.dumps([task("What is 1 plus 8000?", "eight thousand and one")]),
            json.dumps([first]),
            json.dumps([task("What is 5 plus 5?", "10"), task("what is  5 plus 5?", "10")]),
        ]
        return bad[number] if number < len(bad) else sums(body)

    result = grown(model_server(say), GenerationConfig(20), concurrency=1)
    assert result.accepted == 20
    by_reason = {one.reason: one for one in result.rejected}
    assert set(by_reason) == {"not JSON", "incomplete JSON", "wrong format", "exact duplicate"}
    assert "weather" in by_reason["not JSON"].detail and by_reason["not JSON"].reply is not None
    assert "metadata.answer is not a number" in by_reason["wrong format"].detail
    details = [one.detail for one in result.rejected if one.reason == "exact duplicate"]
    assert any("like seed" in one or "as seed" in one for one in details)
    assert any("as row" in one for one in details)
    for one in result.rejected:
        assert (
            one.as_row()["rejected"]["reason"] == one.reason
            and one.as_row()["provenance"]["prompt"]
        )


def test_a_row_that_no_file_can_hold_is_refused_and_the_run_goes_on(model_server) -> None:
    def say(body: dict[str, Any], number: int) -> str:
        bad = [
            json.dumps([task("\ud800 What is 7000 plus 1?", "7001")]),
            r'[{"main_query": "What is \frac{7000}{1} plus 2?", "metadata": {"answer": "7002"}}]',
            '[{"main_query": "What is 7000 plus 3?", "metadata": {"answer": NaN}}]',
        ]
        return bad[number] if number < len(bad) else sums(body)

    result = grown(model_server(say), GenerationConfig(12), concurrency=1)
    assert (result.accepted, result.stopped) == (12, None)
    assert result.refused == {"wrong format": 2, "incomplete JSON": 1}


def test_a_row_that_repeats_the_prompt_is_refused(model_server) -> None:
    def say(body: dict[str, Any], number: int) -> str:
        prompt = body["messages"][-1]["content"]
        items = [
            " ".join(one.split()) for one in prompt.split("Keep to this:")[1].split("\n- ")[1:4]
        ]
        heads = [
            "Keep to this: ",
            items[0] + " ",
            items[1] + " ",
            f"KEEP to this:\n- {items[2]}\n",
            items[0].upper(),
        ]
        bad = [
            *(task(f"{head}What is {n} plus 7000?", str(n + 7000)) for n, head in enumerate(heads)),
            task("- metadata.answer: a number, written as text What is 6 plus 7000?", "7006"),
            task("What is 9 plus 7000? Work each answer out before you write it.", "7009"),
            {"main_query": "What is 8 plus 7000?", "metadata": {"answer": "7008"}},
        ]
        return json.dumps(bad) if number == 0 else sums(body)

    result = grown(model_server(say), GenerationConfig(10, per_call=8), concurrency=1)
    assert result.refused["repeats the prompt"] == 7 and "keep to this:" in {
        one.detail for one in result.rejected
    }
    assert not any("answer out" in json.dumps(row) for row in (*result.train, *result.validation))


def test_words_of_a_template_of_ones_own_are_refused_and_those_of_the_seeds_are_not(
    model_server, tmp_path: Path
) -> None:
    (tmp_path / "own.jinja").write_text(
        "{% for one in examples %}{{ one | json }}{% endfor %}\nThink of a grocer who counts apples"
        " by hand.\nSay the sum of both numbers and no more.\nA JSON array of {{ count }}.\n"
    )
    more = "Say the sum of both numbers and no more."
    seeds = [Row(f"s line {n}", task(f"{more} What is {n} and 1?", str(n + 1))) for n in range(4)]

    def say(body: dict[str, Any], number: int) -> str:
        rows = [
            task(f"Think of a grocer who counts apples by hand. {number} and 11?", str(number + 11))
        ]
        return json.dumps([*rows, task(f"{more} What is {number} and 7005?", str(number + 7005))])

    recipe = GenerationConfig(3, template=tmp_path / "own.jinja", per_call=2, similarity=1.0)
    result = grown(model_server(say), recipe, seeds=seeds, concurrency=1)
    assert result.accepted == 3 and result.refused["repeats the prompt"]
    assert all(row["main_query"].startswith(more) for row in (*result.train, *result.validation))


def test_a_near_duplicate_is_refused(model_server) -> None:
    long = (
        "A gardener waters the tomatoes, the beans and the roses in the evening; how many kinds of"
        " plant are these?"
    )
    seeds = [*SEEDS, Row("seeds.jsonl line 9", task(long, "3"))]

    def say(body: dict[str, Any], number: int) -> str:
        return (
            json.dumps([task(long.replace("evening", "morning"), "3")])
            if number == 0
            else sums(body)
        )

    result = grown(model_server(say), GenerationConfig(10), seeds=seeds)
    assert [one.reason for one in result.rejected] == ["near duplicate"]


def test_rows_of_the_evaluation_set_are_refused_with_the_evidence(
    model_server, tmp_path: Path
) -> None:
    (tmp_path / "test.jsonl").write_text(json.dumps({"question": "What is 41 plus 1?"}) + "\n")

    def say(body: dict[str, Any], number: int) -> str:
        return json.dumps([task("what is 41 plus 1?", "42")]) if number == 0 else sums(body)

    result = grown(
        model_server(say), GenerationConfig(10), leaks=Leaks.of([tmp_path / "test.jsonl"])
    )
    [one] = result.rejected
    assert one.reason == "in the evaluation set" and "test.jsonl line 1" in one.detail
    assert all(
        row["main_query"].lower() != "what is 41 plus 1?"
        for row in [*result.train, *result.validation]
    )


class Even:
    """A verifier that asks the endpoint and takes even answers alone."""

    name, calls, needs_answer = "even", 1, True

    async def check(self, row: Any, endpoint: Any) -> RowVerdict:
        [said] = await endpoint.chat([{"role": "user", "content": f"CHECK {row['main_query']}"}])
        return RowVerdict(int(row["metadata"]["answer"]) % 2 == 0, "odd answer", {"said": said})


def even() -> CombinedVerifier:
    return CombinedVerifier("even", [VerifierPart(Even())])


def with_checks(body: dict[str, Any], number: int) -> str:
    text = body["messages"][-1]["content"]
    return "checked" if text.startswith("CHECK") else sums(body)


def test_rows_that_fail_the_check_are_kept_apart_with_the_verdict(model_server) -> None:
    result = grown(model_server(with_checks), GenerationConfig(30), verifier=even())
    assert result.accepted == 30 and result.refused["odd answer"] > 5
    assert all(
        int(row["metadata"]["answer"]) % 2 == 0 for row in [*result.train, *result.validation]
    )
    assert result.train[0]["provenance"]["verdict"]["ok"] is True
    refused = result.rejected[0].as_row()
    assert refused["provenance"]["verdict"]["details"] == {"said": "checked"}


def test_a_server_that_always_fails_stops_the_run_soon(model_server) -> None:
    server = model_server(lambda body, number: model_server.refusal(500, "broken"))
    result = grown(server, GenerationConfig(500), retries=1)
    assert isinstance(result.stopped, EngineUnavailable) and "500: broken" in str(result.stopped)
    assert len(server.requests) <= 2 * (PROBE + 3)


def test_a_wrong_key_costs_a_few_requests(model_server) -> None:
    server = model_server(lambda body, number: model_server.refusal(401, "Incorrect API key"))
    result = grown(server, GenerationConfig(500))
    assert isinstance(result.stopped, EndpointMisconfigured) and "check the API key" in str(
        result.stopped
    )
    assert len(server.requests) <= PROBE


def test_a_request_that_is_refused_is_gone_on_without_and_many_end_the_run(model_server) -> None:
    def filtered(body: dict[str, Any], number: int) -> Any:
        return model_server.refusal(400, "content policy") if number == 7 else sums(body)

    result = grown(model_server(filtered), GenerationConfig(60))
    assert result.accepted == 60 and result.refused["no reply"] == 1
    server = model_server(lambda body, number: model_server.refusal(400, "no such model"))
    result = grown(server, GenerationConfig(60))
    assert isinstance(result.stopped, RequestRefused) and "no such model" in str(result.stopped)
    assert len(server.requests) <= PROBE + 2


def test_429_for_a_while_loses_nothing(model_server) -> None:
    def say(body: dict[str, Any], number: int) -> Any:
        return (
            model_server.refusal(429, "slow", headers={"retry-after": "0.1"})
            if 5 <= number < 25
            else sums(body)
        )

    server = model_server(say)
    result = grown(server, GenerationConfig(40))
    assert (result.accepted, result.stopped, result.rejected) == (40, None, [])


def test_one_request_that_fails_is_gone_on_without_and_not_made_again(
    model_server, tmp_path: Path
) -> None:
    poison: list[str] = []

    def say(body: dict[str, Any], number: int) -> Any:
        if number == 6:
            poison.append(json.dumps(body))
        return model_server.refusal(500, "broken") if json.dumps(body) in poison else sums(body)

    server = model_server(say)
    kept = {"cache": tmp_path / "replies.sqlite"}
    result = grown(server, GenerationConfig(60), **kept)
    assert result.accepted == 60 and result.refused["no reply"] == 1
    made = len(server.requests)
    again = grown(server, GenerationConfig(60), **kept)
    assert (again.train, again.validation) == (result.train, result.validation)
    assert len(server.requests) == made


def test_prose_for_ever_ends_with_the_reasons(model_server) -> None:
    server = model_server(lambda body, number: "Certainly! Let me think about that.")
    result = grown(server, GenerationConfig(100))
    assert isinstance(result.stopped, NoProgress)
    assert f"{NO_PROGRESS} not JSON" in str(result.stopped)
    assert len(server.requests) <= NO_PROGRESS + PROBE


@pytest.mark.parametrize("limit", [3, 10, 17])
def test_a_spent_budget_keeps_what_there_is_and_no_reply_is_paid_for_twice(
    model_server, tmp_path: Path, limit: int
) -> None:
    server, kept = model_server(with_checks), {"cache": tmp_path / "replies.sqlite"}
    first = grown(server, GenerationConfig(24), budget=Budget(calls=limit), verifier=even(), **kept)
    assert isinstance(first.stopped, BudgetSpent) and len(server.requests) == limit
    assert first.accepted < 24
    rest = grown(server, GenerationConfig(24), verifier=even(), **kept)
    assert (rest.accepted, rest.stopped) == (24, None)
    assert rest.train[: len(first.train)] == first.train
    asked = [json.dumps(body) for body in server.requests]
    assert len(asked) == len(set(asked))


def test_a_person_who_stops_it_keeps_what_is_under_way(model_server) -> None:
    server = model_server(lambda body, number: (0.05, sums(body)))

    async def run() -> tuple[GenerationResult, int]:
        endpoint = ModelClient(server.url, "writer", concurrency=4)
        expansion = Pipeline(Expansion(SEEDS, GenerationConfig(4000, window=8)), endpoint)
        task_ = asyncio.create_task(expansion.run())
        while len(server.requests) < 12:
            await asyncio.sleep(0.01)
        expansion.stop.set()
        result = await task_
        await endpoint.aclose()
        return result, endpoint.budget.spent.calls

    result, calls = asyncio.run(run())
    assert isinstance(result.stopped, Interrupted)
    assert result.calls == calls and result.accepted >= 12


def test_languages_take_turns_and_strategies_are_drawn_by_weight(model_server) -> None:
    server = model_server(sums)
    recipe = GenerationConfig(
        40,
        strategies_of(["harder=3", "persona"]),
        languages=("German", "Polish"),
        per_call=1,
        validation=0,
    )
    rows = grown(server, recipe).train
    drawn = [row["provenance"]["parameters"] for row in rows]
    assert {one["language"] for one in drawn} == {"German", "Polish"}
    assert {one["strategy"] for one in drawn} == {"harder", "persona"}
    assert sum(one["strategy"] == "harder" for one in drawn) > 20
    assert all("persona" in one["cell"] for one in drawn if one["strategy"] == "persona")
    assert any("is in German" in body["messages"][-1]["content"] for body in server.requests)


def test_a_users_own_template_takes_the_place_of_the_strategies(
    model_server, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.jinja"
    mine.write_text(
        "Be like {{ examples[0].main_query }} and {{ examples | length }}. Give {{ count }}."
    )
    server = model_server(sums)
    result = grown(server, GenerationConfig(12, template=mine))
    said = [body["messages"][-1]["content"] for body in server.requests]
    assert all(text.startswith("Be like What is ") for text in said)
    assert any("Reply with a JSON array of 4" in text for text in said)
    assert result.train[0]["provenance"]["prompt"]["name"] == "mine.jinja"
    version = result.train[0]["provenance"]["prompt"]["version"]
    mine.write_text(mine.read_text() + " Please.")
    assert (
        grown(server, GenerationConfig(12, template=mine)).train[0]["provenance"]["prompt"][
            "version"
        ]
        != version
    )


def test_a_template_that_fails_says_what_it_may_use(tmp_path: Path) -> None:
    mine = tmp_path / "mine.jinja"
    mine.write_text("{{ exampels }}")
    expansion = Expansion(SEEDS, GenerationConfig(5, template=mine))
    with pytest.raises(ConfigError, match=r"exampels.*it may use cell, count, domain, examples"):
        expansion.previews()
    mine.write_text("\n{% if %}")
    with pytest.raises(ConfigError, match=r"mine\.jinja line 2 is not valid Jinja"):
        GenerationConfig(5, template=mine).prompt("own")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "is empty"),
        ([task("a?", "1")], "has one row"),
        ([task("a?", "1")] * 5, "has 5 rows, which are all the same"),
        ([task("a?", "1"), task("  ", "2")], "line 2 asks nothing"),
        ([task("a?", "1"), task("b" * 5_000_000, "2")], "line 2 is 5,000,047 characters long"),
    ],
)
def test_seeds_that_nothing_can_grow_from_are_told(
    rows: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(TaskError) as raised:
        select_seeds(
            (Row(f"seeds.jsonl line {i}", row) for i, row in enumerate(rows, 1)), "seeds.jsonl"
        )
    assert message in str(raised.value)


def test_few_seeds_keep_none_apart_unless_asked(model_server) -> None:
    server = model_server(sums)
    assert grown(server, GenerationConfig(10), seeds=SEEDS[:3]).validation == []
    assert len(grown(server, GenerationConfig(10, validation=0.2), seeds=SEEDS[:2]).validation) == 2


def test_a_wrong_recipe_is_told() -> None:
    with pytest.raises(ConfigError, match="known: same-style, harder"):
        strategies_of(["hardest"])
    with pytest.raises(ConfigError, match="a weight must be a number above 0"):
        strategies_of(["harder=0"])
    with pytest.raises(ConfigError, match="--validation"):
        GenerationConfig(5, validation=1.0)
