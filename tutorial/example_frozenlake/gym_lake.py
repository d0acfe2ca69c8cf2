"""The lakes of train.jsonl and val.jsonl as gymnasium's FrozenLake, for
`ajet env serve gym_lake.py:GymLake`.

A task id is a map. What the agent sees of a lake is what `Lake.look` says of it; the game is
gymnasium's.
"""

import json
from pathlib import Path

import gymnasium
from lake import MOVES, Lake

ACTIONS = {"left": 0, "down": 1, "right": 2, "up": 3}
FILES = {"train": "train.jsonl", "dev": "val.jsonl"}
LETTERS = str.maketrans("A.#", "SFH")


class GymLake:
    @staticmethod
    def tasks(split: str) -> list[str]:
        lines = Path(__file__).with_name(FILES[split]).read_text(encoding="utf-8").splitlines()
        return ["/".join(json.loads(line)["lake"]) for line in lines]

    def __init__(self, task_id: str) -> None:
        self.lake = Lake.of(task_id.split("/"))
        rows = [row.translate(LETTERS) for row in self.lake.rows]
        self.env = gymnasium.make(
            "FrozenLake-v1", desc=rows, is_slippery=False, max_episode_steps=12
        )
        self.reward = 0.0

    def reset(self) -> list[dict[str, str]]:
        self.env.reset()
        return [
            {"role": "system", "content": "Reach the goal."},
            {"role": "user", "content": self.lake.look()},
        ]

    def step(self, action: str) -> tuple[str, float, bool, dict[str, str]]:
        move = action.strip()
        if move not in MOVES:
            return "That is no move.", 0.0, True, {"end": "nonsense"}
        place, reward, terminated, truncated, _ = self.env.step(ACTIONS[move])
        self.lake.at = divmod(int(place), len(self.lake.rows[0]))
        self.reward = float(reward)
        if terminated or truncated:
            return (
                "The end.",
                self.reward,
                True,
                {"end": "goal" if reward else "hole" if terminated else "lost"},
            )
        return self.lake.look(), self.reward, False, {}

    def evaluate(self) -> float:
        return self.reward

    def close(self) -> None:
        self.env.close()
