"""One call of a user's function as it travels to a worker process, and what comes back.

Functions and classes of the user's files go by file and name, so that the other process imports the file and makes its
own clients; what stays the same over a run (the config, a judge, a tokenizer) goes once a process.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import pickle
import sys
from collections.abc import Callable, Mapping
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
    """A call that a worker process is to make."""

    function: Callable[[], object]
    label: str
    """Names the function in messages."""
    timeout: float | None
    active: ActiveEpisode | None
    """The episode that its requests belong to."""

    @property
    def environment(self) -> GymEnv | None:
        """The environment that the function is given, by itself or in its task."""
        function = self.function
        if not isinstance(function, partial):
            return None
        given = (getattr(value, "gym_env", value) for value in (*function.args, *function.keywords.values()))
        return next((value for value in given if isinstance(value, GymEnv)), None)


@dataclass(frozen=True)
class Reply:
    """The result of a call. `error` is the exception itself if it is ajet's, else a description of it."""

    value: Any = None
    error: AjetError | _ErrorReport | None = None
    fault: EnvironmentUnavailable | None = None
    """Of the environment, whether or not the function let it out."""

    def outcome(self) -> Outcome:
        """As the run takes it: an exception of a user's class comes as a `UserError` that bears its name."""
        if isinstance(self.error, _ErrorReport):
            report = self.error
            return Outcome(
                error=type(report.name, (UserError,), {})(report.message, report.description, report.infrastructure)
            )
        return Outcome(self.value, self.error)


@dataclass(frozen=True)
class _ErrorReport:
    """An exception in words: its class may not exist elsewhere, and few can be pickled."""

    name: str
    message: str
    description: str
    infrastructure: bool


def dump_outcome(outcome: Outcome, label: str, environment: GymEnv | None = None) -> bytes:
    """An outcome as it goes back. A value that cannot travel is an error that says so."""
    fault = None if environment is None else environment.fault
    if outcome.error is not None:
        return dumps(Reply(error=_report_error(outcome.error), fault=fault))
    try:
        return dumps(Reply(outcome.value, fault=fault))
    except Exception as error:  # noqa: BLE001  what any object's pickling raises
        wrong = ConfigError(
            f"{label} returned {type(outcome.value).__name__}, which cannot be sent between processes "
            f"({type(error).__name__}: {error}); return text, numbers, lists and dictionaries of them, or Rewards"
        )
        return dumps(Reply(error=wrong, fault=fault))


def _report_error(error: BaseException) -> AjetError | _ErrorReport:
    if isinstance(error, AjetError) and _is_picklable(error):
        return error
    installed, text = installed_code(), describe_error(error)
    return _ErrorReport(
        type(error).__name__,
        str(error),
        installed.original_paths(text) if installed else text,
        is_infrastructure_error(error),
    )


def _is_picklable(error: AjetError) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:  # noqa: BLE001  an exception whose arguments are not its message
        return False


# Pickling


@dataclass
class ObjectStore:
    """Objects that are sent to a process once, by the key that replaces them in a call."""

    keys: dict[int, str] = field(default_factory=dict)
    objects: dict[str, object] = field(default_factory=dict)

    def key(self, thing: object) -> str | None:
        """The key of an object that stays the same over a run; None for every other."""
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
    """Pickle what a call or a reply consists of; objects that stay go by their key. Raises what pickling raises."""
    into = io.BytesIO()
    _Pickler(into, store).dump(thing)
    return into.getvalue()


def dump_object(thing: object) -> bytes:
    """An object of `ObjectStore` as it goes to a process."""
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
    """File, module and name of a function or class that stands at the top of a user's file; None for all others."""
    module = sys.modules.get(getattr(thing, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if module is None or not file or is_library_file(Path(file)) or module.__name__.partition(".")[0] in _OURS:
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
"""What the program itself is called elsewhere: importing it must not run it."""


def _load_module(sent_file: str, name: str) -> ModuleType:
    """The module of a user's file, imported once. Raises ConfigError where the file did not travel."""
    installed = installed_code()
    file = (installed.local_path(sent_file) if installed else None) or Path(sent_file)
    for known in (sys.modules.get(name), sys.modules.get("__main__") if name == _MAIN else None):
        if known is not None and _is_file_of(known, file):
            return known
    if not file.is_file():
        raise ConfigError(
            f"{sent_file} is not part of the code that was sent to this machine; put it beside the workflow"
        )
    importable = importlib.util.find_spec(name) if "." in name or name not in sys.modules else None
    if importable is not None and importable.origin and Path(importable.origin).resolve() == file.resolve():
        return importlib.import_module(name)
    return import_as(name, file)


def _is_file_of(module: ModuleType, file: Path) -> bool:
    origin = getattr(module, "__file__", None)
    return bool(origin) and Path(str(origin)).resolve() == file.resolve()


class DeferredObject:
    """An object of ours that is unpickled when it is first used: a tokenizer, which most agents never ask for."""

    def __init__(self, data: bytes) -> None:
        self.__dict__["_data"] = data

    @cached_property
    def _object(self) -> Any:
        return loads(self.__dict__["_data"])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what pickle looks for, before there is anything to look in
            raise AttributeError(name)
        return getattr(self._object, name)

    def __len__(self) -> int:
        return len(self._object)
