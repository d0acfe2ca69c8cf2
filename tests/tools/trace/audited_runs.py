"""Trainings of the smallest model, whose traces are audited: two agents, turns that extend each
other, failures."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import ajet
from ajet_sdk.config.config import Config, load_config
from ajet_sdk.run import train


@ajet.workflow
async def discuss(question: str, model: ajet.Model) -> list[ajet.Reward]:
    """Two turns of a solver, the second one twice, a critic, an agent that is not trained; some
    attempts fail."""
    solver, critic = model.agent("solver"), model.agent("critic", target_tag="judge")
    history: list[dict[str, Any]] = [
        {"role": "system", "content": "Answer."},
        {"role": "user", "content": question},
    ]
    first = await solver.chat(history)
    said = first["content"] or ""
    if sum(map(ord, said)) % 7 == 0:
        raise ValueError("the agent's code does not like this answer")
    history += [first, {"role": "user", "content": "Again."}]
    second, third = await asyncio.gather(solver.chat(history), solver.chat(history))
    verdict = await critic.chat([{"role": "user", "content": (second["content"] or "")[:8]}])
    hurried = asyncio.create_task(
        model.agent("hurried").chat([{"role": "user", "content": "Quick."}])
    )
    await asyncio.wait({hurried}, timeout=0.02)
    hurried.cancel()
    for text in ("Go on.", "Stop."):  # a split that trains nothing
        await model.agent("fixed", trainable=False).chat([{"role": "user", "content": text}])
    if question == "Say so.":
        return [ajet.Reward(value=1.0)]
    return [
        ajet.Reward(name="length", value=len(said + (third["content"] or "")) / 10),
        ajet.Reward(
            name="critic",
            value=float("e" in (verdict["content"] or "")),
            agent="critic",
            weight=0.5,
        ),
        ajet.Reward(name="seen", value=9.0, weight=0.0),
    ]


def job(
    place: Path, model: Path, *, rollout: Any = None, data: Any = None, **trainer: Any
) -> Config:
    place.mkdir(parents=True, exist_ok=True)
    for name, words in (("tasks", ("yes", "no", "maybe", "so")), ("val", ("never",))):
        rows = [json.dumps({"question": f"Say {word}."}) + "\n" for word in words]
        (place / f"{name}.jsonl").write_text("".join(rows))
    files = {
        "training": {"file_path": str(place / "tasks.jsonl")},
        "validation": {"file_path": str(place / "val.jsonl")},
    }
    return load_config(
        values={
            "experiment_name": place.name,
            "experiment_dir": str(place / "experiment"),
            "backbone": "local",
            "model": {"path": str(model)},
            "task_reader": {"type": "jsonl_dataset_file", "jsonl_dataset_file": files},
            "data": {"train_batch_size": 2, **(data or {})},
            "rollout": {
                "num_repeat": 4,
                "temperature": 1.0,
                "max_model_len": 256,
                "min_sound_share": 0.0,
                "max_response_length_in_one_turn": 6,
                **(rollout or {}),
            },
            "trainer_common": {
                "total_steps": 2,
                "val_before_train": True,
                "val_pass_n": 2,
                "test_freq": 2,
                "save_freq": 1,
                "use_kl_loss": False,
                "logger": ["console"],
                **trainer,
            },
        }
    )


def trained(
    place: Path, model: Path, *, resume: bool = False, workflow: Any = discuss, **settings: Any
) -> Path:
    """The directory of a finished training."""
    config = job(place, model, **settings)
    train(config, workflow=workflow, resume=resume)
    return config.directory
