"""Loads objects by class path: `package.module->Name`, `path/file.py->Name`, `file.py:name`."""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from ajet_sdk.config.api_keys import placeholder_keys
from ajet_sdk.errors import ConfigError

_folders = set[Path]()
"""Folders of the files that were imported by path."""

_importing = threading.RLock()
"""Held while a file is imported, as episodes load objects concurrently. (For modules Python has its
own locks.)"""


def load_object(class_path: str, relative_to: Path | None = None) -> Any:
    """Import the object of a class path.

    A file is searched in `relative_to`, then in the working directory. It is imported once, under
    its own name, so that its functions can be pickled. Raises ConfigError if the object is missing
    or its module fails to import.
    """
    place, arrow, name = class_path.partition("->")
    if not arrow:
        place, _, name = class_path.rpartition(":")
    place = place.strip()
    name = name.strip()
    if not place or not name:
        raise ConfigError(
            "a class path is package.module->Name, path/file.py->Name or file.py:name (got"
            f" {class_path!r})"
        )
    with placeholder_keys():  # a module may create clients on import
        if place.endswith(".py") or "/" in place or "\\" in place:
            with _importing:
                module = _import_file(_find(place, relative_to, class_path), class_path)
        else:
            module = _import_module(place, relative_to, class_path)
    value: object = module
    for step in name.split("."):
        if not hasattr(value, step):
            if hasattr(value, "__dict__"):
                names = [n for n in vars(value) if not n.startswith("_")]
            else:
                names = []
            near = difflib.get_close_matches(step, names, n=1, cutoff=0.5)
            if near:
                hint = f"did you mean {near[0]}?"
            else:
                hint = f"it has {', '.join(sorted(names)[:12]) or 'no public names'}"
            raise ConfigError(f"{class_path}: there is no {step!r} in it; {hint}")
        value = getattr(value, step)
    return value


def _find(place: str, relative_to: Path | None, class_path: str) -> Path:
    path = Path(place).expanduser()
    if not path.suffix:
        path = path.with_suffix(".py")
    if path.is_absolute() or relative_to is None:
        bases = [Path.cwd()]
    else:
        bases = [relative_to, Path.cwd()]
    for base in bases:
        if (base / path).is_file():
            return (base / path).resolve()
    looked = " or ".join(str(base) for base in dict.fromkeys(bases))
    raise ConfigError(
        f"{class_path}: there is no file {path}" + ("" if path.is_absolute() else f" in {looked}")
    )


def _import_file(path: Path, class_path: str) -> ModuleType:
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if (
            file
            and file.endswith(path.name)
            and module.__name__ != "__main__"
            and Path(file).resolve() == path
        ):
            return module
    name = path.stem
    origin = _origin(name)
    taken = name in sys.modules or (origin is not None and Path(origin).resolve() != path)
    if taken or not name.isidentifier():
        name = f"{name}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    _check_siblings(path, class_path)
    folder = str(path.parent)
    _folders.add(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if importlib.util.spec_from_file_location(name, path) is None:
        raise ConfigError(f"{class_path}: {path} is not a Python file")
    try:
        return import_as(name, path)
    except (Exception, SystemExit) as error:  # a script without a main guard exits
        raise _failed(class_path, error) from error


def import_as(name: str, path: Path) -> ModuleType:
    """Run a Python file as the module of this name. Raises the file's errors."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _check_siblings(path: Path, class_path: str) -> None:
    """Raise ConfigError if a file imports a neighbour whose name is taken by a module of another
    job's folder."""
    for name in _imported_names(path):
        beside = next(
            (
                p
                for p in (path.with_name(f"{name}.py"), path.with_name(name) / "__init__.py")
                if p.is_file()
            ),
            None,
        )
        loaded = Path(getattr(sys.modules.get(name), "__file__", None) or beside or path).resolve()
        if (
            beside is not None
            and loaded != beside.resolve()
            and not _folders.isdisjoint({loaded.parent, loaded.parent.parent})
        ):
            raise ConfigError(
                f"{class_path}: {path.name} imports {name}, and this process has imported {loaded}"
                " under that name for another job. Rename one of the files, or start this job in a"
                " process of its own"
            )


def _imported_names(path: Path) -> set[str]:
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (SyntaxError, ValueError):  # raised again by its import
        return set()
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {
        node.module
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
    }
    return {name.partition(".")[0] for name in names}


def _origin(name: str) -> str | None:
    """The file from which a module of this name would be imported; empty without a file, None
    without a module."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return None if spec is None else spec.origin or ""


def _import_module(place: str, relative_to: Path | None, class_path: str) -> ModuleType:
    folders = [str(Path.cwd()), *([str(relative_to)] if relative_to else [])]
    for folder in folders:
        if folder not in sys.path:
            sys.path.append(folder)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name and (place == error.name or place.startswith(error.name + ".")):
            raise ConfigError(
                f"{class_path}: no module named {error.name!r} in this directory or among the"
                " installed packages"
            ) from None
        raise _failed(class_path, error) from error
    except (Exception, SystemExit) as error:
        raise _failed(class_path, error) from error


def _failed(class_path: str, error: BaseException) -> ConfigError:
    """The error message for a user's module that failed to import, with the line."""
    if isinstance(error, SyntaxError):
        where = f" ({Path(error.filename or '?').name} line {error.lineno})"
        return ConfigError(f"{class_path} cannot be imported: SyntaxError: {error.msg}{where}")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    if len(frames) > 1:
        where = f" ({Path(frames[-1].filename).name} line {frames[-1].lineno})"
    else:
        where = ""
    return ConfigError(f"{class_path} cannot be imported: {type(error).__name__}: {error}{where}")


def code_of(value: object) -> dict[str, str]:
    """Return the name of a function, a class or an object of one, and a digest of its file.

    Two runs whose agent or judge was edited in between have different digests. Empty for None; an
    object without a file has no digest.
    """
    if value is None:
        return {}
    function = inspect.unwrap(value) if callable(value) else value
    named = function if hasattr(function, "__qualname__") else type(function)
    name = f"{getattr(named, '__module__', '?')}:{getattr(named, '__qualname__', '?')}"
    with suppress(TypeError, OSError):
        file = inspect.getsourcefile(named)  # type: ignore[arg-type]
        if file is not None:
            digest = hashlib.blake2b(Path(file).read_bytes(), digest_size=8)
            return {"name": name, "source": digest.hexdigest()}
    return {"name": name}
