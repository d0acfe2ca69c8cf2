"""Loads environments of any kind, with their tasks.

This module, `process`, `spec`, `gymnasium_envs`, `mcp`, `openenv` and `verifiers` run in the
processes of the environment, whose interpreter may lack ajet and its dependencies: they import only
the standard library and, inside functions, the package that they adapt.

An environment class of a user:

    class Counter:
        @staticmethod
        def tasks(split): ...              # the task ids of a split
        def __init__(self, task_id): ...
        def reset(self): ...               # the first observation: text, a message, or a list of messages
        def step(self, action): ...        # observation, reward, terminated, info; or as gymnasium's, with truncated
        def evaluate(self): ...            # optional: the score; by default the sum of the rewards
        def info(self): ...                # optional: any JSON value, e.g. {"tools": [...]}
        def close(self): ...               # optional

`step` gets the text of the agent's message, or the whole message if its parameter is called
`message`. `evaluate` and `info` may take `params`. All methods may be async.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ajet_sdk.environments import gymnasium_envs, mcp, openenv, verifiers
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


KINDS: dict[str, Callable[[str, Spec], Callable[[str], Any]]] = {
    "gymnasium": gymnasium_envs.load,
    "mcp": mcp.load,
    "openenv": openenv.load,
    "verifiers": verifiers.load,
}
"""What loads a target, by its prefix."""


@dataclass(frozen=True)
class Hosted:
    """An environment with its tasks."""

    spec: Spec
    create: Callable[[str], Any]
    """Makes the environment of a task, with `reset`, `step`, `evaluate`, `info` and `close`. Raises
    UnknownTask.

    `reset` returns messages, `step` the result of `answer`.
    """
    own_tasks: Callable[[str], object] | None = None

    def tasks(self, split: str) -> object:
        """The task ids of a split. Raises UnknownTask if there is no such split."""
        if self.own_tasks is not None:
            return self.own_tasks(split)
        splits = self.spec.splits
        target = self.spec.target
        if split not in splits:
            known = ", ".join(splits) or "none"
            raise UnknownTask(
                f"{target} has no split {split!r} (splits: {known}); define it with --split"
                f" {split}=…"
            )
        return splits[split]


def load(spec: Spec) -> Hosted:
    """Load the environment of a target. Raises WrongTarget, ImportError, and any exception of the
    target's module."""
    kind, colon, name = spec.target.partition(":")
    if colon and kind in KINDS:
        if spec.actions and kind != "gymnasium":
            raise _no_actions(spec)
        return Hosted(spec, KINDS[kind](name, spec))
    path, arrow, name = spec.target.replace("->", ":").rpartition(":")
    if not arrow:
        raise WrongTarget(
            f"{spec.target} is not an environment: write FILE.py:NAME, package.module:NAME, or "
            + ", ".join(f"{kind}:NAME" for kind in KINDS)
        )
    module = _module(path)
    factory: Any = getattr(module, name, None)
    if not callable(factory):
        raise WrongTarget(f"{spec.target}: {module.__name__} has no class or function {name}")
    tasks = getattr(factory, "tasks", None)
    if spec.splits and tasks is not None:
        raise WrongTarget(
            f"{spec.target} has tasks of its own, from {name}.tasks(split); leave --split out"
        )

    def create(task_id: str) -> Any:
        environment = factory(task_id, **spec.arguments)
        if hasattr(environment, "action_space"):
            return gymnasium_envs.Played(environment, None, spec.actions)
        if spec.actions:
            raise _no_actions(spec)
        return _Own(environment)

    return Hosted(spec, create, tasks)


def _no_actions(spec: Spec) -> WrongTarget:
    return WrongTarget(
        f"--actions names the actions of a gymnasium environment, and {spec.target} is none; leave"
        " it out"
    )


def _module(path: str) -> ModuleType:
    if not path.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(path)
    file = Path(path).resolve()
    if not file.is_file():
        raise WrongTarget(f"there is no file {path}")
    sys.path.insert(0, str(file.parent))
    module_spec = importlib.util.spec_from_file_location(file.stem, file)
    assert module_spec is not None and module_spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


class _Own:
    """An instance of a user's class."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._whole = "message" in inspect.signature(env.step).parameters
        self._total = 0.0

    async def reset(self) -> list[Json]:
        return messages_of(await resolved(self._env.reset()))

    async def step(self, message: Mapping[str, object]) -> Json:
        action = dict(message) if self._whole else message.get("content") or ""
        result = await resolved(self._env.step(action))
        if not isinstance(result, tuple) or len(result) not in (4, 5):
            raise TypeError(
                f"{type(self._env).__name__}.step must return observation, reward, terminated, info"
                f" (got {result!r:.100})"
            )
        observation, reward, terminated, *truncated, info = result
        self._total += float(reward)
        return answer(observation, reward, bool(terminated) or any(truncated), info)

    async def evaluate(self, params: Mapping[str, object]) -> object:
        method = getattr(self._env, "evaluate", None)
        if method is None:
            return self._total
        return await resolved(_with_params(method, params))

    async def info(self, params: Mapping[str, object]) -> object:
        method = getattr(self._env, "info", None)
        if method is None:
            return {}
        return await resolved(_with_params(method, params))

    async def close(self) -> None:
        method = getattr(self._env, "close", None)
        if method is not None:
            await resolved(method())


def _with_params(function: Callable[..., object], params: JsonView) -> object:
    if inspect.signature(function).parameters:
        return function(params)
    return function()
