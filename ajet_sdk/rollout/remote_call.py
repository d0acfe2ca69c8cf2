"""Serializes calls of users' functions for worker processes, and their results.

Functions and classes in users' files are sent as file and name, so that the other process imports
the file and makes its own clients. Constants of a run (config, judge, tokenizer) are sent once per
process.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import pickle
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import ray.cloudpickle as cloudpickle

from ajet_sdk.agent.context import ActiveEpisode
from ajet_sdk.cluster.code import installed_code, is_library_file
from ajet_sdk.config.config import Config
from ajet_sdk.config.objects import import_as
from ajet_sdk.environments.client import GymEnv
from ajet_sdk.errors import AjetError, ConfigError, EnvironmentUnavailable
from ajet_sdk.rollout.outcomes import UserError, describe_error, is_infrastructure_error
from ajet_sdk.rollout.threads import Outcome


@dataclass(frozen=True)
class RemoteCall:
    """A call to a user's function in a worker process."""

    function: Callable[[], object]
    label: str
    """The function's name in messages."""
    timeout: float | None
    active: ActiveEpisode | None
    """The episode of its requests."""

    @property
    def environment(self) -> GymEnv | None:
        """The environment among the function's arguments, or in its task."""
        function = self.function
        if not isinstance(function, partial):
            return None
        given = (
            getattr(value, "gym_env", value)
            for value in (*function.args, *function.keywords.values())
        )
        return next((value for value in given if isinstance(value, GymEnv)), None)


@dataclass(frozen=True)
class Reply:
    """The result of a call. `error` is an exception of ajet itself, or a report of any other."""

    value: Any = None
    error: AjetError | _ErrorReport | None = None
    fault: EnvironmentUnavailable | None = None
    """A fault of the environment, even if the function caught it."""

    def outcome(self) -> Outcome:
        """Converts to an outcome; exceptions of other classes become a `UserError` with the same
        class name."""
        if isinstance(self.error, _ErrorReport):
            report = self.error
            return Outcome(
                error=type(report.name, (UserError,), {})(
                    report.message, report.description, report.infrastructure
                )
            )
        return Outcome(self.value, self.error)


@dataclass(frozen=True)
class _ErrorReport:
    """An exception as text: its class may not exist elsewhere, and few can be pickled."""

    name: str
    message: str
    description: str
    infrastructure: bool


def dump_outcome(outcome: Outcome, label: str, environment: GymEnv | None = None) -> bytes:
    """Pickle an outcome; a value that cannot be pickled becomes an error."""
    fault = None if environment is None else environment.fault
    if outcome.error is not None:
        return dumps(Reply(error=_report_error(outcome.error), fault=fault))
    try:
        return dumps(Reply(outcome.value, fault=fault))
    except Exception as error:  # noqa: BLE001  pickling may raise anything
        wrong = ConfigError(
            f"{label} returned {type(outcome.value).__name__}, which cannot be sent between"
            f" processes ({type(error).__name__}: {error}); return text, numbers, lists and"
            " dictionaries of them, or Rewards"
        )
        return dumps(Reply(error=wrong, fault=fault))


def _report_error(error: BaseException) -> AjetError | _ErrorReport:
    if isinstance(error, AjetError):
        with suppress(Exception):  # an exception whose arguments are not its message
            if type(pickle.loads(pickle.dumps(error))) is type(error):
                return error
    installed, text = installed_code(), describe_error(error)
    return _ErrorReport(
        type(error).__name__,
        str(error),
        installed.original_paths(text) if installed else text,
        is_infrastructure_error(error),
    )


@dataclass
class ObjectStore:
    """Objects that are sent to a process once, with keys that replace them in calls."""

    keys: dict[int, str] = field(default_factory=dict)
    objects: dict[str, object] = field(default_factory=dict)

    def key(self, thing: object) -> str | None:
        """The key of an object that is constant during a run; None for others."""
        key = self.keys.get(id(thing))
        if key is None and _is_constant(thing):
            key = self.keys[id(thing)] = f"{len(self.keys)}"
            self.objects[key] = thing
        return key


def _is_constant(thing: object) -> bool:
    if isinstance(thing, (Config, type)):
        return isinstance(thing, Config)
    return _is_engine_part(thing) or hasattr(type(thing), "compute_reward")


def _is_engine_part(thing: object) -> bool:
    return str(type(thing).__module__).startswith(("ajet_sdk.engines.", "ajet_sdk.tokens."))


def dumps(thing: object, store: ObjectStore | None = None) -> bytes:
    """Pickle a call or reply; objects in `store` are replaced with their keys. Raises as pickling
    does."""
    into = io.BytesIO()
    _Pickler(into, store).dump(thing)
    return into.getvalue()


def dump_object(thing: object) -> bytes:
    """Pickle an object of `ObjectStore`."""
    return dumps(DeferredObject(dumps(thing)) if _is_engine_part(thing) else thing)


def loads(data: bytes, store: Mapping[str, object] | None = None) -> Any:
    return _Unpickler(io.BytesIO(data), store or {}).load()


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    def __init__(self, into: io.BytesIO, store: ObjectStore | None) -> None:
        super().__init__(into)
        self._kept = store

    def persistent_id(self, thing: object) -> tuple[str, ...] | None:
        if isinstance(thing, (FunctionType, type)):
            return _reference(thing)
        key = self._kept.key(thing) if self._kept is not None else None
        return None if key is None else ("kept", key)


class _Unpickler(pickle.Unpickler):
    def __init__(self, source: io.BytesIO, store: Mapping[str, object]) -> None:
        super().__init__(source)
        self._kept = store

    def persistent_load(self, name: Any) -> object:
        if name[0] == "kept":
            return self._kept[name[1]]
        _, file, module, qualname = name
        value: Any = _load_module(file, module)
        for step in qualname.split("."):
            value = getattr(value, step)
        return value


def _reference(thing: Any) -> tuple[str, ...] | None:
    """File, module and name of a function or class at the top level of a user's file; None for
    others."""
    module = sys.modules.get(getattr(thing, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if (
        module is None
        or not file
        or is_library_file(Path(file))
        or module.__name__.partition(".")[0] in _OURS
    ):
        return None
    value: Any = module
    for step in thing.__qualname__.split("."):
        value = getattr(value, step, None)
    if value is not thing:
        return None
    installed = installed_code()
    path = str(Path(file).resolve())
    name = _MAIN if module.__name__ == "__main__" else module.__name__
    return "file", installed.original_paths(path) if installed else path, name, thing.__qualname__


_OURS = ("ajet", "ajet_sdk", "ajet_tools")
_MAIN = "ajet_main"
"""Name of the main program in other processes: importing it must not run it."""


def _load_module(sent_file: str, name: str) -> ModuleType:
    """Imports a user's file once. Raises ConfigError if it was not sent."""
    installed = installed_code()
    file = (installed.local_path(sent_file) if installed else None) or Path(sent_file)
    for known in (sys.modules.get(name), sys.modules.get("__main__") if name == _MAIN else None):
        origin = getattr(known, "__file__", None)
        if known is not None and origin and Path(origin).resolve() == file.resolve():
            return known
    if not file.is_file():
        raise ConfigError(
            f"{sent_file} is not part of the code that was sent to this machine; put it beside the"
            " workflow"
        )
    importable = importlib.util.find_spec(name) if "." in name or name not in sys.modules else None
    if (
        importable is not None
        and importable.origin
        and Path(importable.origin).resolve() == file.resolve()
    ):
        return importlib.import_module(name)
    return import_as(name, file)


class DeferredObject:
    """An object of ours that is unpickled at its first use, such as a tokenizer, which most agents
    never use."""

    def __init__(self, data: bytes) -> None:
        self.__dict__["_data"] = data

    @cached_property
    def _object(self) -> Any:
        return loads(self.__dict__["_data"])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # pickle looks these up before `_data` exists
            raise AttributeError(name)
        return getattr(self._object, name)

    def __len__(self) -> int:
        return len(self._object)
