"""`ajet dataset from-docs` as a user calls it, against an endpoint over real HTTP."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ajet_sdk.tasks.task_rows import Row, to_task
from ajet_tools.cli.app import app
from ajet_tools.dataset.documents.read import read_document
from tests.tools.dataset.written import lock, teach, write_docx, write_pdf

pytestmark = pytest.mark.slow

THINGS = ["pump", "lamp", "gate", "crane", "valve", "mixer", "drill", "press"]


def ajet(*arguments: str | Path, code: int = 0, **more: Any) -> Result:
    result = CliRunner().invoke(
        app, ["dataset", "from-docs", *map(str, arguments)], env={"COLUMNS": "200"}, **more
    )
    assert result.exit_code == code, result.output
    return result


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def handbook(folder: Path, things: list[str] = THINGS) -> Path:
    """A document for each thing, in turns as PDF, Word, HTML, Markdown and text; each says things
    of its own."""
    folder.mkdir(exist_ok=True)
    for number, thing in enumerate(things):
        lines = [
            f"The {thing} of series {number} was built in the year {1950 + 7 * number}.",
            (
                f"Whoever starts the {thing} pulls its handle number {number + 3} all the way down"
                " to the left."
            ),
            f"A {thing} weighs {12 + 5 * number} kilograms without its cover and its {thing} feet.",
        ]
        name = folder / f"{thing}"
        match number % 5:
            case 0:
                write_pdf(
                    name.with_suffix(".pdf"),
                    [[lines[0], lines[1]], [lines[2]]],
                    {1: "History", 2: "Weights"},
                )
            case 1:
                write_docx(
                    name.with_suffix(".docx"), [("h1", thing), *(("p", line) for line in lines)]
                )
            case 2:
                body = "".join(f"<p>{line}</p>" for line in lines)
                name.with_suffix(".html").write_text(f"<h1>{thing}</h1>{body}")
            case 3:
                name.with_suffix(".md").write_text(f"# {thing}\n\n" + "\n\n".join(lines))
            case _:
                name.with_suffix(".txt").write_text("\n\n".join(lines))
    return folder


def test_rows_are_tasks_whose_evidence_stands_in_their_document(
    model_server, tmp_path: Path
) -> None:
    server = model_server(lambda body, number: teach(body))
    docs, out = handbook(tmp_path / "docs"), tmp_path / "data"
    said = ajet(
        docs,
        "--out",
        out,
        "--model",
        f"writer@{server.url}",
        "--yes",
        "--verify",
        "none",
    ).output
    train, validation = rows(out / "train.jsonl"), rows(out / "validation.jsonl")
    assert len(train) + len(validation) == 24 and f"24 rows accepted: {len(train)} train" in said
    assert validation, "eight documents: a tenth is kept apart"
    for row in (*train, *validation):
        task = to_task(Row("row", {k: v for k, v in row.items() if k != "provenance"}), {})
        assert task.main_query and task.metadata["answer"] and task.task_id == row["task_id"]
        told = row["provenance"]
        source = read_document(docs / told["document"]["name"])
        block = next(b for b in source.blocks if told["span"]["quote"] in b.text)
        assert told["document"]["digest"] == source.digest
        assert (
            told["document"].get("page") == block.page
            and told["document"].get("heading", "") == block.heading
        )
        assert told["source"] == "from-docs" and told["model"] == "writer"
        assert told["prompt"] == {"name": "from-docs/knowledge", "version": "1"}
    pdf = [
        row["provenance"]["document"] for row in train + validation if "pump" in row["main_query"]
    ]
    assert {(one["page"], one["heading"]) for one in pdf} == {(1, "History"), (2, "Weights")}


def test_a_document_never_feeds_both_sides(model_server, tmp_path: Path) -> None:
    server = model_server(lambda body, number: teach(body))
    docs = handbook(tmp_path / "docs")
    for seed in range(3):
        out = tmp_path / f"data{seed}"
        ajet(docs, "--out", out, "--model", f"w@{server.url}", "--yes", "--verify", "none", "--validation",
             "0.3", "--with", f"seed={seed}")  # fmt: skip
        sides = {
            name: {row["provenance"]["document"]["name"] for row in rows(out / f"{name}.jsonl")}
            for name in ("train", "validation")
        }
        assert sides["train"] and sides["validation"] and not sides["train"] & sides["validation"]
        listed = {row["document"]: row["side"] for row in rows(out / "documents.jsonl")}
        assert {name for name, side in listed.items() if side == "validation"} == sides[
            "validation"
        ]


def test_what_is_not_grounded_is_refused_with_its_reason(model_server, tmp_path: Path) -> None:
    document = tmp_path / "pump.md"
    document.write_text(
        "# Pump\n\nThe pump moves 45 litres a minute.\n\nIt is started with the “green” lever —"
        " slowly."
    )
    moves = "The pump moves 45 litres a minute."
    green = 'It is started\nwith the "green" lever - slowly'
    said = [
        {"question": "How much does the pump move?", "answer": "45 litres", "quote": moves},
        {"question": "Which lever starts the pump?", "answer": "green", "quote": green},
        {
            "question": "How heavy is the pump?",
            "answer": "9 kg",
            "quote": "The pump weighs 9 kilograms.",
        },
        {"question": "How many litres does it move?", "answer": "54", "quote": moves},
        {"question": "What does the pump move?", "answer": "litres", "quote": "litres"},
        {
            "question": "According to the passage, what is moved?",
            "answer": "litres",
            "quote": moves,
        },
        {"question": "How much does the pump move?", "answer": "45", "quote": moves},
        {"question": "Who made it?", "quote": moves},
        "prose",
    ]
    server = model_server(lambda body, number: json.dumps(said))
    out = tmp_path / "data"
    ajet(
        document,
        "--out",
        out,
        "--model",
        f"w@{server.url}",
        "--yes",
        "--verify",
        "none",
        "--with",
        "per_call=9",
    )
    accepted = rows(out / "train.jsonl")
    assert [row["metadata"]["answer"] for row in accepted] == ["45 litres", "green"]
    assert (
        accepted[1]["provenance"]["span"]["quote"]
        == "It is started with the “green” lever — slowly"
    )
    refused = Counter(row["rejected"]["reason"] for row in rows(out / "rejected.jsonl"))
    assert refused == {
        "quote not in the document": 1, "answer not in the quote": 1, "quote too short": 1, "asks about the text": 1,
        "exact duplicate": 1, "wrong format": 2,
    }  # fmt: skip
    strange = next(
        r for r in rows(out / "rejected.jsonl") if r["rejected"]["reason"].startswith("quote not")
    )
    assert (
        "weighs 9 kilograms" in strange["rejected"]["detail"]
        and strange["provenance"]["document"]["name"] == "pump.md"
    )


@pytest.mark.parametrize(
    ("question", "refused"),
    [
        ("What does this section say of pumps?", True),
        ("Which lever is named in the passage?", True),
        ("Laut dem Text, wie schwer ist die Pumpe?", True),
        ("Which element of an XML document has no parent?", False),
        ("In the section of pipe behind pump 4, which valve is used?", False),
    ],
)
def test_a_question_about_the_text_is_told_from_one_about_the_matter(
    model_server, tmp_path: Path, question: str, refused: bool
) -> None:
    (tmp_path / "a.txt").write_text("The pump of the plant moves water.")
    row = {"question": question, "answer": "water", "quote": "The pump of the plant moves water."}
    server = model_server(lambda body, number: json.dumps([row]))
    ajet(tmp_path / "a.txt", "--out", tmp_path / "data", "--model", f"w@{server.url}", "--yes", "--verify",
         "none", code=int(refused))  # fmt: skip
    assert [r["rejected"]["reason"] for r in rows(tmp_path / "data" / "rejected.jsonl")] == (
        ["asks about the text"] if refused else []
    )


def test_the_grader_sees_the_passage_and_what_it_refuses_is_kept_apart(
    model_server, tmp_path: Path
) -> None:
    def say(body: dict[str, Any], number: int) -> str:
        text = body["messages"][-1]["content"]
        if "<passage>" in text:
            return teach(body)
        assert "<excerpt>" in text and "series 0" in text, "the passage stands beside the question"
        return json.dumps(
            {"score": int("year" not in text.split("Question:")[-1]), "reason": "so it is"}
        )

    server = model_server(say)
    out = tmp_path / "data"
    docs = handbook(tmp_path / "docs", ["pump"])
    ajet(docs, "--out", out, "--model", f"w@{server.url}", "--yes")
    assert len(rows(out / "train.jsonl")) == 2 and len(rows(out / "rejected.jsonl")) == 1
    assert all(row["provenance"]["verdict"]["ok"] for row in rows(out / "train.jsonl"))
    assert all("<excerpt>" not in row["main_query"] for row in rows(out / "train.jsonl")), (
        "the row is as it was"
    )


def test_few_shot_tasks_have_the_shape_of_the_seeds_and_no_seed_is_on_both_sides(
    model_server, tmp_path: Path
) -> None:
    seeds = tmp_path / "seeds.jsonl"
    lines = [
        {
            "problem": f"Seed problem {word}?",
            "solution": f"so {word}",
            "metadata": {"level": n % 2 + 1, "lang": "en"},
        }
        for n, word in enumerate(["alpha", "bravo", "carol", "delta", "edith", "frank"])
    ]
    seeds.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def say(body: dict[str, Any], number: int) -> str:
        made = [
            {
                "problem": one["question"],
                "solution": one["answer"],
                "metadata": {"level": 1},
                "quote": one["quote"],
            }
            for one in json.loads(teach(body))
        ]
        return json.dumps(
            [
                *made,
                {
                    "problem": "No level?",
                    "solution": "x",
                    "metadata": {},
                    "quote": made[0]["quote"],
                },
            ]
        )

    server = model_server(say)
    docs, out = handbook(tmp_path / "docs"), tmp_path / "data"
    ajet(
        docs,
        "--out",
        out,
        "--seeds",
        seeds,
        "--model",
        f"w@{server.url}",
        "--yes",
        "--verify",
        "none",
    )
    sides = {name: rows(out / f"{name}.jsonl") for name in ("train", "validation")}
    assert len(sides["train"]) + len(sides["validation"]) == 24
    for row in (*sides["train"], *sides["validation"]):
        assert set(row) == {"task_id", "problem", "solution", "metadata", "provenance"}
        assert row["metadata"] == {
            "level": 1,
            "lang": "en",
        }, "what all seeds have in common is put in"
        assert (
            row["provenance"]["seeds"]
            and row["provenance"]["prompt"]["name"] == "from-docs/few-shot"
        )
    used = {
        name: {seed for row in side for seed in row["provenance"]["seeds"]}
        for name, side in sides.items()
    }
    assert used["train"] and used["validation"] and not used["train"] & used["validation"]
    assert "metadata.level is missing" in {
        row["rejected"]["detail"] for row in rows(out / "rejected.jsonl")
    }


def test_seeds_with_a_field_of_the_evidences_name_are_told_what_to_do(tmp_path: Path) -> None:
    seeds = tmp_path / "seeds.jsonl"
    seeds.write_text(
        "".join(
            json.dumps({"question": f"Q{n}?", "answer": "a", "quote": "x"}) + "\n" for n in range(3)
        )
    )
    given = (handbook(tmp_path / "docs", ["pump"]), "--seeds", seeds, "--out", tmp_path / "data",
             "--model", "w@http://127.0.0.1:9/v1", "--yes")  # fmt: skip
    assert "--map quote=metadata.quotation" in ajet(*given, code=2).output


def test_languages_take_turns_and_stand_in_the_prompt_and_the_provenance(
    model_server, tmp_path: Path
) -> None:
    server = model_server(lambda body, number: teach(body))
    out = tmp_path / "data"
    docs = handbook(tmp_path / "docs")
    ajet(docs, "--out", out, "--model", f"w@{server.url}", "--yes", "--verify", "none",
         "--language", "German", "--language", "French")  # fmt: skip
    asked = Counter(word for request in server.requests for word in ("German", "French")
                    if f"is in {word}" in request["messages"][-1]["content"])  # fmt: skip
    assert asked == {"German": 4, "French": 4}
    told = {row["provenance"]["parameters"]["language"] for row in rows(out / "train.jsonl")}
    assert told == {"German", "French"}


def test_n_rows_are_made_and_a_part_is_asked_again_for_others(model_server, tmp_path: Path) -> None:
    server = model_server(lambda body, number: teach(body, most=1))
    docs, out = handbook(tmp_path / "docs", THINGS[:2]), tmp_path / "data"
    given = (
        "--model",
        f"w@{server.url},concurrency=1",
        "--yes",
        "--verify",
        "none",
    )
    ajet(docs, "--out", out, "--count", "6", *given)
    assert len(rows(out / "train.jsonl")) == 6
    assert all(
        len(request["messages"][-1]["content"].split("<passage>")) == 2
        for request in server.requests
    )
    again = [
        r["messages"][-1]["content"]
        for r in server.requests
        if "were asked of it already" in r["messages"][-1]["content"]
    ]
    assert again and all("Complete what is known" in text for text in again)
    said = ajet(docs, "--out", tmp_path / "more", "--count", "50", *given, code=1).output
    assert (
        "the documents gave 6 of 50 rows" in said
        and len(rows(tmp_path / "more" / "train.jsonl")) == 6
    )


def test_one_part_at_a_time_gives_the_same_bytes(tmp_path: Path) -> None:
    script = tmp_path / "replies.py"
    script.write_text(
        "import json, random, re, time\ndef reply(ask):\n    time.sleep(random.random() / 50)\n   "
        " text = ask.body['messages'][-1]['content']\n    found ="
        " re.search(r'<passage>\\n(.*)\\n</passage>', text, re.DOTALL)[1]\n    lines = [x for x in"
        " found.splitlines() if len(x) > 30]\n    rows = [{'question': 'What of ' + x[:40] + '?',"
        " 'answer': x.split()[-1], 'quote': x} for x in lines]\n    return json.dumps(rows)\n"
    )
    docs = handbook(tmp_path / "docs")
    options = ("--count", 16, "--model", f"{script}:reply,concurrency=1", "--verify", "none")
    for name in ("one", "two"):
        ajet(docs, "--out", tmp_path / name, *map(str, options))
    for file in ("train.jsonl", "validation.jsonl", "documents.jsonl", "README.md"):
        assert (tmp_path / "one" / file).read_text().replace("one", "two") == (
            tmp_path / "two" / file
        ).read_text().replace("one", "two")


def test_a_run_that_was_stopped_goes_on_and_pays_nothing_twice(
    model_server, tmp_path: Path
) -> None:
    server = model_server(lambda body, number: teach(body))
    docs, whole, out = handbook(tmp_path / "docs"), tmp_path / "whole", tmp_path / "data"
    given = (docs, "--model", f"w@{server.url}", "--yes", "--verify", "none")
    ajet(*given, "--out", whole)
    calls = len(server.requests)
    said = ajet(*given, "--out", out, "--budget", "calls=5", code=1).output
    assert "the budget of 5 calls is spent" in said and 0 < len(rows(out / "train.jsonl")) < 24
    assert "--resume" in ajet(*given, "--out", out, code=2).output
    ajet(*given, "--out", out, "--resume")
    assert len(server.requests) == 2 * calls, "the five were not asked again"
    for name in ("train.jsonl", "validation.jsonl"):
        questions = [{row["main_query"] for row in rows(path / name)} for path in (out, whole)]
        assert questions[0] == questions[1], "each part is asked once"
    (docs / "new.txt").write_text("Another document has come, and says so at some length.")
    assert "documents was" in ajet(*given, "--out", out, "--resume", code=2).output


def test_bad_documents_are_told_the_others_are_used_and_the_exit_code_says_so(
    model_server, tmp_path: Path
) -> None:
    server = model_server(lambda body, number: teach(body))
    docs, out = handbook(tmp_path / "docs"), tmp_path / "data"
    write_pdf(docs / "scan.pdf", [[]])
    lock(write_pdf(docs / "locked.pdf", [["A secret of some length is kept in here."]]), "secret")
    (docs / "broken.pdf").write_bytes(b"%PDF-1.4\nbroken")
    (docs / "empty.txt").write_bytes(b"")
    (docs / "latin.txt").write_bytes("Ein schöner Tag.".encode("latin-1"))
    given = ("--out", out, "--model", f"w@{server.url}", "--yes", "--verify", "none")
    said = ajet(docs, *given, code=1).output
    for words in (
        "its 1 page has no text",
        "is password-protected",
        "cannot be read as PDF",
        "empty.txt is empty",
        "is not UTF-8",
    ):
        assert said.count(words) == 1, words
    assert "5 of 13 documents could not be read" in said
    assert len(rows(out / "train.jsonl")) + len(rows(out / "validation.jsonl")) == 24
    problems = {
        row["document"]: row["problem"] for row in rows(out / "documents.jsonl") if "problem" in row
    }
    assert set(problems) == {"scan.pdf", "locked.pdf", "broken.pdf", "empty.txt", "latin.txt"}


def test_no_document_that_can_be_read_is_an_error_before_any_call(
    model_server, tmp_path: Path
) -> None:
    server = model_server(lambda body, number: teach(body))
    given = ("--out", tmp_path / "data", "--model", f"w@{server.url}", "--yes")
    said = ajet(write_pdf(tmp_path / "scan.pdf", [[]]), *given, code=2).output
    assert "OCR" in said and not (tmp_path / "data").exists()
    (tmp_path / "none").mkdir()
    assert "contains no documents" in ajet(tmp_path / "none", *given, code=2).output
    assert not server.requests


def test_an_endpoint_that_fails_is_one_message_and_what_was_made_is_kept(
    model_server, tmp_path: Path
) -> None:
    def say(body: dict[str, Any], number: int) -> Any:
        return teach(body) if number < 3 else model_server.refusal(401, "Incorrect API key")

    server = model_server(say)
    docs, out = handbook(tmp_path / "docs"), tmp_path / "data"
    given = (
        docs,
        "--model",
        f"w@{server.url},concurrency=1",
        "--yes",
        "--verify",
        "none",
    )
    assert ajet(*given, "--out", out, code=2).output.count("Incorrect API key") == 1
    assert len(rows(out / "train.jsonl")) + len(rows(out / "validation.jsonl")) == 9
    prose = model_server(lambda body, number: "Sure! Here is what I think about pumps.")
    said = ajet(
        docs,
        "--model",
        f"w@{prose.url}",
        "--yes",
        "--out",
        tmp_path / "b",
        "--json",
        code=1,
    )
    assert json.loads(said.stdout[: said.stdout.rindex("}") + 1])["refused"] == {"not JSON": 8}


def test_a_part_without_an_answer_is_left_out_and_the_exit_code_says_so(
    model_server, tmp_path: Path
) -> None:
    def say(body: dict[str, Any], number: int) -> Any:
        broken = "crane" in body["messages"][-1]["content"]
        return model_server.refusal(500, "out of order") if broken else teach(body)

    server = model_server(say)
    docs, out = handbook(tmp_path / "docs"), tmp_path / "data"
    given = (
        "--model",
        f"w@{server.url},retries=0",
        "--yes",
        "--verify",
        "none",
    )
    assert "1 of 8 parts got no answer" in ajet(docs, "--out", out, *given, code=1).output
    assert len(rows(out / "train.jsonl")) + len(rows(out / "validation.jsonl")) == 21
    assert "out of order" in rows(out / "rejected.jsonl")[0]["rejected"]["detail"]


def test_ctrl_c_keeps_what_was_made_and_resume_goes_on(model_server, tmp_path: Path) -> None:
    server = model_server(lambda body, number: (0.4, teach(body)))
    docs, out = handbook(tmp_path / "docs"), tmp_path / "data"
    command = ["dataset", "from-docs", str(docs), "--out", str(out), "--model",
               f"w@{server.url},concurrency=1", "--yes", "--verify", "none"]  # fmt: skip
    running = subprocess.Popen(
        [sys.executable, "-m", "ajet", *command], stderr=subprocess.PIPE, text=True
    )
    while len(server.requests) < 4 and running.poll() is None:
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=300)
    assert running.returncode == 130 and "Interrupted" in said and "Traceback" not in said
    kept, asked = (
        len(rows(out / "train.jsonl")) + len(rows(out / "validation.jsonl")),
        len(server.requests),
    )
    assert 6 <= kept < 24 and asked < 8
    server.say = lambda body, number: teach(body)
    ajet(*command[2:], "--resume")
    assert len(rows(out / "train.jsonl")) + len(rows(out / "validation.jsonl")) == 24
    assert len(server.requests) == 8, "no request was made twice"


def test_nothing_is_asked_without_a_yes_and_the_estimate_is_near(
    model_server, tmp_path: Path
) -> None:
    server = model_server(lambda body, number: teach(body))
    docs = handbook(tmp_path / "docs")
    given = (
        docs,
        "--out",
        tmp_path / "data",
        "--model",
        f"w@{server.url}",
        "--verify",
        "none",
    )
    said = ajet(*given, code=2).output
    assert (
        "8 documents (2 pages of PDF) in 8 parts" in said
        or "8 documents (4 pages of PDF) in 8 parts" in said
    )
    assert "About 8 calls for rows" in said and "--yes" in said and not server.requests


def test_the_prompt_is_shown_and_a_template_of_ones_own_takes_its_place(
    model_server, tmp_path: Path
) -> None:
    docs = handbook(tmp_path / "docs", ["pump"])
    shown = ajet(docs, "--dry-run").output
    assert "from-docs/knowledge version 1" in shown and "The pump of series 0" in shown
    own = tmp_path / "own.jinja"
    own.write_text(
        "Ask {{ count }} things of {{ document }}:\n<passage>\n{{ passage }}\n</passage>"
    )
    server = model_server(lambda body, number: teach(body))
    out = tmp_path / "data"
    ajet(
        docs,
        "--out",
        out,
        "--kind",
        own,
        "--model",
        f"w@{server.url}",
        "--yes",
        "--verify",
        "none",
    )
    assert server.requests[0]["messages"][-1]["content"].startswith("Ask 4 things of pump.pdf:")
    assert rows(out / "train.jsonl")[0]["provenance"]["prompt"]["name"] == "own.jinja"


def test_rows_of_an_evaluation_set_are_refused(model_server, tmp_path: Path) -> None:
    server = model_server(lambda body, number: teach(body))
    docs = handbook(tmp_path / "docs", ["pump"])
    given = (docs, "--model", f"w@{server.url}", "--yes", "--verify", "none")
    ajet(*given, "--out", tmp_path / "a")
    [first, *_] = rows(tmp_path / "a" / "train.jsonl")
    (tmp_path / "eval.jsonl").write_text(json.dumps({"question": first["main_query"]}) + "\n")
    ajet(*given, "--out", tmp_path / "b", "--eval", tmp_path / "eval.jsonl")
    assert first["main_query"] not in {
        row["main_query"] for row in rows(tmp_path / "b" / "train.jsonl")
    }
    assert "in the evaluation set" in {
        row["rejected"]["reason"] for row in rows(tmp_path / "b" / "rejected.jsonl")
    }


def test_stdin_is_read_as_markdown(model_server, tmp_path: Path) -> None:
    server = model_server(lambda body, number: teach(body))
    given = (
        "--out",
        tmp_path / "data",
        "--model",
        f"w@{server.url}",
        "--yes",
        "--verify",
        "none",
    )
    ajet("-", *given, input="# Pump\n\nThe pump moves forty-five litres a minute.")
    [row] = rows(tmp_path / "data" / "train.jsonl")
    assert row["metadata"] == {"answer": "minute"}
    assert (
        row["provenance"]["document"]["name"] == "stdin"
        and row["provenance"]["document"]["heading"] == "Pump"
    )
    assert (
        "stdin is empty" in ajet("-", "--out", tmp_path / "b", *given[2:], input="", code=2).output
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kind", "few-shot"], "--seeds FILE"),
        (["--kind", "poem"], "knowledge, few-shot"),
        (["--with", "chunk_size=10"], "--chunk-size must be at least 200"),
        (["--validation", "0.5"], "document is on both sides"),
        (["--verify", "magic"], "is unknown"),
        (["--budget", "usd=1"], "price=IN/OUT"),
    ],
)
def test_wrong_options_are_told_before_any_call(
    tmp_path: Path, options: list[str], words: str
) -> None:
    docs = handbook(tmp_path / "docs", ["pump"])
    given = (
        "--out",
        tmp_path / "data",
        "--model",
        "w@http://127.0.0.1:9/v1",
        "--yes",
    )
    assert words in ajet(docs, *given, *options, code=2).output
