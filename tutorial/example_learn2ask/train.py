"""Trains `learn2ask.yaml` with the judge's model in `judge_model.py`; overrides as of `ajet train` may follow.

python tutorial/example_learn2ask/train.py ajet.trainer_common.seed=1
"""

from __future__ import annotations

import sys
from pathlib import Path

from judge_model import served

import ajet


def main() -> None:
    with served() as url:
        endpoint = f"ajet.task_judge.llm.base_url={url}"
        ajet.train(ajet.load_config(Path(__file__).with_name("learn2ask.yaml"), [endpoint, *sys.argv[1:]]))


if __name__ == "__main__":
    main()
