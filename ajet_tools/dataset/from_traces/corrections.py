"""Applies feedback to episodes: corrected replies, and the attempts at a task as a group."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile

from ajet_sdk.tasks.lineage import plain_text
from ajet_sdk.types import Episode, Feedback, Reward
from ajet_tools.dataset.from_traces.choice import KEEP_FAILURES, Opinion, opinion
from ajet_tools.dataset.from_traces.tasks import has_placeholder, traced_tasks
from ajet_tools.trace.export.conversations import exchange_of, exchanges
from ajet_tools.trace.export.job import Job
from ajet_tools.trace.queries.base import rows
from ajet_tools.trace.queries.records import Record

_LOOKUP = 5_000  # ids of a query
REDACTED = "corrections with personal data or a secret, now redacted"
_REPLACED = "corrections that their author replaced"
_OUTVOTED = "corrections that most people contradict"
_DISPUTED = "corrections that contradict each other, without a majority"


@dataclass(frozen=True)
class Corrections:
    """The corrections to ignore, by feedback id, each with the reason."""

    refused: dict[str, str] = field(default_factory=dict)
    disputed: frozenset[str] = frozenset()
    """Keys of tasks whose corrections contradict each other."""

    @classmethod
    def of(cls, records: Iterable[Record], foreign_runs: frozenset[str]) -> Corrections:
        """Judges all corrections: the majority answer to a question counts.

        If a person corrected the same reply twice, the later correction counts. Corrections of tool
        calls are not answers and take no part in the vote.
        """
        refused: dict[str, str] = {}
        votes: dict[str, dict[str, str]] = defaultdict(dict)
        for record in records:
            corrections = [
                entry for entry in record.feedback if entry.correction and entry.correction.strip()
            ]
            last = {
                (entry.call_id, entry.author or entry.feedback_id): entry.feedback_id
                for entry in corrections
            }
            for entry in corrections:
                if entry.feedback_id not in last.values():
                    refused[entry.feedback_id] = _REPLACED
                    continue
                if record.redacted and has_placeholder(entry.correction or ""):
                    refused[entry.feedback_id] = REDACTED
                    continue
                alone = replace(record, feedback=(entry,))
                for traced in traced_tasks(alone, foreign=record.episode.run_id in foreign_runs):
                    if traced.answer_from == "correction":
                        votes[traced.key][entry.feedback_id] = plain_text(str(traced.answer)).strip(
                            " .!"
                        )
        disputed = set[str]()
        for key, answers in votes.items():
            [(most, times), *others] = Counter(answers.values()).most_common()
            tie = bool(others) and others[0][1] == times
            if tie:
                disputed.add(key)
            for feedback_id, answer in answers.items():
                if tie or answer != most:
                    refused[feedback_id] = _DISPUTED if tie else _OUTVOTED
        return cls(refused, frozenset(disputed))

    def settle(self, record: Record, *keep: str) -> tuple[Record, list[str]]:
        """Removes ignored corrections from a record and returns the reasons; those with a reason in
        `keep` stay."""
        reasons = [
            self.refused[entry.feedback_id]
            for entry in record.feedback
            if entry.feedback_id in self.refused
        ]
        if not reasons:
            return record, reasons
        feedback = []
        for entry in record.feedback:
            if self.refused.get(entry.feedback_id) not in (None, *keep):
                entry = entry.model_copy(update={"correction": None})
            feedback.append(entry)
        return replace(record, feedback=tuple(feedback)), reasons


def learnable(
    job: Job,
    corrections: Corrections,
    *,
    liked: bool,
    worthless: Mapping[str, str],
    corrected: set[str],
) -> Iterator[Record]:
    """Yields the episodes to learn from, in order, with corrected replies; counts the others.

    Args:
        liked: skip failed episodes, disliked ones without a correction, and worthless ones that
            nobody liked.
        worthless: episodes that earned nothing, with the reason.
        corrected: gets the episodes with a corrected reply.
    """
    for stored_record in job.records(feedback=True):
        record, refused = corrections.settle(stored_record)
        record_opinion = opinion(record.feedback)
        correction = record_opinion.correction
        reason = None
        if correction is not None:
            shorter = _with_correction(record, correction)
            if shorter is None:
                job.left_out["corrections of something other than a chat reply"] += 1
            else:
                record = shorter
                corrected.add(record.episode.episode_id)
        elif refused:
            reason = refused[-1]
        elif liked:
            reason = _no_example(record.episode, record_opinion, worthless)
        if reason is None:
            yield record
        else:
            job.left_out[reason] += 1


def _no_example(
    episode: Episode, record_opinion: Opinion, worthless: Mapping[str, str]
) -> str | None:
    """Returns why an episode is no example to follow, or None."""
    if episode.status != "succeeded":
        return f"episodes that failed; {KEEP_FAILURES}"
    if "down" in record_opinion.kinds:
        return f"episodes that people gave a thumb down; {KEEP_FAILURES}"
    if "up" in record_opinion.kinds:
        return None
    return worthless.get(episode.episode_id)


def _with_correction(record: Record, correction: Feedback) -> Record | None:
    """Replaces the corrected reply and drops the calls after it, which follow from the original
    reply; None if it is no chat reply."""
    calls = [exchange.call for exchange in exchanges(record.episode)]
    named = correction.call_id or (calls[-1].call_id if calls else None)
    before = list(takewhile(lambda call: call.call_id != named, calls))
    if len(before) == len(calls):
        return None
    message = {"role": "assistant", "content": correction.correction}
    response = {"choices": [{"index": 0, "message": message}]}
    last = calls[len(before)].model_copy(update={"response": response, "finish_reason": "stop"})
    episode = record.episode.model_copy(update={"calls": (*before, last)})
    return replace(record, episode=episode)


def attempts(
    job: Job,
    corrections: Corrections,
    *,
    foreign_runs: frozenset[str],
    scores: Mapping[str, float],
) -> Iterator[list[Record]]:
    """Yields the attempts at each task; if none has a reward, feedback or `scores` of a grader (by
    episode, from 0 to 1) replace it.

    A run's groups are attempts of one policy and stay apart. What an agent in service did alone
    is grouped by its task, across runs.
    """
    for records in job.groups(_by_task(job, foreign_runs), feedback=True):
        group = []
        for stored_record in records:
            record, refused = corrections.settle(stored_record)
            job.left_out.update(refused)
            group.append(record)
        if not any(record.episode.rewards for record in group):
            group = [_with_reward(record, scores) for record in group]
        yield group


def _by_task(job: Job, foreign_runs: frozenset[str]) -> dict[tuple[str, str], list[str]]:
    groups: dict[tuple[str, str], list[str]] = {}
    alone: list[str] = []
    for key, episode_ids in job.members().items():
        if len(episode_ids) > 1:
            groups[key] = episode_ids
        else:
            alone += episode_ids
    task_keys = _task_keys(job, alone, foreign_runs)
    for episode_id in alone:
        key = task_keys.get(episode_id, ("episode", episode_id))
        groups.setdefault(key, []).append(episode_id)
    return groups


def _task_keys(
    job: Job, episode_ids: list[str], foreign_runs: frozenset[str]
) -> dict[str, tuple[str, str]]:
    """Identifies the tasks of other tools' traces by their text."""
    sql = (
        "SELECT episode_id, run_id, task_id FROM episodes WHERE episode_id IN (SELECT"
        " unnest(?::VARCHAR[]))"
    )
    keys: dict[str, tuple[str, str]] = {}
    foreign: list[str] = []
    for start in range(0, len(episode_ids), _LOOKUP):
        for row in rows(job.reader, sql, episode_ids[start : start + _LOOKUP]):
            keys[row["episode_id"]] = ("task id", row["task_id"])
            if row["run_id"] in foreign_runs:
                foreign.append(row["episode_id"])
    for record in Job(job.reader, foreign, job.redact).records():
        traced = next(traced_tasks(record, foreign=True), None)
        if traced is not None:
            keys[record.episode.episode_id] = ("task text", traced.key)
    return keys


def _with_reward(record: Record, scores: Mapping[str, float]) -> Record:
    """Sets the score as the reward. A correction without a score counts as 0."""
    record_opinion = opinion(record.feedback)
    name = "feedback"
    score = record_opinion.score
    if score is None and record_opinion.correction is not None:
        score = 0.0
    if score is None:
        name = "rubric"
        score = scores.get(record.episode.episode_id)
    if score is None or not any(exchange_of(call) for call in record.episode.calls):
        return record
    rewards = (Reward(name=name, value=score),)
    return replace(record, episode=record.episode.model_copy(update={"rewards": rewards}))
