"""AgentJet's routes of a swarm server, as a face of ours: programs written for its swarm join here.

An episode's `episode_uuid` is signed, since AgentJet's clients send no key with an end: only who
claimed the episode can end it. Lists of episodes have ids that open nothing.
"""

from __future__ import annotations

import hmac
import logging
import math
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ajet_sdk.config.agentjet import COLLECTION_METHODS, for_swarm
from ajet_sdk.errors import AjetError, ConfigError, TraceError
from ajet_sdk.samples.build import has_signal
from ajet_sdk.swarm.agentjet.messages import (
    STATES,
    ActiveClient,
    AgreeSyncWeightRequest,
    CanContinueEpisodeRequest,
    ClaimEpisodeRequest,
    ClaimEpisodeResponse,
    CurrentBatchRolloutPoolInformation,
    EndEpisodeRequest,
    EpisodeBufferResponse,
    EpisodeStatus,
    SwarmClientInstruction,
    SyncTrainConfigRequest,
    VerboseLog,
)
from ajet_sdk.swarm.attempts import OpenAttempt
from ajet_sdk.swarm.clients import ACTIVE_CLIENT
from ajet_sdk.swarm.collection import Collection
from ajet_sdk.swarm.messages import Abort, Claim, End, ServerState
from ajet_sdk.swarm.refusals import Refused
from ajet_sdk.swarm.routes import SwarmRoutes, reached_at, read, reply
from ajet_sdk.types import Task, new_id

log = logging.getLogger("ajet")

WAIT = 20.0
"""Seconds for which a claim is held; AgentJet's clients give up after 30."""
LOG_LINES = 50
LOG_SECONDS = 30.0
"""Lines of clients that `/get_verbose_logs` returns, and their age."""
LONGEST_LINE = 2000

_PLEASE: dict[str, str] = {
    "offline": "Please start the engine first (sync_train_config, start_engine).",
    "booting": "Please wait until the engine is fully booted.",
    "updating": "Engine is syncing weights. Try again later.",
    "saving": "Engine is exporting weights. Try again later.",
    "closing": "Engine is in post-rolling phase. Try again later.",
    "finished": "The training is finished.",
}
"""What a refused claim says by the code of its refusal; clients look for parts of these texts."""


class _Denied(Exception):
    """A request that AgentJet's server would refuse, with its status and detail."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


Handler = Callable[[Request], Awaitable[Response]]


def agentjet_routes(routes: SwarmRoutes) -> list[BaseRoute]:
    """The routes of AgentJet's clients, which do what `routes` do."""
    return AgentJetFace(routes).routes()


class AgentJetFace:
    """The handlers of AgentJet's routes."""

    def __init__(self, routes: SwarmRoutes) -> None:
        self._routes = routes
        self._log: deque[tuple[float, VerboseLog]] = deque(maxlen=LOG_LINES)

    def routes(self) -> list[BaseRoute]:
        """All routes."""
        listed: list[tuple[str, str, Literal["worker", "owner", "anyone"], Handler]] = [
            ("GET", "/health", "anyone", self.health),
            ("POST", "/sync_train_config", "owner", self.sync_train_config),
            ("POST", "/sync_train_code", "owner", self.sync_train_code),
            ("POST", "/start_engine", "owner", self.start_engine),
            ("POST", "/stop_engine", "owner", self.stop_engine),
            ("GET", "/get_engine_status", "worker", self.get_engine_status),
            ("GET", "/get_server_experiment_dir", "worker", self.get_server_experiment_dir),
            ("POST", "/claim_episode", "worker", self.claim_episode),
            ("POST", "/end_episode", "worker", self.end_episode),
            ("POST", "/abort_episode", "worker", self.abort_episode),
            ("POST", "/can_continue_episode", "worker", self.can_continue_episode),
            ("POST", "/agree_sync_weight", "worker", self.agree_sync_weight),
            ("POST", "/get_episode_buffer", "worker", self.get_episode_buffer),
            (
                "GET",
                "/get_current_batch_rollout_pool_information",
                "worker",
                self.get_pool_information,
            ),
            ("POST", "/push_verbose_log", "worker", self.push_verbose_log),
            ("GET", "/get_verbose_logs", "worker", self.get_verbose_logs),
        ]
        return [
            Route(path, self._guarded(holder, handler), methods=[method])
            for method, path, holder, handler in listed
        ]

    def _guarded(self, holder: Literal["worker", "owner", "anyone"], handler: Handler) -> Handler:
        async def handle(request: Request) -> Response:
            try:
                if holder != "anyone":
                    self._routes.check_access(request, holder)
                return await handler(request)
            except _Denied as error:
                return _detail(error.status, str(error))
            except Refused as error:
                return _detail(error.status, str(error))
            except ConfigError as error:
                return _detail(422, str(error))
            except TraceError as error:
                return _detail(500, str(error))
            except AjetError as error:
                return _detail(503, str(error))

        return handle

    @property
    def _state(self) -> ServerState:
        return self._routes.host.state

    def _collection(self, request: str) -> Collection:
        """The run in progress. Raises _Denied without one."""
        collection = self._routes.host.collection
        if collection is None or self._state not in ("collecting", "closing", "updating", "saving"):
            raise _Denied(
                400,
                f"Engine is not in rolling state. Current status: [{STATES[self._state]}]."
                f" Cannot {request}.",
            )
        return collection

    # The engine

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def sync_train_config(self, request: Request) -> Response:
        sent = await read(request, SyncTrainConfigRequest)
        self._check_offline()
        text, changed = for_swarm(sent.yaml_as_string)
        await self._routes.owner.configure(text)
        for line in changed:
            self._routes.host.board.emit("message", text=line)
        if changed:
            log.info("The config of a client of AgentJet: %s", "; ".join(changed))
        return JSONResponse({"success": True})

    def _check_offline(self) -> None:
        if STATES[self._state] != "ENGINE.OFFLINE":
            raise _Denied(
                400, "Engine is already started. Call `stop_engine` first before changing it."
            )

    async def sync_train_code(self, request: Request) -> Response:
        raise _Denied(
            400,
            "sync_train_code is refused: this server runs no code of its clients. Agent and judge"
            " run where the client is; what changes the training is a key of its config",
        )

    async def start_engine(self, request: Request) -> Response:
        self._check_offline()
        try:
            await self._routes.owner.start()
        except Refused as error:
            return JSONResponse({"success": False, "error": str(error)})
        return JSONResponse({"success": True, "pid": os.getpid()})

    async def stop_engine(self, request: Request) -> Response:
        await self._routes.owner.stop()
        stopped = STATES[self._state] == "ENGINE.OFFLINE"
        reason = "" if stopped else f"the engine is {STATES[self._state]}"
        return JSONResponse({"success": stopped, "failure_reason": reason})

    async def get_engine_status(self, request: Request) -> Response:
        host = self._routes.host
        return JSONResponse(
            {
                "engine_status": STATES[host.state],
                "engine_status_detail": host.status().waiting,
                "global_step": None if host.collection is None else host.collection.done,
            }
        )

    async def get_server_experiment_dir(self, request: Request) -> Response:
        collection = self._routes.host.collection
        directory = None
        if collection is not None:
            directory = str(collection.settings.config.directory.resolve())
        return JSONResponse({"server_experiment_dir": directory})

    async def agree_sync_weight(self, request: Request) -> Response:
        sent = await read(request, AgreeSyncWeightRequest)
        self._routes.host.clients.seen(sent.client_uuid)
        accepted, reason = self._collection("agree").agree(sent.client_uuid)
        return JSONResponse({"success": accepted, "failure_reason": reason})

    # Episodes

    async def claim_episode(self, request: Request) -> Response:
        sent = await read(request, ClaimEpisodeRequest)
        if sent.episode_type not in ("train", "eval"):
            raise _Denied(400, f"Unknown episode_type: {sent.episode_type}")
        host = self._routes.host
        address = request.client.host if request.client is not None else ""
        try:
            claimed, _ = await host.claim(_claim_of(sent), address, request.is_disconnected)
        except Refused as error:
            cause = self._fail_cause(error)
            return reply(ClaimEpisodeResponse(client_uuid=sent.client_uuid, fail_cause=cause))
        base_url = claimed.base_url.replace(
            host.gateway.url, reached_at(request, host.gateway.url), 1
        )
        return reply(
            ClaimEpisodeResponse(
                success=True,
                client_uuid=sent.client_uuid,
                episode_uuid=_uuid_of(host.running(), claimed.episode_id),
                openai_base_url=base_url,
                openai_api_key=claimed.api_key,
            )
        )

    def _fail_cause(self, error: Refused) -> str:
        please = _PLEASE.get(error.code)
        if error.code in ("full", "group_full", "kind_full"):
            return f"No available episodes to claim. {error}"
        if please is None:
            return str(error)
        return f"Engine not ready. Current status: [{STATES[self._state]}]. {please} ({error})"

    async def end_episode(self, request: Request) -> Response:
        sent = await read(request, EndEpisodeRequest)
        collection = self._collection("end episode")
        episode_id = self._episode_of(collection, sent.episode_uuid)
        attempt = collection.attempts.open.get(episode_id)
        if attempt is not None and attempt.claim.client_id != sent.client_uuid:
            raise _Denied(
                404,
                f"Episode {episode_id} is claimed by different client:"
                f" {attempt.claim.client_id}, but got {sent.client_uuid}.",
            )
        end = _end_of(sent)
        try:
            await collection.attempts.end(episode_id, end)
        except Refused as error:
            raise _Denied(400, self._refused_end(episode_id, error)) from error
        return JSONResponse({"success": True})

    def _refused_end(self, episode_id: str, error: Refused) -> str:
        status = f"Current status: [{STATES[self._state]}]."
        if error.code == "episode_over":
            return (
                f"Episode {episode_id} is not in claimed status, maybe you take **too long** to"
                f" submit the workflow output, try increase `discard_episode_timeout`: {error}."
                f" {status}"
            )
        return f"{error}. {status}"

    async def abort_episode(self, request: Request) -> Response:
        sent = await read(request, EndEpisodeRequest)
        collection = self._routes.host.collection
        if collection is None:
            episode_id = ""
        else:
            episode_id = _id_of(collection, sent.episode_uuid)
        if collection is None:
            attempt = None
        else:
            attempt = collection.attempts.open.get(episode_id)
        mine = attempt is not None and attempt.claim.client_id == sent.client_uuid
        if collection is not None and mine:
            abort = Abort(reason="aborted by its client", error="aborted by its client")
            with suppress(Refused):  # it ended in the meantime
                await collection.attempts.abort(episode_id, abort)
        return JSONResponse({"success": True})

    async def can_continue_episode(self, request: Request) -> Response:
        sent = await read(request, CanContinueEpisodeRequest)
        collection = self._routes.host.collection
        attempt = None
        if collection is not None:
            attempt = collection.attempts.open.get(_id_of(collection, sent.episode_uuid))
        can_continue = (
            attempt is not None
            and attempt.result is None
            and attempt.claim.client_id == sent.client_uuid
        )
        return JSONResponse({"can_continue": can_continue})

    @staticmethod
    def _episode_of(collection: Collection, episode_uuid: str) -> str:
        episode_id = _id_of(collection, episode_uuid)
        if not episode_id:
            raise _Denied(400, f"Episode {episode_uuid[:80]} not found.")
        return episode_id

    # Looking

    async def get_episode_buffer(self, request: Request) -> Response:
        collection = self._routes.host.collection
        open_ones = [] if collection is None else collection.attempts.open.values()
        return reply(EpisodeBufferResponse(buffer=list(map(_episode_status, open_ones))))

    async def get_pool_information(self, request: Request) -> Response:
        host = self._routes.host
        information = CurrentBatchRolloutPoolInformation()
        if host.collection is not None:
            information = _pool_information(host.collection)
        told = {"engine_status": STATES[host.state], "swarm_client_instruction": self._clients()}
        return reply(information.model_copy(update=told))

    def _clients(self) -> SwarmClientInstruction:
        host = self._routes.host
        if host.collection is None:
            agreed = set()
        else:
            agreed = host.collection.pool.agreed
        active = [
            ActiveClient(
                client_uuid=info.client_id,
                last_activity_at=time.time() - info.last_seen,
                allowed_sync_weight=info.client_id in agreed,
            )
            for info in host.clients.infos()
            if info.last_seen < ACTIVE_CLIENT
        ]
        return SwarmClientInstruction(active_clients=active)

    async def push_verbose_log(self, request: Request) -> Response:
        sent = await read(request, VerboseLog)
        cut = VerboseLog(tag=sent.tag[:LONGEST_LINE], message=sent.message[:LONGEST_LINE])
        self._log.append((time.time(), cut))
        return JSONResponse({"success": True, "failure_reason": ""})

    async def get_verbose_logs(self, request: Request) -> Response:
        oldest = time.time() - LOG_SECONDS
        entries = [
            {"timestamp": moment, "tag": line.tag, "message": line.message}
            for moment, line in self._log
            if moment >= oldest
        ]
        return JSONResponse({"entries": entries})


def _detail(status: int, text: str) -> Response:
    return JSONResponse({"detail": text}, status)


def _claim_of(sent: ClaimEpisodeRequest) -> Claim:
    """Our claim. Raises Refused for values that no claim may have."""
    timeout = sent.discard_episode_timeout
    if not (math.isfinite(timeout) and timeout > 0):
        raise Refused(
            422, "bad_request", f"discard_episode_timeout must be above 0 (got {timeout})"
        )
    policy = sent.throttle_policy
    task_id = policy.current_task_id if policy is not None else ""
    if task_id and sent.episode_type == "train":
        planned = Task(task_id=task_id)
    else:
        planned = None
    try:
        return Claim(
            request_id=new_id(),
            client_id=sent.client_uuid,
            task=planned,
            task_at_end=planned is None,
            split="train" if sent.episode_type == "train" else "val",
            idle_timeout=float(timeout),
            wait=WAIT,
        )
    except ValueError as error:
        raise Refused(
            422, "bad_request", f"client_uuid is no id: {sent.client_uuid!r:.80}"
        ) from error


def _uuid_of(collection: Collection, episode_id: str) -> str:
    """The signed name of an episode, which only its claim returns."""
    return collection.attempts.key_of("uuid", episode_id)


def _id_of(collection: Collection, episode_uuid: str) -> str:
    """The id of the episode that was claimed under this name; empty for a forged one."""
    named, _, _ = episode_uuid.removeprefix("ajet-").rpartition("-")
    episode_id = named[1:]
    known = _uuid_of(collection, episode_id).encode("utf-8", "replace")
    given = episode_uuid.encode("utf-8", "replace")
    return episode_id if hmac.compare_digest(known, given) else ""


def _end_of(sent: EndEpisodeRequest) -> End:
    """Our end, which always names its task. Raises _Denied."""
    output = sent.workflow_output
    if not sent.task_id or output.metadata.get("task_id", sent.task_id) != sent.task_id:
        raise _Denied(
            400, "workflow_output.metadata.task_id must match task_id, which must not be empty"
        )
    told = {name: value for name, value in output.metadata.items() if name != "task_id"}
    metrics = {
        name: float(value)
        for name, value in output.log_metrics.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
    try:
        return End(
            reward=output.reward,
            is_success=output.is_success,
            metrics=metrics,
            output=told or None,
            task=Task(task_id=sent.task_id),
        )
    except ValueError as error:
        raise _Denied(
            400, f"workflow_output.reward must be a finite number or a list of them: {error}"
        ) from error


def _episode_status(attempt: OpenAttempt) -> EpisodeStatus:
    task = attempt.claim.task
    return EpisodeStatus(
        episode_uuid=attempt.episode_id,
        episode_status="claimed",
        episode_type="train" if attempt.claim.split == "train" else "eval",
        client_uuid=attempt.claim.client_id,
        latest_activity_timestamp=time.time() - attempt.idle(),
        discard_episode_timeout=attempt.claim.idle_timeout,
        llm_call_count=len(attempt.opened.calls),
        optional_task_id="" if task is None else task.task_id,
    )


def _pool_information(collection: Collection) -> CurrentBatchRolloutPoolInformation:
    pool = collection.pool
    goal = collection.pool.goal
    methods = {here: there for there, here in COLLECTION_METHODS.items()}
    episodes: dict[str, list[str]] = {}
    clients: dict[str, list[str]] = {}
    for group in pool.groups:
        for episode in group.ended:
            episodes.setdefault(group.task_id, []).append(episode.episode_id)
            clients.setdefault(group.task_id, []).append(episode.client)
    complete = pool.complete
    return CurrentBatchRolloutPoolInformation(
        sample_collection_method=methods[goal.rule],
        completed_episodes=sum(map(len, episodes.values())),
        completed_episode_target=goal.groups * goal.attempts,
        completed_tasks=len(complete),
        completed_task_target=goal.groups,
        completed_non_dummy_tasks=sum(has_signal(group.ended) for group in complete),
        completed_non_dummy_task_target=goal.groups,
        task_expected_num_repeat=goal.attempts,
        completed_tasks_details=episodes,
        completed_tasks_client_uuids=clients,
        running_episode_details=_running(collection) or None,
        global_step=collection.done,
        training_model_path=str(collection.settings.config.model.path or ""),
    )


def _running(collection: Collection) -> dict[str, dict[str, str]]:
    """The open episodes, with texts as AgentJet's screens show them."""
    listed: dict[str, dict[str, str]] = {}
    for attempt in collection.attempts.open.values():
        status = _episode_status(attempt)
        listed[attempt.episode_id] = {
            "episode_status": status.episode_status,
            "time_since_last_activity": f"{attempt.idle():.1f}s",
            "discard_episode_timeout": f"{status.discard_episode_timeout:.1f}s",
            "llm_call_count": str(status.llm_call_count),
            "client_uuid": status.client_uuid,
            "optional_task_id": status.optional_task_id,
        }
    return listed
