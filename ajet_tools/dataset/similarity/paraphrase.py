"""Finds paraphrases of evaluation rows, by showing a model the evaluation rows with the most
similar words."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ajet_sdk.engines.client import ModelClient
from ajet_sdk.errors import NoReward
from ajet_sdk.judges.model import JudgeModel, object_schema
from ajet_sdk.tasks.questions import readable, text_of
from ajet_tools.dataset.prompts import load
from ajet_tools.dataset.similarity.decontaminate import words
from ajet_tools.dataset.verify.verdict import RowVerdict, required

IN_EVALUATION = "in the evaluation set"
SHOWN = 5
"""Evaluation rows shown to the model per row."""
_STEM = 5
"""Length of a word stem, so that `divides` matches `divisible`."""
_SCHEMA = object_schema(same={"type": "integer"}, reason={"type": "string"})


class Paraphrases:
    """A verifier that rejects rows that paraphrase one of the nearest evaluation rows, by a model's
    verdict.

    The nearest rows share the most words, weighted by their rarity in the evaluation set.
    """

    name, calls, needs_answer = "paraphrase", 1, False

    def __init__(self, known: Sequence[tuple[str, str]]) -> None:
        """`known` has the location and question of each evaluation row."""
        self.known = known
        self._with: dict[str, list[int]] = defaultdict(list)
        for index, (_, text) in enumerate(known):
            for stem in _stems(text):
                self._with[stem].append(index)
        self._sizes = [math.sqrt(1 + len(_stems(text))) for _, text in known]

    def nearest(self, text: str) -> list[int]:
        """Returns the evaluation rows that share words with a text, nearest first, at most five."""
        scores: Counter[int] = Counter()
        for stem in _stems(text):
            having = self._with.get(stem, ())
            weight = math.log((1 + len(self.known)) / (0.5 + len(having))) if having else 0.0
            for index in having if weight > 0 else ():
                scores[index] += weight / self._sizes[index]  # type: ignore[assignment]  # a Counter of floats
        return [
            index
            for index, _ in sorted(scores.items(), key=lambda pair: (-pair[1], pair[0]))[:SHOWN]
        ]

    async def check(self, row: Mapping[str, Any], endpoint: ModelClient | None) -> RowVerdict:
        text = text_of(
            row.get("closed_book", row)
        )  # without the passage of a question about a document
        return await self.compare(text, self.nearest(text), endpoint)

    async def compare(
        self, task: str, near: Sequence[int], endpoint: ModelClient | None
    ) -> RowVerdict:
        """Compares a task with these evaluation rows."""
        if not near:
            return RowVerdict(True, "shares no word with the evaluation set")
        prompt, task = load("verify/paraphrase"), readable(task)
        known_texts = [readable(self.known[index][1]) for index in near]
        text = prompt.render(task=task, known=known_texts)

        def read(reply: Mapping[str, Any]) -> tuple[int, str]:
            same = reply.get("same")
            if not isinstance(same, int) or isinstance(same, bool) or not 0 <= same <= len(near):
                raise ValueError(f'"same" must be a number from 0 to {len(near)}')
            return same, str(reply.get("reason", ""))[:500]

        model = JudgeModel(required(endpoint, self.name), max_tokens=512, retries=1)
        try:
            question = [{"role": "user", "content": text}]
            same, reason = await model.ask(question, _SCHEMA, read)
        except NoReward as error:
            details = {"error": str(error)[:500], "prompt": prompt.label}
            return RowVerdict(
                False, "the reply to the paraphrase check cannot be read", details, failed=True
            )
        if not same:
            return RowVerdict(
                True,
                "no paraphrase of an evaluation row",
                {"grade": reason, "prompt": prompt.label},
            )
        where, known = self.known[near[same - 1]]
        details = {
            "evaluation": where,
            "text": readable(known),
            "grade": reason,
            "prompt": prompt.label,
        }
        return RowVerdict(False, IN_EVALUATION, details)


def _stems(text: str) -> set[str]:
    return {word[:_STEM] for word in words(text)}
