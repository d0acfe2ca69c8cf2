"""The output directory of `expand` and `from-docs`, cost estimates, and resumption.

OUT/train.jsonl        accepted rows, each with its provenance
OUT/validation.jsonl   the same, from separate seeds or documents
OUT/rejected.jsonl     refused rows, each with the reason
OUT/documents.jsonl    every document: its side and length, or the problem with it
OUT/README.md          the dataset card
OUT/.expand/           run.json (settings) and replies.sqlite (every paid reply)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ajet_sdk.errors import ConfigError
from ajet_sdk.secret_keys import masked
from ajet_sdk.whole_file import write_whole
from ajet_tools.dataset.card import Facts, write_card
from ajet_tools.dataset.files.blocks import Row
from ajet_tools.dataset.files.writer import Writer
from ajet_tools.dataset.generate.learning import LearningValue
from ajet_tools.dataset.generate.loop import Generation
from ajet_tools.dataset.generate.records import GenerationResult

ANSWER_TOKENS = 250
"""Estimated tokens of a verifier's reply."""


@dataclass(frozen=True)
class Estimate:
    """An estimate of a run's cost; cached replies cost nothing."""

    calls: int
    checks: int
    """Replies of verifying models."""
    embeddings: int
    """Requests for embeddings, of many texts each."""
    input_tokens: int
    output_tokens: int
    money: float | None
    accepted: int = 0
    """Rows from cached replies, if these were processed."""
    attempts: int = 0
    """Episodes of the policy."""

    @classmethod
    def of(cls, run: Generation[Any], value: LearningValue | None) -> Estimate:
        """Estimates the remaining work, with verification and trials."""
        left, price, checks = run.outlook(), run.endpoint.budget.price, run.checks
        rows, replied = left.calls * run.config.per_call, 0
        embeddings = (
            checks.meanings.requests(left.calls, left.seeds) if checks.meanings is not None else 0
        )
        read = left.calls * left.prompt + ((rows + left.seeds) * left.question if embeddings else 0)
        written = rows * left.row
        money = price.of(read, written) if price is not None else None
        for part in checks.verifier.parts if checks.verifier is not None else []:
            replies = rows * part.verifier.calls
            replied += replies
            read += replies * left.check
            written += replies * ANSWER_TOKENS
            if part.endpoint is not None and (part_price := part.endpoint.budget.price) is not None:
                money = (money or 0.0) + part_price.of(
                    replies * left.check, replies * ANSWER_TOKENS
                )
        attempts = rows * value.k if value is not None else 0
        return cls(
            left.calls,
            replied,
            embeddings,
            round(read),
            round(written),
            money,
            run.result.accepted,
            attempts,
        )

    def as_text(self) -> str:
        checks = f", {self.checks:,} replies to verify them" if self.checks else ""
        embeddings = f", {self.embeddings:,} requests for embeddings" if self.embeddings else ""
        attempts = f", {self.attempts:,} attempts of the policy" if self.attempts else ""
        money = "" if self.money is None else f", {self.money:.2f} in money"
        return (
            f"About {self.calls:,} calls for rows{checks}{embeddings}{attempts}: "
            f"about {self.input_tokens:,} tokens in, {self.output_tokens:,} out{money}"
        )


class Directory:
    """The output directory. Call `compare` and `begin` before the first call, `write` at the
    end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.own = path / ".expand"
        self.cache = self.own / "replies.sqlite"
        self.train, self.validation = path / "train.jsonl", path / "validation.jsonl"

    def begun(self) -> dict[str, Any] | None:
        """Returns the settings of the run to resume, or None."""
        file = self.own / "run.json"
        if not file.is_file():
            return None
        try:
            begun: dict[str, object] = json.loads(file.read_text(encoding="utf-8"))
            if "options" not in begun:
                raise ValueError("it was written by another version of ajet")
            return begun
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot continue from {file}: {error}; choose another directory with --out"
            ) from error

    def check(self, *, resume: bool) -> None:
        """Raises ConfigError if another run's files exist."""
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"--out {self.path} is a file, but must be a directory")
        there = next(
            (p for p in (self.own / "run.json", self.train, self.validation) if p.exists()), None
        )
        if there is not None and not resume:
            raise ConfigError(
                f"{there} already exists; pass --resume, or another directory with --out"
            )

    def compare(self, facts: Mapping[str, Any]) -> None:
        """Raises ConfigError, with the differences, if the settings differ from the run to resume.

        Cached replies would not fit, and calls be paid for again. Only the number of rows may grow.
        """
        before = self.begun()
        if before is None:
            return
        earlier, count = (options["options"].get("count") for options in (before, facts))
        if earlier is not None and count is not None and count < earlier:
            raise ConfigError(
                f"--resume: the run in {self.path} has {earlier:,} rows, --count {count:,} is"
                " fewer; use another --out"
            )
        more = {"count": count} if earlier is not None and count is not None else {}
        before = {**before, "options": {**before["options"], **more}}
        if changed := _describe_changes(before, json.loads(json.dumps(masked(facts, "***")))):
            raise ConfigError(
                f"--resume: settings of {self.path} differ: {'; '.join(changed)}; pass the same, or"
                " another --out"
            )

    def begin(self, facts: Mapping[str, object]) -> None:
        """Stores the settings that determine the rows."""
        try:
            self.own.mkdir(parents=True, exist_ok=True)
            write_whole(
                self.own / "run.json",
                json.dumps(masked(facts, "***"), indent=2, ensure_ascii=False) + "\n",
            )
        except OSError as error:
            raise ConfigError(f"cannot write {self.own}: {error.strerror or error}") from error


def write(
    directory: Directory,
    result: GenerationResult,
    facts: Facts,
    documents: Sequence[Mapping[str, object]] = (),
) -> list[Path]:
    """Writes all files, each complete; a split without rows gets none. Returns the files."""
    splits = {
        "train": (directory.train, result.train),
        "validation": (directory.validation, result.validation),
    }
    files: list[tuple[Path, Sequence[Mapping[str, object]]]] = [
        *splits.values(),
        (directory.path / "rejected.jsonl", [rejected.as_row() for rejected in result.rejected]),
        (directory.path / "documents.jsonl", documents),
    ]
    written = []
    for path, rows in files:
        if rows:
            with Writer(path) as file:
                for row in rows:
                    file.write(row)
            written.append(path)
        else:
            path.unlink(missing_ok=True)
    if not result.accepted:
        return written
    ended = [f"Ended early: {result.stopped}"] if result.stopped is not None else []
    card_facts = replace(
        facts,
        title=directory.path.resolve().name,
        refused=dict(result.refused.most_common()),
        coverage=result.coverage,
        notes=[*ended, *facts.notes],
        files={name: path.name for name, (path, rows) in splits.items() if rows},
    )
    written.append(
        write_card(
            directory.path, {name: rows for name, (_, rows) in splits.items() if rows}, card_facts
        )
    )
    return written


def digest_of(rows: Sequence[Row]) -> str:
    text = json.dumps([row.values for row in rows], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _describe_changes(
    before: Mapping[str, object], now: Mapping[str, object], path: str = ""
) -> list[str]:
    changes = []
    for name in dict.fromkeys((*before, *now)):
        old, new = before.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changes += _describe_changes(old, new, f"{path}{name}.")
        elif old != new:
            changes.append(f"{path}{name} was {old}, is {new}")
    return changes
