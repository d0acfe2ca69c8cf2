"""Exports timelines as a Parquet table of tokens, with loss mask, log-probabilities and
advantages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ajet_sdk.errors import ConfigError
from ajet_sdk.samples.timelines import merge
from ajet_sdk.types import Episode, Timeline
from ajet_tools.trace.export.conversations import about
from ajet_tools.trace.export.job import Job
from ajet_tools.trace.queries.records import Record, recomputed_advantages

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
        ("decoding", pa.string()),
        ("status", pa.string()),
        ("agent", pa.string()),
        ("reward", pa.float64()),
        ("timeline", pa.int32()),
        ("policy_version", pa.int32()),
        ("policy_versions", pa.list_(pa.int32())),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("logprobs", pa.list_(pa.float32())),
        ("advantages", pa.list_(pa.float32())),
        ("advantage_source", pa.string()),
        (
            "spans",
            pa.list_(
                pa.struct([("call_id", pa.string()), ("start", pa.int32()), ("end", pa.int32())])
            ),
        ),
        ("call_ids", pa.list_(pa.string())),
    ],
    metadata={
        "ajet.tokens": "1",
        "ajet.logprobs": "of the sampler; 0 where masked out, NaN if it did not report one",
        "ajet.policy_versions": "of each sampled token; -1 where masked out or unknown",
        "ajet.advantages": (
            "0 where masked out; NaN where a sampled token was not trained, or its advantage is"
            " unknown"
        ),
        "ajet.advantage_source": (
            "trained: as the trainer saw them; computed: from the rewards and the run's config"
        ),
    },
)
"""Columns of the table; lists have an entry per token of the timeline."""
_ROW_GROUP = 1 << 19
"""Tokens of a row group."""


def write(job: Job, file: BinaryIO) -> None:
    """Write a row per timeline. Episodes with text to redact are left out."""
    with pq.ParquetWriter(file, SCHEMA, compression="zstd") as table:
        waiting: list[dict[str, object]] = []
        tokens = 0
        for group in job.groups(trained=True):
            for timeline, row in _rows(
                job, [record for record in group if _has_tokens(job, record)]
            ):
                waiting.append(row)
                tokens += len(timeline.token_ids)
            if tokens > _ROW_GROUP:
                table.write_table(pa.Table.from_pylist(waiting, schema=SCHEMA))
                waiting = []
                tokens = 0
        if waiting:
            table.write_table(pa.Table.from_pylist(waiting, schema=SCHEMA))


def _has_tokens(job: Job, record: Record) -> bool:
    if record.redacted:
        job.left_out["episodes with text to redact (use --no-redact to include them)"] += 1
        return False
    if not any(c.prompt_ids is not None and c.output_ids is not None for c in record.episode.calls):
        job.left_out["episodes without token ids"] += 1
        return False
    return True


def _rows(job: Job, records: Sequence[Record]) -> Iterator[tuple[Timeline, dict[str, object]]]:
    if not records:
        return
    trained: dict[str, _Floats] = {}
    for record in records:
        trained.update((scores.call_id, scores.advantages) for scores in record.trained)
    unknown = []
    for record in records:
        if any(call.call_id not in trained for call in record.episode.calls):
            unknown.append(record.episode)
    computed: dict[str, _Floats] = {}
    try:
        ids = (episode.episode_id for episode in unknown if episode.split == "train")
        computed = recomputed_advantages(job.reader, *ids)
    except ConfigError:
        job.left_out["groups with an unknown estimator, so without advantages"] += 1
    for record in records:
        timelines = merge(record.episode.calls).timelines
        yield from (
            (t, _row(record.episode, i, t, trained, computed)) for i, t in enumerate(timelines)
        )
        job.wrote(record, len(timelines))


def _row(
    episode: Episode,
    number: int,
    timeline: Timeline,
    trained: Mapping[str, _Floats],
    computed: Mapping[str, _Floats],
) -> dict[str, object]:
    advantages = np.zeros(len(timeline.token_ids), np.float32)
    versions = np.full(len(timeline.token_ids), -1, np.int32)
    sources = set()
    calls = {call.call_id: call for call in episode.calls}
    for span in timeline.spans:
        sampled_by = calls[span.call_id].versions
        if sampled_by is not None:
            versions[span.start : span.end] = sampled_by
        known = trained.get(span.call_id)
        if known is not None and len(known) == span.end - span.start:
            advantages[span.start : span.end] = known
            sources.add("trained")
        elif span.call_id in computed:  # over the whole group or step, exported or not
            advantages[span.start : span.end] = computed[span.call_id]
            sources.add("computed")
        else:
            advantages[span.start : span.end] = np.nan
    return {
        **about(episode, timeline.agent),
        "timeline": number,
        "policy_version": timeline.policy_version,
        "policy_versions": versions,
        "token_ids": timeline.token_ids,
        "loss_mask": timeline.loss_mask,
        "logprobs": timeline.logprobs,
        "advantages": advantages,
        "advantage_source": "+".join(sorted(sources)) or None,
        "spans": [span.model_dump() for span in timeline.spans],
        "call_ids": list(timeline.call_ids),
    }
