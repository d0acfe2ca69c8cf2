"""The feedback loop: episodes of a deployed agent as tasks, messages, preference pairs or token-level data.

Formats and redaction are those of `ajet_tools.trace.export`. What is added here is the choice (feedback, failures, a
rubric), corrections in the place of what they correct, one row for each task, and where each row is from.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from ajet_sdk.errors import ConfigError
from ajet_tools.dataset.files.writer import Writer
from ajet_tools.dataset.from_traces.choice import Choice, Chosen, choose
from ajet_tools.dataset.from_traces.exports import AttemptsJob, ConversationsJob
from ajet_tools.dataset.from_traces.grader import Grader
from ajet_tools.dataset.from_traces.sources import Sources
from ajet_tools.dataset.from_traces.tasks import TaskPool, TracedTask, traced_tasks
from ajet_tools.dataset.verify.verdict import Verdict
from ajet_tools.trace.export import tokens
from ajet_tools.trace.export.job import Job, Record
from ajet_tools.trace.export.messages import write_messages
from ajet_tools.trace.export.target import opened
from ajet_tools.trace.export.trl import write_preferences

__all__ = ["KINDS", "Kind", "Options", "TraceRun", "from_traces", "task_rows"]

Kind = Literal["tasks", "messages", "preferences", "tokens"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_CHUNK = 64
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Options:
    """How rows are made of the episodes that were chosen."""

    redact: bool = True
    need_answer: bool = False
    """Tasks without a known answer are rejected."""
    accept_outputs: bool = False
    """An output that people liked is the answer of its task, where no other is known."""
    per_task: int = 1
    """Messages: so many episodes of one task at most, the best ones; 0: all."""
    margin: float = 0.0
    """Preferences: by how much the rewards of a pair must differ."""


@dataclass
class TraceRun:
    """What was made and what was not."""

    to: Kind
    chosen: int
    """Episodes that the choice left."""
    of: int
    """Episodes to choose from."""
    rows: int = 0
    rejected: list[dict[str, Any]] = field(default_factory=list)
    """Not to be learned from, each with a `reason`."""
    left_out: Counter[str] = field(default_factory=Counter)
    redacted: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    """Tasks by where their answer is from; `none` for those without."""
    duplicates: int = 0
    """Episodes of a task, or pairs, that were there already."""
    graded: int = 0
    usage: dict[str, Any] = field(default_factory=dict)
    """Calls, tokens and cost of the model that was asked."""
    stopped: str | None = None
    """Why the model was asked no more; what was not graded is left out."""


def from_traces(
    sources: Sources,
    to: Kind,
    target: str | Path,
    choice: Choice | None = None,
    options: Options | None = None,
    *,
    grader: Grader | None = None,
    progress: Progress | None = None,
) -> TraceRun:
    """Write the dataset, whole or not at all, to a path (its suffix says the format) or `-`.

    Raises ConfigError where nothing is left to write, FilterError, EndpointError where the grader's endpoint fails
    (what was graded stays in its cache).
    """
    made, rows = _begin(sources, to, choice or Choice(), options or Options(), grader, progress or _ignore)
    if to == "tokens":
        _write_tokens(target, made, rows)
        return made
    first = next(rows, None)
    if first is None:
        raise _no_rows_error(made)
    with Writer(target) as writer:
        writer.write(first)
        for row in rows:
            writer.write(row)
        made.rows = writer.rows
    return made


def task_rows(
    sources: Sources,
    choice: Choice | None = None,
    options: Options | None = None,
    *,
    grader: Grader | None = None,
    progress: Progress | None = None,
) -> tuple[TraceRun, Iterator[dict[str, Any]]]:
    """Task rows without a file; `TraceRun` is complete when they have been read."""
    return _begin(sources, "tasks", choice or Choice(), options or Options(), grader, progress or _ignore)


def _ignore(what: str, done: int, of: int) -> None:
    """Tells nobody."""


def _begin(
    sources: Sources, to: Kind, choice: Choice, options: Options, grader: Grader | None, progress: Progress
) -> tuple[TraceRun, Any]:
    if to not in KINDS:
        raise ConfigError(f"--to must be one of {', '.join(KINDS)} (got {to!r})")
    chosen = choose(sources.reader, choice)
    made = TraceRun(to, len(chosen.ids), chosen.of)
    if not chosen.ids:
        raise _no_rows_error(made)
    work = _RowBuilder(sources, chosen, choice, options, grader, made, progress)
    if grader is not None:
        asyncio.run(work.ask(grader))
    makers: dict[Kind, Callable[[], Any]] = {
        "tasks": work.tasks, "messages": work.messages, "preferences": work.preferences, "tokens": lambda: work,
    }  # fmt: skip
    return made, makers[to]()


def _no_rows_error(made: TraceRun) -> ConfigError:
    if not made.of:
        return ConfigError("this trace has no finished episodes")
    if not made.chosen:
        return ConfigError(f"none of {made.of:,} episodes matches; to see what does, use `ajet trace ls --filter`")
    why = Counter({reason: count for reason, count in made.left_out.items() if count})
    why.update(str(row["reason"]) for row in made.rejected)
    reasons = "; ".join(f"{count:,} {reason}" for reason, count in why.most_common(5))
    if not reasons and made.to == "preferences":
        reasons = "no two attempts at a task differ in reward, and nobody corrected an answer"
    return ConfigError(f"{made.chosen:,} episodes of {made.of:,} match, but none gives a row for {made.to}: {reasons}")


def _write_tokens(target: str | Path, made: TraceRun, work: _RowBuilder) -> None:
    if str(target) == "-" or Path(target).suffix != ".parquet":
        raise ConfigError(
            f"--to tokens writes a table of token ids: pass a .parquet file as --out (got {str(target)!r})"
        )
    job = work.job(Job, work.kept)
    with opened(Path(target)) as file:
        tokens.write(job, file)
        work.count(job)
        if not job.rows:
            raise _no_rows_error(made)
    made.rows = job.rows


def _rejected_row(record: Record, verdict: Verdict) -> dict[str, Any]:
    episode = record.episode
    kept = {"main_query": episode.task.main_query, "task_id": episode.task.task_id, "episode_id": episode.episode_id}
    return {**kept, "reason": verdict.reason, "verdict": verdict.as_json("rubric")}


class _RowBuilder:
    """The making of rows from episodes that were chosen and, where there is a rubric, graded."""

    def __init__(
        self,
        sources: Sources,
        chosen: Chosen,
        choice: Choice,
        options: Options,
        grader: Grader | None,
        made: TraceRun,
        progress: Progress,
    ) -> None:
        self._sources, self._chosen, self._choice, self._options = sources, chosen, choice, options
        self._made, self._progress = made, progress
        self._grader = grader if grader is not None and grader.rubric is not None else None
        self._verdicts: dict[str, Verdict | None] = {}
        self._pool: TaskPool | None = None

    async def ask(self, model: Grader) -> None:
        """All that a model is asked: grades by the rubric, and the values of outputs that people liked."""
        made = self._made
        try:
            if self._grader is not None:
                await self._grade(self._grader)
            if model.values and made.to == "tasks":
                self._pool = self._fill_pool()
                await self._pool.read_values(model, lambda *count: self._progress("reading values of", *count))
        finally:
            await model.endpoint.aclose()
        made.graded, made.stopped, made.usage = model.graded, model.spent, asdict(model.endpoint.budget.spent)

    async def _grade(self, grader: Grader) -> None:
        """Verdicts by episode; each chunk of episodes is read, redacted, graded and let go of."""
        chunk, waiting = max(_CHUNK, 4 * grader.endpoint.concurrency), list[Record]()
        for group in Job(self._sources.reader, self._chosen.ids, self._options.redact).groups(feedback=True):
            waiting += group
            if len(waiting) >= chunk:
                await self._grade_some(grader, waiting)
                waiting = []
        await self._grade_some(grader, waiting)

    async def _grade_some(self, grader: Grader, records: Sequence[Record]) -> None:
        of = len(self._chosen.ids)
        verdicts = await grader.grade_all(records, lambda _: self._progress("grading", grader.graded, of))
        for record, verdict in zip(records, verdicts, strict=True):
            self._verdicts[record.episode.episode_id] = verdict
            if verdict is not None and not verdict.ok and self._made.to in ("messages", "tokens"):
                self._made.rejected.append(_rejected_row(record, verdict))

    @property
    def kept(self) -> list[str]:
        """The episodes that are good enough."""
        if self._grader is None:
            return self._chosen.ids
        kept = [id for id in self._chosen.ids if (v := self._verdicts.get(id)) is not None and v.ok]
        self._count_ungraded()
        return kept

    def _count_ungraded(self) -> None:
        ungraded = sum(v is None for v in self._verdicts.values())
        self._made.left_out["episodes that were not graded: the budget is spent"] += ungraded

    def job(self, kind: type[Job], ids: Sequence[str], **more: Any) -> Any:
        """An export's job over some episodes."""
        told = self._progress
        return kind(
            self._sources.reader, list(ids), self._options.redact, self._options.margin,
            lambda done, of: told("reading", done, of), **more,
        )  # fmt: skip

    def count(self, job: Job) -> None:
        """Take over what a job counted."""
        self._made.left_out.update({reason: n for reason, n in job.left_out.items() if n})
        self._made.redacted.update({kind: n for kind, n in job.redacted.items() if n})

    def _verdict(self, episode_id: str) -> dict[str, Any] | None:
        verdict = self._verdicts.get(episode_id)
        return verdict.as_json("rubric") if verdict is not None else None

    def _provenance(self) -> dict[str, Any]:
        """What is the same for every row."""
        if self._grader is None:
            return {}
        grader = self._grader
        model = getattr(grader.endpoint, "model", None)
        parameters = {"temperature": grader.temperature, "least": grader.least, "rubric": grader.rubric}
        return {"prompt": grader.prompt, "model": model, "parameters": parameters}

    def tasks(self) -> Iterator[dict[str, Any]]:
        """A row for each task; with `failures` those that fail most often come first."""
        pool, made = self._pool or self._fill_pool(), self._made
        self._count_ungraded()
        tried = self._chosen.tried if self._choice.failures else None
        yield from pool.rows(tried, need_answer=self._options.need_answer, provenance=self._provenance())
        made.rejected += pool.rejected
        made.duplicates, made.answers = pool.duplicates, pool.answered

    def _fill_pool(self) -> TaskPool:
        pool, job = TaskPool(), self.job(Job, self._chosen.ids)
        for group in job.groups(feedback=True):
            for record in group:
                self._add_to_pool(record, pool)
        self.count(job)
        return pool

    def _add_to_pool(self, record: Record, pool: TaskPool) -> None:
        episode_id = record.episode.episode_id
        verdict = self._verdicts.get(episode_id)
        if self._grader is not None and verdict is None:
            return
        found: list[TracedTask] = list(
            traced_tasks(
                record,
                foreign=record.episode.run_id in self._sources.foreign_runs,
                accept_output=self._options.accept_outputs,
            )
        )
        if not found:
            self._made.left_out["episodes without a task"] += 1
        for traced in found:
            if verdict is not None and not verdict.ok:
                pool.reject(traced, verdict.reason, self._verdict(episode_id))
            else:
                pool.add(traced, self._chosen.failed.get(episode_id), self._verdict(episode_id))

    def messages(self) -> Iterator[dict[str, Any]]:
        """A row for each conversation of the best episodes of each task; a corrected reply is the person's."""
        job = self.job(
            ConversationsJob,
            sorted(self.kept, key=self._worth),
            foreign_runs=self._sources.foreign_runs,
            per_task=self._options.per_task,
            liked=not self._choice.feedback and not self._choice.failures,
        )
        yield from self._lines(write_messages, job)
        self._made.duplicates = job.duplicates

    def _worth(self, episode_id: str) -> tuple[float, ...]:
        """Sorts the best episode of a task to the front: corrected, then liked, then rewarded; of equals the oldest."""
        said = self._chosen.opinion(episode_id)
        reward = self._chosen.rewards.get(episode_id, 0.0)
        return (-float(said.correction is not None), -(0.5 if said.score is None else said.score), -reward)

    def preferences(self) -> Iterator[dict[str, Any]]:
        """Pairs of better and worse attempts of one task, and corrections; the same pair once."""
        scores = {id: v.details["score"] for id, v in self._verdicts.items() if v is not None and not v.failed}
        job = self.job(AttemptsJob, self._chosen.ids, foreign_runs=self._sources.foreign_runs, scores=scores)
        self._count_ungraded()
        seen: set[str] = set()
        for row in self._lines(write_preferences, job):
            text = json.dumps([row["prompt"], row["chosen"], row["rejected"]], sort_keys=True)
            if text in seen:
                self._made.duplicates += 1
            else:
                seen.add(text)
                yield row

    def _lines(self, write: Callable[[Job, Any], None], job: Job) -> Iterator[dict[str, Any]]:
        """What an export writes, as rows with where they are from."""
        with ExitStack() as stack:
            file = stack.enter_context(_open_spool())
            write(job, file)
            self.count(job)
            file.seek(0)
            for line in file:
                row = json.loads(line)
                episodes = [row[name] for name in _EPISODES if row.get(name)]
                provenance = {
                    "source": "from-traces", "seeds": [row["task_id"]], "episodes": list(dict.fromkeys(episodes)),
                    **self._provenance(),
                }  # fmt: skip
                if episodes and (verdict := self._verdict(episodes[0])) is not None:
                    provenance["verdict"] = verdict
                if isinstance(job, ConversationsJob) and row.get("episode_id") in job.corrected:
                    provenance["corrected"] = True
                yield {**row, "provenance": provenance}


_EPISODES = ("episode_id", "chosen_episode_id", "rejected_episode_id")


def _open_spool() -> Any:
    """Lines wait here, in memory or, where they are many, on disk, for what is known only when all are written."""
    return tempfile.SpooledTemporaryFile(max_size=32 << 20, mode="w+b")
