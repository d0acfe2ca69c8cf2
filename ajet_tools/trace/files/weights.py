"""Recomputes log-probabilities and gradients with transformers, from the weights next to a
trace."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ajet_sdk.config.model_source import MARK, STATE, saved_steps, separate_targets
from ajet_sdk.pictures import PlacedPicture, keyed
from ajet_sdk.protocols import TraceReader
from ajet_sdk.tokens.pictures import takes_pictures
from ajet_sdk.trace.pictures import stored_pictures
from ajet_sdk.trace.schema import LAST_VERSION
from ajet_tools.trace.decoding import model_places, recorded_config
from ajet_tools.trace.files.recomputed import CLIPPED
from ajet_tools.trace.queries.base import rows

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from ajet_sdk.engines.local.vision import Vision

_READING = "ajet_sdk.engines.local.weights"
_SEEING = "ajet_sdk.engines.local.vision"
_TOKENIZER = "ajet_sdk.tokens.huggingface"
"""Imported by name, as they load torch and transformers."""
_Difference = tuple[str, str, str, str]
"""(run, call, expected, stored)."""
_CALLS = 32
"""Number of recomputed calls of each version, chosen by the hash of their ids."""
_MOST = 1e-3
_MOST_IN_16_BITS = 0.25
"""Allowed differences of a log-probability, as kernels and batches differ, far more in 16 bits."""
_PLAIN = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": [],
    "bad_words": [],
    "min_tokens": 0,
    "grammar": "",
}
"""Sampling parameters that leave log-probabilities unchanged, apart from the temperature."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Paths of the weights of a version, with an optional adapter."""

    version: int
    model: Path
    adapter: Path | None = None
    target: str | None = None
    """The target whose calls it answered, of separate models; None: all."""


def weights_of(reader: TraceReader, run: str, trace: Path) -> Iterator[Weights]:
    """Find the available versions of a policy: its first model, and checkpoints next to the
    trace."""
    beside = (trace if trace.is_dir() else trace.parent).resolve()
    places = model_places(recorded_config(reader, run).get("ajet"), trace)
    first = next((place for place in places if (place / "config.json").is_file()), None)
    if first is not None:
        yield Weights(0, first)
    for directory in saved_steps(beside / "checkpoint" / run).values():
        version = int(json.loads((directory / STATE).read_bytes())["policy_version"])
        targets: Sequence[str | None] = separate_targets(directory) or (None,)
        for target in targets:
            place = directory / target if target else directory
            if not (place / "adapter_config.json").is_file():
                yield Weights(version, place, target=target)
            elif first is not None:
                yield Weights(version, first, place, target)


def differing(reader: TraceReader, run: str, weights: Weights) -> tuple[list[_Difference], int]:
    """Find calls whose log-probabilities, of sampler or trainer, differ from the weights; and count
    compared calls.

    Raises OSError, ValueError or ImportError if transformers cannot load the weights, or if they
    are newer.
    """
    sampled = rows(
        reader,
        "SELECT call_id FROM calls c JOIN episodes USING (episode_id) WHERE run_id = ? AND"
        f" ? BETWEEN c.policy_version AND {LAST_VERSION} AND"
        " coalesce(coalesce(target_tag, agent) = ?, true) AND trainable AND"
        f" len(logprobs) > 0 ORDER BY md5(call_id) LIMIT {_CALLS}",
        run,
        weights.version,
        weights.target,
    )
    if not sampled:
        return [], 0
    [began] = rows(reader, _BEGAN, run)
    mark = weights.model / MARK
    if mark.is_file() and mark.stat().st_mtime > began["at"]:
        raise ValueError("a recipe made it after the run's first call, so it is another model")
    whole = rows(
        reader,
        _COMPARED,
        run,
        weights.version,
        [row["call_id"] for row in sampled],
    )
    model = _load(weights)
    shown = _Shown(reader, weights, model)
    differences = list[_Difference]()
    compared = 0
    for row in whole:
        sampling: Mapping[str, object] = json.loads(row["sampling"] or "{}")
        if row["prompt_ids"] and _is_plain(sampling):
            compared += 1
            differences += _call(
                model, shown, run, weights.version, row, float(str(sampling.get("temperature", 1)))
            )
    return differences, compared


_COMPARED = """
WITH measured AS (SELECT step, max(value) AS after, coalesce(lag(max(value)) OVER (ORDER BY step), 0) AS before
    FROM metrics WHERE run_id = $1 AND name = 'train/policy_version' GROUP BY step)
SELECT c.call_id, prompt_ids, pictures::VARCHAR AS pictures, output_ids, c.logprobs, c.policy_version,
    c.weight_updates, sampling::VARCHAR AS sampling, t.logprobs AS trainer
FROM calls_full c LEFT JOIN (
    SELECT call_id, any_value(logprobs) AS logprobs FROM trained JOIN measured USING (step)
    WHERE run_id = $1 AND before = $2 AND after = $2 + 1 GROUP BY ALL) t USING (call_id)
WHERE list_contains($3, c.call_id) ORDER BY c.call_id"""
"""The trainer's log-probabilities are of these weights if its step's only update began with them."""


def _is_plain(sampling: Mapping[str, object]) -> bool:
    """Whether a call was sampled from the model's own distribution, at any temperature."""
    return all((sampling.get(name) or plain) == plain for name, plain in _PLAIN.items())


_BEGAN = (
    "SELECT epoch(min(c.started_at)) AS at FROM calls c JOIN episodes USING (episode_id) WHERE"
    " run_id = ?"
)


def gradient(reader: TraceReader, run: str, weights: Weights) -> tuple[int, float, float] | None:
    """Return the step that began with these weights, and its computed and logged gradient norms.

    None without such a step, for separate models, for an initial adapter, for losses other than clipped policy gradient
    and likelihood, for several updates per step, calls sampled with limits (top_p, a grammar), and
    in 16 bits. Raises as `differing`.
    """
    steps = rows(reader, _STEP, run, weights.version, weights.adapter is not None)
    if not steps:
        return None
    import torch

    step = steps[0]["step"]
    size = steps[0]["size"]
    trained = reader.query(_TRAINED, [run, step]).to_pylist()
    if not all(_is_plain(json.loads(row["sampling"] or "{}")) for row in trained):
        return None
    model = _load(weights, trains=True)
    if model.dtype != torch.float32:
        return None
    if not _trains_tower(recorded_config(reader, run).get("ajet")):
        importlib.import_module(_SEEING).freeze_tower(model)
    shown = _Shown(reader, weights, model)
    for row in trained:
        _backward(model, shown, row, steps[0]["low"], steps[0]["high"], size)
    squares = [
        float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None
    ]
    return step, sum(squares) ** 0.5, steps[0]["norm"]


def _trains_tower(config: object) -> bool:
    """Whether a run trained the part of its model that sees."""
    model = None
    if isinstance(config, Mapping):
        model = config.get("model")
    return isinstance(model, Mapping) and model.get("vision_tower") == "trained"


_STEP = f"""
WITH measured AS (SELECT run_id, step, max(value) FILTER (name = 'train/grad_norm') AS norm, coalesce(lag(max(value)
    FILTER (name = 'train/policy_version')) OVER (PARTITION BY run_id ORDER BY step), 0) AS before
    FROM metrics WHERE name IN ('train/grad_norm', 'train/policy_version') GROUP BY run_id, step)
SELECT step, norm, (SELECT sum(list_count(list_filter(advantages, lambda a: NOT isnan(a)))) FROM trained t
        WHERE t.run_id = m.run_id AND t.step = m.step) AS size,
    if(estimator = 'sft', NULL, (config->>'$.ajet.trainer_common.clip_ratio_low')::DOUBLE) AS low,
    (config->>'$.ajet.trainer_common.clip_ratio_high')::DOUBLE AS high
FROM measured m JOIN (SELECT *, config->>'$.ajet.trainer_common.algorithm.adv_estimator' AS estimator FROM runs) r
    USING (run_id)
WHERE run_id = ? AND before = ? AND (config->>'$.ajet.model.lora.enabled' = 'true') = ?
    AND norm IS NOT NULL AND size > 0 AND backbone = 'local' AND estimator <> 'dpo'
    AND config->>'$.ajet.rollout.trained_models' IS DISTINCT FROM 'separate'
    AND (estimator = 'sft' OR {CLIPPED}) AND config->>'$.ajet.trainer_common.mini_batch_num' = '1'
    AND config->>'$.ajet.trainer_common.ppo_epochs' = '1' ORDER BY step LIMIT 1"""
_TRAINED = """
SELECT prompt_ids, pictures::VARCHAR AS pictures, output_ids, c.logprobs, t.advantages,
    coalesce((sampling->>'$.temperature')::DOUBLE, 1) AS heat,
    sampling::VARCHAR AS sampling
FROM trained t JOIN calls_full c USING (call_id) WHERE t.run_id = ? AND t.step = ? ORDER BY call_id"""


def _backward(
    model: PreTrainedModel,
    shown: _Shown,
    row: Mapping[str, Any],
    low: float | None,
    high: float,
    size: int,
) -> None:
    """Accumulate the gradient of a call in a step with `size` trained tokens; `low` is None for
    sft."""
    import torch

    mine = _logprobs(model, shown, row, row["heat"])
    gain = torch.tensor(row["advantages"], dtype=torch.float32)
    if low is None:
        terms = mine * gain
    else:
        ratio = (mine - torch.tensor(row["logprobs"], dtype=torch.float32)).exp()
        terms = torch.minimum(ratio * gain, ratio.clamp(1 - low, 1 + high) * gain)
    (-terms[~gain.isnan()].sum() / size).backward()


def _logprobs(
    model: PreTrainedModel, shown: _Shown, row: Mapping[str, Any], heat: float
) -> torch.Tensor:
    """Compute log-probabilities of a call's output ids at a temperature; 0 counts as 1, as greedy
    calls report these."""
    import torch

    output = torch.tensor(row["output_ids"], dtype=torch.int64)
    logits = model(**shown.inputs(row)).logits[0, -len(output) - 1 : -1].float()
    return (logits / (heat or 1.0)).log_softmax(-1).gather(1, output[:, None])[:, 0]


class _Shown:
    """The model's arguments for calls, with their pictures."""

    def __init__(self, reader: TraceReader, weights: Weights, model: PreTrainedModel) -> None:
        self._reader = reader
        self._vision: Vision | None = None
        if takes_pictures(weights.model):
            tokenizer = importlib.import_module(_TOKENIZER).HFTokenizer(weights.model)
            self._vision = importlib.import_module(_SEEING).vision_of(model, tokenizer)

    def inputs(self, row: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        import torch

        ids = np.array([*row["prompt_ids"], *row["output_ids"]], np.int32)
        if self._vision is None:
            return {"input_ids": torch.from_numpy(ids.astype(np.int64))[None]}
        places = json.loads(row["pictures"] or "[]")
        known = stored_pictures(self._reader, [digest for _, _, digest, _ in places])
        placed = [
            PlacedPicture(start, end, known[digest], token_id)
            for start, end, digest, token_id in places
        ]
        pictures = {each.picture.key: each.picture for each in placed}
        return self._vision.inputs(keyed(ids, placed), pictures, "cpu")


def _load(weights: Weights, *, trains: bool = False) -> PreTrainedModel:
    reading = importlib.import_module(_READING)
    model, mismatch = reading.read_causal_lm(
        weights.model, dtype="auto", local_files_only=True, trust_remote_code=False
    )
    if not mismatch and weights.adapter is not None:
        model, mismatch = reading.read_adapter(model, weights.adapter, trainable=trains)
    if mismatch:
        raise ValueError(f"its weights do not match the model: {mismatch}")
    loaded: PreTrainedModel = model.eval()
    return loaded


def _call(
    model: PreTrainedModel,
    shown: _Shown,
    run: str,
    version: int,
    row: Mapping[str, Any],
    heat: float,
) -> Iterator[_Difference]:
    import torch

    size = len(row["output_ids"])
    later = np.searchsorted(row["weight_updates"] or [], np.arange(size), side="right")
    of_version = torch.from_numpy(row["policy_version"] + later == version)
    with torch.inference_mode():
        mine = _logprobs(model, shown, row, heat)
    most = _MOST if model.dtype == torch.float32 else _MOST_IN_16_BITS
    for name in ("logprobs", "trainer"):
        stored = torch.tensor(row[name] or [], dtype=torch.float32)
        if len(stored) == size:
            gap = (stored - mine).abs()
        else:
            gap = torch.empty(0)
        if name == "logprobs" and len(gap):
            gap = torch.where(of_version, gap, 0)
        odd = 0
        if size and len(gap):
            odd = int(gap.nan_to_num(0).argmax())
        if len(gap) and gap.nan_to_num(0)[odd] > most:
            if name == "logprobs":
                whose = "sampled with"
            else:
                whose = "of the trainer"
            yield (
                run,
                row["call_id"],
                f"token {odd}: {mine[odd]:.6f}, within {most:g}",
                f"{stored[odd]:.6f}, {whose}",
            )
