"""`ajet plan`: whether a model fits a cluster's GPUs, with the arithmetic, and what to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console
from typer import Argument, Option

from ajet_sdk.backbones.plan import Changes, mend
from ajet_sdk.backbones.plan import plan as plan_run
from ajet_sdk.backbones.shared.fit import GB, Fit, shape_for
from ajet_sdk.config.config import Config, load_config
from ajet_sdk.errors import ConfigError
from ajet_sdk.trace.reader import open_trace
from ajet_tools.cli.arguments import Conf
from ajet_tools.cli.result import Result
from ajet_tools.text.tables import table

_LONGEST = """
    SELECT quantile_disc(length, 0.99)::BIGINT AS longest, count(*)::BIGINT AS calls FROM (
        SELECT max(prefix_len + len(prompt_suffix) + len(output_ids)) AS length
        FROM calls WHERE output_ids IS NOT NULL GROUP BY episode_id, agent)
    WHERE length IS NOT NULL"""


@dataclass(frozen=True)
class PlanResult(Result):
    """Whether a run fits the GPUs, and the changes with which it would."""

    config: Config
    fit: Fit
    changes: Changes | None
    longest: int | None
    """Length of recorded conversations, in tokens."""

    @property
    def exit_code(self) -> int:
        return 1 if self.fit.problems else 0

    def document(self) -> object:
        made = self.fit
        return {
            "fits": not made.problems,
            "parameters": made.shape.parameters,
            "memory_gb": made.memory / GB,
            "longest": self.longest,
            "engines": made.engines,
            "kv_tokens": made.kv_tokens,
            "gpus": [
                {
                    "kind": card.name,
                    "count": card.count,
                    "used_gb": round(card.used / GB, 1),
                    "parts_gb": {name: round(size / GB, 2) for name, size in card.parts.items()},
                }
                for card in made.cards
            ],
            "problems": made.problems,
            "changes": None if self.changes is None else dict(self.changes),
        }

    def show(self, out: Console) -> None:
        say = partial(out.print, soft_wrap=True)
        config = self.config
        made = self.fit
        shape = made.shape
        common = config.trainer_common
        if shape.context is None:
            context = ""
        else:
            context = f", {shape.context:,} positions"
        if shape.experts > 1:
            experts = f", {shape.experts} experts"
        else:
            experts = ""
        say(
            f"{config.model.path}: {shape.parameters / 1e9:.2f} billion parameters,"
            f" {shape.layers} layers, {shape.heads} heads ({shape.kv_heads} of keys){experts}{context}"
        )
        if self.longest is None:
            length = config.rollout.max_model_len
        else:
            length = self.longest
        if self.longest is None:
            where = "rollout.max_model_len"
        else:
            where = "recorded"
        if config.backbone == "local":
            devices = f"1 {made.cards[0].name}"
        else:
            devices = f"{common.nnodes} × {common.n_gpus_per_node} GPUs"
        say(
            f"backbone {config.backbone}: {devices} of {made.memory / GB:g} GB; conversations of"
            f" {length:,} tokens ({where})"
        )
        rows = [
            {
                "kind": card.name,
                "GPUs": card.count,
                "GB each": round(card.used / GB, 1),
                "of these": _parts(card.parts),
            }
            for card in made.cards
        ]
        out.print(table(rows, out.width))
        if made.kv_tokens:
            engines = "1 engine" if made.engines == 1 else f"{made.engines} engines, each"
            at_once = made.kv_tokens // max(1, length)
            say(
                f"{engines} with room for keys and values of {made.kv_tokens:,} tokens:"
                f" {at_once} conversations at once"
            )
        if not made.problems:
            say("It fits. (An estimate: leave some GB of each GPU free.)")
            return
        say("It does not fit:")
        for problem in made.problems:
            say(f"- {problem}")
        if self.changes:
            say("It would fit with:")
            for path, value in self.changes.items():
                say(f"  ajet.{path}={'null' if value is None else str(value).lower()}")
        elif self.changes is None:
            if config.backbone == "local":
                tried = "an adapter, checkpointed activations or shorter conversations"
            else:
                tried = "parallel sizes, offloading or up to 16 machines"
            say(f"No change of {tried} makes it fit.")


def plan(
    overrides: Annotated[list[str] | None, Argument(metavar="KEY=VALUE", help="Overrides.")] = None,
    conf: Conf = None,
    gpus: Annotated[
        int | None, Option(min=1, help="GPUs per machine. Default: the config's.")
    ] = None,
    nodes: Annotated[int | None, Option(min=1, help="Machines. Default: the config's.")] = None,
    memory: Annotated[float, Option(min=1, help="Memory of a GPU, in GB.")] = 80.0,
    backbone: Annotated[
        Literal["trinity", "verl", "local"] | None,
        Option(help="In place of the config's backbone."),
    ] = None,
    trace: Annotated[
        Path | None,
        Option(help="A trace of the agent: its conversations' lengths in place of the maximum."),
    ] = None,
) -> PlanResult:
    """Show whether a run fits its GPUs, and what to change if it doesn't.

    Reads only the model's config.json. Exits with 1 if the run doesn't fit.

    \b
    ajet plan job.yaml
    ajet plan job.yaml --backbone trinity --gpus 8 --nodes 2 --memory 80
    ajet plan job.yaml --backbone local --memory 24
    ajet plan job.yaml ajet.model.path=Qwen/Qwen2.5-32B-Instruct ajet.rollout.tensor_parallel_size=2
    ajet plan job.yaml --trace launcher_record/job
    """
    asked = [*(overrides or ()), *_machines(gpus, nodes)]
    if backbone is not None or conf is None:
        asked.append(f"ajet.backbone={backbone or 'trinity'}")
    config = load_config(conf, asked)
    shape = shape_for(config, online=True)
    if shape is None:
        raise ConfigError(
            f"model.path: {config.model.path or '(not set)'} has no config.json here, in the hub's"
            " cache or on the hub; name a directory with the model's config.json (its weights"
            " aren't needed)"
        )
    longest = None if trace is None else _longest(trace)
    made = plan_run(config, shape, memory * GB, longest)
    if made.problems:
        changes = mend(config, shape, memory * GB, longest)
    else:
        changes = {}
    return PlanResult(config, made, changes, longest)


def _machines(gpus: int | None, nodes: int | None) -> list[str]:
    named = {"n_gpus_per_node": gpus, "nnodes": nodes}
    return [f"ajet.trainer_common.{key}={n}" for key, n in named.items() if n is not None]


def _longest(trace: Path) -> int:
    """The length in tokens that 99 of 100 recorded conversations do not exceed."""
    with open_trace(trace) as reader:
        [row] = reader.query(_LONGEST).to_pylist()
    if not row["calls"]:
        raise ConfigError(f"--trace: {trace} has no calls with token ids to measure")
    return int(row["longest"])


def _parts(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {size / GB:.1f}" for name, size in parts.items())
