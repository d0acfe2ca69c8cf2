"""`ajet judge eval` compares a judge with labels; `ajet judge attack` tests it with cheating
outputs."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from typer import Argument, Option

from ajet_sdk.config.api_keys import placeholder_keys
from ajet_sdk.config.config import Config, load_config
from ajet_sdk.environments.hosted import KINDS
from ajet_sdk.environments.spec import Spec
from ajet_sdk.errors import ConfigError
from ajet_sdk.judges.agreement import Interval
from ajet_sdk.judges.attack import Attack, attack_environment, attack_judge
from ajet_sdk.judges.evaluate import Evaluation, Labelled, evaluate, labelled_row
from ajet_sdk.judges.load import load_judge, named_judge
from ajet_sdk.judges.rubric import Built, RubricJudge
from ajet_sdk.reporting.output import ProgressBar
from ajet_sdk.tasks.load import load_tasks
from ajet_sdk.trace.reader import episodes
from ajet_tools.cli.arguments import JUDGE_HELP, Conf
from ajet_tools.cli.options import expand_options
from ajet_tools.cli.result import Result
from ajet_tools.text.tables import table
from ajet_tools.trace.locate import open_located
from ajet_tools.trace.queries.base import rows

_MOST_SHOWN = 20
_AT_ONCE = 8
"""Concurrent judgements."""
LabelSource = Literal["score", "feedback", "reward"]
_SOURCES: dict[LabelSource, str] = {
    "score": "",
    "feedback": ", by the scores of people",
    "reward": ", by the recorded rewards",
}
app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def judge() -> None:
    """Try a judge before it gives rewards.

    \b
    ajet judge eval agent.py:polite --labels scored.jsonl
    ajet judge attack agent.py:polite --tasks tasks.jsonl
    """


@dataclass(frozen=True)
class EvaluationResult(Result):
    judge: str
    labels: LabelSource
    evaluation: Evaluation
    built: Built | None = None
    """The rubric, if the judge made one."""

    @property
    def exit_code(self) -> int:
        return int(all(score is None for _, _, score in self.evaluation.scores))

    def document(self) -> object:
        document = {"judge": self.judge, "labels": self.labels, **asdict(self.evaluation)}
        if self.built is None:
            return document
        return {**document, "rubric": asdict(self.built)}

    def show(self, out: Console) -> None:
        _print(self.judge, self.labels, self.evaluation, out)
        if self.built is not None:
            out.print(f"\nRubric:\n{self.built.rubric}\n{_tried(self.built)}", soft_wrap=True)


@dataclass(frozen=True)
class AttackResult(Result):
    target: str
    attack: Attack

    @property
    def exit_code(self) -> int:
        return int(bool(self.attack.earned))

    def document(self) -> object:
        counts = {"cheats": len(self.attack.outcomes), "earned": len(self.attack.earned)}
        return {"target": self.target, **counts, **asdict(self.attack)}

    def show(self, out: Console) -> None:
        _print_attack(self.target, self.attack, out)


@app.command("eval")
@expand_options
def evaluate_judge(
    name: Annotated[
        str | None, Argument(metavar="[JUDGE]", help=f"{JUDGE_HELP} Default: that of --conf.")
    ] = None,
    *,
    labels: Annotated[
        Path, Option(metavar="FILE|TRACE", help="JSON lines with output and score, or a trace.")
    ],
    conf: Conf = None,
    repeats: Annotated[
        int, Option(min=1, help="Verdicts per output, to measure their variance.")
    ] = 3,
) -> EvaluationResult:
    """Compare a judge with labels: agreement, variance, the effects of order and length, cost.

    A row of the labels has a query, an output (or response, final_answer, answer) and a score (or
    label); what else it has is the task's metadata. Of a trace, the mean of the scores that people
    gave an episode is its label; without any such score, the recorded reward is. Agreement is the
    share of pairs with different labels that the judge puts in their order: 0.5 is chance.
    Intervals are 95 %, by bootstrap over the outputs. Exit code 1 where no verdict could be had.

    \b
    ajet judge eval llm:rubric.yaml --labels scored.jsonl
    ajet judge eval agent.py:polite --labels launcher_record/shop --json
    ajet judge eval --conf job.yaml --labels scored.jsonl
    """
    source: LabelSource = "score"
    if labels.suffix in (".jsonl", ".json"):
        labelled = _rows(labels)
    else:
        source, labelled = _episodes(labels)
    config = load_config(conf) if conf is not None else Config()
    with placeholder_keys():
        chosen = _judge(name, config)
    name = name or config.task_judge.judge_protocol or config.task_judge.judge_type
    with ProgressBar("Judging", len(labelled) * repeats) as bar:
        work = evaluate(chosen, labelled, repeats=repeats, parallel=_AT_ONCE, done=bar.advance)
        result = asyncio.run(work)
    built = chosen.built if isinstance(chosen, RubricJudge) else None
    return EvaluationResult(name, source, result, built)


@app.command("attack")
@expand_options
def attack_target(
    name: Annotated[
        str | None,
        Argument(
            metavar="[JUDGE|ENV]",
            help=(
                f"{JUDGE_HELP} An environment: env:FILE.py:NAME, gymnasium:ID, mcp:COMMAND,"
                " openenv:NAME or "
                "verifiers:NAME. Without it, the judge of --conf."
            ),
        ),
    ] = None,
    *,
    tasks: Annotated[Path | None, Option(metavar="FILE")] = None,
    limit: Annotated[
        int, Option("--limit", "-n", min=1, help="Maximum number of tasks, from the first.")
    ] = 2,
    conf: Conf = None,
    threshold: float | None = None,
    own_model: Annotated[bool, Option("--own-model")] = False,
) -> AttackResult:
    """Give a judge or an environment outputs that cheat, and list those that earn a reward.

    Nearly 200 texts: quoted verdicts, instructions to the grader, flattery, length, empty answers,
    unicode, guesses. A task of --tasks is also answered with its own fields, the answers of other
    tasks, and hollow forms of its answer. A task with tests gets programs instead: exit codes,
    objects that equal everything, replaced functions, attempts to read the tests and to write the
    verdict, and trivial ones (`return []`), with the tests that each passes. An environment gets
    calls of tools that it does not offer, forged results and rewards. The model of an LLM judge is
    replaced by a scripted one that finds each answer wrong and quotes it. None of the outputs does
    the task. Exit code 1 where one earned a reward, 2 where no verdict could be had.

    Args:
        tasks: Tasks to cheat on. Default: two that come with ajet.
        threshold: A reward above this counts. Default: the judge's min_score, else 0.
        own_model: Ask the model of an LLM judge itself, in place of one that quotes answers.

    \b
    ajet judge attack code
    ajet judge attack agent.py:polite --tasks tasks.jsonl
    ajet judge attack llm:rubric.yaml --threshold 0.5 --json
    ajet judge attack env:lake_env.py:Lake
    """
    config = load_config(conf) if conf is not None else Config()
    environment = _environment(name)
    with ProgressBar("Cheating") as bar:
        if environment is not None:
            if tasks is not None:
                raise ConfigError(
                    f"--tasks: {name} is an environment, and has its own tasks (--limit says how"
                    " many)"
                )
            result = asyncio.run(
                attack_environment(
                    environment,
                    limit,
                    threshold=threshold or 0.0,
                    parallel=_AT_ONCE,
                    done=bar.advance,
                )
            )
        else:
            judge = _judge(name, config)
            seen = []
            if tasks is not None:
                seen = list(load_tasks(config, tasks).train)
            work = attack_judge(
                judge,
                seen[:limit],
                seen=seen,
                threshold=threshold,
                own_model=own_model,
                parallel=_AT_ONCE,
                done=bar.advance,
            )
            result = asyncio.run(work)
    name = name or config.task_judge.judge_protocol or config.task_judge.judge_type
    return AttackResult(name, result)


def _judge(name: str | None, config: Config) -> object:
    judge = load_judge(config) if name is None else named_judge(name, config)
    if judge is None:
        raise ConfigError(
            "no judge given: name it as the argument, or pass a --conf with a task_judge"
        )
    return judge


def _environment(name: str | None) -> Spec | None:
    kind, _, remainder = (name or "").partition(":")
    if kind == "env":
        return Spec(remainder)
    if kind in KINDS:
        return Spec(name or "")
    return None


def _print_attack(name: str, result: Attack, out: Console) -> None:
    total = Counter(cheat.kind for cheat in result.outcomes)
    earned = Counter(cheat.kind for cheat in result.earned)
    without = Counter(cheat.kind for cheat in result.outcomes if cheat.reward is None)
    out.print(
        f"{name}: {len(result.outcomes)} cheats, {len(result.earned)} earned a reward",
        soft_wrap=True,
    )
    kinds = [
        {"kind": kind, "cheats": count, "earned": earned[kind], "no verdict": without[kind]}
        for kind, count in total.items()
    ]
    out.print(table(kinds, out.width))
    if result.earned:
        shown = [
            {"task": c.task_id, "cheat": c.name, "reward": c.reward}
            for c in result.earned[:_MOST_SHOWN]
        ]
        out.print(table(shown, out.width))
    for cheat in result.earned[:_MOST_SHOWN]:
        for test in cheat.paid_by:
            out.print(f"{cheat.task_id}: {cheat.name} passes {test}", soft_wrap=True, markup=False)
    if len(result.earned) > _MOST_SHOWN:
        out.print(f"and {len(result.earned) - _MOST_SHOWN} more (--json has all)")


def _tried(built: Built) -> str:
    if built.agreement is None or built.interval is None:
        return f"Tried on {built.held_out} examples, which do not show its agreement"
    low, high = built.interval
    plain = ""
    if built.plain is not None:
        plain = f"; without a rubric {built.plain:.2f}"
    return (
        f"Agreement on {built.held_out} held-out examples: {built.agreement:.2f} [{low:.2f},"
        f" {high:.2f}]{plain}"
    )


def _rows(path: Path) -> list[Labelled]:
    try:
        text = path.read_text(encoding="utf-8")
        # not `splitlines`: a text may have other line separators, which JSON allows
        lines = [line for line in text.split("\n") if line.strip()]
        return [labelled_row(json.loads(line), place) for place, line in enumerate(lines)]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"--labels: cannot read {path} as JSON lines: {error}") from None


def _episodes(path: Path) -> tuple[LabelSource, list[Labelled]]:
    """The episodes of a trace with people's scores, or without any the rewards, as labels."""
    reader, _ = open_located(path)
    labelled: list[Labelled] = []
    with reader:
        sql = (
            "SELECT episode_id, avg(score) AS score FROM feedback WHERE score IS NOT NULL GROUP BY"
            " episode_id"
        )
        scores = {row["episode_id"]: float(row["score"]) for row in rows(reader, sql)}
        for episode in episodes(reader, episode_ids=list(scores) or None):
            if scores:
                label = scores[episode.episode_id]
            elif episode.status != "succeeded" or episode.reward is None:
                continue
            else:
                label = episode.reward
            labelled.append(Labelled(episode.model_copy(update={"rewards": ()}), label))
    return ("feedback" if scores else "reward"), labelled


def _print(name: str, labels: LabelSource, result: Evaluation, out: Console) -> None:
    lines = [line for line in _lines(result) if line[1] is not None]
    out.print(f"{name}: {result.count} labelled outputs{_SOURCES[labels]}")
    out.print(
        table(
            [dict(zip(("measure", "value", "meaning"), line, strict=True)) for line in lines],
            out.width,
        )
    )
    for cause, count in list(result.failures.items())[:5]:
        out.print(f"No verdict, {count} × {cause}", style="yellow", soft_wrap=True)


def _lines(result: Evaluation) -> list[tuple[str, str | None, str]]:
    def number(value: float | None, form: str = ".3f") -> str | None:
        if value is None:
            return None
        return format(value, form)

    def interval(value: Interval | None) -> str | None:
        if value is None:
            return None
        return f"{value.value:.3f} [{value.low:.3f}, {value.high:.3f}]"

    build_cost = result.building
    building = None
    if build_cost is not None:
        building = f"{build_cost.calls} calls, {build_cost.tokens:,} tokens"
    verdicts = f"{result.calls:.3g} calls, {result.tokens:.4g} tokens"
    money = ""
    if result.cost is not None:
        money = f", {result.cost:.3g} in money"
    return [
        (
            "agreement",
            interval(result.agreement),
            "pairs ordered as by their labels; 0.5 is chance",
        ),
        ("accuracy", interval(result.accuracy), "outputs with the same verdict as the label"),
        ("kappa", number(result.kappa), "agreement corrected for chance"),
        ("correlation", interval(result.correlation), "Spearman correlation of score and label"),
        (
            "repeat spread",
            number(result.spread),
            f"standard deviation of {result.repeats} verdicts on one output",
        ),
        ("repeat flips", number(result.flipped, ".1%"), "outputs with differing verdicts"),
        (
            "order flips",
            number(result.order, ".1%"),
            "pairs of a group whose order depends on the order shown",
        ),
        ("length", number(result.length, "+.3f"), "correlation of score and length"),
        (
            "length of labels",
            number(result.length_of_labels, "+.3f"),
            "correlation of label and length",
        ),
        (
            "length alone",
            number(result.length_beyond_labels, "+.3f"),
            "score and length, controlling for the label",
        ),
        ("cost of the rubric", building, "calls that made it, before the first verdict"),
        (
            "cost per verdict",
            f"{verdicts}{money}, {result.seconds:.3g} s",
            f"{result.cached} from the cache",
        ),
    ]
