"""Timelines token by token: the text, the mask and the values stand where they belong."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk.engines.scripted import ByteTokenizer
from ajet_sdk.errors import ConfigError, QueryError
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import OUTCOMES, Call, Episode, LedgerEntry, Reward, Run, Trained
from ajet_tools.trace.decoding import shown, spell, token_text, vocabulary
from ajet_tools.trace.queries.episodes import attempts_of
from ajet_tools.trace.queries.records import Record, recomputed_advantages
from ajet_tools.trace.tokens.colors import SHADINGS, shade
from ajet_tools.trace.tokens.facts import (
    facts_of,
    find_tokens,
    fork_words,
    lowest,
    next_place,
    next_ranked,
    why,
    widest_gaps,
)
from ajet_tools.trace.tokens.layout import labels, lay_out
from ajet_tools.trace.tokens.view import TokenView, episode_tokens, open_tokens, timeline_view

PIECES = st.lists(
    st.binary(max_size=5) | st.text(max_size=3).map(lambda t: t.encode("utf-8", "surrogatepass"))
)


@given(PIECES)
def test_the_texts_of_the_tokens_joined_are_the_text_of_all_bytes(pieces: list[bytes]) -> None:
    spelled = spell(pieces)
    joined = b"".join(pieces)
    assert "".join(spelled.of(i) for i in range(len(pieces))) == spelled.text
    assert spelled.text.encode(errors="surrogateescape") == joined
    if "\ufffd" not in joined.decode(errors="replace"):
        assert spelled.text == joined.decode()


@given(st.text(max_size=12), st.data())
def test_a_character_stands_once_where_its_first_byte_does(text: str, data: Any) -> None:
    text = text.encode(errors="ignore").decode()
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    bounds = [0, *cuts, len(raw)]
    spelled = spell([raw[a:b] for a, b in itertools.pairwise(bounds)])
    at = 0
    for place, character in enumerate(text):
        token = spelled.token_at(place)
        assert bounds[token] <= at < bounds[token + 1], "the token that has the first byte"
        at += len(character.encode())
    for token, piece in enumerate(spelled.pieces):
        assert spelled.of(spelled.holder(token)) or not piece, (
            "the cursor has something to stand on"
        )


def test_hostile_text_is_spelled_out() -> None:
    said = shown("a\x1b[1m\r\u202e\u200d\udcff\ufe0fé漢")
    assert said == "a\\x1b[1m\\x0d\\u202e\\u200d\\xff\\ufe0fé漢"


TURNS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 4), st.booleans(), st.booleans()),
    min_size=1,
    max_size=6,
)


@given(TURNS, st.data())
def test_masked_in_tokens_are_the_sampled_ones_once_and_values_stand_at_their_tokens(
    turns: Any, data: Any
) -> None:
    calls: list[Call] = []
    said: list[list[int]] = [[1]]
    for i, (asked, answered, trainable, breaks) in enumerate(turns):
        before = data.draw(st.sampled_from(said)) if breaks else said[-1]
        prompt = [*before, *([2] * asked)]
        output = [100 + 10 * i + k for k in range(answered)]
        logprobs = [-float(o) for o in output]
        more = {"trainable": trainable, "policy_version": i, "index": i, "logprobs": logprobs}
        calls.append(
            Call(call_id=f"c{i}", episode_id="e", prompt_ids=prompt, output_ids=output, **more)
        )
        said.append([*prompt, *output])
    cut = {
        c.call_id: data.draw(st.integers(0, len(c.output_ids)))
        for c in calls
        if c.output_ids is not None
    }
    tokens = episode_tokens(record_with(calls, cut), step_version=9)
    seen: list[int] = []
    for index in range(len(tokens)):
        view = timeline_view(tokens, index)
        seen += view.ids[view.mask].tolist()
        for place in np.flatnonzero(view.sampled).tolist():
            token = int(view.ids[place])
            number = (token - 100) // 10
            assert view.sampler[place] == -token and view.version[place] == number
            assert view.staleness[place] == 9 - number
            call = view.turns[view.turn[place]].call
            assert call.call_id == f"c{number}"
            kept = token - 100 - 10 * number < cut[call.call_id]
            assert OUTCOMES[view.outcome[place]] == ("trained" if kept else "truncated")
            assert view.trainer[place] == -token - 1
            assert view.mask[place] == (call.trainable and view.turns[view.turn[place]].is_home)
            if not view.turns[view.turn[place]].is_home:
                assert np.isnan(view.advantage[place])
                home = view.turns[view.turn[place]].home
                assert home != index and token in timeline_view(tokens, home).ids
            if view.mask[place]:
                assert view.advantage[place] == token
                assert why(view, place).startswith("trained" if kept else "not trained")
        prompts = ~view.sampled
        assert np.isnan(view.sampler[prompts]).all() and (view.outcome[prompts] == -1).all()
        assert not view.mask[prompts].any()
        for name in SHADINGS:
            codes = shade(view, name).of
            assert (codes[prompts] == 0).all() and (codes[view.sampled] > 0).all()
    assert sorted(seen) == sorted(int(o) for c in calls if c.trainable for o in c.output_ids)  # type: ignore[union-attr]


def record_with(calls: list[Call], cut: dict[str, int]) -> Record:
    of: dict[str, Any] = {"run_id": "", "step": 0, "episode_id": "e"}
    parts = (("trained", lambda c: cut[c.call_id]), ("truncated", lambda c: 99))
    return Record(
        Episode(episode_id="e", calls=tuple(calls)),
        ledger=tuple(
            LedgerEntry(call_id=c.call_id, outcome=o, tokens=n(c), **of)
            for c in calls
            for o, n in parts
        ),
        trained=tuple(
            Trained(
                call_id=c.call_id,
                advantages=c.output_ids.astype(np.float32),
                logprobs=-c.output_ids.astype(np.float32) - 1,
                entropy=c.logprobs,
                **of,
            )
            for c in calls
            if c.output_ids is not None and c.logprobs is not None
        ),
    )


def view_of(trace: Any, name: str, index: int = 0) -> TokenView:
    reader = open_trace(trace.file)
    opened = open_tokens(reader, name)
    assert not opened.why_ids
    return timeline_view(opened, index)


def test_a_trained_timeline_as_it_was_recorded(token_trace: Any) -> None:
    view = view_of(token_trace, "good")
    assert view.spelled is not None
    bytes_of = ByteTokenizer()
    assert view.spelled.text == bytes_of.decode(view.ids.tolist())
    assert view.spelled.text.count("Café?") == 1 and "Très bien." in view.spelled.text
    trained = view.spelled.text[view.spelled.starts[view.span_starts[0]] :]
    assert trained.startswith("Let me see.")
    assert len(view.span_starts) == 2 and not view.unknown_advantages and not view.recomputed
    assert (
        set(view.advantage[view.mask].tolist()) == {0.5}
        and np.isnan(view.advantage[~view.mask]).all()
    )
    assert view.step_version == 4 and set(view.staleness[view.mask].tolist()) == {0}
    token = int(view.span_starts[1])
    facts = dict(fact for line in facts_of(view, token) for fact in line)
    assert facts["bytes"] == "54" and facts["text"] == "“T”" and facts["advantage"] == "+0.5"
    assert (
        facts["call"] == "1 g2"
        and facts["version"] == "4 (current)"
        and facts["sampled"] == "masked in"
    )
    accent = find_tokens(view, "è")[0]
    assert dict(facts_of(view, accent)[0])["bytes"] == "c3"
    assert dict(facts_of(view, accent + 1)[0])["text"] == f"goes on with “è” of token {accent}"


def test_each_token_says_from_where_its_rewards_came(token_trace: Any) -> None:
    view = view_of(token_trace, "good")
    first, second = (int(place) for place in view.span_starts)
    calls = [view.turns[view.turn[place]].call for place in (first, second)]
    rewards = (
        Reward(name="won", value=1),
        Reward(name="style", value=0.25, weight=0.5, agent=calls[0].agent),
        Reward(name="choice", value=-1, call_id=calls[1].call_id),
        Reward(name="choice", value=3, agent="somebody else"),
    )
    view = replace(view, episode=view.episode.model_copy(update={"rewards": rewards}))

    def said(place: int) -> dict[str, str]:
        return dict(facts_of(view, place)[2])

    shared = {
        "reward won": "1 of the episode",
        "reward style": f"0.25 × 0.5 of agent {calls[0].agent}",
    }
    assert said(first) == shared
    assert said(second) == {**shared, "reward choice": "-1 of this call"}
    assert said(0) == {}, "a prompt is not trained"
    for place in (first, second):
        call = view.turns[view.turn[place]].call
        assert len(said(place)) == len(view.episode.rewards_for(call.agent, call.call_id))
    view = replace(view, episode=view.episode.model_copy(update={"rewards": rewards[:1] * 9}))
    assert facts_of(view, first)[2][-1] == ("and", "3 rewards more")


def test_a_fork_a_cut_tail_and_a_stale_call(token_trace: Any) -> None:
    first, second = view_of(token_trace, "bad", 0), view_of(token_trace, "bad", 1)
    assert [fork.opens for fork in second.forks] == [True] and [
        fork.opens for fork in first.forks
    ] == [False]
    at = second.forks[0].at
    assert first.ids[:at].tolist() == second.ids[:at].tolist() and first.ids[at] != second.ids[at]
    assert "this timeline left timeline 1" in fork_words(second.forks[0])
    last = int(np.flatnonzero(first.mask)[-1])
    assert why(first, last) == "not trained: it is beyond the maximum length of a training sequence"
    assert why(second, int(second.span_starts[0])).startswith(
        "not trained: it is older than rollout.max_staleness"
    )
    assert set(second.staleness[second.mask].tolist()) == {1}
    assert why(first, 0).startswith("prompt:")


def test_advantages_that_were_not_recorded_are_recomputed_and_say_so(token_trace: Any) -> None:
    reader = open_trace(token_trace.file)
    assert attempts_of(reader, "bad") == ["good", "bad"]
    view = view_of(token_trace, "bad")
    assert view.unknown_advantages and "was not recorded" in why(view, int(view.span_starts[0]))
    values = recomputed_advantages(reader, "bad")
    again = view.with_advantages(values)
    known = np.isfinite(again.advantage)
    assert known.any() and (again.outcome[known] == OUTCOMES.index("trained")).all()
    assert again.advantage[known].max() < 0, "the worse of two"
    assert "recomputed from its group" in why(again, int(view.span_starts[0]))
    assert not again.unknown_advantages
    assert recomputed_advantages(reader, "hostile") == {}


def test_a_running_episode_one_without_ids_and_one_without_calls(token_trace: Any) -> None:
    reader = open_trace(token_trace.file)
    running = open_tokens(reader, "running")
    view = timeline_view(running, 0)
    assert not running.record.ended and why(view, len(view) - 1).startswith("not booked yet")
    assert len(open_tokens(reader, "blind")) == 0 and open_tokens(reader, "blind").without_ids == 1
    assert len(open_tokens(reader, "mute")) == 0
    with pytest.raises(QueryError, match="no episode nothing"):
        open_tokens(reader, "nothing")


def test_jumps(token_trace: Any) -> None:
    view = view_of(token_trace, "good")
    ranked = lowest(view)
    assert view.sampler[ranked[0]] == np.nanmin(view.sampler) and all(view.mask[ranked])
    assert np.all(np.diff(view.sampler[ranked]) >= 0)
    gaps = np.abs(view.gap)[widest_gaps(view)]
    assert np.all(np.diff(gaps) <= 0) and len(gaps) == view.mask.sum()
    assert next_ranked(ranked, -1) == ranked[0] and next_ranked(ranked, ranked[0]) == ranked[1]
    assert next_ranked(ranked, ranked[0], back=True) == ranked[-1] and next_ranked([], 3) is None
    assert (
        next_place([3, 9], 3) == 9
        and next_place([3, 9], 9) == 3
        and next_place([3, 9], 3, back=True) == 9
    )
    assert view.spelled is not None and view.spelled.of(find_tokens(view, "WELL")[0]) == "W"
    assert find_tokens(view, "") == [] and find_tokens(view, "nowhere") == []
    ids = timeline_view(replace(open_tokens(open_trace(token_trace.file), "good"), known=None), 0)
    assert (
        find_tokens(ids, "257") == np.flatnonzero(ids.ids == 257).tolist()
        and labels(ids)[0] == "256 "
    )


@given(
    st.lists(st.text(alphabet="ab 漢é\n⏎👍", max_size=9), min_size=1, max_size=30),
    st.integers(1, 12),
)
def test_no_line_is_wider_than_the_width_and_nothing_is_lost(tokens: list[str], width: int) -> None:
    from rich.cells import cell_len

    made = lay_out(tokens, width, forks={0})
    text = "".join(text for line in made.lines for _, text, _ in line)
    assert text == "◆" + "".join(tokens).replace("\n", "")
    for number, line in enumerate(made.lines):
        cells = sum(cells for _, _, cells in line)
        assert cells <= max(width, 2) and cells == sum(cell_len(text) for _, text, _ in line)
        place = 0
        for token, _, size in line:
            if made.line_of[token] == number and size:
                assert made.token_at(number, made.cell_of(token)) in {t for t, _, _ in line}
            place += size
    for token, label in enumerate(tokens):
        if label:
            assert token in {t for t, _, _ in made.lines[made.line_of[token]]} or label.startswith(
                "\n"
            )


def tokenizer_file(directory: Path, kind: str) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if kind == "byte level":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        letters = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=letters
        )
        made.train_from_iterator(["Très bien, 漢字 and a naïve café"] * 9, trainer)
    else:
        pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "▁a", "é"]
        made = Tokenizer(
            models.BPE({p: i for i, p in enumerate(pieces)}, [("▁", "a")], byte_fallback=True)
        )
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    directory.mkdir(parents=True, exist_ok=True)
    made.save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_the_bytes_of_tokens_joined_are_the_text_that_was_encoded(
    kind: str, tmp_path: Path, token_trace: Any
) -> None:
    from tokenizers import Tokenizer

    directory = tokenizer_file(tmp_path / "model", kind)
    known = vocabulary(open_trace(token_trace.file), "run", directory)
    text = " a naïve 漢字 é👍 a"
    ids = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text).ids
    spelled = token_text(ids, known)
    assert spelled.text == text == known.decode(ids)
    assert any(not spelled.of(i) for i in range(len(ids))), "some character spans several tokens"
    assert known.token_bytes(9_999) == b"" and known.token_bytes(-1) == b""
    assert known.is_special(0) == (kind == "byte level")


def test_where_a_tokenizer_is_looked_for_and_what_is_said_where_there_is_none(
    tmp_path: Path,
) -> None:
    experiment = tmp_path / "launcher_record" / "math"
    config = {"ajet": {"model": {"path": "./models/tiny"}}}
    with TraceWriter(experiment / "trace.duckdb") as writer:
        writer.put(Run(run_id="r", config=config), Run(run_id="plain"))
        writer.put(
            Call(call_id="c", episode_id="e", prompt_ids=[1], output_ids=[2], logprobs=[-1.0])
        )
        writer.put(Episode(episode_id="e", run_id="r"))
    reader = open_trace(experiment)
    with pytest.raises(ConfigError, match=r"model.path ./models/tiny is not a directory here"):
        vocabulary(reader, "r")
    with pytest.raises(ConfigError, match=r"names no model\.path"):
        vocabulary(reader, "plain")
    with pytest.raises(ConfigError, match="there is no tokenizer in"):
        vocabulary(reader, "r", tmp_path / "nowhere")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be loaded as a tokenizer"):
        vocabulary(reader, "r", broken)
    opened = open_tokens(reader, "e", trace=experiment)
    assert opened.known is None and "models/tiny" in opened.why_ids
    assert labels(timeline_view(opened, 0)) == ["1 ", "2 "]
    above = tokenizer_file(tmp_path / "models" / "tiny", "byte level")
    assert vocabulary(reader, "r", trace=experiment).source == str(
        above.resolve() / "tokenizer.json"
    )
    beside = tokenizer_file(experiment / "checkpoint" / "r" / "model", "byte level")
    assert vocabulary(reader, "r", trace=experiment).source == str(
        beside.resolve() / "tokenizer.json"
    )


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_the_chat_template_beside_a_tokenizer_is_found(
    place: str, tmp_path: Path, token_trace: Any
) -> None:
    """With it the cause of a split is proven; one that does not parse is none."""
    directory, reader = tokenizer_file(tmp_path / place, "byte level"), open_trace(token_trace.file)
    assert vocabulary(reader, "run", directory).template is None
    for number, (source, expected) in enumerate(
        [("{{ bos_token }}{{ messages[0].content }}", "<s>hi"), ("{% for %}", None)]
    ):
        settings = {"bos_token": {"content": "<s>"}, "unk_token": None}
        if place == "tokenizer_config.json":
            settings["chat_template"] = source  # type: ignore[assignment]
        else:
            (directory / place).write_text(source)
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
        os.utime(directory / "tokenizer.json", (number, number))
        template = vocabulary(reader, "run", directory).template
        assert (template and template.render([{"role": "user", "content": "hi"}])) == expected
