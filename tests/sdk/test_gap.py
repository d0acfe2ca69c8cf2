"""Where the gap between sampler and trainer comes from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Metric, Run, Trained
from ajet_tools.trace.compare.gap import GAPS, gap_by_cause, gap_message

PLAIN, NUCLEUS = {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}


def test_the_gap_of_a_step_is_told_by_cause_and_turn(tmp_path: Path) -> None:
    """Of the trace: four calls, each with a gap of its own in two tokens of three; one place was
    not trained."""
    made = [(PLAIN, 3, 0.01), (NUCLEUS, 3, 0.1), (NUCLEUS, 2, 1.0), (PLAIN, 3, 0.03)]
    sampled = np.array([-1.0, -2.0, -3.0], np.float32)
    calls = tuple(
        Call(
            episode_id="e",
            index=i,
            output_ids=[1, 2, 3],
            logprobs=sampled,
            sampling=sampling,
            policy_version=version,
        )
        for i, (sampling, version, _) in enumerate(made)
    )
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        writer.put(Run(run_id="r"), Episode(episode_id="e", run_id="r", calls=calls), *calls)
        for call, (_, _, gap) in zip(calls, made, strict=True):
            scored = np.array([-1.0 - gap, -2.0 + gap, np.nan], np.float32)
            row = Trained(
                run_id="r",
                step=1,
                episode_id="e",
                call_id=call.call_id,
                advantages=scored,
                logprobs=scored,
                entropy=scored,
            )
            writer.put(row, row.model_copy(update={"step": 2, "logprobs": sampled}))
        writer.flush()
        parts = gap_by_cause(writer.query(GAPS, ["r", 1]).to_pylist())
    expected = {"staleness": (2.0, 2), "sampling": (0.2, 2), "numerics": (0.08, 4)}
    for name, (gap, tokens) in expected.items():
        assert parts[name] == (pytest.approx(gap, abs=1e-5), tokens)
    assert [parts[f"turn {i}"][0] / 2 for i in (1, 2, 3, 4)] == pytest.approx(
        [0.01, 0.1, 1.0, 0.03], abs=1e-5
    )
    told = gap_message(parts)
    assert "differ by 0.28 per token" in told and "88% staleness (1.00), 9% sampling (0.10)" in told
    assert "by turn 0.01, 0.10, 1.00, 0.03" in told and told.endswith("Lower rollout.max_staleness")


def test_a_gap_without_another_cause_is_of_numerics() -> None:
    rows = [
        {
            "policy_version": None,
            "sampling": json.dumps(PLAIN),
            "index": 0,
            "gap": 3.0,
            "tokens": 10,
        }
    ]
    assert "100% numerics (0.30). Set model.dtype: float32" in gap_message(gap_by_cause(rows))


@pytest.mark.parametrize(("updates", "cause"), [(3, "numerics"), (5, "staleness")])
def test_tokens_that_are_all_older_than_the_trainer_are_stale(
    tmp_path: Path, updates: int, cause: str
) -> None:
    logprobs = np.array([-1.0], np.float32)
    call = Call(
        episode_id="e", index=0, output_ids=[1], logprobs=logprobs, sampling=PLAIN, policy_version=3
    )
    trained = Trained(
        run_id="r",
        step=4,
        episode_id="e",
        call_id=call.call_id,
        advantages=logprobs,
        logprobs=logprobs + 0.5,
        entropy=logprobs,
    )
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        writer.put(Run(run_id="r"), Episode(episode_id="e", run_id="r", calls=(call,)), call)
        writer.put(
            trained, Metric(run_id="r", step=3, name="train/policy_version", value=float(updates))
        )
        writer.flush()
        parts = gap_by_cause(writer.query(GAPS, ["r", 4]).to_pylist())
    assert parts[cause] == (pytest.approx(0.5), 1)
