"""Advantages computed again from a group's stored rewards, and the policy version that a step trained."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ajet_sdk.protocols import TraceReader
from ajet_sdk.samples.build import build
from ajet_sdk.trace.reader import episodes
from ajet_sdk.types import Episode, Json, JsonView
from ajet_tools.trace.queries.base import rows
from ajet_tools.trace.queries.episodes import attempts_of, step_of

_Floats = npt.NDArray[np.float32]


def recomputed_advantages(reader: TraceReader, *episode_ids: str) -> dict[str, _Floats]:
    """The advantage of each token of the calls that would be trained, from the stored rewards and the run's config.

    For files from before advantages were kept, and for runs whose trainer is not ours. What the step really used may
    have differed: it is to be shown as recomputed. A call that is missing here would not be trained; of one whose end
    does not fit the rest is NaN. Raises ConfigError where this version does not know the run's estimator.
    """
    recomputed: dict[str, _Floats] = {}
    done: set[str] = set()
    for episode_id in episode_ids:
        if episode_id not in done:
            compared, settings = _compared(reader, episode_id)
            done |= {episode_id, *(episode.episode_id for episode in compared)}
            recomputed |= _of_compared(reader, compared, settings)
    return recomputed


def _compared(reader: TraceReader, episode_id: str) -> tuple[list[Episode], Json]:
    """The episodes whose rewards are compared with an episode's, and how the run does that: its group, or its step."""
    run_rows = rows(
        reader,
        "SELECT run_id, config FROM runs WHERE run_id IN (SELECT run_id FROM episodes WHERE episode_id = $1)",
        episode_id,
    )
    settings = _settings(json.loads(run_rows[0]["config"] or "{}").get("ajet") or {}) if run_rows else {}
    of_step = settings.get("estimator") == "reinforce_plus_plus"
    ids = step_of(reader, episode_id) if of_step else attempts_of(reader, episode_id)
    return episodes(reader, episode_ids=ids, superseded=True), settings


def _of_compared(reader: TraceReader, compared: Sequence[Episode], settings: Json) -> dict[str, _Floats]:
    if not compared or settings.pop("use_kl_in_reward", False):  # of which the trace has no values
        return {}
    batch = build(compared, policy_version=trained_version(reader, compared[0]), **settings)
    lengths = {c.call_id: len(c.output_ids) for e in compared for c in e.calls if c.output_ids is not None}
    recomputed: dict[str, _Floats] = {}
    for sample in batch.samples:
        for span in sample.timeline.spans:
            whole = np.full(lengths[span.call_id], np.nan, np.float32)
            whole[: span.end - span.start] = sample.advantages[span.start : span.end]
            recomputed[span.call_id] = whole
    return recomputed


def _settings(config: JsonView) -> Json:
    """The arguments of `build` that a recorded config tells."""
    algorithm = (config.get("trainer_common") or {}).get("algorithm") or {}
    rollout = config.get("rollout") or {}
    options = {
        "estimator": algorithm.get("adv_estimator"),
        "normalize_std": algorithm.get("normalize_std"),
        "use_kl_in_reward": algorithm.get("use_kl_in_reward"),
        "max_staleness": rollout.get("max_staleness"),
        "max_tokens": rollout.get("max_model_len"),
        "failure_reward": rollout.get("failure_reward"),
        "gamma": rollout.get("gamma"),
        "max_samples": (rollout.get("multi_turn") or {}).get("max_sample_per_task"),
        "max_lengths": tuple((config.get("data") or {}).get(f"max_{part}_length") for part in ("prompt", "response")),
    }
    return {name: value for name, value in options.items() if value is not None}


def trained_version(reader: TraceReader, episode: Episode) -> int | None:
    """The policy version that an episode's step trained: what the one before left, else the newest that sampled in it.

    An evaluation or a trial belongs to the version that its own step left.
    """
    matches = rows(
        reader,
        """
        SELECT coalesce(
            (SELECT arg_max(value, step)::INTEGER FROM metrics
             WHERE run_id = $1 AND name = 'train/policy_version' AND (step < $2 OR step = $2 AND $3 <> 'train')),
            (SELECT max(policy_version) FROM calls WHERE episode_id IN
                (SELECT episode_id FROM episodes WHERE run_id = $1 AND step = $2 AND split = $3))) AS version""",
        episode.run_id,
        episode.step,
        episode.split,
    )
    version: int | None = matches[0]["version"]
    return version
