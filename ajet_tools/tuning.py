"""Tunes an agent's prompts by reflective search: GEPA (Agrawal et al. 2025, arXiv:2507.19457), by
its authors' library.

The workflow runs each candidate on tasks, with its judge and a trace; a model reads the failures
and writes another text. The gain is measured on held-out tasks, which the search has not seen.
Prompts are texts that the workflow's module assigns to names.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import itertools
import json
import logging
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from string import Formatter
from types import CodeType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

from ajet_sdk import run as sdk
from ajet_sdk.agent.decorators import workflow
from ajet_sdk.capture.observe import trace
from ajet_sdk.dialects.message_parts import parts_of, reply_messages, request_messages
from ajet_sdk.errors import ConfigError, MissingExtra, TrainingError
from ajet_sdk.reporting.paired import Paired, paired
from ajet_sdk.tasks.load import load_tasks
from ajet_sdk.trace.counted import counted_reward
from ajet_sdk.types import Episode, Task
from ajet_sdk.whole_file import write_whole
from ajet_tools.text.clean import visible

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config

log = logging.getLogger("ajet")
Reflect = Callable[[str], str]
"""A model that replies to a text."""
_MINIBATCH = 4
"""Episodes from which the reflecting model learns at a time."""
_LONGEST = 4000
"""Maximum characters of a conversation shown to the reflecting model."""


@dataclass(frozen=True)
class Prompts:
    """Texts by name, in the order of their file."""

    path: Path
    texts: Mapping[str, str]
    scope: dict[str, object]
    """The module's namespace, in which the running workflow looks them up."""

    @contextmanager
    def trying(self, texts: Mapping[str, str]) -> Iterator[None]:
        """Replaces the texts within the block."""
        self.scope.update(texts)
        try:
            yield
        finally:
            self.scope.update(self.texts)

    def wrong(self, texts: Mapping[str, str]) -> str | None:
        """Returns the first problem: a text that lacks a `{placeholder}` of the original, or has an
        unknown one."""
        for name, text in self.texts.items():
            expected = placeholders(text)
            lost = expected - placeholders(texts[name])
            new = placeholders(texts[name]) - expected
            if lost:
                return f"{name} has lost {_braced(lost)}"
            if expected and new and _fields(text) is not None:
                return f"{name} has {_braced(new)}, which nothing fills"
            if expected and _fields(text) is not None and _fields(texts[name]) is None:
                return f"{name} has braces that str.format can't read"
        return None

    def rewritten(self, texts: Mapping[str, str]) -> str:
        """Returns the source with other texts, otherwise unchanged."""
        source = self.path.read_text(encoding="utf-8")
        lines = source.splitlines(keepends=True)
        starts = [0]
        for line in lines:
            starts.append(starts[-1] + len(line.encode()))
        content = source.encode()
        for name, node in reversed(list(_assigned(source).items())):
            if name in texts and texts[name] != self.texts[name]:
                begin = starts[node.lineno - 1] + node.col_offset
                end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
                content = content[:begin] + _literal(texts[name]).encode() + content[end:]
        return content.decode()

    def diff(self, texts: Mapping[str, str]) -> str:
        """Returns the changes of the file as a unified diff; empty without changes."""
        before = self.path.read_text(encoding="utf-8")
        after = self.rewritten(texts)
        lines = before.splitlines(keepends=True), after.splitlines(keepends=True)
        return "".join(difflib.unified_diff(lines[0], lines[1], str(self.path), str(self.path)))

    def apply(self, texts: Mapping[str, str]) -> None:
        """Writes the file with other texts."""
        write_whole(self.path, self.rewritten(texts).encode())


def prompts_of(workflow: Callable[..., object], names: Sequence[str] = ()) -> Prompts:
    """Returns the named texts of the workflow's module, or those that its code uses.

    Raises ConfigError if there are none, or the module does not assign a plain text to a name.
    """
    function: Any = (
        getattr(workflow, "execute", None)
        if inspect.isclass(workflow)
        else inspect.unwrap(workflow)
    )
    scope = function.__globals__
    path = Path(inspect.getsourcefile(function) or "")
    known = {name: node.value for name, node in _assigned(path.read_text(encoding="utf-8")).items()}
    used = set(_names(function.__code__)) if not inspect.isclass(workflow) else known.keys()
    chosen = list(names) or [name for name in known if name in used]
    for name in chosen:
        if name not in known:
            raise ConfigError(
                f"{path} assigns no text to {name} at its top level; it has"
                f" {', '.join(known) or 'none'}. A prompt is tuned where it is a text there"
                ' (`SYSTEM = "..."`), which the agent reads when it is called'
            )
    if not chosen:
        raise ConfigError(
            f"the workflow uses no text that {path} assigns at its top level: move its prompt"
            " there, or pass --prompt"
        )
    return Prompts(path, {name: str(known[name]) for name in known if name in chosen}, scope)


def _assigned(source: str) -> dict[str, ast.Constant]:
    constants: dict[str, ast.Constant] = {}
    for node in ast.parse(source).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if (
            not isinstance(target, ast.Name)
            or not isinstance(value, ast.Constant)
            or target.id.startswith("__")
        ):
            continue
        if isinstance(value.value, str):
            constants[target.id] = value
    return constants


def _names(code: CodeType) -> Iterator[str]:
    """Yields the names that a function and its inner functions look up."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def placeholders(text: str) -> set[str]:
    """Returns the names in the text's `{placeholders}`, as `str.format` reads them; `{}` and `{}`
    are 0 and 1.

    In text with other braces, such as JSON, anything like `{name}` counts.
    """
    names = _fields(text)
    return set(re.findall(r"\{(\w+)\}", text)) if names is None else names


def _fields(text: str) -> set[str] | None:
    """Returns the fields of `str.format`; None if the text has other braces."""
    try:
        names = [name for _, name, _, _ in Formatter().parse(text) if name is not None]
    except ValueError:
        return None
    if not all(re.fullmatch(r"(\w*)([.\[].*)?", name) for name in names):
        return None
    counted = itertools.count()
    return {name or str(next(counted)) for name in names}


def _braced(names: set[str]) -> str:
    return ", ".join(f"{{{name}}}" for name in sorted(names))


def _literal(text: str) -> str:
    """Returns the text as a Python literal, with triple quotes if it has several lines."""
    whole = '"""' + text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"') + '"""'
    if "\n" in text and not text.endswith('"') and ast.literal_eval(whole) == text:
        return whole
    written = repr(
        text
    )  # has double quotes only if the text has an apostrophe and no double quotes
    if '"' in text or written.startswith('"'):
        return written
    return f'"{written[1:-1]}"'


@dataclass(frozen=True)
class Tuned:
    """The best prompts, and their effect on held-out tasks."""

    prompts: Prompts
    best: Mapping[str, str]
    candidates: int
    episodes: int
    """Episodes of the search, without the comparison."""
    before: float
    after: float
    gain: Paired
    """Paired over the held-out tasks."""

    @property
    def changed(self) -> bool:
        return dict(self.best) != dict(self.prompts.texts)


def tune(
    config: Config,
    reflect: Reflect,
    *,
    names: Sequence[str] = (),
    budget: int = 200,
) -> Tuned:
    """Searches with about `budget` episodes, then compares on the validation tasks.

    Half of the training tasks are for learning, the other half choose among the candidates. Raises
    ConfigError for too few tasks or a missing prompt, TrainingError if an episode has no reward.
    """
    try:
        import gepa
    except ImportError as error:
        raise MissingExtra("gepa", "prompts") from error
    agent = config.load(config.rollout.user_workflow or "")
    prompts = prompts_of(agent, names)
    sets = load_tasks(config)
    if len(sets.train) < 2 or not sets.val:
        raise ConfigError(
            f"tuning needs 2 training tasks (got {len(sets.train)}) and validation tasks (got"
            f" {len(sets.val)})"
        )
    tasks = list(sets.train)
    random.Random(config.trainer_common.seed).shuffle(tasks)
    evaluation = _Evaluation(config, agent, prompts)
    result = gepa.optimize(
        seed_candidate=dict(prompts.texts),
        trainset=tasks[: len(tasks) // 2],
        valset=tasks[len(tasks) // 2 :],
        adapter=evaluation,
        reflection_lm=_traced(reflect, config.directory),
        reflection_minibatch_size=_MINIBATCH,
        max_metric_calls=budget,
        seed=config.trainer_common.seed,
        logger=SimpleNamespace(log=lambda message: log.debug("%s", message)),
    )
    best = dict(result.best_candidate)
    spent = evaluation.episodes
    before = evaluation.rewards(sets.val, prompts.texts)
    if best == dict(prompts.texts):
        after = before
    else:
        after = evaluation.rewards(sets.val, best)
    gain = paired(
        [b - a for a, b in zip(before, after, strict=True)], seed=config.trainer_common.seed
    )
    count = len(result.candidates)
    return Tuned(prompts, best, count, spent, fmean(before), fmean(after), gain)


def _traced(reflect: Reflect, directory: Path) -> Reflect:
    """Records each reflection as an episode `reflection` in the trace."""

    @workflow
    def reflection(question: str) -> str:
        return reflect(question)

    def ask(question: str) -> str:
        with trace(directory / "trace.duckdb"):  # evaluations open it before and after
            return str(reflection(question=question))

    return ask


class _Evaluated(Protocol):
    """GEPA's `EvaluationBatch`, of our episodes."""

    scores: list[float]
    trajectories: list[Episode]


@dataclass
class _Evaluation:
    """GEPA's adapter: runs a candidate over tasks and describes each episode to the reflecting
    model."""

    config: Config
    agent: Callable[..., object]
    prompts: Prompts
    episodes: int = 0
    propose_new_texts: None = field(default=None, init=False)

    def evaluate(
        self, batch: list[Task], candidate: dict[str, str], capture_traces: bool = False
    ) -> object:
        import gepa

        if (
            wrong := self.prompts.wrong(candidate)
        ) is not None:  # not run, and worse than any result
            log.warning("rejected a rewritten prompt: %s", wrong)
            refused: list[object] = [None] * len(batch)
            scores = [-math.inf] * len(batch)
            return gepa.EvaluationBatch(
                outputs=refused, scores=scores, trajectories=refused, num_metric_calls=0
            )
        episodes = self._run(batch, candidate)
        scores = [self._value(episode) for episode in episodes]
        trajectories = episodes if capture_traces else None
        return gepa.EvaluationBatch(
            outputs=[e.output for e in episodes], scores=scores, trajectories=trajectories
        )

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: _Evaluated, components_to_update: list[str]
    ) -> Mapping[str, Sequence[Mapping[str, object]]]:
        records = list(map(_description, eval_batch.trajectories, eval_batch.scores))
        required = {
            name: _braced(placeholders(self.prompts.texts[name])) for name in components_to_update
        }
        return {
            name: [
                {**record, **({"Keep in the prompt": names} if names else {})} for record in records
            ]
            for name, names in required.items()
        }

    def rewards(self, tasks: Sequence[Task], texts: Mapping[str, str]) -> list[float]:
        return [self._value(episode) for episode in self._run(tasks, texts)]

    def _run(self, tasks: Sequence[Task], texts: Mapping[str, str]) -> list[Episode]:
        """Runs one attempt per task."""
        with self.prompts.trying(texts):
            report = sdk.run(self.config, workflow=self.agent, tasks=list(tasks))
        self.episodes += len(tasks)
        return [score.episodes[0] for score in report.tasks]

    def _value(self, episode: Episode) -> float:
        reward = counted_reward(episode, self.config.rollout.failure_reward)
        if reward is not None:
            return reward
        raise TrainingError(
            f"an episode of task {episode.task.task_id} has no reward"
            f" ({episode.cause or episode.status}:"
            f" {(episode.error or 'none was given').splitlines()[0]}); where the agent's own"
            " failures should count, set rollout.failure_reward"
        )


def _description(episode: Episode, score: float) -> dict[str, object]:
    """Describes an episode to the reflecting model: task, transcript, reward and reasons."""
    transcript_lines = [
        f"{parts.role}: {visible(parts.text)}"
        for call in episode.calls[-1:]
        for parts in map(
            parts_of, [*request_messages(call.request), *reply_messages(call.response)]
        )
    ]
    reasons = [reward.reason for reward in episode.rewards if reward.reason]
    if episode.task.metadata:
        metadata = json.dumps(episode.task.metadata, default=str)
    else:
        metadata = ""
    known = f" The task says of itself: {metadata}." if metadata else ""
    return {
        "Inputs": episode.task.main_query or json.dumps(episode.task.init_messages, default=str),
        "Generated Outputs": "\n".join(transcript_lines)[-_LONGEST:],
        "Feedback": f"Reward {score:g}.{known} {' '.join(reasons)}{episode.error or ''}".strip(),
    }
