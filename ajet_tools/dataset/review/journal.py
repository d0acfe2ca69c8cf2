"""Stores a person's decisions on a dataset's rows as they are made."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ajet_sdk.errors import ConfigError
from ajet_sdk.whole_file import write_whole
from ajet_tools.dataset.files.blocks import json_line

Mark = Literal["accepted", "rejected"]


@dataclass(frozen=True)
class Decision:
    """A decision on a row: a mark, and its values if they were edited."""

    mark: Mark | None = None
    values: Mapping[str, object] | None = None

    def __bool__(self) -> bool:
        return self.mark is not None or self.values is not None


@dataclass(frozen=True)
class Sample:
    """A random sample of rows: ordered by a hash of the seed and the row, up to and including
    `last`.

    The sample is stable when other rows are removed, and a larger sample starts with it.
    """

    seed: int
    last: int

    @staticmethod
    def place(seed: int, values: Mapping[str, object]) -> int:
        """Returns a row's position in the order, ignoring the reason of a rejection, which `save`
        may rewrite."""
        line = json_line({name: value for name, value in values.items() if name != "rejected"})
        return int.from_bytes(
            hashlib.blake2b(line, digest_size=8, key=b"%d" % seed).digest(), "big"
        )

    def find(self, values: Mapping[str, object]) -> int | None:
        """Returns the position of a row in the sample, or None."""
        place = self.place(self.seed, values)
        return place if place <= self.last else None


def digest_of_line(line: bytes) -> str:
    """Returns a digest that identifies a row in its file."""
    return hashlib.blake2b(line, digest_size=8).hexdigest()


def journal_beside(source: str) -> Path:
    """Returns `.tasks.jsonl.review.jsonl` for `tasks.jsonl`, `.SPLIT.review.jsonl` in a directory;
    readers skip it."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path / ".train.review.jsonl"
    folder, colon, split = source.rpartition(":")
    if colon and Path(folder).expanduser().is_dir():
        return Path(folder).expanduser() / f".{split}.review.jsonl"
    return path.with_name(f".{path.name}.review.jsonl")


class Journal:
    """A file with a line per decision: the row's number, its digest, and the decision."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sample: Sample | None = None
        """The random sample under review; known after reading."""

    def read(self) -> dict[tuple[int, str], Decision]:
        """Returns the last decision on each row, by number and digest. Raises ConfigError for an
        invalid file."""
        decisions: dict[tuple[int, str], Decision] = {}
        for number, digest, decision in self._read_entries():
            decisions.pop((number, digest), None)
            if decision:
                decisions[number, digest] = decision
        return decisions

    def _read_entries(self) -> Iterator[tuple[int, str, Decision]]:
        for at, line in enumerate(self._whole_lines(), 1):
            try:
                entry = json.loads(line)
                if "sample" in entry:
                    self.sample = Sample(int(entry["sample"]["seed"]), int(entry["sample"]["last"]))
                    continue
                yield int(entry["row"]), str(entry["of"]), Decision(entry["mark"], entry["values"])
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"{self.path} line {at} was not written by `ajet dataset view`; move it away"
                ) from error

    def _whole_lines(self) -> list[bytes]:
        """Returns the complete lines, and truncates the file after them."""
        try:
            text = self.path.read_bytes() if self.path.exists() else b""
            whole = text[: text.rfind(b"\n") + 1]
            if len(whole) < len(text):
                os.truncate(self.path, len(whole))
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error.strerror or error}") from error
        return whole.splitlines()

    def add(
        self, decisions: Mapping[int, tuple[str, Decision]], sample: Sample | None = None
    ) -> None:
        """Appends decisions: row number -> digest and decision."""
        lines = [
            self._line(number, digest, decision) for number, (digest, decision) in decisions.items()
        ]
        if sample not in (None, self.sample):
            self.sample = sample
            lines = [*self._sample_lines(), *lines]
        text = b"".join(lines)
        try:
            with self.path.open("ab") as file:
                file.write(text)
        except OSError as error:
            raise self._write_error(error) from error

    def replace(self, decisions: Mapping[int, tuple[str, Decision]]) -> None:
        """Replaces all decisions; without any, deletes the file."""
        try:
            if not decisions and self.sample is None:
                self.path.unlink(missing_ok=True)
                return
            lines = [
                *self._sample_lines(),
                *(self._line(number, *rest) for number, rest in decisions.items()),
            ]
            write_whole(self.path, b"".join(lines))
        except OSError as error:
            raise self._write_error(error) from error

    def _sample_lines(self) -> list[bytes]:
        return [json_line({"sample": vars(self.sample)})] if self.sample is not None else []

    @staticmethod
    def _line(number: int, digest: str, decision: Decision) -> bytes:
        return json_line(
            {"row": number, "of": digest, "mark": decision.mark, "values": decision.values}
        )

    def _write_error(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"cannot store decisions in {self.path}: {error.strerror or error}. They are lost"
            " unless saved"
        )
