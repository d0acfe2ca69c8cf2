"""A small trace in which every token's story is known, for the tests of what shows tokens."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ajet_sdk.engines.scripted import ByteTokenizer
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, LedgerEntry, Metric, Reward, Run, Task, Trained

HOSTILE = (
    "[bold red]x[/] \x1b[31mred\x1b]0;t\x07 \u202eback\r\ttab 漢字 👨\u200d👩 e\u0301 \xff\x00"
)
BEGAN = datetime(2026, 1, 1, tzinfo=timezone.utc)


@dataclass(frozen=True)
class TokenTrace:
    """Where the trace lies; its episodes are named for what they are."""

    directory: Path

    @property
    def file(self) -> Path:
        return self.directory / "trace.duckdb"


def reply(
    call_id: str, episode: str, turn: int, asked: list[dict[str, Any]], said: str, **more: Any
) -> Call:
    """A call as an engine of bytes would record it: ids of the rendered conversation, then of the
    reply."""
    bytes_of = ByteTokenizer()
    prompt = (
        "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in asked)
        + "<|im_start|>assistant\n"
    )
    output = bytes_of.encode(f"{said}<|im_end|>")
    given = {
        "prompt_ids": bytes_of.encode(prompt),
        "output_ids": output,
        "logprobs": -np.linspace(0.001, 3.0, len(output), dtype=np.float32),
        "policy_version": 4,
    }
    return Call(
        call_id=call_id,
        episode_id=episode,
        index=turn,
        request={"messages": asked},
        response={"choices": [{"message": {"role": "assistant", "content": said}}]},
        finish_reason="stop",
        started_at=BEGAN + timedelta(seconds=turn),
        ended_at=BEGAN + timedelta(seconds=turn, milliseconds=500),
        **(given | more),
    )


def episode(name: str, calls: list[Call], reward: float | None, **more: Any) -> Episode:
    rewards = () if reward is None else (Reward(value=reward),)
    given = {
        "run_id": "run",
        "group_id": "g",
        "step": 2,
        "task": Task(task_id="t", main_query="Café?"),
    }
    return Episode(
        episode_id=name, calls=tuple(calls), rewards=rewards, ended_at=BEGAN, **(given | more)
    )


def sampled(call: Call) -> int:
    return 0 if call.output_ids is None else len(call.output_ids)


def booked(one: Episode, outcome: str, **more: Any) -> list[LedgerEntry]:
    sizes = {call.call_id: sampled(call) for call in one.calls}
    entry = {
        "run_id": one.run_id,
        "step": one.step,
        "episode_id": one.episode_id,
        "outcome": outcome,
    } | more
    return [LedgerEntry(call_id=call_id, tokens=size, **entry) for call_id, size in sizes.items()]


@pytest.fixture(scope="session")
def token_trace(tmp_path_factory: pytest.TempPathFactory) -> TokenTrace:
    """Episodes `good` and `bad` (one group, `bad` forks), `hostile`, `blind` (no ids), `mute` (no
    call), `running`."""
    directory = tmp_path_factory.mktemp("token_trace")
    ask = [{"role": "user", "content": "Café?"}]
    more = [
        *ask,
        {"role": "assistant", "content": "Let me see."},
        {"role": "user", "content": "Well?"},
    ]
    changed = [
        *ask,
        {"role": "assistant", "content": "LET ME SEE."},
        {"role": "user", "content": "Well?"},
    ]
    good = episode(
        "good",
        [reply("g1", "good", 0, ask, "Let me see."), reply("g2", "good", 1, more, "Très bien.")],
        1.0,
    )
    stale = {"policy_version": 3}
    bad_calls = [
        reply("b1", "bad", 0, ask, "Let me go."),
        reply("b2", "bad", 1, changed, "No.", **stale),
    ]
    bad = episode("bad", bad_calls, 0.0, attempt=1)
    hostile = episode("hostile", [reply("h1", "hostile", 0, [{"role": "user", "content": HOSTILE}], HOSTILE)], None,
                      group_id="h", status="failed", cause="ValueError", error=HOSTILE)  # fmt: skip
    no_ids = {"prompt_ids": None, "output_ids": None, "logprobs": None}
    blind = episode("blind", [reply("n1", "blind", 0, ask, "seen", **no_ids)], 1.0, group_id="n")
    mute = episode("mute", [], 0.0, group_id="m")
    with TraceWriter(directory / "trace.duckdb") as writer:
        writer.put(
            Run(
                run_id="run",
                backbone="local",
                config={"ajet": {"model": {"scripted": "agent.py->replies"}}},
            )
        )
        writer.put(Metric(run_id="run", step=1, name="train/policy_version", value=4))
        for one in (good, bad, hostile, blind, mute):
            writer.put(*one.calls, one)
        writer.put(reply("r1", "running", 0, ask, "still"))
        writer.put(
            *booked(good, "trained"), *booked(hostile, "failed"), *booked(blind, "untrainable")
        )
        cut = sampled(bad.calls[0]) - 4
        entry = {"run_id": "run", "step": 2, "episode_id": "bad"}
        writer.put(
            LedgerEntry(call_id="b1", outcome="trained", tokens=cut, **entry),
            LedgerEntry(call_id="b1", outcome="truncated", tokens=4, **entry),
            LedgerEntry(call_id="b2", outcome="stale", tokens=sampled(bad.calls[1]), **entry),
        )
        for call in good.calls:
            assert call.logprobs is not None
            size = sampled(call)
            gap = np.linspace(0, 0.2, size, dtype=np.float32)
            writer.put(
                Trained(
                    run_id="run",
                    step=2,
                    episode_id="good",
                    call_id=call.call_id,
                    advantages=np.full(size, 0.5, np.float32),
                    logprobs=call.logprobs + gap,
                    entropy=np.linspace(0, 2.5, size, dtype=np.float32),
                )
            )
        writer.put(Run(run_id="run", backbone="local", status="finished",
                       config={"ajet": {"model": {"scripted": "agent.py->replies"}}}))  # fmt: skip
    return TokenTrace(directory)


@pytest.fixture
def lasting_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notice of an app stays until the test ends: how long a busy machine takes to look for it
    decides nothing."""
    from textual.notifications import Notification

    monkeypatch.setattr(Notification, "time_left", 3_600.0)
    monkeypatch.setattr(Notification, "has_expired", False)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
