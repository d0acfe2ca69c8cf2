"""Mixing datasets in shares."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from ajet_sdk.errors import ConfigError, TaskError
from ajet_tools.dataset.curation import combine as mix


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    made = []
    for name, size in (("a", 100), ("b", 40)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(
            "".join(json.dumps({"main_query": f"{name}{i}"}) + "\n" for i in range(size))
        )
        made.append(str(path))
    return made


def mixed(
    files: list[str], weights: tuple[float, ...], total: int | None = None, **options: object
) -> list[str]:
    repeat = bool(options.pop("repeat", False))
    shares = mix.plan(
        [mix.MixPart(f, w) for f, w in zip(files, weights, strict=True)], total, repeat=repeat
    )
    return [
        row.values["main_query"] for block in mix.blocks(shares, **options) for row in block.rows()
    ]  # type: ignore[arg-type]


def test_a_mix_is_as_large_as_its_weights_allow_and_repeats_no_row(files: list[str]) -> None:
    found = mixed(files, (1, 1))
    assert Counter(text[0] for text in found) == {"a": 40, "b": 40}
    assert len(set(found)) == 80


def test_sources_are_interleaved_and_keep_their_order(files: list[str]) -> None:
    found = mixed(files, (3, 1), 100)
    assert Counter(text[0] for text in found) == {"a": 75, "b": 25}
    for name in "ab":
        numbers = [int(text[1:]) for text in found if text[0] == name]
        assert numbers == sorted(numbers)
    assert "b" in "".join(text[0] for text in found[:20]) and "b" in "".join(
        text[0] for text in found[-20:]
    )


@pytest.mark.slow
def test_each_row_has_the_same_chance(files: list[str]) -> None:
    drawn = Counter(text for seed in range(200) for text in mixed(files, (1, 1), 20, seed=seed))
    counts = [drawn[f"a{i}"] for i in range(100)]
    assert sum(counts) == 2000
    assert min(counts) >= 5 and max(counts) <= 40, "binomial, mean 20"


def test_the_same_seed_gives_the_same_mix(files: list[str]) -> None:
    assert (
        mixed(files, (1, 1), 30, seed=3)
        == mixed(files, (1, 1), 30, seed=3)
        != mixed(files, (1, 1), 30, seed=4)
    )


def test_rows_come_again_only_where_that_is_asked_for(files: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"b.jsonl has 40 rows, the mix needs 100: ask for 80"):
        mixed(files, (1, 1), 200)
    found = Counter(mixed(files, (1, 1), 200, repeat=True))
    assert sum(n for text, n in found.items() if text[0] == "b") == 100
    assert {n for text, n in found.items() if text[0] == "b"} == {2, 3}


def test_shares_add_up_to_the_rows_asked_for(files: list[str]) -> None:
    third = str(Path(files[0]).with_name("c.jsonl"))
    Path(third).write_text('{"main_query": "c"}\n' * 50)
    shares = mix.plan([mix.MixPart(f, 1) for f in (*files, third)], 100)
    assert sorted(share.take for share in shares) == [33, 33, 34]


def test_weights_are_read_of_the_arguments() -> None:
    assert mix.parse_part("a=b.jsonl=0.5") == mix.MixPart("a=b.jsonl", 0.5)
    assert mix.parse_part("a.jsonl") == mix.MixPart("a.jsonl", 1)
    for wrong in ("a.jsonl=0", "a.jsonl=-1", "a.jsonl=nan"):
        with pytest.raises(ConfigError, match="a weight must be a number above 0"):
            mix.parse_part(wrong)


def test_what_cannot_be_mixed_is_said(tmp_path: Path, files: list[str]) -> None:
    with pytest.raises(ConfigError, match="stdin"):
        mix.plan([mix.MixPart("-", 1)])
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(TaskError, match="has no rows"):
        mix.plan([mix.MixPart(str(empty), 1)])
