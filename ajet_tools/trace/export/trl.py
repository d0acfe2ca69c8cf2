"""Exports TRL's conversational prompt/completion and preference rows (TRL 1.16, dataset
formats)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ajet_sdk.tokens.template import same_reply
from ajet_sdk.types import Episode
from ajet_tools.trace.export.conversations import (
    Conversation,
    Exchange,
    about,
    conversations,
    cut_turns,
    exchanges,
    tool_call,
)
from ajet_tools.trace.export.demonstrations import is_cut
from ajet_tools.trace.export.job import CUT, Job, Row
from ajet_tools.trace.queries.records import Record

_KEPT = ("name", "tool_call_id", "reasoning_content", "thinking")


def prompt_rows(job: Job, records: Iterable[Record]) -> Iterator[Row]:
    """Yield a row per call, with its messages as `prompt` and its reply as `completion`.

    A loss on completions then counts each reply once, in its original context.
    """
    for record in records:
        rows: list[Row] = []
        cut = 0
        for exchange in exchanges(record.episode):
            call = exchange.call
            if is_cut(call) and not job.keep_cut:
                cut += 1
                continue
            row = {"prompt": _plain(exchange.messages), "completion": _plain([exchange.reply])}
            facts = {**about(record.episode, call.agent, call.call_id), "call_id": call.call_id}
            rows.append({**row, "tools": _tools(exchange.tools), **facts})
        yield from job.counted(record, rows, cut=cut)


def preference_rows(job: Job, groups: Iterable[list[Record]]) -> Iterator[Row]:
    """Yield a row per pair: a better and a worse attempt of a group, or a user's correction and
    the reply."""
    for group in groups:
        by_id = {record.episode.episode_id: record for record in group}
        episodes = [record.episode for record in group]
        for row in pairs_of_group(episodes, job.margin, job.left_out, keep_cut=job.keep_cut):
            job.wrote(by_id[str(row["chosen_episode_id"])])
            job.wrote(by_id[str(row["rejected_episode_id"])], rows=0)
            yield row
        for record in group:
            for row in _corrections(record, job.left_out):
                job.wrote(record)
                yield row


def pairs_of_group(
    episodes: Sequence[Episode], margin: float, left_out: Counter[str], *, keep_cut: bool = False
) -> Iterator[Row]:
    """Pair the best attempt with the worst, the second best with the second worst, and so on, for
    each agent.

    An attempt is in one pair at most. The rewards of a pair differ by more than `margin`.
    """
    scored: dict[str, list[tuple[float, Episode, Conversation]]] = {}
    for episode in episodes:
        if episode.status != "succeeded":
            left_out["attempts without success"] += 1
            continue
        longest: dict[str, Conversation] = {}
        every = conversations(episode)
        cut = set() if keep_cut else cut_turns(episode, every)
        if cut:  # a pair of it would prefer or reject an end that was never sampled
            left_out[CUT] += len(cut)
            continue
        for conversation in every:
            known = longest.get(conversation.agent)
            if known is None or len(conversation.turns) > len(known.turns):
                longest[conversation.agent] = conversation
        for agent, conversation in longest.items():
            value = episode.value(agent)
            if value is not None:
                scored.setdefault(agent, []).append((value, episode, conversation))
    for agent, attempts in scored.items():
        attempts.sort(key=lambda entry: (-entry[0], entry[1].attempt, entry[1].episode_id))
        if not attempts[0][0] - attempts[-1][0] > margin:
            left_out["groups in which no two rewards differ by more than the margin"] += 1
        for (high, better, chosen), (low, worse, rejected) in zip(
            attempts, reversed(attempts), strict=True
        ):
            # the pairs after this one are closer still
            if not high - low > margin or better is worse:
                break
            row = _pair(chosen, rejected)
            if row is None:
                left_out["pairs with different prompts"] += 1
                continue
            group_facts = _of_group(better, agent)
            yield {
                **row,
                **group_facts,
                "source": "reward",
                "chosen_reward": high,
                "rejected_reward": low,
                "chosen_episode_id": better.episode_id,
                "rejected_episode_id": worse.episode_id,
                "call_id": None,
            }


_OF_GROUP = ("run_id", "group_id", "task_id", "step", "split", "agent")


def _of_group(episode: Episode, agent: str) -> dict[str, object]:
    """Returns the fields that all attempts of a group have."""
    facts = about(episode, agent)
    return {name: facts[name] for name in _OF_GROUP}


def _pair(chosen: Conversation, rejected: Conversation) -> dict[str, object] | None:
    """Split two conversations at their first difference; None if that is not a reply of both."""
    first = min(chosen.turns[0][1], rejected.turns[0][1])
    shared = 0
    for a, b in zip(chosen.messages, rejected.messages, strict=False):
        if not (a == b or same_reply(a, b)):
            break
        shared += 1
    shared_turns = {position for _, position in chosen.turns} & {
        position for _, position in rejected.turns
    }
    if shared < first or chosen.tools != rejected.tools or shared not in shared_turns:
        return None
    return {
        "prompt": _plain(chosen.messages[:shared]),
        "chosen": _plain(chosen.messages[shared:]),
        "rejected": _plain(rejected.messages[shared:]),
        "tools": _tools(chosen.tools),
    }


def _corrections(record: Record, left_out: Counter[str]) -> Iterator[dict[str, object]]:
    """Pair corrections of users with the replies they correct: of the named call, or else the last
    call."""
    corrections = [entry for entry in record.feedback if entry.correction]
    by_call: dict[str, Exchange] = {e.call.call_id: e for e in exchanges(record.episode)}
    for entry in corrections:
        last = next(reversed(by_call.values()), None)
        if entry.call_id:
            exchange = by_call.get(entry.call_id)
        else:
            exchange = last
        reply = {"role": "assistant", "content": entry.correction}
        if exchange is None:
            left_out["corrections of something other than a chat reply"] += 1
            continue
        if same_reply(reply, exchange.reply):
            left_out["corrections identical to the reply"] += 1
            continue
        group_facts = _of_group(record.episode, exchange.call.agent)
        yield {
            "prompt": _plain(exchange.messages),
            "chosen": _plain([reply]),
            "rejected": _plain([exchange.reply]),
            "tools": _tools(exchange.tools),
            **group_facts,
            "source": "feedback",
            "chosen_reward": None,
            "rejected_reward": None,
            "chosen_episode_id": record.episode.episode_id,
            "rejected_episode_id": record.episode.episode_id,
            "call_id": exchange.call.call_id,
        }


def _plain(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Normalize messages for table columns: text content as a string, tool calls with JSON
    arguments."""
    result = []
    for message in messages:
        plain: dict[str, object] = {
            "role": message.get("role", "user"),
            "content": _content(message.get("content")),
        }
        plain |= {name: message[name] for name in _KEPT if message.get(name) is not None}
        calls = message.get("tool_calls")
        if isinstance(calls, list) and calls:
            plain["tool_calls"] = [_tool_call(call) for call in calls]
        result.append(plain)
    return result


def _content(content: object) -> object:
    if content is None:
        return ""
    if isinstance(content, list) and all(
        isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content
    ):
        return "".join(p["text"] for p in content)
    return content


def _tool_call(call: object) -> object:
    """Keep arguments as JSON text: objects of different shapes would become one column with all
    their keys."""
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return call
    return tool_call(call.get("id"), function.get("name"), function.get("arguments"))


def _tools(tools: list[object] | None) -> str | None:
    """Encode tools as JSON text, which TRL parses, as their schemas differ in shape."""
    if not tools:
        return None
    return json.dumps(tools, ensure_ascii=False)
