"""A trace stores each picture once, and returns calls, tasks and outputs as they were written."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.pictures import PlacedPicture, picture_of
from ajet_sdk.samples.prefixes import place_all
from ajet_sdk.trace.reader import calls_of, episodes, open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Event, Task
from tests.drawings import drawn, file_of, part, png, text, url_of

MIDNIGHT = datetime(2026, 1, 1, tzinfo=timezone.utc)


def looking(turns: int, screenshots: list[bytes], episode_id: str = "e") -> list[Call]:
    """An episode with a new picture in each turn."""
    messages: list[dict[str, Any]] = []
    places: list[PlacedPicture] = []
    prompt: list[int] = []
    calls = []
    for turn in range(turns):
        content = [text(f"turn {turn}"), part(screenshots[turn])]
        messages = [*messages, {"role": "user", "content": content}]
        places.append(
            PlacedPicture(len(prompt) + 1, len(prompt) + 5, picture_of(screenshots[turn]), 9)
        )
        prompt = [*prompt, turn, 9, 9, 9, 9, turn]
        calls.append(
            Call(
                call_id=f"{episode_id}-{turn}",
                episode_id=episode_id,
                index=turn,
                request={"messages": messages},
                response={"choices": [{"message": {"role": "assistant", "content": "left"}}]},
                prompt_ids=prompt,
                pictures=tuple(places),
                output_ids=[7],
                logprobs=[-0.5],
                started_at=MIDNIGHT,
                ended_at=MIDNIGHT,
            )
        )
        messages = [*messages, {"role": "assistant", "content": "left"}]
        prompt = [*prompt, 7]
    return place_all(calls)


def test_thirty_screenshots_cost_their_bytes_once(tmp_path: Path) -> None:
    screenshots = [png(seed, 300, 222) for seed in range(30)]
    once = sum(map(len, screenshots))
    assert once > 30 * 195_000
    path = tmp_path / "trace.duckdb"
    calls = looking(30, screenshots)
    with TraceWriter(path) as writer:
        writer.put(*calls, Episode(episode_id="e"))
    assert once < path.stat().st_size < 1.1 * once + 1_000_000
    with open_trace(path) as trace:
        assert calls_of(trace, "e") == calls
        [row] = trace.query(
            "SELECT count(*) AS pictures, sum(octet_length(data))::BIGINT AS bytes FROM pictures"
        ).to_pylist()
        suffixes = trace.query("SELECT messages_suffix AS new FROM calls").to_pylist()
    assert row == {"pictures": 30, "bytes": once}
    assert all(";base64" not in suffix["new"] for suffix in suffixes)


def test_a_file_that_is_written_again_has_a_picture_once(tmp_path: Path) -> None:
    path = tmp_path / "trace.duckdb"
    data = png()
    for name in ("a", "b"):
        with TraceWriter(path) as writer:
            writer.put(*looking(1, [data], name), Episode(episode_id=name))
    with open_trace(path) as trace:
        assert len(trace.query("SELECT digest FROM pictures")) == 1
        for name in ("a", "b"):
            assert calls_of(trace, name) == looking(1, [data], name)


def test_a_second_file_with_the_same_pixels_is_read_as_it_was_sent(tmp_path: Path) -> None:
    image = drawn(1, 64, 64)
    files = [file_of(image, compress_level=level) for level in (9, 0, 9)]
    assert files[0] != files[1]
    messages = [{"role": "user", "content": [part(data) for data in files]}]
    call = Call(call_id="c", episode_id="e", request={"messages": messages})
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        writer.put(call, Episode(episode_id="e"))
    with open_trace(tmp_path) as trace:
        assert len(trace.query("SELECT digest FROM pictures")) == 1
        assert calls_of(trace, "e") == [call]


ENCODED = base64.b64encode(png(2)).decode()
BARE = [
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ENCODED}},
    {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": ENCODED}},
    {"inlineData": {"mimeType": "image/png", "data": ENCODED}},
    {"inline_data": {"mime_type": "image/png", "data": ENCODED.translate({43: 45, 47: 95})}},
    {"type": "image", "mimeType": "image/png", "data": ENCODED},
]


@pytest.mark.parametrize("part_of_dialect", BARE)
def test_recorded_calls_of_other_dialects_have_a_picture_once(
    tmp_path: Path, part_of_dialect: dict[str, Any]
) -> None:
    messages = [{"role": "user", "content": [part_of_dialect, part(png(2))]}]
    call = Call(call_id="c", episode_id="e", request={"messages": messages, "contents": messages})
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        writer.put(call, Episode(episode_id="e"))
    with open_trace(tmp_path) as trace:
        [row] = trace.query("SELECT request, messages_suffix FROM calls").to_pylist()
        assert ENCODED[:40] not in json.dumps(row)
        assert calls_of(trace, "e") == [call]


@pytest.mark.parametrize("place", ["task", "metadata", "output", "event", "response", "tool"])
def test_pictures_are_stored_once_wherever_they_are(tmp_path: Path, place: str) -> None:
    message = {"role": "user", "content": [text("Where?"), part(png())]}
    fields: dict[str, Any] = {
        "task": {"task": Task(init_messages=[message])},
        "metadata": {"task": Task(main_query="Where?", metadata={"map": url_of(png())})},
        "output": {"output": {"map": [url_of(png())]}},
        "event": {"events": (Event(name="look", result={"map": url_of(png())}),)},
    }
    response = {"choices": [{"message": {"role": "assistant", "images": [part(png())]}}]}
    tool = {"role": "tool", "tool_call_id": "1", "content": [part(png()), part(png())]}
    call = Call(
        call_id="c",
        episode_id="e",
        request={"messages": [message, tool]},
        response=response if place == "response" else {},
    )
    episode = Episode(episode_id="e", calls=(call,), **fields.get(place, {}))
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        writer.put(call, episode)
    with open_trace(tmp_path) as trace:
        assert episodes(trace) == [episode]
        assert len(trace.query("SELECT digest FROM pictures")) == 1
        columns = ("task", "output", "events")
        [row] = trace.query(f"SELECT {', '.join(columns)} FROM episodes").to_pylist()
    assert ";base64" not in json.dumps(row)


SPELLINGS = [
    url_of(png(2)),
    url_of(png(2), "image/jpeg"),
    "DATA:IMAGE/PNG;BASE64," + base64.b64encode(png(2)).decode(),
    "data:image/png;charset=utf-8;base64," + base64.b64encode(png(2)).decode(),
    "data:image/png;base64," + base64.encodebytes(png(2)).decode(),
    "data:image/png;base64," + base64.urlsafe_b64encode(png(2)).decode().rstrip("="),
    "data:image/png;base64,AAAA",
    "data:image/png,AAAA",
    "data:text/plain;base64,AAAA",
    "https://example.org/picture.png",
    "ajet-picture:" + "0" * 64,
    "ajet-picture:" + picture_of(png(2)).digest,
    "ajet-picture::" + picture_of(png(2)).digest,
    "ajet-picture:" + picture_of(png(2)).digest + ",data:image/gif;base64",
    "ajet-picture:",
    "look at ajet-picture:" + picture_of(png(2)).digest,
    "data:image/png;base64,",
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_text_is_read_as_it_was_written(tmp_path: Path, spelling: str) -> None:
    messages = [
        {"role": "user", "content": [part(png(2)), part(spelling), text(spelling)]},
        {"role": "tool", "content": spelling},
    ]
    call = Call(call_id="c", episode_id="e", request={"messages": messages, "user": spelling})
    episode = Episode(episode_id="e", output=spelling, calls=(call,))
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        writer.put(call, episode)
    with open_trace(tmp_path) as trace:
        assert episodes(trace) == [episode]


DRAWN = [png(seed) for seed in range(3)]
CONTENTS = st.one_of(
    st.sampled_from(["hello", *SPELLINGS]),
    st.lists(
        st.one_of(
            st.sampled_from([*SPELLINGS, *map(url_of, DRAWN)]).map(part),
            st.sampled_from(["hello", *SPELLINGS]).map(text),
            st.sampled_from(BARE),
            st.sampled_from(SPELLINGS).map(lambda data: {"mimeType": "image/png", "data": data}),
        ),
        max_size=3,
    ),
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": CONTENTS}),
    min_size=1,
    max_size=4,
)
PLACED = st.lists(st.sampled_from(DRAWN), max_size=3).map(
    lambda files: tuple(
        PlacedPicture(3 * i + 1, 3 * i + 3, picture_of(data), 2) for i, data in enumerate(files)
    )
)


@settings(max_examples=25, deadline=None)
@given(
    conversations=st.lists(st.tuples(MESSAGES, PLACED), min_size=1, max_size=4),
    outputs=st.lists(CONTENTS, min_size=2, max_size=2),
    files=st.integers(1, 2),
)
@pytest.mark.slow
def test_calls_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory,
    conversations: list[tuple[list[dict[str, Any]], tuple[PlacedPicture, ...]]],
    outputs: list[Any],
    files: int,
) -> None:
    directory = tmp_path_factory.mktemp("law")
    written = {}
    for number in range(files):
        name = f"e{number}"
        history: list[dict[str, Any]] = []
        calls = []
        for turn, (messages, pictures) in enumerate(conversations):
            history = [*history, *messages]
            calls.append(
                Call(
                    call_id=f"{name}-{turn}",
                    episode_id=name,
                    index=turn,
                    request={"messages": history},
                    response={"content": outputs[0]},
                    prompt_ids=np.arange(12),
                    pictures=pictures,
                )
            )
        calls = place_all(calls)
        written[name] = Episode(episode_id=name, output=outputs[1], calls=tuple(calls))
        with TraceWriter(directory / f"trace-{number}.duckdb") as writer:
            writer.put(*calls, written[name])
    with open_trace(directory) as trace:
        assert {episode.episode_id: episode for episode in episodes(trace)} == written
        for name, episode in written.items():
            assert tuple(calls_of(trace, name)) == episode.calls


def test_a_live_trace_has_its_pictures(tmp_path: Path) -> None:
    calls = looking(3, [png(seed) for seed in range(3)])
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        writer.put(*calls, Episode(episode_id="e"))
        writer.flush()
        assert calls_of(writer, "e") == calls  # type: ignore[arg-type]


KILLED = """
import os, sys
from pathlib import Path
from ajet_sdk.trace.writer import TraceWriter
from tests.drawings import png
from tests.sdk.trace.test_trace_pictures import looking

calls = looking(20, [png(seed, 100, 100) for seed in range(20)])
writer = TraceWriter(Path(sys.argv[1]), survives="kill", flush_ms=10_000_000, flush_rows=1_000_000)
for call in calls:
    writer.put(call)
os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_pictures_survive_a_kill_and_are_in_the_journal_once(tmp_path: Path) -> None:
    path = tmp_path / "trace.duckdb"
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], env=os.environ, check=False)
    assert done.returncode == -signal.SIGKILL
    screenshots = [png(seed, 100, 100) for seed in range(20)]
    [journal] = tmp_path.glob("*.journal")
    assert journal.stat().st_size < 2 * sum(map(len, screenshots))
    with open_trace(path) as trace:
        assert calls_of(trace, "e") == looking(20, screenshots)
        assert len(trace.query("SELECT digest FROM pictures")) == 20


@pytest.mark.slow
def test_a_run_in_progress_is_read_with_its_pictures(tmp_path: Path) -> None:
    calls = looking(3, [png(seed, 100, 100) for seed in range(3)])
    path = tmp_path / "trace.duckdb"
    with TraceWriter(path) as writer, Gateway(writer):
        writer.put(*calls, Episode(episode_id="e"))
        writer.flush()
        with open_trace(path) as trace:
            assert calls_of(trace, "e") == calls
            [row] = trace.query("SELECT count(*) AS n FROM pictures").to_pylist()
            assert row["n"] == 3


@pytest.mark.slow
def test_many_files_are_read_with_their_pictures(tmp_path: Path) -> None:
    written = {}
    for number in range(20):
        name = f"e{number:02}"
        calls = looking(2, [png(0), png(number)], name)
        written[name] = calls
        with TraceWriter(tmp_path / f"trace-{number}.duckdb") as writer:
            writer.put(*calls, Episode(episode_id=name))
    with open_trace(tmp_path) as trace:
        read = {episode.episode_id: list(episode.calls) for episode in episodes(trace)}
    assert read == written
