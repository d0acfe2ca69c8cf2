"""Episodes in worker processes over a real Ray: two nodes on this machine, the scripted engine as
the model."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.cluster_utils import Cluster

from ajet_sdk.config.config import load_config
from ajet_sdk.errors import TrainingError
from ajet_sdk.reporting.results import Report
from ajet_sdk.rollout import processes as ray_workers
from ajet_sdk.run import run
from ajet_sdk.trace.reader import open_trace
from tests.serving import replying, serving

pytestmark = pytest.mark.slow

AGENT = """
import multiprocessing, os, threading, time
from pathlib import Path
import ajet, ray, sibling
from openai import AsyncOpenAI, OpenAI

client, sync = AsyncOpenAI(), OpenAI()  # cannot be pickled: the file is imported where it runs
here = Path("data.txt")

def ask(question):
    reply = sync.chat.completions.create(model="gpt", messages=[{"role": "user", "content": question}])
    return reply.choices[0].message.content

def where():
    return [ray.get_runtime_context().get_node_id(), os.getpid()]

@ajet.workflow
async def solve(question: str) -> list:
    reply = await client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": question}])
    return [reply.choices[0].message.content, sibling.NAME, *where()]

@ajet.workflow
def slow(question: str, flag: str) -> list:
    answer = ask(question)
    Path(flag).write_text(str(os.getpid()))
    time.sleep(1.5)
    return [answer, *where()]

@ajet.workflow
def dies(question: str, flag: str) -> list:
    answer = ask(question)
    if flag and not Path(flag).exists():
        Path(flag).touch()
        os._exit(3)
    if question == "1?":
        os._exit(3)
    return [answer, *where()]

@ajet.workflow
def hangs(question: str) -> list:
    ask(question)
    if question == "1?":
        time.sleep(1000)
    return [ask(question), *where()]

@ajet.workflow
async def blocks_the_loop(question: str) -> list:
    if question == "1?":
        while True:
            time.sleep(0.1)
    return where()

def child(question, answers):
    answers.put([ask(question), os.getpid()])

@ajet.workflow
def forks(question: str) -> list:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    process = context.Process(target=child, args=(question, answers))
    process.start()
    answer = answers.get(timeout=300)
    process.join()
    return [*answer, os.getpid()]

HELD = []

@ajet.workflow
def leaks(question: str) -> int:
    HELD.append(bytearray(os.urandom(1) * (64 << 20)))
    return os.getpid()

@ajet.workflow
def raises(question: str) -> str:
    raise LookupError("nothing here")

@ajet.workflow
def swallows(question: str, env: ajet.GymEnv) -> list:
    try:
        env.step({"role": "assistant", "content": ask(question)})
    except Exception:
        pass
    return ["0?", *where()]

class Swallows(ajet.Workflow):
    async def execute(self, workflow_task, tuner):
        model = tuner.as_raw_openai_sdk_client("a")
        await model.chat.completions.create(workflow_task.task.init_messages)
        try:
            workflow_task.gym_env.step({"role": "assistant", "content": "1"})
        except Exception:
            return ajet.WorkflowOutput(reward=0.0)

@ajet.judge
def swallowing(output, env: ajet.GymEnv) -> float:
    try:
        return env.evaluate()
    except Exception:
        return 0.0

class Class(ajet.Workflow):
    trainable_targets: list | None = ["wolf"]
    async def execute(self, workflow_task, tuner):
        model = tuner.as_raw_openai_sdk_client("a", "wolf")
        reply = await model.chat.completions.create(workflow_task.task.init_messages)
        overflow = tuner.get_context_tracker().context_overflow
        ids = workflow_task.tokenizer.encode("ab")
        return ajet.WorkflowOutput(metadata={"overflow": overflow, "ids": ids}, log_metrics={"pid": os.getpid()})

class Grader(ajet.BaseJudge):
    def compute_reward(self, task, output):
        return float(output.metadata["ids"] == [97, 98]), True

@ajet.judge
def judge(output, answer: str) -> float:
    return float(answer in output)

@ajet.judge
def fine(output) -> float:
    return 1.0

@ajet.judge
def asks(output, answer: str) -> float:
    return float(ask("judge") == "judge")

@ajet.judge(group=True)
async def rank(episodes, model: ajet.Model) -> list:
    reply = await model.chat([{"role": "user", "content": "judge"}])
    assert reply["content"] == "judge"
    return [ajet.Reward(value=e.attempt, reason=f"{len(episodes)} by {os.getpid()}") for e in episodes]
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    made.add_node(num_cpus=2)
    yield made
    made.shutdown()


Start = Callable[..., Report]


@pytest.fixture
def start(nodes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Run an agent of the file above, which lies outside of the working directory."""
    away = tmp_path / "away"
    away.mkdir()
    (away / "agent_on_ray.py").write_text(AGENT)
    (away / "sibling.py").write_text("NAME = 'sibling'\n")
    (away / "replies.py").write_text(
        "def reply(ask):\n    return ask.body['messages'][-1]['content'].strip('?')\n"
    )
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")

    def one(
        name: str,
        count: int = 4,
        *,
        judge: Any = "judge",
        k: int = 1,
        row: Any = None,
        env: str = "",
        **rollout: Any,
    ) -> Report:
        kind = {"env_type": "count"} if env else {}
        rows = [
            {"question": f"{i}?", "answer": f"{i}", "flag": "", **kind, **(row(i) if row else {})}
            for i in range(count)
        ]
        (away / "tasks.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        values = {
            "experiment_name": "e",
            "model": {"scripted": f"{away}/replies.py->reply"},
            "rollout": {
                "runner": "ray",
                "max_env_worker": 4,
                "user_workflow": f"{away}/agent_on_ray.py->{name}",
                **rollout,
            },
            "task_judge": {"judge_protocol": f"{away}/agent_on_ray.py->{judge}"},
            "task_reader": {
                **({"env_service": {"env_url": env}} if env else {}),
                "type": "jsonl_dataset_file",
                "jsonl_dataset_file": {"training": {"file_path": str(away / "tasks.jsonl")}},
            },
        }
        given = None if isinstance(judge, str) else judge
        return run(load_config(None, values={"ajet": values}), judge=given, k=k, ray=nodes.address)

    return one


def rows(report: Report, sql: str) -> list[dict[str, Any]]:
    with open_trace(report.directory / "trace.duckdb") as reader:
        found: list[dict[str, Any]] = reader.query(sql).to_pylist()
        return found


def test_episodes_run_on_both_nodes_in_processes_used_again(start: Start) -> None:
    report = start("solve", 6, k=4)
    outputs = [e.output for e in report.episodes]
    assert report.reward == 1, report.failures
    assert {o[1] for o in outputs} == {"sibling"}
    assert len({o[2] for o in outputs}) == 2
    processes = {o[3] for o in outputs}
    assert os.getpid() not in processes
    assert len(processes) <= 4 < len(outputs)
    calls = [c for e in report.episodes for c in e.calls]
    assert len(calls) == 24
    assert all(c.output_ids is not None for c in calls)


STATE = [{"role": "user", "content": "0"}]


@pytest.mark.parametrize(
    ("workflow", "judge", "broken"),
    [
        ("swallows", "fine", "/step"),
        ("Swallows", "fine", "/step"),
        ("swallows", "swallowing", "/evaluate"),
    ],
)
def test_a_fault_of_the_environment_that_the_agent_swallows_is_no_reward(
    start: Start, workflow: str, judge: str, broken: str
) -> None:
    service = replying(
        lambda path, headers, body: (500 if path == broken else 200, {"data": {"state": STATE}})
    )
    with serving(service) as url:
        report = start(workflow, 1, judge=judge, env=url, max_retries=0)
    [episode] = report.episodes
    assert (episode.status, episode.cause, episode.infrastructure) == (
        "failed",
        "EnvironmentUnavailable",
        True,
    )
    assert episode.rewards == () and episode.calls


def test_a_group_is_judged_once_in_a_process_whatever_processes_its_attempts_ran_in(
    start: Start,
) -> None:
    report = start("solve", 3, k=3, judge="rank", max_env_worker=2)
    assert not report.failures, report.failures
    for score in report.tasks:
        assert [e.reward for e in score.episodes] == [0, 1, 2]
        [reason] = {e.rewards[0].reason for e in score.episodes}
        assert reason is not None and reason.startswith("3 by ") and reason != f"3 by {os.getpid()}"
        judged = [[c for c in e.calls if c.phase == "judge"] for e in score.episodes]
        assert [len(calls) for calls in judged] == [1, 0, 0] and not judged[0][0].trainable


def test_a_process_that_dies_costs_its_attempt_and_nothing_else(
    start: Start, tmp_path: Path
) -> None:
    flag = str(tmp_path / "flag")
    report = start(
        "dies",
        4,
        row=lambda i: {"question": f"{i + 2}?", "answer": f"{i + 2}", "flag": flag if i else ""},
    )
    assert report.reward == 1, report.failures
    kept = rows(report, "SELECT status, cause, infrastructure FROM episodes ORDER BY status")
    lost = [row for row in kept if row["status"] == "failed"]
    assert {row["cause"] for row in lost} == {"WorkerLost"}
    assert all(row["infrastructure"] for row in lost)
    assert len(kept) == 4 + len(lost)
    # the call that the lost attempt had made is in the trace, and in the ledger once
    assert rows(report, "SELECT count(*) AS n FROM calls") == [{"n": 4 + len(lost)}]
    assert rows(
        report,
        "SELECT count(*) AS n FROM (SELECT call_id FROM ledger GROUP BY 1 HAVING count(*) > 1)",
    ) == [{"n": 0}]


def test_one_that_always_dies_fails_with_the_cause(start: Start) -> None:
    report = start("dies", 3)
    failed = [e for e in report.episodes if e.status == "failed"]
    assert [e.task.main_query or e.task.metadata["question"] for e in failed] == ["1?"]
    assert failed[0].cause == "WorkerLost"
    assert failed[0].infrastructure
    assert "os._exit" in (failed[0].error or "")
    assert [e.reward for e in report.episodes if e.status == "succeeded"] == [1, 1]


@pytest.mark.parametrize("name", ["hangs", "blocks_the_loop"])
def test_a_blocking_one_times_out_and_its_process_is_ended(start: Start, name: str) -> None:
    report = start(name, 5, timeout=3.0, max_env_worker=2)
    late = [e for e in report.episodes if e.status == "timeout"]
    assert len(late) == 1
    assert "agent_on_ray.py" in (late[0].error or "")
    assert sum(e.status == "succeeded" for e in report.episodes) == 4 or name == "blocks_the_loop"


def test_a_forked_child_belongs_to_the_episode(start: Start) -> None:
    report = start("forks", 3)
    assert report.reward == 1, report.failures
    assert all(e.output[1] != e.output[2] for e in report.episodes)
    assert [len(e.calls) for e in report.episodes] == [1, 1, 1]
    assert all(c.trainable for e in report.episodes for c in e.calls)


def test_one_that_grows_is_replaced(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_workers, "_MOST_GROWTH", 100 << 20)
    monkeypatch.setattr(ray_workers, "_PER_CPU", 0.25)
    report = start("leaks", 6, judge="fine", max_env_worker=1)
    assert all(e.status == "succeeded" for e in report.episodes), report.failures
    assert 2 <= len({e.output for e in report.episodes}) < 6


def test_an_agents_own_exception_is_told_as_in_a_thread(start: Start) -> None:
    report = start("raises", 1)
    error = report.episodes[0].error or ""
    assert report.episodes[0].cause == "LookupError"
    assert error.startswith("LookupError: nothing here")
    assert "away/agent_on_ray.py" in error
    assert "/tmp/ray/" not in error
    assert not report.episodes[0].infrastructure


def test_the_class_api_and_a_judge_class(start: Start) -> None:
    report = start("Class", 2, judge="Grader")
    assert report.reward == 1, report.failures
    assert all(e.output["metadata"]["overflow"] is False for e in report.episodes)
    assert all(e.metrics["pid"] != os.getpid() for e in report.episodes)
    assert all(c.trainable and c.target_tag == "wolf" for e in report.episodes for c in e.calls)


def test_what_cannot_be_sent_is_one_message_that_names_it(start: Start) -> None:
    lock = threading.Lock()

    def holds(output: Any) -> float:
        with lock:
            return 1.0

    with pytest.raises(TrainingError, match=r"judge holds cannot be sent.*pickle.*rollout\.runner"):
        start("solve", 2, judge=holds)


def test_a_judges_own_request_is_recorded(start: Start) -> None:
    """It goes to its own endpoint, which is not there: the run records that, as it does in
    threads."""
    report = start("solve", 1, judge="asks")
    calls = rows(
        report, "SELECT phase, trainable, error IS NOT NULL AS failed FROM calls ORDER BY phase"
    )
    assert {"phase": "judge", "trainable": False, "failed": True} in calls


def test_a_node_that_is_lost_costs_no_call_and_its_attempts_run_elsewhere(
    start: Start, nodes: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    third = nodes.add_node(num_cpus=2)
    time.sleep(1)
    flag = tmp_path / "begun"

    def remove() -> None:
        while not flag.exists():
            time.sleep(0.05)
        nodes.remove_node(third, allow_graceful=False)

    watcher = threading.Thread(target=remove)
    watcher.start()
    report = start("slow", 24, row=lambda i: {"flag": str(flag)}, max_env_worker=12)
    watcher.join()
    assert report.reward == 1, report.failures
    warned = [r.getMessage() for r in caplog.records if "Lost the Ray node" in r.getMessage()]
    assert len(warned) == 1
    assert "rollout.max_retries" in warned[0]
    kept = rows(
        report, "SELECT status, cause, count(*) AS n FROM episodes GROUP BY ALL ORDER BY status"
    )
    lost = sum(row["n"] for row in kept if row["status"] == "failed")
    assert lost >= 1
    assert sum(row["n"] for row in kept if row["status"] == "succeeded") == 24
    # each call is in the ledger once (that it balances, the run has checked)
    per_call = rows(report, "SELECT count(*) AS n FROM ledger GROUP BY call_id")
    assert {row["n"] for row in per_call} == {1}
    assert len({e.output[1] for e in report.episodes}) >= 2
