"""Packages the code that a run needs on other machines, as a directory that Ray sends.

It has the user's folders and ajet itself. Folders under the working directory keep their relative
paths, and workers start there, so relative paths in the user's code work on every node.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ajet_sdk.errors import ConfigError

_OURS = ("ajet", "ajet_sdk", "ajet_tools")
INSTALL = f"{__name__}.install_code"
"""The function that Ray's workers call when they start."""
_HERE = "here"
"""Name of the working directory in a package."""
_MANIFEST = "ajet_code.json"
_LEFT_OUT = frozenset(
    {
        ".git",
        ".gitignore",
        "__pycache__",
        "launcher_record",
        "node_modules",
        "wandb",
        "swanlog",
        ".venv",
        "venv",
    }
    | {
        ".mypy_cache",
        ".ruff_cache",
        ".pytest_cache",
        ".hypothesis",
        ".tox",
        ".idea",
        ".vscode",
        ".ipynb_checkpoints",
    }
)
_MOST_BYTES = 500 * 2**20
"""Ray's limit for a package."""


@dataclass(frozen=True)
class CodePackage:
    """Folders to send, and the import paths in them."""

    folders: tuple[Path, ...]
    """Folders, none inside another."""
    paths: tuple[Path, ...]
    """Entries of `sys.path` inside or directly above a folder."""
    leave_out: tuple[Path, ...] = ()

    @contextmanager
    def write(self) -> Iterator[Path]:
        """Copy the folders to a temporary directory for the block. Raises ConfigError above 500
        MB."""
        files_of = {folder: _files(folder, self.leave_out) for folder in self.folders}
        self._check_size(files_of)
        with tempfile.TemporaryDirectory(prefix="ajet-code-") as name:
            root = Path(name)
            (root / _HERE).mkdir()
            for package in _OURS:
                folder = Path(__file__).parents[2] / package
                _copy(folder, _walk(folder), root / package)
            for folder, files in files_of.items():
                _copy(folder, files, root / self._archive_path(folder))
            manifest = {
                "folders": {self._archive_path(folder): str(folder) for folder in self.folders},
                "paths": list(
                    dict.fromkeys(
                        archived for path in self.paths for archived in self._archive_paths(path)
                    )
                ),
            }
            (root / _MANIFEST).write_text(json.dumps(manifest))
            yield root

    def _archive_path(self, folder: Path) -> str:
        here = Path.cwd()
        if folder.is_relative_to(here):
            return f"{_HERE}/{folder.relative_to(here).as_posix()}".removesuffix("/.")
        return f"{self.folders.index(folder)}/{folder.name}"

    def _archive_paths(self, path: Path) -> Iterator[str]:
        """The paths in the package for an entry of `sys.path`."""
        for folder in self.folders:
            if path.is_relative_to(folder):
                yield (
                    f"{self._archive_path(folder)}/{path.relative_to(folder).as_posix()}".removesuffix(
                        "/."
                    )
                )
            elif folder.parent == path:
                yield self._archive_path(folder).rpartition("/")[0]

    def _check_size(self, files_of: dict[Path, list[Path]]) -> None:
        sizes = {file: file.stat().st_size for files in files_of.values() for file in files}
        total = sum(sizes.values())
        if total <= _MOST_BYTES:
            return
        largest = sorted(sizes, key=lambda file: sizes[file], reverse=True)[:3]
        named = ", ".join(f"{file} ({sizes[file] / 2**20:,.0f} MB)" for file in largest)
        raise ConfigError(
            f"the code to send to the Ray nodes is {total / 2**20:,.0f} MB; Ray transfers at most"
            f" {_MOST_BYTES // 2**20} MB: {', '.join(map(str, files_of))}. Largest: {named}. Move"
            " data to a path that every node can read and add it to .gitignore, or put the agent"
            " into its own directory"
        )


def package_code(
    *objects: object, beside: Iterable[Path] = (), leave_out: Iterable[Path] = ()
) -> CodePackage:
    """Package the code of `objects` and of all loaded modules, with the folders `beside`.

    Each module outside of installed packages adds its top-level package, or the folder of its file.
    """
    named = [
        sys.modules.get(getattr(thing, "__module__", None) or type(thing).__module__)
        for thing in objects
    ]
    folders = {Path(folder).resolve() for folder in beside}
    for module in [*filter(None, named), *sys.modules.values()]:
        file = getattr(module, "__file__", None)
        name = getattr(module, "__name__", "")
        if not file or name.partition(".")[0] in _OURS or is_library_file(Path(file)):
            continue
        folders.add(_folder(name, Path(file).resolve()))
    roots = tuple(
        sorted(
            f
            for f in folders
            if f.is_dir() and not any(f != o and f.is_relative_to(o) for o in folders)
        )
    )
    entries = [Path(entry).resolve() for entry in sys.path]
    paths = [e for e in entries if any(e.is_relative_to(f) or f.parent == e for f in roots)]
    return CodePackage(
        roots, tuple(dict.fromkeys(paths)), tuple(Path(path).resolve() for path in leave_out)
    )


def _folder(name: str, file: Path) -> Path:
    package = file.parent
    depth = name.count(".") - (0 if file.name == "__init__.py" else 1)
    for _ in range(depth if name != "__main__" else 0):
        package = package.parent
    return package


@cache
def _library_folders() -> tuple[Path, ...]:
    places = sysconfig.get_paths()
    return tuple(
        Path(places[name]).resolve()
        for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
    )


def is_library_file(file: Path) -> bool:
    """Whether a file belongs to Python or an installed package, which every node must have."""
    if {"site-packages", "dist-packages"} & {*file.parts}:
        return True
    return any(file.is_relative_to(folder) for folder in _library_folders())


def _files(folder: Path, leave_out: tuple[Path, ...]) -> list[Path]:
    """The files of a folder to send: those not ignored by git, without the output of runs."""
    command = [
        "git",
        "-C",
        str(folder),
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
        "-z",
        ".",
    ]
    try:
        listed = subprocess.run(command, capture_output=True, timeout=60, check=True).stdout
        names = [os.fsdecode(name) for name in listed.split(b"\0") if name]
        files = [folder / name for name in names if not _LEFT_OUT & {*Path(name).parts}]
        files = [path for file in files for path in (_walk(file) if file.is_dir() else [file])]
    except (OSError, subprocess.SubprocessError):  # no git here, or no repository
        names = []
        files = []
    files = files if names else _walk(folder)  # a folder that git ignores completely is sent anyway
    return [
        file
        for file in files
        if file.is_file() and not any(file.is_relative_to(out) for out in leave_out)
    ]


def _walk(folder: Path) -> list[Path]:
    paths = []
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _LEFT_OUT)
        paths += [
            Path(parent) / name
            for name in sorted(files)
            if name not in _LEFT_OUT and not name.endswith(".pyc")
        ]
    return paths


def _copy(folder: Path, files: list[Path], into: Path) -> None:
    into.mkdir(parents=True, exist_ok=True)
    for file in files:
        target = into / file.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


# On the receiving machine


@dataclass(frozen=True)
class InstalledCode:
    """A package on the receiving machine."""

    root: Path
    folders: dict[str, str]
    """Folders on the sending machine by their path in the package."""

    def local_path(self, path: str) -> Path | None:
        """The local path of a sender's file; None if it was not sent."""
        for archived, folder in self.folders.items():
            if Path(path).is_relative_to(folder):
                return self.root / archived / Path(path).relative_to(folder)
        return None

    def original_paths(self, text: str) -> str:
        """Replace local paths in a text by the sender's."""
        for archived in sorted(self.folders, key=len, reverse=True):
            text = text.replace(str(self.root / archived), self.folders[archived])
        return text


@cache
def installed_code() -> InstalledCode | None:
    """The package that this process was started with, or None."""
    manifest = Path(__file__).resolve().parents[2] / _MANIFEST
    if not manifest.is_file():
        return None
    return InstalledCode(manifest.parent, json.loads(manifest.read_text())["folders"])


def install_code() -> None:
    """Make the package's modules importable and change to its working directory. Idempotent."""
    installed = installed_code()
    if installed is None:
        return
    paths = json.loads((installed.root / _MANIFEST).read_text())["paths"]
    added = [
        str(installed.root / path) for path in paths if str(installed.root / path) not in sys.path
    ]
    sys.path[1:1] = added
    existing = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*added, *([existing] if existing else [])])
    os.chdir(installed.root / _HERE)
