"""Pictures of every screen of `ajet trace view`, and of `ajet dataset label`, as SVG.

    python docs/screenshots.py TRACE OUT [ROWS]

TRACE is an experiment's directory below the directory in which its run was started, for the tokenizer is looked for
from there. OUT is a directory, made if it does not exist; ROWS is a dataset.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

os.environ.setdefault("TEXTUAL_ANIMATIONS", "none")

from textual.pilot import Pilot

from ajet_sdk.protocols import TraceReader
from ajet_tools.dataset.files.rows import read
from ajet_tools.dataset.labels import Labels, draw, estimate
from ajet_tools.trace.locate import open_located
from ajet_tools.tui.label import LabelApp
from ajet_tools.tui.trace.app import TraceApp

SIZE = (110, 34)
Prepare = Callable[[Pilot[None]], Awaitable[None]]


async def picture(reader: TraceReader, where: Path, out: Path, name: str, prepare: Prepare) -> None:
    """One screen, once its workers have answered."""
    app = TraceApp(reader, where)
    async with app.run_test(size=SIZE) as pilot:
        app.theme = "textual-dark"
        await quiet(pilot)
        await prepare(pilot)
        await quiet(pilot)
        svg = app.export_screenshot(title="ajet trace view")
        assert "ids,&#160;not&#160;text" not in svg, (
            "the run's tokenizer was not found: give launcher_record/NAME"
        )
        (out / f"{name}.svg").write_text(svg, encoding="utf-8")
    print(out / f"{name}.svg")


async def quiet(pilot: Pilot[None]) -> None:
    """Until nothing but the follow mode is at work."""
    for _ in range(100):
        await pilot.pause(0.1)
        if all(worker.is_finished or worker.group == "follow" for worker in pilot.app.workers):
            break
    await pilot.pause(0.3)


def opened(open_it: Callable[[TraceApp], None], *keys: str) -> Prepare:
    """Open a screen, and press keys on it."""

    async def prepare(pilot: Pilot[None]) -> None:
        app = pilot.app
        assert isinstance(app, TraceApp)
        open_it(app)
        await quiet(pilot)
        await pilot.press(*keys)

    return prepare


def screens(run: str, episode: str, group: list[str]) -> dict[str, Prepare]:
    """Each picture's name, and how to come there."""
    return {
        "runs": opened(lambda app: None),
        "run": opened(lambda app: app.open_run(run)),
        "run-ledger": opened(lambda app: app.open_run(run), "v"),
        "episodes": opened(lambda app: app.open_episodes(run)),
        "episode": opened(lambda app: app.open_episode(episode)),
        "tokens": opened(lambda app: app.open_tokens(episode), "m", *["right"] * 4),
        "compare": opened(lambda app: app.open_compare(group)),
        "feedback": opened(lambda app: app.open_feedback(episode)),
    }


def chosen(reader: TraceReader) -> tuple[str, str, list[str]]:
    """The newest run, a long trained episode with a reward, and two attempts at one task that went differently."""
    (run,) = reader.query("SELECT run_id FROM runs ORDER BY started_at DESC LIMIT 1")[
        "run_id"
    ].to_pylist()
    (episode,) = reader.query(
        """
        SELECT episode_id FROM calls JOIN episodes USING (episode_id) JOIN trained USING (episode_id, call_id)
        WHERE episodes.run_id = $1 AND advantages[1] > 0
        GROUP BY ALL ORDER BY count(DISTINCT call_id) DESC, max(episodes.step), episode_id LIMIT 1""",
        [run],
    )["episode_id"].to_pylist()
    group = reader.query(
        """
        WITH attempts AS (SELECT group_id, episode_id, sum(value) AS reward
          FROM episodes JOIN rewards USING (episode_id) WHERE run_id = $1 GROUP BY ALL)
        SELECT list(episode_id ORDER BY reward, episode_id) AS ids FROM attempts
        GROUP BY group_id ORDER BY max(reward) - min(reward) DESC, group_id LIMIT 1""",
        [run],
    )["ids"].to_pylist()[0]
    return run, episode, [group[0], group[-1]]


async def main(trace: Path, out: Path) -> None:
    above = next(
        (parent.parent for parent in trace.parents if parent.name == "launcher_record"),
        trace.parent,
    )
    os.chdir(above)  # no path of this machine in a picture
    reader, _ = open_located(trace)
    where = trace.relative_to(above)
    for name, prepare in screens(*chosen(reader)).items():
        await picture(reader, where, out, name, prepare)
    reader.close()


async def dataset(rows: Path, out: Path) -> None:
    """A sample of a dataset, of which some rows are labelled; the file and its labels stay as they are."""
    os.chdir(rows.parent)  # no path of this machine in a picture
    with tempfile.TemporaryDirectory() as folder:
        labels = Labels(Path(folder) / "labels.jsonl")
        app = LabelApp(
            rows.name,
            labels,
            lambda: draw(read(rows.name), 50, 0),
            lambda sample: estimate(sample, labels),
        )
        async with app.run_test(size=SIZE) as pilot:
            await quiet(pilot)
            await pilot.press("a", "a", "x", "a")
            await quiet(pilot)
            text = app.export_screenshot(title="ajet dataset label")
    (out / "dataset-label.svg").write_text(text, encoding="utf-8")
    print(out / "dataset-label.svg")


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    Path(sys.argv[2]).mkdir(parents=True, exist_ok=True)
    given = [Path(argument).absolute() for argument in sys.argv[1:]]
    asyncio.run(main(given[0], given[1]))
    if len(given) == 3:
        asyncio.run(dataset(given[2], given[1]))
