"""The calls of an episode as a tree of branches, with the position and cause of each fork.

Calls with token ids are merged as in `timelines.merge`. Calls without ids (of a deployed agent, or
failed ones) are merged by messages: a call extends the call whose messages and reply are the
beginning of its request.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Literal

import numpy as np

from ajet_sdk.dialects.message_parts import request_messages
from ajet_sdk.samples.splits import HINTS
from ajet_sdk.samples.timelines import Decode, Merged, merge
from ajet_sdk.tokens.template import ChatTemplate, clean
from ajet_sdk.types import Call, Phase, Split, Timeline
from ajet_tools.trace.episode.messages import Fingerprints, replies

_DIFFERENCE = 6
"""Tokens shown of each side of a fork."""


@dataclass(frozen=True, slots=True)
class Fork:
    """Cause of a new branch."""

    call_id: str
    """First call of the branch."""
    parent_call_id: str | None
    """The call that it was expected to extend."""
    at: int
    """First token (or message) that differs from the parent."""
    unit: Literal["token", "message"]
    cause: str
    hint: str
    extra_tokens: int
    """Tokens trained twice because of the fork."""
    expected: str = ""
    """Tokens of the parent; like `actual`, only for calls with ids."""
    actual: str = ""


@dataclass(frozen=True, slots=True)
class Branch:
    """Calls that extend each other."""

    number: int
    timeline: int | None
    """Index in the timelines of `merge`; None without token ids."""
    agent: str
    phase: Phase
    calls: tuple[str, ...]
    """Calls of this branch, in order."""
    trunk: tuple[str, ...] = ()
    """Calls of other branches that it extends, oldest first."""
    parent: int | None = None
    """The branch above."""
    after: str | None = None
    """The call of `parent` above this branch."""
    fork: Fork | None = None
    tokens: int | None = None
    trained: int = 0
    """Tokens masked in."""

    @property
    def chain(self) -> tuple[str, ...]:
        """All calls of the conversation."""
        return (*self.trunk, *self.calls)


@dataclass(frozen=True, slots=True)
class TreeRow:
    """A line of the tree, the head of a branch if `call_id` is None."""

    branch: int
    call_id: str | None
    depth: int


@dataclass(frozen=True)
class EpisodeTree:
    """The branches of an episode; each call belongs to a single branch."""

    branches: tuple[Branch, ...]
    branch_of: Mapping[str, int]
    spans: Mapping[str, tuple[int, int, int]]
    """For calls with ids: timeline, and start and end of the sampled tokens in it."""

    def rows(self) -> Iterator[TreeRow]:
        """Yield the tree from top to bottom; a branch after a last call keeps its depth."""
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
            todo += [
                (child, 0, depth if last else depth + 1)
                for child in reversed(behind[branch.calls[n]])
            ]

    def call_order(self) -> list[str]:
        """Return the calls in the order of the tree."""
        return [row.call_id for row in self.rows() if row.call_id is not None]


def episode_tree(
    calls: Sequence[Call], decode: Decode | None = None, template: ChatTemplate | None = None
) -> EpisodeTree:
    """Build the tree of a finished or running episode.

    Args:
        decode: decodes token ids; without it some causes are `unknown`.
        template: chat template of the model; without it, causes are guessed from changes of the request.
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
        start = max(
            (n for n, call_id in enumerate(timeline.call_ids) if call_id in splits), default=0
        )
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
    at = split.at_token
    expected = ""
    actual = ""
    old = calls.get(split.parent_call_id or "")
    new = calls[split.call_id].prompt_ids
    if (
        old is not None
        and old.prompt_ids is not None
        and old.output_ids is not None
        and new is not None
    ):
        sides = (
            np.concatenate((old.prompt_ids, old.output_ids))[at : at + _DIFFERENCE],
            new[at : at + _DIFFERENCE],
        )
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
        actual=actual,
    )


def _show(ids: Sequence[int], decode: Decode | None) -> str:
    """Format the first id, followed by the decoded text."""
    if not ids:
        return ""
    if decode is None:
        return f"id {ids[0]}"
    return f"id {ids[0]}, {decode(ids)!r}"


def _spans(
    merged: Merged, branches: Sequence[Branch], calls: Mapping[str, Call]
) -> dict[str, tuple[int, int, int]]:
    """Return the position of each reply in the timeline of its branch, trained or not."""
    spans: dict[str, tuple[int, int, int]] = {}
    for branch in branches:
        timeline: Timeline = merged.timelines[branch.number]
        for call_id in branch.calls:
            prompt = calls[call_id].prompt_ids
            output = calls[call_id].output_ids
            if prompt is not None and output is not None:
                end = min(len(prompt) + len(output), len(timeline.token_ids))
                spans[call_id] = (branch.number, min(len(prompt), end), end)
    return spans


def _without_ids(calls: Sequence[Call], placed: Sequence[Branch]) -> list[Branch]:
    """Return the branches of calls without ids, merged with all others by messages."""
    chains: dict[str, tuple[str, ...]] = {}
    for branch in placed:
        for call_id in branch.calls:
            chains[call_id] = branch.chain[: branch.chain.index(call_id) + 1]
    if len(chains) == len(calls):
        return []
    numbered = {call.call_id: call for call in _numbered(calls)}
    merged = merge(list(numbered.values()))
    before: dict[str, str] = {}
    for timeline in merged.timelines:
        before |= {call_id: earlier for earlier, call_id in pairwise(timeline.call_ids)}
    splits = {split.call_id: split for split in merged.splits}
    runs: dict[str, list[str]] = {}  # calls of a branch, by the last one
    # a call that several timelines share stands in the first
    for call_id in dict.fromkeys(chain.from_iterable(t.call_ids for t in merged.timelines)):
        if call_id not in chains:
            if call_id in splits:
                run = []
            else:
                run = runs.pop(before.get(call_id, ""), [])
            run.append(call_id)
            runs[call_id] = run
    branches: list[Branch] = []
    for run in runs.values():
        trunk = list[str]()
        first = numbered[run[0]]
        above = before.get(run[0])
        while above is not None and above not in chains:
            trunk.append(above)
            above = before.get(above)
        behind = (*chains.get(above or "", ()), *reversed(trunk))
        # extending a call with ids is no fork
        split = splits.get(run[0]) if trunk or not behind else None
        fork = None
        if split is not None:
            fork = _fork_by_messages(split, trunk[0] if trunk else None, numbered)
        if behind:
            after = behind[-1]
        elif fork is None:
            after = None
        else:
            after = fork.parent_call_id
        number = len(placed) + len(branches)
        branches.append(
            Branch(
                number, None, first.agent, first.phase, tuple(run), behind, after=after, fork=fork
            )
        )
    return branches


def _fork_by_messages(split: Split, above: str | None, numbered: Mapping[str, Call]) -> Fork:
    """Explain a branch of calls without ids; `above` is a call that other branches extend too."""
    parent = above or split.parent_call_id
    at = split.at_token
    cause = split.cause
    hint = split.hint
    earlier: list[int] = []
    if parent:
        asked, answered = _ids(numbered[parent])
        earlier = asked + answered
    if above is not None:
        at = len(earlier)
        cause = "parallel_branch"
        hint = HINTS["parallel_branch"]
    elif parent is not None and set(earlier).isdisjoint(_ids(numbered[split.call_id])[0]):
        parent = None
        at = 0
        cause = "new_conversation"
        hint = HINTS["new_conversation"]
    return Fork(split.call_id, parent, at, "message", cause, hint, extra_tokens=0)


def _ids(call: Call) -> tuple[list[int], list[int]]:
    assert call.prompt_ids is not None and call.output_ids is not None
    return call.prompt_ids.tolist(), call.output_ids.tolist()


def _numbered(calls: Sequence[Call]) -> Iterator[Call]:
    """Yield the calls with a number per message in place of token ids, equal for equivalent
    messages."""
    fingerprints = Fingerprints()
    numbers = dict[object, int]()
    odd = set[int]()
    responses: dict[str, list[int]] = {}

    def number(message: object) -> int:
        key = fingerprints.of(message)
        if key not in numbers:
            numbers[key] = len(numbers)
            with suppress(AttributeError, TypeError):
                if isinstance(message, Mapping) and clean(message):
                    return numbers[key]
            odd.add(numbers[key])
        return numbers[key]

    for call in sorted(calls, key=lambda c: (c.started_at, c.index, c.call_id)):
        sides = request_messages(call.request), replies(call)
        asked, answered = ([number(message) for message in side] for side in sides)
        usual = odd.isdisjoint(asked) and odd.isdisjoint(answered)
        asked = [*responses.get(str(call.request.get("previous_response_id")), ()), *asked]
        answered = answered or [
            numbers.setdefault(call.call_id, len(numbers))
        ]  # unique: no call extends it
        if isinstance(response_id := call.response.get("id"), str):
            responses[response_id] = [*asked, *answered]
        yield call.model_copy(
            update={
                "prompt_ids": np.array(asked, np.int32),
                "output_ids": np.array(answered, np.int32),
                "logprobs": None,
                "request": {**call.request, "messages": sides[0] if usual else None},
                "response": (
                    {"choices": [{"message": message} for message in sides[1][:1]]} if usual else {}
                ),
            }
        )


def _attach(branches: Sequence[Branch]) -> list[Branch]:
    """Set the parents of branches; a cycle is broken at one of its branches."""
    home = {call_id: branch.number for branch in branches for call_id in branch.calls}
    parents: dict[int, int] = {}
    for branch in branches:
        above = None
        if branch.after is not None:
            above = home.get(branch.after)
        step = above
        while step is not None and step != branch.number:
            step = parents.get(step)
        if above is not None and step is None:
            parents[branch.number] = above
    return [
        replace(
            branch,
            parent=parents.get(branch.number),
            after=branch.after if branch.number in parents else None,
        )
        for branch in branches
    ]
