"""Grades episodes with a model, by a rubric."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ajet_sdk.dialects.message_parts import parts_of
from ajet_sdk.engines.budget import BudgetSpent
from ajet_sdk.engines.client import ModelClient
from ajet_sdk.errors import ConfigError
from ajet_sdk.judges.llm import LlmJudge
from ajet_sdk.judges.llm_prompts import Material, shorten
from ajet_sdk.judges.model import JudgeModel
from ajet_tools.dataset.prompts import load
from ajet_tools.dataset.verify.judge import graded
from ajet_tools.dataset.verify.verdict import RowVerdict
from ajet_tools.trace.export.conversations import conversations
from ajet_tools.trace.queries.records import Record

_LONGEST_OUTCOME = 4_000
"""Maximum characters of an output or an error."""


def read_rubric(text: str) -> str:
    """Returns a rubric given as text or as a file. Raises ConfigError if it is empty or
    unreadable."""
    path = Path(text) if len(text) < 1000 and "\n" not in text else None
    try:
        if path is not None and path.is_file():
            text = path.read_text(encoding="utf-8")
        elif path is not None and " " not in text.strip() and path.suffix in (".md", ".txt", ".j2"):
            raise ConfigError(f"--rubric: there is no file {text}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--rubric: cannot read {path}: {error}") from error
    if not text.strip():
        raise ConfigError(
            "--rubric is empty: describe what makes an episode good, or name a file that does"
        )
    return text.strip()


@dataclass
class EpisodeGrader:
    """Grades episodes as passed in; redacted episodes reach the endpoint redacted."""

    endpoint: ModelClient
    """Closed after grading."""
    rubric: str
    least: float = 0.5
    """The score, from 0 to 1, from which an episode is good."""
    temperature: float = 0.0
    max_tokens: int = 1024
    spent: str | None = None
    """Why no more requests are made, once the budget is spent."""

    @property
    def prompt(self) -> str:
        return load("from-traces/grade").label

    async def grade_all(
        self, records: Sequence[Record], graded: Callable[[], None]
    ) -> list[RowVerdict | None]:
        """Grades each episode; returns None for those beyond the budget. Raises the endpoint's
        errors."""

        async def within_budget(record: Record) -> RowVerdict | None:
            if self.spent is not None:
                return None
            try:
                verdict = await self.grade(record)
            except BudgetSpent as error:
                self.spent = str(error)
                return None
            graded()
            return verdict

        tasks = [asyncio.ensure_future(within_budget(record)) for record in records]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def grade(self, record: Record) -> RowVerdict:
        """Grades an episode. An invalid reply is retried once; then the verdict is a failure."""
        judge = LlmJudge(
            self.rubric,
            model=JudgeModel(
                self.endpoint, temperature=self.temperature, max_tokens=self.max_tokens, retries=1
            ),
            prompt=load("from-traces/grade").render(
                rubric="{rubric}", transcript="{answer}", remarks="{reference}"
            ),
            max_score=10,
        )
        details = {"least": self.least, "prompt": self.prompt}
        return await graded(
            judge,
            Material("", _transcript(record), "\n".join(_remarks(record))),
            self.least,
            details,
        )


def _transcript(record: Record) -> str:
    episode = record.episode
    transcripts = []
    for conversation in conversations(episode):
        lines = [f"[{m.get('role', '?')}] {parts_of(m).text}" for m in conversation.messages]
        transcripts.append("\n".join(lines))
    transcript = "\n\n--- another conversation of it ---\n".join(transcripts)
    parts = [shorten(transcript or episode.task.main_query)]
    if isinstance(episode.output, str):
        parts.append(shorten(f"[output] {episode.output}", _LONGEST_OUTCOME))
    if episode.error:
        parts.append(shorten(f"It ended as {episode.status}: {episode.error}", _LONGEST_OUTCOME))
    return "\n\n".join(parts)


def _remarks(record: Record) -> list[str]:
    remarks = []
    for feedback in record.feedback:
        if feedback.score is not None:
            remarks.append(f"rated {feedback.score:g} (0 bad, 1 good)")
        if feedback.comment:
            remarks.append(feedback.comment)
        if feedback.correction:
            remarks.append(f"the right answer would have been: {feedback.correction}")
    return remarks
