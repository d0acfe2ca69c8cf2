"""The policies of all clients: requests to each are applied once, in the order of their numbers.

A client sends requests ahead, over several connections, and again after a lost answer. It gets a
promise at once: the policy's id and the request's number. Requests are computed one at a time,
concurrently with sampling.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import shutil
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch

from ajet_sdk.dialects.json import Json
from ajet_sdk.errors import AjetError, EngineUnavailable, RequestRefused
from ajet_sdk.trainer_service.data import messages, pass_result, read_batch
from ajet_sdk.trainer_service.fields import LARGEST
from ajet_sdk.trainer_service.journal import Entry, Journal, Reply
from ajet_sdk.trainer_service.policies import (
    BaseModel,
    Checkpoints,
    Lora,
    Policy,
    adam_of,
    read_lora,
)
from ajet_sdk.trainer_service.sampling import Samplers

_log = logging.getLogger("ajet.trainer")
_SAMPLES = 4096
"""Maximum number of samples that wait for their clients."""

PASS = "forward_backward"
STEP = "optim_step"
CREATE = "create_model"
LOAD = "load_weights"
_CHANGES = (STEP, CREATE, LOAD)
"""Requests that change the weights, which are saved before they are answered."""


class Unknown(AjetError):
    """No such session, policy, checkpoint or promise."""


class Ended(AjetError):
    """The client's session was finished, and takes no more requests."""


@dataclass(slots=True)
class _Run:
    """A policy and its requests."""

    policy_id: str
    checkpoint: Path | None = None
    next: int = 0
    policy: Policy | None = None
    """In memory from its first request on, until its session is finished."""
    incomplete: str = ""
    """The reason why the gradient is incomplete, until the next step."""
    waiting: dict[int, tuple[Entry, bool]] = field(default_factory=dict)
    """Accepted requests, and whether each was answered before the server was started again."""
    done: dict[int, asyncio.Event] = field(default_factory=dict)
    working: asyncio.Task[None] | None = None

    @property
    def session_id(self) -> str:
        return self.policy_id.partition(":")[0]


class Service:
    """The state and operations behind the routes."""

    def __init__(self, base: BaseModel, samplers: Samplers, state: Path, name: str) -> None:
        """`name` is the base model's name for clients. Raises ConfigError if another server uses
        `state`."""
        self.base = base
        self.name = name
        messages()
        state.mkdir(parents=True, exist_ok=True)
        self.checkpoints = Checkpoints(state)
        self.journal = Journal(state / "journal.sqlite")
        self.samplers = samplers
        self._computing = asyncio.Lock()
        self._runs = {
            id_: _Run(id_, checkpoint, applied + 1)
            for id_, applied, checkpoint in self.journal.policies()
        }
        self._ended: set[str] = set()
        self._samples: dict[str, asyncio.Task[Reply]] = {}

    def resume(self) -> None:
        """Apply the requests accepted before the last stop."""
        for run in self._runs.values():
            for entry, replied in self.journal.unapplied(run.policy_id, run.next - 1):
                run.waiting[entry.seq] = (entry, replied)
            self._work_on(run)

    async def aclose(self) -> None:
        """Stop; the next server on this state applies the remaining requests."""
        tasks: list[asyncio.Task[object]] = [*self._samples.values()]  # type: ignore[list-item]
        tasks += [run.working for run in self._runs.values() if run.working is not None]  # type: ignore[misc]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with self._computing:  # a thread can't be cancelled
            self.journal.close()
        await self.samplers.aclose()

    # Requests to a policy

    def create(self, kind: str, session_id: str, number: int, body: Json) -> str:
        """Accept the first request to a new policy; returns its promise."""
        self.check_session(session_id)
        policy_id = f"{session_id}:train:{number}"
        self.checkpoints.directory(policy_id)  # refuses what is no id, before anything is stored
        self._runs.setdefault(policy_id, _Run(policy_id))
        return self.accept(kind, policy_id, 0, json.dumps(body).encode())

    def accept(self, kind: str, policy_id: str, seq: int | None, body: bytes) -> str:
        """Accept a request once; returns its promise. Raises Unknown, Ended, RequestRefused."""
        run = self._run(policy_id)
        self.check_session(run.session_id)
        if seq is None:
            raise RequestRefused(
                "the request has no seq_id; use the SDK (tinker 0.25 or later)", "seq_id"
            )
        if not 0 <= seq <= LARGEST:
            raise RequestRefused(
                f"seq_id must be a whole number from 0 to {LARGEST} (got {seq})", "seq_id"
            )
        known = self.journal.entry(policy_id, seq)
        if known is not None and known.kind != kind:
            raise RequestRefused(
                f"request {seq} of {policy_id} was {known.kind} and can't be {kind} now", "seq_id"
            )
        if known is None and seq < run.next:
            raise RequestRefused(f"request {seq} of {policy_id} was left out", "seq_id")
        if known is None:
            entry = Entry(policy_id, seq, kind, body)
            self.journal.add(entry)
            run.waiting[seq] = (entry, False)
            self._work_on(run)
        return f"{policy_id}:{seq}"

    def _run(self, policy_id: str) -> _Run:
        run = self._runs.get(policy_id)
        if run is None:
            raise Unknown(
                f"there is no model {policy_id} on this server; was it started with another"
                " --state? Make a new training client, of a checkpoint with"
                " create_training_client_from_state"
            )
        return run

    def _work_on(self, run: _Run) -> None:
        if run.next in run.waiting and (run.working is None or run.working.done()):
            run.working = asyncio.create_task(self._work(run))

    async def _work(self, run: _Run) -> None:
        while run.next in run.waiting:
            entry, replied = run.waiting[run.next]
            if not replied or entry.kind == PASS:  # the gradient of a pass is lost with the process
                async with self._computing:
                    await self._answer(run, entry, replied)
            del run.waiting[run.next]
            run.next += 1
            if (event := run.done.pop(entry.seq, None)) is not None:
                event.set()

    async def _answer(self, run: _Run, entry: Entry, replied: bool) -> None:
        """Apply a request and store its reply, unless it has one from before a restart."""
        changes = entry.kind in _CHANGES
        before = run.checkpoint
        try:
            checkpoint, reply = await asyncio.to_thread(self._apply, run, entry)
        except Exception as error:  # noqa: BLE001  (stored for the client)
            checkpoint = None
            reply = _failure(entry.kind, error)
            if changes:
                run.policy = None  # the state in memory may be inconsistent, unlike that on disk
            elif entry.kind == PASS and not _is_forward_only(entry):
                run.incomplete = str(error)
        if replied:
            return
        self.journal.finish(entry, reply, str(checkpoint or "") if changes else None)
        if changes:
            run.checkpoint = checkpoint or before
            run.incomplete = ""
        if checkpoint is not None and before is not None:
            await asyncio.to_thread(shutil.rmtree, before, ignore_errors=True)

    def _apply(self, run: _Run, entry: Entry) -> tuple[Path | None, Reply]:
        """Apply a request, in a thread; returns the checkpoint if the weights changed, and the
        reply."""
        if entry.kind == PASS:
            message = messages().ForwardBackwardRequest.FromString(entry.body)
            policy = self._policy(run)
            batch = read_batch(message, policy.base.tokenizer)
            logprobs, loss = policy.score(batch, backward=not message.forward_only)
            return None, Reply(pass_result(logprobs, loss), "application/x-protobuf")
        body = json.loads(entry.body)
        if entry.kind not in _CHANGES:
            path = self.checkpoints.save(run.policy_id, self._policy(run), entry.kind, body)
            session = body.get("sampling_session_seq_id")
            more = {}
            if session is not None:
                more = {"sampling_session_id": _sampler_id(run.session_id, session, path)}
            return None, Reply.json(type=entry.kind, path=path, **more)
        if entry.kind == CREATE:
            run.policy = Policy(self.base, self._lora(body))
            reply = Reply.json(type=CREATE, model_id=run.policy_id)
        elif entry.kind == LOAD:
            self._load(run, body)
            reply = Reply.json(type=LOAD, path=body["path"])
        else:
            reply = Reply.json(type=STEP, metrics=self._step(run, body))
        return self.checkpoints.keep(run.policy_id, entry.seq, self._policy(run)), reply

    def _step(self, run: _Run, body: Json) -> dict[str, float]:
        policy = self._policy(run)
        if run.incomplete:
            raise RequestRefused(
                f"no step was made: a forward_backward before it failed ({run.incomplete}), so"
                " that the gradient lacks a part; it was dropped, send the step's data again"
            )
        adam = adam_of(body.get("adam_params") or _no_other_optimiser(body.get("optimizer_params")))
        return {"grad_norm": policy.step(adam), "learning_rate": adam.learning_rate}

    def _policy(self, run: _Run) -> Policy:
        if run.policy is None:
            if run.checkpoint is None:
                raise RequestRefused(
                    f"{run.policy_id} could not be made; see the error of its first request"
                )
            run.policy = Policy.load(self.base, run.checkpoint, optimiser=True)
        return run.policy

    def _lora(self, body: Json) -> Lora:
        self.check_base(body.get("base_model"))
        _no_other_optimiser(body.get("optimizer_config"))
        lora = body.get("lora_config")
        if not lora or not 1 <= lora.get("rank", 0) <= 1024:
            raise RequestRefused(
                "this server trains LoRA adapters of a rank from 1 to 1024", "lora_config"
            )
        known = {field.name for field in fields(Lora)}
        return Lora(**{name: value for name, value in lora.items() if name in known})

    def check_base(self, base_model: str | None) -> None:
        """Raise RequestRefused for another base model."""
        same = base_model in (None, self.name, self.base.path)
        if not same and Path(str(base_model)).resolve() != Path(self.base.path).resolve():
            raise RequestRefused(
                f"this server has the base model {self.name!r} (asked for {base_model!r})",
                "base_model",
            )

    def _load(self, run: _Run, body: Json) -> None:
        if body.get("weights_access_token"):
            raise RequestRefused(
                "this server has no access tokens; all its checkpoints are its clients'"
            )
        self.check_base(body.get("base_model"))
        _no_other_optimiser(body.get("optimizer_config"))
        checkpoint = self.checkpoints.find(body["path"])
        if body.get("model_id") is None:
            run.policy = Policy.load(self.base, checkpoint, optimiser=bool(body["optimizer"]))
        else:
            self._policy(run).restore(checkpoint, optimiser=bool(body["optimizer"]))

    # Promises

    async def reply(self, promise: str, seconds: float) -> Reply | None:
        """The reply to a request; None after `seconds`. Raises Unknown, Ended."""
        if (sample := self._samples.get(promise)) is not None:
            await asyncio.wait({sample}, timeout=seconds)
            return sample.result() if sample.done() else None
        policy_id, _, number = promise.rpartition(":")
        run = self._runs.get(policy_id)
        if run is None or not number.isdigit():
            raise Unknown(f"there is no request {promise} on this server; was it started anew?")
        seq = int(number)
        if (reply := self.journal.reply(policy_id, seq)) is not None:
            return reply
        if seq < run.next:
            raise Unknown(f"the reply of {promise} is no longer kept")
        self.check_session(run.session_id)
        event = run.done.setdefault(seq, asyncio.Event())
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(event.wait(), seconds)
        return self.journal.reply(policy_id, seq)

    def holds_up(self, promise: str) -> str:
        """A message about a missing earlier request for which this one waits; empty if it is
        running."""
        run = self._runs.get(promise.rpartition(":")[0])
        if run is None or run.next in run.waiting or not run.waiting:
            return ""
        return (
            f"request {run.next} of {run.policy_id} has not arrived, for which {len(run.waiting)}"
            " others wait"
        )

    # Sampling and sessions

    def open_sampler(
        self, session_id: str, number: int, base_model: str | None, path: str | None
    ) -> str:
        """Open a sampling session. Raises Ended, RequestRefused, CheckpointError."""
        self.check_session(session_id)
        if path is None:
            self.check_base(base_model)
        else:
            self.checkpoints.find(path)
        return _sampler_id(session_id, number, path)

    def sample(self, sampler_id: str, seq: int, body: Json) -> str:
        """Start sampling, once per request; returns the promise. Raises Unknown, Ended."""
        promise = f"{sampler_id}:{seq}"
        if promise not in self._samples:
            path = sampler_path(sampler_id)
            self.check_session(sampler_id.partition(":")[0])
            self._samples[promise] = asyncio.create_task(self._sample(path, body))
            done = [id_ for id_, task in self._samples.items() if task.done()]
            for old in done[: max(0, len(self._samples) - _SAMPLES)]:
                del self._samples[old]
        return promise

    async def _sample(self, path: str | None, body: Json) -> Reply:
        try:
            checkpoint = None if path is None else self.checkpoints.place(path)
            if (
                path is not None and checkpoint not in self.samplers
            ):  # loaded weights may have been deleted on disk
                checkpoint = self.checkpoints.find(path)
            return Reply(await self.samplers.sample(checkpoint, body), "application/x-protobuf")
        except Exception as error:  # noqa: BLE001  (stored for the client)
            return _failure("asample", error)

    def check_session(self, session_id: str) -> None:
        """Raise Ended if the session was finished."""
        if session_id in self._ended:
            raise Ended(
                f"session {session_id} was finished; make a new ServiceClient, which can load its"
                " checkpoints"
            )

    def finish(self, session_id: str) -> None:
        """End a client's session; its policies are unloaded but stay on disk."""
        self._ended.add(session_id)
        for run in self._runs.values():
            if run.session_id == session_id and not run.waiting:
                run.policy = None
        for promise in list(self._samples):
            if promise.startswith(f"{session_id}:"):
                self._samples.pop(promise).cancel()

    # What there is

    def about(self, policy_id: str) -> dict[str, object]:
        """Describes a policy in the API's format. Raises Unknown."""
        run = self._run(policy_id)
        lora = read_lora(run.checkpoint) if run.checkpoint else None
        made = self.journal.entry(policy_id, 0)
        return {
            "model_id": policy_id,
            "is_lora": True,
            "lora_rank": lora and lora.rank,
            "model_name": self.name,
            "model_data": {
                "arch": type(self.base.model).__name__,
                "model_name": self.name,
                "tokenizer_id": self.name,
            },
            "user_metadata": json.loads(made.body).get("user_metadata") if made else None,
        }

    def policies(self, policy_id: str | None = None) -> list[str]:
        """Ids of all policies, oldest first, or only `policy_id`. Raises Unknown."""
        if policy_id is None:
            return list(self._runs)
        return [self._run(policy_id).policy_id]


def _sampler_id(session_id: str, number: int, path: str | None) -> str:
    """The id of a sampling session, which has the path of its weights in it: there is nothing to
    store."""
    encoded = base64.urlsafe_b64encode((path or "").encode()).decode().rstrip("=")
    return f"{session_id}:sample:{number}:{encoded}"


def sampler_path(sampler_id: str) -> str | None:
    """The path of a sampling session's weights; None for the base model. Raises Unknown."""
    try:
        session_id, kind, number, encoded = sampler_id.split(":")
        path = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode() or None
        if kind == "sample" and sampler_id == _sampler_id(session_id, int(number), path):
            return path
    except ValueError:
        pass
    raise Unknown(f"there is no sampling session {sampler_id:.100}; make a new sampling client")


def _is_forward_only(entry: Entry) -> bool:
    return bool(messages().ForwardBackwardRequest.FromString(entry.body).forward_only)


def _no_other_optimiser(config: Json | None) -> Json:
    if config and config.get("type", "adamw") != "adamw":
        raise RequestRefused(
            f"the optimizer {config['type']!r} is not here; this server has AdamW",
            "optimizer_config",
        )
    return dict(config or {})


def _failure(kind: str, error: Exception) -> Reply:
    """The reply for a failed request, as an error of the client or of the server."""
    if isinstance(error, torch.OutOfMemoryError):
        return Reply.error(
            "out of GPU memory; send shorter sequences, or start the server with --max-model-len",
            "server",
        )
    if isinstance(error, KeyError):
        return Reply.error(f"the request lacks {error}", "user")
    if isinstance(error, AjetError) and not isinstance(error, EngineUnavailable):
        return Reply.error(str(error), "user")
    _log.exception("%s failed.", kind)
    return Reply.error(f"{type(error).__name__}: {error}", "server")
