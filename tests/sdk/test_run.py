"""`train` and `run`: the directory, the run's row, the checks before the first episode, and
scoring."""

from __future__ import annotations

import asyncio
import html
import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

import ajet
from ajet_sdk.config.config import Config, load_config
from ajet_sdk.errors import (
    ConfigError,
    MissingExtra,
    SignatureError,
    TaskError,
    TraceLocked,
    TrainingError,
)
from ajet_sdk.rollout.event_loop import run_to_end
from ajet_sdk.run import run, train
from ajet_sdk.session import Session
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.types import Episode, Reward, Task

ROOT = Path(__file__).parents[2]


@ajet.workflow
async def solve(question: str, model: Any) -> str:
    return str((await model.chat([{"role": "user", "content": question}])).content)


@ajet.judge
def exact(output: str, answer: str) -> float:
    return float(output == answer)


def reply(ask: Any) -> str:
    return "42" if ask.sampling.seed % 2 else "43"


def config(tmp_path: Path, **sections: Any) -> Config:
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "tasks.jsonl").write_text(
        "".join(f'{{"question": "q{i}", "answer": "42"}}\n' for i in range(4))
    )
    return load_config(
        values={
            "backbone": "debug",
            "experiment_dir": str(tmp_path / "experiment"),
            "model": {"scripted": f"{__file__}->reply"},
            "task_reader": {
                "type": "jsonl_dataset_file",
                "jsonl_dataset_file": {"training": {"file_path": str(tmp_path / "tasks.jsonl")}},
            },
            **sections,
        }
    )


def rows(path: Path, sql: str) -> list[dict[str, Any]]:
    with open_trace(path) as reader:
        return list(reader.query(sql).to_pylist())


@pytest.mark.slow
def test_a_run_scores_every_task(tmp_path: Path) -> None:
    told: list[str] = []
    report = run(
        config(tmp_path),
        workflow=solve,
        judge=exact,
        k=3,
        on_episode=lambda e: told.append(e.episode_id),
    )
    assert len(report.tasks) == 4 and all(len(score.episodes) == 3 for score in report.tasks)
    assert sorted(told) == sorted(e.episode_id for e in report.episodes)
    for score in report.tasks:
        assert score.reward == pytest.approx(score.solved / 3) and score.failed == 0
        assert all(e.task == score.task for e in score.episodes)
        assert len({e.group_id for e in score.episodes}) == 1 and [
            e.attempt for e in score.episodes
        ] == [0, 1, 2]
    assert sorted(report.pass_at) == [1, 2, 3] and report.pass_at[1] == pytest.approx(report.reward)
    assert report.pass_at[1] <= report.pass_at[2] <= report.pass_at[3]
    assert report.failures == [] and report.notices == []
    assert rows(report.directory, "SELECT count(*) AS n FROM episodes WHERE split = 'val'") == [
        {"n": 12}
    ]


@pytest.mark.slow
@pytest.mark.parametrize("start", [run, train])
def test_a_run_whose_ledger_does_not_balance_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Any
) -> None:
    """Each run checks at its end, also one that trains nothing; tokens that nobody booked stop
    it."""
    for place in ("ajet_sdk.run", "ajet_sdk.backbones.debug"):
        monkeypatch.setattr(f"{place}.untrained_entries", lambda episode: [])
    with pytest.raises(
        TrainingError,
        match=r"does not balance:\n  call \w+ of episode \w+: 3 tokens sampled, 0 in the",
    ):
        start(config(tmp_path), workflow=solve, judge=exact)
    assert rows(tmp_path / "experiment", "SELECT status FROM runs") == [{"status": "failed"}]


@pytest.mark.slow
def test_two_runs_give_the_same_score(tmp_path: Path) -> None:
    first, second = (run(config(tmp_path), workflow=solve, judge=exact, k=2) for _ in range(2))
    assert [s.solved for s in first.tasks] == [s.solved for s in second.tasks]
    assert len(rows(tmp_path / "experiment", "SELECT run_id FROM runs")) == 2


def test_failures_are_counted_and_never_a_reward(tmp_path: Path) -> None:
    @ajet.workflow
    def act(question: str) -> Reward:
        if question in ("q0", "q1"):
            raise KeyError("pot")
        return Reward(value=1)

    report = run(config(tmp_path), workflow=act, k=2)
    assert [s.reward for s in report.tasks] == [None, None, 1.0, 1.0] and report.reward == 1.0
    assert report.pass_at == {1: 0.5, 2: 0.5} and [s.failed for s in report.tasks] == [2, 2, 0, 0]
    assert len(report.failures) == 1 and report.failures[0].startswith("4 × KeyError")


ROWS = [{"question": "q", "answer": "42"}, {"question": "r", "answer": "42"}]


def table_of(library: str) -> Any:
    module = pytest.importorskip(library)
    if library == "datasets":
        return module.Dataset.from_list(ROWS)
    return module.Table.from_pylist(ROWS) if library == "pyarrow" else module.DataFrame(ROWS)


@pytest.mark.parametrize(
    "kind", ["rows", "tasks", "generator", "file", "pyarrow", "pandas", "polars", "datasets"]
)
def test_tasks_may_be_given_in_every_form(tmp_path: Path, kind: str) -> None:
    if kind == "file":
        given: Any = tmp_path / "given.jsonl"
        given.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif kind in ("pyarrow", "pandas", "polars", "datasets"):
        given = table_of(kind)
    else:
        tasks = [Task(main_query=row["question"], metadata=row) for row in ROWS]
        given = {"rows": ROWS, "tasks": tasks, "generator": (row for row in ROWS)}[kind]
    scripted = {"backbone": "debug", "model": {"scripted": f"{__file__}->reply"}}
    settings = Config(
        **scripted, experiment_dir=tmp_path / "experiment"
    )  # no task_reader: what is given is enough
    report = run(settings, workflow=solve, judge=exact, tasks=given)
    assert [score.task.main_query for score in report.tasks] == ["q", "r"]
    if kind == "rows":
        tuned = train(settings, workflow=solve, judge=exact, tasks=given)
        assert {e.task.task_id for e in tuned.episodes} == {
            score.task.task_id for score in report.tasks
        }


def test_what_holds_no_tasks_is_refused(tmp_path: Path) -> None:
    for given, message in (
        ({"train": ROWS}, r"tasks is a single mapping \(of train\).*tasks=data\['train'\]"),
        ([], "there are no training tasks: the given list"),
        (3, r"tasks must be a list of dicts.*\(got int\)"),
        (tmp_path / "none.jsonl", "there is no file .*none.jsonl"),
    ):
        with pytest.raises(TaskError, match=message):
            run(config(tmp_path), workflow=solve, judge=exact, tasks=given)
    with pytest.raises(TaskError, match="training and validation share 2 tasks"):
        train(config(tmp_path), workflow=solve, judge=exact, tasks=ROWS, val_tasks=ROWS)


@pytest.mark.slow
def test_run_and_train_can_be_awaited_at_once_and_cancelled(tmp_path: Path) -> None:
    first, second = config(tmp_path / "a"), config(tmp_path / "b")

    async def both() -> tuple[Any, Any]:
        given = {"workflow": solve, "judge": exact, "tasks": ROWS}
        return await asyncio.gather(
            ajet.run_async(first, **given), ajet.train_async(second, **given)
        )

    report, tuned = asyncio.run(both())
    assert len(report.episodes) == len(tuned.episodes) == 2

    async def cancelled() -> None:
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()

        @ajet.workflow
        async def hang(question: str) -> str:
            loop.call_soon_threadsafe(begun.set)
            await asyncio.sleep(3600)
            return ""

        work = asyncio.ensure_future(ajet.run_async(first, workflow=hang, judge=exact, tasks=ROWS))
        await begun.wait()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(cancelled())
    states = rows(tmp_path / "a" / "experiment", "SELECT status FROM runs ORDER BY started_at")
    assert [row["status"] for row in states] == ["finished", "interrupted"]


def test_an_episode_shows_its_tokens_in_a_notebook(tmp_path: Path) -> None:
    episode = run(config(tmp_path), workflow=solve, judge=exact, tasks=ROWS[:1]).episodes[0]
    page = html.unescape(episode._repr_html_())
    assert (
        page.startswith("<iframe srcdoc=")
        and "Conversation 1" in page
        and 'class="m"' in page
        and ">4</span>" in page
    )
    alone = html.unescape(Episode(task=Task(main_query="<b>q")).model_copy()._repr_html_())
    assert "&lt;b&gt;q" in alone and "<b>q" not in alone


def test_the_headline_says_how_many_it_counts(tmp_path: Path) -> None:
    @ajet.judge
    def picky(task: Task, episode: Episode) -> float:
        if task.main_query == "q" or episode.attempt == 1:
            raise ValueError("cannot say")
        return 0.5

    report = run(config(tmp_path), workflow=solve, judge=picky, tasks=ROWS, k=2)
    assert report.summary().startswith(
        "Mean reward 0.5 over the 1 of 4 episodes that have a reward (1 of 2 tasks), pass@1"
    )


def test_a_report_and_a_tuned_model_print_as_a_person_reads_them(tmp_path: Path) -> None:
    report = run(config(tmp_path), workflow=solve, judge=exact, tasks=ROWS, k=2)
    summary = f"Mean reward {report.reward:.4g} over 2 tasks, 4 episodes, pass@1"
    assert summary in repr(report) and "  q " in repr(report)
    table = report.to_arrow()
    assert table.num_rows == 4 and table.column("question").to_pylist() == ["q", "q", "r", "r"]
    assert table.column("reward").to_pylist() == [e.reward for e in report.episodes]
    assert "<table>" in report._repr_html_() and summary in report._repr_html_()
    history = {"val/reward": {0: 0.25, 10: 0.75}, "train/loss": {1: 0.5}}
    tuned = ajet.TunedModel(
        Path("model"), {"val/reward": 0.75}, history=history, directory=Path("<there>")
    )
    assert "val/reward 0.250 → 0.750 (step 0 → 10)" in repr(tuned) and "ajet serve model" in repr(
        tuned
    )
    curve = tuned.to_arrow().to_pydict()
    assert curve == {
        "step": [0, 1, 10],
        "train/loss": [None, 0.5, None],
        "val/reward": [0.25, None, 0.75],
    }
    assert "data:image/png" in tuned._repr_html_() and "<there>" not in tuned._repr_html_()


def test_rows_may_be_given_as_tasks(tmp_path: Path) -> None:
    given = [
        {"question": "q", "answer": "42"},
        {"question": "r", "answer": "42", "task_id": "mine"},
    ]
    report = run(config(tmp_path), workflow=solve, judge=exact, tasks=given, k=2)
    assert [s.task.main_query for s in report.tasks] == ["q", "r"] and report.tasks[
        1
    ].task.task_id == "mine"
    assert report.reward is not None and not report.failures
    for wrong in ("text", {}):
        with pytest.raises(TaskError, match=r"tasks\[1\]"):
            run(config(tmp_path), workflow=solve, judge=exact, tasks=[given[0], wrong])  # type: ignore[list-item]


def test_a_notebook_has_a_running_loop(tmp_path: Path) -> None:
    async def cell() -> None:
        report = run(config(tmp_path), workflow=solve, judge=exact)
        assert len(report.episodes) == 4 and not report.failures
        with pytest.raises(ZeroDivisionError):
            run_to_end(failing())

    async def failing() -> None:
        raise ZeroDivisionError

    asyncio.run(cell())


@pytest.mark.parametrize("wakes", [True, False], ids=["in its wait", "just before its wait"])
def test_an_interrupt_ends_what_runs_beside_the_loop_of_a_notebook(wakes: bool) -> None:
    """A signal that another thread takes is noted, and does not wake the first: as one that comes
    before it waits."""
    ended = []

    async def work() -> None:
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def cell() -> None:
        signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # as a kernel has it; asyncio.run has its own
        with pytest.raises(KeyboardInterrupt):
            run_to_end(work())

    own = signal.getsignal(signal.SIGINT)
    mask = signal.pthread_sigmask(
        signal.SIG_UNBLOCK if wakes else signal.SIG_BLOCK, {signal.SIGINT}
    )
    try:
        asyncio.run(cell())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, own)
    assert ended


@pytest.mark.slow
def test_pass_at_k_of_greedy_sampling_is_refused_or_told(tmp_path: Path) -> None:
    greedy = {"rollout": {"temperature": 0}}
    with pytest.raises(ConfigError, match="greedy"):
        run(config(tmp_path, **greedy), workflow=solve, judge=exact, k=2)
    run(config(tmp_path, **greedy), workflow=solve, judge=exact)

    @ajet.workflow
    async def own(question: str, model: Any) -> str:
        return str(
            (await model.chat([{"role": "user", "content": question}], temperature=0)).content
        )

    [notice] = run(config(tmp_path), workflow=own, judge=exact, k=2).notices
    assert "temperature 0" in notice
    with pytest.raises(ConfigError, match="k must be at least 1"):
        run(config(tmp_path), workflow=own, judge=exact, k=0)


def test_names_that_nothing_fills_fail_before_anything_is_opened(tmp_path: Path) -> None:
    @ajet.judge
    def other(output: str, solution: str) -> float:
        return 1.0

    for call in (train, run):
        with pytest.raises(SignatureError, match=r"`solution`.*answer"):
            call(config(tmp_path), workflow=solve, judge=other)
    assert not (tmp_path / "experiment").exists()


def test_a_row_of_another_shape_is_found_too(tmp_path: Path) -> None:
    settings = config(tmp_path)
    with (tmp_path / "tasks.jsonl").open("a") as file:
        file.write('{"question": "last", "level": 1}\n')
    with pytest.raises(SignatureError, match="`answer`"):
        train(settings, workflow=solve, judge=exact)


def test_what_is_not_named_or_not_installed_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.user_workflow"):
        train(config(tmp_path))
    if find_spec("trinity") is None:
        with pytest.raises(MissingExtra, match="ajet install trinity"):
            train(config(tmp_path, backbone="trinity"), workflow=solve)
    with pytest.raises(ConfigError, match="nothing to resume"):
        train(config(tmp_path), workflow=solve, judge=exact, resume=True)


def test_the_directory_of_a_run(tmp_path: Path) -> None:
    settings = config(
        tmp_path,
        task_reader={
            "type": "random_dummy",
            "data_generation": {"deduplication_filter": {"params": {"api_key": "sk-1"}}},
        },
    )
    tuned = train(settings, workflow=solve, judge=ajet.judge(lambda output: 1.0))
    home = tmp_path / "experiment"
    assert sorted(p.name for p in home.iterdir()) == [
        "checkpoint",
        "config.yaml",
        "logs",
        "metrics",
        "trace.duckdb",
    ]
    assert (home / "logs" / f"{tuned.run_id}.log").exists()
    read = yaml.safe_load((home / "config.yaml").read_text())
    assert read["ajet"]["backbone"] == "debug"
    [row] = rows(home, "SELECT config::VARCHAR AS config, ended_at FROM runs")
    assert row["ended_at"] is not None
    assert "sk-1" not in row["config"] and "sk-1" not in (home / "config.yaml").read_text()


def test_a_live_owner_is_an_error_and_its_files_stay(tmp_path: Path) -> None:
    with Session(config(tmp_path)) as first:
        before = (tmp_path / "experiment" / "config.yaml").read_text()
        with pytest.raises(TraceLocked):
            train(config(tmp_path, rollout={"num_repeat": 7}), workflow=solve, judge=exact)
        assert (tmp_path / "experiment" / "config.yaml").read_text() == before
        first.writer.flush()
        assert rows(tmp_path / "experiment", "SELECT status FROM runs") == [{"status": "running"}]
        assert first.run.status == "running"
    assert rows(tmp_path / "experiment", "SELECT status FROM runs") == [{"status": "finished"}]


@pytest.mark.slow
def test_a_resumed_run_is_the_same_run(tmp_path: Path) -> None:
    first = train(config(tmp_path), workflow=solve, judge=exact)
    second = train(config(tmp_path), workflow=solve, judge=exact, resume=True)
    assert first.run_id == second.run_id
    assert len(rows(tmp_path / "experiment", "SELECT run_id FROM runs")) == 1


@pytest.mark.slow
def test_scoring_is_no_run_to_resume(tmp_path: Path) -> None:
    first = train(config(tmp_path), workflow=solve, judge=exact)
    run(config(tmp_path), workflow=solve, judge=exact)
    assert train(config(tmp_path), workflow=solve, judge=exact, resume=True).run_id == first.run_id


@pytest.mark.slow
def test_ctrl_c_is_recorded_as_interrupted(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import ajet, asyncio, sys\nfrom pathlib import Path\nsys.path.insert(0,"
        f" {str(Path(__file__).parent)!r})\nfrom test_run import config\nfrom ajet_sdk.run import"
        " train\n@ajet.workflow\nasync def hang(question: str) -> str:\n    print('started',"
        " flush=True)\n    await asyncio.sleep(3600)\n    return"
        f" ''\ntrain(config(Path({str(tmp_path)!r})), workflow=hang, judge=ajet.judge(lambda"
        " output: 1.0))\n"
    )
    child = subprocess.Popen(
        [sys.executable, str(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert child.stdout is not None
    assert child.stdout.readline().strip() == "started"
    time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=300)
    assert child.returncode != 0 and "KeyboardInterrupt" in errors
    assert rows(tmp_path / "experiment", "SELECT status FROM runs") == [{"status": "interrupted"}]
    states = rows(tmp_path / "experiment", "SELECT DISTINCT status, cause FROM episodes")
    assert states == [{"status": "aborted", "cause": "Aborted"}]


@pytest.mark.parametrize("config", [{"ajet": {"backbone": "local"}}, "job.yaml", Path("job.yaml")])
@pytest.mark.parametrize("start", [ajet.run, ajet.train])
def test_settings_that_are_no_config_are_refused(config: Any, start: Any) -> None:
    with pytest.raises(ConfigError, match="load_config"):
        start(config)
