"""Grows a dataset from a few examples: composes the calls of `Generation`."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from ajet_sdk.engines.budget import tokens_of
from ajet_sdk.engines.client import ModelClient
from ajet_sdk.tasks.questions import text_of
from ajet_tools.dataset import prompts
from ajet_tools.dataset.curation.schema import Misfit, RowShape
from ajet_tools.dataset.files.blocks import Row
from ajet_tools.dataset.generate.coverage import axes_of
from ajet_tools.dataset.generate.examples import (
    Example,
    Side,
    as_examples,
    split_sides,
    splits_from,
)
from ajet_tools.dataset.generate.loop import Generation
from ajet_tools.dataset.generate.records import (
    CIRCUMSTANCE,
    NO_CHECKS,
    Candidate,
    Checks,
    GenerationConfig,
    Outlook,
    Unusable,
    WriterCall,
)

SMALL = 5
"""With fewer seeds, none is held out for validation by default."""


class Expansion(Generation[WriterCall]):
    """A run of `expand`: `await run()` once. `result` and the endpoint's budget are readable
    meanwhile."""

    config: GenerationConfig

    def __init__(
        self,
        seeds: Sequence[Row],
        config: GenerationConfig,
        endpoint: ModelClient,
        checks: Checks = NO_CHECKS,
        *,
        known: Sequence[Row] = (),
    ) -> None:
        self.shape = RowShape.infer(seeds, free_language=bool(config.languages))
        axes = axes_of(seeds, config.cells)
        for axis in axes:
            self.shape.allow(axis.path, axis.values)
        every = as_examples([*seeds, *known])
        examples = every[: len(seeds)]
        there = {example.id: example for example in every}.values()
        super().__init__(
            config, endpoint, list(there), checks, axes=axes, fields=self.shape.describe()
        )
        share = (
            config.validation
            if config.validation is not None
            else 0.1
            if len(examples) >= SMALL
            else 0.0
        )
        self._sides = split_sides(examples, config, share, self.result, of_seeds=share)

    def preview(self, strategy: str) -> WriterCall:
        """Returns the first call of a strategy, without sending it or changing state."""
        return self._compose(strategy, self._sides["train"].as_begun(), 0)

    def outlook(self) -> Outlook:
        """Estimates the calls and tokens left, for rows as long as the seeds."""
        config = self.config
        seeds = [example.values for side in self._sides.values() for example in side.seeds]
        wanted = [tokens_of(list(self.preview(name).messages)) for name in config.strategies]
        row = sum(
            tokens_of(json.dumps(self.shape.example(values), default=str)) for values in seeds
        ) / len(seeds)
        question = sum(tokens_of(text_of(values)) for values in seeds) / len(seeds)
        prompt, asked = sum(wanted) / len(wanted), 0 if self.result.calls else len(seeds)
        return Outlook(
            self._calls_left(config.count), prompt, row + 10, question, question + 100, asked
        )

    def _next(self, number: int, each: float) -> WriterCall | None:
        side = min(self._sides.values(), key=lambda candidate: candidate.progress(each))
        chance, weights = random.Random(f"{self.config.seed}:{number}"), self.config.strategies
        strategy = chance.choices(list(weights), list(weights.values()))[0]
        call = self._compose(strategy, side, number)
        self.coverage.ask(call.cell)
        return call

    def _compose(self, strategy: str, side: Side, number: int) -> WriterCall:
        """Composes call `number` for a strategy; all random draws depend on the number."""
        config, coverage = self.config, self.coverage
        chance, count = random.Random(f"{config.seed}:{number}:{strategy}"), config.per_call
        examples = side.draw(config.shots, chance)
        language = config.languages[number % len(config.languages)] if config.languages else ""
        drawn = {
            name: coverage.choose_value(name, config.phrases(name), chance)
            for name in CIRCUMSTANCE.values()
        }
        cell = coverage.choose(chance)
        places = {".".join(axis.path) or axis.name: cell[axis.name] for axis in coverage.axes}
        form = prompts.load("expand/form").render(
            fields=self.shape.describe(),
            count=count,
            language=language,
            cell=places.items(),
            repeated=coverage.repeated,
        )
        if (name := CIRCUMSTANCE.get(strategy)) is not None:
            cell[name] = drawn[name]
        prompt = config.prompt(strategy)
        text = prompt.render(
            examples=[self.shape.example(example.values) for example in examples],
            count=count,
            form=form,
            strategy=strategy,
            language=language,
            cell=cell,
            **drawn,
        )
        text = text if form in text else f"{text}\n\n{form}"
        seed = chance.getrandbits(31)
        origin = {
            "source": "expand",
            "seeds": list(
                dict.fromkeys(seed_id for example in examples for seed_id in example.seeds)
            ),
            "roots": list(dict.fromkeys(root for example in examples for root in example.roots)),
            "examples": [example.id for example in examples],
            "splits": splits_from(examples, side.name),
        }
        parameters = {"strategy": strategy, "language": language, "cell": cell}
        parameters = {name: value for name, value in parameters.items() if value}
        provenance = config.provenance(prompt, self.endpoint.model, seed, origin, parameters)
        system = prompts.load("expand/system").render()
        messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        return WriterCall(number, side.name, count, messages, seed, provenance)

    def _read_row(
        self, attempt: WriterCall, row: Any
    ) -> tuple[dict[str, object], Mapping[str, object]]:
        try:
            return self.shape.fit(row), attempt.provenance
        except Misfit as misfit:
            raise Unusable("wrong format", str(misfit), attempt.provenance) from misfit

    def _record_decision(
        self, attempt: WriterCall, side: Side, candidate: Candidate, sound: bool
    ) -> None:
        if sound:
            values, of = candidate.values, candidate.provenance
            side.accepted.append(
                Example.of(values["task_id"], values, of["seeds"], of["splits"], of["roots"])
            )
