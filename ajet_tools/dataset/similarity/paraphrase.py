"""Finds paraphrases of evaluation rows, by showing a model the evaluation rows with the most
similar words."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ajet_sdk.engines.client import ModelClient
from ajet_sdk.errors import NoReward
from ajet_sdk.judges.model import JudgeModel, object_schema
from ajet_sdk.tasks.questions import readable, text_of
from ajet_tools.dataset.prompts import load
from ajet_tools.dataset.similarity.decontaminate import Leak, words
from ajet_tools.dataset.similarity.near import OnProgress, Vectors
from ajet_tools.dataset.verify.verdict import RowVerdict, required

IN_EVALUATION = "in the evaluation set"
SHOWN = 5
"""Evaluation rows shown to the model per row."""
_AT_ONCE = 256
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


async def find_paraphrases(
    texts: Sequence[str],
    known: Sequence[tuple[str, str]],
    leaks: Mapping[int, Leak],
    endpoint: ModelClient,
    *,
    vectors: tuple[Vectors, Vectors] | None = None,
    on_progress: OnProgress,
) -> dict[int, Leak]:
    """Adds the paraphrases that a model finds to the leaks, and closes the endpoint.

    The model sees the evaluation rows that share the most words or, with `vectors` of the rows and
    the evaluation rows, those nearest in meaning. Raises the endpoint's errors, NoReward for an
    unreadable reply.
    """
    checks, done = Paraphrases(known), [0]
    numbers = {where: number for number, (where, _) in enumerate(known)}
    others = [index for index in range(len(texts)) if index not in leaks]

    async def check(index: int) -> tuple[int, Leak] | None:
        if vectors is None:
            near = checks.nearest(texts[index])
        else:
            near = np.argsort(-(vectors[1] @ vectors[0][index]), kind="stable")[:SHOWN].tolist()
        verdict = await checks.compare(texts[index], near, endpoint)
        done[0] += 1
        on_progress("asking the model", done[0], len(others))
        if verdict.failed:
            raise NoReward(f"{texts[index][:80]!r}: {verdict.details['error']}")
        if verdict.ok:
            return None
        where, reason = verdict.details["evaluation"], verdict.details["grade"]
        return index, Leak(numbers[where], "paraphrase", 1.0, reason)

    try:
        results = [
            leak
            for start in range(0, len(others), _AT_ONCE)
            for leak in await asyncio.gather(*map(check, others[start : start + _AT_ONCE]))
        ]
    finally:
        await endpoint.aclose()
    return dict(
        sorted(
            [*leaks.items(), *(leak for leak in results if leak is not None)],
            key=lambda leak: leak[0],
        )
    )


def _stems(text: str) -> set[str]:
    return {word[:_STEM] for word in words(text)}
