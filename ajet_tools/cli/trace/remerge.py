"""`ajet trace remerge preflight`: what another policy, tokenizer or chat template would make of stored episodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ajet_sdk.config.trainer_schema import RewardEstimator
from ajet_sdk.errors import ConfigError, QueryError
from ajet_sdk.protocols import TraceReader
from ajet_sdk.reporting.output import echo
from ajet_sdk.reporting.progress_bar import ProgressBar
from ajet_sdk.trace.reader import episodes
from ajet_sdk.types import Episode, Json
from ajet_tools.cli.options import AsJson, print_json
from ajet_tools.cli.trace.options import Newest, OfRun, WhereOrRun
from ajet_tools.text import tables as render
from ajet_tools.text.clean import one_line
from ajet_tools.trace import queries
from ajet_tools.trace.decoding import decoder, run_config
from ajet_tools.trace.locate import open_named
from ajet_tools.trace.rerun.preflight import Preflight, load_tokenizer
from ajet_tools.trace.rerun.preflight import preflight as run_preflight
from ajet_tools.trace.rerun.remerge import Remerge, Totals, policy_of, steps_of
from ajet_tools.trace.rerun.remerge import remerge as run_remerge

app = typer.Typer(add_completion=False)

_CHUNK = 50


@app.command()
def remerge(
    path: WhereOrRun = None,
    run: OfRun = None,
    estimator: Annotated[
        RewardEstimator | None,
        typer.Option("--estimator", help="Advantage estimator."),
    ] = None,
    normalize_std: Annotated[
        bool | None,
        typer.Option(
            "--normalize-std/--no-normalize-std", help="grpo: divide advantages by the group's standard deviation."
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option("--max-length", min=1, metavar="N", help="Maximum number of tokens of a training sequence."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer", metavar="MODEL", help="A model directory, or a Hugging Face name that is in the local cache."
        ),
    ] = None,
    failure_reward: Annotated[
        float | None,
        typer.Option("--failure-reward", metavar="X", help="Reward of an episode whose workflow failed."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rebuild a run's samples with another estimator, limit or tokenizer, and compare with what the run did.

    Options that are not given come from the run's config. Nothing is written.

    \b
    ajet trace remerge --estimator rloo
    ajet trace remerge launcher_record/math --no-normalize-std --max-length 512
    ajet trace remerge --tokenizer models/other --json
    """
    loaded = load_tokenizer(tokenizer) if tokenizer else None
    reader, where, run = open_named(run, path)
    with reader:
        run_id = queries.find_run(reader, run)
        own_policy = policy_of(run_config(reader, run_id))
        changes: Json = {
            "estimator": estimator,
            "normalize_std": normalize_std,
            "max_tokens": max_length,
            "failure_reward": failure_reward,
        }
        other_policy = replace(own_policy, **{name: value for name, value in changes.items() if value is not None})
        steps = steps_of(reader, run_id)
        _require_episodes(steps, run_id)
        with ProgressBar("Building", len(steps)) as bar:
            result = run_remerge(
                reader,
                run_id,
                own_policy,
                other_policy,
                decode=_decode(reader, run_id, where),
                tokenizer=loaded.tokenizer if loaded else None,
                progress=bar.advance,
            )
    if as_json:
        print_json({"run_id": run_id, **_remerge_json(result)})
    else:
        _print_remerge(result, run_id)


def _require_episodes(items: Sequence[object], run_id: str) -> None:
    if not items:
        raise QueryError(f"run {run_id} has no finished episode yet; see `ajet trace ls`")


def _decode(reader: TraceReader, run_id: str, trace: Path) -> Callable[[Sequence[int]], str] | None:
    """The decoder of the run's tokenizer. Without it, causes that need the text are `unknown`."""
    try:
        return decoder(reader, run_id, trace)
    except ConfigError as error:
        echo(f"Causes of splits that need the text are `unknown`: {error}", err=True)
        return None


def _remerge_json(result: Remerge) -> dict[str, object]:
    return {
        "policy": result.policy,
        "untrained_run": result.untrained,
        "booked": result.booked,
        "own": _totals_json(result.own),
        "other": _totals_json(result.other),
        "refused_calls": result.refused,
        "calls_in_another_dialect": result.foreign,
    }


def _totals_json(totals: Totals) -> dict[str, object]:
    return {
        "samples": totals.samples,
        "tokens_in_samples": totals.tokens_in_samples,
        "merge_ratio": totals.merge_ratio,
        "mean_absolute_advantage": totals.mean_advantage,
        "outcomes": dict(totals.outcomes),
        "splits": dict(totals.splits),
        "extra_tokens": totals.extra_tokens,
    }


def _print_remerge(result: Remerge, run_id: str) -> None:
    out, own_totals, other_totals = render.console(), result.own, result.other
    out.print(f"Run {run_id[:12]}: as trained, rebuilt with its own policy, and with the new one")
    if result.untrained:
        out.print("The run trained nothing; its episodes are rebuilt as training episodes.", style="yellow")
    named: list[tuple[str, float | None, float | None, float | None]] = [
        ("samples", None, own_totals.samples, other_totals.samples),
        ("tokens in samples", None, own_totals.tokens_in_samples, other_totals.tokens_in_samples),
        ("merge ratio", None, own_totals.merge_ratio, other_totals.merge_ratio),
        ("mean |advantage| of a trained token", None, own_totals.mean_advantage, other_totals.mean_advantage),
    ]
    outcomes = sorted({*result.booked, *own_totals.outcomes, *other_totals.outcomes})
    named += [
        (f"tokens {name}", result.booked.get(name, 0), own_totals.outcomes[name], other_totals.outcomes[name])
        for name in outcomes
    ]
    named += [(f"splits {cause}", None, own_totals.splits[cause], other_totals.splits[cause]) for cause in sorted(
        {*own_totals.splits, *other_totals.splits})]  # fmt: skip
    named.append(("tokens trained twice because of splits", None, own_totals.extra_tokens, other_totals.extra_tokens))
    rows = [
        {"": name, "the run": did, "anew": mine, "the other": theirs, "change": _change(mine, theirs)}
        for name, did, mine, theirs in named
    ]
    out.print(render.table(rows, out.width, right=("the run", "anew", "the other", "change")))
    if not result.untrained and not result.as_booked:
        out.print(
            "The run's ledger differs from what its recorded policy gives now; see the rows that differ.", style="dim"
        )
    if result.refused:
        out.print(f"{render.counted(result.refused, 'call')} refused by the template; `ajet trace preflight` says why")
    if result.foreign:
        out.print(f"{render.counted(result.foreign, 'call')} of another API left out", style="dim")


def _change(before: float | None, after: float | None) -> str | None:
    if before is None or after is None or before == after:
        return None
    return f"{after - before:+,.4g}" if isinstance(after - before, float) else f"{after - before:+,}"


@app.command()
def preflight(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model directory, or a Hugging Face name that is in the local cache.",
            show_default=False,
        ),
    ],
    path: WhereOrRun = None,
    run: OfRun = None,
    limit: Newest = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            "--max-model-len", min=1, metavar="N", help="Maximum length of prompt and reply. Default: the model's."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict how well your traces would merge under a model's chat template, and what prevents it.

    Works without token ids too (observed agents, imports). Nothing is downloaded or written.

    \b
    ajet trace preflight models/Qwen3-0.6B
    ajet trace preflight Qwen/Qwen2.5-0.5B-Instruct launcher_record/math --json
    """
    loaded = load_tokenizer(model)
    reader, _, run = open_named(run, path)
    with reader:
        run_id = queries.find_run(reader, run)
        every = queries.episode_ids(reader, run_id)
        ids = every[:limit]
        _require_episodes(ids, run_id)
        with ProgressBar("Rendering", len(ids)) as bar:
            result = run_preflight(_chunks(reader, ids), loaded, bar.advance)
    if as_json:
        print_json({"run_id": run_id, "model": model, "of": len(every), **_preflight_json(result, max_model_len)})
    else:
        if len(ids) < len(every):
            echo(f"Newest {len(ids):,} of {len(every):,} episodes:")
        _print_preflight(result, model, max_model_len)


def _chunks(reader: TraceReader, ids: Sequence[str]) -> Iterator[list[Episode]]:
    for start in range(0, len(ids), _CHUNK):
        yield episodes(reader, episode_ids=ids[start : start + _CHUNK])


def _preflight_json(result: Preflight, limit: int | None) -> dict[str, object]:
    prompts_full, wholes_over = result.too_long(limit)
    return {
        "episodes": result.episodes,
        "calls": result.predicted.calls,
        "calls_with_their_own_ids": result.own_ids,
        "calls_in_another_dialect": result.foreign,
        "merge_ratio": result.predicted.ratio,
        "timelines": result.predicted.timelines,
        "tokens_in_timelines": result.predicted.held,
        "recorded": {"merge_ratio": result.recorded.ratio, "timelines": result.recorded.timelines},
        "extra_tokens": result.extra_tokens,
        "splits": result.by_cost,
        "refusals": [
            {"why": why, "calls": len(refusals), "example": refusals[0]} for why, refusals in result.refused.items()
        ],
        "prompt_tokens": result.quantiles(),
        "max_model_len": limit or result.limit,
        "prompts_that_fill_it": prompts_full,
        "calls_longer_than_it": wholes_over,
    }


def _print_preflight(result: Preflight, model: str, limit: int | None) -> None:
    out, predicted = render.console(), result.predicted
    note = f", {result.own_ids:,} with recorded ids" if result.own_ids else ", replies encoded from their text"
    out.print(
        one_line(
            f"{model}: {render.counted(result.episodes, 'episode')}, {render.counted(predicted.calls, 'call')}{note}"
        )
    )
    if predicted.ratio is not None:
        then = f" (in the run: {result.recorded.ratio:.2f})" if result.recorded.ratio is not None else ""
        out.print(
            f"Merge ratio {predicted.ratio:.2f}{then}: {predicted.apart:,} tokens of calls merge into "
            f"{predicted.held:,} in {render.counted(predicted.timelines, 'timeline')}; {result.extra_tokens:,} "
            "are repeated because of splits",
            soft_wrap=True,
        )
    for kind in result.by_cost:
        out.print(f"\n{kind.cause}: {render.counted(kind.splits, 'split')}, {kind.extra_tokens:,} tokens", style="bold")
        out.print(f"  {kind.hint}", soft_wrap=True)
        if kind.example is not None:
            example = kind.example
            out.print(
                f"  e.g. call {example.call_id[:12]} of episode {example.episode_id[:12]}, token {example.at_token}"
            )
            out.print(f"  - {one_line(example.before)}\n  + {one_line(example.after)}", style="dim", soft_wrap=True)
    if predicted.calls and not result.kinds:
        out.print("No splits: every call extends the previous one.", style="green")
    _print_refusals(result)
    _print_lengths(result, limit)


def _print_refusals(result: Preflight) -> None:
    out = render.console()
    for why, refusals in sorted(result.refused.items(), key=lambda item: -len(item[1])):
        first = refusals[0]
        text = f"Refused: {render.counted(len(refusals), 'call')}: {why} (call {first.call_id[:12]})"
        out.print(one_line(text, 400), style="red", soft_wrap=True)
    if result.foreign:
        calls = render.counted(result.foreign, "call")
        out.print(f"Left out: {calls} of an API other than chat/completions and completions, or without a reply")


def _print_lengths(result: Preflight, limit: int | None) -> None:
    out, quantiles, most = render.console(), result.quantiles(), limit or result.limit
    if not quantiles:
        out.print("No call could be tokenized.", style="yellow")
        return
    out.print(
        f"\nPrompts: median {quantiles['median']:,} tokens, 95 % {quantiles['p95']:,}, longest {quantiles['max']:,}"
    )
    if most is None:
        out.print("The model's maximum length is unknown; to check against one, pass --max-model-len N.")
        return
    full, over = result.too_long(limit)
    style = "red" if full or over else ""
    out.print(
        f"With at most {most:,} tokens: {render.counted(full, 'prompt')} leave no room for a reply, "
        f"{render.counted(over, 'call')} do not fit including the reply",
        style=style,
    )
