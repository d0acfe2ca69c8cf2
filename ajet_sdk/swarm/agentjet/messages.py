"""What AgentJet's clients and servers send each other; both our sides read and write it.

Programs import these classes from `ajet.tuner_lib.experimental.interchange_utils` and
`…swarm_overwatch_utils`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from ajet_sdk.swarm.messages import ServerState

STATES: dict[ServerState, str] = {
    "offline": "ENGINE.OFFLINE",
    "booting": "ENGINE.BOOTING",
    "collecting": "ENGINE.ROLLING",
    "closing": "ENGINE.ROLLING_POST",
    "updating": "ENGINE.WEIGHT_SYNCING",
    "saving": "ENGINE.WEIGHT_EXPORTING",
    "finished": "ENGINE.OFFLINE",
}
VALID_STATUSES = list(dict.fromkeys(STATES.values()))


class _Message(BaseModel):
    """Newer programs send more than is known here."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore")


class SyncTrainConfigRequest(_Message):
    yaml_as_string: str


class SwarmThrottlePolicy(_Message):
    """Names the task of an episode at its claim: the server then plans its group."""

    ratio: float = 1.5
    expected_batch_size: int = 0
    expected_num_repeat: int = 0
    current_task_id: str = ""


class ClaimEpisodeRequest(_Message):
    client_uuid: str
    episode_type: str = "train"
    discard_episode_timeout: float = 240.0
    throttle_policy: SwarmThrottlePolicy | None = None


class ClaimEpisodeResponse(_Message):
    success: bool = False
    client_uuid: str = ""
    episode_uuid: str = ""
    openai_base_url: str = ""
    openai_api_key: str = ""
    fail_cause: str = ""


class CanContinueEpisodeRequest(_Message):
    client_uuid: str
    episode_uuid: str


class CanContinueEpisodeResponse(_Message):
    can_continue: bool


class WorkflowResult(_Message):
    """A `WorkflowOutput` on the wire; the reward is checked where it is used."""

    reward: Any = None
    is_success: bool | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    log_metrics: dict[str, Any] = Field(default_factory=dict)


class EndEpisodeRequest(_Message):
    client_uuid: str
    episode_uuid: str
    workflow_output: WorkflowResult = Field(default_factory=WorkflowResult)
    task_id: str = ""
    declare_client_active: bool = True


class EndEpisodeResponse(_Message):
    success: bool


class AgreeSyncWeightRequest(_Message):
    client_uuid: str


class BoolResponse(_Message):
    success: bool
    failure_reason: str = ""


class EpisodeStatus(_Message):
    """An open episode. Its key, and the name that ends it, are told to its client alone."""

    episode_uuid: str
    episode_status: str = ""
    episode_type: str = "train"
    openai_base_url: str = ""
    openai_api_key: str = ""
    client_uuid: str = ""
    zmq_listen_result_addr: str = ""
    latest_activity_timestamp: float = 0.0
    discard_episode_timeout: float = 0.0
    llm_call_count: int = 0
    debug_log: list[str] = Field(default_factory=list)
    optional_task_id: str = ""


class EpisodeBufferResponse(_Message):
    buffer: list[EpisodeStatus]


class VerboseLog(_Message):
    tag: str = ""
    message: str = ""


class ActiveClient(_Message):
    client_uuid: str
    last_activity_at: float = 0.0
    allowed_sync_weight: bool = False


class SwarmClientInstruction(_Message):
    active_clients: list[ActiveClient] = Field(default_factory=list)


class CurrentBatchRolloutPoolInformation(_Message):
    """The step that is collected, against its target."""

    sample_collection_method: str = ""
    completed_episodes: int = 0
    completed_episode_target: int = 0
    completed_tasks: int = 0
    completed_task_target: int = 0
    completed_non_dummy_tasks: int = 0
    completed_non_dummy_task_target: int = 0
    task_expected_num_repeat: int = 0
    completed_tasks_details: dict[str, list[str]] = Field(default_factory=dict)
    """Ids of the ended episodes by task."""
    completed_tasks_client_uuids: dict[str, list[str]] = Field(default_factory=dict)
    running_episode_details: dict[str, dict[str, str]] | None = None
    engine_status: str | None = None
    global_step: int | None = None
    booting_start_time: float | None = None
    training_model_path: str | None = None
    swarm_client_instruction: SwarmClientInstruction = Field(default_factory=SwarmClientInstruction)
