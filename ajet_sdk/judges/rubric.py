"""`RubricJudge`: an LLM judge whose rubric its model writes from a few scored answers.

The model writes a rubric from a part of the scored answers, and revises it with the answers that it
misjudges. Of several rubrics, the one that agrees best with the held-out answers is used.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ajet_sdk.agent.workflow import BaseJudge, WorkflowOutput, WorkflowTask
from ajet_sdk.config.config import Config
from ajet_sdk.engines.reply_cache import Shared
from ajet_sdk.errors import ConfigError
from ajet_sdk.judges.agreement import concordance, wilson
from ajet_sdk.judges.llm import Grade, LlmJudge, configured_model, longest_reply, read_examples
from ajet_sdk.judges.llm_prompts import Example, Material, messages, revision, rubric_question
from ajet_sdk.judges.model import object_schema
from ajet_sdk.judges.rewards import Verdict
from ajet_sdk.types import Episode, Task

BUILDING_TIMEOUT = 900.0
"""Time limit of a verdict, in seconds; the first one waits for the rubric."""
_LEAST = 4
"""Fewest scored examples: some of them are held out."""
_OFF = 0.25
"""Largest error of a verdict that isn't misjudged, as a share of the range of scores."""
_POINTS_SCHEMA = object_schema(points={"type": "array", "items": {"type": "string"}})

log = logging.getLogger("ajet")


@dataclass(frozen=True)
class Built:
    """A rubric with its agreement on held-out answers."""

    points: tuple[str, ...]
    held_out: int
    """Number of held-out answers."""
    agreement: float | None
    """Share of their pairs in the order of the labels; 0.5 is chance. None: all labels are
    equal."""
    plain: float | None
    """Agreement of the same model without a rubric."""
    interval: tuple[float, float] | None = None
    """95 % interval of the agreement, with each held-out answer as one trial."""
    key: str = ""
    """Digest of model, examples and settings."""

    @property
    def rubric(self) -> str:
        return "\n".join(f"{number}. {point}" for number, point in enumerate(self.points, 1))


class RubricJudge(LlmJudge):
    """Grades by a rubric that it writes from scored examples before its first verdict.

        judge = ajet.RubricJudge("scored.jsonl", model="gpt-4o-mini")

    Args:
        examples: scored answers as rows with `query`, `answer`, `score`, or a JSON-lines file of them.
        held_out: share of the examples that are held out to test the rubric.
        rounds: maximum number of revisions.
        candidates: number of rubrics to write.
        merge: use the points of all rubrics, instead of the best one.
        most_examples: maximum number of examples.
        headings: maximum number of headings for the points; 0: none.
        language: of the rubric.
        file: path for the rubric, as `.md` and `.json`; reused for equal examples and settings.
        options: as for `LlmJudge`.
    """

    def __init__(
        self,
        examples: str | Path | Sequence[Mapping[str, object] | Example],
        *,
        held_out: float = 0.3,
        rounds: int = 2,
        candidates: int = 1,
        merge: bool = False,
        most_examples: int = 40,
        headings: int = 0,
        language: str = "en",
        seed: int = 0,
        file: str | Path | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**{"name": "rubric", **options})
        self.timeout = BUILDING_TIMEOUT
        rows = read_examples(examples) if isinstance(examples, str | Path) else list(examples)
        scored = [row if isinstance(row, Example) else Example.of(row) for row in rows][
            :most_examples
        ]
        self._check(scored)
        # A stride over the sorted scores gives both parts good and bad answers.
        scored.sort(key=lambda example: (example.score, example.query, example.answer))
        count = max(1, round(held_out * len(scored)))
        apart = {int((index + 0.5) * len(scored) / count) for index in range(count)}
        self._tried_on = [example for index, example in enumerate(scored) if index in apart]
        self._made_of = [example for index, example in enumerate(scored) if index not in apart]
        self._rounds = rounds
        self._candidates = candidates
        self._merge = merge
        self._headings = headings
        self._language = language
        self._seed = seed
        self.file: Path | None = None if file is None else Path(file)
        self.built: Built | None = None
        self._building = Shared[Built]()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_building"}

    def __setstate__(self, state: Mapping[str, object]) -> None:
        vars(self).update(state, _building=Shared[Built]())

    def _check(self, scored: Sequence[Example]) -> None:
        off = next(
            (
                example
                for example in scored
                if not self.min_score <= example.score <= self.max_score
            ),
            None,
        )
        if off is not None:
            raise ConfigError(
                f"a scored example has the score {off.score:g}, outside {self.min_score:g} to"
                f" {self.max_score:g} (min_score, max_score)"
            )
        if len(scored) < _LEAST or len({example.score for example in scored}) < 2:
            raise ConfigError(
                f"a rubric needs at least {_LEAST} scored examples with at least two different"
                f" scores (got {len(scored)} with {len({example.score for example in scored})})"
            )

    async def __call__(self, output: object, task: Task, episode: Episode) -> Verdict:
        """Judges as `LlmJudge` does, after writing the rubric."""
        await self.ready()
        return await super().__call__(output, task, episode)

    async def compute_rewards(self, episodes: Sequence[Episode]) -> list[Verdict]:
        """Judges as `LlmJudge` does, after writing the rubric."""
        await self.ready()
        return await super().compute_rewards(episodes)

    async def ready(self) -> Built:
        """Writes the rubric unless there is one. Raises NoReward, EngineUnavailable if its model
        fails."""
        if self.built is None:
            built, _ = await self._building.get("rubric", self._build)
            self.built = built
            self.rubric: str = built.rubric
        return self.built

    def _key(self) -> str:
        content = [
            self.model.name, self.model.model.base_url, self.mode, self.prompt, self.min_score, self.max_score,
            self._rounds, self._candidates, self._merge, self._headings, self._language, self._seed,
            *(asdict(example) for example in (*self._made_of, *self._tried_on)),
        ]  # fmt: skip
        return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()

    async def _build(self) -> Built:
        stored = self._kept()
        if stored is not None:
            return stored
        rubrics = [await self._refined(number) for number in range(self._candidates)]
        if self._merge and len(rubrics) > 1:
            rubrics = [tuple(dict.fromkeys(point for points in rubrics for point in points))]
        scored_rubrics = [(await self._agreement(points), points) for points in rubrics]
        agreement, points = max(
            scored_rubrics, key=lambda candidate: -1.0 if candidate[0] is None else candidate[0]
        )
        if agreement is None:
            sure = None
        else:
            sure = wilson(agreement, len(self._tried_on))
        built = Built(
            points, len(self._tried_on), agreement, await self._agreement(()), sure, self._key()
        )
        self._keep(built)
        if agreement is not None and built.plain is not None and agreement < built.plain:
            log.warning(
                "the rubric agrees less with the held-out examples (%.2f) than the same model"
                " without a rubric (%.2f); provide more scored examples, or write the rubric"
                " yourself (judge llm)",
                agreement,
                built.plain,
            )
        return built

    async def _refined(self, number: int) -> tuple[str, ...]:
        """Writes a rubric, and revises it as long as its error on the examples decreases."""
        shown = list(self._made_of)
        random.Random(f"{self._seed}/{number}").shuffle(shown)
        points = await self._points(
            rubric_question(shown, self._range, headings=self._headings, language=self._language),
            number,
        )
        best = points
        grades = await self._grades(points, self._made_of)
        for _ in range(self._rounds):
            off = _OFF * (self.max_score - self.min_score)
            misjudged = [
                (example, grade)
                for example, grade in zip(self._made_of, grades, strict=True)
                if abs(grade.score - example.score) > off
            ]
            if not misjudged:
                break
            question = revision(
                best,
                [(example, g.score, g.reason) for example, g in misjudged],
                self._range,
                self._language,
            )
            points = await self._points(question, number)
            again = await self._grades(points, self._made_of)
            if _distance(again, self._made_of) >= _distance(grades, self._made_of):
                break
            best = points
            grades = again
        return best

    async def _points(self, text: str, number: int) -> tuple[str, ...]:
        def read(reply: Mapping[str, object]) -> tuple[str, ...]:
            points = reply.get("points")
            if (
                not isinstance(points, list)
                or not points
                or not all(isinstance(point, str) for point in points)
            ):
                raise ValueError('"points" must be a list of sentences')
            return tuple(" ".join(point.split()) for point in points)

        return await self.model.ask(messages(text), _POINTS_SCHEMA, read, repeat=number)

    async def _grades(self, points: Sequence[str], examples: Sequence[Example]) -> list[Grade]:
        """Grades examples by a rubric; in groups of equal queries if it is a group judge."""
        judge = LlmJudge.__new__(LlmJudge)
        vars(judge).update({**vars(self), "rubric": Built(tuple(points), 0, None, None).rubric})
        if not self.group:
            return await asyncio.gather(*(judge.grade(example.material) for example in examples))
        groups: dict[str, list[Material]] = {}
        for scored_example in examples:
            groups.setdefault(scored_example.query, []).append(scored_example.material)
        ranked = await asyncio.gather(*(judge.rank(group) for group in groups.values()))
        grade_of: dict[Material, Grade] = {}
        for group, grades in zip(groups.values(), ranked, strict=True):
            grade_of.update(zip(group, grades, strict=True))
        return [grade_of[example.material] for example in examples]

    async def _agreement(self, points: Sequence[str]) -> float | None:
        grades = await self._grades(points, self._tried_on)
        if self.group:
            groups = [example.query for example in self._tried_on]
        else:
            groups = None
        return concordance(
            [grade.score for grade in grades], [example.score for example in self._tried_on], groups
        )

    def _kept(self) -> Built | None:
        if self.file is None or not self.file.with_suffix(".json").exists():
            return None
        stored = json.loads(self.file.with_suffix(".json").read_text(encoding="utf-8"))
        sure = stored.get("interval")
        built = Built(
            **{**stored, "points": tuple(stored["points"]), "interval": sure and tuple(sure)}
        )
        return built if built.key == self._key() else None

    def _keep(self, built: Built) -> None:
        if self.file is None:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.with_suffix(".json").write_text(
            json.dumps(asdict(built), indent=1), encoding="utf-8"
        )
        self.file.with_suffix(".md").write_text(built.rubric + "\n", encoding="utf-8")


def _distance(grades: Sequence[Grade], examples: Sequence[Example]) -> float:
    return sum(
        abs(grade.score - example.score) for grade, example in zip(grades, examples, strict=True)
    )


def open_rubric(config: Config) -> RubricJudge:
    """Opens the judge of `task_judge.rubrics_auto_grader`. Raises ConfigError."""
    judge = config.task_judge
    grader = config.task_judge.rubrics_auto_grader
    file = grader.jsonl_dataset_file.training.file_path
    if file is None:
        raise ConfigError(
            "task_judge.rubrics_auto_grader.jsonl_dataset_file.training.file_path is required: JSON"
            " lines with a question, an answer and a score"
        )
    rows = read_examples(config.resolve(file))
    fields = {
        "query": grader.query_field,
        "answer": grader.answer_field,
        "reference": grader.reference_field,
    }
    prompt = grader.custom_evaluation_prompt
    if isinstance(prompt, Mapping):
        prompt = str(prompt.get(grader.language) or next(iter(prompt.values()), "")) or None
    return RubricJudge(
        [
            example
            for row in rows
            for example in _scored(row, fields, (grader.min_score, grader.max_score))
        ],
        model=configured_model(config, grader.model_name),
        mode=grader.grader_mode,
        min_score=grader.min_score,
        max_score=grader.max_score,
        success_threshold=grader.success_threshold,
        name=grader.grader_name,
        prompt=prompt,
        retries=grader.max_retries,
        language=grader.language,
        rounds=grader.max_epochs,
        candidates=grader.generate_number,
        merge=grader.aggregation_mode == "keep_all",
        headings=grader.categories_number if grader.enable_categorization else 0,
        most_examples=grader.num_reference_samples,
        reference_key=grader.reference_field,
        cache=None if judge.llm.cache is None else config.resolve(judge.llm.cache),
        price=judge.llm.price,
        max_tokens=longest_reply(config),
        file=config.directory / "rubric.md",
    )


def _scored(
    row: Mapping[str, object], fields: Mapping[str, str], scores: tuple[float, float]
) -> list[Example]:
    """Reads the examples in a row: one answer, or several with `scores` or `label_rank` (1 is
    best)."""
    metadata = row.get("metadata")
    whole = {**row, **(metadata if isinstance(metadata, Mapping) else {})}
    answers = whole.get("answers")
    named = {name: whole[field] for name, field in fields.items() if whole.get(field) is not None}
    if not isinstance(answers, list):
        if not {fields["answer"], "output", "response"}.isdisjoint(
            whole
        ):  # else `answer` is the scored one
            whole.pop(fields["reference"], None)
        elif fields["reference"] == "answer":
            named.pop("reference", None)
        return [Example.of({**whole, **named})]
    labels = whole.get("scores")
    if not isinstance(labels, list):
        ranks = whole.get("label_rank") or whole.get("ranks") or []
        if not isinstance(ranks, list) or not all(isinstance(rank, int | float) for rank in ranks):
            raise ConfigError(
                "a scored example's ranks (label_rank) are not a list of numbers (got"
                f" {ranks!r:.50})"
            )
        least, most = scores
        labels = [most - (rank - 1) * (most - least) / max(len(answers) - 1, 1) for rank in ranks]
    if len(labels) != len(answers):
        raise ConfigError(f"a scored example has {len(answers)} answers and {len(labels)} scores")
    shared_fields = {name: value for name, value in named.items() if name != "answer"}
    return [
        Example.of({**shared_fields, "answer": answer, "score": score})
        for answer, score in zip(answers, labels, strict=True)
    ]


class AutoGraderJudge(BaseJudge):
    """`RubricJudge` under its name in AgentJet."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.judge = open_rubric(getattr(config, "ajet", config))
        self.group = self.judge.group
        self.timeout = self.judge.timeout

    async def compute_reward(
        self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput
    ) -> Any:
        return await self.judge(
            workflow_output, workflow_task.task, Episode(task=workflow_task.task)
        )

    async def compute_rewards(self, episodes: Sequence[Episode]) -> list[Verdict]:
        return await self.judge.compute_rewards(episodes)
