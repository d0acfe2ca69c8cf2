"""Everything that the trace knows of the tokens of episodes: calls, ledger, what the trainer saw, and the group."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ajet_sdk.errors import QueryError
from ajet_sdk.protocols import TraceReader
from ajet_sdk.samples.build import build
from ajet_sdk.trace.reader import calls_of, episodes
from ajet_sdk.types import Episode, Json, JsonView
from ajet_tools.trace.queries.base import rows
from ajet_tools.trace.queries.episodes import attempts_of, step_of

_Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Booked:
    """A row of the ledger: what became of so many tokens of a call."""

    outcome: str
    tokens: int


@dataclass(frozen=True, eq=False)
class Scores:
    """A training step's values for each sampled token of a call; NaN where unknown."""

    advantages: _Floats
    logprobs: _Floats
    entropy: _Floats


@dataclass(frozen=True, eq=False)
class EpisodeFacts:
    """One episode as the trace knows it."""

    episode: Episode
    """With its calls. Of an episode that has not ended only these are known, and its run by inference."""
    ended: bool
    ledger: Mapping[str, Sequence[Booked]]
    """By call; what was trained comes first, then what was cut off."""
    scores: Mapping[str, Scores]
    """By call; none for a call that was not trained, or in a file from before they were kept."""
    step_version: int | None
    """The policy version that was trained at the episode's step."""
    mark: tuple[int, ...] = field(default=())
    """Changes when the trace knows more; see `mark_of`."""


def episode_facts(reader: TraceReader, *episode_ids: str) -> list[EpisodeFacts]:
    """The facts of each episode, in the given order. Raises QueryError if the trace does not have one of them."""
    known = {e.episode_id: e for e in episodes(reader, episode_ids=list(episode_ids), superseded=True)}
    ledger, scores = _ledger(reader, episode_ids), _scores(reader, episode_ids)
    versions = {key: _step_version(reader, *key) for key in {_step_of(e) for e in known.values()}}
    result = []
    for episode_id in episode_ids:
        episode = known.get(episode_id) or _running(reader, episode_id)
        ended = episode_id in known
        mine = {call.call_id for call in episode.calls}
        result.append(
            EpisodeFacts(
                episode=episode,
                ended=ended,
                ledger={call_id: booked for call_id, booked in ledger.items() if call_id in mine},
                scores={call_id: scored for call_id, scored in scores.items() if call_id in mine},
                step_version=versions[_step_of(episode)] if ended else None,
                mark=mark_of(reader, episode_id),
            )
        )
    return result


def mark_of(reader: TraceReader, *episode_ids: str) -> tuple[int, ...]:
    """How many rows the trace has of some episodes: a cheap way to see that there is something new."""
    sql = " UNION ALL ".join(
        f"SELECT {i} AS i, count(*) AS n FROM {table} WHERE list_contains($1, episode_id)"
        for i, table in enumerate(("calls", "episodes", "rewards", "ledger", "trained"))
    )
    return tuple(row["n"] for row in rows(reader, f"FROM ({sql}) ORDER BY i", list(episode_ids)))


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
    batch = build(compared, policy_version=_step_version(reader, *_step_of(compared[0])), **settings)
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


def _step_of(episode: Episode) -> tuple[str, int, str]:
    return episode.run_id, episode.step, episode.split


def _running(reader: TraceReader, episode_id: str) -> Episode:
    """An episode of which there are only calls yet."""
    calls = calls_of(reader, episode_id)
    if not calls:
        raise QueryError(f"the trace has no episode {episode_id}; `ajet trace ls` lists them")
    newest = rows(reader, "SELECT run_id FROM runs ORDER BY status = 'running' DESC, started_at DESC LIMIT 1")
    return Episode(
        episode_id=episode_id,
        run_id=newest[0]["run_id"] if newest else "",
        calls=tuple(calls),
        started_at=min(call.started_at for call in calls),
        ended_at=max(call.ended_at for call in calls),
    )


def _ledger(reader: TraceReader, episode_ids: Sequence[str]) -> dict[str, list[Booked]]:
    by_call: dict[str, list[Booked]] = {}
    for row in rows(
        reader,
        """
        SELECT call_id, outcome, tokens FROM ledger WHERE list_contains($1, episode_id)
        ORDER BY call_id, outcome <> 'trained', outcome <> 'truncated', outcome""",
        list(episode_ids),
    ):
        by_call.setdefault(row["call_id"], []).append(Booked(row["outcome"], row["tokens"]))
    return by_call


def _scores(reader: TraceReader, episode_ids: Sequence[str]) -> dict[str, Scores]:
    table = reader.query(
        "SELECT call_id, advantages, logprobs, entropy FROM trained WHERE list_contains($1, episode_id) ORDER BY step",
        [list(episode_ids)],
    )
    columns = {name: table[name].combine_chunks() for name in ("advantages", "logprobs", "entropy")}
    by_call: dict[str, Scores] = {}
    for i, call_id in enumerate(table["call_id"].to_pylist()):
        values = {n: c[i].values.to_numpy(zero_copy_only=False).astype(np.float32) for n, c in columns.items()}
        by_call[call_id] = Scores(**values)
    return by_call


def _step_version(reader: TraceReader, run_id: str, step: int, split: str) -> int | None:
    """The policy version that a step trained: what the step before it left, else the newest that sampled in it.

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
        run_id,
        step,
        split,
    )
    version: int | None = matches[0]["version"]
    return version
