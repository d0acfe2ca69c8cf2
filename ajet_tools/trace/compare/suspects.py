"""Signs of reward hacking in a step, and terms of replies with significantly high or low
advantages."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from statistics import NormalDist, fmean, pstdev

from ajet_sdk.dialects.message_parts import parts_of, reply_messages
from ajet_sdk.reporting.answers import answer_text, phrases
from ajet_tools.text.clean import one_line
from ajet_tools.trace.compare.changes import LEAST_COUNT, Finding, differ
from ajet_tools.trace.queries.episodes import StepEpisode, TrainedCall

_SHARE, _GAIN = 0.5, 0.25
"""Least share of rewarded episodes with a sign, and least excess over the share of other
episodes."""
_LONG = 16
"""Shorter answers are not compared by length."""
_TERMS = 3
_WORDS = 3
"""Words of the longest term."""
_LAST = 300
"""Words read at the end of a reply and of its prompt."""
_REPLIES = 5
"""Least number of replies with a term."""
_WORD = re.compile(r"\w+")
_VERBS = {
    "answer": "are the same for different tasks, {}",
    "phrase": "contain the phrase {}",
    "length": "are {} characters long",
}
"""Descriptions of signs by kind, strongest first."""
_Answers = list[tuple[StepEpisode, str]]


def _answers(episodes: Sequence[StepEpisode]) -> tuple[_Answers, _Answers]:
    """Return the answers of episodes with at least half of the highest reward, and those of the
    others."""
    known = [e for e in episodes if e["reward"] is not None and e["output"] not in (None, "null")]
    best = max((e["reward"] or 0.0 for e in known), default=0.0)
    good, others = _Answers(), _Answers()
    for e in known:
        side = good if best > 0 and (e["reward"] or 0.0) >= best / 2 else others
        side.append((e, answer_text(json.loads(e["output"] or "null"))))
    return good, others


def suspects(
    start: Sequence[StepEpisode], after: Sequence[StepEpisode], since: int
) -> Iterator[Finding]:
    """Find signs of reward hacking in `after`, compared with `start`, the episodes of the first
    step `since`."""
    (first, _), (good, others) = _answers(start), _answers(after)
    if len(good) >= LEAST_COUNT:
        yield from _in_common(first, good, others, since)
    yield from _held_out(start, after, since)


def _signs(text: str) -> set[tuple[str, str]]:
    whole = " ".join(text.lower().split())
    signs = {("phrase", phrase) for phrase in phrases(text)}
    if whole:
        signs.add(("answer", whole))
    if len(whole) >= _LONG:
        signs.add(("length", str(len(text))))
    return signs


def _in_common(first: _Answers, good: _Answers, others: _Answers, since: int) -> Iterator[Finding]:
    """Find an answer, or else a phrase or a length, shared by most rewarded episodes of several
    tasks."""
    having: dict[tuple[str, str], list[StepEpisode]] = defaultdict(list)
    for episode, text in good:
        for sign in _signs(text):
            having[sign].append(episode)
    seen = [Counter(s for _, text in part for s in _signs(text)) for part in (first, others)]
    ordered = sorted(
        having.items(), key=lambda item: (list(_VERBS).index(item[0][0]), -len(item[1]), item[0][1])
    )
    for sign, episodes in ordered:
        kind, text = sign
        part = len(episodes) / len(good)
        before, rest = (
            count[sign] / max(1, len(of)) for count, of in zip(seen, (first, others), strict=True)
        )
        if part < _SHARE or part - before < _GAIN or len({e["task_id"] for e in episodes}) < 2:
            continue
        if len(others) >= LEAST_COUNT and part - rest < _GAIN:
            continue
        what = _VERBS[kind].format(text if kind == "length" else _quoted(text))
        without = f"; {seen[1][sign]} of {len(others)} answers without reward" if others else ""
        yield Finding(
            "suspect",
            f"{len(episodes)} of {len(good)} rewarded answers {what} ({before:.0%} at step {since}"
            f"{without}): does the judge reward what you want?",
            before,
            part,
            tuple(e["episode_id"] for e in episodes),
        )
        return


def _held_out(
    start: Sequence[StepEpisode], after: Sequence[StepEpisode], since: int
) -> Iterator[Finding]:
    """Find judges of weight 0 whose score did not rise with the reward."""
    rewards = [[e["reward"] for e in side if e["reward"] is not None] for side in (start, after)]
    if not differ(*rewards) or fmean(rewards[1]) < fmean(rewards[0]):
        return
    rose = f"{fmean(rewards[0]):.3g} to {fmean(rewards[1]):.3g}"
    for name in sorted({name for e in after for name in e["watched"]}):
        values = [
            [e["watched"][name] for e in side if name in e["watched"]] for side in (start, after)
        ]
        if min(map(len, values)) < LEAST_COUNT or fmean(values[1]) > fmean(values[0]):
            continue
        behind = sorted(
            (e for e in after if name in e["watched"] and e["reward"] is not None),
            key=lambda e: (e["watched"][name], -(e["reward"] or 0.0)),
        )
        yield Finding(
            "suspect",
            f"since step {since} the reward rose from {rose}, while the held-out judge"
            f" {one_line(name, 40)} (weight 0) went from {fmean(values[0]):.3g} to"
            f" {fmean(values[1]):.3g}",
            fmean(values[0]),
            fmean(values[1]),
            tuple(e["episode_id"] for e in behind),
        )


def _quoted(text: str, width: int = 60) -> str:
    return f'"{one_line(text, width)}"'


def pushed(calls: Sequence[TrainedCall]) -> Iterator[Finding]:
    """Find the tools and n-grams of replies, and n-grams of prompts, with the highest and lowest
    mean advantages.

    The mean advantage of a term must differ from a random sample of as many replies, at 5 % for all
    terms together (Bonferroni).
    """
    by_term: dict[str, dict[int, float]] = defaultdict(dict)
    for i, call in enumerate(calls):
        for term in _terms(call):
            by_term[term][i] = call["advantage"]
    advantages = [call["advantage"] for call in calls] or [0.0]
    least, mean, spread = max(_REPLIES, len(calls) // 20), fmean(advantages), pstdev(advantages)
    common = {
        term: of for term, of in by_term.items() if len({calls[i]["task_id"] for i in of}) > 1
    }
    common = {term: of for term, of in common.items() if len(of) >= least}
    sure = NormalDist().inv_cdf(1 - 0.025 / max(1, len(common)))
    scores = {term: (fmean(of.values()) - mean) * math.sqrt(len(of)) for term, of in common.items()}
    scores = {term: score for term, score in scores.items() if abs(score) > sure * spread + 1e-9}
    for sign, word in ((1, "up"), (-1, "down")):
        terms: list[str] = []
        for term in sorted(scores, key=lambda term: -sign * scores[term]):
            new = all(common[term].keys() != common[known].keys() for known in terms)
            if sign * scores[term] > 0 and new and len(terms) < _TERMS:
                terms.append(term)
        if terms:
            listed = "; ".join(
                f"{term} ({fmean(common[term].values()):+.2g} in {len(common[term])})"
                for term in terms
            )
            behind = sorted(common[terms[0]], key=lambda i: -sign * calls[i]["advantage"])
            ids = tuple(dict.fromkeys(calls[i]["episode_id"] for i in behind))
            yield Finding(
                "pushed",
                f"pushed {word}, by mean advantage and number of replies: {listed}",
                episodes=ids,
            )


def _terms(call: TrainedCall) -> list[str]:
    """Return the distinct terms of a call: tools and n-grams of its reply, and n-grams of new
    prompt messages."""
    reply = [parts_of(message) for message in reply_messages(json.loads(call["response"]))]
    asked = [parts_of(message) for message in json.loads(call["asked"] or "[]")]
    names = [tool.name for parts in reply for tool in parts.tool_calls]
    terms = [f"the tool {one_line(name, 40)}" for name in names] + _runs(
        "\n".join(parts.text for parts in reply)
    )
    prompt = "\n".join(parts.text for parts in asked if parts.role != "assistant")
    return list(dict.fromkeys([*terms, *(f"{run} in the prompt" for run in _runs(prompt))]))


def _runs(text: str) -> list[str]:
    """Return the n-grams at the end of a text, quoted."""
    words = _WORD.findall(text)[-_LAST:]
    runs = (
        words[at : at + size]
        for size in range(1, _WORDS + 1)
        for at in range(len(words) - size + 1)
    )
    return [_quoted(" ".join(run), 40) for run in runs]
