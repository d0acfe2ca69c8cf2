"""Exports a trace: chosen episodes in a format, with the rules of privacy, validation and feedback.

`choice` selects the episodes, `ajet_tools.trace.export` writes formats. This module holds what
applies between them: corrections take the place of replies, redacted replies are not learned,
grades and provenance are recorded, and a file appears whole or not at all.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

from ajet_sdk.dialects.message_parts import parts_of
from ajet_sdk.errors import ConfigError
from ajet_tools.dataset.files.writer import Writer
from ajet_tools.dataset.from_traces.choice import Choice, choose
from ajet_tools.dataset.from_traces.corrections import (
    REDACTED,
    Corrections,
    attempts,
    learnable,
)
from ajet_tools.dataset.from_traces.grader import EpisodeGrader
from ajet_tools.dataset.from_traces.picture_files import PictureFiles
from ajet_tools.dataset.from_traces.sources import Sources
from ajet_tools.dataset.from_traces.tasks import (
    TaskPool,
    has_placeholder,
    rejected_row,
    traced_tasks,
)
from ajet_tools.dataset.verify.verdict import RowVerdict
from ajet_tools.trace import export as formats
from ajet_tools.trace.export.job import Job, json_line, refuse_trace

Format = Literal["tasks", formats.Format]
FORMATS: tuple[Format, ...] = get_args(Format)
TRAINING: tuple[Format, ...] = (
    "tasks",
    *(name for name, writer in formats.WRITERS.items() if writer.teaches),
)
"""Training data, without validation tasks. The others are for people and other tools."""
OF_MESSAGES = tuple(name for name in TRAINING if name != "tokens")
"""The formats whose rows have messages, with their pictures."""
_CHUNK = 64
_HIDDEN = "rows with a reply of personal data or a secret, now redacted"
_EPISODES = ("episode_id", "chosen_episode_id", "rejected_episode_id")
Progress = Callable[[str, int, int], None]
HIDDEN = {"json": False}
"""Metadata of a field that is no part of the printed result."""


@dataclass(frozen=True)
class Options:
    """How to convert chosen episodes to rows."""

    redact: bool = True
    keep_pictures: bool = False
    """With `redact`: leave pictures as they are."""
    picture_files: bool = False
    """Write pictures as files beside the rows, which have their names."""
    need_answer: bool = False
    """Reject tasks without a known answer."""
    accept_outputs: bool = False
    """Use a liked output as the answer if no other is known."""
    margin: float = 0.0
    """For preferences: minimum difference of the rewards of a pair."""


@dataclass
class TraceExport:
    """What an export wrote, and what it left out and why."""

    format: Format
    chosen: int
    """Number of chosen episodes."""
    of: int
    """Number of episodes to choose from."""
    path: str = "-"
    rows: int = 0
    """JSON lines, table rows, or spans (`otlp`)."""
    episodes: int = 0
    """Number of episodes in the rows."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Rejected rows by reason."""
    rejected_rows: list[dict[str, object]] = field(default_factory=list, metadata=HIDDEN)
    """Each has a `reason`, and a `verdict` if the rubric refused it."""
    rejected_path: str | None = None
    left_out: Counter[str] = field(default_factory=Counter)
    redacted: Counter[str] = field(default_factory=Counter)
    """Redacted values by kind; repetitions in an episode count once."""
    answers: Counter[str] = field(default_factory=Counter)
    """Number of tasks by origin of their answer; `none` without an answer."""
    duplicates: int = 0
    """Repeated episodes of a task, or repeated pairs."""
    graded: int = 0
    usage: dict[str, Any] = field(default_factory=dict)
    """Calls, tokens and cost of the model."""
    stopped: str | None = None
    """Why no more requests were made; ungraded episodes are left out."""

    sources: tuple[str, ...] = ()
    imported: dict[str, str] = field(default_factory=dict)
    """Detected format of each imported file."""
    bad_rows: int = 0
    first_bad_row: str | None = None

    def reject(self, rows: Iterable[dict[str, object]]) -> None:
        for row in rows:
            self.rejected_rows.append(row)
            self.rejected["rejected by the rubric" if "verdict" in row else str(row["reason"])] += 1


def export(
    sources: Sources,
    format: Format,
    target: str | Path,
    choice: Choice | None = None,
    options: Options | None = None,
    *,
    grader: EpisodeGrader | None = None,
    progress: Progress = lambda what, done, of: None,
) -> TraceExport:
    """Writes the chosen episodes, completely or not at all, to a path or `-`.

    Raises ConfigError if no row is left, FilterError, EngineError if the grader's endpoint fails
    (its cache keeps the grades).
    """
    if str(target) != "-":
        refuse_trace(Path(target))
    work = _Export(sources, format, choice, options, grader, progress)
    work.result.path = str(target)
    if format != "tasks" and formats.WRITERS[format].whole:
        work.write_whole(target)
        return work.result
    rows = work.rows()
    if options is not None and options.picture_files:
        rows = map(PictureFiles(Path(target)).put, rows)
    first = next(rows, None)
    if first is None:
        raise _no_rows_error(work.result)
    with Writer(target) as writer:
        for row in chain([first], rows):
            writer.write(row)
        work.result.rows = writer.rows
    return work.result


def task_rows(
    sources: Sources,
    choice: Choice | None = None,
    options: Options | None = None,
    *,
    grader: EpisodeGrader | None = None,
) -> tuple[TraceExport, Iterator[dict[str, Any]]]:
    """Returns task rows without writing a file; the result is complete once they are consumed."""
    work = _Export(sources, "tasks", choice, options, grader)
    return work.result, work.rows()


def _no_rows_error(result: TraceExport) -> ConfigError:
    if not result.of:
        return ConfigError("no episode of this trace was selected; `ajet trace ls` lists them")
    why = Counter({reason: count for reason, count in result.left_out.items() if count})
    why.update(str(row["reason"]) for row in result.rejected_rows)
    reasons = "; ".join(f"{count:,} {reason}" for reason, count in why.most_common(5))
    if not result.chosen and reasons:
        return ConfigError(f"nothing to export: of {result.of:,} episodes, left out: {reasons}")
    if not result.chosen:
        return ConfigError(
            f"none of {result.of:,} episodes matches; to see what does, use `ajet trace ls"
            " --filter`"
        )
    if not reasons and result.format == "preferences":
        reasons = "no two attempts at a task differ in reward, and nobody corrected an answer"
    return ConfigError(
        f"{result.chosen:,} of {result.of:,} episodes match but give no {result.format}: {reasons}"
    )


class _Export:
    """Builds rows from chosen and, with a rubric, graded episodes."""

    def __init__(
        self,
        sources: Sources,
        format: Format,
        choice: Choice | None,
        options: Options | None,
        grader: EpisodeGrader | None,
        progress: Progress = lambda what, done, of: None,
    ) -> None:
        self._sources = sources
        self._choice = choice or Choice()
        self._options = options or Options()
        self._progress = progress
        self._grader = grader
        self._chosen = choose(
            sources.reader, self._choice, learns=format in TRAINING, copies=format == "native"
        )
        self.result = TraceExport(
            format,
            len(self._chosen.ids),
            self._chosen.of,
            left_out=Counter(self._chosen.left_out),
            sources=sources.names,
            imported=sources.formats,
        )
        if sources.imported is not None and sources.imported.bad_rows:
            self.result.bad_rows = sources.imported.bad_rows
            self.result.first_bad_row = sources.imported.problems[0]
        if not self._chosen.ids:
            raise _no_rows_error(self.result)
        self._verdicts: dict[str, RowVerdict | None] = {}
        self._corrections = self._read_corrections()
        self._corrected: set[str] = set()
        """Episodes with a corrected reply."""
        if grader is not None:
            asyncio.run(self._grade(grader))

    def _read_corrections(self) -> Corrections:
        opinions = self._chosen.opinions
        corrected = [id for id in self._chosen.ids if opinions[id].correction is not None]
        records = Job(self._sources.reader, corrected, self._options.redact).records(feedback=True)
        return Corrections.of(records, self._sources.foreign_runs)

    async def _grade(self, grader: EpisodeGrader) -> None:
        """Grades episodes in chunks, which limits memory."""
        total = len(self._chosen.ids)

        def count() -> None:
            self.result.graded += 1
            self._progress("grading", self.result.graded, total)

        job = Job(self._sources.reader, self._chosen.ids, self._options.redact)
        records = job.records(feedback=True)
        try:
            while chunk := list(islice(records, max(_CHUNK, 4 * grader.endpoint.concurrency))):
                verdicts = await grader.grade_all(chunk, count)
                for record, verdict in zip(chunk, verdicts, strict=True):
                    self._verdicts[record.episode.episode_id] = verdict
        finally:
            await grader.endpoint.aclose()
        self.result.stopped = grader.spent
        self.result.usage = asdict(grader.endpoint.budget.spent)
        ungraded = sum(verdict is None for verdict in self._verdicts.values())
        if ungraded:
            self.result.left_out["episodes that were not graded: the budget is spent"] = ungraded

    def rows(self) -> Iterator[dict[str, object]]:
        if self.result.format == "tasks":
            return self._tasks()
        if self.result.format == "preferences":
            return self._preferences()
        return self._conversations()

    def _good_ids(self) -> list[str]:
        """Returns the chosen episodes without those that the rubric refuses, which are rejected."""
        if self._grader is None:
            return self._chosen.ids
        good: list[str] = []
        refused: list[str] = []
        for episode_id in self._chosen.ids:
            verdict = self._verdicts.get(episode_id)
            if verdict is not None:
                (good if verdict.ok else refused).append(episode_id)
        for record in Job(self._sources.reader, refused, self._options.redact).records():
            verdict = self._verdicts[record.episode.episode_id]
            assert verdict is not None
            row = rejected_row(
                record.episode.task,
                record.episode.episode_id,
                verdict.reason,
                verdict.as_json("rubric"),
            )
            self.result.reject([row])
        return good

    def _job(self, ids: Sequence[str]) -> Job:
        return Job(
            reader=self._sources.reader,
            episode_ids=list(ids),
            redact=self._options.redact,
            keep_pictures=self._options.keep_pictures,
            margin=self._options.margin,
            progress=partial(self._progress, "reading"),
            trace=self._sources.path,
            keep_cut=self._choice.keeps_cut,
        )

    def _count(self, job: Job) -> None:
        self.result.left_out.update({reason: n for reason, n in job.left_out.items() if n})
        self.result.redacted.update({kind: n for kind, n in job.redacted.items() if n})
        self.result.episodes = len(job.written)

    def _verdict(self, episode_id: str) -> dict[str, object] | None:
        verdict = self._verdicts.get(episode_id)
        return verdict.as_json("rubric") if verdict is not None else None

    def _split(self, episode_id: str) -> str:
        return self._chosen.splits.get(episode_id, "train")

    def _grader_facts(self) -> dict[str, object]:
        """Returns the provenance of grades."""
        if self._grader is None:
            return {}
        parameters = {
            "temperature": self._grader.temperature,
            "least": self._grader.least,
            "rubric": self._grader.rubric,
        }
        return {
            "prompt": self._grader.prompt,
            "model": self._grader.endpoint.model,
            "parameters": parameters,
        }

    def _tasks(self) -> Iterator[dict[str, object]]:
        """Yields a row per task; with `failures`, in order of decreasing failure rate."""
        pool = self._fill_pool()
        tried = self._chosen.tried if self._choice.failures else None
        yield from pool.rows(
            tried, need_answer=self._options.need_answer, provenance=self._grader_facts()
        )
        self.result.reject(pool.rejected)
        self.result.duplicates = pool.duplicates
        self.result.answers = pool.answered

    def _fill_pool(self) -> TaskPool:
        pool = TaskPool(self._corrections.disputed)
        job = self._job(self._chosen.ids)
        for stored_record in job.records(feedback=True):
            episode_id = stored_record.episode.episode_id
            verdict = self._verdicts.get(episode_id)
            if self._grader is not None and verdict is None:
                continue
            # A task whose answer was redacted is rejected, not settled without it.
            record, _ = self._corrections.settle(stored_record, REDACTED)
            foreign = stored_record.episode.run_id in self._sources.foreign_runs
            tasks = list(
                traced_tasks(record, foreign=foreign, accept_output=self._options.accept_outputs)
            )
            if tasks:
                job.written.add(episode_id)
            else:
                job.left_out["episodes without a task"] += 1
            for traced in tasks:
                if verdict is not None and not verdict.ok:
                    row = rejected_row(
                        traced.task, episode_id, verdict.reason, verdict.as_json("rubric")
                    )
                    pool.rejected.append(row)
                else:
                    pool.add(
                        traced,
                        self._chosen.failed.get(episode_id),
                        self._verdict(episode_id),
                        self._split(episode_id),
                    )
        self._count(job)
        return pool

    def _conversations(self) -> Iterator[dict[str, object]]:
        """Yields the rows of each episode, with corrected replies."""
        job = self._job(self._good_ids())
        records = learnable(
            job,
            self._corrections,
            liked=not self._choice.takes_failures,
            # a rubric decides what is worth imitating in place of the rewards
            worthless={} if self._verdicts else self._chosen.worthless,
            corrected=self._corrected,
        )
        yield from self._learnable_rows(job, records)

    def _preferences(self) -> Iterator[dict[str, object]]:
        """Yields pairs of better and worse attempts, and corrections, without repetitions."""
        scores: dict[str, float] = {}
        for episode_id, verdict in self._verdicts.items():
            if verdict is not None and not verdict.failed:
                scores[episode_id] = verdict.details["score"]
        job = self._job(self._chosen.ids)
        groups = attempts(
            job, self._corrections, foreign_runs=self._sources.foreign_runs, scores=scores
        )
        seen: set[str] = set()
        for row in self._learnable_rows(job, groups):
            text = json.dumps([row["prompt"], row["chosen"], row["rejected"]], sort_keys=True)
            if text in seen:
                self.result.duplicates += 1
            else:
                seen.add(text)
                yield row

    def _learnable_rows(self, job: Job, records: Iterable[Any]) -> Iterator[dict[str, Any]]:
        """Yields the rows of a format without redacted replies, each with its provenance."""
        format: Any = self.result.format
        for record_row in formats.rows_of(job, format, records):
            row = json.loads(json_line(record_row))  # as it is stored
            if self._options.redact and any(map(has_placeholder, _replies_of(row))):
                self.result.left_out[_HIDDEN] += 1
            else:
                yield {**row, "provenance": self._provenance(row)}
        self._count(job)

    def _provenance(self, row: dict[str, Any]) -> dict[str, object]:
        episodes = [row[name] for name in _EPISODES if row.get(name)]
        provenance: dict[str, object] = {
            "source": "trace",
            "seeds": [row["task_id"]],
            "episodes": list(dict.fromkeys(episodes)),
            "splits": sorted(set(map(self._split, episodes))),
            **self._grader_facts(),
        }
        verdict = self._verdict(episodes[0]) if episodes else None
        if verdict is not None:
            provenance["verdict"] = verdict
        if row.get("episode_id") in self._corrected:
            provenance["corrected"] = True
        return provenance

    def write_whole(self, target: str | Path) -> None:
        to_stdout = str(target) == "-"
        if to_stdout and self.result.format == "tokens" and sys.stdout.isatty():
            raise ConfigError(
                "tokens is a binary table: write it to a file with --out, or redirect stdout"
            )
        stream: Path | BinaryIO = sys.stdout.buffer if to_stdout else Path(target)
        done = formats.export(
            self._sources.reader,
            self._good_ids(),
            self.result.format,  # type: ignore[arg-type]
            stream,
            redact=self._options.redact,
            keep_pictures=self._options.keep_pictures,
            trace=self._sources.path,
            progress=partial(self._progress, "reading"),
        )
        self.result.rows = done.rows
        self.result.episodes = done.episodes
        self.result.left_out.update(done.left_out)
        self.result.redacted.update(done.redacted)


def _replies_of(row: dict[str, Any]) -> list[str]:
    """Returns what a model would learn of a row."""
    if "conversations" in row:
        turns = row["conversations"]
        return [turn["value"] for turn in turns if turn["from"] in ("gpt", "function_call")]
    messages = row.get("chosen") or row.get("completion") or row.get("messages") or []
    return [parts_of(message).text for message in messages if message["role"] == "assistant"]
