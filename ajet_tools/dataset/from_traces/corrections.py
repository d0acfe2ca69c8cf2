"""Which corrections of a trace stand: one verdict on each, for tasks, messages and preferences alike."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ajet_sdk.tasks.lineage import plain_text
from ajet_tools.dataset.from_traces.tasks import has_placeholder, traced_tasks
from ajet_tools.trace.export.job import Record

REDACTED = "corrections with personal data or a secret, now redacted"
_REPLACED = "corrections that their author replaced"
_OUTVOTED = "corrections that most people contradict"
_DISPUTED = "corrections that contradict each other, without a majority"


@dataclass(frozen=True)
class Corrections:
    """The corrections that do not count, by the id of the feedback, each with the reason."""

    refused: dict[str, str] = field(default_factory=dict)
    disputed: frozenset[str] = frozenset()
    """Keys of the tasks of which nobody knows the answer."""

    @classmethod
    def of(cls, records: Iterable[Record], foreign_runs: frozenset[str]) -> Corrections:
        """The verdict on every correction: the answer that most people give to a question stands.

        Where one person corrected the same reply twice, the later one counts. What corrects a call of a tool is no
        answer and is not voted on.
        """
        refused: dict[str, str] = {}
        votes: dict[str, dict[str, str]] = defaultdict(dict)
        for record in records:
            corrections = [one for one in record.feedback if one.correction and one.correction.strip()]
            last = {(one.call_id, one.author or one.feedback_id): one.feedback_id for one in corrections}
            for one in corrections:
                if one.feedback_id not in last.values():
                    refused[one.feedback_id] = _REPLACED
                    continue
                if record.redacted and has_placeholder(one.correction or ""):
                    refused[one.feedback_id] = REDACTED
                    continue
                alone = replace(record, feedback=(one,))
                for traced in traced_tasks(alone, foreign=record.episode.run_id in foreign_runs):
                    if traced.answer_from == "correction":
                        votes[traced.key][one.feedback_id] = plain_text(str(traced.answer)).strip(" .!")
        disputed = set[str]()
        for key, answers in votes.items():
            [(most, times), *others] = Counter(answers.values()).most_common()
            tie = bool(others) and others[0][1] == times
            disputed.update([key] if tie else [])
            reason = _DISPUTED if tie else _OUTVOTED
            refused.update({one: reason for one, answer in answers.items() if tie or answer != most})
        return cls(refused, frozenset(disputed))

    def settle(self, record: Record, *keep: str) -> tuple[Record, list[str]]:
        """The record without the corrections that do not count, and the reasons; those refused for `keep` stay."""
        reasons = [self.refused[entry.feedback_id] for entry in record.feedback if entry.feedback_id in self.refused]
        if not reasons:
            return record, reasons
        feedback = tuple(
            entry.model_copy(update={"correction": None})
            if self.refused.get(entry.feedback_id) not in (None, *keep)
            else entry
            for entry in record.feedback
        )
        return replace(record, feedback=feedback), reasons
