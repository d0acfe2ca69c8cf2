"""A table of timelines, token by token, as Parquet: what was trained, with which weight, and where that is from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ajet_sdk.errors import ConfigError
from ajet_sdk.samples import build
from ajet_sdk.timelines import merge
from ajet_sdk.trace.reader import episodes
from ajet_sdk.types import Episode, Timeline
from ajet_tools.trace.export.job import Job
from ajet_tools.trace.export.record import Record
from ajet_tools.trace.queries.rows import rows
from ajet_tools.trace.run_config import run_config

__all__ = ["SCHEMA", "write"]

_Floats = npt.NDArray[np.float32]

SCHEMA = pa.schema(
    [
        ("episode_id", pa.string()),
        ("run_id", pa.string()),
        ("group_id", pa.string()),
        ("task_id", pa.string()),
        ("attempt", pa.int32()),
        ("step", pa.int32()),
        ("split", pa.string()),
        ("status", pa.string()),
        ("agent", pa.string()),
        ("reward", pa.float64()),
        ("timeline", pa.int32()),
        ("policy_version", pa.int32()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("logprobs", pa.list_(pa.float32())),
        ("advantages", pa.list_(pa.float32())),
        ("advantage_source", pa.string()),
        ("spans", pa.list_(pa.struct([("call_id", pa.string()), ("start", pa.int32()), ("end", pa.int32())]))),
        ("call_ids", pa.list_(pa.string())),
    ],
    metadata={
        "ajet.tokens": "1",
        "ajet.logprobs": "of the sampler; 0 where masked out, NaN where it did not tell",
        "ajet.advantages": "0 where masked out; NaN where a sampled token was not trained, or its advantage is unknown",
        "ajet.advantage_source": "trained: as the trainer saw them; computed: from the rewards and the run's config",
    },
)
"""The columns; lists have one entry a token of the timeline."""


def write(job: Job, file: BinaryIO) -> None:
    """A row for each timeline of each episode. An episode in which text would be redacted is left out."""
    config = lru_cache(maxsize=64)(lambda run_id: _algorithm(job, run_id))
    with pq.ParquetWriter(file, SCHEMA, compression="zstd") as table:
        waiting: list[dict[str, Any]] = []
        for group in job.groups(trained=True):
            waiting += _rows(job, [record for record in group if _has_tokens(job, record)], config)
            if sum(len(row["token_ids"]) for row in waiting) > _ROW_GROUP:
                table.write_table(pa.Table.from_pylist(waiting, schema=SCHEMA))
                waiting = []
        if waiting:
            table.write_table(pa.Table.from_pylist(waiting, schema=SCHEMA))


_ROW_GROUP = 1 << 19
"""Tokens."""


def _has_tokens(job: Job, record: Record) -> bool:
    if record.redacted:
        job.left_out["episodes with text to redact (--no-redact has them)"] += 1
        return False
    if not any(c.prompt_ids is not None and c.output_ids is not None for c in record.episode.calls):
        job.left_out["episodes without token ids"] += 1
        return False
    return True


def _rows(job: Job, records: Sequence[Record], config: Any) -> list[dict[str, Any]]:
    if not records:
        return []
    trained = {
        row["call_id"]: np.array(row["advantages"], np.float32)
        for record in records
        for row in record.trained
        if row["advantages"] is not None
    }
    computed: dict[str, float] = {}
    if any(c.call_id not in trained for r in records for c in r.episode.calls):
        computed = _computed(job, records[0].episode, config)
    made: list[dict[str, Any]] = []
    for record in records:
        timelines = merge(record.episode.calls).timelines
        made += [_row(record.episode, i, t, trained, computed) for i, t in enumerate(timelines)]
        job.wrote(record, len(timelines))
    return made


def _row(
    episode: Episode,
    number: int,
    timeline: Timeline,
    trained: Mapping[str, _Floats],
    computed: Mapping[str, float],
) -> dict[str, Any]:
    advantages = np.zeros(len(timeline.token_ids), np.float32)
    sources = set()
    for span in timeline.spans:
        known = trained.get(span.call_id)
        if known is not None and len(known) == span.end - span.start:
            advantages[span.start : span.end] = known
            sources.add("trained")
        elif span.call_id in computed:
            advantages[span.start : span.end] = computed[span.call_id]
            sources.add("computed")
        else:
            advantages[span.start : span.end] = np.nan
    return {
        "episode_id": episode.episode_id,
        "run_id": episode.run_id,
        "group_id": episode.group_id,
        "task_id": episode.task.task_id,
        "attempt": episode.attempt,
        "step": episode.step,
        "split": episode.split,
        "status": episode.status,
        "agent": timeline.agent,
        "reward": episode.value(timeline.agent),
        "timeline": number,
        "policy_version": timeline.policy_version,
        "token_ids": timeline.token_ids,
        "loss_mask": timeline.loss_mask,
        "logprobs": timeline.logprobs,
        "advantages": advantages,
        "advantage_source": "+".join(sorted(sources)) or None,
        "spans": [span.model_dump() for span in timeline.spans],
        "call_ids": list(timeline.call_ids),
    }


def _computed(job: Job, one: Episode, config: Any) -> dict[str, float]:
    """Call id -> advantage, of the whole group of an episode: also of attempts that are not exported."""
    if one.split != "train":
        return {}
    options = config(one.run_id)
    if options is None:
        job.left_out["groups whose run's config cannot be read: advantages unknown"] += 1
        return {}
    found = build(_whole_group(job, one), **options).samples
    return {span.call_id: float(sample.advantages[span.start]) for sample in found for span in sample.timeline.spans}


def _whole_group(job: Job, one: Episode) -> list[Episode]:
    if not one.group_id:
        return episodes(job.reader, episode_ids=[one.episode_id], superseded=True)
    sql = "SELECT episode_id FROM episodes WHERE group_id = ? AND run_id = ? AND step = ? AND NOT superseded"
    ids = [row["episode_id"] for row in rows(job.reader, sql, one.group_id, one.run_id, one.step)]
    return episodes(job.reader, episode_ids=ids)


def _algorithm(job: Job, run_id: str) -> dict[str, Any] | None:
    """How the run made advantages of rewards; None where its config is not valid in this version."""
    try:
        config = run_config(job.reader, run_id)
    except ConfigError:
        return None
    algorithm = config.trainer_common.algorithm
    return {
        "estimator": algorithm.adv_estimator,
        "normalize_std": algorithm.normalize_std,
        "failure_reward": config.rollout.failure_reward,
        "max_tokens": config.rollout.max_model_len,
    }
