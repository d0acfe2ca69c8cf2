"""Growing by learning value against growing without it: equal calls of the teacher, equal rows,
equal training.

    python tutorial/example_dataset_expansion/learning_value.py --seeds 0 1 2

The teacher (`teacher.py:varied`) writes problems of one to four digits. The first run
(`task_reader.type: growing`) keeps what the policy solves sometimes; the second trains on as many
rows, drawn at random from all that the same calls gave and the check let pass. Both also have the
eight seeds, and are validated on the same held-out problems.
"""

import argparse
import json
import random
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from statistics import mean

from compare import HERE, MATH, reward

from ajet_sdk.trace.reader import open_trace

START = """
    SELECT value FROM metrics m JOIN runs r USING (run_id)
    WHERE m.name = 'val/reward' AND r.status = 'finished' AND m.step = 0
"""
FILES = "jsonl_dataset_file"


def train(name: str, seed: int, steps: int, reader: dict[str, object]) -> Path:
    """Train once; a run that came to its end is not run again."""
    directory = Path("launcher_record") / name
    if reward(directory, "val/reward") is None:
        overrides = {
            "experiment_name": name,
            "data.train_batch_size": 8,
            "trainer_common.seed": seed,
            "trainer_common.total_steps": steps,
            "trainer_common.val_tasks": 128,
            "trainer_common.test_freq": steps,
            "trainer_common.save_freq": steps,
            **{f"task_reader.{key}": value for key, value in reader.items()},
        }
        command = [sys.executable, "-m", "ajet", "--conf", str(MATH / "math_agent.yaml")]
        subprocess.run(
            [*command, *(f"ajet.{key}={value}" for key, value in overrides.items())], check=True
        )
    return directory


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the trainings")
    parser.add_argument("--rows", type=int, default=32, help="that are added to the eight seeds")
    parser.add_argument("--steps", type=int, default=16)
    given = parser.parse_args()
    print("seed  before  by value  without   rows  by value: calls, tried, too hard, too easy")
    found = []
    for seed in given.seeds:
        grown = train(
            f"value-{seed}",
            seed,
            given.steps,
            {
                "type": "growing",
                "growing.every": given.steps,
                "growing.tasks": given.rows,
                "growing.max_calls": 4000,
                f"data_generation.query_reader.{FILES}.training.file_path": HERE / "seeds.jsonl",
                f"data_generation.query_reader.{FILES}.validation.file_path": MATH / "val.jsonl",
                "data_generation.scripted": f"{HERE / 'teacher.py'}->varied",
            },
        )
        [rows] = grown.glob("data/growing/*/step_000000-*")
        kept, refused = rows_of(rows / "train.jsonl"), rows_of(rows / "rejected.jsonl")
        apart = [row for row in refused if row["rejected"]["reason"].endswith("for the policy")]
        drawn = random.Random(seed).sample(kept + apart, len(kept))
        tasks = [
            {"question": row["question"], "answer": row["answer"]}
            for row in [*rows_of(HERE / "seeds.jsonl"), *drawn]
        ]
        file = Path(f"without-{seed}.jsonl").resolve()
        file.write_text("".join(json.dumps(row) + "\n" for row in tasks))
        plain = train(f"without-{seed}", seed, given.steps, {f"{FILES}.training.file_path": file})
        with closing(open_trace(grown)) as trace:
            before = trace.query(START).to_pylist()[0]["value"]
        found.append((before, reward(grown, "val/reward"), reward(plain, "val/reward")))
        calls = len({row["provenance"]["parameters"]["seed"] for row in kept + refused})
        hard = sum(row["rejected"]["reason"].startswith("too hard") for row in apart)
        print(
            f"{seed:>4}  {found[-1][0]:>6.3f}  {found[-1][1]:>8.3f}  {found[-1][2]:>7.3f}  "
            f" {len(kept):>4}  {calls:,}, {len(kept) + len(apart):,}, {hard:,},"
            f" {len(apart) - hard:,}"
        )
    print("mean  {:>6.3f}  {:>8.3f}  {:>7.3f}".format(*map(mean, zip(*found, strict=True))))


if __name__ == "__main__":
    main()
