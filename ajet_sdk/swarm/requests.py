"""The requests of a swarm's client, each an `Exchange` with a typed result."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import httpx
import numpy as np
from pydantic import BaseModel, ValidationError

from ajet_sdk.errors import SwarmError
from ajet_sdk.swarm.exchange import Exchange, Notices, ReadLine, Send, Wait, exchange, route
from ajet_sdk.swarm.messages import (
    Abort,
    Agree,
    Agreed,
    Claim,
    Claimed,
    ConfigText,
    End,
    EpisodeCalls,
    Judging,
    Receipt,
    ReplyModel,
    State,
    SwarmEvent,
    SwarmStatus,
)
from ajet_sdk.types import Reward, Task

BEFORE_RECONNECTING = 1.0
"""Seconds between two connections to the stream of events."""


@dataclass(frozen=True)
class Requests:
    """The routes of a server, with the key and the time limit of one client."""

    server: str
    key: str | None
    patience: float
    notices: Notices = field(default_factory=Notices)

    def claim(
        self, claim: Claim, wait: float | None, patience: float | None = None
    ) -> Exchange[Claimed]:
        """Claim an episode. It is asked for again with the same `request_id` until there is a
        place, for at most `wait` seconds (None: without a limit)."""
        if patience is None:
            limit = self.patience
        else:
            limit = min(patience, self.patience)
        if wait is not None:
            claim = claim.model_copy(update={"wait": min(claim.wait, max(wait, 0.0))})
        send = self._send("POST", "episodes", claim, wait=claim.wait)
        response = yield from exchange(self.server, send, limit, wait, self.notices, is_claim=True)
        claimed = self._read(response, Claimed)
        base_url = self._address(claimed.base_url)
        return claimed.model_copy(update={"base_url": base_url})

    def _address(self, base_url: str) -> str:
        """The address of an episode as this client reaches the server: a proxy on the way may have
        another host, scheme or path."""
        _, found, path = base_url.partition("/episodes/")
        return f"{self.server}/episodes/{path}" if found else base_url

    def end(self, claimed: Claimed, end: End, patience: float | None = None) -> Exchange[Receipt]:
        send = self._send("POST", "episodes", end, claimed, "end")
        return (yield from self._ask(send, Receipt, patience))

    def abort(
        self, claimed: Claimed, abort: Abort, patience: float | None = None
    ) -> Exchange[Receipt]:
        send = self._send("POST", "episodes", abort, claimed, "abort")
        return (yield from self._ask(send, Receipt, patience))

    def receipt(self, episode_id: str, key: str | None = None) -> Exchange[Receipt]:
        send = Send("GET", route("episodes", episode_id), key or self.key)
        return (yield from self._ask(send, Receipt))

    def calls(self, claimed: Claimed, patience: float | None = None) -> Exchange[EpisodeCalls]:
        send = Send("GET", route("episodes", claimed.episode_id, "calls"), claimed.end_key)
        return (yield from self._ask(send, EpisodeCalls, patience))

    def judging(self, claimed: Claimed) -> Exchange[str]:
        """End the workflow's calls; returns the key of the judge's calls."""
        path = route("episodes", claimed.episode_id, "judging")
        send = Send("POST", path, claimed.end_key, b"{}")
        reply = yield from self._ask(send, Judging)
        return reply.judge_key

    def status(self, patience: float | None = None) -> Exchange[SwarmStatus]:
        return (yield from self._ask(Send("GET", route("status"), self.key), SwarmStatus, patience))

    def agree(self, client_id: str) -> Exchange[Agreed]:
        return (
            yield from self._ask(self._send("POST", "agree", Agree(client_id=client_id)), Agreed)
        )

    def configure(self, yaml: str) -> Exchange[None]:
        yield from exchange(
            self.server, self._send("PUT", "config", ConfigText(yaml=yaml)), self.patience
        )

    def start(self) -> Exchange[State]:
        """Start the training. A repeated start, whose first answer was lost, finds it running."""
        try:
            return (yield from self._ask(Send("POST", route("start"), self.key, b"{}"), State))
        except SwarmError as error:
            if error.code != "not_offline":
                raise
            status = yield from self.status()
            return State(state=status.state)

    def stop(self) -> Exchange[State]:
        return (yield from self._ask(Send("POST", route("stop"), self.key, b"{}"), State))

    def _ask(
        self, send: Send, kind: type[ReplyModel], patience: float | None = None
    ) -> Exchange[ReplyModel]:
        if patience is None:
            limit = self.patience
        else:
            limit = min(patience, self.patience)
        response = yield from exchange(self.server, send, limit, notices=self.notices)
        return self._read(response, kind)

    def _send(
        self,
        method: str,
        name: str,
        body: BaseModel,
        claimed: Claimed | None = None,
        action: str = "",
        *,
        wait: float = 0.0,
    ) -> Send:
        key = self.key
        path = route(name)
        if claimed is not None:
            key = claimed.end_key
            path = route(name, claimed.episode_id, action)
        return Send(method, path, key, body.model_dump_json().encode(), wait)

    def _read(self, response: httpx.Response, kind: type[ReplyModel]) -> ReplyModel:
        try:
            return kind.model_validate_json(response.content)
        except ValidationError as error:
            raise SwarmError(
                f"{self.server} answered {response.request.method} {response.request.url.path} with"
                " something else than the protocol's JSON; check that the URL is that of"
                f" `ajet swarm start`, and its version ({error.errors()[0]['msg']})",
                code="not_a_swarm",
                status=response.status_code,
            ) from error


class EventFeed:
    """The stream of a server's events from one number on, over lost connections."""

    def __init__(self, requests: Requests, after: int) -> None:
        self._requests = requests
        self._after = after
        self._connected = False
        self.is_over = False
        """Whether the training is finished, so that nothing more will come."""

    def next_event(self) -> Exchange[SwarmEvent]:
        """Wait for the next event."""
        fields = dict[str, str]()
        while True:
            if not self._connected:
                yield from self._connect()
                fields = {}
            try:
                line = yield ReadLine()
            except httpx.TransportError:
                line = None
            if line is None:
                self._connected = False
                yield Wait(BEFORE_RECONNECTING)
                continue
            assert isinstance(line, str)
            name, _, value = line.partition(":")
            if name:
                fields[name] = value.removeprefix(" ")
            elif "data" in fields:
                event = SwarmEvent(
                    id=int(fields.get("id", self._after)),
                    kind=fields.get("event", "message"),
                    data=_object(fields["data"]),
                )
                self._after = event.id
                self.is_over = event.kind == "state" and event.data.get("state") == "finished"
                return event

    def _connect(self) -> Exchange[None]:
        requests = self._requests
        path = f"{route('events')}?after={self._after}"
        yield from exchange(requests.server, Send("GET", path, requests.key), requests.patience)
        self._connected = True


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    return value if isinstance(value, dict) else {"text": value}


# What a user passes, as messages


def end_of(
    reward: object,
    is_success: bool | None = None,
    metrics: Mapping[str, float] | None = None,
    output: object = None,
    task: Task | None = None,
) -> End:
    """The message of a result. A bool as reward is 1 or 0, and says whether the task is solved.

    Raises SwarmError `bad_reward` for what is no reward, such as NaN or a text.
    """
    if is_success is None and isinstance(reward, bool | np.bool_):
        is_success = bool(reward)
    try:
        return End.model_validate(
            {
                "reward": _wire(reward),
                "is_success": is_success,
                "metrics": _finite(metrics or {}),
                "output": output,
                "task": task,
            }
        )
    except ValidationError as error:
        raise SwarmError(
            f"{reward!r:.200} is no reward: pass a finite number, a list of numbers, a dict by"
            f" agent, or ajet.Reward ({error.errors()[0]['msg']})",
            code="bad_reward",
        ) from error


def _wire(reward: object) -> object:
    if isinstance(reward, Reward):
        return [reward.model_dump()]
    if isinstance(reward, Mapping):
        return {agent: _wire(value) for agent, value in reward.items()}
    if isinstance(reward, Sequence) and not isinstance(reward, str):
        items = list[object]()
        for item in reward:
            items.append(item.model_dump() if isinstance(item, Reward) else _wire(item))
        return items
    if isinstance(reward, np.ndarray) and reward.ndim == 0:
        reward = reward.item()
    # numpy's numbers and bools are Python's here; what is no number is refused by the message
    return float(reward) if isinstance(reward, Real | np.bool_) else reward


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def without_end() -> Abort:
    """The abort of a block that its code left without an end."""
    reason = "the block was left without episode.end(reward)"
    return Abort(reason=reason, cause="NoReward", error=reason)
