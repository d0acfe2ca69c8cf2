"""Three trainings with the same budget and held-out problems: 8 seeds, 500 tasks grown of them, 500
true ones.

    python tutorial/example_dataset_expansion/compare.py expanded/train.jsonl --seeds 0 1 2

Nine trainings of about 3 minutes, one after another; each is kept in
launcher_record/compare-SET-SEED, and one that is done is not run again.
"""

import argparse
import json
import subprocess
import sys
from contextlib import closing
from itertools import islice
from pathlib import Path
from statistics import mean

from ajet_sdk.trace.reader import open_trace

HERE = Path(__file__).resolve().parent
MATH = HERE.parent / "example_math_agent"
LAST = """
    SELECT m.value FROM metrics m JOIN runs r USING (run_id)
    WHERE m.name = ? AND r.status = 'finished' ORDER BY m.step DESC LIMIT 1
"""


def reward(directory: Path, name: str) -> float | None:
    """The last validation of a run that came to its end."""
    if not (directory / "trace.duckdb").exists():
        return None
    with closing(open_trace(directory)) as trace:
        found = trace.query(LAST, [name]).to_pylist()
    return found[0]["value"] if found else None


def train(tasks: Path, name: str, seed: int) -> None:
    overrides = {
        "task_reader.jsonl_dataset_file.training.file_path": tasks.resolve(),
        "experiment_name": name,
        "trainer_common.seed": seed,
    }
    command = [sys.executable, "-m", "ajet", "--conf", str(MATH / "math_agent.yaml")]
    subprocess.run(
        [*command, *(f"ajet.{key}={value}" for key, value in overrides.items())], check=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("expanded", type=Path, help="what `ajet dataset expand` made")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the trainings")
    given = parser.parse_args()
    true = Path("true.jsonl")
    with (MATH / "train.jsonl").open() as lines:
        true.write_text("".join(islice(lines, 500)))
    sets = {"seeds": HERE / "seeds.jsonl", "expanded": given.expanded, "true": true}
    for seed in given.seeds:
        for name, tasks in sets.items():
            directory = Path("launcher_record") / f"compare-{name}-{seed}"
            if reward(directory, "val/reward") is None:
                train(tasks, directory.name, seed)
    print(f"{'tasks':<10}{'distinct':>9}{'reward':>9}{'greedy':>9}   each run")
    for name, tasks in sets.items():
        directories = [Path("launcher_record") / f"compare-{name}-{seed}" for seed in given.seeds]
        rewards = [reward(directory, "val/reward") or 0.0 for directory in directories]
        greedy = [reward(directory, "val/greedy_reward") or 0.0 for directory in directories]
        distinct = len({json.loads(line)["question"] for line in tasks.read_text().splitlines()})
        each = " ".join(f"{one:.3f}" for one in rewards)
        print(f"{name:<10}{distinct:>9}{mean(rewards):>9.3f}{mean(greedy):>9.3f}   {each}")


if __name__ == "__main__":
    main()
