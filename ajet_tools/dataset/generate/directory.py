"""The output directory of `expand` and `from-docs`, and the journal of their calls.

OUT/train.jsonl        accepted rows, each with its provenance
OUT/validation.jsonl   the same, from separate seeds or documents
OUT/rejected.jsonl     refused rows, each with the reason
OUT/documents.jsonl    every document: its side and length, or the problem with it
OUT/README.md          the dataset card
OUT/.expand/           run.json (settings) and replies.sqlite (every paid reply, what became of its
                       rows, and measurements of the policy)
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ajet_sdk.engines.reply_cache import IN_MEMORY, ReplyCache
from ajet_sdk.errors import ConfigError
from ajet_sdk.secret_keys import masked
from ajet_sdk.whole_file import write_whole
from ajet_tools.dataset.card import Facts, write_card
from ajet_tools.dataset.files.blocks import Row
from ajet_tools.dataset.files.writer import Writer
from ajet_tools.dataset.generate.records import (
    Call,
    Candidate,
    GenerationResult,
    Outcome,
    Rejected,
)

FORMAT = 3
"""Version of the journal and of run.json; a run of another version is not continued."""


class Journal:
    """The calls of a run, in the reply cache: first with the reply, then with the outcome.

    The cache keeps the order of writing, so calls are read in the order of decision.
    """

    _PREFIX = "call "

    def __init__(self, cache: ReplyCache) -> None:
        self._cache = cache

    def put(self, call: Call, reply: str, outcome: Outcome | None = None) -> None:
        """Stores a call before its reply is used, and again with its outcome. Raises
        CacheError."""
        # the messages are not needed again, and `asdict` would copy every value
        texts = [json.dumps({**vars(call), "messages": ()}), reply]
        if outcome is not None:
            record = {
                "sound": [vars(candidate) for candidate in outcome.sound],
                "refuted": [vars(rejected) for rejected in outcome.refuted],
                "refused": [vars(rejected) for rejected in outcome.refused],
            }
            # seeds from Parquet may have dates, which are copied into rows
            texts.append(json.dumps(record, default=str))
        self._cache.put(f"{self._PREFIX}{call.number}", texts)

    def entries(self) -> Iterator[tuple[Call, str, Outcome | None]]:
        """Yields each call with its reply, and its outcome if it was decided."""
        for call, reply, *texts in self._cache.entries(self._PREFIX):
            outcome = None
            if texts:
                record = json.loads(texts[0])
                outcome = Outcome(
                    sound=[Candidate(**candidate) for candidate in record["sound"]],
                    refuted=[Rejected(**rejected) for rejected in record["refuted"]],
                    refused=[Rejected(**rejected) for rejected in record["refused"]],
                )
            yield Call(**json.loads(call)), reply, outcome

    def close(self) -> None:
        self._cache.close()


class Directory:
    """The output directory. Call `compare` and `begin` before the first call, `write` at the
    end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.own = path / ".expand"
        self.cache = self.own / "replies.sqlite"
        self.train = path / "train.jsonl"
        self.validation = path / "validation.jsonl"
        self._settings = self.own / "run.json"

    def replies(self, *, create: bool) -> ReplyCache:
        """Opens the cache; if there is none, creates it, or returns an empty one in memory."""
        return ReplyCache(self.cache if create or self.cache.exists() else IN_MEMORY)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Creates the directory and keeps other processes out of it. Raises ConfigError if one is
        there."""
        try:
            self.own.mkdir(parents=True, exist_ok=True)
            file = (self.own / "lock").open("w")
        except OSError as error:
            raise ConfigError(f"cannot write {self.own}: {error.strerror or error}") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigError(
                    f"another process is writing to {self.path}; wait for it, or choose another"
                    " --out"
                ) from error
            yield

    def check(self, *, resume: bool) -> None:
        """Raises ConfigError if another run's files exist."""
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"--out {self.path} is a file, but must be a directory")
        if resume:
            return
        for path in (self._settings, self.train, self.validation):
            if path.exists():
                raise ConfigError(
                    f"{path} already exists; pass --resume, or another directory with --out"
                )

    def compare(self, facts: Mapping[str, Any]) -> None:
        """Raises ConfigError, with the differences, if the settings differ from the run to resume.

        Its rows would not be those that the settings say. Only the number of rows may grow.
        """
        if not self._settings.is_file():
            return
        try:
            before: dict[str, Any] = json.loads(self._settings.read_text(encoding="utf-8"))
            if before.pop("format", None) != FORMAT:
                raise ValueError("it was written by another version of ajet")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot continue from {self._settings}: {error}; choose another directory with"
                " --out"
            ) from error
        now = json.loads(json.dumps(masked(facts, "***")))
        earlier = before["options"].get("count")
        count = now["options"].get("count")
        if earlier is not None and count is not None:
            if count < earlier:
                raise ConfigError(
                    f"--resume: the run in {self.path} has {earlier:,} rows, --count {count:,} is"
                    " fewer; use another --out"
                )
            before["options"]["count"] = count
        if changes := _changes(before, now):
            raise ConfigError(
                f"--resume: settings of {self.path} differ: {'; '.join(changes)}; pass the same, or"
                " another --out"
            )

    def begin(self, facts: Mapping[str, object]) -> None:
        """Stores the settings that the rows depend on."""
        settings = {"format": FORMAT, **masked(facts, "***")}
        text = json.dumps(settings, indent=2, ensure_ascii=False)
        try:
            self.own.mkdir(parents=True, exist_ok=True)
            write_whole(self._settings, text + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write {self.own}: {error.strerror or error}") from error

    def write(
        self,
        result: GenerationResult,
        facts: Facts,
        documents: Sequence[Mapping[str, object]] = (),
    ) -> list[Path]:
        """Writes all files, each complete; a split without rows gets none. Returns the files."""
        files: dict[Path, Sequence[Mapping[str, object]]] = {
            self.train: result.train,
            self.validation: result.validation,
            self.path / "rejected.jsonl": [each.as_row() for each in result.rejected],
            self.path / "documents.jsonl": documents,
        }
        written = []
        for path, rows in files.items():
            if not rows:
                path.unlink(missing_ok=True)
                continue
            with Writer(path) as file:
                for row in rows:
                    file.write(row)
            written.append(path)
        splits = {side.name: side.rows for side in result.sides.values() if side.rows}
        if splits:
            ended = [f"Ended early: {result.stopped}"] if result.stopped is not None else []
            facts = replace(
                facts,
                title=self.path.resolve().name,
                refused=dict(result.refused.most_common()),
                notes=[*ended, *facts.notes],
                files={name: f"{name}.jsonl" for name in splits},
            )
            written.append(write_card(self.path, splits, facts))
        return written


def digest_of(rows: Sequence[Row]) -> str:
    text = json.dumps([row.values for row in rows], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _changes(before: Mapping[str, object], now: Mapping[str, object], path: str = "") -> list[str]:
    changes = []
    for name in dict.fromkeys((*before, *now)):
        old = before.get(name)
        new = now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changes += _changes(old, new, f"{path}{name}.")
        elif old != new:
            changes.append(f"{path}{name} was {old}, is {new}")
    return changes
