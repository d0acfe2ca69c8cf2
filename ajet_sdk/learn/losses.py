"""Scoring sampled tokens, and the losses: of tokens with advantages, of replies to imitate, of pairs.

Letters of shapes: B rows of a micro-batch, T its padded length, N trained tokens in it, U positions of their
logits, P pairs, V the vocabulary.

Sources: the policy's objective is in `objective`. Preferences: Direct Preference Optimization (Rafailov et al. 2023,
arXiv:2305.18290, eq. 7).
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
    """The mode of passes with gradients: the policy as it was sampled from, without dropout or other noise.

    That is evaluation mode. Only modules that save memory by checkpointing, which transformers do in training mode
    alone, are told that they train; what they themselves would drop (`dropout`, `layerdrop`) is 0 meanwhile.
    """
    was = {module: module.training for module in model.modules()}
    dropped: list[tuple[torch.nn.Module, str, float]] = []
    for module in was:
        module.training = bool(getattr(module, "gradient_checkpointing", False))
        if module.training:
            dropped += [(module, n, v) for n, v in vars(module).items() if "drop" in n and isinstance(v, float)]
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
    """Run the model and read off the trained tokens' log-probabilities under the distribution they were drawn from.

    That is the model's at the sampling temperature, changed as its request asked, and of it the tokens that
    `top_p`, `top_k` and `min_p` leave; `support_MV`
    gives those where another model's are meant. A token that was drawn is always one of them.

    The language-model head, the costliest layer of a small model, is applied once to each trained position: a hook
    hands it the gathered hidden states, so whatever the model does to its logits afterwards (scaling, soft caps) is
    kept.
    """

    def gather(_module: object, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden_BTH = args[0]
        # Gradients of samples that share a position add up there; a bfloat16 sum would lose them.
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
    """The logits after each reply's logits processors; those of forbidden tokens stay finite, as in `_limited`, even at
    a low temperature."""
    parts: list[torch.Tensor] = []
    done = 0
    for reply in batch.processing:
        end = reply.begin + len(reply.places_K)
        own_KV = process(logits_NV[reply.begin : end], reply.processors(), reply.output_ids.tolist(), reply.places_K)
        parts += [logits_NV[done : reply.begin], own_KV.clamp(min=torch.finfo(own_KV.dtype).min / 2**20)]
        done = end
    return torch.cat([*parts, logits_NV[done:]])


def _limited(
    logits_NV: torch.Tensor, batch: MicroBatch, support_MV: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits, with tokens outside the limits at a negligible probability; and a mask of those within."""
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


Seen = dict[str, torch.Tensor]


def units(samples: Sequence[Sample], settings: LossSettings) -> list[list[int]]:
    """Indices of samples that belong to one loss: pairs, else single samples."""
    if settings.objective != "preference":
        return [[i] for i in range(len(samples))]
    pairs: dict[str, list[int]] = {}
    for i, sample in enumerate(samples):
        pairs.setdefault(sample.group_id, []).append(i)
    return list(pairs.values())


def loss_of(
    scored: Scored, batch: MicroBatch, settings: LossSettings, reference_N: torch.Tensor | None = None
) -> tuple[torch.Tensor, Seen]:
    """The loss of each trained token (N) or pair (P), and detached values to log."""
    loss, seen = _LOSSES[settings.objective](scored, batch, settings, reference_N)
    return loss, {name: value.detach() for name, value in seen.items()}


def _imitation(
    scored: Scored, _batch: MicroBatch, _settings: LossSettings, _: torch.Tensor | None
) -> tuple[torch.Tensor, Seen]:
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
    "policy": policy_loss,
    "imitation": _imitation,
    "preference": _preference,
}
