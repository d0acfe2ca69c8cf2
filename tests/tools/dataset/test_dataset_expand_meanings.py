"""`ajet dataset expand --embed`: rows that say the same as another in other words, over real
HTTP."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response

from tests.waiting import until

pytestmark = pytest.mark.slow

BEASTS = (
    "otter",
    "heron",
    "badger",
    "lynx",
    "stoat",
    "viper",
    "moose",
    "raven",
    "shrew",
    "trout",
    "beetle",
    "walrus",
)
PLACES = (
    "Norway",
    "Peru",
    "Kenya",
    "Japan",
    "Chile",
    "Nepal",
    "Ghana",
    "Malta",
    "Cuba",
    "Laos",
    "Fiji",
    "Oman",
)
SEEDED = "Which winter food has the {} of {}?"
WORDINGS = (
    "What does the {} of {} eat in winter?",
    "During the cold months, name the food that a {} finds in {}.",
)


def means(text: str) -> str:
    return " ".join(sorted(word for word in re.findall(r"\w+", text) if word in BEASTS + PLACES))


def questions(body: dict[str, Any], number: int = 0) -> str:
    """As many as are asked for, each in one of two wordings; the same request gives the same
    ones."""
    text = body["messages"][-1]["content"]
    found = re.search(r"array of (\d+)", text)
    assert found is not None
    chance = random.Random(text + str(body["seed"]))
    drawn = [
        (chance.choice(WORDINGS), chance.choice(BEASTS), chance.choice(PLACES))
        for _ in range(int(found[1]))
    ]
    return json.dumps(
        [{"main_query": words.format(a, b), "metadata": {"answer": a}} for words, a, b in drawn]
    )


class Place:
    """A directory with six seeds, and the command run in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        seeds = [
            {"main_query": SEEDED.format(a, b), "metadata": {"answer": a}}
            for a, b in zip(BEASTS[:6], PLACES[:6], strict=True)
        ]
        (path / "seeds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in seeds))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "ajet", "dataset", "expand", "seeds.jsonl", *arguments]
        env = {
            **os.environ,
            "PYTHONPATH": str(Path.cwd()),
            "OPENAI_API_KEY": "secret-key",
            "NO_COLOR": "1",
        }
        return subprocess.Popen(
            command,
            cwd=self.path,
            env=env,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def rows(self, name: str) -> list[dict[str, Any]]:
        file = self.path / name
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def at(writer: Any, judge: Any) -> tuple[str, ...]:
    """Only meanings count beside exact copies: the wordings differ by little more than the
    names."""
    options = (
        "--model",
        f"writer@{writer.url},concurrency=4",
        "--verify",
        "none",
        "--yes",
        "--with",
        "similarity=1",
    )
    return (*options, "--embed", f"vectors@{judge.url}")


def test_no_two_rows_mean_the_same_and_none_means_what_a_seed_does(
    place: Place, model_server, embedder
) -> None:
    writer, judge = model_server(questions), embedder(means)
    done = place.run("--count", "90", "--out", "data", *at(writer, judge))
    assert done.returncode == 0, done.stderr
    kept = [
        *place.rows("seeds.jsonl"),
        *place.rows("data/train.jsonl"),
        *place.rows("data/validation.jsonl"),
    ]
    assert len(kept) == 96 and len({means(row["main_query"]) for row in kept}) == 96
    refused = [
        row
        for row in place.rows("data/rejected.jsonl")
        if "semantic duplicate" in row["rejected"]["reason"]
    ]
    assert refused and all(
        row["rejected"]["detail"].startswith("1.00 similar to ") for row in refused
    )
    assert {row["rejected"]["detail"].split()[3] for row in refused} == {"seed", "row"}
    assert "refused: semantic duplicate" in done.stdout and "a cosine of 0.9" in (
        place.path / "data" / "README.md"
    ).read_text(encoding="utf-8")


def test_killed_and_resumed_no_vector_is_paid_for_twice(
    place: Place, model_server, embedder
) -> None:
    def slow(body: dict[str, Any], number: int) -> Any:
        return 0.05, questions(body)

    writer, judge = model_server(slow), embedder(means)
    run = ("--count", "60", "--out", "data", *at(writer, judge))
    process = place.start(*run)
    until(lambda: len(judge.batches) >= 6)
    process.kill()
    process.communicate()
    before = [json.dumps(batch) for batch in judge.batches]
    resumed = place.run(*run, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    again = [json.dumps(batch) for batch in judge.batches[len(before) :]]
    assert len(set(again) & set(before)) <= 4  # those that were under way, and never answered
    texts = Counter(text for batch in judge.batches for text in batch)
    assert len(judge.batches) - len({*before, *again}) <= 4, texts.most_common(3)
    rows = place.rows("data/train.jsonl") + place.rows("data/validation.jsonl")
    assert len(rows) == len({means(row["main_query"]) for row in rows}) == 60
    made = len(judge.batches), len(writer.requests)
    more = place.run("--count", "70", "--out", "data", *at(writer, judge), "--resume")
    assert more.returncode == 0 and place.rows("data/train.jsonl")[:54] == rows[:54]
    batches = [json.dumps(batch) for batch in judge.batches]
    assert len(writer.requests) > made[1] and not {*batches[: made[0]]} & {*batches[made[0] :]}


def test_vectors_are_estimated_and_spend_the_budget(place: Place, model_server, embedder) -> None:
    writer, judge = model_server(questions), embedder(means)
    done = place.run(
        "--count", "100", "--out", "data", *at(writer, judge), "--budget", "calls=9", "--json"
    )
    assert "About 32 calls for rows, 33 requests for embeddings: about" in done.stderr
    assert done.returncode == 1 and "the budget of 9 calls is spent" in done.stderr
    assert len(writer.requests) + len(judge.batches) == 9
    told = json.loads(done.stdout)
    vectors = sum(map(len, judge.batches))
    assert (told["calls"], told["input_tokens"]) == (9, 100 * len(writer.requests) + 10 * vectors)
    assert (
        told["accepted"]
        == len(place.rows("data/train.jsonl")) + len(place.rows("data/validation.jsonl"))
        > 0
    )


def test_an_embedder_that_fails_is_one_message_and_costs_no_row(
    place: Place, model_server, embedder
) -> None:
    writer, judge = model_server(questions), embedder(means)
    judge.failures = [Response("no such model", status_code=404)]
    run = ("--count", "20", "--out", "data", *at(writer, judge))
    early = place.run(*run)
    assert (
        early.returncode == 2
        and "answered 404: no such model" in early.stderr
        and not writer.requests
    )
    late = model_server(lambda body, number: _then(judge, number, questions(body)))
    run = ("--count", "60", "--out", "late", *at(late, judge))
    stopped = place.run(*run)
    assert (
        stopped.returncode == 2
        and "wrong key" in stopped.stderr
        and "Traceback" not in stopped.stderr
    )
    assert "secret-key" not in stopped.stdout + stopped.stderr
    paid = len(late.requests)
    judge.failures.clear()
    assert place.run(*run, "--resume").returncode == 0
    assert len(place.rows("late/train.jsonl")) == 54
    asked = [json.dumps(body) for body in late.requests]
    assert len(asked) == len(set(asked)) > paid


def _then(judge: Any, number: int, said: str) -> str:
    """From the seventh call on, the embedder knows the key no more."""
    if number == 6:
        judge.failures = [Response("wrong key", status_code=401)] * 50
    return said


def test_a_resume_with_another_meaning_says_so(place: Place, model_server, embedder) -> None:
    writer, judge = model_server(questions), embedder(means)
    run = ("--count", "5", "--out", "data", *at(writer, judge))
    assert place.run(*run).returncode == 0
    other = place.run(*run, "--resume", "--embed", f"vectors@{judge.url},meaning=0.8")
    assert other.returncode == 2 and "embeddings.meaning was 0.9, is 0.8" in other.stderr


def test_what_is_no_embedder_is_told_before_the_first_call(place: Place, model_server) -> None:
    writer = model_server(questions)
    asked = (
        "--count",
        "5",
        "--out",
        "data",
        "--model",
        f"m@{writer.url}",
        "--verify",
        "none",
        "--yes",
    )
    for given, message in (
        ("nowhere", "no model can be loaded there"),
        ("m@https:", "embeddings are at a URL"),
    ):
        done = place.run(*asked, "--embed", given)
        assert done.returncode == 2 and message in done.stderr, done.stderr
    assert not writer.requests
