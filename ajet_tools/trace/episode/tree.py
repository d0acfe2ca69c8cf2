"""The calls of an episode as a tree: timelines, and where and why one forks from another.

Calls with token ids stand as `timelines.merge` folds them. Calls without (a deployed agent, a call that failed) are
placed by what they say: a call goes on from the one whose messages and reply its own begin with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ajet_sdk.dialects.message_parts import request_messages
from ajet_sdk.samples.splits import HINTS, Side, explain
from ajet_sdk.samples.timelines import Decode, Merged, merge
from ajet_sdk.tokens.template import ChatTemplate, clean
from ajet_sdk.types import Call, Phase, Split, Timeline
from ajet_tools.trace.episode.messages import Fingerprints, fingerprint, replies

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


@dataclass(slots=True)
class _Draft:
    """A branch of calls without ids, while it grows."""

    calls: list[str]
    trunk: tuple[str, ...]
    after: str | None
    fork: Fork | None


class _Calls:
    """The earlier calls of one agent by their messages, to find the one that a call without ids extends."""

    def __init__(self) -> None:
        self._ended: dict[int, Call] = {}
        self._said: dict[int, Call] = {}
        self._responses: dict[str, Call] = {}
        self._fingerprints = Fingerprints()
        self.last: Call | None = None

    def _prefixes(self, raws: Sequence[object], start: int = 0) -> list[int]:
        hashes = [start]
        for raw in raws:
            hashes.append(hash((hashes[-1], self._fingerprints.of(raw))))
        return hashes[1:]

    def extended(self, call: Call) -> Call | None:
        """The call whose messages and reply this one's begin with, the furthest; or the one that it names."""
        named = call.request.get("previous_response_id")
        if isinstance(named, str) and named in self._responses:
            return self._responses[named]
        return next(
            (self._ended[p] for p in reversed(self._prefixes(request_messages(call.request))) if p in self._ended), None
        )

    def expected(self, call: Call) -> tuple[Call | None, int]:
        """The last call with most messages in common, else the last; and how many."""
        prefixes = self._prefixes(request_messages(call.request))
        for n in range(len(prefixes), 0, -1):
            if prefixes[n - 1] in self._said:
                return self._said[prefixes[n - 1]], n
        return self.last, 0

    def add(self, call: Call) -> None:
        prefixes = self._prefixes(request_messages(call.request))
        self._said.update(dict.fromkeys(prefixes, call))
        whole = self._prefixes(replies(call), prefixes[-1] if prefixes else 0)
        if whole:
            self._ended.setdefault(whole[-1], call)
        response_id = call.response.get("id")
        if isinstance(response_id, str):
            self._responses[response_id] = call
        self.last = call


def _without_ids(calls: Sequence[Call], placed: Sequence[Branch]) -> list[Branch]:
    """Branches of the calls that have no ids."""
    chains = {call_id: branch.chain[: branch.chain.index(call_id) + 1] for branch in placed for call_id in branch.calls}
    if len(chains) == len(calls):
        return []
    by_agent: dict[tuple[str, Phase], list[Call]] = defaultdict(list)
    for call in sorted(calls, key=lambda c: (c.started_at, c.index, c.call_id)):
        by_agent[call.agent, call.phase].append(call)
    branches: list[Branch] = []
    for (agent, phase), theirs in by_agent.items():
        for draft in _drafts(theirs, chains):
            number = len(placed) + len(branches)
            call_ids = tuple(draft.calls)
            branches.append(
                Branch(number, None, agent, phase, call_ids, draft.trunk, after=draft.after, fork=draft.fork)
            )
    return branches


def _drafts(calls: Sequence[Call], chains: Mapping[str, tuple[str, ...]]) -> list[_Draft]:
    """The branches of one agent's calls without ids; `chains` are those of the calls that have them."""
    earlier, drafts, home = _Calls(), list[_Draft](), dict[str, _Draft]()
    for call in calls:
        if call.call_id not in chains:
            before = earlier.extended(call)
            draft = home.get(before.call_id) if before else None
            if before and draft and draft.calls[-1] == before.call_id:
                draft.calls.append(call.call_id)
            else:
                draft = _open(call, before, earlier, draft, chains)
                drafts.append(draft)
            home[call.call_id] = draft
        earlier.add(call)
    return drafts


def _open(
    call: Call, before: Call | None, earlier: _Calls, draft: _Draft | None, chains: Mapping[str, tuple[str, ...]]
) -> _Draft:
    """A new branch, and why the call does not go on in the one of the call before it."""
    if before is not None:
        chain = (*draft.trunk, *draft.calls[: draft.calls.index(before.call_id) + 1]) if draft else ()
        n = len(request_messages(before.request)) + len(replies(before))
        fork = _by_messages(call, before, n, "parallel_branch") if draft else None
        return _Draft([call.call_id], chains.get(before.call_id, chain), before.call_id, fork)
    expected, n = earlier.expected(call)
    if expected is None:
        return _Draft([call.call_id], (), None, None)
    if n == 0 and not _share(expected, call):
        return _Draft([call.call_id], (), None, _by_messages(call, None, 0, "new_conversation"))
    fork = _by_messages(call, expected, n, *_cause(expected, call))
    return _Draft([call.call_id], (), expected.call_id, fork)


def _share(old: Call, new: Call) -> bool:
    """Whether two calls have a message in common."""
    return not {*map(fingerprint, request_messages(old.request)), *map(fingerprint, replies(old))}.isdisjoint(
        map(fingerprint, request_messages(new.request))
    )


def _by_messages(call: Call, parent: Call | None, at: int, cause: str, hint: str = "") -> Fork:
    parent_id = None if parent is None else parent.call_id
    return Fork(call.call_id, parent_id, at, "message", cause, hint or HINTS[cause], extra_tokens=0)


def _cause(old: Call, new: Call) -> tuple[str, str]:
    sides = _side(old), _side(new)
    return explain(sides[0], sides[1]) if sides[0] and sides[1] else ("unknown", HINTS["unknown"])


def _side(call: Call) -> Side | None:
    """A call as `explain` compares it; None where its messages are not of the usual form."""
    messages, reply = request_messages(call.request), replies(call)
    if not all(isinstance(message, Mapping) for message in (*messages, *reply[:1])):
        return None
    try:
        return Side(
            messages=[clean(message) for message in messages if isinstance(message, Mapping)],
            tools=call.request.get("tools"),
            options=call.request.get("chat_template_kwargs") or {},
            reply=clean(reply[0]) if reply and isinstance(reply[0], Mapping) else None,
        )
    except (AttributeError, TypeError):
        return None


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
