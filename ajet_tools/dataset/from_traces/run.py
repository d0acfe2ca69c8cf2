"""The feedback loop: converts episodes of a deployed agent to tasks, messages, preference pairs or
tokens.

Formats and redaction are those of `ajet_tools.trace.export`. This package adds the choice of
episodes (feedback, failures, a rubric), corrections, one row per task, and provenance.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from ajet_sdk.dialects.message_parts import parts_of
from ajet_sdk.errors import ConfigError
from ajet_tools.dataset.files.writer import Writer
from ajet_tools.dataset.from_traces.choice import Choice, choose
from ajet_tools.dataset.from_traces.exports import (
    REDACTED,
    AttemptsJob,
    ConversationsJob,
    Corrections,
)
from ajet_tools.dataset.from_traces.grader import EpisodeGrader
from ajet_tools.dataset.from_traces.sources import Sources
from ajet_tools.dataset.from_traces.tasks import (
    TaskPool,
    has_placeholder,
    rejected_row,
    traced_tasks,
)
from ajet_tools.dataset.verify.verdict import RowVerdict
from ajet_tools.trace.export import tokens
from ajet_tools.trace.export.conversations import write_messages
from ajet_tools.trace.export.demonstrations import worthless
from ajet_tools.trace.export.job import Job, opened
from ajet_tools.trace.export.trl import write_preferences

Kind = Literal["tasks", "messages", "preferences", "tokens"]
_CHUNK = 64
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Options:
    """How to convert chosen episodes to rows."""

    redact: bool = True
    need_answer: bool = False
    """Reject tasks without a known answer."""
    accept_outputs: bool = False
    """Use a liked output as the answer if no other is known."""
    per_task: int = 1
    """For messages: maximum number of episodes per task, best first; 0 means all."""
    margin: float = 0.0
    """For preferences: minimum difference of the rewards of a pair."""


@dataclass
class TraceRun:
    to: Kind
    chosen: int
    """Number of chosen episodes."""
    of: int
    """Number of episodes to choose from."""
    rows: int = 0
    rejected: list[dict[str, object]] = field(default_factory=list)
    """Rejected rows, each with a `reason`."""
    left_out: Counter[str] = field(default_factory=Counter)
    redacted: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    """Number of tasks by origin of their answer; `none` without an answer."""
    duplicates: int = 0
    """Repeated episodes of a task, or repeated pairs."""
    graded: int = 0
    usage: dict[str, Any] = field(default_factory=dict)
    """Calls, tokens and cost of the model."""
    stopped: str | None = None
    """Why no more requests were made; ungraded episodes are left out."""


def from_traces(
    sources: Sources,
    to: Kind,
    target: str | Path,
    choice: Choice | None = None,
    options: Options | None = None,
    *,
    grader: EpisodeGrader | None = None,
    progress: Progress = lambda what, done, of: None,
) -> TraceRun:
    """Writes the dataset, complete or not at all, to a path (its suffix gives the format) or `-`.

    Raises ConfigError if no row is left, FilterError, EngineError if the grader's endpoint fails
    (its cache keeps the grades).
    """
    work = _RowBuilder(sources, to, choice, options, grader, progress)
    if to == "tokens":
        return work.write_tokens(target)
    rows = {"tasks": work.tasks, "messages": work.messages, "preferences": work.preferences}[to]()
    first = next(rows, None)
    if first is None:
        raise _no_rows_error(work.made)
    with Writer(target) as writer:
        for row in chain([first], rows):
            writer.write(row)
        work.made.rows = writer.rows
    return work.made


def task_rows(
    sources: Sources,
    choice: Choice | None = None,
    options: Options | None = None,
    *,
    grader: EpisodeGrader | None = None,
) -> tuple[TraceRun, Iterator[dict[str, Any]]]:
    """Returns task rows without writing a file; `TraceRun` is complete once they are consumed."""
    work = _RowBuilder(sources, "tasks", choice, options, grader)
    return work.made, work.tasks()


def _no_rows_error(trace_run: TraceRun) -> ConfigError:
    if not trace_run.of:
        return ConfigError("this trace has no finished episodes")
    if not trace_run.chosen and trace_run.left_out:
        reasons = "; ".join(
            f"left out: {count:,} {reason}" for reason, count in trace_run.left_out.items()
        )
        return ConfigError(f"none of {trace_run.of:,} episodes is left: {reasons}")
    if not trace_run.chosen:
        return ConfigError(
            f"none of {trace_run.of:,} episodes matches; to see what does, use `ajet trace ls"
            " --filter`"
        )
    why = Counter({reason: count for reason, count in trace_run.left_out.items() if count})
    why.update(str(row["reason"]) for row in trace_run.rejected)
    reasons = "; ".join(f"{count:,} {reason}" for reason, count in why.most_common(5))
    if not reasons and trace_run.to == "preferences":
        reasons = "no two attempts at a task differ in reward, and nobody corrected an answer"
    return ConfigError(
        f"{trace_run.chosen:,} of {trace_run.of:,} episodes match but give no {trace_run.to}:"
        f" {reasons}"
    )


class _RowBuilder:
    """Builds rows from chosen and, with a rubric, graded episodes."""

    def __init__(
        self,
        sources: Sources,
        to: Kind,
        choice: Choice | None,
        options: Options | None,
        grader: EpisodeGrader | None,
        progress: Progress = lambda what, done, of: None,
    ) -> None:
        self._sources, self._choice, self._options = (
            sources,
            choice or Choice(),
            options or Options(),
        )
        self._progress = progress
        self._chosen = choose(sources.reader, self._choice)
        self.made = TraceRun(
            to, len(self._chosen.ids), self._chosen.of, left_out=Counter(self._chosen.left_out)
        )
        if not self._chosen.ids:
            raise _no_rows_error(self.made)
        self._grader = grader if grader is not None and grader.rubric is not None else None
        self._verdicts: dict[str, RowVerdict | None] = {}
        self._pool: TaskPool | None = None
        corrected = [
            id for id in self._chosen.ids if self._chosen.opinions[id].correction is not None
        ]
        groups = Job(sources.reader, corrected, self._options.redact).groups(feedback=True)
        self._corrections = Corrections.of(chain.from_iterable(groups), sources.foreign_runs)
        if grader is not None:
            asyncio.run(self._ask(grader))

    async def _ask(self, model: EpisodeGrader) -> None:
        """Makes all model requests: grades, and answers of liked outputs."""
        trace_run = self.made
        try:
            if self._grader is not None:
                await self._grade(self._grader)
            if model.values and trace_run.to == "tasks":
                self._pool = self._fill_pool()
                await self._pool.read_values(model, partial(self._progress, "reading values of"))
        finally:
            await model.endpoint.aclose()
        trace_run.stopped, trace_run.usage = model.spent, asdict(model.endpoint.budget.spent)

    async def _grade(self, grader: EpisodeGrader) -> None:
        """Grades episodes in chunks, which limits memory."""
        trace_run, of = self.made, len(self._chosen.ids)

        def count() -> None:
            trace_run.graded += 1
            self._progress("grading", trace_run.graded, of)

        groups = Job(self._sources.reader, self._chosen.ids, self._options.redact).groups(
            feedback=True
        )
        records = chain.from_iterable(groups)
        while chunk := list(islice(records, max(_CHUNK, 4 * grader.endpoint.concurrency))):
            for record, verdict in zip(
                chunk, await grader.ask_all(grader.grade, chunk, count), strict=True
            ):
                task, episode_id = record.episode.task, record.episode.episode_id
                self._verdicts[episode_id] = verdict
                if (
                    verdict is not None
                    and not verdict.ok
                    and trace_run.to in ("messages", "tokens")
                ):
                    trace_run.rejected.append(
                        rejected_row(task, episode_id, verdict.reason, verdict.as_json("rubric"))
                    )

    @property
    def kept(self) -> list[str]:
        if self._grader is None:
            return self._chosen.ids
        kept = [id for id in self._chosen.ids if (v := self._verdicts.get(id)) is not None and v.ok]
        self._count_ungraded()
        return kept

    def _count_ungraded(self) -> None:
        ungraded = sum(v is None for v in self._verdicts.values())
        self.made.left_out["episodes that were not graded: the budget is spent"] += ungraded

    def job(self, kind: type[Job], ids: Sequence[str], **more: Any) -> Any:
        progress = partial(self._progress, "reading")
        return kind(
            self._sources.reader,
            list(ids),
            self._options.redact,
            self._options.margin,
            progress,
            **more,
        )

    def count(self, job: Job) -> None:
        self.made.left_out.update({reason: n for reason, n in job.left_out.items() if n})
        self.made.redacted.update({kind: n for kind, n in job.redacted.items() if n})

    def _verdict(self, episode_id: str) -> dict[str, object] | None:
        verdict = self._verdicts.get(episode_id)
        return verdict.as_json("rubric") if verdict is not None else None

    def _split(self, episode_id: str) -> str:
        return self._chosen.splits.get(episode_id, "train")

    def _provenance(self) -> dict[str, object]:
        if self._grader is None:
            return {}
        grader = self._grader
        model = getattr(grader.endpoint, "model", None)
        parameters = {
            "temperature": grader.temperature,
            "least": grader.least,
            "rubric": grader.rubric,
        }
        return {"prompt": grader.prompt, "model": model, "parameters": parameters}

    def tasks(self) -> Iterator[dict[str, object]]:
        """Yields a row per task; with `failures`, in order of decreasing failure rate."""
        pool, trace_run = self._pool or self._fill_pool(), self.made
        self._count_ungraded()
        tried = self._chosen.tried if self._choice.failures else None
        yield from pool.rows(
            tried, need_answer=self._options.need_answer, provenance=self._provenance()
        )
        trace_run.rejected += pool.rejected
        trace_run.duplicates, trace_run.answers = pool.duplicates, pool.answered

    def _fill_pool(self) -> TaskPool:
        pool, job = TaskPool(self._corrections.disputed), self.job(Job, self._chosen.ids)
        for whole in chain.from_iterable(job.groups(feedback=True)):
            episode_id = whole.episode.episode_id
            verdict, verdict_record = self._verdicts.get(episode_id), self._verdict(episode_id)
            if self._grader is not None and verdict is None:
                continue
            foreign = whole.episode.run_id in self._sources.foreign_runs
            record, _ = self._corrections.settle(
                whole, REDACTED
            )  # a task whose answer was redacted is rejected
            tasks = list(
                traced_tasks(record, foreign=foreign, accept_output=self._options.accept_outputs)
            )
            if not tasks:
                self.made.left_out["episodes without a task"] += 1
            for traced in tasks:
                if verdict is not None and not verdict.ok:
                    pool.rejected.append(
                        rejected_row(traced.task, episode_id, verdict.reason, verdict_record)
                    )
                else:
                    pool.add(
                        traced,
                        self._chosen.failed.get(episode_id),
                        verdict_record,
                        self._split(episode_id),
                    )
        self.count(job)
        return pool

    def messages(self) -> Iterator[dict[str, object]]:
        """Yields a row per conversation of the best episodes of each task, with corrected
        replies."""
        job = self.job(
            ConversationsJob,
            sorted(self.kept, key=self._worth),
            foreign_runs=self._sources.foreign_runs,
            corrections=self._corrections,
            per_task=self._options.per_task,
            worthless=self._worthless(),
            liked=not self._choice.feedback and not self._choice.failures,
        )
        yield from self._lines(write_messages, job)
        self.made.duplicates = job.duplicates

    def _worthless(self) -> dict[str, str]:
        """Returns the chosen episodes that earned nothing; the grader's verdicts count where there
        are any."""
        if self._verdicts:
            return {}
        return worthless({id: self._chosen.rewards.get(id) for id in self._chosen.ids})

    def _worth(self, episode_id: str) -> tuple[float, ...]:
        """Sorts the best episodes first: corrected, liked, rewarded; then the oldest."""
        opinion = self._chosen.opinions[episode_id]
        liked = 0.5 if opinion.score is None else opinion.score
        return (
            -float(opinion.correction is not None),
            -liked,
            -self._chosen.rewards.get(episode_id, 0.0),
        )

    def preferences(self) -> Iterator[dict[str, object]]:
        """Yields pairs of better and worse attempts, and corrections, without repetitions."""
        scores = {
            id: v.details["score"]
            for id, v in self._verdicts.items()
            if v is not None and not v.failed
        }
        more = {
            "foreign_runs": self._sources.foreign_runs,
            "corrections": self._corrections,
            "scores": scores,
        }
        job = self.job(AttemptsJob, self._chosen.ids, **more)
        self._count_ungraded()
        seen: set[str] = set()
        for row in self._lines(write_preferences, job):
            text = json.dumps([row["prompt"], row["chosen"], row["rejected"]], sort_keys=True)
            if text in seen:
                self.made.duplicates += 1
            else:
                seen.add(text)
                yield row

    def _lines(self, write: Callable[[Job, Any], None], job: Job) -> Iterator[dict[str, object]]:
        with tempfile.SpooledTemporaryFile(max_size=32 << 20) as file:  # large exports go to disk
            write(job, file)
            self.count(job)
            file.seek(0)
            for line in file:
                row = json.loads(line)
                learnt = row["chosen"] if "chosen" in row else row["messages"]
                replies = [parts_of(m).text for m in learnt if m["role"] == "assistant"]
                if self._options.redact and any(map(has_placeholder, replies)):
                    self.made.left_out[
                        "rows with a reply of personal data or a secret, now redacted"
                    ] += 1
                    continue
                episodes = [row[name] for name in _EPISODES if row.get(name)]
                provenance = {
                    "source": "from-traces", "seeds": [row["task_id"]], "episodes": list(dict.fromkeys(episodes)),
                    "splits": sorted(set(map(self._split, episodes))), **self._provenance(),
                }  # fmt: skip
                if episodes and (verdict := self._verdict(episodes[0])) is not None:
                    provenance["verdict"] = verdict
                if isinstance(job, ConversationsJob) and row.get("episode_id") in job.corrected:
                    provenance["corrected"] = True
                yield {**row, "provenance": provenance}

    def write_tokens(self, target: str | Path) -> TraceRun:
        if str(target) == "-" or Path(target).suffix != ".parquet":
            raise ConfigError(f"--to tokens needs a .parquet file as --out (got {str(target)!r})")
        job = self.job(Job, self.kept)
        with opened(Path(target)) as file:
            tokens.write(job, file)
            self.count(job)
            if not job.rows:
                raise _no_rows_error(self.made)
        self.made.rows = job.rows
        return self.made


_EPISODES = ("episode_id", "chosen_episode_id", "rejected_episode_id")
