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
from ajet_tools.dataset.generate.examples import Example
from ajet_tools.dataset.generate.records import CallSettings, Candidate, Checks, Rejected
from ajet_tools.dataset.similarity.decontaminate import Leaks
from ajet_tools.dataset.similarity.near import NearIndex
from ajet_tools.dataset.similarity.paraphrase import IN_EVALUATION

if TYPE_CHECKING:
    from ajet_tools.dataset.similarity.near import Vectors

_REPEATED = {"exact": "exact duplicate", "near": "near duplicate", "meaning": "semantic duplicate"}
_SHOWN = 120
_SHORT = 3
"""Shorter lines about a field may occur in a row by chance: `answer: text`."""


class Screen:
    """The seeds and accepted rows; `sort` separates new rows from the others and adds them."""

    def __init__(
        self,
        settings: CallSettings,
        seeds: Iterable[Example],
        checks: Checks,
        fields: Sequence[str] = (),
    ) -> None:
        self._most, self._leaks, self._meanings = (
            settings.max_same_form,
            checks.leaks,
            checks.meanings,
        )
        self._near = NearIndex(settings.similarity, settings.seed)
        self._held_out = checks.held_out
        self._forms: Counter[str] = Counter()
        self._seeds = {f"seed {example.id}": text_of(example.values) for example in seeds}
        asked = plain_text("\n".join(self._seeds.values()))
        wording = settings.wording | {
            plain_text(line) for line in fields if len(line.split()) > _SHORT
        }
        self._wording = [run for run in sorted(wording) if run not in asked]
        for key, text in self._seeds.items():
            self._near.add(key, text)
        self._whole_seeds = (
            Leaks(list(self._seeds.items()), share=0.9, common=1) if self._seeds else None
        )

    async def learn_seeds(self) -> None:
        """Embeds the seeds, before the first row is paid for. Raises as `MeaningIndex.vectors`."""
        if self._meanings is None:
            return
        if self._leaks is not None:
            self._leaks.vectors = await self._meanings.vectors(
                [text for _, text in self._leaks.known]
            )
        if self._seeds:
            vectors = await self._meanings.vectors(list(self._seeds.values()))
            for (key, text), vector in zip(self._seeds.items(), vectors, strict=True):
                self._meanings.add(key, text, vector)

    async def vectors(self, rows: Sequence[Candidate]) -> Vectors | None:
        """Returns the embeddings of rows, if meanings are compared. Raises as
        `MeaningIndex.vectors`."""
        if self._meanings is None or not rows:
            return None
        return await self._meanings.vectors([text_of(candidate.values) for candidate in rows])

    def sort(
        self, rows: Sequence[Candidate], vectors: Vectors | None
    ) -> tuple[list[Candidate], list[Rejected]]:
        """Returns the new rows, and the others with the reason."""
        new, refused = list[Candidate](), list[Rejected]()
        for index, candidate in enumerate(rows):
            why = self._reason_to_reject(
                candidate.values, None if vectors is None else vectors[index]
            )
            if why is None:
                new.append(candidate)
            else:
                refused.append(Rejected(*why, candidate.values, candidate.provenance))
        return new, refused

    def _reason_to_reject(
        self, values: Mapping[str, object], vector: Vectors | None
    ) -> tuple[str, str] | None:
        """Returns reason and detail of a rejection; a new row is added to the index instead."""
        if self._held_out is not None and (evidence := self._held_out(values)) is not None:
            return "repeats a validation task", evidence
        leak = self._leaks(values) if self._leaks is not None else None
        if (
            leak is None
            and vector is not None
            and self._leaks is not None
            and self._meanings is not None
        ):
            leak = self._leaks.by_meaning(text_of(values), vector, self._meanings.least)
        if leak is not None:
            return IN_EVALUATION, leak
        if (evidence := given_away(values)) is not None:
            return "answer in the question", evidence
        if (evidence := prompts.repeated("\n".join(strings(values)), self._wording)) is not None:
            return "repeats the prompt", evidence
        if (row := _row_in(values)) is not None:
            return "a row as the question", row
        text, key = text_of(values), f"row {values['task_id']}"
        match = self._near.find(text)
        if match is None and self._meanings is not None and vector is not None:
            match = self._meanings.find(text, vector)
        if match is not None:
            kind = "the same as" if match.kind == "exact" else f"{match.similarity:.2f} similar to"
            return _REPEATED[match.kind], f"{kind} {match.key}"
        if (
            self._whole_seeds is not None
            and (quoted := self._whole_seeds.quotation(values)) is not None
        ):
            return "copies a seed", quoted
        form = form_of(text)
        if self._most is not None and self._forms[form] >= self._most:
            return (
                "form used too often",
                f"{self._forms[form]} rows differ only in numbers and names: {form}",
            )
        self._forms[form] += 1
        self._near.add(key, text)
        if self._meanings is not None and vector is not None:
            self._meanings.add(key, text, vector)
        return None


def _row_in(values: Mapping[str, object]) -> str | None:
    """Returns the start of a question that is a row as JSON, with the names of this row's
    fields."""
    metadata = values.get("metadata")
    names = {*values, *(metadata if isinstance(metadata, Mapping) else ())}
    for part in question_of(values).parts:
        text = part.strip().removeprefix("```json").removeprefix("```").strip()
        if text[:1] not in ("{", "["):
            continue
        try:
            row, _ = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            continue
        first = row[0] if isinstance(row, list) and row else row
        if isinstance(first, Mapping) and names & first.keys():
            return text[:_SHOWN]
    return None
