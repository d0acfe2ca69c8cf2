"""Judges by name: those of a config, and those that one word names, as `--judge` takes it.

exact, regex:PATTERN, llm:FILE  a kind of `ajet_sdk/config/judge_kinds.py`; a FILE has its section of `task_judge`, or
                                a rubric in words
file.py:function, module->Name  a judge of the user's
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
"""Files that are a rubric in words."""


def load_judge(config: Config) -> Any | None:
    """The judge that `task_judge` names, ready to be called: a function whose parameters are filled by name, or an
    object with `compute_reward`. None where the workflow gives its own reward.

    Raises ConfigError where the class path leads to neither, MissingExtra where a library is absent.
    """
    judge_type, path = config.task_judge.judge_type, config.task_judge.judge_protocol
    if judge_type == CUSTOM:
        return _custom(config, path) if path else None
    kind = KINDS.get(judge_type) or judge_kinds()[judge_type]
    try:
        return EntryPoint(judge_type, kind.opener, GROUP).load()(config)
    except Exception as error:
        if judge_type in KINDS or isinstance(error, AjetError):
            raise
        raise ConfigError(
            f"task_judge.judge_type: {judge_type} ({kind.opener}) failed: {type(error).__name__}: {error}"
        ) from error


def resolved(name: str, config: Config) -> str:
    """The name of a judge with the path of its file, which is looked for beside the config's."""
    word, colon, argument = name.partition(":")
    return f"{word}:{config.resolve(argument)}" if colon and word in _OF_FILE else name


_OF_FILE = {kind.name or judge_type for judge_type, kind in KINDS.items() if kind.argument == ":FILE"}
"""Words that stand in front of a file."""


def judge_section(name: str) -> dict[str, Any]:
    """The section `task_judge` that a judge's name stands for; files are read from the working directory.

    Raises ConfigError for what is no name of a judge.
    """
    word, colon, argument = name.partition(":")
    judge_type, kind = kind_named(word)
    if kind is not None and kind.argument == "[:ARGUMENT]":
        return {"judge_type": judge_type, **({"options": {"argument": argument}} if colon else {})}
    if kind is not None and bool(kind.argument) == bool(colon) and not argument.startswith("/dev/"):
        value = _read_section(Path(argument).expanduser(), name) if kind.argument == ":FILE" else argument
        return {"judge_type": judge_type, **({kind.key: value} if kind.key else {})}
    if ":" not in name and "->" not in name:
        raise ConfigError(f"a judge is one of {', '.join(judge_forms(judge_kinds()))} (got {name!r})")
    for separator in ("->", ":"):
        file, separated, argument = name.rpartition(separator)
        if separated and Path(file).is_file():  # meant from here, and not from beside a config file
            name = f"{Path(file).resolve()}{separator}{argument}"
            break
    return {"judge_type": CUSTOM, "judge_protocol": name}


def named_judge(name: str, config: Config | None = None) -> Any:
    """The judge of that name, with the model that `config` names. Raises as `load_judge` does."""
    model = config.task_judge.alien_llm_model if config is not None else None
    shared = {"alien_llm_model": model} if model is not None else {}
    own_config = load_config(values={"ajet": {"task_judge": {**shared, **judge_section(name)}}})
    return load_judge(own_config if config is None else config.model_copy(update={"task_judge": own_config.task_judge}))


def _read_section(path: Path, name: str) -> Any:
    """What a YAML file holds, with its paths made absolute; a text file is a rubric, one of JSON lines examples."""
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
            f"judge {name}: {path} must contain the keys of the judge's config section, or be a .md rubric"
        )
    return _absolute(section, path.parent)


def _absolute(value: object, folder: Path) -> Any:
    """The values of a section, in which the name of a file beside it is its whole path."""
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
    return str(folder / value) if "." in value and _is_file(folder / value) else value


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a rubric in words may be too long for a name
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
                f"task_judge.judge_protocol: {class_path}(config) failed: {type(error).__name__}: {error}"
            ) from error
    if callable(judge) or hasattr(judge, "compute_reward"):
        return judge
    raise ConfigError(f"task_judge.judge_protocol: {class_path} is a {type(judge).__name__}, not a function or a class")
