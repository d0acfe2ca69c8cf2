"""Real small traces with fixed ids and times, and the viewer on one of them."""

from __future__ import annotations

import math
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from textual.pilot import Pilot

from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, LedgerEntry, Metric, Reward, Run, Task
from ajet_tools.tui.trace.app import TraceApp
from tests.waiting import until_shown

NOON = datetime(2026, 1, 2, 12, tzinfo=timezone.utc)
EVIL = "[bold red]not markup[/] \x1b[31mred\x07 \u202eback 字字"
STEPS = 12


def _metrics(run_id: str) -> list[Metric]:
    made = []
    for step in range(1, STEPS + 1):
        values = {
            "train/reward": 0.2 + 0.05 * step,
            "train/solved_share": 0.1 + 0.06 * step,
            "train/loss": -0.2 * math.cos(step),
            "train/sampler_kl": 1e-4 * step,
            "train/entropy": 1.5 / step,
            "train/tokens_sampled": 160.0 * step,
            "train/episodes": 8.0,
            "train/tokens_per_second": 20_000.0 + step,
            "train/merge_ratio": 1.5,
            "custom/score": float(step % 3),
        }
        if step % 4 == 0:
            values |= {"val/reward": 0.3 + 0.05 * step, "val/greedy_reward": 0.4 + 0.05 * step}
        at = NOON + timedelta(minutes=step)
        made += [
            Metric(run_id=run_id, step=step, name=name, value=value, at=at)
            for name, value in values.items()
        ]
    return made


def _episode(run_id: str, i: int) -> list[Call | Episode | LedgerEntry]:
    """Episode i of step 1 + i // 2; every eighth has failed."""
    id, began = f"{run_id[:2]}e{i:04d}", NOON + timedelta(seconds=30 * i)
    call = Call(
        call_id=f"{run_id[:2]}c{i:04d}",
        episode_id=id,
        request={"messages": [{"role": "user", "content": EVIL}]},
        response={"choices": [{"message": {"role": "assistant", "content": "well"}}]},
        prompt_ids=[1, 2],
        output_ids=[3] * (i + 1),
        logprobs=[-1.0] * (i + 1),
        policy_version=i // 2,
        started_at=began,
        ended_at=began + timedelta(seconds=20),
    )
    failed = i % 8 == 7
    episode = Episode(
        episode_id=id,
        run_id=run_id,
        group_id=f"g{i // 4}",
        attempt=i % 4,
        step=1 + i // 2,
        task=Task(task_id=f"t{i // 4}", main_query=EVIL),
        rewards=() if failed else (Reward(value=i / 24),),
        status="failed" if failed else "succeeded",
        cause=("TimeoutError", "ValueError", "[bold]Odd[/]")[i // 8 % 3] if failed else None,
        error=EVIL if failed else None,
        started_at=began,
        ended_at=began + timedelta(seconds=25),
    )
    outcome = "failed" if failed else "trained"
    booked = {
        "run_id": run_id,
        "step": episode.step,
        "episode_id": id,
        "call_id": call.call_id,
        "tokens": i + 1,
    }
    return [call, episode, LedgerEntry(outcome=outcome, **booked)]


@pytest.fixture(scope="session")
def written_training_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: aaaa0001 finished after 12 of 20 steps, bbbb0002 was cut off, cccc0003 failed."""
    file = tmp_path_factory.mktemp("training") / "trace.duckdb"
    config = {"ajet": {"model": {"scripted": "a.py:b"}, "trainer_common": {"total_steps": 20}}}
    first = Run(run_id="aaaa0001", name="math", backbone="local", config=config, started_at=NOON)
    second = Run(
        run_id="bbbb0002", name=EVIL, backbone="local", started_at=NOON + timedelta(hours=1)
    )
    third = Run(
        run_id="cccc0003", name="broken", backbone="debug", started_at=NOON + timedelta(hours=2)
    )
    with TraceWriter(file) as writer:
        writer.put(first, second, third, *_metrics("aaaa0001"))
        for i in range(24):
            writer.put(*_episode("aaaa0001", i))
        for i in range(2):
            call, episode, _ = _episode("bbbb0002", i)
            writer.put(
                call,
                episode.model_copy(update={"ended_at": NOON + timedelta(hours=1, minutes=i + 4)}),
            )
        ended = {"status": "finished", "ended_at": NOON + timedelta(minutes=13)}
        writer.put(first.model_copy(update=ended))
        failed = {
            "status": "failed",
            "ended_at": NOON + timedelta(hours=2, seconds=3),
            "error": f"ConfigError: {EVIL}",
        }
        writer.put(third.model_copy(update=failed))
    return file


@pytest.fixture
def training_trace(written_training_trace: Path, tmp_path: Path) -> Path:
    """A copy of it, which a test may change."""
    return Path(shutil.copy(written_training_trace, tmp_path))


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the viewer keeps things: not the user's own."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@asynccontextmanager
async def _viewing(
    path: Path, *, size: tuple[int, int] = (80, 24), run_id: str | None = None
) -> AsyncIterator[Pilot[None]]:
    with open_trace(path) as reader:
        async with TraceApp(reader, path, run_id).run_test(size=size, notifications=True) as pilot:
            yield pilot


@pytest.fixture
def viewing() -> Callable[..., object]:
    """The viewer on a trace: `async with viewing(path) as pilot`."""
    return _viewing


@pytest.fixture
def until() -> Callable[..., object]:
    """Waits for what a worker brings about: `await until(pilot, lambda: ...)`."""
    return until_shown


@pytest.fixture(autouse=True)
def _lasting_notices(lasting_notices: None) -> None:
    pass
