"""ajet's own JSON lines: a lossless export of runs and episodes.

A header line is followed by the runs with their metrics, then by a line per episode, with calls,
rewards, ledger, feedback and trained tokens; its texts refer to `pictures`, the files by digest, as
in a trace (`ajet_sdk.trace.pictures`). Non-finite numbers are the texts "NaN", "Infinity" and
"-Infinity"; in lists, NaN is null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import BinaryIO

import numpy as np

from ajet_sdk.samples.prefixes import PLACE
from ajet_sdk.trace.pictures import Replacing, StoredPictures
from ajet_sdk.types import Call, Episode
from ajet_tools.trace.export.job import Job, json_line
from ajet_tools.trace.queries.base import rows
from ajet_tools.trace.queries.records import Record
from ajet_tools.trace.redact import Redactor

VERSION = 2
"""1 had no pictures, whose line is otherwise the same."""
HEADER = "ajet_trace"
_ARRAYS = ("prompt_ids", "output_ids", "logprobs", "pictures")


def write(job: Job, file: BinaryIO) -> None:
    """Write the header, the runs of the episodes, and the episodes."""
    file.write(json_line({HEADER: VERSION}))
    for run_id in sorted({run_id for run_id, _ in job.members()}):
        _write_run(job, run_id, file)
    for record in job.records(whole=True):
        without_ids = bool(record.redacted)
        if without_ids:
            job.left_out["episodes written without token ids, because their text was redacted"] += 1
        file.write(json_line(_episode_line(record, without_ids)))
        job.wrote(record)


def _write_run(job: Job, run_id: str, file: BinaryIO) -> None:
    for row in rows(job.reader, "SELECT * FROM runs WHERE run_id = ?", run_id):
        run = {**row, "config": json.loads(row["config"] or "{}")}
        if job.redact:
            redactor = Redactor()
            run |= {"config": redactor.value(run["config"]), "error": redactor.value(run["error"])}
            job.redacted.update(redactor.counts)
        file.write(json_line({"run": _plain(run)}))
    # in parts, as a run may have millions of metrics
    last = 0
    while True:
        sql = (
            'SELECT * FROM metrics WHERE run_id = ? ORDER BY step, name, "at", value LIMIT 5000'
            " OFFSET ?"
        )
        metric_rows = rows(job.reader, sql, run_id, last)
        if metric_rows:
            file.write(json_line({"metrics": [_plain(row) for row in metric_rows]}))
        last += len(metric_rows)
        if len(metric_rows) < 5000:
            return


def _episode_line(record: Record, without_ids: bool) -> dict[str, object]:
    line: dict[str, object] = {"episode": _episode(record.episode, record.ended, without_ids)}
    if record.superseded:
        line["superseded"] = True
    if record.ledger:
        line["ledger"] = [_plain(entry.model_dump()) for entry in record.ledger]
    if record.feedback:
        line["feedback"] = [_plain(remark.model_dump()) for remark in record.feedback]
    if record.trained and not without_ids:
        line["trained"] = [_plain(dict(scores)) for scores in record.trained]
    replacing = Replacing(StoredPictures())
    referring: dict[str, object] = replacing.value(line)
    urls = {digest: picture.url for digest, picture in replacing.added.items()}
    return {**referring, "pictures": urls}


def _episode(episode: Episode, ended: bool, without_ids: bool) -> dict[str, object]:
    if not ended:
        return {
            "episode_id": episode.episode_id,
            "ended": False,
            "calls": _calls(episode.calls, without_ids),
        }
    plain = _plain(
        {name: getattr(episode, name) for name in Episode.model_fields if name not in _NESTED}
    )
    return {
        **plain,
        "metrics": {name: _number(value) for name, value in episode.metrics.items()},
        "task": episode.task.model_dump(),
        "events": [event.model_dump(mode="json") for event in episode.events],
        "rewards": [reward.model_dump() for reward in episode.rewards],
        "calls": _calls(episode.calls, without_ids),
    }


_NESTED = ("task", "rewards", "calls", "metrics", "events")


def _calls(calls: Sequence[Call], without_ids: bool) -> list[dict[str, object]]:
    omitted = (
        "episode_id",
        *PLACE,
        *(_ARRAYS if without_ids else ()),
    )  # the importer computes PLACE
    names = [name for name in Call.model_fields if name not in omitted]
    lines = []
    for call in calls:
        line = _plain({name: getattr(call, name) for name in names if name != "pictures"})
        if call.pictures and "pictures" in names:
            line |= call.model_dump(include={"pictures"})
        lines.append(line)
    return lines


def _plain(row: dict[str, object]) -> dict[str, object]:
    return {name: _value(value) for name, value in row.items()}


def _value(value: object) -> object:
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, np.ndarray):
        plain: list[object] = value.tolist()
        if value.dtype.kind != "f" or np.isfinite(value).all():
            return plain
        return [None if math.isnan(v) else _number(v) for v in value.tolist()]
    if isinstance(value, list):
        return [None if v is None or v != v else _value(v) for v in value]
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return value


def _number(value: float) -> object:
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
