"""Merges calls into timelines, and explains splits.

A call extends the timeline that is the longest exact token prefix of its prompt, or else opens a
new one, a branch. Every sampled token is masked in exactly once, after the exact prefix with which
it was sampled, and masked out where a branch repeats it. Two replies to one prompt are both
included, agents never share a timeline, and the order of the calls doesn't matter: of several calls
that extend the same one, the one with most tokens sampled after it continues the timeline, and the
others branch off.

The extended call is found at recording (`Call.extends_call_id`) and verified here, since no token
may be trained after a prefix with which it was not sampled. If it is missing, it is searched among
all calls, including later ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ajet_sdk.pictures import keyed, unkeyed, with_digests
from ajet_sdk.samples.prefixes import (
    DIGEST,
    Ends,
    IdHash,
    common_prefix,
    is_trained,
    rank,
)
from ajet_sdk.samples.splits import HINTS, Side, Texts, explain
from ajet_sdk.tokens.template import ChatTemplate, Message, clean, meaning
from ajet_sdk.types import Call, JsonView, Span, Split, Timeline

Decode = Callable[[Sequence[int]], str]
_Ids = npt.NDArray[np.int32]
_WINDOW = 48
"""Number of tokens to decode before the point where two calls diverge."""
_RECENT = 8
"""Number of earlier calls to search for an ended one, if a call's messages extend none."""


@dataclass(frozen=True)
class Merged:
    """Timelines of calls, with the cause of each branch."""

    timelines: tuple[Timeline, ...]
    splits: tuple[Split, ...]


def merge(
    calls: Sequence[Call], decode: Decode | None = None, template: ChatTemplate | None = None
) -> Merged:
    """Merge calls into timelines.

    Args:
        calls: of one episode, in any order; those without ids are left out.
        decode: converts token ids to text; needed, with the messages in `Call.request`, to find a split's cause.
        template: of the calls' model; used to prove causes in the request, which otherwise are its changes.

    Returns:
        Timelines in the order of their first calls, and a split for each timeline of an agent but its first. Every
        sampled token of a trainable call is masked in exactly once.
    """
    by_agent: dict[tuple[str, str], list[_Node]] = defaultdict(list)
    for call in {call.call_id: call for call in calls}.values():
        if call.prompt_ids is not None and call.output_ids is not None:
            prompt = keyed(call.prompt_ids, call.pictures)
            by_agent[call.agent, call.phase].append(_Node(call, prompt, call.output_ids))
    timelines: list[tuple[_Node, Timeline]] = []
    splits: list[tuple[_Node, Split]] = []
    for nodes in by_agent.values():
        nodes.sort(key=_began)
        _find_parents(nodes)
        _choose(nodes)
        timelines += [(node, _timeline(node)) for node in nodes if node.opens]
        splits += _splits(nodes, decode, template)
    timelines.sort(key=lambda pair: _began(pair[0]))
    splits.sort(key=lambda pair: _began(pair[0]))
    return Merged(tuple(t for _, t in timelines), tuple(s for _, s in splits))


class _Node:
    """A call in the tree of calls; its parent's prompt and output are the longest prefix of its
    prompt. Prompts have keys in place of image tokens."""

    def __init__(self, call: Call, prompt: _Ids, output: _Ids) -> None:
        self.call = call
        self.prompt = prompt
        self.output = output
        self.start = len(prompt)
        self.end = self.start + len(output)
        self.trained = is_trained(call)
        self.parent: _Node | None = None
        self.heir: _Node | None = None
        """The child that continues the timeline."""
        self.weight = 0
        """Tokens sampled in this call and its descendants."""

    @property
    def ids(self) -> _Ids:
        """The prompt with its image tokens."""
        return unkeyed(self.prompt, self.call.pictures)

    @cached_property
    def side(self) -> Side:
        return _side(self.call)

    @property
    def last_id(self) -> int:
        """-1 if there is none."""
        last = self.output if self.end > self.start else self.prompt
        return int(last[-1]) if self.end else -1

    def begins_with(self, earlier: _Node) -> bool:
        """Whether another call's prompt and output are a prefix of this prompt, and shorter than
        this call."""
        if earlier.end > self.start or earlier.end >= self.end:
            return False
        if (self.prompt[: earlier.start] != earlier.prompt).any():
            return False
        return not (self.prompt[earlier.start : earlier.end] != earlier.output).any()

    @property
    def opens(self) -> bool:
        return self.parent is None or self.parent.heir is not self


def _began(node: _Node) -> tuple[object, str]:
    return node.call.started_at, node.call.call_id


def _find_parents(nodes: Sequence[_Node]) -> None:
    """Sets each node's parent: the recorded one, or else by a search."""
    known = {node.call.call_id: node for node in nodes}
    unplaced: set[str] = set()
    for node in nodes:
        parent = known.get(node.call.extends_call_id or "")
        if parent is not None and node.begins_with(parent):
            node.parent = parent
        else:
            unplaced.add(node.call.call_id)
    if len(unplaced) > 1:  # a single one is the root
        _search(nodes, unplaced)


def _search(nodes: Sequence[_Node], unplaced: Collection[str]) -> None:
    """Sets the parents of some nodes, from shorter to longer sequences, since a parent is shorter
    than its child."""
    ends: Ends[_Node] = Ends()
    hashes: dict[str, IdHash] = {}
    to_extend = {node.parent.call.call_id for node in nodes if node.parent is not None}
    latest: _Node | None = None
    for node in sorted(nodes, key=lambda node: node.end):
        call_id = node.call.call_id
        limit = min(node.start, node.end - 1)
        before = node.parent
        if (
            before is None
            and latest is not None
            and latest.end <= limit
            and node.begins_with(latest)
        ):
            before = latest
        if before is None:
            hashed = IdHash(digest_size=DIGEST)
        else:
            hashed = hashes[before.call.call_id].copy()
        parent = ends.longest(node.prompt, limit, hashed, 0 if before is None else before.end)
        if call_id in unplaced:
            node.parent = parent
        hashed.update(np.ascontiguousarray(node.output).data)
        ends.add(hashed, node.end, node.last_id, rank(node.call), node)
        if latest is not None and latest.call.call_id not in to_extend:
            del hashes[latest.call.call_id]
        hashes[call_id], latest = hashed, node


def _choose(nodes: Sequence[_Node]) -> None:
    """Chooses the heir of each node: the child with most sampled tokens; among equals the one with
    the smallest ids as bytes, since the order of parallel calls varies; then the earlier one."""

    def key(node: _Node) -> tuple[Any, ...]:
        digests = [placed.picture.digest for placed in node.call.pictures]
        return -node.weight, node.ids.tobytes(), digests, node.output.tobytes(), _began(node)

    for node in sorted(
        nodes, key=lambda n: (n.start, n.end), reverse=True
    ):  # children before their parents
        node.weight += node.end - node.start
        parent = node.parent
        if parent is None:
            continue
        parent.weight += node.weight
        rival = parent.heir
        if rival is None or node.weight > rival.weight or key(node) < key(rival):
            parent.heir = node


def _timeline(node: _Node) -> Timeline:
    """Builds the timeline that a node opens: its prompt and output, and those of its heirs."""
    chain = [node]
    while chain[-1].heir is not None:
        chain.append(chain[-1].heir)
    before: list[_Node] = []
    ancestor = node.parent
    while ancestor is not None:
        before.append(ancestor)
        ancestor = ancestor.parent
    last = chain[-1]
    trained = [link for link in chain if link.trained and link.end > link.start]
    token_ids = np.concatenate((last.ids, last.output))
    mask = np.zeros(last.end, np.bool_)
    logprobs = np.zeros(last.end, np.float32)
    for link in trained:
        mask[link.start : link.end] = True
        logprobs[link.start : link.end] = (
            np.nan if link.call.logprobs is None else link.call.logprobs
        )
    for array in (token_ids, mask, logprobs):
        array.flags.writeable = False
    versions = [v for link in trained if (v := link.call.policy_version) is not None]
    return Timeline(
        agent=node.call.agent,
        token_ids=token_ids,
        loss_mask=mask,
        logprobs=logprobs,
        call_ids=tuple(link.call.call_id for link in [*reversed(before), *chain]),
        policy_version=min(versions, default=None),
        spans=tuple(Span(call_id=n.call.call_id, start=n.start, end=n.end) for n in trained),
        pictures=last.call.pictures,
    )


def _splits(
    nodes: Sequence[_Node], decode: Decode | None, template: ChatTemplate | None
) -> list[tuple[_Node, Split]]:
    """Builds a split for each timeline of an agent but its first."""
    opened = [node for node in nodes if node.opens]
    if len(opened) < 2:
        return []
    history = _History(nodes)
    first = next(node for node in opened if node.parent is None)
    return [(node, _split(node, history, decode, template)) for node in opened if node is not first]


def _split(
    node: _Node, history: _History, decode: Decode | None, template: ChatTemplate | None
) -> Split:
    old, new = history.parted(node)
    rival = None if node.parent is None else node.parent.heir
    if old is None:
        cause = "parallel_branch"
        hint = HINTS["parallel_branch"]
        at = node.start if rival is None else _common_tokens(node, rival)
    else:
        at = _common_tokens(new, old)
        texts = None
        if decode is not None:
            start = max(0, min(at, old.start) - _WINDOW)
            prompt = decode(old.ids[start:].tolist())
            old_text = decode(np.concatenate((old.ids, old.output))[start:].tolist())
            new_text = decode(new.ids[start : old.end + 1024].tolist())
            texts = Texts(
                old_text,
                new_text,
                min(len(prompt), len(old_text)),
                decode(old.output[-1:].tolist()),
            )
        cause, hint = explain(old.side, new.side, texts, template)
        at = at if new is node or rival is None else _common_tokens(node, rival)
    expected = old if new is node and old is not None else node.parent
    return Split(
        call_id=node.call.call_id,
        parent_call_id=None if expected is None else expected.call.call_id,
        at_token=at,
        cause=cause,
        extra_tokens=node.start,
        hint=hint,
    )


def _common_tokens(node: _Node, earlier: _Node) -> int:
    """Length of the common prefix of a prompt and another call's prompt and output."""
    same = common_prefix(node.prompt, earlier.prompt)
    if same == earlier.start:
        return same + common_prefix(node.prompt[same:], earlier.output)
    return same


class _History:
    """Finds the call that another call of the agent was expected to extend."""

    def __init__(self, nodes: Sequence[_Node]) -> None:
        self._nodes = nodes
        self._place = {id(node): i for i, node in enumerate(nodes)}
        self._roots: dict[bytes, _Node] = {}
        self._asked: dict[tuple[int, str], list[_Node]] = defaultdict(list)
        for node in nodes:
            if node.parent is None:
                self._roots.setdefault(node.prompt.tobytes(), node)
            messages = _messages(node.call)
            if messages:
                self._asked[len(messages), meaning(_seen(messages[-1]))].append(node)

    def parted(self, node: _Node) -> tuple[_Node | None, _Node]:
        """The earlier call that was not extended, if any, and the call that should have extended
        it.

        The latter may be the heir of the call's parent: a next turn that extends the parent instead
        of the call.
        """
        if node.parent is None:
            twin = self._roots[node.prompt.tobytes()]
            if twin is node:
                return (self._expected(node), node)
            return (None, node)
        assert node.parent.heir is not None
        for late, early in ((node, node.parent.heir), (node.parent.heir, node)):
            wanted = self._extended(late, len(late.side.meanings) - 1)
            if (
                wanted is None
                and not late.side.meanings
                and self._place[id(early)] < self._place[id(late)]
            ):
                if early.start < late.start and _common_tokens(late, early) >= early.start:
                    wanted = early
                else:
                    wanted = None
            if wanted is not None and _common_tokens(late, wanted) < wanted.end:
                return wanted, late
        return None, node

    def _expected(self, node: _Node) -> _Node:
        """The call that a root extends by its messages, else the latest that ended before it
        began."""
        extended = self._extended(node, len(node.side.meanings))
        if extended is not None:
            return extended
        place = self._place[id(node)]
        recent = self._nodes[max(0, place - _RECENT) : place][
            ::-1
        ]  # not empty, since it is not the agent's first call
        ended = [earlier for earlier in recent if earlier.call.ended_at <= node.call.started_at]
        return (ended or recent)[0]

    def _extended(self, node: _Node, most: int) -> _Node | None:
        """The latest call whose messages are the longest prefix, up to `most`; preferably with the
        same reply."""
        meanings = node.side.meanings
        place = self._place[id(node)]
        for n in range(most, 0, -1):
            nodes = self._asked.get((n, meanings[n - 1]), ())[-64:]
            equal = [
                o
                for o in reversed(nodes)
                if self._place[id(o)] < place and o.side.meanings == meanings[:n]
            ]
            if equal:
                return next(
                    (o for o in equal if n < len(meanings) and o.side.reply_meaning == meanings[n]),
                    equal[0],
                )
        return None


def _messages(call: Call) -> Sequence[Any] | None:
    messages = call.request.get("messages")
    if isinstance(messages, list) and all(isinstance(m, Mapping) for m in messages):
        return messages
    return None


def _seen(message: JsonView) -> Message:
    """A message in the form for comparison."""
    cleaned = clean(message)
    return {**cleaned, "content": with_digests(cleaned["content"])}


def _side(call: Call) -> Side:
    messages = _messages(call)
    reply = (call.response.get("choices") or [{}])[0].get("message")
    return Side(
        messages=None if messages is None else [_seen(m) for m in messages],
        tools=call.request.get("tools"),
        options=call.request.get("chat_template_kwargs") or {},
        reply=clean(reply) if reply else None,
        stop=call.sampling.get("stop") or (),
    )
