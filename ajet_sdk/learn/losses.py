"""Scores of sampled tokens, and the losses: policy gradient, imitation, preferences.

Letters of shapes: B rows of a micro-batch, T its padded length, N trained tokens in it, U positions
of their logits, P pairs, V the vocabulary.

Sources: see `objective` for the policy gradient. Preferences: Direct Preference Optimization
(Rafailov et al. 2023, arXiv:2305.18290, eq. 7).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ajet_sdk.engines.local.logits import process
from ajet_sdk.engines.local.requests import limit
from ajet_sdk.learn.batches import MicroBatch
from ajet_sdk.learn.objective import LossSettings, Scored, policy_loss
from ajet_sdk.types import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def policy_pass(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode for passes with gradients: the policy as it was sampled from, without dropout
    or other noise.

    Modules with gradient checkpointing, which transformers only apply in training mode, are set to
    that mode, with their `dropout`, `layerdrop` and the like set to 0.
    """
    was = {module: module.training for module in model.modules()}
    dropped: list[tuple[torch.nn.Module, str, float]] = []
    for module in was:
        module.training = bool(getattr(module, "gradient_checkpointing", False))
        if module.training:
            dropped += [
                (module, n, v)
                for n, v in vars(module).items()
                if "drop" in n and isinstance(v, float)
            ]
    try:
        for module, name, _ in dropped:
            setattr(module, name, 0.0)
        yield
    finally:
        for module, name, value in dropped:
            setattr(module, name, value)
        for module, training in was.items():
            module.training = training


def score(
    model: PreTrainedModel,
    batch: MicroBatch,
    *,
    entropy: bool,
    entropy_grad: bool = False,
    support_MV: torch.Tensor | None = None,
) -> Scored:
    """Log-probabilities of the trained tokens under the distribution that they were sampled from.

    That is the model's distribution at the sampling temperature, after the request's logits
    processors, limited to the tokens within `top_p`, `top_k` and `min_p`, or within `support_MV` of
    another model. The sampled token is always among them.

    The language-model head, the most expensive layer of a small model, is applied once per trained
    position: a hook passes it the gathered hidden states, so that later changes of the logits
    (scaling, soft caps) still apply.
    """

    def gather(_module: object, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden_BTH = args[0]
        # Gradients of samples with a common position are summed there; a bfloat16 sum would lose
        # precision.
        exact = torch.promote_types(hidden_BTH.dtype, torch.float32)
        hidden_UH = hidden_BTH.reshape(-1, hidden_BTH.shape[-1]).to(exact)[batch.logits.positions_U]
        return (hidden_UH.to(hidden_BTH.dtype).unsqueeze(0), *args[1:])

    head = model.get_output_embeddings()
    assert head is not None
    hook = head.register_forward_pre_hook(gather)
    try:
        logits_UV = model(**batch.rows.inputs(), use_cache=False).logits[0]
    finally:
        hook.remove()
    if logits_UV.dtype in (torch.bfloat16, torch.float16):
        logits_UV = logits_UV.float()
    if batch.processing:
        logits_UV = _processed(logits_UV, batch)
    if batch.logits.temperatures_U is not None:
        logits_UV = logits_UV / batch.logits.temperatures_U.to(logits_UV.dtype).unsqueeze(1)
    if batch.limits is not None:
        logits_UV, support_MV = _limited(logits_UV, batch, support_MV)
    all_logprobs_UV = torch.log_softmax(logits_UV, dim=-1)
    logprobs_N = all_logprobs_UV[batch.logits.rows_N, batch.targets_N]
    if not entropy:
        return Scored(logprobs_N, None, support_MV)
    if not entropy_grad:
        all_logprobs_UV = all_logprobs_UV.detach()
    entropy_U = -torch.linalg.vecdot(all_logprobs_UV.exp(), all_logprobs_UV)
    return Scored(logprobs_N, entropy_U[batch.logits.rows_N], support_MV)


def _processed(logits_NV: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Applies each reply's logits processors; logits of forbidden tokens stay finite, as in
    `_limited`, even at a low temperature."""
    parts: list[torch.Tensor] = []
    done = 0
    for reply in batch.processing:
        end = reply.begin + len(reply.places_K)
        own_KV = process(
            logits_NV[reply.begin : end],
            reply.processors(),
            reply.output_ids.tolist(),
            reply.places_K,
        )
        parts += [
            logits_NV[done : reply.begin],
            own_KV.clamp(min=torch.finfo(own_KV.dtype).min / 2**20),
        ]
        done = end
    return torch.cat([*parts, logits_NV[done:]])


def _limited(
    logits_NV: torch.Tensor, batch: MicroBatch, support_MV: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives tokens outside the limits a negligible probability; returns the logits and a mask of
    those within."""
    assert batch.limits is not None
    rows_M = batch.limits.rows_M
    if len(rows_M) == len(logits_NV):
        logits_MV = logits_NV
    else:
        logits_MV = logits_NV[rows_M]
    if support_MV is None:
        support_MV = limit(
            logits_MV, batch.limits.top_k_M, batch.limits.top_p_M, batch.limits.min_p_M
        )
        support_MV.scatter_(1, batch.targets_N[rows_M].unsqueeze(1), True)
    nothing = (
        torch.finfo(logits_NV.dtype).min / 2
    )  # finite, so that its entropy term is 0 rather than NaN
    logits_MV = logits_MV.masked_fill(~support_MV, nothing)
    whole = len(rows_M) == len(logits_NV)
    return (logits_MV if whole else logits_NV.index_copy(0, rows_M, logits_MV)), support_MV


Seen = dict[str, torch.Tensor]


def units(samples: Sequence[Sample], settings: LossSettings) -> list[list[int]]:
    """Indices of the samples in each loss term: pairs, or single samples."""
    if settings.objective != "preference":
        return [[i] for i in range(len(samples))]
    pairs: dict[str, list[int]] = {}
    for i, sample in enumerate(samples):
        pairs.setdefault(sample.group_id, []).append(i)
    return list(pairs.values())


def loss_of(
    scored: Scored,
    batch: MicroBatch,
    settings: LossSettings,
    reference_N: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Seen]:
    """The loss of each trained token (N) or pair (P), and detached values to log."""
    loss, seen = _LOSSES[settings.objective](scored, batch, settings, reference_N)
    return loss, {name: value.detach() for name, value in seen.items()}


def _preference(
    scored: Scored, batch: MicroBatch, settings: LossSettings, reference_N: torch.Tensor | None
) -> tuple[torch.Tensor, Seen]:
    """-log sigmoid(beta · (gain of the better side - gain of the worse side)), with gain = log
    policy - log reference.

    A side has all sampled tokens of an attempt, over any number of timelines; shared context
    cancels out.
    """
    assert reference_N is not None and batch.pairs_N is not None
    gain_N = (scored.logprobs_N - reference_N) * batch.advantages_N.sign()
    zeros_P = gain_N.new_zeros(int(batch.pairs_N.max()) + 1)
    margin_P = settings.beta * zeros_P.index_add(0, batch.pairs_N, gain_N)
    seen = {"dpo_margin": margin_P, "dpo_accuracy": (margin_P > 0).to(margin_P.dtype)}
    seen |= {} if scored.entropy_N is None else {"entropy": scored.entropy_N}
    return -torch.nn.functional.logsigmoid(margin_P), seen


_LOSSES: dict[
    str,
    Callable[[Scored, MicroBatch, LossSettings, torch.Tensor | None], tuple[torch.Tensor, Seen]],
] = {
    "policy": policy_loss,
    "imitation": lambda scored, *_: (
        -scored.logprobs_N,
        {} if scored.entropy_N is None else {"entropy": scored.entropy_N},
    ),
    "preference": _preference,
}
