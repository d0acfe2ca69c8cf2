"""The divergence from the first model as part of the reward, instead of a term of the loss.

An attempt's reward is less by coef · sum over its sampled tokens of log sampler - log first model, the estimate k1 of
KL(policy ‖ first model) of a whole reply, whose policy gradient is that of the divergence (Ouyang et al. 2022,
arXiv:2203.02155, section 3.5; Ahmadian et al. 2024, arXiv:2402.14740, eq. 1). So do verl's `use_kl_in_reward` with
`kl_penalty: kl` and TRL's RLOO.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

import torch

from ajet_sdk.learn.batches import trained_positions
from ajet_sdk.learn.objective import kl_estimate
from ajet_sdk.types import Episode, LedgerEntry, Outcome, Reward, Sample


def less_kl(
    episodes: Sequence[Episode],
    samples: Sequence[Sample],
    reference: Sequence[torch.Tensor],
    coef: float,
    equal: Collection[tuple[str, str]] = (),
) -> tuple[list[Episode], float]:
    """The episodes with a negative reward for the divergence of each agent's tokens, and its mean per token, in nats.

    Args:
        episodes: of one step. Those that failed or have no reward stay as they are.
        samples: all that the policy sampled in them.
        reference: for each sample the first model's log-probabilities of its trained tokens.
        coef: weight of the divergence.
        equal: episodes and agents of `without_signal`, which get no such reward: divided by a standard deviation,
            attempts that earned the same would be trained at full strength by their divergence alone.
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
        episode.model_copy(update={"rewards": (*episode.rewards, *of_episode[episode.episode_id])})
        if episode.rewards and episode.status == "succeeded"
        else episode
        for episode in episodes
    ]
    return rewarded, sum(divergence.values()) / max(1, tokens)


def without_signal(episodes: Sequence[Episode], ledger: Sequence[LedgerEntry]) -> set[tuple[str, str]]:
    """Episode id and agent of what the rewards, by their ledger, do not train: all attempts earned the same."""
    calls = {call.call_id: call for episode in episodes for call in episode.calls}
    agents: dict[Outcome, set[tuple[str, str]]] = defaultdict(set)
    for row in ledger:
        agents[row.outcome].add((calls[row.call_id].episode_id, calls[row.call_id].agent))
    return agents["zero_advantage"] - agents["trained"]
