"""`ajet train --dry-run`: estimates the episodes of a run, and its cost at a service."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ajet_sdk.backbones.shared.steps import total_steps
from ajet_sdk.backbones.shared.validation import validations_left
from ajet_sdk.errors import TraceError
from ajet_sdk.reporting.output import echo
from ajet_sdk.tasks.load import load_tasks
from ajet_sdk.trace.reader import open_trace
from ajet_tools.trace.queries.base import rows

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config

_PER_EPISODE = """
    WITH called AS (
        SELECT c.episode_id, c.agent, c.trainable,
            coalesce(c.prefix_len + len(c.prompt_suffix), (c.response->>'$.usage.prompt_tokens')::BIGINT) AS p,
            coalesce(len(c.output_ids), (c.response->>'$.usage.completion_tokens')::BIGINT) AS r
        FROM calls c JOIN episodes e USING (episode_id) JOIN runs u USING (run_id)
        WHERE c.phase = 'rollout' AND c.error IS NULL AND u.config->>'$.ajet.model.scripted' IS NULL
            AND parse_filename(replace(u.config->>'$.ajet.rollout.user_workflow', '->', ':')) = $1),
    timelines AS (SELECT episode_id, max(p + r) AS longest FROM called WHERE trainable GROUP BY episode_id, agent)
    SELECT count(DISTINCT episode_id) AS episodes, count(*) AS calls, sum(p)::DOUBLE AS prefilled,
        sum(r)::DOUBLE AS sampled, (SELECT sum(longest) FROM timelines)::DOUBLE AS trained
    FROM called WHERE p IS NOT NULL AND r IS NOT NULL"""


_TRAINER = "ajet_sdk.learn.tinker.trainer"
"""Imported on use, since it needs torch."""
_VERBS = {"prefill": "prefilled", "sample": "sampled", "train": "trained"}
"""Keys of `tinker.prices`, and descriptions of what they pay for."""


@dataclass(frozen=True, slots=True)
class PerEpisode:
    """Means over recorded episodes of an agent; tokens are those of the models that answered."""

    episodes: int
    calls: float
    prefilled: float
    """Prompt tokens of all calls, assuming no prefix cache."""
    sampled: float
    trained: float
    """Tokens of each agent's longest call, its timeline if its calls extend each other."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The number of steps and episodes of a run."""

    steps: int
    train_episodes: int
    val_episodes: int
    passes: int = 0
    """Forward passes over a step's samples, besides training."""

    def tokens(self, mean: PerEpisode) -> dict[str, float]:
        """Returns the maximum of tokens prefilled, sampled and trained; groups without signal are
        not trained."""
        episodes = self.train_episodes + self.val_episodes
        trained = self.train_episodes * mean.trained
        prefilled = episodes * mean.prefilled + self.passes * trained
        return {"prefill": prefilled, "sample": episodes * mean.sampled, "train": trained}


def plan_of(config: Config) -> Plan:
    """Reads the tasks, and makes no model calls. Raises TaskError, ConfigError."""
    sets = load_tasks(config)
    common = config.trainer_common
    steps = total_steps(config, len(sets.train))
    each = len(sets.val[: common.val_tasks]) * (config.validation_attempts + 1)
    if common.algorithm.stored:
        made = 0
    else:
        made = steps * config.data.train_batch_size * config.rollout.num_repeat
    passes = 0
    if config.backbone == "tinker":
        passes = import_module(_TRAINER).forward_passes(config, steps)
    return Plan(steps, made, each * validations_left(config, 0, steps), passes)


def recorded(config: Config) -> PerEpisode | None:
    """Returns means over this agent's episodes in the traces beside the experiment's, or None."""
    agent = Path((config.rollout.user_workflow or "").replace("->", ":")).name
    try:
        reader = open_trace(config.directory.parent)
    except TraceError:
        return None
    try:
        [row] = rows(reader, _PER_EPISODE, agent)
    finally:
        reader.close()
    if not row["trained"]:
        return None
    return PerEpisode(
        row["episodes"], *(row[name] / row["episodes"] for name in ("calls", *_VERBS.values()))
    )


def print_plan(config: Config) -> None:
    """Raises TaskError, ConfigError."""
    echo("\n".join(_lines_of(config, plan_of(config), recorded(config))))


def _lines_of(config: Config, plan: Plan, mean: PerEpisode | None) -> Iterator[str]:
    stored = config.trainer_common.algorithm.stored
    size = config.data.train_batch_size
    if stored:
        per_step = f"{size} rows"
    else:
        per_step = f"{size} tasks x {config.rollout.num_repeat} attempts"
    yield (
        f"{config.experiment_name}: {plan.steps:,} steps of {per_step}, {plan.val_episodes:,}"
        f" episodes of validation: {plan.train_episodes + plan.val_episodes:,} episodes"
    )
    if mean is None:
        yield (
            f"no episode of this agent is recorded in {config.directory.parent} with a model's"
            " tokens; to estimate tokens and cost, record some there first: ajet run … --limit 8,"
            " or ajet run --advise"
        )
        return
    yield (
        f"an episode: {mean.calls:.1f} calls, {mean.prefilled:,.0f} prompt and {mean.sampled:,.0f}"
        f" sampled tokens, {mean.trained:,.0f} to train on (mean of {mean.episodes:,} recorded)"
    )
    tokens = plan.tokens(mean)
    counts = ", ".join(f"{tokens[name] / 1e6:,.2f}M {verb}" for name, verb in _VERBS.items())
    rows_trained = ""
    if stored:
        rows_trained = "; tokens of the rows that are trained on are not counted"
    yield f"tokens, at most: {counts} (no prefix cached, signal in every group){rows_trained}"
    if config.backbone == "tinker":
        prices = config.tinker.prices
        dollars = sum(tokens[name] * (getattr(prices, name) or 0.0) for name in tokens) / 1e6
        yield (
            f"cost: at most about ${dollars:,.2f}, more if replies grow; --max-cost ends the run"
            if prices.known
            else "cost: unknown, for tinker.prices is not set"
        )
