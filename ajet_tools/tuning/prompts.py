"""Better prompts by reflective search: GEPA (Agrawal et al. 2025, arXiv:2507.19457) by its authors' library.

A candidate is run on tasks by the workflow as it is, with its judge and in a trace; a model reads what went wrong and
writes another text. Tasks that the search has seen do not enter the gain: it is measured on the held-out ones.
"""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import TYPE_CHECKING, Protocol

from ajet_sdk import run as sdk
from ajet_sdk.agent.decorators import workflow
from ajet_sdk.capture.observe import trace
from ajet_sdk.dialects.message_parts import parts_of, reply_messages, request_messages
from ajet_sdk.errors import ConfigError, MissingExtra, TrainingError
from ajet_sdk.reporting.paired import Paired, paired
from ajet_sdk.tasks.load import load_tasks
from ajet_sdk.types import Episode, Task
from ajet_tools.text.clean import visible
from ajet_tools.tuning.source import Prompts, placeholders, prompts_of

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config

log = logging.getLogger("ajet")

Reflect = Callable[[str], str]
"""A model that replies to a text."""

_LONGEST = 4000
"""Characters of a conversation that the reflecting model is shown."""


@dataclass(frozen=True)
class Tuned:
    """The best prompts found, and what they are worth on tasks that the search has not seen."""

    prompts: Prompts
    best: Mapping[str, str]
    candidates: int
    episodes: int
    """Of the search, without those of the comparison."""
    before: float
    after: float
    gain: Paired
    """Over the held-out tasks, each with its own difference."""

    @property
    def changed(self) -> bool:
        return dict(self.best) != dict(self.prompts.texts)


def tune(
    config: Config, reflect: Reflect, *, names: Sequence[str] = (), budget: int = 200, k: int = 1, minibatch: int = 4
) -> Tuned:
    """Search with at most about `budget` episodes, then compare both on the validation tasks, `k` attempts at each.

    Half of the training tasks are learnt from, the other half choose among the candidates. Raises ConfigError where
    there are too few tasks or no prompt is found, TrainingError where an episode has no reward.
    """
    try:
        import gepa
    except ImportError as error:
        raise MissingExtra("gepa", "prompts") from error
    if config.rollout.runner != "thread":
        raise ConfigError("prompts are tuned in this process: set rollout.runner: thread")
    agent = config.load(config.rollout.user_workflow or "")
    prompts, sets = prompts_of(agent, names), load_tasks(config)
    if len(sets.train) < 2 or not sets.val:
        raise ConfigError(
            f"prompts are tuned on training tasks (at least 2; there are {len(sets.train)}) and compared on validation "
            f"tasks (there are {len(sets.val)}): name both in task_reader"
        )
    tasks = list(sets.train)
    random.Random(config.trainer_common.seed).shuffle(tasks)
    evaluation = _Evaluation(config, agent, prompts)
    result = gepa.optimize(
        seed_candidate=dict(prompts.texts),
        trainset=tasks[: len(tasks) // 2],
        valset=tasks[len(tasks) // 2 :],
        adapter=evaluation,
        reflection_lm=_traced(reflect, config.directory),
        reflection_minibatch_size=minibatch,
        max_metric_calls=budget,
        seed=config.trainer_common.seed,
        logger=SimpleNamespace(log=lambda message: log.debug("%s", message)),
    )
    best = dict(result.best_candidate)
    spent = evaluation.episodes
    before = evaluation.means(sets.val, prompts.texts, k)
    after = before if best == dict(prompts.texts) else evaluation.means(sets.val, best, k)
    gain = paired([b - a for a, b in zip(before, after, strict=True)], seed=config.trainer_common.seed)
    count = len(result.candidates)
    return Tuned(prompts, best, count, spent, fmean(before), fmean(after), gain)


def _traced(reflect: Reflect, directory: Path) -> Reflect:
    """Each question is an episode `reflection` in the trace, with the calls that it takes."""

    @workflow
    def reflection(question: str) -> str:
        return reflect(question)

    def ask(question: str) -> str:
        with trace(directory / "trace.duckdb"):  # an evaluation has it open before and after
            return str(reflection(question=question))

    return ask


class _Evaluated(Protocol):
    """GEPA's `EvaluationBatch`, of our episodes."""

    scores: list[float]
    trajectories: list[Episode]


@dataclass
class _Evaluation:
    """GEPA's adapter: runs a candidate over tasks and describes each episode to the reflecting model."""

    config: Config
    agent: Callable[..., object]
    prompts: Prompts
    episodes: int = 0
    propose_new_texts: None = field(default=None, init=False)

    def evaluate(self, batch: list[Task], candidate: dict[str, str], capture_traces: bool = False) -> object:
        import gepa

        if (wrong := self.prompts.wrong(candidate)) is not None:  # not run, and worse than whatever was
            log.warning("a rewritten prompt is refused: %s", wrong)
            refused: list[object] = [None] * len(batch)
            scores = [-math.inf] * len(batch)
            return gepa.EvaluationBatch(outputs=refused, scores=scores, trajectories=refused, num_metric_calls=0)
        episodes = [episode_of_task for of_task in self._run(batch, candidate, 1) for episode_of_task in of_task]
        scores = [self._value(episode) for episode in episodes]
        trajectories = episodes if capture_traces else None
        return gepa.EvaluationBatch(outputs=[e.output for e in episodes], scores=scores, trajectories=trajectories)

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: _Evaluated, components_to_update: list[str]
    ) -> Mapping[str, Sequence[Mapping[str, object]]]:
        records = list(map(_told, eval_batch.trajectories, eval_batch.scores))
        return {name: [{**record, **self._kept(name)} for record in records] for name in components_to_update}

    def _kept(self, name: str) -> dict[str, str]:
        """The instruction to keep a prompt's placeholders."""
        names = sorted(placeholders(self.prompts.texts[name]))
        return {"Keep in the prompt": ", ".join(f"{{{placeholder}}}" for placeholder in names)} if names else {}

    def means(self, tasks: Sequence[Task], texts: Mapping[str, str], k: int) -> list[float]:
        """The mean reward of each task."""
        return [fmean([self._value(episode) for episode in of_task]) for of_task in self._run(tasks, texts, k)]

    def _run(self, tasks: Sequence[Task], texts: Mapping[str, str], k: int) -> list[tuple[Episode, ...]]:
        with self.prompts.trying(texts):
            report = sdk.run(self.config, workflow=self.agent, tasks=list(tasks), k=k)
        self.episodes += len(tasks) * k
        return [score.episodes for score in report.tasks]

    def _value(self, episode: Episode) -> float:
        if episode.reward is not None and episode.status == "succeeded":
            return episode.reward
        agents = episode.status == "failed" and not episode.infrastructure
        if agents and self.config.rollout.failure_reward is not None:
            return self.config.rollout.failure_reward
        raise TrainingError(
            f"an episode of task {episode.task.task_id} has no reward ({episode.cause or episode.status}: "
            f"{(episode.error or 'none was given').splitlines()[0]}); where the agent's own failures should count, set "
            "rollout.failure_reward"
        )


def _told(episode: Episode, score: float) -> dict[str, object]:
    """An episode for the reflecting model: task, transcript, reward and reasons."""
    transcript_lines = [
        f"{parts.role}: {visible(parts.text)}"
        for call in episode.calls[-1:]
        for parts in map(parts_of, [*request_messages(call.request), *reply_messages(call.response)])
    ]
    reasons = [reward.reason for reward in episode.rewards if reward.reason]
    metadata = json.dumps(episode.task.metadata, default=str) if episode.task.metadata else ""
    known = f" The task says of itself: {metadata}." if metadata else ""
    return {
        "Inputs": episode.task.main_query or json.dumps(episode.task.init_messages, default=str),
        "Generated Outputs": "\n".join(transcript_lines)[-_LONGEST:],
        "Feedback": f"Reward {score:g}.{known} {' '.join(reasons)}{episode.error or ''}".strip(),
    }
