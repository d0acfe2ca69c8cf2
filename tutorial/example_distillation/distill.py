"""Train a teacher, distil it into a student, and say what both do on held-out lakes.

    python tutorial/example_distillation/distill.py [--seeds 3] [KEY=VALUE ...]

KEY=VALUE are overrides of both configs, such as ajet.trainer_common.total_steps=2.
"""

import argparse
from pathlib import Path

import ajet
from ajet_sdk.trace.reader import open_trace

HERE = Path(__file__).resolve().parent


def distill(seed: int, overrides: list[str]) -> tuple[float, float, float]:
    """val/reward of the teacher, and of the student before and after."""
    place, own = Path(f"launcher_record/distillation-{seed}"), [*overrides, f"ajet.trainer_common.seed={seed}"]
    teacher = ajet.train(ajet.load_config(HERE / "teacher.yaml", [*own, f"ajet.experiment_dir={place / 'teacher'}"]))
    taught = [f"ajet.trainer_common.algorithm.teacher={teacher.path}", f"ajet.experiment_dir={place / 'student'}"]
    student = ajet.train(ajet.load_config(HERE / "student.yaml", [*own, *taught]))
    reader = open_trace(place / "student")
    try:
        sql = "SELECT value FROM metrics WHERE run_id = ? AND name = 'val/reward' ORDER BY step LIMIT 1"
        before = reader.query(sql, [student.run_id]).to_pylist()[0]["value"]
    finally:
        reader.close()
    return teacher.metrics["val/reward"], before, student.metrics["val/reward"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    found = [(seed, *distill(seed, given.overrides)) for seed in range(given.seeds)]
    print("seed  teacher  student before  student after")
    for seed, teacher, before, after in found:
        print(f"{seed:4}  {teacher:7.3f}  {before:14.3f}  {after:13.3f}")


if __name__ == "__main__":
    main()
