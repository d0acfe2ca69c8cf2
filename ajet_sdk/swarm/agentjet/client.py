"""AgentJet's client of a swarm, on top of ours: its programs run unchanged at our server.

Programs import `SwarmClient` from `ajet.tuner_lib.experimental.swarm_client`. Episodes are claimed
and ended by our protocol (`client.py`): without polls, with repeated requests over a restart of the
server, and by a key of their own. What is only looked at comes from AgentJet's routes.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn
from urllib.parse import urlsplit

import httpx
import yaml
from pydantic import BaseModel, ConfigDict

from ajet_sdk.agent.agentscope import chat_model
from ajet_sdk.agent.model import Model
from ajet_sdk.config.agentjet import COLLECTION_METHODS
from ajet_sdk.errors import (
    ConfigError,
    EpisodeOver,
    SwarmError,
    SwarmFinished,
    SwarmOffline,
)
from ajet_sdk.swarm import client as swarm_client
from ajet_sdk.swarm.agentjet.messages import (
    CurrentBatchRolloutPoolInformation,
    EpisodeBufferResponse,
    EpisodeStatus,
    SwarmThrottlePolicy,
)
from ajet_sdk.swarm.agentjet.threads import PeriodicDrainThreadPoolExecutor, run_all
from ajet_sdk.swarm.episodes import Episode
from ajet_sdk.types import Task

if TYPE_CHECKING:
    from ajet_sdk.agent.workflow import WorkflowOutput

log = logging.getLogger("ajet")

CANNOT_CONNECT = "ENGINE.CANNOT_CONNECT"
COLLECTING = ("ENGINE.ROLLING", "ENGINE.ROLLING_POST")
LOOK = 0.5
"""Seconds between two looks at the state."""
BOOT = 3600.0
"""Seconds for which a start is waited for."""
CONTEXT = 32_768
"""Context that AgentScope is told; the server has its own limit."""
LOCAL = ("localhost", "127.0.0.1", "::1")


class SwarmServerOfflineError(Exception):
    """The server trains nothing: it was not started, has failed, or is finished."""


class OpenaiBaseUrlAndApiKey(BaseModel):
    """Where an episode's calls go, and its key."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow")

    base_url: str = ""
    api_key: str = ""
    model: str = "reserved_field"
    episode_uuid: str = ""

    def as_agentscope_model(self, *_: object, **__: object) -> Any:
        """A chat model of the installed AgentScope."""
        model = Model(self.base_url, self.api_key, self.model)
        return chat_model(model, context_size=CONTEXT)

    def as_raw_openai_sdk_client(self, *_: object, **__: object) -> Any:
        """An `AsyncOpenAI`."""
        from openai import AsyncOpenAI

        return AsyncOpenAI(api_key=self.api_key, base_url=self.base_url)


class SwarmClient:
    """AgentJet's client. It may be used from any number of threads."""

    def __init__(
        self,
        server_url: str,
        verbose: bool = True,
        agentjet_job: Any = None,
        auto_start_swarm_server: bool = False,
    ) -> None:
        """The key is that of AJET_SWARM_OWNER_KEY, else of AJET_SWARM_KEY. Nothing is requested
        yet, unless a server is started.

        Args:
            server_url: the server's URL.
            verbose: log each episode.
            agentjet_job: the job that `agree_sync_weight` reads its stop rule from.
            auto_start_swarm_server: start `ajet-swarm start` on this machine if nothing answers.
        """
        self.server_url = server_url.rstrip("/")
        self.verbose = verbose
        key = os.environ.get("AJET_SWARM_OWNER_KEY") or os.environ.get("AJET_SWARM_KEY")
        self._swarm = swarm_client.SwarmClient(server_url, key)
        self.client_uuid = self._swarm.client_id
        self._job = agentjet_job
        self._episodes: dict[str, Episode] = {}
        self._callbacks: list[Callable[[], object]] = []
        self._watcher: threading.Thread | None = None
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(base_url=self._swarm.url, headers=headers, timeout=30.0)
        if auto_start_swarm_server and self.get_engine_status()[0] == CANNOT_CONNECT:
            self._start_server()

    # Episodes

    def begin_episode(
        self,
        discard_episode_timeout: float = 240,
        episode_type: str = "train",
        throttle_policy: SwarmThrottlePolicy | None = None,
    ) -> tuple[str, OpenaiBaseUrlAndApiKey]:
        """Wait for an episode; returns its id, and where its calls go.

        Args:
            discard_episode_timeout: seconds without a call after which the server gives it up.
            episode_type: `train`, or `eval`: an attempt of a validation, which is not trained.
            throttle_policy: names the task, whose group the server then plans.

        Raises:
            SwarmServerOfflineError: the server trains nothing.
        """
        if episode_type not in ("train", "eval"):
            raise ConfigError(f"episode_type must be train or eval (got {episode_type!r})")
        if throttle_policy is not None:
            planned = throttle_policy.current_task_id
        else:
            planned = ""
        names_task = bool(planned) and episode_type == "train"
        claim = self._swarm.claim_of(
            Task(task_id=planned) if names_task else None,
            split="train" if episode_type == "train" else "val",
            idle_timeout=discard_episode_timeout,
            attempt=None,
            decoding=None,
            task_at_end=not names_task,
        )
        try:
            claimed = self._swarm.run(self._swarm.requests.claim(claim, None))
        except (SwarmOffline, SwarmFinished) as error:
            raise SwarmServerOfflineError(str(error)) from error
        self._episodes[claimed.episode_id] = Episode(self._swarm, claimed)
        if self.verbose:
            log.info("Claimed episode %s of step %d", claimed.episode_id, claimed.step)
        return claimed.episode_id, OpenaiBaseUrlAndApiKey(
            base_url=claimed.base_url,
            api_key=claimed.api_key,
            model=claimed.model,
            episode_uuid=claimed.episode_id,
        )

    def end_episode(
        self,
        task: Task | Mapping[str, Any],
        episode_uuid: str,
        workflow_output: WorkflowOutput,
        declare_client_active: bool = True,
    ) -> None:
        """Report the result; it is on the server's disk when this returns.

        An episode that idled out is lost, with a warning: its tokens are `abandoned` in the ledger.
        Raises SwarmError for what is no reward, and for an episode without a call.
        """
        episode = self._open(episode_uuid)
        if episode is None:
            return
        metrics = {
            name: float(value)
            for name, value in workflow_output.log_metrics.items()
            if isinstance(value, int | float)
        }
        told = {name: v for name, v in workflow_output.metadata.items() if name != "task_id"}
        try:
            receipt = episode.end(
                workflow_output.reward,
                is_success=workflow_output.is_success,
                metrics=metrics,
                output=_as_json(told) or None,
                task=task,
            )
        except EpisodeOver as error:
            log.warning("Episode %s came too late, and is not trained: %s", episode_uuid, error)
            self._episodes.pop(episode_uuid, None)
            return
        self._episodes.pop(episode_uuid, None)
        if self.verbose:
            log.info("Ended episode %s with reward %s", episode_uuid, receipt.reward)

    def abort_episode(self, episode_uuid: str, declare_client_active: bool = True) -> None:
        """Give an episode up; its place is free for another attempt."""
        episode = self._open(episode_uuid)
        self._episodes.pop(episode_uuid, None)
        if episode is None:
            return
        try:
            episode.abort("aborted by its client")
        except SwarmError as error:
            log.warning("Episode %s could not be aborted: %s", episode_uuid, error)

    def can_continue_episode(self, episode_uuid: str) -> bool:
        """Whether the episode is open. A question about it does not keep it open."""
        if episode_uuid not in self._episodes:
            return False
        try:
            return any(status.episode_uuid == episode_uuid for status in self.get_episode_buffer())
        except (httpx.HTTPError, SwarmError):
            return False

    def _open(self, episode_uuid: str) -> Episode | None:
        episode = self._episodes.get(episode_uuid)
        if episode is None:
            log.warning("This client has no open episode %s", episode_uuid)
        return episode

    # The engine

    def sync_train_config(self, agentjet_job: Any) -> None:
        """Send a job's config to a server that is offline; needs an owner's key."""
        self._job = agentjet_job
        text = yaml.safe_dump(agentjet_job.config.to_dict(), sort_keys=False)
        self._post("/sync_train_config", yaml_as_string=text)

    def sync_train_code(self, zip_file_path: str) -> NoReturn:
        """Refused: the server runs no code of its clients."""
        raise RuntimeError(
            "sync_train_code is refused: a server of ajet runs no code of its clients. Agent and"
            " judge run where the client is; what changes the training is a key of its config"
        )

    def sync_train_code_from_dir(
        self, directory_path: str, force_restart: bool = False
    ) -> NoReturn:
        """Refused, as `sync_train_code`."""
        self.sync_train_code(directory_path)

    def start_engine(self) -> None:
        """Start the training, and wait until it takes episodes."""
        started = self._post("/start_engine")
        if not started.get("success"):
            raise RuntimeError(f"the training did not start: {started.get('error')}")
        self._await_rolling()

    def stop_engine(self) -> None:
        """Stop the training, with a checkpoint."""
        if self.get_engine_status()[0] == "ENGINE.OFFLINE":
            return
        stopped = self._post("/stop_engine", timeout=600.0)
        if not stopped.get("success"):
            raise RuntimeError(f"the training did not stop: {stopped.get('failure_reason')}")

    def auto_sync_train_config_and_start_engine(
        self, agentjet_job: Any, force_restart: bool = False
    ) -> None:
        """Start the training of a job unless one runs already; `force_restart` stops that first."""
        self._job = agentjet_job
        if force_restart:
            self.stop_engine()
        state, _ = self.get_engine_status()
        if state == CANNOT_CONNECT:
            time.sleep(16)
            state, _ = self.get_engine_status()
        if state == CANNOT_CONNECT:
            raise RuntimeError(f"no swarm server answers at {self.server_url}")
        if state == "ENGINE.OFFLINE":
            self.sync_train_config(agentjet_job)
            self.start_engine()
        elif state in COLLECTING:
            log.warning("%s trains already, with the config that it has", self.server_url)
        else:
            self._await_rolling()

    @staticmethod
    def async_and_start_multi_engine(
        client_job_pairs: Iterable[tuple[SwarmClient, Any]], force_restart: bool = False
    ) -> None:
        """Start several servers at once. Raises RuntimeError with the errors of those that fail."""
        errors: list[str] = []

        def start(client: SwarmClient, job: Any) -> None:
            try:
                client.auto_sync_train_config_and_start_engine(job, force_restart=force_restart)
            except Exception as error:  # noqa: BLE001 - reported with those of the others
                errors.append(f"{client.server_url}: {error}")

        threads = [threading.Thread(target=start, args=pair) for pair in client_job_pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise RuntimeError(f"{len(errors)} servers did not start: {'; '.join(errors)}")

    def agree_sync_weight(self) -> bool:
        """Agree to train what was collected, and wait until that begins. False if the server has
        left the step."""
        rule = getattr(self._job, "swarm_mode_sample_collection_method", None)
        if rule is not None and COLLECTION_METHODS.get(rule) not in ("any_client", "all_clients"):
            raise ConfigError(f"agree_sync_weight needs a stop rule by consent (got {rule})")
        before = self.get_global_step()
        while True:
            if self.get_engine_status()[0] not in COLLECTING or self.get_global_step() != before:
                return False
            agreed = self._swarm.agree()
            if agreed.accepted:
                break
            log.warning("The server does not take the consent yet: %s", agreed.reason)
            time.sleep(2)
        while self.get_engine_status()[0] == "ENGINE.ROLLING" and self.get_global_step() == before:
            time.sleep(LOOK)
        return True

    # Looking

    def get_engine_status(self) -> tuple[str, dict[str, Any]]:
        """The state, such as `ENGINE.ROLLING`, and the server's answer."""
        try:
            status = self._get("/get_engine_status")
        except (httpx.HTTPError, SwarmError) as error:
            log.debug("No answer of %s: %s", self.server_url, error)
            return CANNOT_CONNECT, {}
        return str(status.get("engine_status")), status

    def get_global_step(self) -> int | None:
        """Finished steps; None while the server is offline."""
        step: int | None = self.get_engine_status()[1].get("global_step")
        return step

    def get_rollout_stat(self) -> CurrentBatchRolloutPoolInformation:
        """The step that is collected, against its target."""
        information = self._get("/get_current_batch_rollout_pool_information")
        return CurrentBatchRolloutPoolInformation.model_validate(information)

    def print_rollout_stat(self) -> None:
        """Log one line about the step."""
        stat = self.get_rollout_stat()
        log.info(
            "%s step %s: %d of %d tasks complete, %d of %d episodes ended",
            stat.engine_status,
            stat.global_step,
            stat.completed_tasks,
            stat.completed_task_target,
            stat.completed_episodes,
            stat.completed_episode_target,
        )

    def get_episode_buffer(self) -> list[EpisodeStatus]:
        """The open episodes of all clients, without their keys."""
        return EpisodeBufferResponse.model_validate(self._post("/get_episode_buffer")).buffer

    def server_experiment_dir(self) -> str | None:
        """The directory of the run on the server's machine; None before the start."""
        directory: str | None = self._get("/get_server_experiment_dir")["server_experiment_dir"]
        return directory

    def add_entering_weight_sync_callback(self, callback: Callable[[], object]) -> None:
        """Call a function each time an update begins."""
        self._callbacks.append(callback)
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="ajet-swarm", daemon=True)
            self._watcher.start()

    def _watch(self) -> None:
        last = 0
        while True:
            try:
                for event in self._swarm.events(last):
                    last = event.id
                    if event.kind == "state" and event.data.get("state") == "updating":
                        self._call_back()
            except SwarmError as error:
                log.debug("No events of %s: %s", self.server_url, error)
            time.sleep(LOOK)

    def _call_back(self) -> None:
        for callback in list(self._callbacks):
            try:
                callback()
            except Exception:
                log.exception("A callback of add_entering_weight_sync_callback failed")

    # Requests

    def _await_rolling(self) -> None:
        deadline = time.monotonic() + BOOT
        while time.monotonic() < deadline:
            state, status = self.get_engine_status()
            if state == "ENGINE.ROLLING":
                return
            if state == "ENGINE.OFFLINE":
                raise SwarmServerOfflineError(
                    f"the training did not start: {status.get('engine_status_detail')}"
                )
            time.sleep(LOOK)
        raise TimeoutError(f"{self.server_url} did not take episodes within {BOOT:g} s")

    def _get(self, path: str) -> dict[str, Any]:
        return self._answer(self._http.get(path))

    def _post(self, path: str, *, timeout: float = 30.0, **body: Any) -> dict[str, Any]:
        return self._answer(self._http.post(path, json=body, timeout=timeout))

    def _answer(self, response: httpx.Response) -> dict[str, Any]:
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise SwarmError(f"{response.url} is no route of a swarm's server", code="not_a_swarm")
        if response.is_error:
            raise SwarmError(
                f"{response.url}: {answer.get('detail', answer)}",
                code="refused",
                status=response.status_code,
            )
        return answer

    def _start_server(self) -> None:
        parts = urlsplit(self._swarm.url)
        if parts.hostname not in LOCAL:
            raise ConfigError(
                f"auto_start_swarm_server starts a server on this machine, not at {self.server_url}"
            )
        port = str(parts.port or 10086)
        program = "import sys; from ajet_tools.cli.agentjet_swarm import main; main()"
        subprocess.Popen(
            [sys.executable, "-c", program, "start", "--swarm-port", port], start_new_session=True
        )
        deadline = time.monotonic() + 60.0
        while self.get_engine_status()[0] == CANNOT_CONNECT:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no server answers at {self.server_url} after 60 s")
            time.sleep(LOOK)


def _as_json(value: object) -> Any:
    """A value as JSON; what JSON lacks, as its text."""
    if isinstance(value, Mapping):
        return {str(name): _as_json(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple | set):
        return [_as_json(inner) for inner in value]
    if isinstance(value, str | int | float | bool | None):
        return value
    return str(value)


def run_episodes_until_all_complete(
    tasks: Sequence[Any],
    func: Callable[[Any], Any],
    max_workers: int | None = None,
    auto_retry: bool = True,
) -> list[Any]:
    """Run a function over tasks in threads; returns its results in their order."""
    return run_all(tasks, func, max_workers or len(tasks), auto_retry=auto_retry)


def auto_train_with_dataset(
    dataset: Any,
    swarm_worker: SwarmClient,
    execute_agent: Callable[[Task, OpenaiBaseUrlAndApiKey], WorkflowOutput],
    local_grpo_n: int = 2,
    remote_batch_size: int = 8,
) -> None:
    """Run `local_grpo_n` attempts at each training task of a dataset."""

    def attempt(task: Task) -> object:
        episode_uuid, base_url_and_key = swarm_worker.begin_episode()
        try:
            output = execute_agent(task, base_url_and_key)
        except BaseException:
            swarm_worker.abort_episode(episode_uuid)
            raise
        swarm_worker.end_episode(task, episode_uuid, output)
        return output.reward

    executor = PeriodicDrainThreadPoolExecutor(
        workers=remote_batch_size * local_grpo_n, max_parallel=64
    )
    for task in dataset.generate_training_tasks():
        for _ in range(local_grpo_n):
            executor.submit_with_periodic_drain(fn=attempt, task=task)
    executor.shutdown()
