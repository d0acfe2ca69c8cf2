"""The calls of an episode as a tree: timelines, and where and why one forks from another.

Calls with token ids stand as `timelines.merge` folds them. Calls without (a deployed agent, a call that failed) are
placed by what they say: a call goes on from the one whose messages and reply its own begin with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from ajet_sdk.dialects.message_parts import request_messages
from ajet_sdk.samples.splits import HINTS
from ajet_sdk.samples.timelines import Decode, Merged, merge
from ajet_sdk.tokens.template import ChatTemplate, clean
from ajet_sdk.types import Call, Phase, Split, Timeline
from ajet_tools.trace.episode.messages import Fingerprints, replies

_DIFFERENCE = 6
"""Tokens of each side that are shown where two calls part."""


@dataclass(frozen=True, slots=True)
class Fork:
    """Why a branch does not go on in the one it comes from."""

    call_id: str
    """The first call of the branch."""
    parent_call_id: str | None
    """The call it was expected to extend."""
    at: int
    """The first token (or message) that differs from that call's."""
    unit: Literal["token", "message"]
    cause: str
    hint: str
    extra_tokens: int
    """Tokens that are trained on once more because of the fork."""
    expected: str = ""
    """What stands there in the call it comes from; with `found`, only where the ids are known."""
    found: str = ""


@dataclass(frozen=True, slots=True)
class Branch:
    """Calls that go on from each other."""

    number: int
    timeline: int | None
    """Its place among the timelines that `merge` gives; None where its calls have no ids."""
    agent: str
    phase: Phase
    calls: tuple[str, ...]
    """The calls of its own, in order."""
    trunk: tuple[str, ...] = ()
    """The calls of other branches that it goes on from, oldest first."""
    parent: int | None = None
    """The branch it stands under."""
    after: str | None = None
    """The call of that branch it stands behind."""
    fork: Fork | None = None
    tokens: int | None = None
    trained: int = 0
    """Tokens that are masked in."""

    @property
    def chain(self) -> tuple[str, ...]:
        """Every call whose conversation this is."""
        return (*self.trunk, *self.calls)


@dataclass(frozen=True, slots=True)
class TreeRow:
    """A line of the tree: a branch's head where `call_id` is None."""

    branch: int
    call_id: str | None
    depth: int


@dataclass(frozen=True)
class EpisodeTree:
    """The branches of an episode; each call stands in one of them."""

    branches: tuple[Branch, ...]
    branch_of: Mapping[str, int]
    spans: Mapping[str, tuple[int, int, int]]
    """Of a call with ids: its timeline, and the first and the last but one of its sampled tokens there."""

    def rows(self) -> Iterator[TreeRow]:
        """The tree from top to bottom; a branch behind a last call goes on at the same depth."""
        behind: dict[str | None, list[Branch]] = defaultdict(list)
        for branch in self.branches:
            behind[branch.after].append(branch)
        todo = [(branch, 0, 0) for branch in reversed(behind[None])]
        while todo:
            branch, n, depth = todo.pop()
            if n == 0:
                yield TreeRow(branch.number, None, depth)
            yield TreeRow(branch.number, branch.calls[n], depth)
            last = n + 1 == len(branch.calls)
            if not last:
                todo.append((branch, n + 1, depth))
            todo += [(child, 0, depth if last else depth + 1) for child in reversed(behind[branch.calls[n]])]

    def call_order(self) -> list[str]:
        """The calls as the tree shows them."""
        return [row.call_id for row in self.rows() if row.call_id is not None]


def episode_tree(
    calls: Sequence[Call], decode: Decode | None = None, template: ChatTemplate | None = None
) -> EpisodeTree:
    """The tree of an episode's calls, of one that is still running too.

    Args:
        decode: token ids to text; without it some causes are `unknown`.
        template: of the calls' model; without it a cause that lies in the request is what changed.
    """
    known = {call.call_id: call for call in calls}
    merged = merge(list(known.values()), decode, template)
    branches = _with_ids(merged, known, decode)
    spans = _spans(merged, branches, known)
    branches += _without_ids(list(known.values()), branches)
    branches = _attach(branches)
    return EpisodeTree(
        branches=tuple(branches),
        branch_of={call_id: branch.number for branch in branches for call_id in branch.calls},
        spans=spans,
    )


def _with_ids(merged: Merged, calls: Mapping[str, Call], decode: Decode | None) -> list[Branch]:
    splits = {split.call_id: split for split in merged.splits}
    branches: list[Branch] = []
    for number, timeline in enumerate(merged.timelines):
        start = max((n for n, call_id in enumerate(timeline.call_ids) if call_id in splits), default=0)
        split = splits.get(timeline.call_ids[start])
        trunk = timeline.call_ids[:start]
        first = calls[timeline.call_ids[start]]
        branches.append(
            Branch(
                number=number,
                timeline=number,
                agent=timeline.agent,
                phase=first.phase,
                calls=timeline.call_ids[start:],
                trunk=trunk,
                after=trunk[-1] if trunk else split.parent_call_id if split else None,
                fork=None if split is None else _fork(split, calls, decode),
                tokens=len(timeline.token_ids),
                trained=int(timeline.loss_mask.sum()),
            )
        )
    return branches


def _fork(split: Split, calls: Mapping[str, Call], decode: Decode | None) -> Fork:
    at, expected, actual = split.at_token, "", ""
    old = calls.get(split.parent_call_id or "")
    new = calls[split.call_id].prompt_ids
    if old is not None and old.prompt_ids is not None and old.output_ids is not None and new is not None:
        sides = (np.concatenate((old.prompt_ids, old.output_ids))[at : at + _DIFFERENCE], new[at : at + _DIFFERENCE])
        expected, actual = (_show(side.tolist(), decode) for side in sides)
    return Fork(
        call_id=split.call_id,
        parent_call_id=split.parent_call_id,
        at=at,
        unit="token",
        cause=split.cause,
        hint=split.hint,
        extra_tokens=split.extra_tokens,
        expected=expected,
        found=actual,
    )


def _show(ids: Sequence[int], decode: Decode | None) -> str:
    """The first id, and the text that begins with it where it can be read."""
    if not ids:
        return ""
    return f"id {ids[0]}" if decode is None else f"id {ids[0]}, {decode(ids)!r}"


def _spans(merged: Merged, branches: Sequence[Branch], calls: Mapping[str, Call]) -> dict[str, tuple[int, int, int]]:
    """Where each call's reply stands, in the timeline that its own branch is; one not trained stands there too."""
    spans: dict[str, tuple[int, int, int]] = {}
    for branch in branches:
        timeline: Timeline = merged.timelines[branch.number]
        for call_id in branch.calls:
            prompt, output = calls[call_id].prompt_ids, calls[call_id].output_ids
            if prompt is not None and output is not None:
                end = min(len(prompt) + len(output), len(timeline.token_ids))
                spans[call_id] = (branch.number, min(len(prompt), end), end)
    return spans


def _without_ids(calls: Sequence[Call], placed: Sequence[Branch]) -> list[Branch]:
    """Branches of the calls that have no ids, as they merge with the others by their messages."""
    chains = {call_id: branch.chain[: branch.chain.index(call_id) + 1] for branch in placed for call_id in branch.calls}
    if len(chains) == len(calls):
        return []
    numbered = {call.call_id: call for call in _numbered(calls)}
    merged = merge(list(numbered.values()))
    before = {call_id: earlier for timeline in merged.timelines for earlier, call_id in pairwise(timeline.call_ids)}
    splits = {split.call_id: split for split in merged.splits}
    runs: dict[str, list[str]] = {}  # the calls of a branch, by its last one
    for call_id in dict.fromkeys(call_id for timeline in merged.timelines for call_id in timeline.call_ids):
        if call_id not in chains:
            run = [] if call_id in splits else runs.pop(before.get(call_id, ""), [])
            run.append(call_id)
            runs[call_id] = run
    branches: list[Branch] = []
    for run in runs.values():
        trunk, first, above = list[str](), numbered[run[0]], before.get(run[0])
        while above is not None and above not in chains:
            trunk.append(above)
            above = before.get(above)
        chain = (*chains.get(above or "", ()), *reversed(trunk))
        split = splits.get(run[0]) if trunk or not chain else None  # what goes on from ids is no fork
        fork = None if split is None else _fork_by_messages(split, trunk[0] if trunk else None, numbered)
        after = chain[-1] if chain else None if fork is None else fork.parent_call_id
        number = len(placed) + len(branches)
        branches.append(Branch(number, None, first.agent, first.phase, tuple(run), chain, after=after, fork=fork))
    return branches


def _fork_by_messages(split: Split, above: str | None, numbered: Mapping[str, Call]) -> Fork:
    """Why a branch of calls without ids does not go on in one; `above` has the call that others go on from too."""
    parent, at, cause, hint = above or split.parent_call_id, split.at_token, split.cause, split.hint
    earlier = [number for ids in _ids(numbered[parent]) for number in ids] if parent else []
    if above is not None:
        at, cause, hint = len(earlier), "parallel_branch", HINTS["parallel_branch"]
    elif parent is not None and not set(earlier) & {*_ids(numbered[split.call_id])[0]}:
        parent, at, cause, hint = None, 0, "new_conversation", HINTS["new_conversation"]
    return Fork(split.call_id, parent, at, "message", cause, hint, extra_tokens=0)


def _ids(call: Call) -> tuple[list[int], list[int]]:
    assert call.prompt_ids is not None and call.output_ids is not None
    return call.prompt_ids.tolist(), call.output_ids.tolist()


def _numbered(calls: Sequence[Call]) -> Iterator[Call]:
    """The calls with numbers in place of token ids: one for each message, equal for messages that say the same."""
    fingerprints, numbers, odd = Fingerprints(), dict[object, int](), set[int]()
    responses: dict[str, list[int]] = {}

    def number(message: object) -> int:
        key = fingerprints.of(message)
        if key not in numbers:
            numbers[key] = len(numbers)
            odd.update(() if _is_usual(message) else (numbers[key],))
        return numbers[key]

    for call in sorted(calls, key=lambda c: (c.started_at, c.index, c.call_id)):
        sides = request_messages(call.request), replies(call)
        asked, answered = ([number(message) for message in side] for side in sides)
        usual = odd.isdisjoint(asked) and odd.isdisjoint(answered)
        asked = [*responses.get(str(call.request.get("previous_response_id")), ()), *asked]
        answered = answered or [numbers.setdefault(call.call_id, len(numbers))]  # from which no call goes on
        if isinstance(response_id := call.response.get("id"), str):
            responses[response_id] = [*asked, *answered]
        yield call.model_copy(
            update={
                "prompt_ids": np.array(asked, np.int32),
                "output_ids": np.array(answered, np.int32),
                "logprobs": None,
                "request": {**call.request, "messages": sides[0] if usual else None},
                "response": {"choices": [{"message": message} for message in sides[1][:1]]} if usual else {},
            }
        )


def _is_usual(message: object) -> bool:
    """Whether a message has the form that causes are told from."""
    try:
        return isinstance(message, Mapping) and bool(clean(message))
    except (AttributeError, TypeError):
        return False


def _attach(branches: Sequence[Branch]) -> list[Branch]:
    """The branches with the ones that they stand under; in a circle, one of them stands alone."""
    home = {call_id: branch.number for branch in branches for call_id in branch.calls}
    parents: dict[int, int] = {}
    for branch in branches:
        above = home.get(branch.after) if branch.after is not None else None
        step = above
        while step is not None and step != branch.number:
            step = parents.get(step)
        if above is not None and step is None:
            parents[branch.number] = above
    return [
        replace(branch, parent=parents.get(branch.number), after=branch.after if branch.number in parents else None)
        for branch in branches
    ]
