"""Facts of a token (bytes, values, call, reason of its training) and search for tokens in a
timeline."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

import numpy as np

from ajet_sdk.samples.prefixes import is_trained
from ajet_sdk.types import OUTCOMES
from ajet_tools.trace.decoding import shown
from ajet_tools.trace.tokens.view import Fork, TokenView

Fact = tuple[str, str]
"""Name and value, without control characters."""

_REWARDS = 6
"""Maximum number of listed rewards."""

_BYTES = 20
"""Maximum number of listed bytes."""

_REASONS = {
    "superseded": "not trained: its step was rolled back by a resume",
    "evaluation": "not trained: the episode is an evaluation",
    "untrainable": (
        "not trained: it does not belong to the policy, or its ids or log-probabilities are unknown"
    ),
    "cancelled": "not trained: it was sampled for a reply that was cancelled",
    "undelivered": "not trained: the reply did not reach the agent",
    "failed": "not trained: the episode failed",
    "abandoned": "not trained: its client did not end the episode, or too late for any step",
    "stale": "not trained: it is older than rollout.max_staleness allows",
    "unmaskable": (
        "not trained: it was sampled under a grammar (structured output), or with a teacher at an"
        " endpoint under other parameters, which the trainer or the teacher can't apply"
    ),
    "zero_advantage": (
        "not trained: its advantage is 0 (all attempts of the group got the same reward, or there"
        " is no reward)"
    ),
    "overlong": "not trained: its attempt ended at the maximum length (rollout.overlong_filtering)",
    "cut": (
        "not trained: it was sampled after the end of the reply and cut off (parallel_tool_calls:"
        " false)"
    ),
    "truncated": "not trained: it is beyond the maximum length of a training sequence",
    "trained": "trained",
}


def facts_of(view: TokenView, token: int) -> list[list[Fact]]:
    """Return the facts of a token, by line."""
    return [
        list(_identity(view, token)),
        list(_values(view, token)),
        list(_rewards(view, token)),
        list(_origin(view, token)),
    ]


def _identity(view: TokenView, token: int) -> Iterator[Fact]:
    yield "token", f"{token:,} of {len(view):,}"
    yield "id", f"{view.ids[token]}{' (special)' if view.special[token] else ''}"
    if view.spelled is None:
        return
    exact = view.spelled.pieces[token]
    text = shown(view.spelled.of(token)).replace("\n", "⏎").replace("\t", "⇥")
    if text:
        yield "text", f"“{text[:80]}{'…' if len(text) > 80 else ''}”"
    elif exact:
        holder = view.spelled.holder(token)
        yield "text", f"goes on with “{shown(view.spelled.of(holder)[-1:])}” of token {holder:,}"
    listed = exact[:_BYTES].hex(" ")
    more = f" … {len(exact):,} in all" if len(exact) > _BYTES else ""
    yield "bytes", listed + more if exact else "none: the id is outside the vocabulary"


def _values(view: TokenView, token: int) -> Iterator[Fact]:
    if not view.sampled[token]:
        return
    sampler = float(view.sampler[token])
    trainer = float(view.trainer[token])
    yield (
        "sampler",
        "not known" if np.isnan(sampler) else f"{sampler:.4f} (p {np.exp(sampler):.3g})",
    )
    if not np.isnan(trainer):
        yield "trainer", f"{trainer:.4f}"
        yield "gap", f"{trainer - sampler:+.4f}"
    if not np.isnan(view.entropy[token]):
        yield "entropy", f"{view.entropy[token]:.3g} nats"
    if not np.isnan(view.advantage[token]):
        yield (
            "advantage",
            f"{view.advantage[token]:+.4g}{' (recomputed)' if view.recomputed else ''}",
        )
    if view.version[token] >= 0:
        behind = int(view.staleness[token])
        if view.step_version is None:
            late = ""
        elif behind > 0:
            late = f" ({behind} behind)"
        else:
            late = " (current)"
        yield "version", f"{view.version[token]}{late}"


def _rewards(view: TokenView, token: int) -> Iterator[Fact]:
    """Yield the rewards of the token with their judges."""
    call = view.turns[view.turn[token]].call
    if not view.sampled[token] or not is_trained(call):
        return
    rewards = view.episode.rewards_for(call.agent, call.call_id)
    for reward in rewards[:_REWARDS]:
        weight = ""
        if reward.weight != 1:
            weight = f" × {reward.weight:.4g}"
        if reward.call_id:
            of = "this call"
        elif reward.agent:
            of = f"agent {reward.agent}"
        else:
            of = "the episode"
        if reward.name == "reward":
            name = "reward"
        else:
            name = f"reward {reward.name}"
        yield shown(name)[:40], shown(f"{reward.value:.4g}{weight} of {of}")[:60]
    if len(rewards) > _REWARDS:
        yield "and", f"{len(rewards) - _REWARDS} rewards more"


def _origin(view: TokenView, token: int) -> Iterator[Fact]:
    call = view.turns[view.turn[token]].call
    part = "sampled" if view.sampled[token] else "prompt"
    yield part, f"{'masked in' if view.mask[token] else 'masked out'}"
    yield "call", f"{call.index} {call.call_id[:12]}"
    yield "agent", shown(call.agent)[:40]
    if call.finish_reason and view.sampled[token]:
        yield "finish", shown(call.finish_reason)[:20]


def fork_words(fork: Fork) -> str:
    """Describe a fork in a sentence: timelines, cause and cost."""
    split = fork.split
    if fork.opens:
        where = "this timeline left"
    else:
        where = "here it was left by"
    if split.extra_tokens:
        cost = f"{split.extra_tokens:,} tokens again"
    else:
        cost = "no token again"
    return f"fork: {where} timeline {fork.other + 1}: {split.cause}, {cost}. {split.hint}".rstrip()


def why(view: TokenView, token: int) -> str:
    """Explain in a sentence why a token was trained or not."""
    turn = view.turns[view.turn[token]]
    if not view.sampled[token]:
        return "prompt: given to the model, not sampled, so never trained"
    if not is_trained(turn.call):
        if turn.call.phase == "judge":
            whose = "a judge's"
        else:
            whose = "marked as not trainable"
        return f"not trained: the call is {whose}"
    booked = ""
    if view.outcome[token] >= 0:
        booked = OUTCOMES[view.outcome[token]]
    if not turn.is_home:
        if booked == "trained":
            reason = "trained there"
        else:
            reason = _REASONS.get(booked, "not booked yet")
        return f"context here: masked in once, in timeline {turn.home + 1} ({reason})"
    if not booked:
        return "not booked yet: its step has not been trained"
    if booked == "trained":
        return _trained(view, token)
    return f"{_REASONS[booked]}{f' ({turn.call.error})' if booked == 'undelivered' and turn.call.error else ''}"


def _trained(view: TokenView, token: int) -> str:
    advantage = float(view.advantage[token])
    if np.isnan(advantage):
        return "trained; its advantage was not recorded"
    if advantage > 0:
        pushed = "up"
    elif advantage < 0:
        pushed = "down"
    else:
        pushed = "nowhere"
    how = ", recomputed from its group" if view.recomputed else ""
    return f"trained: its probability was pushed {pushed} (advantage {advantage:+.4g}{how})"


def next_place(places: Sequence[int], at: int, back: bool = False) -> int | None:
    """Return the next (or previous) of ascending positions, wrapping around; None if there are
    none."""
    if back:
        i = bisect_left(places, at) - 1
    else:
        i = bisect_right(places, at)
    return places[i % len(places)] if places else None


def next_ranked(ranked: Sequence[int], at: int, back: bool = False) -> int | None:
    """Return the next (or previous) token of a ranking, wrapping around; the first (or last) for an
    unranked token."""
    if not ranked:
        return None
    step = -1 if back else 1
    if at in ranked:
        return ranked[(ranked.index(at) + step) % len(ranked)]
    return ranked[-1 if back else 0]


def lowest(view: TokenView) -> list[int]:
    """Rank sampled tokens by the sampler's log-probability, lowest first; only masked-in ones if
    there are any."""
    if (view.mask & np.isfinite(view.sampler)).any():
        among = view.mask
    else:
        among = view.sampled
    places = np.flatnonzero(among & np.isfinite(view.sampler))
    ranked: list[int] = places[np.argsort(view.sampler[places], kind="stable")].tolist()
    return ranked


def widest_gaps(view: TokenView) -> list[int]:
    """Rank tokens by the gap between the log-probabilities of trainer and sampler, largest
    first."""
    gap = np.abs(view.gap)
    places = np.flatnonzero(np.isfinite(gap))
    ranked: list[int] = places[np.argsort(-gap[places], kind="stable")].tolist()
    return ranked


def find_tokens(view: TokenView, needle: str) -> list[int]:
    """Find the tokens in which a match of a text begins, ignoring case; without text, the tokens
    with an id."""
    if not needle:
        return []
    if view.spelled is None:
        if needle.isdecimal() and len(needle) < 10:
            wanted = int(needle)
        else:
            wanted = -1
        ids: list[int] = np.flatnonzero(view.ids == wanted).tolist()
        return ids
    text = view.spelled.text.lower()
    sought = needle.lower()
    if len(text) != len(
        view.spelled.text
    ):  # lower-casing can lengthen a text, which would shift positions
        text = view.spelled.text
        sought = needle
    places = []
    at = text.find(sought)
    while at >= 0:
        places.append(view.spelled.token_at(at))
        at = text.find(sought, at + 1)
    return sorted(set(places))
