"""`LlmJudge`: a model grades outputs by a rubric, pointwise, listwise or pairwise.

Listwise grading scores all outputs of a group in one prompt, as RULER does (OpenPipe, 2025):
ranking answers is easier than scoring them separately, and suffices for a group's advantages.
Pairwise grading compares each pair in both orders, since models have a position bias (Zheng et al.
2023, arXiv:2306.05685, section 3.3); the score is the share of comparisons won.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from ajet_sdk.agent.model import Model
from ajet_sdk.config.config import Config
from ajet_sdk.dialects.message_parts import (
    parts_of,
    pictures_in,
    reply_messages,
    request_messages,
    without_pictures,
)
from ajet_sdk.engines.budget import Price, Usage
from ajet_sdk.errors import ConfigError, MissingResource, NoReward, PictureError
from ajet_sdk.judges import llm_prompts as prompts
from ajet_sdk.judges.call import output_of
from ajet_sdk.judges.llm_prompts import Example, Material
from ajet_sdk.judges.load import RUBRIC_FILES
from ajet_sdk.judges.model import (
    JudgeModel,
    ScriptedModel,
    counted,
    gather,
    number_in,
    open_model,
    usage_metrics,
)
from ajet_sdk.judges.rewards import Verdict
from ajet_sdk.judges.text import text_of
from ajet_sdk.pictures import Picture, is_data_url, picture_at, read_picture
from ajet_sdk.tasks.row_pictures import files_in
from ajet_sdk.types import Call, Episode, Reward, Task

log = logging.getLogger("ajet")
LONGEST = 1024
"""Default limit of a verdict, in tokens."""
MOST_PICTURES = 20
"""Pictures of a transcript that a judge sees: the last ones, most of which are of the end."""
T = TypeVar("T")
Mode = Literal["pointwise", "listwise", "pairwise"]
Shown = Literal["output", "transcript"]


@dataclass(frozen=True)
class Grade:
    """A score in the judge's range, with its reason."""

    score: float
    reason: str


class LlmJudge:
    """Grades a workflow's output by a rubric in words.

        judge = ajet.LlmJudge("Names the dose and the interval.", model="gpt-4o-mini")
        ajet.run(config, workflow=advise, judge=judge)

    `pointwise` grades each output separately. `listwise` and `pairwise` make it a group judge,
    which compares all attempts at a task. Equal outputs are graded once. A missing verdict raises
    NoReward: the episode is `failed`.

    Args:
        rubric: criteria of a good output.
        model: a name at `base_url` or OPENAI_BASE_URL with OPENAI_API_KEY; or a `Model`; or a `JudgeModel`.
        examples: graded outputs for the prompt, as rows with `query`, `answer`, `score` and `reason`.
        success_threshold: lowest score of a successful episode; None: a reward of 1 is a success.
        reference_key: key of the reference answer in a task's metadata; shown to the model if present.
        show: the output alone, or all messages of the agents too.
        pictures: send the pictures of the task (and of the messages, if they are shown) to the model, which must
            take them; else it reads a line for each.
        prompt: replaces the default prompt; its fields are `{query}`, `{answer}` (`{answers}` for a group),
            `{reference}`, `{rubric}`, `{examples}`, `{min_score}`, `{max_score}`. An `{answer}` outside of `<answer>`
            tags is put between tags that no output can forge.
        cache: a file that shares replies between processes.
        price: `INPUT,OUTPUT` per million tokens, for `judge_cost`.
    """

    def __init__(
        self,
        rubric: str = "",
        *,
        model: str | Model | JudgeModel | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        mode: Mode = "pointwise",
        examples: Sequence[Mapping[str, object] | Example] = (),
        min_score: float = 0.0,
        max_score: float = 1.0,
        success_threshold: float | None = None,
        reference_key: str = "answer",
        show: Shown = "output",
        pictures: bool = True,
        prompt: str | None = None,
        temperature: float = 0.0,
        max_tokens: int = 1024,
        retries: int = 2,
        cache: str | Path | None = None,
        price: str | None = None,
        name: str = "llm",
    ) -> None:
        if mode not in get_args(Mode):
            raise ConfigError(
                f"the mode of an LLM judge must be one of {', '.join(get_args(Mode))} (got"
                f" {mode!r})"
            )
        if not min_score < max_score:
            raise ConfigError(
                f"min_score of an LLM judge must be less than max_score (got {min_score},"
                f" {max_score})"
            )
        if not isinstance(model, JudgeModel):
            if isinstance(model, Model):
                asked = model
            else:
                asked = open_model(model, base_url, api_key)
            model = JudgeModel(
                asked,
                temperature=temperature,
                max_tokens=max_tokens,
                retries=retries,
                cache=cache,
                price=(
                    None if price is None else Price.parse(price, f"the price of the judge {name}")
                ),
            )
        if prompt is not None:
            prompts.check_prompt(prompt)
            if prompts.has_bare_answer(prompt):
                log.warning(
                    "the prompt of the judge %s has {answer} without tags, so that an output could"
                    " pass for a part of the prompt; it is put between tags that no output can"
                    " forge. To choose the tags yourself, write <answer>{answer}</answer>",
                    name,
                )
        self.model = model
        self.rubric: str = rubric
        self.mode: Mode = mode
        self.name: str = name
        self.examples: list[Example] = [
            example if isinstance(example, Example) else Example.of(example) for example in examples
        ]
        self.min_score: float = min_score
        self.max_score: float = max_score
        self.success_threshold: float | None = success_threshold
        self.reference_key: str = reference_key
        self.show: Shown = show
        self.pictures: bool = pictures
        self.prompt: str | None = prompt
        self.repeat = 0
        """A different number requests new verdicts in place of cached ones."""

    @property
    def group(self) -> bool:
        """Whether it compares all attempts at a task."""
        return self.mode != "pointwise"

    async def __call__(self, output: object, task: Task, episode: Episode) -> Verdict:
        """Judges one output. Raises NoReward, EngineUnavailable."""
        material = material_of(output, task, episode, self.reference_key, self.show)
        with counted() as usage:
            grade = await self.grade(material, repeat=self.repeat)
        return self._verdict(grade, usage)

    async def compute_rewards(self, episodes: Sequence[Episode]) -> list[Verdict]:
        """Judges a group, in order; the usage is recorded with the first, whose trace has the
        calls.

        Raises NoReward, EngineUnavailable.
        """
        key = self.reference_key
        show = self.show
        group = [material_of(output_of(e), e.task, e, key, show) for e in episodes]
        with counted() as usage:
            grades = await self.rank(group, repeat=self.repeat)
        used = [usage] + [Usage()] * (len(episodes) - 1)
        return [self._verdict(grade, each) for grade, each in zip(grades, used, strict=True)]

    def _verdict(self, grade: Grade, spent: Usage) -> Verdict:
        if self.success_threshold is None:
            success = None
        else:
            success = grade.score >= self.success_threshold
        reward = Reward(name=self.name, value=grade.score, reason=grade.reason)
        return Verdict((reward,), success, usage_metrics(spent))

    async def grade(self, material: Material, *, repeat: int = 0) -> Grade:
        """Grades one output; a different `repeat` requests a new grade."""
        return await self._ask("pointwise", self._read_grade, [material], repeat)

    async def rank(
        self, group: Sequence[Material], *, repeat: int = 0, order: Sequence[int] | None = None
    ) -> list[Grade]:
        """Grades a group by the judge's mode, in the group's order.

        `order`: of the answers in a listwise prompt; None: shuffled, with the answers as random
        seed.
        """
        different = list(dict.fromkeys(group))
        if self.mode == "pointwise":
            grades = await gather([self.grade(material, repeat=repeat) for material in different])
        elif self.mode == "pairwise":
            grades = await self._compare(different, repeat)
        else:
            if order is None or len(different) < len(group):
                order = list(range(len(different)))
                random.Random(f"{repeat}/{different}").shuffle(order)
            grades = await self._list(different, order, repeat)
        grade_of = dict(zip(different, grades, strict=True))
        return [grade_of[material] for material in group]

    async def _list(
        self, group: Sequence[Material], order: Sequence[int], repeat: int
    ) -> list[Grade]:
        shown = [group[place] for place in order]

        def read(reply: Mapping[str, Any]) -> list[Grade]:
            rows = [row for row in reply.get("verdicts") or () if isinstance(row, Mapping)]
            by_number = {number_in(row.get("answer")): self._read_grade(row) for row in rows}
            if len(rows) != len(shown) or set(by_number) != set(range(1, len(shown) + 1)):
                raise ValueError(f'"verdicts" needs each of the answers 1 to {len(shown)} once')
            return [by_number[number] for number in range(1, len(shown) + 1)]

        grades = await self._ask("listwise", read, shown, repeat)
        places = dict(zip(order, grades, strict=True))
        return [places[place] for place in range(len(group))]

    async def _compare(self, group: Sequence[Material], repeat: int) -> list[Grade]:
        """Compares all pairs in both orders; a tie counts half a win."""
        pairs = list(itertools.permutations(range(len(group)), 2))
        preferences = await gather(
            [self.prefer(group[a], group[b], repeat=repeat) for a, b in pairs]
        )
        shares: list[list[float]] = [[] for _ in group]
        for (a, b), preference in zip(pairs, preferences, strict=True):
            shares[a].append(preference.score)
            shares[b].append(1 - preference.score)
        grades = []
        for won in shares:
            share = sum(won) / len(won) if won else 0.5
            if won:
                reason = f"won {sum(won):g} of {len(won)} comparisons"
            else:
                reason = "there is nothing to compare it with"
            grades.append(Grade(self.min_score + share * (self.max_score - self.min_score), reason))
        return grades

    async def prefer(self, first: Material, second: Material, *, repeat: int = 0) -> Grade:
        """Compares two answers: 1 if the first is better, 0 if the second is, 0.5 for a tie."""

        def read(reply: Mapping[str, Any]) -> Grade:
            if reply.get("better") not in prompts.PREFERENCES:
                raise ValueError('"better" must be "first", "second" or "tie"')
            return Grade(prompts.PREFERENCES[reply["better"]], _reason(reply))

        return await self._ask("pairwise", read, [first, second], repeat)

    async def _ask(
        self,
        mode: Mode,
        read: Callable[[Mapping[str, object]], T],
        group: Sequence[Material],
        repeat: int,
    ) -> T:
        text = prompts.question(mode, self.prompt, group, self.rubric, self.examples, self._range)
        pictures = [picture for material in group for picture in material.pictures]
        messages = prompts.messages(text, pictures if self.pictures else ())
        return await self.model.ask(messages, prompts.SCHEMAS[mode], read, repeat=repeat)

    @property
    def _range(self) -> tuple[float, float]:
        return self.min_score, self.max_score

    def _read_grade(self, reply: Mapping[str, object]) -> Grade:
        score = number_in(reply.get("score"))
        if score is None or not self.min_score <= score <= self.max_score:
            raise ValueError(
                f'"score" must be a number from {self.min_score:g} to {self.max_score:g}'
            )
        return Grade(score, _reason(reply))


def _reason(reply: Mapping[str, object]) -> str:
    return " ".join(str(reply.get("reason") or "no reason given").split())


def material_of(
    output: object,
    task: Task,
    episode: Episode | None,
    reference_key: str = "answer",
    show: Shown = "output",
) -> Material:
    """Selects the part of an episode to show to a judge. Raises NoReward without an output."""
    if output is None:
        raise NoReward("the workflow returned nothing to judge")
    try:
        answer = str(without_pictures(text_of(output)))
    except NoReward:
        answer = json.dumps(without_pictures(output), ensure_ascii=False, default=str)
    pictures = _pictures_of(task)
    if show == "transcript" and episode is not None:
        pictures += _last_pictures(episode)
    pictures += list(_pictures_among(output))[:MOST_PICTURES]
    if show == "transcript" and episode is not None:
        answer = "\n\n".join(part for part in (transcript(episode), f"[output] {answer}") if part)
    reference = task.metadata.get(reference_key)
    query = task.main_query or "\n\n".join(
        _shown({"role": "user", **message})
        for message in task.init_messages
        if message.get("content")
    )
    shown = "" if reference is None else str(without_pictures(reference))
    return Material(query, answer, shown, tuple(dict.fromkeys(pictures)))


def _pictures_of(task: Task) -> list[Picture]:
    """The pictures of a task's messages and of its metadata, a reference answer among them."""
    pictures = [picture for message in task.init_messages for picture in pictures_in(message)]
    pictures += _pictures_among(task.metadata)
    for file in files_in([task.init_messages, task.metadata]):
        with suppress(PictureError, OSError):  # it may be elsewhere, where only the agent looks
            pictures.append(read_picture(file.path))
    return pictures


def _pictures_among(value: object) -> Iterator[Picture]:
    """The pictures that are texts of a JSON value, as data URLs."""
    if isinstance(value, str) and is_data_url(value):
        with suppress(PictureError):  # it is no picture
            yield picture_at(value)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _pictures_among(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _pictures_among(item)


def _last_pictures(episode: Episode) -> list[Picture]:
    """The last different pictures of the messages, of which a model takes only some."""
    pictures: list[Picture] = []
    for _, call in _last_calls(episode):
        for message in [*request_messages(call.request), *reply_messages(call.response)]:
            pictures += pictures_in(message)
    different = list(dict.fromkeys(reversed(pictures)))  # looking again hides nothing earlier
    return different[:MOST_PICTURES][::-1]


def transcript(episode: Episode) -> str:
    """Formats the last conversation of each agent, with its reply."""
    last = _last_calls(episode)
    parts = []
    for agent, call in last:
        lines = list(map(_shown, [*request_messages(call.request), *reply_messages(call.response)]))
        parts.append("\n".join([f"--- {agent} ---", *lines] if len(last) > 1 else lines))
    return "\n\n".join(parts)


def _last_calls(episode: Episode) -> list[tuple[str, Call]]:
    """The last call of each agent."""
    calls = (call for call in episode.calls if call.phase == "rollout" and not call.error)
    return list({call.agent: call for call in calls}.items())


def _shown(message: object) -> str:
    """Formats a message without its reasoning, which a user doesn't see either."""
    parts = parts_of(message)
    calls = (f"{call.name}({call.written})" for call in parts.tool_calls)
    return f"[{parts.role}] " + "\n".join([parts.content, *calls]).strip()


def open_llm(config: Config) -> LlmJudge:
    section = config.task_judge.llm
    options = section.model_dump(include={
        "mode", "min_score", "max_score", "success_threshold", "reference_key", "show", "pictures", "prompt",
        "temperature", "price",
    })  # fmt: skip
    return LlmJudge(
        read_rubric(config, section.rubric),
        model=configured_model(config, section.model),
        examples=(
            read_examples(config.resolve(shown))
            if isinstance(shown := section.examples, str)
            else shown
        ),
        max_tokens=section.max_tokens or longest_reply(config),
        retries=section.max_retries,
        cache=None if section.cache is None else config.resolve(section.cache),
        **options,
    )


def configured_model(config: Config, name: str | None) -> Model:
    """Opens the model of an LLM judge: the function of `task_judge.llm.scripted`, or one at an
    endpoint."""
    llm = config.task_judge.llm
    if llm.scripted:
        return ScriptedModel(llm.scripted, config.source.parent if config.source else None, name)
    asked = name or config.task_judge.alien_llm_model
    return open_model(asked, llm.base_url, api_key_env=llm.api_key_env)


def longest_reply(config: Config) -> int:
    """Limit of a verdict, in tokens."""
    is_set = config.is_set("task_judge.alien_llm_response_length")
    return config.task_judge.alien_llm_response_length if is_set else LONGEST


def read_rubric(config: Config, text: str) -> str:
    """Returns a rubric as written, or reads it from a file. Raises MissingResource if the file is
    missing."""
    if "\n" in text or not text.endswith(RUBRIC_FILES):
        return text
    path = config.resolve(text)
    if not path.is_file():
        raise MissingResource(f"the judge's rubric: there is no file {path}")
    return path.read_text(encoding="utf-8")


def read_examples(path: str | Path) -> list[dict[str, Any]]:
    """Reads rows from a JSON-lines file. Raises MissingResource, ConfigError."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        # not `splitlines`: a text may have other line separators, which JSON allows
        rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    except FileNotFoundError:
        raise MissingResource(f"the judge's scored examples: there is no file {path}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the judge's scored examples: cannot read {path} as JSON lines: {error}"
        ) from None
    for place, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise ConfigError(
                f"the judge's scored examples: {path}: row {place} is not an object (got"
                f" {row!r:.50})"
            )
    return rows
