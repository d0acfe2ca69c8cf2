"""Serve a model, collect what its users say, train on it, compare, and promote what is better;
round after round.

    python tutorial/example_flywheel/flywheel.py [--rounds 2] [--walks 512] [--held-out 256] [--seed 0]

The users are SIMULATED. Of ten, four say nothing; the others give a thumb up where the goal was
reached and a thumb down where it was not, and one in fifty is mistaken.

Called again it goes on from the model that is in service, with the next round. A round that was
killed is continued, and its walks are not walked again.
"""

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ajet
from ajet_sdk.learn.recipe import build_recipe
from ajet_sdk.trace.feedback import give
from ajet_sdk.types import Feedback
from ajet_sdk.whole_file import write_whole
from ajet_tools.trace.compare.diff import paired

HERE = Path(__file__).resolve().parent
LAKES = HERE.parent / "example_frozenlake"
SILENT, MISTAKEN = 0.4, 0.02


def config(seed: int, *overrides: str) -> ajet.Config:
    return ajet.load_config(
        HERE / "flywheel.yaml", [f"ajet.trainer_common.seed={seed}", *overrides]
    )


def model(checkpoint: Path) -> list[str]:
    return [f"ajet.model.path={checkpoint}", "ajet.model.recipe=null"]


@contextmanager
def serving(checkpoint: Path) -> Iterator[str]:
    """`ajet serve` in a process of its own, as users meet it."""
    command = [
        sys.executable,
        "-m",
        "ajet",
        "serve",
        str(checkpoint),
        "--port",
        "0",
        "--name",
        "walker",
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        for line in server.stdout or ():
            if found := re.search(r"http://\S+/v1", line):
                yield found[0]
                return
        raise RuntimeError(f"ajet serve ended with {server.wait()}")
    finally:
        server.terminate()
        server.wait()


def collect(
    seed: int, url: str, lakes: list[dict[str, Any]], place: Path, draw: random.Random
) -> tuple[int, int]:
    """Let users walk, and store what they say. Returns thumbs up and down."""
    served = [
        f"ajet.model.base_url={url}",
        "ajet.model.name=walker",
        f"ajet.experiment_dir={place}",
    ]
    report = ajet.run(config(seed, *served), tasks=lakes)
    said = []
    for score in report.tasks:
        for episode in score.episodes:
            silent, mistaken = draw.random() < SILENT, draw.random() < MISTAKEN
            if episode.status == "succeeded" and not silent:
                up = (episode.output == "goal") != mistaken
                said.append(
                    Feedback(
                        episode_id=episode.episode_id, author="simulated user", score=float(up)
                    )
                )
    give(place, *said)
    return sum(bool(one.score) for one in said), sum(not one.score for one in said)


def build(place: Path) -> Path:
    """The conversations with a thumb up, as rows of `messages`."""
    rows = place / "liked.jsonl"
    command = [
        "trace",
        "export",
        str(place),
        "--format",
        "messages",
        "--filter",
        "feedback>=1",
        "--out",
        str(rows),
    ]
    subprocess.run([sys.executable, "-m", "ajet", *command], check=True, stdout=subprocess.DEVNULL)
    return rows


def rewards(seed: int, checkpoint: Path, lakes: list[dict[str, Any]], place: Path) -> list[float]:
    """What a checkpoint does on held-out lakes, lake by lake. A walk that failed is no 0: it ends
    the comparison."""
    report = ajet.run(config(seed, *model(checkpoint), f"ajet.experiment_dir={place}"), tasks=lakes)
    if report.failures:
        raise RuntimeError(f"walks failed: {report.failures}")
    return [score.reward for score in report.tasks if score.reward is not None]


def rows_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (LAKES / name).read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--walks", type=int, default=512, help="Walks of users in a round.")
    parser.add_argument("--held-out", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="The first checkpoint; without it the recipe's.")
    given = parser.parse_args()
    home, draw = Path("launcher_record/flywheel"), random.Random(given.seed)
    lakes, held_out = rows_of("train.jsonl"), rows_of("val.jsonl")[: given.held_out]
    draw.shuffle(lakes)
    state = home / "state.json"
    done = (
        json.loads(state.read_text(encoding="utf-8"))
        if state.exists()
        else {"round": 0, "model": given.model}
    )
    current = Path(done["model"] or asyncio.run(build_recipe(config(given.seed)))).resolve()
    known = done.get("rewards") or rewards(given.seed, current, held_out, home / "before")
    if len(known) != len(held_out):
        raise SystemExit(
            f"{state} was measured on {len(known)} lakes; pass --held-out {len(known)}"
        )
    lines = [f"round {done['round']}: held-out reward {sum(known) / len(known):.3f}"]
    for number in range(done["round"] + 1, done["round"] + given.rounds + 1):
        place = home / f"round-{number}"
        said = place / "said.json"
        if not said.exists():
            with serving(current) as url:
                start = (number - 1) * given.walks % len(lakes)
                thumbs = collect(
                    given.seed, url, lakes[start : start + given.walks], place / "served", draw
                )
            write_whole(said, json.dumps(thumbs))
        up, down = json.loads(said.read_text(encoding="utf-8"))
        if not up:
            lines.append(
                f"round {number}: no thumb up, {down} down; there is nothing to learn from"
            )
            break
        data, training = build(place / "served"), place / "trained"
        trained = ajet.train(config(given.seed, *model(current), f"ajet.trainer_common.algorithm.data={data}",
                                    f"ajet.experiment_dir={training}"),
                             resume=any(training.rglob("trace.duckdb")))  # fmt: skip
        assert trained.path is not None
        now = rewards(given.seed, trained.path.resolve(), held_out, place / "compared")
        gain = paired([b - a for a, b in zip(known, now, strict=True)])
        better = gain.low is not None and gain.low > 0
        interval = (
            "" if gain.low is None else f" ({gain.low:+.3f} to {gain.high:+.3f})"
        )  # none where no lake changed
        lines.append(
            f"round {number}: {up} thumbs up, {down} down; held-out reward"
            f" {sum(now) / len(now):.3f}, gain {gain.mean:+.3f}{interval}:"
            f" {'promoted' if better else 'not promoted'}"
        )
        if better:
            current, known = trained.path.resolve(), now
            link = home / "current"
            link.unlink(missing_ok=True)
            link.symlink_to(current)
        write_whole(state, json.dumps({"round": number, "model": str(current), "rewards": known}))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
