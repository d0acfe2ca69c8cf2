"""Opens judges by config section or by name, as `--judge` takes it.

exact, regex:PATTERN, llm:FILE  a kind of `ajet_sdk/config/judge_kinds.py`; FILE holds its section
of `task_judge`, or
                                a rubric as text
file.py:function, module->Name  a user's judge
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import yaml

from ajet_sdk.config.config import Config, load_config
from ajet_sdk.config.judge_kinds import CUSTOM, GROUP, KINDS, judge_forms, judge_kinds, kind_named
from ajet_sdk.config.source import load_yaml
from ajet_sdk.errors import AjetError, ConfigError

RUBRIC_FILES = (".md", ".txt")
"""Suffixes of files with a rubric as text."""


def load_judge(config: Config) -> Any | None:
    """Opens the judge of `task_judge`: a function whose parameters are filled by name, or an object
    with `compute_reward`. None if the workflow gives its own reward.

    Raises ConfigError if the class path leads to neither, MissingExtra if a library is absent.
    """
    judge_type = config.task_judge.judge_type
    path = config.task_judge.judge_protocol
    if judge_type == CUSTOM:
        return _custom(config, path) if path else None
    kind = KINDS.get(judge_type) or judge_kinds()[judge_type]
    try:
        return EntryPoint(judge_type, kind.opener, GROUP).load()(config)
    except Exception as error:
        if judge_type in KINDS or isinstance(error, AjetError):
            raise
        raise ConfigError(
            f"task_judge.judge_type: {judge_type} ({kind.opener}) failed: {type(error).__name__}:"
            f" {error}"
        ) from error


def resolved(name: str, config: Config) -> str:
    """Resolves the file in a judge's name relative to the config file."""
    word, colon, argument = name.partition(":")
    if colon and word in _OF_FILE:
        return f"{word}:{config.resolve(argument)}"
    return name


_OF_FILE = {
    kind.name or judge_type for judge_type, kind in KINDS.items() if kind.argument == ":FILE"
}
"""Kinds whose argument is a file."""


def judge_section(name: str) -> dict[str, Any]:
    """Expands a judge's name to a section `task_judge`; paths are relative to the working
    directory.

    Raises ConfigError for an unknown name.
    """
    word, colon, argument = name.partition(":")
    judge_type, kind = kind_named(word)
    if kind is not None and kind.argument == "[:ARGUMENT]":
        return {"judge_type": judge_type, **({"options": {"argument": argument}} if colon else {})}
    if kind is not None and bool(kind.argument) == bool(colon) and not argument.startswith("/dev/"):
        if kind.argument == ":FILE":
            value = _read_section(Path(argument).expanduser(), name)
        else:
            value = argument
        return {"judge_type": judge_type, **({kind.key: value} if kind.key else {})}
    if ":" not in name and "->" not in name:
        raise ConfigError(
            f"a judge is one of {', '.join(judge_forms(judge_kinds()))} (got {name!r})"
        )
    for separator in ("->", ":"):
        file, separated, argument = name.rpartition(separator)
        if (
            separated and Path(file).is_file()
        ):  # relative to the working directory, not to a config file
            name = f"{Path(file).resolve()}{separator}{argument}"
            break
    return {"judge_type": CUSTOM, "judge_protocol": name}


def named_judge(name: str, config: Config | None = None) -> Any:
    """Opens a judge by name, with the model of `config`. Raises as `load_judge` does."""
    return load_judge(with_judge(config, name))


def with_judge(config: Config | None, name: str) -> Config:
    """A config whose `task_judge` is the judge of this name, with the judges' model of `config`.

    Raises ConfigError for an unknown name.
    """
    model = config.task_judge.alien_llm_model if config is not None else None
    shared = {"alien_llm_model": model} if model is not None else {}
    own_config = load_config(values={"ajet": {"task_judge": {**shared, **judge_section(name)}}})
    if config is None:
        return own_config
    return config.model_copy(update={"task_judge": own_config.task_judge})


def _read_section(path: Path, name: str) -> Any:
    """Reads a section from YAML, with absolute paths, a rubric from a text file, or examples from
    JSON lines."""
    path = path.resolve()
    if path.suffix == ".jsonl":
        return {"jsonl_dataset_file": {"training": {"file_path": str(path)}}}
    try:
        text = path.read_text(encoding="utf-8")
        section = {"rubric": text} if path.suffix in RUBRIC_FILES else load_yaml(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"judge {name}: cannot read {path}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"judge {name}: {path} is not valid YAML: {error}") from None
    if not isinstance(section, Mapping | list):
        raise ConfigError(
            f"judge {name}: {path} must contain the keys of the judge's config section, or be a .md"
            " rubric"
        )
    return _absolute(section, path.parent)


def _absolute(value: object, folder: Path) -> Any:
    """Makes the paths of files beside a section absolute."""
    if isinstance(value, Mapping):
        return {key: _absolute(inner, folder) for key, inner in value.items()}
    if isinstance(value, list):
        return [_absolute(inner, folder) for inner in value]
    if not isinstance(value, str) or "\n" in value or not value.strip():
        return value
    kind, colon, rest = value.partition(":")
    if colon and kind in _OF_FILE and _is_file(folder / rest):
        return f"{kind}:{folder / rest}"
    for separator in ("->", ":"):
        file, separated, rest = value.rpartition(separator)
        if separated and _is_file(folder / file):
            return f"{folder / file}{separator}{rest}"
    if "." in value and _is_file(folder / value):
        return str(folder / value)
    return value


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a rubric may be too long for a file name
        return False


def _custom(config: Config, class_path: str) -> Any:
    judge: Any = config.load(class_path)
    if isinstance(judge, type):
        if not hasattr(judge, "compute_reward"):
            raise ConfigError(
                f"task_judge.judge_protocol: the class {class_path} has no "
                "compute_reward(workflow_task, workflow_output)"
            )
        try:
            build: Any = judge
            return build(config)
        except Exception as error:
            raise ConfigError(
                f"task_judge.judge_protocol: {class_path}(config) failed: {type(error).__name__}:"
                f" {error}"
            ) from error
    if callable(judge) or hasattr(judge, "compute_reward"):
        return judge
    raise ConfigError(
        f"task_judge.judge_protocol: {class_path} is a {type(judge).__name__}, not a function or a"
        " class"
    )
