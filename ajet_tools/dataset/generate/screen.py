"""Screens generated rows: rejects repetitions of the prompt, evaluation rows, seeds and earlier
rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ajet_sdk.tasks.lineage import plain_text
from ajet_sdk.tasks.questions import Reading, question_of, text_of
from ajet_sdk.tasks.row_texts import strings
from ajet_tools.dataset import prompts
from ajet_tools.dataset.curation.forms import form_of, given_away
from ajet_tools.dataset.generate.records import Candidate, Checks, Outcome, Rejected
from ajet_tools.dataset.generate.seeds import Example
from ajet_tools.dataset.generate.settings import CallSettings
from ajet_tools.dataset.similarity.decontaminate import Leaks
from ajet_tools.dataset.similarity.near import NearIndex

IN_EVALUATION = "in the evaluation set"
_SHOWN = 120
_SHORT = 3
"""Shorter lines about a field may occur in a row by chance: `answer: text`."""
_COPIED = 0.9
"""Share of a seed's words that make a row a copy of it."""


class Screen:
    """The seeds and accepted rows; `sort` separates new rows from the others and adds them."""

    def __init__(
        self,
        settings: CallSettings,
        seeds: Iterable[Example],
        checks: Checks,
        fields: Sequence[str] = (),
    ) -> None:
        self._most = settings.max_same_form
        self._leaks = checks.leaks
        self._held_out = checks.held_out
        self._near = NearIndex(settings.similarity)
        self._forms: Counter[str] = Counter()
        self._seeds = {f"seed {example.id}": text_of(example.values) for example in seeds}
        for key, text in self._seeds.items():
            self._near.add(key, text)
        self._copied: Leaks | None = None
        if self._seeds:
            self._copied = Leaks(list(self._seeds.items()), share=_COPIED, common=1)
        field_lines = {plain_text(line) for line in fields if len(line.split()) > _SHORT}
        seed_text = plain_text("\n".join(self._seeds.values()))
        wording = settings.wording | field_lines
        self._wording = prompts.Runs(run for run in wording if run not in seed_text)

    def learn(self, outcome: Outcome) -> None:
        """Adds the new rows of an earlier process."""
        rows = [candidate.values for candidate in outcome.sound]
        rows += [dict(refuted.row or {}) for refuted in outcome.refuted]
        for values in rows:
            self._add(values, text_of(values))

    def sort(self, rows: Sequence[Candidate]) -> tuple[list[Candidate], list[Rejected]]:
        """Returns the new rows, and the others with the reason."""
        new: list[Candidate] = []
        refused: list[Rejected] = []
        for candidate in rows:
            text = text_of(candidate.values)
            problem = self._misbehaviour(candidate.values)
            if problem is None:
                problem = self._repetition(candidate.values, text)
            if problem is None:
                self._add(candidate.values, text)
                new.append(candidate)
            else:
                reason, detail = problem
                refused.append(Rejected(reason, detail, candidate.values, candidate.provenance))
        return new, refused

    def _add(self, values: Mapping[str, object], text: str) -> None:
        self._forms[form_of(text)] += 1
        self._near.add(f"row {values['task_id']}", text)

    def _misbehaviour(self, values: Mapping[str, object]) -> tuple[str, str] | None:
        """Returns reason and detail if a row leaks, gives itself away or repeats the prompt."""
        if self._held_out is not None and (evidence := self._held_out(values)) is not None:
            return "repeats a validation task", evidence
        if self._leaks is not None and (evidence := self._leaks(values)) is not None:
            return IN_EVALUATION, evidence
        if (evidence := given_away(Reading(values))) is not None:
            return "answer in the question", evidence
        if (evidence := self._wording.first_in("\n".join(strings(values)))) is not None:
            return "repeats the prompt", evidence
        if (row := _row_in(values)) is not None:
            return "a row as the question", row
        return None

    def _repetition(self, values: Mapping[str, object], text: str) -> tuple[str, str] | None:
        """Returns reason and detail if a row repeats a seed, another row or a form."""
        match = self._near.find(text)
        if match is not None:
            relation = f"{match.similarity:.2f} similar to"
            if match.kind == "exact":
                relation = "the same as"
            return f"{match.kind} duplicate", f"{relation} {match.key}"
        if self._copied is not None and (evidence := self._copied.quotation(values)) is not None:
            return "copies a seed", evidence
        if self._most is None:
            return None
        form = form_of(text)
        count = self._forms[form]
        if count >= self._most:
            return "form used too often", f"{count} rows differ only in numbers and names: {form}"
        return None


def _row_in(values: Mapping[str, object]) -> str | None:
    """Returns the start of a question that is a row as JSON, with the names of this row's
    fields."""
    names = set(values)
    metadata = values.get("metadata")
    if isinstance(metadata, Mapping):
        names |= metadata.keys()
    for part in question_of(values).parts:
        text = part.strip().removeprefix("```json").removeprefix("```").strip()
        if text[:1] not in ("{", "["):
            continue
        try:
            row, _ = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, list) and row:
            row = row[0]
        if isinstance(row, Mapping) and names & row.keys():
            return text[:_SHOWN]
    return None
