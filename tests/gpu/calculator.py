"""The math tutorial as a user runs it: its recipe, its agent, its training, on the device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ajet_sdk.config.config import Config, load_config
from ajet_sdk.run import train
from ajet_sdk.trace.reader import open_trace
from tests.gpu import Figure, Setting, Skipped

_TUTORIAL = Path(__file__).parents[2] / "tutorial" / "example_math_agent"
_QUICK = """import dataclasses, sys
sys.path.insert(0, {folder!r})
from recipe import recipe as whole
recipe = dataclasses.replace(whole, enough=0.0, min_steps=1, check_every=1, check_tasks=2, demonstrations=64)
"""


def config_of(setting: Setting, **trainer: Any) -> Config:
    values: dict[str, Any] = {
        "experiment_dir": str(setting.folder / "calculator"),
        "model": {
            "path": str(setting.folder / "models" / "calculator"),
            "device": setting.device.type,
        },
        "rollout": {"name": "transformers"},
        "trainer_common": {"logger": ["console"], **trainer},
    }
    if setting.dry:
        quick = setting.folder / "quick.py"
        quick.write_text(_QUICK.format(folder=str(_TUTORIAL)))
        values["model"] |= {"recipe": f"{quick}->recipe", "dtype": "bfloat16"}
        values["data"] = {"train_batch_size": 2}
        values["rollout"]["num_repeat"] = 2
        values["trainer_common"] |= {"total_steps": 1, "val_tasks": 2}
    return load_config(_TUTORIAL / "math_agent.yaml", values=values)


def calculator(setting: Setting) -> Iterator[Figure]:
    """Reward on held-out tasks after training, against the model as its recipe left it."""
    os.environ.setdefault("OPENAI_API_KEY", "none")
    config = config_of(setting)
    train(config)
    yield from _learnt(setting, config, "local")


def trinity(setting: Setting) -> Iterator[Figure]:
    """Two steps of the same through Trinity, Ray and vLLM."""
    yield from _on_cluster(setting, "trinity", "just install-trinity --cuda")


def verl(setting: Setting) -> Iterator[Figure]:
    """Two steps of the same through verl, Ray and vLLM."""
    yield from _on_cluster(setting, "verl", "ajet install verl --cuda")


def _on_cluster(setting: Setting, backbone: str, command: str) -> Iterator[Figure]:
    if find_spec(backbone) is None or find_spec("ray") is None:
        raise Skipped(f"{backbone} is not installed ({command})")
    if setting.dry and backbone not in setting.named:
        raise Skipped("it takes minutes on a CPU: name it to run it")
    os.environ.setdefault("OPENAI_API_KEY", "none")
    base = config_of(setting, total_steps=2, val_tasks=16)
    changed = {"backbone": backbone, "experiment_dir": str(setting.folder / backbone)}
    rollout = base.rollout.model_copy(update={"name": "auto"})
    config = base.model_copy(update={**changed, "rollout": rollout})
    train(config, ray="local")
    yield from _learnt(setting, config, backbone)


def _learnt(setting: Setting, config: Config, case: str) -> Iterator[Figure]:
    with open_trace(config.directory) as reader:
        rows = reader.query("SELECT name, step, value FROM metrics ORDER BY step").to_pylist()
        outcomes = reader.query(
            "SELECT outcome, sum(tokens) AS n FROM ledger GROUP BY outcome"
        ).to_pylist()

    def series(name: str) -> list[float]:
        return [row["value"] for row in rows if row["name"] == name]

    rewards = series("val/reward")
    better = None if setting.dry or case != "local" else rewards[-1] >= rewards[0] + 0.2
    yield Figure(case, "held-out reward before", rewards[0])
    yield Figure(case, "held-out reward after", rewards[-1], "≥ 0.2 more", better)
    yield Figure(
        case,
        "trained tokens",
        float(sum(row["n"] for row in outcomes if row["outcome"] == "trained")),
    )
    for name, label in (("time/step", "s a step"), ("train/logprob_gap_mean", "gap")):
        if found := series(name):
            yield Figure(case, label, sum(found) / len(found))
