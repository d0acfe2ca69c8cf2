"""The losses: of tokens that were sampled with advantages, of replies to imitate, of pairs to prefer one of.

Letters of shapes: B rows of a micro-batch, T its padded length, N trained tokens in it, P pairs, V the vocabulary.

Sources: the clipped surrogate is PPO's (Schulman et al. 2017, arXiv:1707.06347, eq. 7) with the two bounds apart as in
DAPO (Yu et al. 2025, arXiv:2503.14476, eq. 10) and a mean over tokens (ibid., eq. 8); group-relative advantages are
GRPO's (Shao et al. 2024, arXiv:2402.03300). The denominator of the ratio is the sampler's own log-probability. The
estimators k1, k2, k3 of the KL divergence are Schulman's (2020, "Approximating KL divergence"). Preferences: Direct
Preference Optimization (Rafailov et al. 2023, arXiv:2305.18290, eq. 7).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ajet_sdk.engines.local.logits import process
from ajet_sdk.engines.local.requests import limit
from ajet_sdk.errors import ConfigError
from ajet_sdk.learn.batches import MicroBatch
from ajet_sdk.types import Sample

__all__ = ["LossSettings", "Scored", "kl_estimate", "loss_of", "score", "token_loss", "units"]

_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class LossSettings:
    """Which terms the loss has. `kl_coef` 0 and `entropy_coef` 0 leave those terms out."""

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.28
    kl_coef: float = 0.0
    kl_type: str = "low_var_kl"
    entropy_coef: float = 0.0
    objective: Literal["policy", "imitation", "preference"] = "policy"
    beta: float = 0.1
    """Of a preference: how strongly the policy is held to the reference."""

    @property
    def has_reference(self) -> bool:
        """Whether the model as it was first is scored too."""
        return bool(self.kl_coef) or self.objective == "preference"


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probability of each trained token, and the entropy of the distribution at its position."""

    logprobs_N: torch.Tensor
    entropy_N: torch.Tensor | None
    support_MV: torch.Tensor | None = None
    """Which tokens could have been drawn, for each token of the batch's `limits`."""


def score(
    model: Any,
    batch: MicroBatch,
    *,
    entropy: bool,
    entropy_grad: bool = False,
    support_MV: torch.Tensor | None = None,
) -> Scored:
    """Run the model and read off the trained tokens' log-probabilities under the distribution they were drawn from.

    That is the model's at the sampling temperature, changed as its request asked, and of it the tokens that
    `top_p`, `top_k` and `min_p` leave; `support_MV`
    gives those where another model's are meant. A token that was drawn is always one of them.

    The language-model head, the costliest layer of a small model, is applied to trained positions only: a hook hands
    it the gathered hidden states, so whatever the model does to its logits afterwards (scaling, soft caps) is kept.
    """

    def gather(_module: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden_BTH = args[0]
        return (hidden_BTH.reshape(-1, hidden_BTH.shape[-1])[batch.positions_N].unsqueeze(0), *args[1:])

    hook = model.get_output_embeddings().register_forward_pre_hook(gather)
    try:
        logits_NV = model(input_ids=batch.ids_BT, use_cache=False).logits[0]
    finally:
        hook.remove()
    if logits_NV.dtype in (torch.bfloat16, torch.float16):
        logits_NV = logits_NV.float()
    if batch.processing:
        logits_NV = _processed(logits_NV, batch)
    if batch.temperatures_N is not None:
        logits_NV = logits_NV / batch.temperatures_N.to(logits_NV.dtype).unsqueeze(1)
    if batch.limits is not None:
        logits_NV, support_MV = _limited(logits_NV, batch, support_MV)
    all_logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    logprobs_N = all_logprobs_NV.gather(1, batch.targets_N.unsqueeze(1)).squeeze(1)
    if not entropy:
        return Scored(logprobs_N, None, support_MV)
    if not entropy_grad:
        all_logprobs_NV = all_logprobs_NV.detach()
    return Scored(logprobs_N, -(all_logprobs_NV.exp() * all_logprobs_NV).sum(-1), support_MV)


def _processed(logits_NV: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """The logits after what each reply's own request did to them; a forbidden token's stays finite, as in
    `_limited`, by a low temperature too."""
    parts: list[torch.Tensor] = []
    done = 0
    for one in batch.processing:
        end = one.begin + len(one.places_K)
        own_KV = process(logits_NV[one.begin : end], one.processors(), one.output_ids.tolist(), one.places_K)
        parts += [logits_NV[done : one.begin], own_KV.clamp(min=torch.finfo(own_KV.dtype).min / 2**20)]
        done = end
    return torch.cat([*parts, logits_NV[done:]])


def _limited(
    logits_NV: torch.Tensor, batch: MicroBatch, support_MV: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits with those of tokens that could not be drawn at a value of no probability, and which could be."""
    assert batch.limits is not None
    rows_M = batch.limits.rows_M
    logits_MV = logits_NV if len(rows_M) == len(logits_NV) else logits_NV[rows_M]
    if support_MV is None:
        support_MV = limit(logits_MV, batch.limits.top_k_M, batch.limits.top_p_M, batch.limits.min_p_M)
        support_MV.scatter_(1, batch.targets_N[rows_M].unsqueeze(1), True)
    nothing = torch.finfo(logits_NV.dtype).min / 2  # finite: its share in the entropy is 0 and not NaN
    logits_MV = logits_MV.masked_fill(~support_MV, nothing)
    whole = len(rows_M) == len(logits_NV)
    return (logits_MV if whole else logits_NV.index_copy(0, rows_M, logits_MV)), support_MV


def kl_estimate(logprobs_N: torch.Tensor, reference_N: torch.Tensor, kind: str) -> torch.Tensor:
    """Per-token estimate of KL(policy ‖ reference) from one sample: k1 (`kl`), `abs`, k2 (`mse`), k3 (`low_var_kl`).

    k3 is unbiased, never negative and of low variance; with r = log reference - log policy it is exp(r) - 1 - r.
    """
    if kind in ("kl", "k1"):
        return logprobs_N - reference_N
    if kind == "abs":
        return (logprobs_N - reference_N).abs()
    if kind in ("mse", "k2"):
        return 0.5 * (logprobs_N - reference_N).square()
    if kind in ("low_var_kl", "k3"):
        r_N = (reference_N - logprobs_N).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        return torch.expm1(r_N) - r_N
    raise ConfigError(
        f"trainer_common.kl_loss_type {kind!r} is unknown; choose k1 (kl), abs, k2 (mse) or k3 (low_var_kl)"
    )


Seen = dict[str, torch.Tensor]


def units(samples: Sequence[Sample], settings: LossSettings) -> list[list[int]]:
    """Positions of samples that a loss takes together: those of a pair, else each its own."""
    if settings.objective != "preference":
        return [[i] for i in range(len(samples))]
    pairs: dict[str, list[int]] = {}
    for i, sample in enumerate(samples):
        pairs.setdefault(sample.group_id, []).append(i)
    return list(pairs.values())


def loss_of(
    scored: Scored, batch: MicroBatch, settings: LossSettings, reference_N: torch.Tensor | None = None
) -> tuple[torch.Tensor, Seen]:
    """The loss of each trained token (N), or of each pair (P), and, detached, what is worth logging of it.

    Its sum over an optimiser step divided by the step's number of trained tokens, or of pairs, is the step's loss.
    """
    loss, seen = _LOSSES[settings.objective](scored, batch, settings, reference_N)
    return loss, {name: value.detach() for name, value in seen.items()}


def token_loss(
    scored: Scored, batch: MicroBatch, settings: LossSettings, reference_N: torch.Tensor | None = None
) -> tuple[torch.Tensor, Seen]:
    """The clipped policy gradient of each trained token."""
    log_ratio_N = (scored.logprobs_N - batch.sampler_N).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio_N = log_ratio_N.exp()
    bounded_N = ratio_N.clamp(1.0 - settings.clip_ratio_low, 1.0 + settings.clip_ratio_high)
    gain_N, bounded_gain_N = ratio_N * batch.advantages_N, bounded_N * batch.advantages_N
    loss_N = -torch.minimum(gain_N, bounded_gain_N)
    seen = {
        "gap": (scored.logprobs_N - batch.sampler_N).abs(),
        "sampler_kl": ratio_N - 1.0 - log_ratio_N,
        "clip_share": (bounded_gain_N < gain_N).to(loss_N.dtype),
    }
    if reference_N is not None:
        kl_N = kl_estimate(scored.logprobs_N, reference_N, settings.kl_type)
        loss_N = loss_N + settings.kl_coef * kl_N
        seen["kl"] = kl_N
    if scored.entropy_N is not None:
        seen["entropy"] = scored.entropy_N
        if settings.entropy_coef:
            loss_N = loss_N - settings.entropy_coef * scored.entropy_N
    return loss_N, seen


def _imitation(
    scored: Scored, _batch: MicroBatch, _settings: LossSettings, _: torch.Tensor | None
) -> tuple[torch.Tensor, Seen]:
    """The negative log-likelihood of each trained token."""
    return -scored.logprobs_N, {} if scored.entropy_N is None else {"entropy": scored.entropy_N}


def _preference(
    scored: Scored, batch: MicroBatch, settings: LossSettings, reference_N: torch.Tensor | None
) -> tuple[torch.Tensor, Seen]:
    """-log sigmoid of beta times how much more the policy has come to prefer the better side than the reference does.

    A side is all tokens that one attempt sampled, in whatever many timelines: what both sides were given cancels out.
    """
    assert reference_N is not None and batch.pairs_N is not None
    gain_N = (scored.logprobs_N - reference_N) * batch.advantages_N.sign()
    zeros_P = gain_N.new_zeros(int(batch.pairs_N.max()) + 1)
    margin_P = settings.beta * zeros_P.index_add(0, batch.pairs_N, gain_N)
    seen = {"dpo_margin": margin_P, "dpo_accuracy": (margin_P > 0).to(margin_P.dtype)}
    seen |= {} if scored.entropy_N is None else {"entropy": scored.entropy_N}
    return -torch.nn.functional.logsigmoid(margin_P), seen


_LOSSES: dict[str, Callable[[Scored, MicroBatch, LossSettings, torch.Tensor | None], tuple[torch.Tensor, Seen]]] = {
    "policy": token_loss,
    "imitation": _imitation,
    "preference": _preference,
}
