"""`ajet dataset dedup`, as a user calls it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.responses import JSONResponse, Response
from typer.testing import CliRunner, Result

from ajet_sdk.engines import pace
from ajet_tools.cli.app import app
from ajet_tools.dataset.similarity.dedup import RowFacts, find
from ajet_tools.dataset.similarity.text import normal

FOX = "The quick brown fox jumps over the lazy dog and runs away from the hounds"
FOX_2 = "The quick brown fox jumped over the lazy dog and ran away from the hounds"
FOX_3 = "The quick brown ox jumped over the lazy dog and ran far away from the hounds"


def ajet(*arguments: str, code: int = 0, input: str | None = None) -> Result:
    result = CliRunner().invoke(app, ["dataset", *arguments], input=input)
    assert result.exit_code == code, result.output
    return result


def write(path: Path, *rows: dict[str, Any] | str) -> str:
    path.write_text(
        "".join(json.dumps({"main_query": r} if isinstance(r, str) else r) + "\n" for r in rows)
    )
    return str(path)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def asked(path: Path) -> list[str]:
    return [row["main_query"] for row in read(path)]


def test_exact_and_near_copies_go_and_the_report_says_why(tmp_path: Path) -> None:
    source = write(
        tmp_path / "a.jsonl", "What is 1 + 2?", FOX, " what IS 1 + 2?", FOX_2, "What is 1 + 3?"
    )
    out, report = tmp_path / "out.jsonl", tmp_path / "report.jsonl"
    summary = json.loads(
        ajet("dedup", source, "-o", str(out), "--report", str(report), "--json").stdout
    )
    assert asked(out) == ["What is 1 + 2?", FOX, "What is 1 + 3?"]
    assert {name: summary[name] for name in ("rows", "kept", "dropped", "exact", "near", "clusters")} == {
        "rows": 5, "kept": 3, "dropped": 2, "exact": 1, "near": 1, "clusters": 2,
    }  # fmt: skip
    exact, near = read(report)
    assert (exact["row"], exact["kept"], exact["kind"], exact["similarity"]) == (
        "a.jsonl line 3",
        "a.jsonl line 1",
        "exact",
        1.0,
    )
    assert (near["row"], near["kept"], near["kind"]) == ("a.jsonl line 4", "a.jsonl line 2", "near")
    assert near["similarity"] == pytest.approx(1 - 4 / 73, abs=1e-3)


def test_a_row_keeps_all_its_fields_and_stdin_goes_to_stdout(tmp_path: Path) -> None:
    row = {"main_query": "Hello", "metadata": {"answer": 1, "x": [1, {"y": None}]}, "more": "é"}
    result = ajet(
        "dedup",
        "-",
        "-o",
        "-",
        input=json.dumps(row) + "\n" + json.dumps({**row, "more": "z"}) + "\n",
    )
    assert [json.loads(line) for line in result.stdout.splitlines()] == [row]


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ("first", 0),
        ("last", 3),
        ("longest", 2),
        ("shortest", 0),
        ("answered", 1),
        ("max:metadata.v", 2),
        ("min:v", 3),
    ],
)
def test_which_of_a_cluster_stays(tmp_path: Path, keep: str, kept: int) -> None:
    rows = [
        {"main_query": FOX, "n": 0, "v": 9},
        {"main_query": FOX + ".", "n": 1, "metadata": {"answer": "x", "v": 2}, "v": 9},
        {"main_query": FOX + "....", "n": 2, "metadata": {"v": 3}, "v": 9},
        {"main_query": FOX + "!", "n": 3, "v": 1},
    ]
    ajet(
        "dedup",
        write(tmp_path / "a.jsonl", *rows),
        "-o",
        str(tmp_path / "out.jsonl"),
        "--keep",
        keep,
    )
    assert [row["n"] for row in read(tmp_path / "out.jsonl")] == [kept]


def test_a_row_that_is_like_the_kept_one_by_way_of_a_third_says_which(tmp_path: Path) -> None:
    steps = [FOX]
    for old, new in [
        ("quick", "quack"),
        ("jumps", "jumpz"),
        ("lazy", "hazy"),
        ("hounds", "hounts"),
        ("away", "auay"),
    ]:
        steps.append(steps[-1].replace(old, new))
    source = write(tmp_path / "a.jsonl", *steps)
    report = tmp_path / "r.jsonl"
    out = tmp_path / "o.jsonl"
    ajet("dedup", source, "-o", str(out), "--report", str(report), "--near", "0.95")
    assert asked(out) == [FOX]
    told = read(report)
    assert [line.get("via") is not None for line in told] == [False, False, True, True, True]
    assert all(line["similarity"] >= 0.93 for line in told)


def test_copies_with_other_answers_are_counted(tmp_path: Path) -> None:
    rows = [
        {"main_query": "Capital?", "metadata": {"answer": a}} for a in ("Paris", "Lyon", "Paris")
    ]
    out = str(tmp_path / "o.jsonl")
    result = ajet(
        "dedup",
        write(tmp_path / "a.jsonl", *rows),
        "-o",
        out,
        "--report",
        str(tmp_path / "r.jsonl"),
    )
    assert "1 row of these had another answer" in result.stderr
    assert [line.get("answers") for line in read(tmp_path / "r.jsonl")] == [["Lyon", "Paris"], None]


def test_exact_alone_and_numbers(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", FOX, FOX_2, f"{FOX} 12", f"{FOX} 13")
    ajet("dedup", source, "-o", str(tmp_path / "o.jsonl"), "--near", "1")
    assert len(asked(tmp_path / "o.jsonl")) == 4
    ajet("dedup", source, "-o", str(tmp_path / "o.jsonl"))
    assert asked(tmp_path / "o.jsonl") == [FOX, f"{FOX} 12", f"{FOX} 13"]


def test_the_same_file_twice_over(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", FOX, FOX_3, FOX_2, "x", "y")
    for name in ("1", "2"):
        ajet(
            "dedup",
            source,
            "-o",
            str(tmp_path / name) + ".jsonl",
            "--report",
            str(tmp_path / f"r{name}.jsonl"),
        )
    assert (tmp_path / "1.jsonl").read_bytes() == (tmp_path / "2.jsonl").read_bytes()
    assert (tmp_path / "r1.jsonl").read_bytes() == (tmp_path / "r2.jsonl").read_bytes()
    ajet("dedup", str(tmp_path / "1.jsonl"), "-o", str(tmp_path / "3.jsonl"))
    assert (tmp_path / "3.jsonl").read_bytes() == (tmp_path / "1.jsonl").read_bytes()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from([FOX, FOX_2, FOX_3, FOX.upper(), "a", "A ", "b", "", "What is 2?"])),
    st.data(),
)
def test_order_changes_nothing_but_which_row_stays(texts: list[str], data: st.DataObject) -> None:
    other = data.draw(st.permutations(texts))
    ours, theirs = ([RowFacts(str(i), t) for i, t in enumerate(each)] for each in (texts, other))
    one, two = find(ours), find(theirs)
    assert (len(one.duplicates), one.clusters) == (len(two.duplicates), two.clusters)
    stay = {normal(t) for i, t in enumerate(texts) if i not in {d.index for d in one.duplicates}}
    assert len(stay) == len(texts) - len(one.duplicates)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no rows"),
        ('{"main_query": "a"}\n{"main_query":\n', "line 2"),
        ('{"main_query": "a", "v": "high"}\n', "has no number there"),
    ],
)
def test_bad_input_is_one_message_and_nothing_is_written(
    tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    out = tmp_path / "o.jsonl"
    result = ajet("dedup", str(tmp_path / "a.jsonl"), "-o", str(out), "--keep", "max:v", code=2)
    assert said in result.stderr
    assert not out.exists()


@pytest.mark.slow
def test_a_row_of_five_megabytes_and_one_that_is_no_unicode(tmp_path: Path) -> None:
    long = "word " * 1_000_000
    source = write(tmp_path / "a.jsonl", long, long + "more", "\ud800 lone", "\ud800 lone")
    ajet("dedup", source, "-o", str(tmp_path / "o.jsonl"))
    assert [len(text) for text in asked(tmp_path / "o.jsonl")] == [5_000_000, 6]


def fruit(text: str) -> str:
    return "fruit" if "apple" in text or "pear" in text else text


def test_meanings_by_an_endpoint(tmp_path: Path, embedder) -> None:
    made = embedder(fruit)
    made.failures = [
        Response(status_code=429, headers={"retry-after": "0"}),
        Response("busy", status_code=503),
    ]
    source = write(
        tmp_path / "a.jsonl",
        "I like an apple",
        "A pear is fine",
        "Dogs bark",
        "3 apples",
        "4 apples",
    )
    report = tmp_path / "r.jsonl"
    ajet(
        "dedup",
        source,
        "-o",
        str(tmp_path / "o.jsonl"),
        "--embed",
        f"m@{made.url}",
        "--report",
        str(report),
    )
    assert asked(tmp_path / "o.jsonl") == ["I like an apple", "Dogs bark", "3 apples", "4 apples"]
    assert [(line["kind"], line["similarity"]) for line in read(report)] == [("meaning", 1.0)]


@pytest.mark.parametrize(
    ("failure", "code", "said"),
    [
        (Response("no such model", status_code=404), 2, "answered 404: no such model"),
        (Response("wrong key", status_code=401), 2, "check the API key"),
        (JSONResponse({"data": []}), 1, "0 embeddings for 1 texts"),
        (JSONResponse({"oops": 1}), 1, "returned no embeddings"),
        (Response("<html>"), 1, "not with JSON"),
        (
            Response('{"data": [{"index": 0, "embedding": [NaN, 1.0]}]}'),
            1,
            "missing or invalid numbers",
        ),
        (JSONResponse({"data": [{"index": 0, "embedding": []}]}), 1, "missing or invalid numbers"),
    ],
)
def test_an_endpoint_that_fails(
    tmp_path: Path,
    embedder,
    failure: Response,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pace, "FIRST_WAIT", 0.01)
    made = embedder(fruit)
    made.failures = [failure] * 5
    out = tmp_path / "o.jsonl"
    result = ajet(
        "dedup",
        write(tmp_path / "a.jsonl", FOX),
        "-o",
        str(out),
        "--embed",
        f"m@{made.url}",
        code=code,
    )
    assert said in result.stderr
    assert not out.exists()


def test_meanings_by_a_local_model(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    result = ajet(
        "dedup",
        write(tmp_path / "a.jsonl", FOX),
        "--embed",
        str(tmp_path / "none"),
        code=2,
    )
    assert "no model can be loaded there" in result.stderr


def test_a_local_models_vectors_do_not_depend_on_what_stands_beside_a_text(tmp_path: Path) -> None:
    """Nor on the padding: a text and its copy with other blanks, far apart and in other batches,
    are one."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "model"
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "the",
        "fox",
        "over",
        "dogs",
        "bark",
        "at",
        "night",
    ]
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(words))
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    transformers.BertModel(transformers.BertConfig(vocab_size=len(words), **shape)).save_pretrained(
        folder
    )
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    from ajet_tools.dataset.similarity.meaning import embed, open_embedder
    from ajet_tools.text.model_name import ModelName

    async def run(texts: list[str]) -> Any:
        endpoint = open_embedder(ModelName(str(folder)))
        try:
            return await embed(endpoint, texts)
        finally:
            await endpoint.aclose()

    texts = [
        "the fox",
        "dogs bark at night " * 30,
        *(f"fox {'over ' * n}dogs" for n in range(70)),
        "the  fox",
        "",
    ]
    together, alone = asyncio.run(run(texts)), asyncio.run(run(["the fox"]))
    assert together.shape == (74, 32) and np.allclose(
        np.linalg.norm(together, axis=1), 1, atol=1e-5
    )
    assert np.allclose(together[0], alone[0], atol=1e-5) and np.allclose(
        together[-2], alone[0], atol=1e-5
    )
    assert together[0] @ together[1] < 0.999
