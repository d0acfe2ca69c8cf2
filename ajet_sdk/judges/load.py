"""Judges by name: those of a config, and those that one word names, as `--judge` takes it.

exact, math, regex:PATTERN     compared with the task's answer
llm:FILE                       an LLM judge: a YAML file with the keys of `task_judge.llm`, or a rubric in words
file.py:function, module->Name a judge of the user's
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ajet_sdk.agent.model import Model
from ajet_sdk.agent.workflow import BaseJudge, WorkflowOutput, WorkflowTask
from ajet_sdk.config.config import Config, load_config
from ajet_sdk.config.source import load_yaml
from ajet_sdk.config.task_schema import Llm
from ajet_sdk.errors import ConfigError, MissingResource
from ajet_sdk.judges.code import CodeJudge
from ajet_sdk.judges.combined import CombinedJudge, Part
from ajet_sdk.judges.llm import LlmJudge
from ajet_sdk.judges.llm_prompts import Example
from ajet_sdk.judges.math import math, require_math
from ajet_sdk.judges.model import ScriptedModel, open_model
from ajet_sdk.judges.rewards import Verdict
from ajet_sdk.judges.rubric import RubricJudge, read_examples
from ajet_sdk.judges.text import answer_of, compile_pattern, exact, matches, text_of
from ajet_sdk.types import Episode, Task

__all__ = ["AutoGraderJudge", "exact", "judge_section", "load_judge", "math", "named_judge", "text_of"]

_BARE = ("exact", "math", "code")
_OF_FILE = {"llm": "llm", "rubric": "rubrics_auto_grader", "combined": "combined"}
"""What stands before the colon; the type of judge and the section of `task_judge` that the file fills."""
_RUBRIC_FILES = (".md", ".txt")
LONGEST = 1024
"""Tokens of a verdict, where nothing is said."""


def load_judge(config: Config, within: Sequence[str] = ()) -> Any | None:
    """The judge that `task_judge` names, ready to be called: a function whose parameters are filled by name, or an
    object with `compute_reward`. None where the workflow gives its own reward. `within` are the combined judges that
    it is a part of.

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
    if section.judge_type == "rubrics_auto_grader":
        return rubric_judge(config)
    if section.judge_type == "code":
        code = section.code
        memory = code.memory_mib << 20
        return CodeJudge(seconds=code.seconds, memory=memory, partial=code.partial, unfenced=code.unfenced)
    return CombinedJudge([Part(_part(one.judge, config, within), one.weight, one.name) for one in section.combined])


def _part(name: str, config: Config, within: Sequence[str]) -> Any:
    """A judge by name, whose file is looked for beside the config's."""
    kind, colon, rest = name.partition(":")
    if kind in _OF_FILE and colon:
        name = f"{kind}:{config.resolve(rest)}"
    if name in within:
        raise ConfigError(f"judge {name} contains itself; remove it from its own parts")
    return named_judge(name, config, (*within, name))


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
        section = _OF_FILE[kind]
        return {"judge_type": section, section: _read_section(Path(rest).expanduser(), name)}
    if ":" not in name and "->" not in name:
        raise ConfigError(
            "a judge is file.py:function, package.module->Name, exact, math, code, regex:PATTERN, llm:FILE, "
            f"rubric:FILE or combined:FILE (got {name!r})"
        )
    for separator in ("->", ":"):
        place, found, rest = name.rpartition(separator)
        if found and Path(place).is_file():  # meant from here, and not from beside a config file
            name = f"{Path(place).resolve()}{separator}{rest}"
            break
    return {"judge_type": "customized_protocol", "judge_protocol": name}


def named_judge(name: str, config: Config | None = None, within: Sequence[str] = ()) -> Any:
    """The judge of that name, with the `answer_key` and the model that `config` names. Raises as `load_judge` does."""
    given = config.task_judge if config is not None else None
    shared = {} if given is None else given.model_dump(include={"answer_key", "alien_llm_model"}, exclude_none=True)
    own = load_config(values={"ajet": {"task_judge": {**shared, **judge_section(name)}}})
    if config is None:
        return load_judge(own, within)
    return load_judge(config.model_copy(update={"task_judge": own.task_judge}), within)


def _read_section(path: Path, name: str) -> Any:
    """What a YAML file holds, with its paths made absolute; a text file is a rubric, one of JSON lines examples."""
    path = path.resolve()
    if path.suffix == ".jsonl":
        return {"jsonl_dataset_file": {"training": {"file_path": str(path)}}}
    try:
        text = path.read_text(encoding="utf-8")
        found = {"rubric": text} if path.suffix in _RUBRIC_FILES else load_yaml(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"judge {name}: cannot read {path}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"judge {name}: {path} is not valid YAML: {error}") from None
    if not isinstance(found, Mapping | list):
        raise ConfigError(
            f"judge {name}: {path} must contain the keys of the judge's config section, or be a .md rubric"
        )
    return _absolute(found, path.parent)


def _absolute(value: Any, folder: Path) -> Any:
    """The values of a section, in which the name of a file beside it is its whole path."""
    if isinstance(value, Mapping):
        return {key: _absolute(one, folder) for key, one in value.items()}
    if isinstance(value, list):
        return [_absolute(one, folder) for one in value]
    if not isinstance(value, str) or "\n" in value or not value.strip():
        return value
    kind, colon, rest = value.partition(":")
    if colon and kind in _OF_FILE and _is_file(folder / rest):
        return f"{kind}:{folder / rest}"
    for separator in ("->", ":"):
        place, found, rest = value.rpartition(separator)
        if found and _is_file(folder / place):
            return f"{folder / place}{separator}{rest}"
    return str(folder / value) if "." in value and _is_file(folder / value) else value


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a rubric in words may be too long for a name
        return False


def _llm(config: Config, section: Llm) -> LlmJudge:
    options = section.model_dump(include={
        "mode", "min_score", "max_score", "success_threshold", "reference_key", "show", "prompt", "temperature",
        "price",
    })  # fmt: skip
    return LlmJudge(
        read_rubric(config, section.rubric),
        model=_model(config, section.model),
        examples=read_examples(config.resolve(shown)) if isinstance(shown := section.examples, str) else shown,
        max_tokens=section.max_tokens or _longest(config),
        retries=section.max_retries,
        cache=None if section.cache is None else config.resolve(section.cache),
        **options,
    )


def _model(config: Config, name: str | None) -> Model:
    """What answers an LLM judge: the function of `task_judge.llm.scripted`, or an endpoint's model."""
    llm = config.task_judge.llm
    if llm.scripted:
        return ScriptedModel(llm.scripted, config.source.parent if config.source else None, name)
    asked = name or config.task_judge.alien_llm_model
    return open_model(asked, llm.base_url, api_key_env=llm.api_key_env)


def _longest(config: Config) -> int:
    given = config.is_set("task_judge.alien_llm_response_length")
    return config.task_judge.alien_llm_response_length if given else LONGEST


def read_rubric(config: Config, text: str) -> str:
    """A rubric in words, or from the file that a config names. Raises ConfigError where there is no such file."""
    if "\n" in text or not text.endswith(_RUBRIC_FILES):
        return text
    path = config.resolve(text)
    if not _is_file(path):
        raise MissingResource(f"the judge's rubric: there is no file {path}")
    return path.read_text(encoding="utf-8")


def rubric_judge(config: Config) -> RubricJudge:
    """The judge that `task_judge.rubrics_auto_grader` names. Raises ConfigError."""
    judge, grader = config.task_judge, config.task_judge.rubrics_auto_grader
    file = grader.jsonl_dataset_file.training.file_path
    if file is None:
        raise ConfigError(
            "task_judge.rubrics_auto_grader.jsonl_dataset_file.training.file_path is required: JSON lines with a "
            "question, an answer and a score"
        )
    rows = read_examples(config.resolve(file))
    fields = {"query": grader.query_field, "answer": grader.answer_field, "reference": grader.reference_field}
    prompt = grader.custom_evaluation_prompt
    if isinstance(prompt, Mapping):
        prompt = str(prompt.get(grader.language) or next(iter(prompt.values()), "")) or None
    return RubricJudge(
        [example for row in rows for example in _scored(row, fields, (grader.min_score, grader.max_score))],
        model=_model(config, grader.model_name),
        mode=grader.grader_mode, min_score=grader.min_score, max_score=grader.max_score,
        success_threshold=grader.success_threshold, name=grader.grader_name, prompt=prompt,
        retries=grader.max_retries, language=grader.language, rounds=grader.max_epochs,
        candidates=grader.generate_number, merge=grader.aggregation_mode == "keep_all",
        headings=grader.categories_number if grader.enable_categorization else 0,
        most_examples=grader.num_reference_samples, reference_key=grader.reference_field,
        cache=None if judge.llm.cache is None else config.resolve(judge.llm.cache), price=judge.llm.price,
        max_tokens=_longest(config), file=config.directory / "rubric.md",
    )  # fmt: skip


def _scored(row: Mapping[str, Any], fields: Mapping[str, str], scores: tuple[float, float]) -> list[Example]:
    """The examples in a row: one, or several answers with `scores` or with `label_rank` (1 is the best)."""
    metadata = row.get("metadata")
    whole = {**row, **(metadata if isinstance(metadata, Mapping) else {})}
    answers = whole.get("answers")
    named = {name: whole[field] for name, field in fields.items() if whole.get(field) is not None}
    if not isinstance(answers, list):
        if not {fields["answer"], "output", "response"}.isdisjoint(whole):  # else `answer` is the one that was scored
            whole.pop(fields["reference"], None)
        elif fields["reference"] == "answer":
            named.pop("reference", None)
        return [Example.of({**whole, **named})]
    labels = whole.get("scores")
    if not isinstance(labels, list):
        ranks = whole.get("label_rank") or whole.get("ranks") or []
        if not isinstance(ranks, list) or not all(isinstance(rank, int | float) for rank in ranks):
            raise ConfigError(f"a scored example's ranks (label_rank) are not a list of numbers (got {ranks!r:.50})")
        least, most = scores
        labels = [most - (rank - 1) * (most - least) / max(len(answers) - 1, 1) for rank in ranks]
    if len(labels) != len(answers):
        raise ConfigError(f"a scored example has {len(answers)} answers and {len(labels)} scores")
    rest = {name: value for name, value in named.items() if name != "answer"}
    return [Example.of({**rest, "answer": one, "score": score}) for one, score in zip(answers, labels, strict=True)]


class AutoGraderJudge(BaseJudge):
    """The rubric grader as programs written for AgentJet name it; see `RubricJudge`."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.judge = rubric_judge(getattr(config, "ajet", config))
        self.group, self.timeout = self.judge.group, self.judge.timeout

    async def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
        """The verdict on one output."""
        return await self.judge(workflow_output, workflow_task.task, Episode(task=workflow_task.task))

    async def compute_rewards(self, episodes: Sequence[Episode]) -> list[Verdict]:
        """The verdicts on a group."""
        return await self.judge.compute_rewards(episodes)


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
