"""Pictures in the trace's tools: shown, compared, exported, imported and redacted."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ajet_sdk.dialects.message_parts import parts_of, pictures_in
from ajet_sdk.pictures import PlacedPicture, mapped, picture_of
from ajet_sdk.trace.reader import episodes, open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Run, Task
from ajet_tools.cli.app import app
from ajet_tools.dataset.curation.validate import validate
from ajet_tools.trace.compare.diff import diff_episodes
from ajet_tools.trace.export.html import pictures_page
from ajet_tools.trace.redact import Redactor
from tests.drawings import drawn, file_of, part, png, text, url_of

LINE = picture_of(png(1)).line


def episode_with(data: bytes, name: str = "e", **fields: Any) -> Episode:
    messages = [
        {"role": "user", "content": [text("Where is the exit?"), part(data)]},
        {"role": "assistant", "content": "left"},
        {"role": "tool", "tool_call_id": "t", "content": [text("next"), part(png(2)), part(data)]},
    ]
    call = Call(
        call_id=f"{name}-c",
        episode_id=name,
        request={"messages": messages},
        response={"choices": [{"message": {"role": "assistant", "content": "right"}}]},
        prompt_ids=[1, 9, 9, 2],
        pictures=[PlacedPicture(1, 3, picture_of(data), 9)],
        output_ids=[3],
        logprobs=[-0.5],
    )
    task = Task(init_messages=messages[:1], task_id="t")
    return Episode(episode_id=name, run_id="r", task=task, calls=(call,), **fields)


def written(path: Path, *whole: Episode) -> Path:
    with TraceWriter(path) as writer:
        writer.put(Run(run_id="r", backbone="run", status="finished"))
        for episode in whole:
            writer.put(*episode.calls, episode)
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return written(tmp_path / "trace.duckdb", episode_with(png(1)))


def ajet(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_show_has_a_line_for_each_picture(trace: Path) -> None:
    for arguments in (["e"], ["e-c"], ["e", "--full"]):
        shown = ajet("trace", "show", arguments[0], trace, *arguments[1:])
        assert f"[{LINE}]" in shown and "base64" not in shown
        assert f"[{picture_of(png(2)).line}]" in shown


FORMS = [
    part(png(1)),
    {"type": "input_image", "image_url": url_of(png(1))},
    {
        "type": "image",
        "source": {
            "type": "base64",
            "media_type": "image/png",
            "data": base64.b64encode(png(1)).decode(),
        },
    },
    {"type": "image", "mimeType": "image/png", "data": base64.b64encode(png(1)).decode()},
    {"inlineData": {"mimeType": "image/png", "data": base64.b64encode(png(1)).decode()}},
]


@pytest.mark.parametrize("form", FORMS)
def test_each_dialects_picture_is_known(form: dict[str, Any]) -> None:
    for content in ([form], [{"type": "tool_result", "tool_use_id": "t", "content": [form]}]):
        message = {"role": "user", "content": content}
        assert parts_of(message).content == f"[{LINE}]"
        assert pictures_in(message) == [picture_of(png(1))]


@pytest.mark.parametrize("format", ["native", "otlp"])
def test_lossless_formats_keep_pictures(trace: Path, tmp_path: Path, format: str) -> None:
    file = tmp_path / "all.jsonl"
    ajet("trace", "export", trace, "--format", format, "--no-redact", "--out", file)
    ajet("trace", "import", file, "--out", tmp_path / "again.duckdb")
    with open_trace(trace) as before, open_trace(tmp_path / "again.duckdb") as after:
        [old], [new] = episodes(before), episodes(after)
        assert len(after.query("SELECT digest FROM pictures")) == 2
    assert new.task == old.task
    for new_call, old_call in zip(new.calls, old.calls, strict=True):
        assert new_call.request == old_call.request
        assert new_call.pictures == (old_call.pictures if format == "native" else ())


def test_a_native_line_has_each_picture_once(tmp_path: Path) -> None:
    episode = episode_with(png(1, 64, 64))
    trace = written(tmp_path / "trace.duckdb", episode)
    file = tmp_path / "all.jsonl"
    ajet("trace", "export", trace, "--format", "native", "--no-redact", "--out", file)
    body = base64.b64encode(png(1, 64, 64)).decode()
    assert file.read_text().count(body) == 1


def test_rows_of_messages_have_data_urls_and_are_imported(trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    ajet("trace", "export", trace, "--no-redact", "--out", file)
    [row] = map(json.loads, file.read_text().splitlines())
    assert row["messages"][0]["content"] == [text("Where is the exit?"), part(png(1))]
    ajet("trace", "import", file, "--out", tmp_path / "again.duckdb")
    with open_trace(tmp_path / "again.duckdb") as reader:
        [episode] = episodes(reader)
        assert episode.calls[-1].request["messages"][0] == row["messages"][0]
        assert len(reader.query("SELECT digest FROM pictures")) == 2


@pytest.mark.parametrize("format", ["messages", "sharegpt", "tasks"])
def test_rows_have_their_pictures_in_files(trace: Path, tmp_path: Path, format: str) -> None:
    inside, beside = tmp_path / "inside.jsonl", tmp_path / "rows" / "beside.jsonl"
    options = ["--format", format, "--keep-pictures", "--out"]
    ajet("trace", "export", trace, *options, inside)
    ajet("trace", "export", trace, *options, beside, "--picture-files")
    [row], [named] = rows_of(inside), rows_of(beside)
    folder = beside.parent / "beside.pictures"
    pictures = {picture_of(file.read_bytes()): file for file in folder.iterdir()}
    assert "base64" not in json.dumps(named)
    for picture, file in pictures.items():
        named = mapped_texts(named, f"beside.pictures/{file.name}", picture.url)
    assert named == row
    assert len(pictures) == (1 if format == "tasks" else 2)
    report = validate({"inside": str(inside), "beside": str(beside)})
    assert report.pictures["inside"] == report.pictures["beside"]
    assert report.different_pictures == len(pictures) and not report.counts["picture"]


def test_rows_with_pictures_in_files_are_imported(trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    ajet("trace", "export", trace, "--keep-pictures", "--picture-files", "--out", file)
    ajet("trace", "import", file, "--out", tmp_path / "again.duckdb")
    with open_trace(tmp_path / "again.duckdb") as reader:
        [episode] = episodes(reader)
        assert len(reader.query("SELECT digest FROM pictures")) == 2
    content = episode.calls[-1].request["messages"][0]["content"]
    assert content == [text("Where is the exit?"), part(png(1))]
    for picture in (tmp_path / "rows.pictures").iterdir():
        picture.unlink()
    arguments = ["trace", "import", str(file), "--out", str(tmp_path / "without.duckdb")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and "rows.jsonl line 1" in result.output


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def mapped_texts(row: Any, old: str, new: str) -> Any:
    return mapped(row, lambda text: new if text == old else text)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--out", "rows.jsonl"],  # the pictures are redacted
        ["--keep-pictures", "--out", "-"],
        ["--keep-pictures", "--out", "rows"],
        ["--keep-pictures", "--format", "native", "--out", "rows.jsonl"],
    ],
)
def test_pictures_are_files_only_beside_a_file_of_rows(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["trace", "export", str(trace), "--picture-files", *arguments])
    assert result.exit_code == 2
    assert not list(tmp_path.glob("rows*"))


def test_sharegpt_names_the_places_of_pictures(trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    ajet("trace", "export", trace, "--format", "sharegpt", "--no-redact", "--out", file)
    [row] = map(json.loads, file.read_text().splitlines())
    assert row["images"] == [url_of(png(1)), url_of(png(2)), url_of(png(1))]
    assert sum(turn["value"].count("<image>") for turn in row["conversations"]) == 3


def test_redaction_drops_pictures_unless_they_are_to_be_kept(trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    for format in ("messages", "native", "html", "otlp"):
        file = tmp_path / f"{format}{'.html' if format == 'html' else '.jsonl'}"
        told = ajet("trace", "export", trace, "--format", format, "--out", file)
        assert "base64," not in file.read_text().replace('"data:;base64,', "")
        assert "picture" in told
    [row] = map(json.loads, (tmp_path / "messages.jsonl").read_text().splitlines())
    assert row["messages"][0]["content"][1] == {"type": "text", "text": "[picture 1]"}
    third = [piece["text"] for piece in row["messages"][2]["content"]]
    assert third == ["next", "[picture 2]", "[picture 1]"]
    file = tmp_path / "kept.jsonl"
    ajet("trace", "export", trace, "--keep-pictures", "--out", file)
    [row] = map(json.loads, file.read_text().splitlines())
    assert row["messages"][0]["content"][1] == part(png(1))


def test_a_picture_that_looks_like_a_phone_number_is_kept_whole(tmp_path: Path) -> None:
    pictures = [png(seed, 40, 40) for seed in range(20)]
    messages = [{"role": "user", "content": [*map(part, pictures), text("+49 30 1234567")]}]
    reply = {"choices": [{"message": {"role": "assistant", "content": "ok"}}]}
    call = Call(call_id="c", episode_id="e", request={"messages": messages}, response=reply)
    trace = written(tmp_path / "trace.duckdb", Episode(episode_id="e", calls=(call,)))
    file = tmp_path / "rows.jsonl"
    ajet("trace", "export", trace, "--keep-pictures", "--out", file)
    [row] = map(json.loads, file.read_text().splitlines())
    assert row["messages"][0]["content"] == [*map(part, pictures), text("[phone 1]")]


def test_the_page_shows_pictures_and_nothing_else_from_elsewhere(tmp_path: Path) -> None:
    evil = 'data:image/svg+xml;base64,PHN2ZyBvbmxvYWQ9ImFsZXJ0KDEpIi8+" onerror="alert(1)'
    messages = [
        {"role": "user", "content": [part(png(1)), part(evil), part("https://example.org/a.png")]}
    ]
    reply = {"choices": [{"message": {"role": "assistant", "content": "ok"}}]}
    call = Call(call_id="c", episode_id="e", request={"messages": messages}, response=reply)
    trace = written(tmp_path / "trace.duckdb", Episode(episode_id="e", calls=(call,)))
    ajet("trace", "export", trace, "--format", "html", "--no-redact", "--out", tmp_path / "e.html")
    page = (tmp_path / "e.html").read_text()
    assert page.count("<img ") == 1
    assert f'<img src="{url_of(png(1))}"' in page
    assert 'onerror="' not in page
    assert "img-src data:" in page and "default-src 'none'" in page


def test_a_page_of_pictures_has_each_with_its_line() -> None:
    shown = [picture_of(png(1)), picture_of(png(2))]
    page = pictures_page(shown)
    found = re.findall('<p>(.*?)</p><img src="(.*?)"', page)
    assert found == [(each.line, each.url) for each in shown]
    assert "default-src 'none'" in page


def test_a_notebook_shows_pictures() -> None:
    assert url_of(png(1)) in episode_with(png(1))._repr_html_()


def test_a_swapped_picture_is_a_difference() -> None:
    same = diff_episodes(episode_with(png(1)), episode_with(file_of(drawn(1), compress_level=0)))
    assert same.first_difference is None
    swapped = diff_episodes(episode_with(png(1)), episode_with(png(3)))
    assert swapped.first_difference is not None


BODY = base64.b64encode(png(1, 24, 24)).decode()
HIDDEN = {
    "no media type": f"data:;base64,{BODY}",
    "another media type": f"data:application/octet-stream;base64,{BODY}",
    "spaces": f"data:                    image/png;base64,{BODY}",
    "markdown": f"Here it is: ![plan](data:image/png;base64,{BODY}) and more",
    "html": f'<img src="data:image/png;charset=utf-8;base64,{BODY}">',
    "bare": BODY,
    "bare in a text": f"base64: {BODY}",
    "lines": "data:image/png;base64," + base64.encodebytes(png(1, 24, 24)).decode(),
    "json": json.dumps({"result": BODY}),
}


@pytest.mark.parametrize("form", HIDDEN)
def test_redaction_finds_pictures_in_texts(form: str) -> None:
    """Each of them is a picture for a model, or for whoever reads the text."""
    redactor = Redactor()
    redacted = redactor.text(HIDDEN[form])
    assert BODY[20:60] not in redacted and "[picture 1]" in redacted
    assert Redactor(keep_pictures=True).text(HIDDEN[form]) == HIDDEN[form]


def test_a_text_around_a_picture_is_redacted_too() -> None:
    said = f"+49 30 1234567 ![a](data:image/png;base64,{BODY}) a.b@example.org"
    assert Redactor().text(said) == "[phone 1] ![a]([picture 1]) [email 1]"
    kept = Redactor(keep_pictures=True).text(said)
    assert kept == f"[phone 1] ![a](data:image/png;base64,{BODY}) [email 1]"
