"""When two texts count as one, one at a time (`NearIndex`) and all of a file at once
(`near_pairs`)."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ajet_sdk.errors import ConfigError
from ajet_tools.dataset.similarity.grams import KEYS, postings
from ajet_tools.dataset.similarity.near import Clusters, Match, NearIndex, near_pairs
from ajet_tools.dataset.similarity.text import allowed, edits, likeness, normal, unmarked
from tests.bench.dedup import questions

WORDS = ["".join(random.Random(n).choices("etaoinshrdlu", k=2 + n % 8)) for n in range(3000)]


def sentence(draw: random.Random, length: int = 500) -> str:
    return " ".join(draw.choices(WORDS, k=length // 2))[:length]


def edited(text: str, share: float, draw: random.Random) -> str:
    chars = list(text)
    for _ in range(round(share * len(text))):
        at, how = draw.randrange(len(chars)), draw.randrange(3)
        chars[at : at + (how != 1)] = [] if how == 2 else draw.choice("abcdefgh ")
    return "".join(chars)


def distance(one: str, other: str) -> int:
    """Levenshtein's recurrence as it is written in a textbook."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        above, row = row, [i]
        for j, b in enumerate(other, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (a != b)))
    return row[-1]


@given(st.text("abc", max_size=70), st.text("abc", max_size=70), st.integers(0, 70))
@example("", "", 0)
@example("", "a", 0)
def test_edits_are_levenshtein_distance_up_to_the_limit(one: str, other: str, most: int) -> None:
    true = distance(one, other)
    expected = true if true <= most else None
    assert edits(one, other, most) == expected


def test_normal_form_forgets_case_blanks_and_forms_but_no_mathematics() -> None:
    assert normal(" What\tIS\n it?") == normal("what is it？") == "what is it?"
    assert normal("“cafe\u0301”\u200b") == normal('"café"')
    assert normal("2²") != normal("22")
    assert normal("5!") != normal("5")


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("What is 12 + 34?", "What is 12 + 35?", False),
        ("What is 12 + 34?", "What is 12 * 34?", False),
        ("What is the capital of France?", "What is the capital of Spain?", False),
        (
            "The quick brown fox jumps over the lazy dog",
            "The quick brown fox jumped over the lazy dog",
            True,
        ),
        (
            "Tom has 48 apples, gives 3 to Ann, and eats 2.",
            "Tom has 49 apples, gives 3 to Ann, and eats 2.",
            False,
        ),
        (
            "Tom has 48 apples, gives 3 to Ann, and eats 2.",
            "Tom has 48 apples, gives 3 to Anna and eats 2.",
            True,
        ),
    ],
)
def test_what_is_alike_in_short_texts(one: str, other: str, alike: bool) -> None:
    assert (likeness(normal(one), normal(other), 0.8) is not None) is alike
    near = NearIndex(0.8)
    near.add("one", one)
    assert (near.find(other) is not None) is alike


def test_a_long_text_with_other_numbers_alone_is_another_task() -> None:
    draw = random.Random(0)
    start, end = sentence(draw, 200), sentence(draw, 200)
    one, other = f"{start} 48 {end}", f"{start} 52 {end}"
    assert likeness(one, other, 0.8) is None
    near = NearIndex(0.8)
    near.add("a", one)
    assert near.find(other) is None


def test_half_a_long_text_in_common_is_not_alike_and_a_tenth_edited_is() -> None:
    draw = random.Random(1)
    start, end, third = (sentence(draw, 4000) for _ in range(3))
    assert likeness(start + end, start + third, 0.8) is None
    similarity = likeness(start + end, edited(start + end, 0.1, draw), 0.8)
    assert similarity is not None
    assert 0.85 < similarity < 0.95


@given(st.integers(1, 5000), st.floats(0.5, 1))
def test_a_longer_text_may_differ_in_no_fewer_characters(length: int, threshold: float) -> None:
    assert allowed(length, threshold) <= allowed(length + 1, threshold) + 1e-9
    assert allowed(length, threshold) <= (1 - threshold) * length + 1e-6


@given(st.lists(st.text(max_size=40), min_size=1, max_size=8), st.data())
def test_an_exact_copy_is_always_found(texts: list[str], data: st.DataObject) -> None:
    near = NearIndex()
    for index, text in enumerate(texts):
        near.add(str(index), text)
    text = data.draw(st.sampled_from(texts))
    match = near.find(f"  {text.upper() if text.isascii() else text}\n")
    first = next(str(i) for i, other in enumerate(texts) if normal(other) == normal(text))
    assert match == Match(first, 1.0, "exact")


def test_edited_copies_are_found_and_others_are_not() -> None:
    draw = random.Random(2)
    texts = [sentence(draw) for _ in range(300)]
    near = NearIndex(0.8)
    for index, text in enumerate(texts):
        near.add(str(index), text)
    matches = [near.find(edited(text, 0.1, draw)) for text in texts]
    assert sum(match is not None and match.key == str(i) for i, match in enumerate(matches)) >= 298
    assert all(
        match is None or (match.kind == "near" and 0.85 < match.similarity < 1) for match in matches
    )
    assert all(near.find(sentence(draw)) is None for _ in range(100))


def test_texts_share_as_many_keys_as_grams() -> None:
    draw = random.Random(4)
    for share in (0.02, 0.1):
        one = sentence(draw, 3000)
        other = edited(one, share, draw)
        grams = [{text[at : at + 8] for at in range(len(text) - 7)} for text in (one, other)]
        found = postings([one, other])
        keys = [set(found.keys[found.texts == number].tolist()) for number in (0, 1)]
        assert [len(each) for each in keys] == [KEYS, KEYS]
        assert abs(len(keys[0] & keys[1]) / KEYS - len(grams[0] & grams[1]) / len(grams[0])) < 0.2


def test_texts_that_repeat_themselves_are_found_too() -> None:
    texts = ["the same again " * 40, "the same again " * 39 + "the end of it"]
    assert len(list(near_pairs(texts, 0.8))) == 1


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(150, 260))
def test_texts_on_both_sides_of_the_length_at_which_numbers_tell_them_apart(
    seed: int, length: int
) -> None:
    """Short texts are looked up by their numbers too: a longer one must still be found."""
    draw = random.Random(seed)
    one = normal(sentence(draw, length))
    other = normal(edited(one, 0.04, draw))
    near = NearIndex()
    near.add("one", one)
    assert (near.find(other) is None) == (likeness(one, other, 0.8) is None)


def clusters_of(texts: list[str], **how: object) -> set[frozenset[str]]:
    clusters = Clusters(len(texts))
    for pair in near_pairs(texts, 0.8, **how):  # type: ignore[arg-type]
        clusters.join(pair.first, pair.second)
    groups: dict[int, set[str]] = {}
    for index, text in enumerate(texts):
        groups.setdefault(clusters.find(index), set()).add(text)
    return {frozenset(group) for group in groups.values()}


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.randoms(use_true_random=False))
def test_the_order_of_the_texts_does_not_change_the_clusters(
    seed: int, shuffle: random.Random
) -> None:
    draw = random.Random(seed)
    texts = []
    for _ in range(12):
        text = sentence(draw, draw.choice([60, 150, 400]))
        texts += [
            edited(text, draw.choice([0.02, 0.1, 0.18, 0.25]), draw)
            for _ in range(draw.randrange(1, 4))
        ]
    texts = sorted(set(texts))
    other = texts.copy()
    shuffle.shuffle(other)
    assert clusters_of(texts) == clusters_of(other)


@pytest.mark.slow
def test_every_pair_is_verified_and_planted_ones_are_found_though_all_share_a_preamble() -> None:
    draw = random.Random(5)
    preamble = sentence(draw, 250)
    texts = [preamble + sentence(draw, 250) for _ in range(1500)]
    texts += [edited(text, 0.1, draw) for text in texts[:100]]
    pairs = list(near_pairs(texts, 0.8))
    for pair in pairs:
        assert pair.similarity == 1 - distance(texts[pair.first], texts[pair.second]) / max(
            len(texts[pair.first]), len(texts[pair.second])
        )
    found = {(pair.first, pair.second) for pair in pairs}
    assert len(found & {(i, 1500 + i) for i in range(100)}) >= 99
    assert found <= {(i, 1500 + i) for i in range(100)}


def test_a_template_with_thousands_of_fillings_does_not_take_all_pairs() -> None:
    draw = random.Random(6)
    texts = sorted({f"Tom has {draw.randrange(9999)} apples and gives {draw.randrange(9999)} of them to his sister Ann."
                    for _ in range(3000)})  # fmt: skip
    assert not list(near_pairs([normal(text) for text in texts], 0.8))


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1000))
def test_many_at_once_are_answered_as_one_by_one(seed: int) -> None:
    draw = random.Random(seed)
    texts = [sentence(draw, draw.choice([60, 150, 400])) for _ in range(20)]
    asked = [edited(draw.choice(texts), draw.choice([0.0, 0.03, 0.1]), draw) for _ in range(20)]
    one_by_one, at_once = NearIndex(), NearIndex()
    for index, text in enumerate(texts):
        one_by_one.add(str(index), text)
        one_by_one.find(text)  # what is known by now is sorted by now
        at_once.add(str(index), text)
    assert at_once.find_all(asked) == [one_by_one.find(text) for text in asked]


def test_a_threshold_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"between 0.5 and 1 \(got 5\)"):
        NearIndex(5)


@pytest.mark.parametrize("mark", ["**{}**", "*{}*", "__{}__", "`{}`", "<b>{}</b>", "<em>{}</em>"])
def test_marks_of_emphasis_make_no_other_text(mark: str) -> None:
    chance = random.Random(0)
    texts = [
        normal(" ".join([*chance.choices(WORDS, k=9), str(number)]) + "?") for number in range(100)
    ]
    marked = []
    for text in texts:
        words = text.split()
        at = chance.randrange(len(words) - 1)
        marked.append(" ".join([*words[:at], mark.format(words[at]), *words[at + 1 :]]))
    found = {(pair.first, pair.second) for pair in near_pairs([*texts, *marked], 0.8)}
    assert found == {(place, place + 100) for place in range(100)}


def test_operators_are_no_marks_of_emphasis() -> None:
    for text in (
        "what is 2 * 3 * 4?",
        "what is 2*x*4?",
        "x**2 + y**2",
        "a < b and b > c",
        "2 ** 3 ** 4",
    ):
        assert unmarked(text) == text


@pytest.mark.slow
def test_copies_of_each_kind_are_found_and_what_only_looks_alike_is_not() -> None:
    texts, copies = questions(800, 60)
    found = {
        (pair.first, pair.second) for pair in near_pairs([normal(text) for text in texts], 0.8)
    }
    clusters = Clusters(len(texts))
    for one, other in found:
        clusters.join(one, other)
    for kind, some in copies.items():
        alike = [clusters.find(copy) == clusters.find(original) for copy, original in some.items()]
        assert sum(alike) >= 0.95 * len(alike), kind
    source = {copy: original for some in copies.values() for copy, original in some.items()}
    wrong = [pair for pair in found if source.get(pair[0], pair[0]) != source.get(pair[1], pair[1])]
    assert len(wrong) <= 0.01 * len(found)
    near = NearIndex()
    for index, text in enumerate(texts[: len(texts) - 240]):
        near.add(str(index), text)
    for kind, some in copies.items():
        matches = near.find_all([texts[copy] for copy in some])
        right = [
            match is not None and match.key == str(key)
            for match, key in zip(matches, some.values(), strict=True)
        ]
        assert sum(right) >= 0.95 * len(right), kind


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("{a} {b}", "{b} {a}", True),
        ("{a} {b}", "{a}", True),
        ("{a} {b} {c}", "{b}", False),  # a third of it
        ("{a} {b}", "{a} {c}", False),  # half of it
        ("{a} It has 17 parts. {b}", "{b} {a} It has 17 parts.", True),
        ("{a} It has 17 parts. {b}", "{b} {a} It has 18 parts.", False),
        ("{a} It has 17 parts. {b}", "{a}", True),
        ("{a}", "{a} It has 17 parts. {b}", True),
    ],
)
def test_parts_in_another_order_and_a_text_within_another_are_alike(
    one: str, other: str, alike: bool
) -> None:
    draw = random.Random(7)
    parts = {name: sentence(draw, length) for name, length in (("a", 220), ("b", 160), ("c", 160))}
    texts = [normal(text.format(**parts)) for text in (one, other)]
    assert (likeness(*texts, 0.8) is not None) is alike
    assert bool(list(near_pairs(texts, 0.8))) is alike
    assert likeness(*texts, 1.0) is None


@pytest.mark.parametrize(
    "marked",
    [
        "## What is 12 of 40?",
        "> What is 12 of 40?",
        "What is [12](https://a.org) of 40?",
        "What is ***12*** of 40?",
        "<p>What is <a href='x'>12</a> of 40?</p>",
        "```text\nWhat is 12 of 40?\n```",
        "What is ~~12~~ of&nbsp;40?",
    ],
)
def test_a_short_question_is_known_without_its_markup(marked: str) -> None:
    near = NearIndex()
    near.add("one", "What is 12 of 40?")
    assert near.find(marked) == Match("one", 1.0, "near")
    assert len(list(near_pairs([normal(marked), normal("What is 12 of 40?")], 0.8))) == 1
