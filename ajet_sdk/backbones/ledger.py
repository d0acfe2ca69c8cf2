"""Closing the books of a run whose calls lie in several files: what was sampled and never reached the trainer."""

from __future__ import annotations

import time
from pathlib import Path

from ajet_sdk.errors import TraceLocked, TrainingError
from ajet_sdk.trace.reader import ledger_balance, open_trace, trace_files
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import LedgerEntry

__all__ = ["close_books", "roll_back"]

_ENDING = 60.0
"""Seconds."""

_UNBOOKED = """
    SELECT e.step, c.episode_id, c.call_id,
        coalesce(len(c.output_ids), 0) - coalesce(b.tokens, 0) AS tokens,
        CASE WHEN e.split = 'val' THEN 'evaluation' WHEN e.status = 'succeeded' THEN 'superseded' ELSE 'failed' END
            AS outcome
    FROM calls c JOIN episodes e USING (episode_id)
    LEFT JOIN (SELECT call_id, sum(tokens)::BIGINT AS tokens FROM ledger WHERE run_id = $1 GROUP BY call_id) b
        USING (call_id)
    WHERE e.run_id = $1 AND c.trainable AND c.phase = 'rollout'
        AND coalesce(len(c.output_ids), 0) > coalesce(b.tokens, 0)"""


def close_books(writer: TraceWriter, directory: Path, run_id: str) -> None:
    """Book what no one has booked, and check that every sampled token stands in the ledger once.

    Sound episodes whose experiences never reached the trainer (explored ahead of the last step, or lost with a node)
    are `superseded`, episodes that were cut off `failed`. A process that holds a file and was told to end has a minute.
    Raises TrainingError where a call is booked twice.
    """
    deadline = time.monotonic() + _ENDING
    while True:
        try:
            return _close_books(writer, directory, run_id)
        except TraceLocked:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def _close_books(writer: TraceWriter, directory: Path, run_id: str) -> None:
    """May be done again: what is booked is not unbooked."""
    writer.flush()
    trace = open_trace(directory)
    try:
        for row in trace.query(_UNBOOKED, [run_id]).to_pylist():
            writer.put(LedgerEntry(run_id=run_id, **row))
        writer.flush()
        wrong = ledger_balance(trace, run_id)
    finally:
        trace.close()
    if wrong:
        raise TrainingError(f"the ledger of run {run_id} does not balance:\n  " + "\n  ".join(wrong[:10]))


def roll_back(writer: TraceWriter, directory: Path, run_id: str, step: int) -> None:
    """What came after `step` of a resumed run is superseded: in the driver's file, and in those of `directory`.

    The writers of those are long gone. What the driver booked of their calls is not booked again.
    """
    writer.supersede(run_id, step)
    rows = writer.query("SELECT call_id FROM ledger WHERE run_id = ? AND step > ?", [run_id, step])
    booked = rows["call_id"].to_pylist()
    for path in trace_files(directory) if any(directory.glob("*.duckdb")) else ():
        if path.resolve() != writer.path.resolve():
            with TraceWriter(path) as other:
                other.supersede(run_id, step, booked)
