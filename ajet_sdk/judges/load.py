"""Judges by name: those of a config, and those that one word names, as `--judge` takes it.

exact, math, regex:PATTERN     compared with the task's answer
llm:FILE                       an LLM judge: a YAML file with the keys of `task_judge.llm`, or a rubric in words
file.py:function, module->Name a judge of the user's
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ajet_sdk.config.config import Config, load_config
from ajet_sdk.config.task_schema import Llm
from ajet_sdk.errors import ConfigError
from ajet_sdk.judges.llm import LlmJudge
from ajet_sdk.judges.math import math, require_math
from ajet_sdk.judges.model import open_model
from ajet_sdk.judges.text import answer_of, compile_pattern, exact, matches, text_of
from ajet_sdk.types import Task

__all__ = ["exact", "judge_section", "load_judge", "math", "named_judge", "text_of"]

_BARE = ("exact", "math")
_OF_FILE = {"llm": "llm"}
"""What stands before the colon, and the section of `task_judge` that the file fills."""
_RUBRIC_FILES = (".md", ".txt")
LONGEST = 1024
"""Tokens of a verdict, where nothing is said."""


def load_judge(config: Config) -> Any | None:
    """The judge that `task_judge` names, ready to be called: a function whose parameters are filled by name, or an
    object with `compute_reward`. None where the workflow gives its own reward.

    Raises ConfigError where the class path leads to neither, MissingExtra where a library is absent.
    """
    section = config.task_judge
    if section.judge_type == "customized_protocol":
        return _custom(config, section.judge_protocol) if section.judge_protocol else None
    if section.judge_type == "exact":
        return _on_answer(exact, section.answer_key)
    if section.judge_type == "math":
        require_math()
        return _on_answer(math, section.answer_key)
    if section.judge_type == "regex":
        return _regex(section.pattern or "", section.answer_key)
    if section.judge_type == "llm":
        return _llm(config, section.llm)
    raise ConfigError(
        f"task_judge.judge_type: {section.judge_type} ({config.origin('task_judge.judge_type')}) is not in this "
        "version; it comes later. Use exact, regex, math, llm, or customized_protocol with a judge of your own"
    )


def judge_section(name: str) -> dict[str, Any]:
    """The section `task_judge` that a judge's name stands for; files are read from the working directory.

    Raises ConfigError for what is no name of a judge.
    """
    if name in _BARE:
        return {"judge_type": name}
    kind, colon, rest = name.partition(":")
    if kind == "regex" and colon:
        return {"judge_type": "regex", "pattern": rest}
    if kind in _OF_FILE and colon and not rest.startswith("/dev/"):
        return {"judge_type": kind, _OF_FILE[kind]: _read_section(Path(rest).expanduser(), name)}
    if ":" not in name and "->" not in name:
        raise ConfigError(
            f"a judge is file.py:function, package.module->Name, exact, math, regex:PATTERN or llm:FILE (got {name!r})"
        )
    for separator in ("->", ":"):
        place, found, rest = name.rpartition(separator)
        if found and Path(place).is_file():  # meant from here, and not from beside a config file
            name = f"{Path(place).resolve()}{separator}{rest}"
            break
    return {"judge_type": "customized_protocol", "judge_protocol": name}


def named_judge(name: str, config: Config | None = None) -> Any:
    """The judge of that name, with the `answer_key` and the model that `config` names. Raises as `load_judge` does."""
    given = config.task_judge if config is not None else None
    shared = {} if given is None else given.model_dump(include={"answer_key", "alien_llm_model"}, exclude_none=True)
    own = load_config(values={"ajet": {"task_judge": {**shared, **judge_section(name)}}})
    if config is None:
        return load_judge(own)
    return load_judge(config.model_copy(update={"task_judge": own.task_judge}))


def _read_section(path: Path, name: str) -> dict[str, Any]:
    """The keys in a YAML file, with its paths made absolute; a text file is a rubric."""
    try:
        text = path.read_text(encoding="utf-8")
        found = {"rubric": text} if path.suffix in _RUBRIC_FILES else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"judge {name}: cannot read {path}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"judge {name}: {path} is not YAML: {error}") from None
    if not isinstance(found, Mapping):
        raise ConfigError(f"judge {name}: {path} must be a mapping with the keys of task_judge.llm, or a .md rubric")
    return {
        key: str((path.parent / value).resolve())
        if key in ("rubric", "examples") and isinstance(value, str) and _is_file(path.parent / value)
        else value
        for key, value in found.items()
    }


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a rubric in words may be too long for a name
        return False


def _llm(config: Config, section: Llm) -> LlmJudge:
    judge = config.task_judge
    asked = section.model or judge.alien_llm_model
    longest = judge.alien_llm_response_length if config.is_set("task_judge.alien_llm_response_length") else LONGEST
    options = section.model_dump(include={
        "mode", "min_score", "max_score", "success_threshold", "reference_key", "show", "prompt", "temperature",
        "price",
    })  # fmt: skip
    return LlmJudge(
        read_rubric(config, section.rubric),
        model=open_model(asked, section.base_url, api_key_env=section.api_key_env),
        examples=_examples(config, section.examples),
        max_tokens=section.max_tokens or longest,
        retries=section.max_retries,
        cache=None if section.cache is None else config.resolve(section.cache),
        **options,
    )


def read_rubric(config: Config, text: str) -> str:
    """A rubric in words, or from the file that a config names. Raises ConfigError where there is no such file."""
    if "\n" in text or not text.endswith(_RUBRIC_FILES):
        return text
    path = config.resolve(text)
    if not _is_file(path):
        raise ConfigError(f"the judge's rubric: there is no file {path}")
    return path.read_text(encoding="utf-8")


def _examples(config: Config, given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not isinstance(given, str):
        return given
    path = config.resolve(given)
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"the judge's examples: cannot read {path} as JSON lines: {error}") from None


def _on_answer(compare: Any, key: str) -> Any:
    if key == "answer":  # then a task without it is found before the first episode
        return compare

    def judge(output: Any, task: Task) -> bool:
        return bool(compare(output, answer_of(task, key)))

    judge.__name__ = compare.__name__
    return judge


def _regex(pattern: str, key: str) -> Any:
    compiled = compile_pattern(pattern)

    def regex(output: Any, task: Task) -> bool:
        return matches(compiled, text_of(output), answer_of(task, key) if compiled.groups else None)

    return regex


def _custom(config: Config, class_path: str) -> Any:
    found: Any = config.load(class_path)
    if isinstance(found, type):
        if not hasattr(found, "compute_reward"):
            raise ConfigError(
                f"task_judge.judge_protocol: the class {class_path} has no "
                "compute_reward(workflow_task, workflow_output)"
            )
        try:
            build: Any = found
            return build(config)
        except Exception as error:
            raise ConfigError(
                f"task_judge.judge_protocol: {class_path}(config) failed: {type(error).__name__}: {error}"
            ) from error
    if callable(found) or hasattr(found, "compute_reward"):
        return found
    raise ConfigError(f"task_judge.judge_protocol: {class_path} is a {type(found).__name__}, not a function or a class")
