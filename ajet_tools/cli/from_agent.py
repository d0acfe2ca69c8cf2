"""`ajet init --from agent.py`: writes a job around an existing agent, without changing its file."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ajet_sdk.config.model_source import NAMED_MODELS, NamedModel
from ajet_sdk.errors import ConfigError
from ajet_sdk.tasks.row_names import ANSWERS, REPLIES
from ajet_tools.cli.machine import gpus
from ajet_tools.dataset.files.rows import read
from ajet_tools.dataset.from_traces.export import task_rows
from ajet_tools.dataset.from_traces.sources import opened_sources

_LLM_CALLS = (
    "chat.completions.create",
    "chat.completions.parse",
    "completions.create",
    "responses.create",
    "responses.parse",
    "messages.create",
    "messages.stream",
    "generate_content",
    "litellm.completion",
    "litellm.acompletion",
    "Runner.run",
    "Runner.run_sync",
    "ainvoke",
    "invoke",
    "run_sync",
    "kickoff",
    "chat.send",
    "ollama.chat",
)
"""Ends of dotted names that call a model, in the SDKs and frameworks of docs/frameworks.md."""
_GIVEN = ("model", "env", "self")
"""Parameters that ajet fills, not columns of a task."""
_MOST_TASKS = 2_000
_GIB = 2**30
_BYTES_OF_A_WEIGHT = 4
_BESIDE = 4 * _GIB
"""Float32 on a CPU, bfloat16 with adapter and activations on a GPU; and the memory of a LoRA step
of 1,024 tokens besides the weights (smollm2-135m: measured 4.9 GB in total).
"""
_MOST_ON_CORES = 1_000
_OF_A_CORE = 100
"""Millions of parameters that one core samples and trains: smollm2-135m takes minutes a step on two
cores."""


@dataclass(frozen=True)
class Agent:
    """A file's function that is the agent."""

    file: Path
    name: str
    parameters: tuple[str, ...]
    """Parameters to fill from a task's columns."""
    is_workflow: bool
    """Whether it has ajet's decorator."""


def read_agent(source: str) -> Agent:
    """Finds the agent in `FILE.py` or `FILE.py:FUNCTION` by parsing the source; no code is run.

    Raises ConfigError if the file cannot be read or parsed, or the agent is ambiguous.
    """
    place, _, wanted = source.partition(":")
    file = Path(place)
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"), filename=place)
    except OSError as error:
        raise ConfigError(f"--from: cannot read {place}: {error.strerror or error}") from error
    except (SyntaxError, ValueError) as error:
        line = ""
        if isinstance(error, SyntaxError) and error.lineno:
            line = f" line {error.lineno}"
        raise ConfigError(f"--from: {place}{line} is not Python: {error}") from error
    functions = {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    decorated = [
        n
        for n, node in functions.items()
        if any("workflow" in ast.unparse(d) for d in node.decorator_list)
    ]
    if wanted:
        if wanted not in functions:
            raise ConfigError(
                f"--from: {place} has no function {wanted}; it has {', '.join(functions) or 'none'}"
            )
        chosen = [wanted]
    else:
        chosen = decorated or _outermost(functions)
    if not chosen:
        raise ConfigError(
            f"--from: found no function in {place} that calls a model; name the agent:"
            f" {place}:FUNCTION"
        )
    if len(chosen) > 1:
        raise ConfigError(
            f"--from: {place} has several agents; name one:"
            f" {', '.join(f'{place}:{n}' for n in chosen)}"
        )
    node = functions[chosen[0]]
    named = [*node.args.posonlyargs, *node.args.args]
    needed = [*named[: len(named) - len(node.args.defaults)]]
    needed += [
        a for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if d is None
    ]
    parameters = tuple(a.arg for a in needed if a.arg not in _GIVEN)
    return Agent(file.resolve(), chosen[0], parameters, chosen[0] in decorated)


def _outermost(functions: Mapping[str, ast.FunctionDef | ast.AsyncFunctionDef]) -> list[str]:
    """Returns the functions that call a model, directly or indirectly, and are not called by such a
    function."""
    calls = {
        name: [ast.unparse(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)]
        for name, node in functions.items()
    }
    asks = re.compile(rf"(^|[.])({'|'.join(map(re.escape, _LLM_CALLS))})$")
    asking = {name for name, called in calls.items() if any(map(asks.search, called))}
    while more := {
        name for name, called in calls.items() if name not in asking and asking & {*called}
    }:
        asking |= more
    with_input = {
        name for name in asking if functions[name].args.args or functions[name].args.kwonlyargs
    }
    inner = {called for name in with_input for called in calls[name] if called != name}
    return [name for name in functions if name in with_input - inner]


def job_files(agent: Agent, tasks: Path | None, *, folder: Path) -> dict[str, str]:
    """Returns the files of a job in a folder: agent and judge, training and validation tasks,
    config.

    The model is the largest known one that trains here in reasonable time.

    Raises ConfigError for too few tasks, or a task that lacks one of the agent's parameters.
    """
    rows = list(_distinct_rows(agent, tasks))
    if len(rows) < 2:
        raise ConfigError(
            "at least two different tasks are needed: one to train on and one to validate on"
        )
    every = 4 if len(rows) >= 4 else 2
    held_out = rows[every - 1 :: every]
    train = [row for place, row in enumerate(rows) if place % every != every - 1]
    columns = set.intersection(*(set(row) for row in rows)) - {*agent.parameters}
    answer = next((name for name in (*ANSWERS, *REPLIES) if name in columns), None)
    answers = [] if answer is None else [row[answer] for row in rows]
    model = fitting_model()
    about = f"{model.parameters}M parameters, {model.licence}, {model.megabytes:,} MB"
    return {
        "job.py": _program(agent, folder, answer, answers),
        "tasks.jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in train),
        "val.jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in held_out),
        "config.yaml": _CONFIG.format(
            workflow=agent.name,
            model=f"{model.name}   # {about}; `ajet model list` has others",
            batch=min(8, len(train)),
        ),
    }


def _distinct_rows(agent: Agent, tasks: Path | None) -> Iterator[dict[str, object]]:
    if tasks is None:
        raise ConfigError(
            "give some tasks: --tasks FILE.jsonl (a few examples), or --tasks TRACE (recorded calls)"
        )
    seen: set[str] = set()
    if tasks.is_dir() or tasks.suffix == ".duckdb":
        rows = _traced(agent, tasks)
    else:
        rows = ((row.where, row.values) for row in read(tasks))
    for place, row in rows:
        missing = [name for name in agent.parameters if name not in row]
        if missing:
            raise ConfigError(
                f"{place}: the task has no {', '.join(missing)} for {agent.name}(); it has"
                f" {', '.join(row)}"
            )
        key = json.dumps(
            [row[name] for name in agent.parameters] or row, sort_keys=True, default=str
        )
        if key not in seen:
            seen.add(key)
            yield row


def _traced(agent: Agent, trace: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """Yields the tasks of recorded calls; an agent's only parameter gets the question if no column
    has its name."""
    with opened_sources([trace]) as sources:
        for row in islice(task_rows(sources)[1], _MOST_TASKS):
            row = {**row.get("metadata", {}), **row}
            row.pop("metadata", None)
            if (
                len(agent.parameters) == 1
                and agent.parameters[0] not in row
                and "main_query" in row
            ):
                row[agent.parameters[0]] = row["main_query"]
            yield str(trace), row


def fitting_model() -> NamedModel:
    """Returns the largest known model for which a LoRA step fits this GPU, or half of the memory
    and the cores."""
    devices = gpus()
    memory = max((device.memory for device in devices), default=0.0) * _GIB
    half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2
    most = memory or half
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    for_cores = min(cores * _OF_A_CORE, _MOST_ON_CORES)
    fits = [
        model
        for model in NAMED_MODELS.values()
        if model.parameters * 1e6 * _BYTES_OF_A_WEIGHT + _BESIDE <= most
        and (memory or model.parameters <= for_cores)
    ]
    return max(fits, key=lambda model: model.parameters, default=next(iter(NAMED_MODELS.values())))


def _program(agent: Agent, folder: Path, answer: str | None, answers: Sequence[object]) -> str:
    function = f"agent.{agent.name}"
    wrapped = f"{agent.name} = {function if agent.is_workflow else f'ajet.workflow({function})'}"
    judge = _OPEN
    imports = "import importlib.util\nimport sys"
    if answer and any(map(_is_json, answers)):
        judge = _SAME_JSON.format(answer=answer)
        imports = "import importlib.util\nimport json\nimport sys"
    elif answer:
        judge = _EXACT.format(answer=answer)
    # Relative, so that agent and job can be moved together.
    file = os.path.relpath(agent.file, folder.resolve())
    return _PROGRAM.format(
        file=json.dumps(Path(file).as_posix()),
        name=agent.file.name,
        stem=agent.file.stem,
        wrapped=wrapped,
        judge=judge,
        imports=imports,
    )


def _is_json(answer: object) -> bool:
    """Whether an answer is no text, or JSON text of an object or a list, which can be written in
    several ways."""
    if not isinstance(answer, str):
        return True
    if not answer.lstrip().startswith(("{", "[")):
        return False
    try:
        json.loads(answer)
    except (ValueError, RecursionError):
        return False
    return True


_PROGRAM = '''"""The agent of {name} as a workflow, and its judge. {name} itself is unchanged."""

{imports}
from pathlib import Path

import ajet

FILE = (Path(__file__).parent / {file}).resolve()
sys.path.insert(0, str(FILE.parent))  # for its own imports
spec = importlib.util.spec_from_file_location("{stem}", FILE)
agent = importlib.util.module_from_spec(spec)
sys.modules["{stem}"] = agent
spec.loader.exec_module(agent)

{wrapped}

{judge}'''
_EXACT = '''
@ajet.judge
def judge(output: str, {answer}: str) -> float:
    """1 if the output equals the expected one; test a more lenient judge with `ajet judge attack`."""
    return float(str(output).strip() == str({answer}).strip())
'''
_SAME_JSON = '''
@ajet.judge
def judge(output: object, {answer}: object) -> float:
    """1 if the output equals the expected value; test a more lenient judge with `ajet judge attack`.

    Values are compared and not their text: JSON can be written with other spaces, or in another order.
    """
    return float(value_of(output) == value_of({answer}))


def value_of(text: object) -> object:
    """The value of JSON, perhaps in a code fence; any other text as it is."""
    if not isinstance(text, str):
        return json.loads(json.dumps(text, default=str))  # a tuple is a list in JSON
    content = text.strip()
    if content.startswith("```") and content.endswith("```"):
        content = content.strip("`").removeprefix("json").strip()
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return content
'''
_OPEN = '''
@ajet.judge
def judge(output: str) -> float:
    """Return 1 for an output that solves the task, else 0; raise if it can't be judged.

    `output` is the agent's return value. A parameter named like a column of the task gets its value.
    """
    raise NotImplementedError("write the judge in job.py")
'''
_CONFIG = """# `ajet config schema` explains every key; `ajet config check config.yaml` checks this file.
ajet:
  backbone: local
  model:
    path: {model}
    lora: {{enabled: true}}
  rollout:
    user_workflow: job.py->{workflow}
    num_repeat: 8                      # attempts per task: the size of a group
    temperature: 1.0
    max_model_len: 2048
    max_response_length_in_one_turn: 256
  task_reader:
    type: jsonl_dataset_file
    jsonl_dataset_file:
      training: {{file_path: tasks.jsonl}}
      validation: {{file_path: val.jsonl}}
  task_judge:
    judge_protocol: job.py->judge
  data:
    train_batch_size: {batch}                # tasks per step
  trainer_common:
    total_steps: 20
    val_before_train: true
    test_freq: 10
    save_freq: 10
    use_kl_loss: false
    micro_batch_tokens: 1024
"""
