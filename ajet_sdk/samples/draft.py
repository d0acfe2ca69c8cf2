"""Draft: an episode during its conversion to training samples, with the outcome of each call."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ajet_sdk.pictures import within
from ajet_sdk.samples.prefixes import is_trained
from ajet_sdk.samples.timelines import Merged
from ajet_sdk.trace.counted import counted_reward
from ajet_sdk.types import UNTAGGED, Call, Episode, LedgerEntry, Outcome, Sample, Span, Timeline

Lengths = tuple[int | None, int | None]


@dataclass(eq=False)
class Draft:
    """An episode during its conversion to training samples."""

    episode: Episode
    merged: Merged
    failure_reward: float | None
    gamma: float
    rewarded: bool = True
    """Whether training requires a reward."""
    scored: bool = True
    """Whether training requires the sampler's log-probabilities."""
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    """Reasons for leaving out calls, by call id; other calls are trained as far as they fit."""
    advantages: dict[str, float] = field(default_factory=dict)
    trained_tokens: dict[str, int] = field(default_factory=dict)
    """Number of trained tokens by call id."""

    @property
    def failed(self) -> bool:
        """Whether there is no value to train on. `failure_reward` is for faults of the agent itself
        only."""
        episode = self.episode
        if episode.status == "succeeded":
            return self.rewarded and not episode.rewards
        return counted_reward(episode, self.failure_reward) is None

    @property
    def counts(self) -> bool:
        """Whether the episode counts in its group's baseline."""
        return self.episode.split == "train" and not self.failed

    def value(
        self, agent: str | None, call_id: str | None = None, *, discounted: bool = True
    ) -> float | None:
        succeeded = self.episode.status == "succeeded"
        if succeeded:
            value = self.episode.value(agent, call_id)
        else:
            value = self.failure_reward
        if value is None or call_id is None or not discounted or self.gamma == 1:
            return value
        mine = [
            r
            for r in self.episode.rewards
            if succeeded and r.call_id == call_id and r.agent in (None, agent)
        ]
        immediate = sum(r.value * r.weight for r in mine)
        return immediate + (value - immediate) * self.gamma ** self.later_turns.get(call_id, 0)

    @cached_property
    def later_turns(self) -> dict[str, int]:
        """Number of the agent's turns after each call; the choices of a request are one turn."""
        turns: dict[str, dict[str, int]] = defaultdict(dict)
        calls = [call for call in self.episode.calls if is_trained(call) and call.error is None]
        for call in calls:
            turns[call.agent].setdefault(call.request_id or call.call_id, len(turns[call.agent]))
        return {
            c.call_id: len(turns[c.agent]) - 1 - turns[c.agent][c.request_id or c.call_id]
            for c in calls
        }

    def rule_out(self, newest: int | None, scorable: Callable[[Call], bool] | None) -> None:
        """Record the outcome of calls that are left out by themselves or with their episode: the
        first that applies."""
        for call in self.episode.calls:
            outcome: Outcome | None = None
            if self.episode.split in ("val", "trial"):
                outcome = "evaluation"
            elif not is_trained(call):
                outcome = "untrainable"
            elif call.error is not None:
                if call.output_ids is None and call.cut_tokens:
                    outcome = "cancelled"
                else:
                    outcome = "undelivered"
            elif call.prompt_ids is None or call.output_ids is None:
                outcome = "untrainable"
            elif self.scored and not (
                call.logprobs is not None and np.isfinite(call.logprobs).all()
            ):
                outcome = "untrainable"  # the engine reported no usable probability of each token
            elif self.failed:
                outcome = "failed"
            elif (
                newest is not None
                and call.policy_version is not None
                and call.policy_version < newest
            ):
                outcome = "stale"
            elif scorable is not None and not scorable(call):
                outcome = "unmaskable"
            if outcome is not None:
                self.outcomes[call.call_id] = outcome

    def mask_overlong(self) -> None:
        """Rule out calls that ended at their maximum length, and all of an agent whose last one
        did.

        The reward of such an attempt tells of the limit rather than of the replies (Yu et al. 2025,
        arXiv:2503.14476, section 3.4). It is called after advantages are computed, as the attempt
        counts in its group's baseline.
        """
        of_agents: dict[str, list[Call]] = defaultdict(list)
        for call in sorted(self.episode.calls, key=lambda call: (call.started_at, call.index)):
            if is_trained(call) and call.error is None:
                of_agents[call.agent].append(call)
        for calls in of_agents.values():
            ends_so = self.episode.cause == "ContextOverflow" or calls[-1].finish_reason == "length"
            for call in calls:
                if ends_so or call.finish_reason == "length":
                    self.outcomes.setdefault(call.call_id, "overlong")

    @cached_property
    def candidates(self) -> dict[str, list[Call]]:
        """Calls by role that are not ruled out, or only as stale; fixed before advantages rule out
        more."""
        by_role: dict[str, list[Call]] = defaultdict(list)
        for call in self.episode.calls:
            if call.call_id not in self.outcomes or self.outcomes[call.call_id] == "stale":
                by_role[
                    call.agent if call.target_tag in (None, UNTAGGED) else call.target_tag
                ].append(call)
        return by_role

    def samples(
        self, max_tokens: int | None, max_lengths: Lengths, max_samples: int | None
    ) -> list[Sample]:
        """Builds a sample for each timeline with trained tokens, or for a fixed random choice of
        `max_samples`."""
        timelines = [
            t for t in self.merged.timelines if any(s.call_id not in self.outcomes for s in t.spans)
        ]
        if max_samples is not None and len(timelines) > max_samples:
            at = self.episode
            draw = random.Random(f"{at.task.task_id}/{at.step}/{at.attempt}")
            timelines.sort(
                key=lambda timeline: timeline.token_ids.tobytes()
            )  # the order of parallel calls varies
            timelines = [
                timelines[i] for i in sorted(draw.sample(range(len(timelines)), max_samples))
            ]
        samples = []
        for timeline in timelines:
            if max_tokens is None:
                limit = len(timeline.token_ids)
            else:
                limit = max_tokens
            if max_lengths[1] is not None:
                first = timeline.spans[0].start
                limit = min(limit, min(first, max_lengths[0] or first) + max_lengths[1])
            samples.append(self._sample(timeline, limit))
        return [sample for sample in samples if sample is not None]

    def _sample(self, timeline: Timeline, limit: int) -> Sample | None:
        spans: list[Span] = []
        for span in timeline.spans:
            if span.call_id not in self.outcomes:
                end = min(span.end, limit)
                self.trained_tokens[span.call_id] = max(0, end - span.start)
                if end > span.start:
                    spans.append(
                        span
                        if end == span.end
                        else Span(call_id=span.call_id, start=span.start, end=end)
                    )
        if not spans:
            return None
        size = spans[-1].end
        mask = np.zeros(size, np.bool_)
        advantages = np.zeros(size, np.float32)
        for span in spans:
            mask[span.start : span.end] = True
            advantages[span.start : span.end] = self.advantages[span.call_id]
        values = [self.value(timeline.agent, span.call_id) or 0.0 for span in spans]
        return Sample(
            timeline=self._shorten(timeline, tuple(spans), mask),
            episode_id=self.episode.episode_id,
            group_id=self.episode.group_id,
            reward=sum(values) / len(values),
            advantages=advantages,
            target=self._target(spans[0].call_id),
        )

    def _target(self, call_id: str) -> str:
        """The target tag of a call, or else its agent."""
        call = self._calls[call_id]
        return call.target_tag or call.agent

    @cached_property
    def _calls(self) -> dict[str, Call]:
        return {call.call_id: call for call in self.episode.calls}

    def _shorten(
        self, timeline: Timeline, spans: tuple[Span, ...], mask: npt.NDArray[np.bool_]
    ) -> Timeline:
        """The timeline up to its last trained token, with nothing else masked in."""
        size = len(mask)
        if spans == timeline.spans and size == len(timeline.token_ids):
            return timeline
        calls = self._calls
        prompts = {call_id: calls[call_id].prompt_ids for call_id in timeline.call_ids}
        versions = (calls[span.call_id].policy_version for span in spans)
        return Timeline(
            agent=timeline.agent,
            token_ids=timeline.token_ids[:size],
            loss_mask=mask,
            logprobs=np.where(mask, timeline.logprobs[:size], np.float32(0)),
            call_ids=tuple(
                c for c in timeline.call_ids if (ids := prompts[c]) is not None and len(ids) < size
            ),
            policy_version=min((v for v in versions if v is not None), default=None),
            spans=spans,
            pictures=within(timeline.pictures, size),
        )

    def ledger(self) -> Iterable[LedgerEntry]:
        """Yields the entries of each call: one, or more if its end was cut or did not fit."""
        for call in self.episode.calls:
            sampled = sampled_tokens(call)
            outcome = self.outcomes.get(call.call_id)
            if outcome is not None:
                yield ledger_entry(self.episode, call, outcome, sampled)
                continue
            trained = self.trained_tokens.get(call.call_id, 0)
            output = sampled - call.cut_tokens
            if trained or not sampled:
                yield ledger_entry(self.episode, call, "trained", trained)
            if call.cut_tokens:
                yield ledger_entry(self.episode, call, "cut", call.cut_tokens)
            if output > trained:
                yield ledger_entry(self.episode, call, "truncated", output - trained)


def ledger_entry(episode: Episode, call: Call, outcome: Outcome, tokens: int) -> LedgerEntry:
    """The ledger entry for some tokens of a call."""
    return LedgerEntry(
        run_id=episode.run_id,
        step=episode.step,
        episode_id=episode.episode_id,
        call_id=call.call_id,
        outcome=outcome,
        tokens=tokens,
    )


def output_tokens(call: Call) -> int:
    """Number of sampled tokens in a call's reply."""
    return 0 if call.output_ids is None else len(call.output_ids)


def sampled_tokens(call: Call) -> int:
    """Number of tokens sampled in a call, with those cut from the reply."""
    return output_tokens(call) + call.cut_tokens
