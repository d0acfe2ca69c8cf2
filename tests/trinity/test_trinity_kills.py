"""Whatever process of a run is killed, and however long after a checkpoint: it is taken up, and
goes to its end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trinity", reason="needs Trinity-RFT: just install-trinity")
pytest.importorskip("ray", reason="needs Ray: just install-trinity")

from ajet_sdk.backbones.shared.steps import resume_at
from ajet_sdk.backbones.trinity.actors import _LateDeletion
from ajet_sdk.backbones.trinity.launch import validate_config
from ajet_sdk.backbones.trinity.learner import run_learner
from ajet_sdk.backbones.trinity.mapping import TrinityPlace, to_trinity
from ajet_sdk.config.config import load_config

from .experiments import Experiment
from .test_trinity_failures import books_balance, process_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("audited")]

EVERY = 3
"""Steps from one checkpoint to the next; weights are handed to the sampler at every step."""

PROCESSES = {
    "driver": None,
    "learner": "trinity.learner",
    "trainer": "WholeBatchTrainer",
    "explorer": "SteadyExplorer",
    "synchronizer": "Synchronizer",
    "engine": "TinkerModel",
}
"""Each by what its command line holds."""


def is_beyond(one: Experiment, checkpoint: int, offset: int) -> bool:
    """Whether the weights handed over last are `offset` steps newer than a checkpoint from that
    step on."""
    steps = []
    for what in ("checkpointed", "state_dict"):
        files = one.directory.glob(f"checkpoint/*/trinity/latest_{what}_iteration.txt")
        steps += [int(text) for file in files if (text := file.read_text())]
    if len(steps) < 2:
        return False
    saved, handed_over = steps
    return saved >= checkpoint and handed_over - saved == offset


@pytest.mark.parametrize("victim", PROCESSES)
def test_a_run_is_taken_up_wherever_it_was_killed(
    experiment: Callable[..., Experiment], nodes: Any, victim: str
) -> None:
    total = EVERY * (EVERY + 2)  # a run that has all its samples ends without an engine
    one = experiment(
        ["single 1", "turns 2"], {"trainer_common": {"total_steps": total, "save_freq": EVERY}}
    )
    resume: list[str] = []
    for offset in range(EVERY):
        one.start("--with-ray-cluster", nodes.address, *resume)
        one.until(partial(is_beyond, one, EVERY * (offset + 1), offset))
        assert one.process is not None
        title = PROCESSES[victim]
        os.kill(one.process.pid if title is None else process_of(one, title), signal.SIGKILL)
        assert one.wait() != 0, one.output()
        resume = ["--resume"]
    one.start("--with-ray-cluster", nodes.address, *resume)
    assert one.wait() == 0, one.output()
    assert one.steps_saved() == total
    assert one.output().count("resuming after step") == EVERY
    assert len(list(one.trinity.glob("log.*"))) == EVERY, "each attempt has logs of its own"
    books_balance(one)
    trained = one.query("SELECT DISTINCT step FROM ledger WHERE outcome = 'trained' ORDER BY step")
    assert [row["step"] for row in trained] == list(range(1, total + 1))


async def train_until(step: int, store: Path, model: Path) -> list[int]:
    """Trinity's own trainer over our learner, step by step without a cluster, as far as it saves
    and hands over.

    Returns the steps whose weights the sampler took.
    """
    document = {
        "backbone": "trinity", "experiment_name": "job", "model": {"path": str(model)},
        "trainer_common": {"n_gpus_per_node": 0, "save_freq": EVERY, "optim": {"lr": 0.01}},
    }  # fmt: skip
    place = TrinityPlace(
        run_id="r", model=str(model), steps=99, lr=0.01, checkpoints=store, tasks=store / "tasks"
    )
    taken = []
    state, log = place.directory / "learner", store / "learner.log"
    async with run_learner(str(model), state, log, temperature=1.0, max_model_len=64):
        config = await asyncio.to_thread(
            validate_config, to_trinity(load_config(values=document), place)
        )
        kind = import_module("trinity.trainer.tinker.tinker_trainer").TinkerTrainerWrapper
        trainer = kind.__new__(kind)  # its own __init__ looks for the synchroniser on a cluster
        trainer.config, trainer.logger = (
            config,
            import_module("trinity.utils.log").get_logger("trainer"),
        )
        trainer._init_algorithm()
        await trainer.prepare()
        trainer.checkpoint_manager = _LateDeletion(trainer.checkpoint_manager, 1)
        while True:
            if trainer.train_step_num:
                await trainer.save_state_dict()
                path = trainer.latest_remote_sampler_path
                await trainer.service_client.create_sampling_client_async(model_path=path)
                taken.append(trainer.train_step_num)
                if trainer.train_step_num % EVERY == 0:
                    await trainer.save_checkpoint()
            if trainer.train_step_num == step:
                break
            trainer._train_step_num += 1
            await trainer.actor_client.optim_step_async(trainer.adam_params)
        (mine,) = state.glob(f"{trainer.model_info.model_id.replace(':', '_')}/sampler_weights")
        kept = sorted(int(one.name.rpartition("-")[2]) for one in mine.iterdir())
        assert kept == taken[-2:], (
            "the newest, and the one before it, with which samplers may begin yet"
        )
    return taken


@pytest.mark.parametrize("offset", range(EVERY))
def test_trinitys_trainer_goes_on_from_a_checkpoint_however_far_it_had_come(
    tmp_path: Path, tiny: Path, offset: int
) -> None:
    killed, end = EVERY + offset, 2 * EVERY + 1
    assert asyncio.run(train_until(killed, tmp_path, tiny)) == list(range(1, killed + 1))
    assert resume_at(tmp_path / "r" / "trinity") == EVERY
    assert asyncio.run(train_until(end, tmp_path, tiny)) == list(range(EVERY, end + 1))
