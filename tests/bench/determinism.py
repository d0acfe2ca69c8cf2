"""What `rollout.deterministic` costs: the same job of many short conversations, its rollouts and
its steps with and without it. 48 episodes at once, seven calls each, a model of 0.01M
parameters."""

from __future__ import annotations

import io
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

from ajet_sdk.trace.reader import open_trace
from tests.bench import Figure
from tests.sdk.repeating import repeat, repeating_job
from tests.tiny_models import save_tiny

STEPS, ATTEMPTS = 6, 16


def main() -> list[Figure]:
    with tempfile.TemporaryDirectory() as place:
        model = save_tiny(Path(place) / "model")
        usual, deterministic = (seconds(Path(place) / str(on), model, on) for on in (False, True))
    return [
        Figure(
            f"rollout.deterministic: {what} over the usual mode's",
            deterministic[name] / usual[name],
            "×",
        )
        for name, what in (
            ("time/rollout", "seconds of a rollout"),
            ("time/step", "seconds of a step"),
        )
    ]


def seconds(directory: Path, model: Path, deterministic: bool) -> dict[str, float]:
    """The least seconds of a step by metric: a busy machine only ever adds."""
    config = repeating_job(directory, model, STEPS, attempts=ATTEMPTS, deterministic=deterministic)
    with redirect_stdout(io.StringIO()):
        repeat(config)
    with open_trace(config.directory) as trace:
        rows = trace.query(
            "SELECT name, min(value) AS least FROM metrics WHERE name LIKE 'time/%' GROUP BY name"
        )
        return {row["name"]: row["least"] for row in rows.to_pylist()}
