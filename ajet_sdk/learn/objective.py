"""The policy-gradient objective over the sampled tokens of a step, in five independent parts.

Notation: token t of sample i has the advantage A, log-probability `new` under the weights in
training, `sampler` under the weights that sampled it, and `old` under the trainer's weights before
the step's first update. N is the number of trained tokens of a micro-batch, K that of its segments
(turns or samples).

    J = sum over tokens of  weight · (w · surrogate(ratio, A) - kl_coef · KL + entropy_coef · H)

1. Ratio: exp(new - base), with `base` = `sampler` or `old` (`ratio_base`). At the level of turns or
   sequences (`ratio_level`) it is the geometric mean over tokens, which scales the gradient of each
   token: GSPO-token (Zheng et al. 2025, arXiv:2507.18071), or GSPO with one advantage per sequence.
2. Surrogate (`clip_type`), with the bounds l = 1 - clip_ratio_low and h = 1 + clip_ratio_high:
       two_sided   min(r·A, clip(r, l, h)·A)            PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7); bounds
                                                        apart as in DAPO (Yu et al. 2025, arXiv:2503.14476, eq. 10);
                                                        r at most `clip_ratio_max`: dual clip (arXiv:1912.09729)
       one_sided   stop_gradient(clip(r, l, h))·A·new   CISPO (MiniMax 2025, arXiv:2506.13585)
       soft        4/τ·sigmoid(τ·(r - 1))·A             SAPO (arXiv:2511.20347); τ for A > 0 and for A <= 0
       none        r·A                                  importance sampling
3. Correction (`importance_weights`): w corrects for a sampler whose probabilities differ from the
   trainer's, w = exp(old - sampler) of a token or of a sequence (`importance_level`): truncated to
   `importance_bounds` (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy
   RL Training"), or masked, 0 outside of them (IcePop: Ling team 2025, arXiv:2510.18855).
4. Aggregation (`loss_aggregation`): equal weight for each token of the update (DAPO, eq. 8), sample
   (GRPO: Shao et al. 2024, arXiv:2402.03300, eq. 3), turn, or agent of an episode; `constant`
   divides a sample's sum by a fixed length (Dr. GRPO: Liu et al. 2025, arXiv:2503.20783).
5. KL to the reference (`kl_loss_type`): k1, k2, k3 are Schulman's estimators (2020, "Approximating
   KL divergence"). In the reward instead: `less_kl`.

Replay (`algorithm.replay`) adds replay_coef · mean of `new` over the tokens of given replies:
imitation in addition to the policy's objective, as Ouyang et al. 2022 mix pretraining gradients
into PPO (arXiv:2203.02155, eq. 2).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ajet_sdk.config.trainer_schema import Aggregation, ClipType, ImportanceWeights, RatioLevel
from ajet_sdk.errors import ConfigError
from ajet_sdk.learn.batches import trained_positions
from ajet_sdk.types import Episode, LedgerEntry, Outcome, Reward, Sample

_MAX_LOG_RATIO = 20.0
"""Bound of log-ratios, so that exp() stays finite; the same as verl's."""


@dataclass(frozen=True, slots=True)
class LossSettings:
    """Settings of the loss. `kl_coef` 0 and `entropy_coef` 0 leave out those terms."""

    ratio_level: RatioLevel = "token"
    ratio_base: Literal["sampler", "trainer"] = "sampler"
    clip_type: ClipType = "two_sided"
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.28
    clip_ratio_max: float | None = None
    soft_clip_temperatures: tuple[float, float] = (1.0, 1.05)
    importance_weights: ImportanceWeights = "none"
    importance_level: Literal["token", "sequence"] = "token"
    importance_bounds: tuple[float, float] = (0.0, 2.0)
    loss_aggregation: Aggregation = "token"
    loss_length: int = 1
    """Divisor of a sample's sum, in tokens, with the aggregation `constant`."""
    kl_coef: float = 0.0
    kl_type: str = "low_var_kl"
    entropy_coef: float = 0.0
    objective: Literal["policy", "imitation", "preference"] = "policy"
    beta: float = 0.1
    """Strength of the regularization towards the reference in the preference loss."""
    replay_coef: float = 1.0
    """Weight of the mean negative log-likelihood of replayed tokens."""

    @property
    def has_reference(self) -> bool:
        """Whether the initial model is needed."""
        return bool(self.kl_coef) or self.objective == "preference"


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probability of each trained token, and the entropy of the distribution at its
    position."""

    logprobs_N: torch.Tensor
    entropy_N: torch.Tensor | None
    support_MV: torch.Tensor | None = None
    """Mask of the tokens that could be drawn, for each token of the batch's `limits`."""


class TrainedTokens(Protocol):
    """The trained tokens of a micro-batch, as in `MicroBatch`."""

    @property
    def sampler_N(self) -> torch.Tensor: ...
    @property
    def advantages_N(self) -> torch.Tensor: ...
    @property
    def old_N(self) -> torch.Tensor | None: ...
    def segments_N(self, level: Literal["turn", "sequence"]) -> torch.Tensor: ...


def policy_loss(
    scored: Scored,
    batch: TrainedTokens,
    settings: LossSettings,
    reference_N: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The negative objective of each trained token, shape (N,), before aggregation; and values to
    log."""
    new_N = scored.logprobs_N
    apart_N = (new_N - batch.sampler_N).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    seen = {"gap": (new_N - batch.sampler_N).abs(), "sampler_kl": apart_N.exp() - 1.0 - apart_N}
    old_N = batch.sampler_N
    if (
        settings.ratio_base == "trainer"
    ):  # before a step's first update the trainer's weights are those in training
        old_N = new_N.detach() if batch.old_N is None else batch.old_N
    loss_N, seen["clip_share"] = _surrogate(
        _ratio(new_N, old_N, batch, settings), new_N, batch.advantages_N, settings
    )
    if settings.importance_weights != "none":
        weights_N, seen["importance_share"] = _importance(old_N, batch, settings)
        loss_N = loss_N * weights_N
    if reference_N is not None:
        seen["kl"] = kl_estimate(new_N, reference_N, settings.kl_type)
        loss_N = loss_N + settings.kl_coef * seen["kl"]
    if scored.entropy_N is not None:
        seen["entropy"] = scored.entropy_N
        if settings.entropy_coef:
            loss_N = loss_N - settings.entropy_coef * scored.entropy_N
    return loss_N, seen


def _ratio(
    new_N: torch.Tensor, old_N: torch.Tensor, batch: TrainedTokens, settings: LossSettings
) -> torch.Tensor:
    log_ratio_N = (new_N - old_N).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    if settings.ratio_level != "token":
        segments_N = batch.segments_N(settings.ratio_level)
        sizes_N = _sum_of_segments(torch.ones_like(new_N), segments_N)
        mean_N = _sum_of_segments(log_ratio_N.detach(), segments_N) / sizes_N
        log_ratio_N = mean_N + new_N - new_N.detach()
    return log_ratio_N.exp()


def _surrogate(
    ratio_N: torch.Tensor, new_N: torch.Tensor, advantages_N: torch.Tensor, settings: LossSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """The negative surrogate, and 1 for clipped tokens."""
    clipped_N = ratio_N.clamp(1.0 - settings.clip_ratio_low, 1.0 + settings.clip_ratio_high)
    if settings.clip_type == "two_sided":
        gain_N = ratio_N * advantages_N
        bounded_N = clipped_N * advantages_N
        cut_N = (bounded_N < gain_N).to(new_N.dtype)
        if settings.clip_ratio_max is not None:
            gain_N = ratio_N.clamp(max=settings.clip_ratio_max) * advantages_N
        return -torch.minimum(gain_N, bounded_N), cut_N
    if settings.clip_type == "one_sided":
        return -clipped_N.detach() * advantages_N * new_N, (clipped_N != ratio_N).to(new_N.dtype)
    if settings.clip_type == "soft":
        positive, negative = settings.soft_clip_temperatures
        tau_N = torch.where(advantages_N > 0, positive, negative).to(ratio_N.dtype)
        return -torch.sigmoid(
            tau_N * (ratio_N - 1.0)
        ) * 4.0 / tau_N * advantages_N, torch.zeros_like(new_N)
    return -ratio_N * advantages_N, torch.zeros_like(new_N)


def _importance(
    old_N: torch.Tensor, batch: TrainedTokens, settings: LossSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights, without gradient, and 1 for tokens whose weight is out of bounds."""
    log_N = old_N - batch.sampler_N
    if settings.importance_level == "sequence":
        log_N = _sum_of_segments(log_N, batch.segments_N("sequence"))
    weights_N = log_N.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    low, high = settings.importance_bounds
    outside_N = (weights_N < low) | (weights_N > high)
    bounded_N = weights_N.clamp(low, high)
    if settings.importance_weights == "masked":
        bounded_N = weights_N.masked_fill(outside_N, 0.0)
    return bounded_N, outside_N.to(old_N.dtype)


def _sum_of_segments(values_N: torch.Tensor, segments_N: torch.Tensor) -> torch.Tensor:
    return values_N.new_zeros(int(segments_N.max()) + 1).index_add(0, segments_N, values_N)[
        segments_N
    ]


def kl_estimate(logprobs_N: torch.Tensor, reference_N: torch.Tensor, kind: str) -> torch.Tensor:
    """Per-token estimate of KL(policy ‖ reference) from one sample: k1 (`kl`), `abs`, k2 (`mse`),
    k3 (`low_var_kl`).

    k3 is unbiased, never negative and of low variance; with r = log reference - log policy it is
    exp(r) - 1 - r.
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
        f"trainer_common.kl_loss_type {kind!r} is unknown; choose k1 (kl), abs, k2 (mse) or k3"
        " (low_var_kl)"
    )


class TrainedTurns(NamedTuple):
    """The trained tokens of a sample."""

    agent: tuple[str, str]
    """Its episode and agent."""
    sizes: Sequence[int]
    """Number of trained tokens of each turn that has some."""


def token_weights(
    samples: Sequence[Sample], settings: LossSettings
) -> list[npt.NDArray[np.float32]]:
    """Weight of each trained token in an update's loss; see `turn_weights`."""
    turns = []
    for sample in samples:
        trained = trained_positions(sample)
        sizes = [len(trained)]
        if settings.loss_aggregation == "turn":
            bounds = [(span.start, span.end) for span in sample.timeline.spans]
            sizes = [int(end - begin) for begin, end in np.searchsorted(trained, bounds)]
        agent = (sample.episode_id, sample.timeline.agent)
        turns.append(TrainedTurns(agent, [size for size in sizes if size]))
    return turn_weights(turns, settings.loss_aggregation, settings.loss_length)


def turn_weights(
    samples: Sequence[TrainedTurns], aggregation: Aggregation, loss_length: int
) -> list[npt.NDArray[np.float32]]:
    """Weight of each trained token in an update's loss.

    The weights sum to 1, except for `constant`, where they sum to the mean sample length divided by
    `loss_length`.
    """
    counts = [sum(sample.sizes) for sample in samples]
    if aggregation == "constant":
        share = 1.0 / (max(1, sum(count > 0 for count in counts)) * loss_length)
        return [np.full(count, share, np.float32) for count in counts]
    segments: list[list[tuple[object, int]]] = []
    for i, (sample, count) in enumerate(zip(samples, counts, strict=True)):
        if aggregation == "turn":
            segments.append([((i, k), size) for k, size in enumerate(sample.sizes)])
        else:
            keys: dict[str, object] = {"token": None, "sample": i, "agent": sample.agent}
            segments.append([(keys[aggregation], count)] if count else [])
    sizes: Counter[object] = Counter()
    for parts in segments:
        for key, size in parts:
            sizes[key] += size
    weights = []
    for parts in segments:
        of_segments = [1.0 / (len(sizes) * sizes[key]) for key, _ in parts]
        tokens = [size for _, size in parts]
        weights.append(np.repeat(np.array(of_segments, np.float32), tokens))
    return weights


def less_kl(
    episodes: Sequence[Episode],
    samples: Sequence[Sample],
    reference: Sequence[torch.Tensor],
    coef: float,
    equal: Collection[tuple[str, str]] = (),
) -> tuple[list[Episode], float]:
    """Adds a negative reward for each agent's divergence from the initial model, whose mean per
    token is also returned.

    An attempt loses coef · sum over its sampled tokens of log sampler - log reference: the k1
    estimate of KL(policy ‖ reference) of a whole reply, whose policy gradient is that of the
    divergence (Ouyang et al. 2022, arXiv:2203.02155, section 3.5; Ahmadian et al. 2024,
    arXiv:2402.14740, eq. 1), as in verl's `use_kl_in_reward` with `kl_penalty: kl` and TRL's RLOO.

    Args:
        episodes: of one step; those that failed or have no reward are unchanged.
        samples: all samples of these episodes.
        reference: the initial model's log-probabilities of each sample's trained tokens.
        coef: weight of the divergence.
        equal: episodes and agents of `without_signal`, which get no such reward: after division by a standard
            deviation, attempts with equal rewards would be trained at full strength by their divergence alone.
    """
    divergence: dict[tuple[str, str], float] = defaultdict(float)
    tokens = 0
    for sample, logprobs in zip(samples, reference, strict=True):
        sampled = sample.timeline.logprobs[trained_positions(sample)]
        nats = kl_estimate(torch.from_numpy(sampled).double(), logprobs.double().cpu(), "k1").sum()
        divergence[sample.episode_id, sample.timeline.agent] += float(nats)
        tokens += len(sampled)
    of_episode: dict[str, list[Reward]] = defaultdict(list)
    for (episode_id, agent), nats in divergence.items():
        if (episode_id, agent) not in equal:
            of_episode[episode_id].append(Reward(name="kl", value=-nats, weight=coef, agent=agent))
    rewarded = [
        (
            episode.model_copy(
                update={"rewards": (*episode.rewards, *of_episode[episode.episode_id])}
            )
            if episode.rewards and episode.status == "succeeded"
            else episode
        )
        for episode in episodes
    ]
    return rewarded, sum(divergence.values()) / max(1, tokens)


def without_signal(
    episodes: Sequence[Episode], ledger: Sequence[LedgerEntry]
) -> set[tuple[str, str]]:
    """Episode ids and agents that the ledger doesn't train because all attempts got the same
    reward."""
    calls = {call.call_id: call for episode in episodes for call in episode.calls}
    agents: dict[Outcome, set[tuple[str, str]]] = defaultdict(set)
    for row in ledger:
        agents[row.outcome].add((calls[row.call_id].episode_id, calls[row.call_id].agent))
    return agents["zero_advantage"] - agents["trained"]
