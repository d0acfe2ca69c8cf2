"""The swarm server: a thousand episodes open at once in twenty client processes, and what a call
through it costs the server beside a call through the gateway alone.

The model is scripted. Each client process opens its episodes, waits until those of all processes
are open, makes two calls in each from parallel threads, and ends it with a reward that tells the
episode. Afterwards each reward is looked up in the trace.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ajet_sdk.gateway.episode import EpisodeSpec
from ajet_sdk.trace.reader import episodes, open_trace
from ajet_sdk.types import new_id
from tests.bench import Figure
from tests.sdk.swarm.served import serve

PROCESSES, EACH = 20, 50
CALLS = 2_000
"""Calls of each kind whose processor time is compared."""
FULL = 0.9
"""Share of the episodes open from which a claim counts as one at a full server."""

CLIENT = """
import json, sys, threading, time
import httpx

url, number, each = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
http = httpx.Client(timeout=120.0, trust_env=False)
opened, claims, ends = [], [], []

def claim(at):
    task = {"task_id": f"task {at % 50}", "main_query": f"task {at % 50}"}
    body = {"request_id": f"{number}-{at}", "client_id": f"client-{number}", "task": task, "wait": 20.0}
    begun = time.perf_counter()
    answer = http.post(f"{url}/episodes", json=body)
    claims.append((time.time(), time.perf_counter() - begun))
    answer.raise_for_status()
    opened.append(answer.json())

def attempt(episode):
    for turn in range(2):
        http.post(
            f"{episode['base_url']}/chat/completions",
            json={"model": "m", "messages": [{"role": "user", "content": f"turn {turn}"}]},
            headers={"authorization": f"Bearer {episode['api_key']}"},
        ).raise_for_status()
    begun = time.perf_counter()
    http.post(
        f"{url}/episodes/{episode['episode_id']}/end",
        json={"reward": int(episode["episode_id"][:6], 16) / 2**24},
        headers={"authorization": f"Bearer {episode['end_key']}"},
    ).raise_for_status()
    ends.append(time.perf_counter() - begun)

for at in range(each):
    claim(at)
print("open", flush=True)
sys.stdin.readline()
threads = [threading.Thread(target=attempt, args=(episode,)) for episode in opened]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(json.dumps({"claims": claims, "ends": ends}), flush=True)
"""

CALLER = """
import sys
import httpx

base_url, key, calls = sys.argv[1], sys.argv[2], int(sys.argv[3])
http = httpx.Client(timeout=60.0, trust_env=False, headers={"authorization": f"Bearer {key}"})
body = {"model": "m", "messages": [{"role": "user", "content": "What is 12 plus 30?"}]}
for _ in range(calls):
    http.post(f"{base_url}/chat/completions", json=body).raise_for_status()
"""


def main() -> list[Figure]:
    with tempfile.TemporaryDirectory() as directory:
        crowd = _crowd(Path(directory))
        return [*crowd, _cost(Path(directory) / "cost")]


def _crowd(directory: Path) -> list[Figure]:
    """A thousand episodes at once, from twenty processes."""
    total = PROCESSES * EACH
    settings = ("ajet.data.train_batch_size=50", f"ajet.rollout.num_repeat={total // 50}")
    with serve(directory / "crowd", *settings) as server:
        collected = server.begin()
        command = [sys.executable, "-c", CLIENT, f"{server.url}/swarm/v1"]
        clients = [
            subprocess.Popen(
                [*command, str(number), str(EACH)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(PROCESSES)
        ]
        for client in clients:
            assert client.stdout is not None and client.stdout.readline() == "open\n"
        most_open = len(server.collection.attempts.open)
        told = []
        for client in clients:
            assert client.stdin is not None
            client.stdin.write("go\n")
            client.stdin.flush()
        for client in clients:
            told.append(json.loads(client.communicate(timeout=600)[0]))
        trained = collected.result(60)
    claims = sorted(claim for client in told for claim in client["claims"])
    full = [seconds for _, seconds in claims[int(FULL * total) :]]
    ends = [seconds for client in told for seconds in client["ends"]]
    wrong = total - _own_rewards(directory / "crowd")
    claim, end = statistics.median(full), statistics.median(ends)
    return [
        Figure("episodes open at once, in 20 processes", most_open, "", f"= {total}", most_open == total),
        Figure("rewards at another attempt, or lost", wrong, "", "= 0", wrong == 0),
        Figure("attempts in the step", len(trained), "", f"= {total}", len(trained) == total),
        Figure("claim at more than 900 open, median", claim * 1000, "ms", "<= 50", claim <= 0.05),
        Figure("end while all 1,000 end, median", end * 1000, "ms"),
    ]  # fmt: skip


def _own_rewards(directory: Path) -> int:
    """The number of episodes in the trace with two calls and their own reward."""
    with open_trace(directory) as trace:
        return sum(
            episode.reward == int(episode.episode_id[:6], 16) / 2**24 and len(episode.calls) == 2
            for episode in episodes(trace, "run")
        )


def _cost(directory: Path) -> Figure:
    """Processor time of the server for a call of a swarm's episode, beside one of the gateway's."""
    with serve(directory) as server:
        server.begin()
        gateway = server.host.gateway
        engine = server.collection.settings.engine
        plain, swarm = [], []
        for _ in range(3):  # interleaved
            episode = gateway.open(EpisodeSpec(episode_id=new_id(), engine=engine))
            plain.append(_seconds(episode.model().base_url, episode.handle_key))
            server.host.submit(episode.finish()).result(10)
            claimed = server.claimed()
            swarm.append(_seconds(claimed["base_url"], claimed["api_key"]))
            server.end(claimed)
    ratio = statistics.median(swarm) / statistics.median(plain)
    return Figure(
        "processor time of a call, over the gateway's", ratio, "x", "<= 1.2", ratio <= 1.2
    )


def _seconds(base_url: str, key: str) -> float:
    """This process's processor time while another process makes calls."""
    begun = time.process_time()
    command = [sys.executable, "-c", CALLER, base_url, key, str(CALLS // 3)]
    subprocess.run(command, check=True)
    return time.process_time() - begun
