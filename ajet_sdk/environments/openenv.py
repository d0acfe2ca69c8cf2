"""OpenEnv environments by the name of their installed package: `openenv:echo_env`. A task id is a
seed.

An action is the JSON of its class's fields, or plain text if the class requires a single text. An
observation is the JSON of its fields, or plain text if it has a single text.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import pkgutil
import typing
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ajet_sdk.environments.spec import (
    Spec,
    UnknownTask,
    WrongTarget,
    answer,
    messages_of,
    resolved,
)

if TYPE_CHECKING:
    from ajet_sdk.types import Json, JsonView


def load(name: str, spec: Spec) -> Callable[[str], _Episode]:
    """Raises WrongTarget unless the package has exactly one environment, ImportError if it is not
    installed."""
    from openenv.core.env_server.interfaces import Environment

    package = _package(name)
    classes = sorted(set(_environments(package, Environment)), key=lambda cls: cls.__name__)
    if len(classes) != 1:
        names = ", ".join(cls.__name__ for cls in classes) or "none"
        raise WrongTarget(
            f"openenv:{name}: the package {package.__name__} must contain one environment (found"
            f" {names})"
        )
    [environment] = classes
    action = typing.get_type_hints(environment.step)["action"]  # type: ignore[attr-defined]

    def create(task_id: str) -> _Episode:
        if not task_id.isdecimal():
            raise UnknownTask(
                f"a task of {spec.target} is a seed, which is a number (got {task_id!r})"
            )
        return _Episode(environment(**spec.arguments), action, int(task_id))

    return create


def _package(name: str) -> ModuleType:
    """Import the package `echo_env` for `echo_env`, `echo-env`, `openenv-echo` or `echo`."""
    plain = name.removeprefix("openenv-").replace("-", "_")
    for module in (plain, f"{plain}_env"):
        if importlib.util.find_spec(module) is not None:
            return importlib.import_module(module)
    raise ImportError(
        f"neither package {plain} nor {plain}_env is installed; install the environment's package"
        " first"
    )


def _environments(package: ModuleType, base: type) -> Iterator[type]:
    """The environment classes defined in the package's `server` modules."""
    server = importlib.import_module(f"{package.__name__}.server")
    names = [
        f"{server.__name__}.{info.name}"
        for info in pkgutil.iter_modules(server.__path__)
        if info.name != "app"
    ]
    for module in [server, *map(importlib.import_module, names)]:
        for value in vars(module).values():
            is_local = (
                inspect.isclass(value) and value.__module__.partition(".")[0] == package.__name__
            )
            if is_local and issubclass(value, base) and not inspect.isabstract(value):
                yield value


class _Episode:
    def __init__(self, env: Any, action: Any, seed: int) -> None:
        self._env = env
        self._action = action
        self._seed = seed
        self._total = 0.0
        self._over = self._rewarded = False

    async def reset(self) -> list[Json]:
        seeded = "seed" in inspect.signature(self._env.reset).parameters
        observation = await resolved(self._env.reset(**({"seed": self._seed} if seeded else {})))
        return messages_of(_shown(observation))

    async def step(self, message: JsonView) -> Json:
        try:
            action = self._read(str(message.get("content") or ""))
        except Exception as error:  # noqa: BLE001  a validator of the action's class may raise anything
            # A mistake of the agent, from which it can learn: the environment does not change.
            return answer(f"Not an action: {error}", 0.0, False, {"invalid": True})
        observation = await resolved(self._env.step(action))
        self._rewarded |= observation.reward is not None
        self._over |= bool(observation.done)
        reward = float(observation.reward or 0.0)
        self._total += reward
        return answer(
            _shown(observation), reward, bool(observation.done), dict(observation.metadata or {})
        )

    def evaluate(self, params: Mapping[str, object]) -> float:
        """The sum of the rewards. Raises LookupError if the episode ended without any."""
        if self._over and not self._rewarded:
            raise LookupError("the environment ended the episode without a reward")
        return self._total

    def info(self, params: Mapping[str, object]) -> Json:
        return {
            "action": self._action.model_json_schema(),
            "state": self._env.state.model_dump(mode="json"),
        }

    def close(self) -> None:
        self._env.close()

    def _read(self, text: str) -> object:
        """Parse an action. Raises ValueError."""
        required = [
            name for name, field in self._action.model_fields.items() if field.is_required()
        ]
        if (
            len(required) == 1
            and self._action.model_fields[required[0]].annotation is str
            and not text.lstrip().startswith("{")
        ):
            return self._action(**{required[0]: text})
        return self._action.model_validate_json(text)


def _shown(observation: Any) -> str:
    fields = observation.model_dump(mode="json", exclude={"done", "reward", "metadata"})
    texts = list(fields.values())
    if len(texts) == 1 and isinstance(texts[0], str):
        return texts[0]
    return json.dumps(fields)
