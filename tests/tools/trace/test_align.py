"""Conversations side by side: what is common is common, and nothing more is."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from ajet_sdk.samples.prefixes import common_start
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.types import Episode
from ajet_tools.trace.compare.attempts import (
    ComparedAttempt,
    ComparedMessage,
    align,
    read_attempts,
    side_by_side,
)

SAID = st.builds(
    ComparedMessage,
    st.sampled_from(["user", "assistant"]),
    st.just("default"),
    st.text("ab\n ", max_size=6),
    st.just("c"),
)
TALKS = st.lists(SAID, max_size=5).map(tuple)


def attempt(
    messages: tuple[ComparedMessage, ...], ids: list[int] | None = None, name: str = "e"
) -> ComparedAttempt:
    timelines = () if ids is None else (np.array(ids, np.int32),)
    return ComparedAttempt(
        Episode(episode_id=name),
        status="succeeded",
        advantage=None,
        recomputed=False,
        sampled=0,
        trained=0,
        messages=messages,
        timelines=timelines,
        homes={} if ids is None else {"c": 0},
    )


@given(TALKS, TALKS, TALKS)
def test_the_common_prefix_is_common_and_the_longest(before: Any, a: Any, b: Any) -> None:
    one, two = attempt(before + a), attempt(before + b)
    parted = align(one, two)
    if parted is None:
        assert one.messages == two.messages
        return
    m, c = parted.message, parted.character
    assert m >= len(before) or one.messages != two.messages
    assert one.messages[:m] == two.messages[:m]
    x, y = one.messages[m : m + 1], two.messages[m : m + 1]
    assert x != y
    if x and y:
        assert x[0].text[:c] == y[0].text[:c]
        if x[0].role == y[0].role:
            assert x[0].text[c : c + 1] != y[0].text[c : c + 1]
        else:
            assert c == 0
    assert align(two, one) == parted, "neither is before the other"


@given(st.text("ab", max_size=40), st.text("ab", max_size=40), st.text("ab", max_size=40))
def test_common_start_is_the_longest_common_beginning(before: str, a: str, b: str) -> None:
    n = common_start(before + a, before + b)
    x, y = before + a, before + b
    assert n >= len(before) and x[:n] == y[:n] and (n == min(len(x), len(y)) or x[n] != y[n])


@given(st.lists(st.integers(0, 3), max_size=8), st.lists(st.integers(0, 3), max_size=8))
def test_the_first_differing_token_of_the_timelines(a: list[int], b: list[int]) -> None:
    parted = align(
        attempt((ComparedMessage("user", "", "x", "c"),), a),
        attempt((ComparedMessage("user", "", "y", "c"),), b),
    )
    assert parted is not None and parted.timeline == 0 and parted.token is not None
    n = parted.token
    assert a[:n] == b[:n] and (n == min(len(a), len(b)) or a[n] != b[n])


@given(TALKS, TALKS, st.integers(4, 30))
def test_columns_hold_every_word_and_mark_the_first_difference(
    left: Any, right: Any, width: int
) -> None:
    attempts = [attempt(left, name="a"), attempt(right, name="b")]
    layout = side_by_side(*attempts, width)
    for column, one in enumerate(attempts):
        cells = [line[column] for line in layout.lines]
        assert all(sum(cell_len(text) for text, _ in cell) <= max(width, 20) for cell in cells)
        ours = "".join(
            text for cell in cells for text, kind in cell if kind in ("same", "differs", "after")
        )
        for gone in ("(ends here)", " (differs)"):
            ours = ours.replace(gone, "")
        assert ours.replace(" ", "") == "".join(m.text for m in one.messages).replace(
            "\n", ""
        ).replace(" ", "")
    marked = [
        number
        for number, cells in enumerate(layout.lines)
        if any(kind == "differs" for cell in cells for _, kind in cell)
    ]
    assert bool(marked) == (align(*attempts) is not None)
    assert layout.first_difference == (marked[0] if marked else None)


def test_a_message_of_megabytes_is_compared_whole_and_shown_around_its_difference() -> None:
    long = "same words " * 1_000_000
    one = attempt((ComparedMessage("user", "", long + "left", "c"),))
    two = attempt((ComparedMessage("user", "", long + "right " + long, "c"),))
    parted = align(one, two)
    assert parted is not None and parted.character == len(long)
    made = side_by_side(one, two, 40)
    assert len(made.lines) < 600
    shown = [(text, kind) for line in made.lines for text, kind in line[1]]
    assert ("right ", "differs") in [(text, kind) for text, kind in shown] or (
        "right",
        "differs",
    ) in shown
    assert any("characters alike" in text for text, _ in shown) or any(
        "alike" in text for text, _ in shown
    )


def test_attempts_as_the_trace_has_them(token_trace: Any) -> None:
    good, bad, running = read_attempts(open_trace(token_trace.file), ["good", "bad", "running"])
    assert [m.text for m in good.messages] == ["Café?", "Let me see.", "Well?", "Très bien."]
    assert [m.role for m in good.messages] == ["user", "assistant", "user", "assistant"]
    assert (
        good.episode.reward == 1.0
        and good.advantage == 0.5
        and not good.recomputed
        and good.trained == good.sampled
    )
    assert (
        bad.advantage is not None
        and bad.advantage < 0
        and bad.recomputed
        and bad.trained < bad.sampled
    )
    assert running.status == "running" and running.advantage is None
    parted = align(good, bad)
    assert parted is not None and (parted.message, parted.character) == (1, len("Let me "))
    assert parted.timeline == 0 and parted.token is not None
    assert bad.timelines[0][parted.token] == ord("g") and good.timelines[0][parted.token] == ord(
        "s"
    )
