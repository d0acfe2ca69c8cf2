"""A run's episodes built into samples anew, under another policy or tokenizer, beside what the run did with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ajet_sdk.config.config import Config
from ajet_sdk.config.trainer_schema import Estimator
from ajet_sdk.engines.retokenize import retokenise
from ajet_sdk.protocols import Tokenizer, TraceReader
from ajet_sdk.samples.build import Batch, build
from ajet_sdk.samples.timelines import Decode
from ajet_sdk.trace.reader import episodes
from ajet_sdk.types import Call, Episode
from ajet_tools.trace.queries.base import rows
from ajet_tools.trace.queries.runs import ledger_totals

_OF_TRAINING = ("trained", "truncated", "cut", "zero_advantage", "stale", "unmaskable")


@dataclass(frozen=True)
class Policy:
    """The config's settings for building samples."""

    estimator: Estimator = "grpo"
    normalize_std: bool = True
    max_tokens: int | None = None
    max_staleness: int | None = None
    failure_reward: float | None = None
    max_lengths: tuple[int | None, int | None] = (None, None)
    max_samples: int | None = None
    gamma: float = 1.0


@dataclass
class Totals:
    """Totals of a run's samples under a policy."""

    samples: int = 0
    tokens_in_samples: int = 0
    apart: int = 0
    """Tokens of the trained calls, were each a sequence of its own."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Sampled tokens by what becomes of them."""
    splits: Counter[str] = field(default_factory=Counter)
    extra_tokens: int = 0
    advantage_sum: float = 0.0
    """Of absolute advantages over the trained tokens."""

    @property
    def trained(self) -> int:
        return self.outcomes["trained"]

    @property
    def merge_ratio(self) -> float | None:
        return self.apart / self.tokens_in_samples if self.tokens_in_samples else None

    @property
    def mean_advantage(self) -> float | None:
        """The mean absolute advantage of a trained token."""
        return self.advantage_sum / self.trained if self.trained else None

    def add(self, batch: Batch, step: Sequence[Episode]) -> None:
        calls = {call.call_id: call for episode in step for call in episode.calls}
        self.samples += len(batch.samples)
        self.tokens_in_samples += sum(len(sample.timeline.token_ids) for sample in batch.samples)
        self.apart += sum(_held(calls[s.call_id]) for sample in batch.samples for s in sample.timeline.spans)
        self.advantage_sum += sum(float(np.abs(sample.advantages).sum()) for sample in batch.samples)
        for row in batch.ledger:
            if row.tokens:
                self.outcomes[row.outcome] += row.tokens
        for split in batch.splits:
            self.splits[split.cause] += 1
            self.extra_tokens += split.extra_tokens


@dataclass
class Remerge:
    """The run's ledger, and the totals under its own and another policy."""

    booked: dict[str, int]
    """The ledger of the run: tokens by outcome."""
    own: Totals
    other: Totals
    policy: Policy
    """The other one."""
    untrained: bool
    """The run trained nothing; its episodes are treated as training episodes."""
    refused: int = 0
    """Calls that the other tokenizer's template does not take."""
    foreign: int = 0
    """Calls that cannot be made tokens again: another dialect, or no reply."""

    @property
    def as_booked(self) -> bool:
        """Whether the run's policy gives anew what the run booked; what a resume rolled back is left out of both."""
        booked = {outcome: tokens for outcome, tokens in self.booked.items() if tokens and outcome != "superseded"}
        return booked == dict(self.own.outcomes)


def policy_of(config: Config) -> Policy:
    """The policy that a config describes."""
    algorithm, rollout = config.trainer_common.algorithm, config.rollout
    return Policy(
        estimator=algorithm.adv_estimator,
        normalize_std=algorithm.normalize_std,
        max_tokens=rollout.max_model_len,
        max_staleness=rollout.max_staleness,
        failure_reward=rollout.failure_reward,
        max_lengths=(config.data.max_prompt_length, config.data.max_response_length),
        max_samples=rollout.multi_turn.max_sample_per_task,
        gamma=rollout.gamma,
    )


def steps_of(reader: TraceReader, run_id: str) -> list[int]:
    """The steps of a run that have finished episodes, in order; those rolled back by a resume are left out."""
    sql = "SELECT DISTINCT step FROM episodes WHERE run_id = ? AND NOT superseded ORDER BY step"
    return [row["step"] for row in rows(reader, sql, run_id)]


def remerge(
    reader: TraceReader,
    run_id: str,
    own: Policy,
    other: Policy,
    *,
    decode: Decode | None = None,
    tokenizer: Tokenizer | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Remerge:
    """Build the samples of every step of a run twice: by its own policy, and by the other one.

    With `tokenizer` the other side's calls are made tokens anew by it (`retokenise`). `decode` reads the run's own ids
    to tell why calls did not merge. Nothing is written.
    """
    booked = {row["outcome"]: row["tokens"] for row in ledger_totals(reader, run_id)}
    untrained = booked.keys().isdisjoint(_OF_TRAINING)
    result = Remerge(booked, Totals(), Totals(), other, untrained)
    for step in _steps(reader, run_id):
        step_episodes = [e.model_copy(update={"split": "train"}) for e in step] if untrained else step
        result.own.add(_built(step_episodes, own, decode), step_episodes)
        if tokenizer is None:
            result.other.add(_built(step_episodes, other, decode), step_episodes)
        else:
            anew = [_anew(episode, tokenizer, result) for episode in step_episodes]
            result.other.add(_built(anew, other, tokenizer.decode), anew)
        progress(1)
    return result


def _steps(reader: TraceReader, run_id: str) -> Iterator[list[Episode]]:
    for step in steps_of(reader, run_id):
        yield episodes(reader, run_id, step)


def _built(step: Sequence[Episode], policy: Policy, decode: Decode | None) -> Batch:
    """The batch of one step. The policy that is trained is as new as the newest that sampled for the step."""
    trained = [episode for episode in step if episode.split == "train"]
    versions = [c.policy_version for e in trained for c in e.calls if c.policy_version is not None and c.trainable]
    return build(
        step,
        estimator=policy.estimator,
        normalize_std=policy.normalize_std,
        policy_version=max(versions, default=None),
        max_staleness=policy.max_staleness,
        max_tokens=policy.max_tokens,
        failure_reward=policy.failure_reward,
        max_lengths=policy.max_lengths,
        max_samples=policy.max_samples,
        gamma=policy.gamma,
        decode=decode,
    )


def _anew(episode: Episode, tokenizer: Tokenizer, result: Remerge) -> Episode:
    retokenised = retokenise(episode.calls, tokenizer)
    result.refused += len(retokenised.refused)
    result.foreign += len(retokenised.foreign)
    by_id = {call.call_id: call for call in retokenised.calls}
    calls = [by_id.get(call.call_id) or call.model_copy(update=_WITHOUT_IDS) for call in episode.calls]
    return episode.model_copy(update={"calls": tuple(calls)})


_WITHOUT_IDS = {"prompt_ids": None, "output_ids": None, "logprobs": None}


def _held(call: Call) -> int:
    return sum(0 if ids is None else len(ids) for ids in (call.prompt_ids, call.output_ids))
