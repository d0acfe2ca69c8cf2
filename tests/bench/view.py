"""Looking into a large trace: the first page, any page, any order, filters, text search, and the
memory for it.

The files are made by SQL: 1M calls of 100,000 episodes, and 100,000 calls of 4 KB. What is measured
runs in a process of its own, so that its peak of memory is its own. Between two actions it rests as
a person does, so that the file is closed and opened again. Times are the process's own (of all its
threads), as other processes do not lengthen them; of pages and orders the slowest counts.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import duckdb

from ajet_sdk.trace.schema import create_statements
from tests.bench import Figure
from tests.bench._memory import peak_megabytes

EPISODES = 100_000
CALLS = 10
PAGE = 50
TEXT = 4_000
PAUSE = 0.4


def main() -> list[Figure]:
    with tempfile.TemporaryDirectory() as directory:
        listed, said = Path(directory) / "listed.duckdb", Path(directory) / "said.duckdb"
        make(listed, EPISODES, 200)
        make(said, EPISODES // 10, TEXT)
        look, found = _measured("listing", listed), _measured("search", said)
    pages, orders = look["any page"], look["any order"]
    return [
        Figure(
            "first page of 1M calls, imports and opening included",
            look["first"],
            "CPU-s",
            "< 1",
            look["first"] < 1,
        ),
        Figure("any page, whatever the order", pages, "CPU-ms", "< 50", pages < 50),
        Figure(
            "any page after a pause (the file is opened again)",
            look["page after a pause"],
            "CPU-ms",
        ),
        Figure("first page in another order than time: all are counted", look["counted"], "CPU-ms"),
        Figure("sort by any column, once all are counted", orders, "CPU-ms", "< 300", orders < 300),
        Figure("looking for new episodes where there are none", look["refresh"], "CPU-ms"),
        Figure("filter by a field of calls", look["filter"], "CPU-ms"),
        Figure("peak memory of all that", look["memory"], "MB", "< 300", look["memory"] < 300),
        Figure(
            "text search, 100,000 calls of 4 KB",
            found["search"],
            "CPU-s",
            "< 2",
            found["search"] < 2,
        ),
        Figure("text search, longest wait to call it off", found["wait"], "CPU-s"),
        Figure("peak memory of text search", found["memory"], "MB"),
    ]


def make(path: Path, episodes: int, text: int) -> None:
    """A trace as a training run writes it, by SQL."""
    connection = duckdb.connect(str(path), config={"threads": 2})
    for statement in create_statements():
        connection.execute(statement)
    words = random.Random(0).choices(_WORDS, k=20_000)
    connection.execute("CREATE TEMP MACRO id(kind, i) AS left(kind || md5(i::VARCHAR), 32)")
    connection.execute("CREATE TEMP TABLE sampled AS " + _SAMPLED)
    connection.execute("INSERT INTO runs BY NAME " + _RUN)
    connection.execute("INSERT INTO episodes BY NAME " + _EPISODES.format(n=episodes))
    connection.execute("INSERT INTO rewards BY NAME " + _REWARDS.format(n=episodes))
    connection.execute(
        "INSERT INTO calls BY NAME " + _CALLS.format(n=episodes * CALLS, k=CALLS, text=text),
        [" ".join(words)],
    )
    connection.execute("CHECKPOINT")
    connection.close()


_WORDS = (
    "alpha",
    "beta",
    "gamma",
    "delta",
    "omega",
    "seven",
    "eleven",
    "tool",
    "answer",
    "because",
)
_RUN = """SELECT 'run' AS run_id, 'bench' AS name, '{}' AS config, 'local' AS backbone, 'finished' AS status,
  TIMESTAMPTZ '2026-01-01' AS started_at"""
_EPISODES = """
SELECT id('e', i) AS episode_id, 'run' AS run_id, id('g', i // 8) AS group_id, (i % 8)::INTEGER AS attempt,
  (i // 128)::INTEGER AS step, 'train' AS split, id('t', i // 8 % 5000) AS task_id,
  printf('{{"main_query": "What is %d plus two?", "metadata": {{}}}}', i // 8 % 5000) AS task, '"the answer"' AS output,
  CASE WHEN hash(i) % 10 = 0 THEN 'failed' ELSE 'succeeded' END AS status,
  CASE WHEN hash(i) % 10 = 0 THEN 'it broke' END AS error, CASE WHEN hash(i) % 10 = 0 THEN 'ValueError' END AS cause,
  false AS infrastructure, '{{}}' AS metrics, TIMESTAMPTZ '2026-01-01' + to_seconds(i) AS started_at,
  TIMESTAMPTZ '2026-01-01' + to_seconds(i + 20 + hash(i) % 50) AS ended_at, false AS superseded
FROM range({n}) t(i)"""
_REWARDS = """
SELECT id('e', i) AS episode_id, 'reward' AS name, hash(i) % 100 / 100 AS value, 1.0 AS weight FROM range({n}) t(i)"""
_CALLS = """
SELECT id('c', i) AS call_id, id('e', i // {k}) AS episode_id, (i % {k})::INTEGER AS index,
  CASE WHEN i % 3 = 0 THEN 'seer' ELSE 'werewolf' END AS agent, true AS trainable, 'm' AS model,
  (i // 10000)::INTEGER AS policy_version, '{{}}' AS request,
  printf('{{"choices": [{{"message": {{"role": "assistant", "content": "reply %d"}}}}]}}', i) AS response,
  0 AS prefix_len, 0 AS prefix_messages,
  printf('[{{"role": "user", "content": "question %d %s"}}]', i, substr($1, 1 + (hash(i) % 90000)::INTEGER, {text}))
    AS messages_suffix,
  sampled.ids AS output_ids,
  'stop' AS finish_reason, TIMESTAMPTZ '2026-01-01' + to_seconds(i // {k} + 2 * (i % {k})) AS started_at,
  TIMESTAMPTZ '2026-01-01' + to_seconds(i // {k} + 2 * (i % {k}) + 1) AS ended_at, '{{}}' AS sampling,
  'rollout' AS phase
FROM range({n}) t(i) JOIN sampled ON sampled.of = i % 997"""
_SAMPLED = """
SELECT k % 997 AS of, list((hash(k) % 150000)::INTEGER) AS ids FROM range(997 * 100) t(k)
WHERE k // 997 < 20 + k % 80 GROUP BY 1"""


def _measured(what: str, path: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", __name__, what, str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def _seconds(action: Callable[[], object], repeat: int = 1) -> float:
    """The processor time of an action, of all threads together, the best of a few."""
    best = float("inf")
    for _ in range(repeat):
        started = time.process_time()
        action()
        best = min(best, time.process_time() - started)
    return best


def listing(path: Path) -> dict[str, float]:
    """Like a person who opens a run and sorts it by one column after another, looking at pages of
    each."""
    started = time.process_time()
    from ajet_sdk.trace.reader import open_trace
    from ajet_tools.trace.queries.filters import parse
    from ajet_tools.trace.queries.listing import COLUMNS, open_listing

    with open_trace(path) as reader:
        latest = open_listing(reader, "run")
        assert len(latest.page(reader, 0, PAGE)) == PAGE and latest.count == EPISODES
        found = {"first": time.process_time() - started}
        time.sleep(PAUSE)
        by_group = latest.sorted(reader, "group_id", False)
        found["counted"] = 1e3 * _seconds(lambda: by_group.page(reader, EPISODES // 2, PAGE))
        orders, pages = [], []
        for column in COLUMNS:
            time.sleep(PAUSE)
            orders.append(_seconds(partial(latest.sorted, reader, column, True)))
            order = latest.sorted(reader, column, False)
            order.page(reader, 0, PAGE)
            pages += [
                _seconds(partial(order.page, reader, EPISODES * i // 7, PAGE), 2)
                for i in range(0, 7, 2)
            ]
        found |= {"any order": 1e3 * max(orders), "any page": 1e3 * max(pages)}
        time.sleep(PAUSE)
        found["page after a pause"] = 1e3 * _seconds(
            partial(latest.page, reader, EPISODES // 2, PAGE)
        )
        found["refresh"] = 1e3 * _seconds(partial(latest.refreshed, reader), 3)
        time.sleep(PAUSE)
        found["filter"] = 1e3 * _seconds(
            partial(
                latest.filtered, reader, parse("reward < 0.5 and 'seer' in agents and step > 10")
            )
        )
    return found


def search(path: Path) -> dict[str, float]:
    from ajet_sdk.trace.reader import open_trace
    from ajet_tools.trace.queries.search import episodes_with

    with open_trace(path) as reader:
        times = [time.process_time()]
        found = episodes_with(
            reader,
            "Question 77777 ",
            progress=lambda *_: times.append(time.process_time()),
        )
        total = time.process_time() - times[0]
        assert len(found) == 1
    return {"search": total, "wait": max(b - a for a, b in pairwise(times))}


if __name__ == "__main__":
    measured = {"listing": listing, "search": search}[sys.argv[1]](Path(sys.argv[2]))
    print(json.dumps({**measured, "memory": peak_megabytes()}))
