"""Train the model behind your agent.

    import ajet

    @ajet.workflow
    async def solve(question: str) -> str: ...

    @ajet.judge
    def exact(output: str, answer: str) -> float: ...

Names are loaded when first used, so that `import ajet` stays light.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ajet_sdk.agent.decorators import judge as judge
    from ajet_sdk.agent.decorators import workflow as workflow
    from ajet_sdk.agent.model import Model as Model
    from ajet_sdk.agent.workflow import AjetTuner as AjetTuner
    from ajet_sdk.agent.workflow import BaseJudge as BaseJudge
    from ajet_sdk.agent.workflow import Workflow as Workflow
    from ajet_sdk.agent.workflow import WorkflowOutput as WorkflowOutput
    from ajet_sdk.agent.workflow import WorkflowTask as WorkflowTask
    from ajet_sdk.backbones.debug import bp as bp
    from ajet_sdk.capture.observe import trace as trace
    from ajet_sdk.capture.programs import child_env as child_env
    from ajet_sdk.capture.programs import run_program as run_program
    from ajet_sdk.config.config import Config as Config
    from ajet_sdk.config.config import load_config as load_config
    from ajet_sdk.environments.client import GymEnv as GymEnv
    from ajet_sdk.errors import AjetError as AjetError
    from ajet_sdk.job import AgentJetJob as AgentJetJob
    from ajet_sdk.job import AjetJob as AjetJob
    from ajet_sdk.job import AstunerJob as AstunerJob
    from ajet_sdk.judges.code import CodeJudge as CodeJudge
    from ajet_sdk.judges.combined import CombinedJudge as CombinedJudge
    from ajet_sdk.judges.llm import LlmJudge as LlmJudge
    from ajet_sdk.judges.rubric import RubricJudge as RubricJudge
    from ajet_sdk.reporting.results import Report as Report
    from ajet_sdk.reporting.results import TaskScore as TaskScore
    from ajet_sdk.reporting.results import TunedModel as TunedModel
    from ajet_sdk.run import run as run
    from ajet_sdk.run import run_async as run_async
    from ajet_sdk.run import train as train
    from ajet_sdk.run import train_async as train_async
    from ajet_sdk.samples.build import build as build
    from ajet_sdk.samples.timelines import Merged as Merged
    from ajet_sdk.samples.timelines import merge as merge
    from ajet_sdk.serve import serve as serve
    from ajet_sdk.swarm.client import AsyncSwarmClient as AsyncSwarmClient
    from ajet_sdk.swarm.client import SwarmClient as SwarmClient
    from ajet_sdk.swarm.messages import Receipt as Receipt
    from ajet_sdk.swarm.several import episodes as episodes
    from ajet_sdk.trace.reader import open_trace as open_trace
    from ajet_sdk.types import Call as Call
    from ajet_sdk.types import Episode as Episode
    from ajet_sdk.types import LedgerEntry as LedgerEntry
    from ajet_sdk.types import Reward as Reward
    from ajet_sdk.types import Run as Run
    from ajet_sdk.types import Sample as Sample
    from ajet_sdk.types import Split as Split
    from ajet_sdk.types import Task as Task
    from ajet_sdk.types import Timeline as Timeline
    from ajet_tools.dataset.files import frames as dataset  # noqa: F401  # public under this name

if importlib.util.find_spec("fcntl") is None:
    _refusal = (
        "ajet runs on Linux and macOS. On Windows, install and run it in WSL: "
        "https://learn.microsoft.com/windows/wsl/install"
    )
    if sys.argv[:1] == ["-m"]:  # `python -m ajet` imports the package first
        raise SystemExit(f"Error: {_refusal}")
    raise ImportError(_refusal)

_HOMES = {
    "agent.decorators": ("judge", "workflow"),
    "environments.client": ("GymEnv",),
    "agent.model": ("Model",),
    "agent.workflow": ("AjetTuner", "BaseJudge", "Workflow", "WorkflowOutput", "WorkflowTask"),
    "backbones.debug": ("bp",),
    "capture.observe": ("trace",),
    "capture.programs": ("child_env", "run_program"),
    "config": ("Config", "load_config"),
    "errors": ("AjetError",),
    "job": ("AgentJetJob", "AjetJob", "AstunerJob"),
    "judges.code": ("CodeJudge",),
    "judges.combined": ("CombinedJudge",),
    "judges.llm": ("LlmJudge",),
    "judges.rubric": ("RubricJudge",),
    "reporting.results": ("Report", "TaskScore", "TunedModel"),
    "run": ("run", "run_async", "train", "train_async"),
    "samples.build": ("build",),
    "samples.timelines": ("Merged", "merge"),
    "serve": ("serve",),
    "swarm.client": ("AsyncSwarmClient", "SwarmClient"),
    "swarm.several": ("episodes",),
    "swarm.messages": ("Receipt",),
    "trace.reader": ("open_trace",),
    "types": (
        "Call", "Episode", "LedgerEntry", "Reward", "Run", "Sample", "Split", "Task", "Timeline",
    ),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

_PATHS = {
    "ajet.copilot": "job",
    "ajet.copilot.job": "job",
    "ajet.default_config": "tasks.agentjet",
    "ajet.default_config.ajet_config_schema": "tasks.agentjet",
    "ajet.default_config.ajet_default": "tasks.agentjet",
    "ajet.schema": "agent.workflow",
    "ajet.schema.task": "agent.workflow",
    "ajet.task_judge": "agent.agentjet",
    "ajet.task_judge.base_judge": "agent.workflow",
    "ajet.task_judge.env_service_as_judge": "agent.agentjet",
    "ajet.task_judge.rm_auto_grader_judge": "judges.rubric",
    "ajet.task_reader": "tasks.agentjet",
    "ajet.task_reader.task_reader_base": "agent.agentjet",
    "ajet.task_rollout": "agent.agentjet",
    "ajet.task_rollout.dashscope_llm_bridge": "agent.agentjet",
    "ajet.tuner": "agent.workflow",
    "ajet.tuner_lib": "swarm.agentjet.client",
    "ajet.tuner_lib.as_oai_baseurl_apikey": "swarm.agentjet.client",
    "ajet.tuner_lib.experimental": "swarm.agentjet.client",
    "ajet.tuner_lib.experimental.as_swarm_client": "swarm.agentjet.client",
    "ajet.tuner_lib.experimental.interchange_utils": "swarm.agentjet.messages",
    "ajet.tuner_lib.experimental.swarm_client": "swarm.agentjet.client",
    "ajet.tuner_lib.experimental.swarm_overwatch_utils": "swarm.agentjet.messages",
    "ajet.utils": "agent.agentjet",
    "ajet.utils.dynamic_import": "agent.agentjet",
    "ajet.utils.multimodal": "agent.multimodal",
    "ajet.utils.retry": "swarm.agentjet.threads",
    "ajet.utils.robust_dashscope": "agent.agentscope",
    "ajet.utils.thread_executors": "swarm.agentjet.threads",
    "ajet.workflow": "agent.workflow",
}
"""Import paths of AgentJet, each with the module that has its names here, so that programs for
AgentJet run unchanged.

They are registered as modules without a file: the attribute `ajet.workflow` stays the decorator,
while `from ajet.workflow import Workflow` works.
"""

__version__ = "0.1.0"
__all__ = sorted([*_HOME_OF, "dataset"])


def __getattr__(name: str) -> Any:
    if name == "dataset":
        return importlib.import_module("ajet_tools.dataset.files.frames")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ajet' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ajet_sdk.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


class _Path(ModuleType):
    """A module path of AgentJet; its names are loaded on first use."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        for home in dict.fromkeys((_PATHS[self.__name__], "agent.workflow", "types")):
            module = importlib.import_module(f"ajet_sdk.{home}")
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


for _path in _PATHS:
    _module = sys.modules.setdefault(_path, _Path(_path))
    _module.__spec__ = ModuleSpec(_path, None, origin="ajet", is_package=True)
    _module.__path__ = []  # a package without files: a module below it that is not in the table is not found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
