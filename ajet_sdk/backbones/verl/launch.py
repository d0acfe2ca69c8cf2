"""verl's trainer, started and awaited by us: its config composed and checked, its failure as one TrainingError."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ajet_sdk.backbones.shared.failure import failure_of
from ajet_sdk.errors import AjetError, ConfigError, TrainingError

__all__ = ["compose_config", "fit", "validate_config"]


def compose_config(mapping: Mapping[str, Any]) -> Any:
    """verl's default config with the values of the mapping. Raises ConfigError for a key that verl does not know."""
    import verl
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import OmegaConfBaseException

    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        base = compose("ppo_trainer")
    unknown = list(_unknown(mapping, OmegaConf.to_container(base)))
    if unknown:
        raise ConfigError(
            f"verl: unknown keys: {', '.join(unknown)} (to add a key that verl does not list, write +name)"
        )
    try:
        with open_dict(base):
            return OmegaConf.merge(base, OmegaConf.create(_without_plus(mapping)))
    except OmegaConfBaseException as error:
        raise ConfigError(f"verl: {str(error).partition(chr(10))[0]}") from error


_OURS = {"ajet", "actor_rollout_ref.rollout.agent.agent_loop_manager_class"}
_FREE = ("mixed_precision",)
"""Keys that verl reads and whose defaults are not in its YAML files."""


def _unknown(mapping: Mapping[str, Any], known: Mapping[str, Any], path: str = "") -> list[str]:
    found = []
    for name, value in mapping.items():
        here = f"{path}{name}"
        if here in _OURS or str(name).startswith("+") or name in _FREE:
            continue
        if name not in known:
            found.append(here)
        elif isinstance(value, Mapping) and isinstance(known[name], Mapping) and known[name]:
            found += _unknown(value, known[name], f"{here}.")
    return found


def _without_plus(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {
        str(name).removeprefix("+"): _without_plus(value) if isinstance(value, Mapping) else value
        for name, value in mapping.items()
    }


def validate_config(mapping: Mapping[str, Any]) -> Any:
    """The same, checked by verl's own checks. Raises ConfigError with what they say."""
    from hydra.errors import InstantiationException
    from verl.experimental.reward_loop import migrate_legacy_reward_impl
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    config = migrate_legacy_reward_impl(compose_config(mapping))
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            validate_config(config, need_reference_policy(config), need_critic(config))
    except (ValueError, AssertionError, TypeError, NotImplementedError, InstantiationException) as error:
        raise ConfigError(f"verl rejected the config: {error.__cause__ or error}") from error
    return config


async def fit(config: Any, metrics: Path) -> None:
    """Run verl's trainer to its end; it writes a line of metrics for each step to `metrics`.

    Raises TrainingError with the first cause. What verl's processes print is in Ray's logs.
    """
    import ray
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
    from verl.trainer.main_ppo import TaskRunner

    variables = {**get_ppo_ray_runtime_env()["env_vars"], "VERL_FILE_LOGGER_PATH": str(metrics)}
    runner = ray.remote(num_cpus=1)(TaskRunner).options(runtime_env={"env_vars": variables}).remote()
    try:
        await _wait_for(runner.run.remote(config))
    except ray.exceptions.RayError as error:
        raise TrainingError(f"verl's trainer failed: {cause_of(error)} (its output is in Ray's logs)") from error
    finally:
        with contextlib.suppress(Exception):
            ray.kill(runner)  # its actors end with it


def cause_of(error: BaseException) -> str:
    """The first cause in plain words: what we raised ourselves, else what Ray tells of it."""
    inner = error
    while isinstance(getattr(inner, "cause", None), BaseException):
        inner = inner.cause  # type: ignore[attr-defined]
    if isinstance(inner, AjetError):
        return next((line.strip() for line in str(inner).splitlines() if line.strip()), "no message")
    return str(failure_of(str(error)))


async def _wait_for(reference: Any) -> Any:
    return await reference
