"""What the steps of a build made: a file of rows for each split."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ajet_sdk.errors import ConfigError, TaskError
from ajet_tools.dataset.digests import digest_of_path, digest_of_values

__all__ = ["SPLITS", "SUFFIX", "Made", "check_apart", "outputs", "splits_of_directory"]

SPLITS = ("train", "validation")
SUFFIX = {"jsonl": ".jsonl", "parquet": ".parquet", "csv": ".csv"}


@dataclass(frozen=True)
class Made:
    """The rows of a step or of a file: a path for each split."""

    name: str
    splits: Mapping[str, Path]
    outside: bool = False
    """It is of the user's, not of a step."""
    watched: tuple[Path, ...] = ()
    """The files whose content counts, where it is not that of everything there: the trace of an experiment."""

    def digests(self) -> dict[str, tuple[str, str]]:
        if self.watched:
            content = digest_of_values([digest_of_path(path) for path in self.watched])
            return dict.fromkeys(self.splits, (self.name, content))
        return {split: (self.name, digest_of_path(path)) for split, path in self.splits.items()}


def outputs(folder: Path) -> dict[str, Path]:
    """Split -> its file, in a step's directory; of a Hugging Face layout its only shard's."""
    if (folder / "hub").is_dir():
        return {split: paths[0] for split in SPLITS if (paths := sorted((folder / "hub/data").glob(f"{split}-*")))}
    candidates = [(split, folder / f"{split}{suffix}") for split in SPLITS for suffix in SUFFIX.values()]
    return {split: path for split, path in candidates if path.is_file()}


def splits_of_directory(folder: Path) -> dict[str, Path]:
    from ajet_tools.dataset.tables import splits_of

    known = splits_of(folder)
    found = {split: known[split] for split in SPLITS if split in known}
    if not found:
        raise ConfigError(f"{folder} has no split train or validation (it has {', '.join(known) or 'no data file'})")
    for split, files in found.items():
        if len(files) > 1:
            raise ConfigError(f"{folder} has {len(files)} files for {split}; name them one by one in `from`")
    return {split: files[0] for split, files in found.items()}


def check_apart(splits: Mapping[str, Path], name: str) -> None:
    """Raise TaskError where one question is asked in both splits: sources that were split apart were mixed, say."""
    if set(splits) < set(SPLITS):
        return
    held_out = {key for _, key in _asked(splits["validation"])}
    shared = [where for where, key in _asked(splits["train"]) if key in held_out]
    if shared:
        count = "1 row" if len(shared) == 1 else f"{len(shared):,} rows"
        raise TaskError(
            f"step {name} leaves {count} in training and in validation, the first: {shared[0]}. Take them out by a "
            f'further step, `decontaminate: {{eval: "{name}:validation"}}`, or split after mixing'
        )


def _asked(path: Path) -> Iterator[tuple[str, bytes]]:
    from ajet_tools.dataset.tables import read, text_of

    for row in read(path):
        text = " ".join(text_of(row.values).casefold().split())
        yield row.where, hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).digest()
