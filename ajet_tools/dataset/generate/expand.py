"""Composes the calls of `expand`: more rows like a few seeds."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ajet_tools.dataset import prompts
from ajet_tools.dataset.card import Facts
from ajet_tools.dataset.curation.schema import Misfit, RowShape
from ajet_tools.dataset.files.blocks import Row
from ajet_tools.dataset.generate.cells import Axis, Cells, axes_of
from ajet_tools.dataset.generate.directory import digest_of
from ajet_tools.dataset.generate.pipeline import Source, calls_for
from ajet_tools.dataset.generate.records import (
    Call,
    Candidate,
    GenerationResult,
    Unusable,
)
from ajet_tools.dataset.generate.seeds import (
    Example,
    Side,
    as_examples,
    lineage_of,
    split_sides,
)
from ajet_tools.dataset.generate.settings import CIRCUMSTANCE, GenerationConfig
from ajet_tools.dataset.prompts import Prompt

SMALL = 5
"""With fewer seeds, none is held out for validation by default."""


class Expansion(Source):
    """The calls of `expand`; `known` are further rows that no generated row may repeat."""

    command: ClassVar[str] = "expand"
    config: GenerationConfig

    def __init__(
        self, seeds: Sequence[Row], config: GenerationConfig, *, known: Sequence[Row] = ()
    ) -> None:
        self.config = config
        self.shape = RowShape.infer(seeds, free_language=bool(config.languages))
        steered = dict(config.cells)
        for name in CIRCUMSTANCE.values():
            # these have a place of their own in the prompts that use them
            steered.pop(name, None)
        self._axes = axes_of(seeds, steered)
        for axis in self._axes:
            self.shape.allow(axis.path, axis.values)
        self._cells = Cells(self._axes, config.seed)
        self._phrases = {
            name: Cells([Axis(name, tuple(config.phrases(name)))], config.seed)
            for name in CIRCUMSTANCE.values()
        }
        self.fields = self.shape.describe()
        examples = as_examples([*seeds, *known])
        self.examples = list({example.id: example for example in examples}.values())
        self._seeds = examples[: len(seeds)]
        self._digest = digest_of([*seeds, *known])
        share = config.validation
        if share is None:
            share = 0.1 if len(seeds) >= SMALL else 0.0
        self.sides = split_sides(self._seeds, config, share, of_seeds=share)

    @property
    def settings(self) -> dict[str, object]:
        return {"options": self.config.as_json(), "seeds": self._digest}

    def card(self) -> Facts:
        weights = [f"{name} {weight:g}" for name, weight in self.config.strategies.items()]
        labels = [self.config.prompt(name).label for name in self.config.strategies]
        return Facts(
            counts={"seeds": len(self._seeds)},
            parameters={"strategies": ", ".join(weights), "prompts": ", ".join(labels)},
        )

    def previews(self) -> list[tuple[Call, Prompt]]:
        previews = []
        for strategy in self.config.strategies:
            call = self._compose(0, "MODEL", strategy, self.sides["train"])
            previews.append((call, self.config.prompt(strategy)))
        return previews

    def calls_left(self, result: GenerationResult) -> int:
        return calls_for(self.config.count, result, self.config.per_call)

    def next_call(self, number: int, model: str, rate: float) -> Call | None:
        short = [side for side in self.sides.values() if side.lacks(rate) > 0]
        if not short:
            return None
        side = min(short, key=lambda each: each.progress(rate))
        chance = random.Random(f"{self.config.seed}:{number}")
        weights = self.config.strategies
        [strategy] = chance.choices(list(weights), list(weights.values()))
        return self._compose(number, model, strategy, side)

    def count(self, call: Call) -> None:
        self.sides[call.side].used.update(call.provenance["examples"])

    def _compose(self, number: int, model: str, strategy: str, side: Side) -> Call:
        config = self.config
        chance = random.Random(f"{config.seed}:{number}:{strategy}")
        examples = side.draw(config.shots, chance)
        language = ""
        if config.languages:
            language = config.languages[number % len(config.languages)]
        circumstances = {}
        for axis in CIRCUMSTANCE.values():
            circumstances[axis] = self._phrases[axis].of_call(number)[axis]
        cell = self._cells.of_call(number)
        form = prompts.load("expand/form").render(
            fields=self.fields,
            count=config.per_call,
            language=language,
            cell=[(".".join(axis.path) or axis.name, cell[axis.name]) for axis in self._axes],
        )
        if strategy in CIRCUMSTANCE:
            axis = CIRCUMSTANCE[strategy]
            cell[axis] = circumstances[axis]
        prompt = config.prompt(strategy)
        text = prompt.render(
            examples=[self.shape.example(example.values) for example in examples],
            count=config.per_call,
            form=form,
            strategy=strategy,
            language=language,
            cell=cell,
            **circumstances,
        )
        if form not in text:
            text = f"{text}\n\n{form}"
        origin = {
            "source": "expand",
            "examples": [example.id for example in examples],
            **lineage_of(examples, side.name),
        }
        parameters = {"strategy": strategy, "language": language, "cell": cell}
        provenance = config.provenance(
            prompt,
            model,
            chance.getrandbits(31),
            origin=origin,
            parameters={name: value for name, value in parameters.items() if value},
        )
        messages = config.messages("expand/system", text)
        return Call(number, side.name, config.per_call, provenance, messages)

    def read_row(self, call: Call, row: Any) -> Candidate:
        try:
            return Candidate(self.shape.fit(row), call.provenance)
        except Misfit as misfit:
            raise Unusable("wrong format", str(misfit), call.provenance) from misfit

    def record(self, call: Call, values: Mapping[str, Any], *, sound: bool) -> None:
        if not sound:
            return
        origin = call.provenance
        example = Example.of(
            values["task_id"],
            values,
            seeds=origin["seeds"],
            splits=origin["splits"],
            roots=origin["roots"],
        )
        self.sides[call.side].grown.append(example)
