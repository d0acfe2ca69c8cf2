"""Training on stored conversations: from a file, from the tasks, or from a trace.

A step's conversations become episodes of the run, with new ids and tokenized by the run's
tokenizer, so that they are merged, booked, shown and counted like sampled ones. Validation tasks of
the job and of a trace's runs are left out. A file is refused if a row was made from a validation
task or has the same question.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet_sdk.backbones.shared.steps import order_of_tasks, samples_of
from ajet_sdk.engines.retokenize import Findings, calls_of, retokenise
from ajet_sdk.errors import ConfigError, MissingResource, RequestRefused, TaskError, TrainingError
from ajet_sdk.protocols import Tokenizer
from ajet_sdk.reporting.loggers import Display
from ajet_sdk.tasks.jsonl import json_rows
from ajet_sdk.tasks.lineage import Descent, descended, same_tasks
from ajet_sdk.tasks.row_pictures import RowPictures, images_of
from ajet_sdk.trace.reader import Trace, episodes, open_trace
from ajet_sdk.trace.schema import OF_VALIDATION
from ajet_sdk.types import Call, Episode, Reward, Sample, Task, new_id, now

if TYPE_CHECKING:
    from ajet_sdk.protocols import Job
    from ajet_sdk.tokens.template import Message
    from ajet_sdk.trace.writer import TraceWriter


@dataclass(frozen=True)
class Load:
    """Loads the episodes of one item: a conversation to imitate, or the better and the worse
    attempt of a pair."""

    where: str
    """Row, task or episode, for messages."""
    make: Callable[[], Sequence[Episode]]

    def __call__(self) -> Sequence[Episode]:
        return self.make()


_SCORED = f"""
    SELECT e.episode_id, e.task_id, sum(r.value * r.weight) AS reward,
      EXISTS (SELECT 1 FROM calls c WHERE c.episode_id = e.episode_id AND c.trainable AND c.finish_reason = 'length')
        AS is_cut
    FROM episodes e JOIN rewards r USING (episode_id)
    WHERE e.status = 'succeeded' AND NOT e.superseded AND NOT ({OF_VALIDATION}) GROUP BY ALL ORDER BY e.episode_id"""
_TASKS = "SELECT task_id, any_value(task) AS task FROM episodes GROUP BY task_id ORDER BY task_id"


def open_stored(job: Job) -> StoredSteps | None:
    """Open the stored conversations that the run trains on or replays; None if it has none.

    Raises ConfigError without conversations, TaskError for a row that is not a conversation, and
    the errors of `open_trace`.
    """
    common = job.config.trainer_common
    algorithm = common.algorithm
    pairs = common.algorithm.adv_estimator == "dpo"
    if not (algorithm.stored or algorithm.replays):
        return None
    if algorithm.stored:
        size = job.config.data.train_batch_size
    else:
        size = algorithm.replay
    held_out: list[Load] = []
    if algorithm.data is None:
        loads = [
            _of_row(f"task {task.task_id}", _row_of(task), pairs, task)[1] for task in job.train
        ]
        if pairs:
            conversations = []
        else:
            conversations = [task for task in job.val if "messages" in task.metadata]
        held_out = [
            _of_row(f"task {task.task_id}", task.metadata, pairs, task)[1] for task in conversations
        ]
        source = f"the messages of {len(loads):,} training tasks"
    elif (path := job.config.resolve(algorithm.data)).suffix in (".jsonl", ".json"):
        if not path.is_file():
            raise MissingResource(
                f"trainer_common.algorithm.data: there is no file {algorithm.data}"
            )
        loads, held_out = _of_file(path, pairs, job.val)
        source = f"{len(loads):,} {'pairs' if pairs else 'conversations'} of {path}{_doubts(path)}"
    else:
        loads, source = _of_trace(job, path, pairs)
    if not loads:
        raise ConfigError(f"trainer_common.algorithm.data: {source}; nothing to learn from")
    if "rise" in common.stop_when and not (held_out and algorithm.adv_estimator == "sft"):
        raise ConfigError(
            "trainer_common.stop_when: rise needs sft, and conversations of validation tasks, by"
            " their task_id, in the file of trainer_common.algorithm.data: their loss is what rises"
        )
    return StoredSteps(job, loads, source, size, held_out)


# Files


def _of_file(path: Path, pairs: bool, val: Sequence[Task]) -> tuple[list[Load], list[Load]]:
    """Read the conversations to train on, and those of validation tasks.

    Raises TaskError for a row that is not a conversation, or a training row with a validation task.
    """
    val_ids = {task.task_id for task in val}
    rows: list[tuple[str, Task, Load]] = []
    descents: list[Descent] = []
    held_out: list[Load] = []
    for row in json_rows(path):
        if not isinstance(row.values, Mapping):
            raise TaskError(f"{row.where}: a conversation is an object with keys")
        if row.values.get("task_id") in val_ids:
            held_out += [] if pairs else [_of_row(row.where, row.values, pairs)[1]]
            continue
        descents.append(Descent.named(row.values, str(row.values.get("task_id") or "")))
        rows.append((row.where, *_of_row(row.where, row.values, pairs)))
    for index, held_out_index in descended(descents, [*map(Descent.of, val)]):
        raise _leak(rows[index][0], "was made from", val[held_out_index].task_id)
    for index, same in same_tasks([task for _, task, _ in rows], val):
        raise _leak(rows[index][0], "has the same question as", same.task_id)
    return [load for _, _, load in rows], held_out


def _doubts(path: Path) -> str:
    """Returns how many rows of an export were cut at their limit or earned nothing, for the log
    line."""
    cut = worthless = 0
    for row in json_rows(path):
        if not isinstance(row.values, Mapping):
            continue
        calls = row.values.get("calls")
        cut += any(isinstance(call, Mapping) and call.get("cut") is True for call in calls or ())
        reward = row.values.get("reward")
        worthless += isinstance(reward, int | float) and reward <= 0
    parts = [f"{cut:,} with a reply cut at its limit"] if cut else []
    parts += [f"{worthless:,} with a reward of 0 or less"] if worthless else []
    return f", {' and '.join(parts)} among them" if parts else ""


def _leak(where: str, how: str, task_id: str) -> TaskError:
    return TaskError(
        f"{where} {how} validation task {task_id}; validation would measure memorization: remove"
        " such rows with `ajet dataset dedup --against`, or validate on other tasks"
    )


def _row_of(task: Task) -> Mapping[str, object]:
    if not {"messages", "completion"} & task.metadata.keys():
        raise ConfigError(
            f"trainer_common.algorithm: sft needs messages, and task {task.task_id} has none; set"
            " trainer_common.algorithm.data to a trace or a file of conversations, or give each"
            " task `messages`"
        )
    return task.metadata


def _of_row(
    where: str,
    row: Mapping[str, Any],
    pairs: bool,
    task: Task | None = None,
) -> tuple[Task, Load]:
    """Check a row of `messages`, of `prompt` and `completion`, or of `prompt`, `chosen` and
    `rejected`.

    Without `task`, the task is made from the row's prompt.
    """
    names = (
        ("chosen", "rejected") if pairs else ("messages",) if "messages" in row else ("completion",)
    )
    if names == ("messages",):
        before = []
    else:
        before = _messages(row.get("prompt") or [], f"{where}: prompt")
    sides = [_messages(row.get(name), f"{where}: {name}") for name in names]
    images = images_of(row)
    _with_pictures(RowPictures(where, images, load=False), before, sides)
    for name, side in zip(names, sides, strict=True):
        if not any(message["role"] == "assistant" for message in side):
            raise TaskError(f"{where}: {name} contains no assistant message; nothing to learn from")
    tools = row.get("tools") or None
    tools = json.loads(tools) if isinstance(tools, str) else tools
    if task is None:
        prompt = (
            before
            or sides[0][: next(i for i, m in enumerate(sides[0]) if m["role"] == "assistant")]
        )
        query = next(
            (m["content"] for m in reversed(prompt) if isinstance(m.get("content"), str)), ""
        )
        # its pictures make a question another one, which has another id
        shown = {"images": images} if images else {}
        task = Task(
            main_query=query,
            init_messages=prompt,
            task_id=str(row.get("task_id") or ""),
            metadata=shown,
        )
    worth = [(1.0, "chosen"), (0.0, "rejected")] if pairs else [(row.get("reward"), None)]

    def make() -> list[Episode]:
        pictures = RowPictures(where, images)
        shown, answers = _with_pictures(pictures, before, sides)
        return [
            _spoken(task, shown, side, tools, *of) for side, of in zip(answers, worth, strict=True)
        ]

    return task, Load(where, make)


def _with_pictures(
    pictures: RowPictures, before: list[Message], sides: list[list[Message]]
) -> tuple[list[Message], list[list[Message]]]:
    """The messages of a row with its pictures. Raises TaskError."""
    shown = pictures.put(before)
    answers = [pictures.put(side) for side in sides]
    if before:
        return pictures.put_rest(shown), answers
    return shown, [pictures.put_rest(side) for side in answers]


def _messages(value: object, where: str) -> list[Message]:
    if isinstance(value, str) and value.startswith("["):
        value = json.loads(value)
    if not isinstance(value, list) or not all(
        isinstance(m, Mapping) and "role" in m for m in value
    ):
        raise TaskError(
            f"{where} must be a list of messages with role and content (got {value!r:.80})"
        )
    return [dict(message) for message in value]


def _spoken(
    task: Task,
    before: Sequence[Message],
    side: Sequence[Message],
    tools: Sequence[Message] | None,
    value: float | None,
    reason: str | None,
) -> Episode:
    episode_id = new_id()
    calls = calls_of([*before, *side], tools, episode_id, begin=len(before))
    named = "reward" if reason is None else "preference"
    rewards = () if value is None else (Reward(name=named, value=float(value), reason=reason),)
    return Episode(episode_id=episode_id, task=task, calls=tuple(calls), rewards=rewards)


# Traces


def _of_trace(job: Job, path: Path, pairs: bool) -> tuple[list[Load], str]:
    """Choose the best episodes of each task, or pairs of best and worst; ties are broken by the
    run's seed.

    Episodes of validation tasks, by id or question, are left out.
    """
    algorithm = job.config.trainer_common.algorithm
    draw = random.Random(job.config.trainer_common.seed)
    reader = open_trace(path)
    if job.val:
        tasks = [
            Task.model_validate(json.loads(row["task"])) for row in reader.query(_TASKS).to_pylist()
        ]
    else:
        tasks = []
    held_out = {tasks[index].task_id for index, _ in same_tasks(tasks, job.val)}
    scored_rows = [
        row for row in reader.query(_SCORED).to_pylist() if row["task_id"] not in held_out
    ]
    # a cut reply has no end; to imitate or to prefer it would teach one that was never sampled
    rows = [row for row in scored_rows if not row["is_cut"]]
    cut = len(scored_rows) - len(rows)
    without = f", without {cut:,} with a reply cut at its limit" if cut else ""
    draw.shuffle(rows)
    by_task: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: -row["reward"]):
        by_task[row["task_id"]].append((row["reward"], row["episode_id"]))
    if pairs:
        chosen = [
            pair for scored in by_task.values() for pair in _pairs(scored)[: algorithm.per_task]
        ]
        origin = f"{len(chosen):,} pairs of {len(rows):,} scored episodes of {path}{without}"
        return [
            _from_trace(reader, path, [better[1], worse[1]]) for better, worse in chosen
        ], origin
    if algorithm.min_reward is not None:
        least = algorithm.min_reward
    else:
        least = _least_worth({row["reward"] for row in rows})
    best = [
        pair
        for scored in by_task.values()
        for pair in scored[: algorithm.per_task]
        if pair[0] >= least
    ]
    nothing = sum(row["reward"] <= 0 and row["reward"] < least for row in rows)
    without += f", without {nothing:,} that earned nothing" if nothing else ""
    solved = len({task for task, scored in by_task.items() if set(scored) & set(best)})
    origin = f"{len(best):,} of {len(rows):,} scored episodes of {path}{without}, "
    origin += f"the best of {solved:,} of {len(by_task):,} tasks"
    origin += f", rewards {min(best)[0]:g} to {max(best)[0]:g}" if best else ""
    return [_from_trace(reader, path, [episode_id]) for _, episode_id in best], origin


def _least_worth(rewards: Collection[float]) -> float:
    """The second lowest reward, which is above that of a failure; the only one, if it is above
    0."""
    values = sorted(rewards)[:2]
    if not values:
        return 0.0
    return values[-1] if len(values) > 1 or values[0] > 0 else math.inf


def _pairs(
    scored: Sequence[tuple[float, str]],
) -> list[tuple[tuple[float, str], tuple[float, str]]]:
    """Pair the best with the worst, the second best with the second worst, as long as they
    differ."""
    both = zip(scored, reversed(scored), strict=True)
    return [
        (better, worse) for better, worse in list(both)[: len(scored) // 2] if better[0] > worse[0]
    ]


def _from_trace(reader: Trace, path: Path, episode_ids: Sequence[str]) -> Load:
    return Load(f"{path}, episode {episode_ids[0]}", partial(_load, reader, episode_ids))


def _load(reader: Trace, episode_ids: Sequence[str]) -> list[Episode]:
    by_id = {episode.episode_id: episode for episode in episodes(reader, episode_ids=episode_ids)}
    return [by_id[episode_id] for episode_id in episode_ids]


# Steps


@dataclass(frozen=True)
class StoredSteps:
    """The conversations of a run in order; each epoch is shuffled from the seed, as for tasks."""

    job: Job
    loads: Sequence[Load]
    origin: str
    """Where the conversations come from, for log lines."""
    size: int
    """Conversations per step."""
    held_out: Sequence[Load] = ()
    """Conversations of validation tasks."""

    def __len__(self) -> int:
        return len(self.loads)

    def check(self, tokenizer: Tokenizer, steps: int, display: Display | None = None) -> list[str]:
        """Tokenize what the run will learn. Returns messages about parts of it that are not
        learned.

        Raises TaskError, with the row, for a reply that would teach something else than it is.
        """
        places = range(min(steps * self.size, len(self)))
        order = order_of_tasks(len(self), places, self.job.config.trainer_common.seed)
        loads = [*(self.loads[at] for at in order), *self.held_out]
        if display is not None:
            display.begin("reading the conversations", len(loads))
        tally = _Losses()
        for load in loads:
            for episode in load():
                tally.add(load.where, _findings(load.where, episode, tokenizer))
            if display is not None:
                display.advance()
        return tally.messages()

    def source(self, tokenizer: Tokenizer, writer: TraceWriter) -> StoredSource:
        """The steps' batches, tokenized and recorded."""
        return StoredSource(self, tokenizer, writer)

    def replayed(self, step: int, tokenizer: Tokenizer) -> Sequence[Sample]:
        """The conversations of a step as samples to imitate, which are not episodes of the run."""
        return self._samples(self._of_step(step), tokenizer)

    def held_out_samples(self, tokenizer: Tokenizer) -> Sequence[Sample]:
        """The conversations of validation tasks as samples to imitate."""
        return self._samples(self.held_out, tokenizer)

    def _of_step(self, step: int) -> list[Load]:
        places = range((step - 1) * self.size, step * self.size)
        return [
            self.loads[at]
            for at in order_of_tasks(len(self), places, self.job.config.trainer_common.seed)
        ]

    def begin_step(self, step: int, tokenizer: Tokenizer, writer: TraceWriter) -> StoredBatch:
        """The conversations of a step (from 1)."""
        return StoredBatch(self._of_step(step), self.job.run_id, step, tokenizer, writer)

    def _samples(self, loads: Iterable[Load], tokenizer: Tokenizer) -> Sequence[Sample]:
        episodes = [
            _retold(episode, new_id(), 0, self.job.run_id, 0, tokenizer)
            for of in loads
            for episode in of()
        ]
        return samples_of(self.job.config, episodes, tokenizer, estimator="sft").samples


@dataclass(frozen=True)
class StoredSource:
    """Stored conversations as the `steps.StepSource` of a run."""

    steps: StoredSteps
    tokenizer: Tokenizer
    writer: TraceWriter

    def begin_step(self, step: int) -> StoredBatch:
        """The conversations of a step (from 1)."""
        return self.steps.begin_step(step, self.tokenizer, self.writer)


class StoredBatch:
    """The stored episodes of one step, with the interface of `steps.Rollout`."""

    def __init__(
        self,
        loads: Iterable[Load],
        run_id: str,
        step: int,
        tokenizer: Tokenizer,
        writer: TraceWriter,
    ) -> None:
        self.seconds = 0.0
        self._loads = list(loads)
        self._run_id = run_id
        self._step = step
        self._tokenizer = tokenizer
        self._writer = writer

    async def episodes(self, display: Display | None, title: str) -> list[Episode]:
        """Add the episodes to the trace and return them, grouped by conversation or pair. Raises
        TrainingError."""
        if display is not None:
            display.begin(title, len(self._loads))
        began = time.perf_counter()
        episodes = await asyncio.to_thread(self._make, display)
        for episode in episodes:
            self._writer.put(*episode.calls, episode)
        self.seconds = time.perf_counter() - began
        return episodes

    def _make(self, display: Display | None) -> list[Episode]:
        copies = []
        for load in self._loads:
            group = new_id()
            copies += [
                _retold(episode, group, number, self._run_id, self._step, self._tokenizer)
                for number, episode in enumerate(load())
            ]
            if display is not None:
                display.advance()
        return copies

    def overlap(self, begin: float, end: float) -> float:
        """Always 0: it does not run beside the training."""
        return 0.0

    async def stop(self) -> None:
        """Does nothing."""


@dataclass
class _Losses:
    """Counts what the conversations of a run lose."""

    replies: dict[str, int] = field(default_factory=lambda: defaultdict[str, int](int))
    """Number of replies by what they lose."""
    first: dict[str, str] = field(default_factory=dict)
    """The first row of each."""
    hermes: str = ""
    """The first row with tools in the Hermes form."""

    def add(self, where: str, findings: Findings) -> None:
        for loss in findings.losses:
            self.replies[loss] += 1
            self.first.setdefault(loss, where)
        if findings.in_hermes_form and not self.hermes:
            self.hermes = where

    def messages(self) -> list[str]:
        texts = [
            f"{count:,} {'reply has' if count == 1 else 'replies have'} {loss}, so it is not"
            f" learned (first: {self.first[loss]})"
            for loss, count in self.replies.items()
        ]
        if self.hermes:
            texts.append(
                "the chat template does not render tools or their calls: they are learned in the"
                " Hermes form (<tools>, <tool_call>, <tool_response>), as text, as they will be"
                f" sampled (first: {self.hermes})"
            )
        return texts


def _findings(where: str, episode: Episode, tokenizer: Tokenizer) -> Findings:
    """What the replies of an episode lose. Raises TaskError if nothing, or something else, can be
    learned from it."""
    findings = Findings()
    try:
        calls = retokenise(episode.calls, tokenizer, findings)
    except RequestRefused as error:
        raise TaskError(f"{where}: nothing can be learned from it: {error}") from error
    if not calls:
        raise TaskError(f"{where}: nothing can be learned from it: it contains no chat reply")
    if findings.faults:
        raise TaskError(f"{where}: a reply would be learned wrongly: {findings.faults[0]}")
    return findings


def _retold(
    episode: Episode, group: str, attempt: int, run_id: str, step: int, tokenizer: Tokenizer
) -> Episode:
    """Copy an episode into this run, its calls tokenized by the run's tokenizer."""
    episode_id = new_id()
    ids = {call.call_id: new_id() for call in episode.calls}
    fresh: dict[str, object] = {
        "episode_id": episode_id, "policy_version": None, "sampling": {},
        "extends_call_id": None, "parent_call_id": None, "prefix_len": 0, "prefix_messages": 0,
    }  # fmt: skip
    calls = [
        call.model_copy(update={**fresh, "call_id": ids[call.call_id]}) for call in episode.calls
    ]
    findings = Findings()
    try:
        anew = retokenise(calls, tokenizer, findings)
        why = "; ".join(findings.faults[:1]) or "it contains no chat reply"
    except RequestRefused as error:
        anew = []
        why = str(error)
    if not anew or findings.faults:
        raise TrainingError(
            f"nothing can be learned from the episode of task {episode.task.task_id}: {why}"
        )
    began = now()
    fresh_ids = {
        "episode_id": episode_id, "run_id": run_id, "group_id": group, "attempt": attempt,
        "step": step, "split": "train", "decoding": None, "events": (), "started_at": began,
        "calls": tuple(_dated(call, began + timedelta(microseconds=i)) for i, call in enumerate(anew)),
        "rewards": tuple(r.model_copy(update={"call_id": ids.get(r.call_id or "")}) for r in episode.rewards),
    }  # fmt: skip
    return episode.model_copy(update={**fresh_ids, "ended_at": now()})


def _dated(call: Call, at: datetime) -> Call:
    """The call with a new time and without log-probabilities, as this policy did not sample it."""
    return call.model_copy(update={"logprobs": None, "started_at": at, "ended_at": at})
