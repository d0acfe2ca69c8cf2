"""Selects seeds, and draws varied examples from them for prompts."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ajet_sdk.errors import TaskError
from ajet_sdk.tasks.lineage import HELD_OUT, Descent, families, roots_of, split_named, splits_of
from ajet_sdk.tasks.questions import text_of
from ajet_sdk.tasks.task_rows import to_task
from ajet_tools.dataset.curation.schema import OURS, query_of
from ajet_tools.dataset.files.blocks import Row
from ajet_tools.dataset.files.rows import read
from ajet_tools.dataset.generate.settings import CallSettings

log = logging.getLogger("ajet.dataset")
LARGEST = 64 << 10
"""Maximum characters of a seed as JSON, since prompts contain several."""


def read_seeds(
    path: str | Path,
    *,
    mapping: dict[str, str] | None = None,
    include_validation: bool = False,
) -> list[Row]:
    """Reads the distinct seeds of a file. Raises TaskError for fewer than two, or an invalid
    seed."""
    rows = read(path, mapping=mapping)
    return select_seeds(rows, str(path), include_validation=include_validation)


def select_seeds(rows: Iterable[Row], name: str, *, include_validation: bool = False) -> list[Row]:
    """Selects the rows that are seeds: distinct, not too long, with a question, not for validation.

    The name of the source gives the split of rows without one (`test.jsonl`).
    """
    seeds: dict[str, Row] = {}
    total = held_out = 0
    for row in rows:
        total += 1
        splits = splits_of(row.values) or {split_named(name)}
        if HELD_OUT in splits:
            if not include_validation:
                held_out += 1
                continue
            # which only the name of the file may tell
            known = row.values.get("provenance")
            provenance = dict(known) if isinstance(known, dict) else {}
            provenance["splits"] = sorted(filter(None, splits))
            row = replace(row, values={**row.values, "provenance": provenance})
        _refuse_bytes(row, name)
        problem = _problem(row)
        if problem is not None:
            raise TaskError(f"{row.where} {problem}; leave it out (`ajet dataset filter`)")
        content = {k: v for k, v in row.values.items() if k not in OURS}
        seeds.setdefault(json.dumps(content, sort_keys=True, default=str), row)
    more = ""
    if held_out:
        what = f"{held_out:,} of {total:,} rows of {name} come from validation tasks"
        more = f"; {what}, which --with include_validation=true keeps"
        log.warning("%s and are left out; --with include_validation=true keeps them", what)
    if len(seeds) < 2:
        what = "has one row"
        if total == 0:
            what = "is empty"
        elif not seeds:
            what = "has no row that can be a seed"
        elif total > 1:
            what = f"has {total} rows, which are all the same"
        raise TaskError(
            f"{name} {what}{more}: a dataset grows from at least 2 different seeds, better 5 or"
            " more"
        )
    if left_out := total - len(seeds) - held_out:
        log.warning("%d of %d seeds are duplicates or were skipped", left_out, total)
    return list(seeds.values())


def _refuse_bytes(row: Row, name: str) -> None:
    binary = [column.name for column in row.schema if "binary" in str(column.type)]
    if binary:
        raise TaskError(
            f"{row.where} has bytes in {', '.join(binary)}, which a model that writes rows does"
            f' not make. Leave them out: ajet dataset filter {name} --sql "SELECT * EXCLUDE'
            f' ({", ".join(binary)}) FROM rows" -o seeds.parquet'
        )


def task_id_of(values: dict[str, object]) -> str:
    """Returns the task id of a row, ignoring provenance."""
    return to_task(Row("row", {k: v for k, v in values.items() if k != "provenance"}), {}).task_id


def as_examples(rows: Sequence[Row]) -> list[Example]:
    """Returns the rows as examples; roots that are themselves grown rows among them are replaced by
    their roots."""
    examples = [Example.of(task_id_of(row.values), row.values) for row in rows]
    roots_by_id = {example.id: example.roots for example in examples}
    return [replace(example, roots=_first_roots(example, roots_by_id)) for example in examples]


def _first_roots(example: Example, roots_by_id: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    roots: dict[str, None] = {}
    seen: set[str] = set()
    remaining = list(reversed(example.roots))
    while remaining:
        root = remaining.pop()
        further = [name for name in roots_by_id.get(root, ()) if name != root and name not in seen]
        if root in seen or not further:
            roots[root] = None
        seen.add(root)
        remaining += reversed(further)
    return tuple(roots)


def _problem(row: Row) -> str | None:
    size = len(json.dumps(row.values, ensure_ascii=False, default=str))
    if size > LARGEST:
        return (
            f"is {size:,} characters long; seeds are part of every prompt and are limited to"
            f" {LARGEST:,}"
        )
    name = query_of(row.values)
    if name is not None and not row.values[name].strip():
        return f"asks nothing: {name} is empty"
    if not text_of(row.values).strip():
        return "asks nothing: it has no text at all (name it: ajet dataset filter --map)"
    return None


_LOOKED_AT = 12
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Example:
    """A row that may be an example in a prompt, with the id of the seed or generated row."""

    id: str
    values: Mapping[str, Any]
    words: frozenset[str]
    seeds: tuple[str, ...]
    """The seeds it derives from; a seed derives from itself."""
    roots: tuple[str, ...]
    """The tasks that its family began with; a seed that was not grown begins one."""
    splits: frozenset[str] = frozenset()
    """The splits of its sources, if known."""

    @classmethod
    def of(
        cls,
        id: str,
        values: Mapping[str, Any],
        seeds: Sequence[str] | None = None,
        splits: Iterable[str] | None = None,
        roots: Sequence[str] | None = None,
    ) -> Example:
        words = frozenset(_WORD.findall(text_of(values).lower()))
        if roots is None:
            roots = sorted(roots_of(values) - {id}) or (id,)
        own_splits = splits_of(values) if splits is None else splits
        return cls(
            id,
            values,
            words,
            seeds=(id,) if seeds is None else tuple(seeds),
            roots=tuple(roots),
            splits=frozenset(own_splits),
        )


def lineage_of(examples: Sequence[Example], side: str) -> dict[str, list[str]]:
    """Returns the provenance of a row made from examples: their seeds, roots and splits, and its
    own split."""
    seeds: dict[str, None] = {}
    roots: dict[str, None] = {}
    splits = {HELD_OUT if side == "validation" else side}
    for example in examples:
        seeds.update(dict.fromkeys(example.seeds))
        roots.update(dict.fromkeys(example.roots))
        splits |= example.splits
    return {"seeds": list(seeds), "roots": list(roots), "splits": sorted(splits)}


@dataclass(kw_only=True)
class Side:
    """A side of the split: its target (None: no limit), rows and examples.

    Seeds and rows of one side are never examples on the other.
    """

    name: str
    share: float
    target: int | None
    seeds: list[Example] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    """The accepted rows, with their provenance."""
    grown: list[Example] = field(default_factory=list)
    """Sound rows as examples."""
    used: Counter[str] = field(default_factory=Counter)
    """How often each example was shown."""
    sound: int = 0
    """Number of sound rows, including those beyond the target."""
    in_flight: int = 0
    """Rows requested by calls in flight."""

    @property
    def is_full(self) -> bool:
        return self.target is not None and len(self.rows) >= self.target

    def accept(self, row: dict[str, Any]) -> None:
        """Adds a sound row, unless the side is full."""
        self.sound += 1
        if not self.is_full:
            self.rows.append(row)

    def lacks(self, rate: float) -> float:
        """Returns the rows still to request, at this acceptance rate."""
        if self.target is None:
            return math.inf
        return self.target - self.sound - rate * self.in_flight

    def progress(self, rate: float) -> float:
        """Returns present and expected rows relative to the share; the lowest side is next."""
        return (self.sound + rate * self.in_flight) / self.share

    def draw(self, count: int, chance: random.Random) -> list[Example]:
        """Draws diverse, little used examples; at least half are seeds, if there are enough."""
        grown = min(count // 2, len(self.grown))
        drawn = self._spread(self.seeds, count - grown, [], chance)
        drawn += self._spread(self.grown, grown, drawn, chance)
        chance.shuffle(drawn)
        return drawn

    def _spread(
        self,
        source: Sequence[Example],
        count: int,
        beside: Sequence[Example],
        chance: random.Random,
    ) -> list[Example]:
        """Draws examples that are unlike each other and those `beside`."""
        pool = list(source)
        if len(pool) > 3 * _LOOKED_AT:
            pool = chance.sample(pool, 3 * _LOOKED_AT)
        pool.sort(key=lambda example: (self.used[example.id], chance.random()))
        pool = pool[:_LOOKED_AT]
        drawn: list[Example] = []
        while pool and len(drawn) < count:
            shown = [*beside, *drawn]
            best = min(
                pool, key=lambda one: max((alike(one, other) for other in shown), default=0.0)
            )
            drawn.append(best)
            pool.remove(best)
        return drawn


def split_sides(
    seeds: Sequence[Example], config: CallSettings, share: float, *, of_seeds: float
) -> dict[str, Side]:
    """Returns both sides, or one if the validation share is 0; seeds are assigned by hash, families
    as a whole."""

    def order(seed: Example) -> bytes:
        return hashlib.blake2b(f"{config.seed}:{seed.id}".encode()).digest()

    held_out = _part(of_seeds, len(seeds)) if share else 0
    ids = _held_out_ids(sorted(seeds, key=order), held_out)
    if held_out > 0 and not ids:
        log.warning(
            "no validation rows are made: all seeds are of one family (provenance.roots), and a"
            " family is on one side. Make validation rows from tasks that these were not grown from"
        )
        share = 0.0
    sides = {"train": Side(name="train", share=1 - share, target=config.count)}
    if share:
        sides["validation"] = Side(name="validation", share=share, target=None)
        if config.count is not None:
            sides["validation"].target = _part(share, config.count)
            sides["train"].target = config.count - _part(share, config.count)
    for seed in seeds:
        sides["validation" if seed.id in ids else "train"].seeds.append(seed)
    return sides


def _part(share: float, total: int) -> int:
    """Returns a share of the total: at least 1, and not all."""
    return min(max(1, round(share * total)), total - 1)


def _held_out_ids(order: Sequence[Example], count: int) -> set[str]:
    """Returns the ids of the first seeds, by whole families; none if there is only one family."""
    descents = [Descent(frozenset({seed.id}), roots=frozenset(seed.roots)) for seed in order]
    members: dict[int, list[str]] = {}
    for seed, number in zip(order, families(descents), strict=True):
        members.setdefault(number, []).append(seed.id)
    # the smallest family, if even the first ones are too large
    smallest = min(members.values(), key=len, default=[])
    ids: set[str] = set()
    for family in members.values():
        if len(ids) + len(family) <= count:
            ids.update(family)
    if count and not ids and len(members) > 1:
        ids.update(smallest)
    return ids


def alike(first: Example, second: Example) -> float:
    """Returns the share of words that two examples have in common."""
    both = len(first.words & second.words)
    either = len(first.words) + len(second.words) - both
    return both / either if either else 1.0
