"""`ajet.trace`: a deployed agent is observed, never rerouted, never broken."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import logging
import multiprocessing
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from ajet_sdk.agent.context import current_episode, observer
from ajet_sdk.agent.decorators import workflow
from ajet_sdk.capture.observe import trace
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.errors import ConfigError
from ajet_sdk.gateway.episode import EpisodeSpec, OpenEpisode
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.trace.encoding import REMOVED
from ajet_sdk.trace.limits import bytes_of
from ajet_sdk.trace.owner import owners
from ajet_sdk.trace.reader import episodes, open_trace
from ajet_sdk.types import Call, Event
from ajet_tools.trace.files.check import check
from tests.waiting import FOREVER


@pytest.fixture
def elsewhere() -> Iterator[OpenEpisode]:
    with Gateway() as gateway:
        engine = ScriptedEngine(lambda ask: "answer to " + ask.body["messages"][0]["content"])
        yield gateway.open(EpisodeSpec("elsewhere", engine))


def ask(elsewhere: OpenEpisode, text: str) -> str:
    body = {"model": "gpt", "messages": [{"role": "user", "content": text}]}
    headers = {"authorization": f"Bearer {elsewhere.handle_key}"}
    answer = httpx.post(f"{elsewhere.url}/v1/chat/completions", json=body, headers=headers).json()
    return str(answer["choices"][0]["message"]["content"])


def rows(path: Path, sql: str) -> list[dict[str, Any]]:
    with open_trace(path) as reader:
        return list(reader.query(sql).to_pylist())


CALLS = "select model, trainable, error, request from calls order by started_at"


def test_undecorated_calls_belong_to_an_episode_of_the_process(
    elsewhere: OpenEpisode, tmp_path: Path
) -> None:
    path = tmp_path / "agent.duckdb"
    with trace(path):
        assert ask(elsewhere, "one") == "answer to one"
        thread = threading.Thread(target=ask, args=(elsewhere, "two"))
        thread.start()
        thread.join()
    ask(elsewhere, "after the end")
    assert observer.get() is None
    assert rows(path, "select count(*) n, count(distinct episode_id) episodes from calls") == [
        {"n": 2, "episodes": 1}
    ]
    assert rows(path, "select count(*) n from episodes join calls using (episode_id)") == [{"n": 2}]
    assert elsewhere.handle_key.encode() not in path.read_bytes()
    assert len(elsewhere.calls) == 3


def test_a_decorated_call_is_an_episode_and_a_failure_is_recorded(
    elsewhere: OpenEpisode, tmp_path: Path
) -> None:
    path = tmp_path / "agent.duckdb"
    with trace(path):
        watching = observer.get()
        assert watching is not None
        with watching.episode("solve", {"question": "six by seven"}) as seen:
            ask(elsewhere, "six by seven")
            seen.output = "42"
        with (
            pytest.raises(ZeroDivisionError),
            watching.episode("solve", {"question": "one by zero"}),
        ):
            ask(elsewhere, "one by zero")
            _ = 1 / 0
        assert current_episode.get() is None
    found = rows(path, "select status, error from episodes order by started_at")
    assert [row["status"] for row in found] == ["succeeded", "failed"]
    assert "ZeroDivisionError" in found[1]["error"]
    assert rows(path, "select count(distinct episode_id) n from calls") == [{"n": 2}]


def test_a_server_that_starts_its_trace_in_a_task_has_every_request_as_an_episode(
    elsewhere: OpenEpisode, tmp_path: Path
) -> None:
    path = tmp_path / "agent.duckdb"

    @workflow
    async def solve(question: str, api_key: str) -> str:
        return await asyncio.to_thread(ask, elsewhere, question)

    @workflow
    def plain(question: str) -> str:
        return ask(elsewhere, question)

    async def start_up() -> trace:
        return trace(path)

    async def serve(pool: ThreadPoolExecutor) -> None:
        tracing = await asyncio.create_task(start_up())
        assert await asyncio.create_task(solve("one", api_key="sk-secret")) == "answer to one"
        assert (
            await asyncio.get_running_loop().run_in_executor(pool, plain, "two") == "answer to two"
        )
        tracing.close()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # its thread is older than the trace
        asyncio.run(serve(pool))
    sql = (
        "select task->>'main_query' q, count(*) n from episodes join calls using (episode_id) group"
        " by 1 order by 1"
    )
    assert rows(path, sql) == [{"q": "one", "n": 1}, {"q": "two", "n": 1}]
    assert b"sk-secret" not in path.read_bytes()
    assert observer.get() is None


def test_a_trace_is_read_while_the_agent_runs(elsewhere: OpenEpisode, tmp_path: Path) -> None:
    with trace(tmp_path / "live.duckdb") as tracing:
        ask(elsewhere, "one")
        tracing.flush()
        assert rows(tmp_path / "live.duckdb", "select count(*) n from calls") == [{"n": 1}]


def test_a_directory_gets_a_file_for_each_process(elsewhere: OpenEpisode, tmp_path: Path) -> None:
    with trace(tmp_path / "traces"):
        ask(elsewhere, "one")
    files = list((tmp_path / "traces").glob("*.duckdb"))
    assert len(files) == 1 and rows(files[0], "select count(*) n from calls") == [{"n": 1}]


def test_a_file_that_cannot_be_written_is_one_warning_and_no_error(
    elsewhere: OpenEpisode, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a directory should be")
    with caplog.at_level(logging.WARNING), trace(blocked / "trace.duckdb"):
        for number in range(3):
            assert ask(elsewhere, str(number)) == f"answer to {number}"
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def test_a_run_inside_of_a_traced_process_is_not_observed_twice(
    elsewhere: OpenEpisode, tmp_path: Path
) -> None:
    path = tmp_path / "agent.duckdb"
    with trace(path), Gateway() as gateway:
        episode = gateway.open(EpisodeSpec("inner", ScriptedEngine(lambda ask: "inner")))
        asyncio.run(episode.model().chat([{"role": "user", "content": "x"}]))
        assert len(episode.calls) == 1
    assert rows(path, "select count(*) n from calls") == [{"n": 0}]


def test_a_local_endpoint_that_has_episodes_in_its_path_is_observed(
    elsewhere: OpenEpisode, tmp_path: Path
) -> None:
    path, messages = tmp_path / "agent.duckdb", [{"role": "user", "content": "x"}]
    url = f"{elsewhere.url}/episodes/other/default/v1/chat/completions"
    with trace(path):
        for key in ("sk-own", elsewhere.handle_key):  # the latter: a gateway records that itself
            httpx.post(
                url,
                json={"model": "gpt", "messages": messages},
                headers={"authorization": f"Bearer {key}"},
            )
    assert rows(path, "select count(*) n from calls") == [{"n": 1}]


@pytest.mark.slow
def test_the_file_is_there_with_its_run_before_the_first_call(tmp_path: Path) -> None:
    """Killed the moment that `trace` returns, it has left a trace that can be read."""
    program = (
        f"import os, ajet\najet.trace({str(tmp_path / 'agent.duckdb')!r})\nos.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    assert rows(tmp_path / "agent.duckdb", "select status from runs") == [{"status": "interrupted"}]
    assert rows(tmp_path / "agent.duckdb", "select count(*) n from calls") == [{"n": 0}]


@pytest.mark.slow
def test_a_forked_process_has_its_file_before_its_first_call(tmp_path: Path) -> None:
    program = f"""
import os
import queue
import ajet
from ajet_sdk.agent.context import observer
ajet.trace({str(tmp_path)!r})
if os.fork() == 0:
    observer.get().process_episode()
    os.kill(os.getpid(), 9)
os.wait()
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    files = sorted(tmp_path.glob("*.duckdb"))
    assert len(files) == 2
    assert [rows(file, "select status from runs") for file in files] == [
        [{"status": "interrupted"}]
    ] * 2


ENDLESS = """
import sys, httpx, ajet
ajet.trace(sys.argv[1])
with httpx.Client(trust_env=False) as client:
    for number in range(100_000):
        body = {"model": "gpt", "messages": [{"role": "user", "content": str(number)}]}
        client.post(sys.argv[2] + "/v1/chat/completions", json=body, headers={"authorization": "Bearer " + sys.argv[3]})
        print(number, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("answered", [1, 300])
def test_a_kill_loses_no_call_whose_reply_was_returned(
    elsewhere: OpenEpisode, tmp_path: Path, answered: int
) -> None:
    path = tmp_path / "agent.duckdb"
    command = [sys.executable, "-c", ENDLESS, str(path), elsewhere.url, elsewhere.handle_key]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        for _ in range(answered):
            agent.stdout.readline()
        agent.kill()
        seen = answered + len(agent.stdout.readlines())
    messages = rows(path, "select messages_suffix from calls order by index")
    stored = [int(json.loads(row["messages_suffix"])[-1]["content"]) for row in messages]
    assert stored == list(range(len(stored))) and seen <= len(stored) <= seen + 1


KILLED_AGAIN_AND_AGAIN = """
import functools, os, sys, httpx, ajet
observe = functools.partial(ajet.trace, sys.argv[1], durable=sys.argv[4] == "True")  # loaded once
def tell(text):
    os.write(1, (str(text) + chr(10)).encode())  # whole or not at all
for line in sys.stdin:
    if not (child := os.fork()):
        observe()
        tell(os.getpid())
        with httpx.Client(trust_env=False) as client:
            for number in range(100_000):
                text = line.strip() + "-" + str(number)
                body = {"model": "gpt", "messages": [{"role": "user", "content": text}]}
                client.post(sys.argv[2] + "/v1/chat/completions", json=body, headers={"authorization": sys.argv[3]})
                tell(text)
    os.waitpid(child, 0)
    tell("killed")
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("kills", [10, pytest.param(1000, marks=pytest.mark.long)])
def test_kill_after_kill_loses_no_call(
    elsewhere: OpenEpisode, tmp_path: Path, kills: int, durable: bool
) -> None:
    directory, answered, chance = tmp_path / "served", set[str](), random.Random(0)
    key = f"Bearer {elsewhere.handle_key}"
    command = [
        sys.executable,
        "-c",
        KILLED_AGAIN_AND_AGAIN,
        directory,
        elsewhere.url,
        key,
        str(durable),
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as service:
        assert service.stdin is not None and service.stdout is not None
        for kill in range(kills):
            service.stdin.write(f"{kill}\n")
            service.stdin.flush()
            child = int(service.stdout.readline())
            answered |= {service.stdout.readline().strip() for _ in range(chance.randrange(12))}
            os.kill(child, signal.SIGKILL)
            while (line := service.stdout.readline().strip()) != "killed":
                answered.add(line)
    stored: list[str] = []
    for file in directory.glob("*.duckdb"):  # a thousand at once take many times as long
        stored += [
            json.loads(row["m"])[-1]["content"]
            for row in rows(file, "select messages_suffix m from calls")
        ]
    assert answered <= set(stored) and len(stored) == len(set(stored)) > kills
    assert not list(directory.glob("*.journal"))
    assert [broken for file in directory.glob("*.duckdb") for broken in check(file)] == []


def test_a_reader_of_a_live_process_sees_each_call_whose_reply_was_returned(
    elsewhere: OpenEpisode, tmp_path: Path
) -> None:
    with trace(tmp_path / "agent.duckdb"):
        for number in range(3):
            ask(elsewhere, f"{number}")
            assert rows(tmp_path, "select count(*) n from calls") == [{"n": number + 1}]


def test_a_journal_is_taken_over_once_its_process_has_ended(
    elsewhere: OpenEpisode, tmp_path: Path
) -> None:
    """It has what a caller saw and the file does not yet have, no secret, and a line that a full
    disk cut off."""
    path = tmp_path / "agent.duckdb"
    with trace(path) as tracing:
        [journal] = tmp_path.glob("*.journal")
        tracing.flush()
        assert journal.read_bytes() == b"", "what is in the file needs no journal"
        watching = observer.get()
        assert watching is not None
        with watching.episode("solve", {"question": "one", "api_key": "sk-secret"}) as seen:
            ask(elsewhere, "one")
            seen.output = "ä\udce4"
        kept = journal.read_bytes() or b""
        assert b"sk-secret" not in kept
        assert rows(path, "select count(*) n from runs") == [{"n": 1}], (
            "a live process keeps its journal"
        )
        assert journal.exists()
    assert not journal.exists(), "a process that ends in good order leaves none"
    torn = b'\n{"Call": {"call_id": "torn", "episo'
    lines = [f"\n{json.dumps({'Call': json.loads(call(n))})}".encode() for n in "abc"]
    (tmp_path / f"{path.name}.1-0.journal").write_bytes(
        b"".join([lines[0], torn, lines[1], lines[0], lines[2][:-9]])
    )
    (tmp_path / "new.duckdb.1-0.journal").write_bytes(lines[2])
    with open_trace(tmp_path, read_only=True) as reader:
        assert reader.query("SELECT 1 FROM calls WHERE model = 'kept'").num_rows == 0
    assert len(list(tmp_path.glob("*.journal"))) == 2, "who only reads writes no file"
    assert rows(path, "select call_id from calls where model = 'kept' order by 1") == [
        {"call_id": "a"},
        {"call_id": "b"},
    ]
    assert rows(tmp_path, "select count(*) n from calls where model = 'kept'") == [{"n": 3}]
    assert not list(tmp_path.glob("*.journal"))


def call(name: str) -> str:
    return Call(
        call_id=name, episode_id="e", model="kept", output_ids=[1], logprobs=[-0.5]
    ).model_dump_json()


@pytest.mark.skipif(sys.platform == "darwin", reason="there is no os.fdatasync")
def test_a_journal_that_cannot_be_written_is_a_warning(
    elsewhere: OpenEpisode,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(file: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "agent.duckdb"
    with trace(path, durable=True):
        monkeypatch.setattr("os.fdatasync", full)
        assert [ask(elsewhere, text) for text in "ab"] == ["answer to a", "answer to b"]
    [record] = caplog.records
    assert "the disk of" in record.message and "is full" in record.message
    assert rows(path, "select count(*) n from calls") == [{"n": 2}]


def sizes(directory: Path) -> list[int]:
    return [bytes_of(file) for file in directory.glob("*.duckdb")]


def held() -> tuple[float, int]:
    """Megabytes of memory and the number of open descriptors of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6, len(
        [*Path("/proc/self/fd").iterdir()]
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory and descriptors are read from /proc")
@pytest.mark.parametrize("files", [30, pytest.param(430, marks=pytest.mark.long)])
def test_a_month_of_a_service_stays_within_its_limits(
    elsewhere: OpenEpisode, tmp_path: Path, files: int
) -> None:
    """Thirty days as so many files (of 64 MB at 10 calls a second: 430), the oldest of which go.

    What is kept has every call; memory, threads and descriptors do not grow.
    """
    directory, day, kept = tmp_path / "served", 50, 4_000_000
    long, threads, answered = "word " * 400, threading.active_count(), list[str]()
    with trace(directory, rotate="300kB", keep=[f"{kept // 10**6}MB", "90d"]) as tracing:
        watching = observer.get()
        assert watching is not None
        memory = descriptors = None
        while len({file.name for file in directory.glob("*.duckdb")} | set(answered)) < files:
            for number in range(day):
                with watching.episode("serve", {"question": f"{number} {long}"}):
                    ask(elsewhere, f"{number} {long}")
            tracing.flush()
            answered = [
                *dict.fromkeys([*answered, *(file.name for file in directory.glob("*.duckdb"))])
            ]
            assert sum(sizes(directory)) < kept + 3_000_000, (
                "the limit, the file that is written with what waits for it, and one that is begun"
            )
            if memory is None and len(answered) >= 20:
                memory, descriptors = held()
        assert memory is not None and descriptors is not None
        assert held()[0] < memory + 30 and held()[1] <= descriptors + 12
        assert threading.active_count() <= threads + 8
    assert len(answered) >= files > len(sizes(directory))
    kept_rows = rows(
        directory,
        "select count(*) n from episodes join calls using (episode_id) join runs using (run_id)",
    )
    assert kept_rows[0]["n"] >= day
    assert check(*directory.glob("*.duckdb")) == []
    assert rows(directory, "select count(*) n from runs where status != 'finished'") == [{"n": 0}]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "darwin", reason="there is no os.fdatasync")
def test_threads_that_wait_for_the_disk_at_once_share_that_wait(
    elsewhere: OpenEpisode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is busy with one call until the other has been written: one sync acknowledges
    several calls."""
    syncs, lone = list[int](), list[bool]()

    def sync(descriptor: int) -> None:
        [path] = tmp_path.glob("*.journal")
        give_up = time.monotonic() + 60
        while path.read_bytes().count(b'{"Call"') < 4 and time.monotonic() < give_up:
            time.sleep(0.01)
        lone.append(time.monotonic() >= give_up)
        syncs.append(descriptor)

    with trace(tmp_path / "served.duckdb", durable=True), ThreadPoolExecutor(4) as pool:
        ask(elsewhere, "the first begins the process's episode")
        with monkeypatch.context() as patched:
            patched.setattr("os.fdatasync", sync)
            list(pool.map(lambda i: ask(elsewhere, str(i)), range(3)))
    assert not any(lone) and 0 < len(syncs) < 3


@pytest.mark.slow
def test_no_call_is_lost_between_two_files(elsewhere: OpenEpisode, tmp_path: Path) -> None:
    directory, number = tmp_path / "served", 60
    with trace(directory, rotate="30kB") as tracing, ThreadPoolExecutor(4) as pool:
        watching = observer.get()
        assert watching is not None

        def turn(i: int) -> None:
            with watching.episode("serve", {"question": str(i)}):
                ask(elsewhere, f"{i} " + "word " * 200)
                ask(elsewhere, f"{i} again")
            if i % 20 == 0:
                tracing.flush()

        list(pool.map(turn, range(number)))
    assert len(sizes(directory)) > 1
    counts = (
        "select count(*) calls, count(distinct episode_id) episodes from calls join episodes using"
        " (episode_id)"
    )
    assert rows(directory, counts) == [{"calls": 2 * number, "episodes": number}]
    with open_trace(directory) as reader:
        asked = [
            call.request["messages"][0]["content"]
            for episode in episodes(reader)
            for call in episode.calls
        ]
    assert sorted(asked) == sorted(
        text for i in range(number) for text in (f"{i} " + "word " * 200, f"{i} again")
    )


ROTATED = """
import logging, pathlib, sys, ajet
from ajet_sdk.agent.context import observer
logging.basicConfig()
ajet.trace(sys.argv[1], rotate="1kB")
while len(list(pathlib.Path(sys.argv[1]).glob("*.duckdb"))) < 3:
    with observer.get().episode("serve", {}):
        pass
"""


@pytest.mark.slow
def test_a_process_that_began_further_files_and_ends_leaves_no_run_open(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ROTATED, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert ended.stderr == ""
    files = sorted(tmp_path.glob("*.duckdb"))
    assert [rows(file, "select status from runs") for file in files] == [
        [{"status": "finished"}]
    ] * len(files)


def test_old_files_go_as_a_process_begins_its_own(tmp_path: Path) -> None:
    directory = tmp_path / "served"
    for _ in range(3):
        trace(directory).close()
    old, *others = directory.glob("*.duckdb")
    os.utime(old, (0, 0))
    stranger = directory / "elsewhere-1-0.duckdb"
    stranger.write_bytes(b"of another machine")
    os.utime(stranger, (0, 0))
    trace(directory, keep="30d").close()
    assert not old.exists() and stranger.exists() and all(file.exists() for file in others)
    with trace(directory) as living:
        mine = {owner.trace for owner in owners(directory)}
        for file in directory.glob("*.duckdb"):
            os.utime(file, (0, 0))
        trace(directory, keep=["1s", "1 files"]).close()
        assert mine <= {file.name for file in directory.glob("*.duckdb")}, (
            "a file that is written is never deleted"
        )
        living.flush()


def test_the_file_that_is_begun_counts_as_one_of_those_kept(tmp_path: Path) -> None:
    for began in range(1, 4):
        trace(tmp_path, keep="2 files").close()
        assert len(list(tmp_path.glob("*.duckdb"))) == min(began, 2)


def test_what_the_user_names_is_masked_before_it_is_stored(
    elsewhere: OpenEpisode, tmp_path: Path
) -> None:
    def mask(text: str) -> str:
        if "broken" in text:
            raise KeyError(text)
        return text.replace("Ada", "X")

    for name, by in (("patterns", [r"\b\d{16}\b", "Ada"]), ("function", mask)):
        with trace(tmp_path / f"{name}.duckdb", mask=by):  # type: ignore[arg-type]
            watching = observer.get()
            assert watching is not None
            with (
                pytest.raises(ValueError),
                watching.episode("pay", {"card": "4111111111111111", "who": ["Ada"]}) as seen,
            ):
                ask(
                    elsewhere,
                    "Ada pays broken" if name == "function" else "Ada pays with 4111111111111111",
                )
                seen.output = {"to": "Ada"}
                seen.happened(Event(name="add", arguments={"who": "Ada"}, result={"to": "Ada"}))
                raise ValueError("Ada has no money")
        with open_trace(tmp_path / f"{name}.duckdb") as reader:
            stored = str(
                [
                    reader.query(f"select * from {table}").to_pylist()
                    for table in ("calls", "episodes")
                ]
            )
        assert "Ada" not in stored and ("4111111111111111" not in stored or name == "function")
        assert REMOVED in stored and "has no money" in stored


def test_a_share_of_the_episodes_is_recorded(elsewhere: OpenEpisode, tmp_path: Path) -> None:
    with trace(tmp_path / "none.duckdb", sample=0.0), observer.get().episode("solve", {}):  # type: ignore[union-attr]
        assert ask(elsewhere, "one") == "answer to one"
    assert rows(tmp_path / "none.duckdb", "select count(*) n from calls") == [{"n": 0}]
    with trace(tmp_path / "half.duckdb", sample=0.5):
        watching = observer.get()
        assert watching is not None
        for _ in range(100):
            with watching.episode("solve", {}):
                pass
        ask(elsewhere, "outside")
    [row] = rows(
        tmp_path / "half.duckdb",
        "select count(*) n from episodes where task->>'env_type' = 'solve'",
    )
    assert 20 < row["n"] < 80  # by chance once in 10^9
    assert rows(tmp_path / "half.duckdb", "select config->>'sample' s from runs") == [{"s": "0.5"}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rotate": "soon"}, 'rotate takes "30d" or "2GB", or a list of them'),
        ({"rotate": "2 files"}, 'rotate takes "30d" or "2GB"'),
        ({"rotate": 3}, "rotate takes .* .got 3"),
        ({"rotate": "0MB"}, "rotate is a limit above 0 .got '0MB'"),
        ({"rotate": ["1d", "0s"]}, "rotate is a limit above 0"),
        ({"rotate": f"{10**20}d"}, "rotate takes"),
        ({"keep": "3 months"}, 'keep takes "30d", "2GB" or "100 files"'),
        ({"keep": 0}, "keep takes"),
        ({"keep": "0 files"}, "keep is a limit above 0"),
        ({"sample": 2.0}, "sample is a share from 0 to 1"),
        ({"sample": "x"}, "sample is a share from 0 to 1 .got 'x'"),
        ({"durable": "yes"}, "durable is True or False .got 'yes'"),
        ({"mask": ["("]}, "mask takes regular expressions"),
        ({"mask": 3}, "mask takes regular expressions as texts, or a function .got 3"),
        ({"mask": ["a", b"b"]}, "mask takes regular expressions as texts"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        trace(tmp_path / "served", **arguments)
    with pytest.raises(ConfigError, match="for a directory of trace files"):
        trace(tmp_path / "one.duckdb", keep="30d")
    for path in ("", None):
        with pytest.raises(
            ConfigError, match=r"takes the path of a .duckdb file or of a directory"
        ):
            trace(path)  # type: ignore[arg-type]
    assert not (tmp_path / "served").exists()
    assert observer.get() is None


EPISODE = """
import logging, sys, ajet
from ajet_sdk.agent.context import observer
logging.basicConfig()
with ajet.trace(sys.argv[1]), observer.get().episode("serve", {}):
    pass
"""


@pytest.mark.slow
def test_a_file_that_another_process_writes_is_waited_for(
    elsewhere: OpenEpisode, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "shared.duckdb"
    holder = (
        "import sys, ajet; tracing = ajet.trace(sys.argv[1]); print('ready', flush=True); input();"
        " tracing.close()"
    )
    command = [sys.executable, "-c", holder, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as service:
        assert service.stdout is not None and service.stdout.readline() == "ready\n"
        ended = subprocess.run(
            [sys.executable, "-c", EPISODE, str(path)], capture_output=True, text=True, check=True
        )
        assert "in a journal beside the file" in ended.stderr and "lost" not in ended.stderr
        with trace(path) as tracing:
            ask(elsewhere, "meanwhile")
            assert "wait in memory (65536 at most) and in a journal" in caplog.text
            service.communicate("\n")
            tracing.flush(60)
    assert rows(path, "select count(*) n from calls") == [{"n": 1}]
    assert rows(path, "select count(*) n from episodes where task->>'env_type' = 'serve'") == [
        {"n": 1}
    ]
    assert rows(path, "select count(*) n from runs") == [{"n": 3}]


def test_a_streaming_agent_is_an_episode_from_its_first_part_to_its_last(
    elsewhere: OpenEpisode, tmp_path: Path
) -> None:
    path = tmp_path / "agent.duckdb"

    @workflow
    def letters(question: str) -> Iterator[str]:
        yield "a"
        yield ask(elsewhere, question)

    @workflow
    async def numbers(question: str) -> AsyncIterator[int]:
        await asyncio.to_thread(ask, elsewhere, question)
        yield 1
        await asyncio.to_thread(ask, elsewhere, question)
        yield 2

    async def read() -> list[int]:
        found = []
        async for number in numbers("two"):
            await asyncio.to_thread(ask, elsewhere, "the caller's own")
            found.append(number)
        return found

    with trace(path):
        parts = []
        for part in letters("one"):
            ask(elsewhere, "the caller's own")
            parts.append(part)
        assert parts == ["a", "answer to one"]
        assert asyncio.run(read()) == [1, 2]
        unread = letters("three")
        next(unread)
        unread.close()
    sql = """select task->>'main_query' q, output, status, count(c.call_id) n from episodes e
        left join calls c using (episode_id) group by all order by 1, 2"""
    assert rows(path, sql) == [
        {"q": "", "output": "null", "status": "succeeded", "n": 4},  # the process's
        {"q": "one", "output": '"aanswer to one"', "status": "succeeded", "n": 1},
        {"q": "three", "output": "null", "status": "failed", "n": 0},
        {"q": "two", "output": "[1, 2]", "status": "succeeded", "n": 2},
    ]


def test_a_call_after_its_episode_is_the_processs(elsewhere: OpenEpisode, tmp_path: Path) -> None:
    jobs: queue.Queue[tuple[str, Future[str]]] = queue.Queue()

    def serve() -> None:
        for _ in range(3):
            text, future = jobs.get()
            future.set_result(ask(elsewhere, text))

    worker = threading.Thread(target=serve)

    @workflow
    def solve(question: str) -> str:
        if worker.ident is None:
            worker.start()
        future: Future[str] = Future()
        jobs.put((question, future))
        return future.result(FOREVER)

    path = tmp_path / "agent.duckdb"
    with trace(path):
        assert [solve(name) for name in ("user 0", "user 1", "user 2")] == [
            f"answer to user {n}" for n in range(3)
        ]
        worker.join()
    sql = (
        "select task->>'main_query' q, count(*) n from episodes join calls using (episode_id) group"
        " by 1 order by 1"
    )
    assert rows(path, sql) == [{"q": "", "n": 2}, {"q": "user 0", "n": 1}]


def ask_elsewhere(url: str, key: str, text: str) -> str:
    body = {"model": "gpt", "messages": [{"role": "user", "content": text}]}
    reply = httpx.post(
        f"{url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}
    ).json()
    return str(reply["choices"][0]["message"]["content"])


def by_fork(function: Any, *arguments: str) -> None:
    pid = os.fork()
    if pid == 0:
        function(*arguments)
        os._exit(0)
    os.waitpid(pid, 0)


def by_process(function: Any, *arguments: str) -> None:
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    process.join()


def by_pool(function: Any, *arguments: str) -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.apply(function, arguments)


def by_executor(function: Any, *arguments: str) -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(function, *arguments).result()


@pytest.mark.slow
@pytest.mark.parametrize("start", [by_fork, by_process, by_pool, by_executor])
@pytest.mark.parametrize("directory", [False, True])
def test_calls_of_child_processes_are_their_episodes(
    elsewhere: OpenEpisode, tmp_path: Path, start: Any, directory: bool
) -> None:
    path = tmp_path / "served" if directory else tmp_path / "agent.duckdb"

    @workflow
    def solve(question: str) -> str:
        for number in range(3):
            start(ask_elsewhere, elsewhere.url, elsewhere.handle_key, f"{question} {number}")
        return ask(elsewhere, question)

    with trace(path):
        solve("six by seven")
    sql = (
        "select task->>'main_query' q, count(c.call_id) n from episodes join calls c using"
        " (episode_id) group by 1"
    )
    assert rows(path, sql) == [{"q": "six by seven", "n": 4}]
