"""Export jobs that apply feedback: corrected replies, and the attempts at a task as a group."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile

from ajet_sdk.tasks.lineage import plain_text
from ajet_sdk.types import Episode, Reward
from ajet_tools.dataset.from_traces.choice import KEEP_FAILURES, Opinion, opinion
from ajet_tools.dataset.from_traces.tasks import has_placeholder, traced_tasks
from ajet_tools.trace.export.conversations import exchange_of, exchanges
from ajet_tools.trace.export.job import Job
from ajet_tools.trace.queries.base import rows
from ajet_tools.trace.queries.records import Record

_LOOKUP = 5_000
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
            disputed.update([key] if tie else [])
            reason = _DISPUTED if tie else _OUTVOTED
            refused.update(
                {
                    feedback_id: reason
                    for feedback_id, answer in answers.items()
                    if tie or answer != most
                }
            )
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
        feedback = tuple(
            (
                entry.model_copy(update={"correction": None})
                if self.refused.get(entry.feedback_id) not in (None, *keep)
                else entry
            )
            for entry in record.feedback
        )
        return replace(record, feedback=feedback), reasons


@dataclass
class ConversationsJob(Job):
    """Exports episodes to learn from, in the given order, with corrected replies."""

    corrections: Corrections = field(default_factory=Corrections)
    liked: bool = True
    """Skip failed episodes, disliked ones without a correction, and those that earned nothing and
    nobody liked."""
    worthless: Mapping[str, str] = field(default_factory=dict)
    """Episodes that earned nothing, with the reason."""
    corrected: set[str] = field(default_factory=set)
    """Episodes with a corrected reply."""

    def members(self) -> dict[tuple[str, str], list[str]]:
        """Returns each episode as its own group, which keeps their order."""
        return {("", episode_id): [episode_id] for episode_id in self.episode_ids}

    def records(self, *, whole: bool = False) -> Iterator[Record]:
        for group in self.groups(feedback=True):
            for episode_record in group:
                record, refused = self.corrections.settle(episode_record)
                record_opinion = opinion(record.feedback)
                if refused and record_opinion.correction is None:
                    self.left_out.update(refused[-1:])
                elif self._fits(record.episode, record_opinion):
                    yield self._correct_record(record, record_opinion)

    def _fits(self, episode: Episode, record_opinion: Opinion) -> bool:
        if not self.liked or record_opinion.correction is not None:
            return True
        failed = episode.status != "succeeded"
        if failed or "down" in record_opinion.kinds:
            self.left_out[
                f"episodes that {'failed' if failed else 'people gave a thumb down'}; {KEEP_FAILURES}"
            ] += 1
            return False
        reason = self.worthless.get(episode.episode_id)
        if reason is not None and "up" not in record_opinion.kinds:
            self.left_out[reason] += 1
            return False
        return True

    def _correct_record(self, record: Record, record_opinion: Opinion) -> Record:
        """Replaces the corrected reply and drops the calls after it, which follow from the original
        reply."""
        correction = record_opinion.correction
        if correction is None or not correction.correction:
            return record
        calls = [exchange.call for exchange in exchanges(record.episode)]
        named = correction.call_id or (calls[-1].call_id if calls else None)
        before = list(takewhile(lambda call: call.call_id != named, calls))
        if len(before) == len(calls):
            self.left_out["corrections of something other than a chat reply"] += 1
            return record
        message = {"role": "assistant", "content": correction.correction}
        response = {"choices": [{"index": 0, "message": message}]}
        corrected = calls[len(before)].model_copy(
            update={"response": response, "finish_reason": "stop"}
        )
        self.corrected.add(record.episode.episode_id)
        return replace(
            record, episode=record.episode.model_copy(update={"calls": (*before, corrected)})
        )


@dataclass
class AttemptsJob(Job):
    """Groups the attempts at a task; if none has a reward, feedback or grader scores replace it.

    A run's groups are attempts of one policy and stay apart. What an agent in service did alone
    is grouped by its task, across runs.
    """

    foreign_runs: frozenset[str] = frozenset()
    corrections: Corrections = field(default_factory=Corrections)
    scores: Mapping[str, float] = field(default_factory=dict)
    """The grader's scores by episode, from 0 to 1."""

    def members(self) -> dict[tuple[str, str], list[str]]:
        groups: dict[tuple[str, str], list[str]] = {}
        alone: list[str] = []
        for key, episode_ids in super().members().items():
            if len(episode_ids) > 1:
                groups[key] = episode_ids
            else:
                alone += episode_ids
        task_keys = self._task_keys(alone)
        for episode_id in alone:
            key = task_keys.get(episode_id, ("episode", episode_id))
            groups.setdefault(key, []).append(episode_id)
        return groups

    def _task_keys(self, episode_ids: list[str]) -> dict[str, tuple[str, str]]:
        """Identifies the tasks of other tools' traces by their text."""
        sql = (
            "SELECT episode_id, run_id, task_id FROM episodes WHERE episode_id IN (SELECT"
            " unnest(?::VARCHAR[]))"
        )
        keys: dict[str, tuple[str, str]] = {}
        foreign: list[str] = []
        for start in range(0, len(episode_ids), _LOOKUP):
            for row in rows(self.reader, sql, episode_ids[start : start + _LOOKUP]):
                keys[row["episode_id"]] = ("task id", row["task_id"])
                if row["run_id"] in self.foreign_runs:
                    foreign.append(row["episode_id"])
        for record in Job(self.reader, foreign, self.redact).records():
            traced = next(traced_tasks(record, foreign=True), None)
            if traced is not None:
                keys[record.episode.episode_id] = ("task text", traced.key)
        return keys

    def groups(self, *, feedback: bool = False, trained: bool = False) -> Iterator[list[Record]]:
        for records in super().groups(feedback=True, trained=trained):
            settled = [self.corrections.settle(record) for record in records]
            group = [record for record, _ in settled]
            self.left_out.update(reason for _, refused in settled for reason in refused)
            if any(record.episode.rewards for record in group):
                yield group
            else:
                yield [self._set_reward(record) for record in group]

    def _set_reward(self, record: Record) -> Record:
        """Sets the score as the reward. A correction without a score counts as 0."""
        record_opinion = opinion(record.feedback)
        score = (
            0.0
            if record_opinion.correction is not None and record_opinion.score is None
            else record_opinion.score
        )
        name = "feedback" if score is not None else "rubric"
        score = self.scores.get(record.episode.episode_id) if score is None else score
        if score is None or not any(exchange_of(call) for call in record.episode.calls):
            return record
        rewards = (Reward(name=name, value=score),)
        return replace(record, episode=record.episode.model_copy(update={"rewards": rewards}))
