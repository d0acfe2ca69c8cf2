"""Screens generated rows: rejects repetitions of the prompt, evaluation rows, seeds and earlier
rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ajet_sdk.tasks.lineage import plain_text
from ajet_sdk.tasks.questions import question_of, text_of
from ajet_sdk.tasks.row_texts import strings
from ajet_tools.dataset import prompts
from ajet_tools.dataset.curation.forms import form_of, given_away
from ajet_tools.dataset.generate.records import Candidate, Checks, Outcome, Rejected
from ajet_tools.dataset.generate.seeds import Example
from ajet_tools.dataset.generate.settings import CallSettings
from ajet_tools.dataset.similarity.decontaminate import Leaks
from ajet_tools.dataset.similarity.near import NearIndex

if TYPE_CHECKING:
    from ajet_tools.dataset.similarity.near import Match, Vectors

_DUPLICATES = {
    "exact": "exact duplicate",
    "near": "near duplicate",
    "meaning": "semantic duplicate",
}
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
        self._meanings = checks.meanings
        self._near = NearIndex(settings.similarity, settings.seed)
        self._forms: Counter[str] = Counter()
        self._seeds = {f"seed {example.id}": text_of(example.values) for example in seeds}
        for key, text in self._seeds.items():
            self._near.add(key, text)
        self._copied: Leaks | None = None
        if self._seeds:
            self._copied = Leaks(list(self._seeds.items()), share=_COPIED, common=1)
        field_lines = {plain_text(line) for line in fields if len(line.split()) > _SHORT}
        seed_text = plain_text("\n".join(self._seeds.values()))
        wording = sorted(settings.wording | field_lines)
        self._wording = [run for run in wording if run not in seed_text]

    async def learn_seeds(self) -> None:
        """Embeds the seeds, before the first row is paid for. Raises as `MeaningIndex.vectors`."""
        if self._meanings is None:
            return
        if self._leaks is not None:
            known = [text for _, text in self._leaks.known]
            self._leaks.vectors = await self._meanings.vectors(known)
        if self._seeds:
            vectors = await self._meanings.vectors(list(self._seeds.values()))
            for (key, text), vector in zip(self._seeds.items(), vectors, strict=True):
                self._meanings.add(key, text, vector)

    async def learn(self, outcome: Outcome) -> None:
        """Adds the new rows of an earlier process. Raises as `MeaningIndex.vectors`."""
        by_text: dict[str, Vectors] = {}
        vectors = await self.vectors(outcome.embedded)
        if vectors is not None:
            by_text = dict(zip(outcome.embedded, vectors, strict=True))
        rows = [candidate.values for candidate in outcome.sound]
        rows += [dict(refuted.row or {}) for refuted in outcome.refuted]
        for values in rows:
            text = text_of(values)
            self._add(values, text, by_text.get(text))

    async def vectors(self, texts: Sequence[str]) -> Vectors | None:
        """Returns the embeddings of texts, if meanings are compared. Raises as
        `MeaningIndex.vectors`."""
        if self._meanings is None or not texts:
            return None
        return await self._meanings.vectors(texts)

    def sort(
        self, rows: Sequence[Candidate], vectors: Vectors | None
    ) -> tuple[list[Candidate], list[Rejected]]:
        """Returns the new rows, and the others with the reason."""
        new, refused = list[Candidate](), list[Rejected]()
        for index, candidate in enumerate(rows):
            vector = None if vectors is None else vectors[index]
            text = text_of(candidate.values)
            problem = self._misbehaviour(candidate.values, text, vector)
            if problem is None:
                problem = self._repetition(candidate.values, text, vector)
            if problem is None:
                self._add(candidate.values, text, vector)
                new.append(candidate)
            else:
                reason, detail = problem
                refused.append(Rejected(reason, detail, candidate.values, candidate.provenance))
        return new, refused

    def _add(self, values: Mapping[str, object], text: str, vector: Vectors | None) -> None:
        key = f"row {values['task_id']}"
        self._forms[form_of(text)] += 1
        self._near.add(key, text)
        if self._meanings is not None and vector is not None:
            self._meanings.add(key, text, vector)

    def _misbehaviour(
        self, values: Mapping[str, object], text: str, vector: Vectors | None
    ) -> tuple[str, str] | None:
        """Returns reason and detail if a row leaks, gives itself away or repeats the prompt."""
        if self._held_out is not None and (evidence := self._held_out(values)) is not None:
            return "repeats a validation task", evidence
        if self._leaks is not None:
            leak = self._leaks(values)
            if leak is None and vector is not None and self._meanings is not None:
                leak = self._leaks.by_meaning(text, vector, self._meanings.least)
            if leak is not None:
                return IN_EVALUATION, leak
        if (evidence := given_away(values)) is not None:
            return "answer in the question", evidence
        if (evidence := prompts.repeated("\n".join(strings(values)), self._wording)) is not None:
            return "repeats the prompt", evidence
        if (row := _row_in(values)) is not None:
            return "a row as the question", row
        return None

    def _repetition(
        self, values: Mapping[str, object], text: str, vector: Vectors | None
    ) -> tuple[str, str] | None:
        """Returns reason and detail if a row repeats a seed, another row or a form."""
        match: Match | None = self._near.find(text)
        if match is None and self._meanings is not None and vector is not None:
            match = self._meanings.find(text, vector)
        if match is not None:
            relation = f"{match.similarity:.2f} similar to"
            if match.kind == "exact":
                relation = "the same as"
            return _DUPLICATES[match.kind], f"{relation} {match.key}"
        if self._copied is not None and (quoted := self._copied.quotation(values)) is not None:
            return "copies a seed", quoted
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
