"""The job class: builds a `Config` in Python, as from YAML."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet_sdk.config.agentjet import JOB_ARGUMENTS
from ajet_sdk.config.config import default_name, load_config
from ajet_sdk.errors import ConfigError
from ajet_sdk.judges.load import judge_section
from ajet_sdk.reporting.results import TunedModel
from ajet_sdk.run import train

if TYPE_CHECKING:
    from ajet_sdk.agent.workflow import BaseJudge
    from ajet_sdk.config.config import Config
    from ajet_sdk.protocols import Judge
    from ajet_sdk.tasks.load import GivenTasks

_DATA_TYPES = {
    "hf": "huggingface_dat_repo",
    "huggingface": "huggingface_dat_repo",
    "huggingface_dat_repo": "huggingface_dat_repo",
    "jsonl": "jsonl_dataset_file",
    "jsonl_dataset_file": "jsonl_dataset_file",
    "random_dummy": "random_dummy",
}


class AjetJob:
    """A training job in Python.

        job = ajet.AjetJob(model="Qwen/Qwen2.5-0.5B-Instruct", algorithm="grpo")
        job.set_workflow(solve)
        job.set_judge(exact)
        job.set_data(type="hf", dataset_path="openai/gsm8k")
        tuned = job.tune()

    Every setting is a key of the config; `set` sets any other key. Invalid values raise ConfigError
    when the config is built by `config`, `dump_job_as_yaml` or `tune`.

    Args:
        model: a directory in the format of transformers, or a name on the hub.
        algorithm: estimator of advantages (`trainer_common.algorithm.adv_estimator`); None: that of the file, else
            `grpo`.
        backbone: `local`, `trinity`, `verl` or `debug`; None: that of the file, else `local`.
        n_gpu: number of GPUs per node.
        n_gpu_for_infer: number of engines for sampling (`rollout.n_vllm_engine`).
        experiment_name: the directory under `launcher_record`; None: a new name.
        base_yaml_config: a config file to begin with; the other arguments override it.
        ensure_new_experiment: add the time to `experiment_name`.
        settings: the other arguments of AgentJet's job, such as `batch_size`, `num_repeat`, `lora_rank` (a table in
            the guide).
    """

    def __init__(
        self,
        model: str | None = None,
        algorithm: str | None = None,
        backbone: str | None = None,
        n_gpu: int | None = None,
        n_gpu_for_infer: int | None = None,
        experiment_name: str | None = None,
        *,
        base_yaml_config: str | Path | None = None,
        ensure_new_experiment: bool = False,
        **settings: Any,
    ) -> None:
        _check_arguments(settings)
        self._built: Config | None = None
        self._values: dict[str, Any] = {}
        self._file: Path | None = None
        self._workflow: Callable[..., object] | None = None
        self._judge: Judge | BaseJudge | None = None
        if base_yaml_config is not None:
            self.load_job_from_yaml(base_yaml_config)
        if experiment_name and ensure_new_experiment:
            experiment_name += f"_{datetime.now():%Y%m%d-%H%M%S}"
        if experiment_name or base_yaml_config is None:
            self.set("experiment_name", experiment_name or default_name(None))
        if base_yaml_config is None:
            backbone = backbone or "local"
            algorithm = algorithm or "grpo"
        self._set_given({
            "model.path": None if model is None else str(model),
            "trainer_common.n_gpus_per_node": n_gpu,
            "rollout.n_vllm_engine": n_gpu_for_infer,
            "backbone": backbone,
            "trainer_common.algorithm.adv_estimator": algorithm,
        })  # fmt: skip
        self._set_given({JOB_ARGUMENTS[name]: value for name, value in settings.items()})

    def _set_given(self, values: Mapping[str, object]) -> None:
        for key, value in values.items():
            if value is not None:
                self.set(key, value)

    def set(self, key: str, value: object) -> AjetJob:
        """Set a key of the config by its dotted path: `job.set("rollout.num_repeat", 8)`."""
        *sections, last = key.removeprefix("ajet.").split(".")
        into = self._values
        for name in sections:
            into = into.setdefault(name, {})
        into[last] = value
        self._built = None
        return self

    def __getattr__(self, name: str) -> Any:
        """An argument of AgentJet's job; None if it was not given."""
        if name not in JOB_ARGUMENTS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value: Any = self._values
        for step in JOB_ARGUMENTS[name].split("."):
            value = value.get(step) if isinstance(value, dict) else None
        return value

    def set_workflow(self, workflow: Callable[..., object] | str) -> AjetJob:
        """Set the agent: a decorated function, a `Workflow` class, or a class path."""
        return self._set_object("rollout.user_workflow", "_workflow", workflow)

    def set_judge(self, judge: Judge | BaseJudge | str, *, pattern: str | None = None) -> AjetJob:
        """Set the judge: a decorated function, `BaseJudge` class, class path, or `exact`, `math`,
        `regex`, `llm:FILE`.

        `pattern` is the regular expression of `regex`; see `task_judge.pattern`.
        """
        named = f"regex:{pattern}" if judge == "regex" and pattern is not None else judge
        if isinstance(named, str) and named != "regex":
            section = judge_section(named)
        else:
            section = {"judge_type": named}
        if isinstance(judge, str) and section["judge_type"] != "customized_protocol":
            self._judge = None
            for key, value in section.items():
                self.set(f"task_judge.{key}", value)
            return self
        self.set("task_judge.judge_type", "customized_protocol")
        return self._set_object("task_judge.judge_protocol", "_judge", judge)

    def _set_object(self, key: str, attribute: str, value: object) -> AjetJob:
        text = value if isinstance(value, str) else _class_path(value)
        setattr(self, attribute, None if isinstance(value, str) else value)
        return self.set(key, text)

    def set_data(
        self,
        type: str = "hf",
        dataset_path: str | Path | None = None,
        *,
        dataset_name: str | None = None,
        training_split: str | None = None,
        validation_split: str | None = None,
        validation_path: str | Path | None = None,
    ) -> AjetJob:
        """Set the tasks: `hf` (a Hugging Face name or a directory) with splits, or `jsonl` with
        files for training and validation."""
        kind = _DATA_TYPES.get(type)
        if kind is None:
            raise ConfigError(
                f"set_data(type={type!r}) is unknown; there are"
                f" {', '.join(sorted(set(_DATA_TYPES)))}"
            )
        self.set("task_reader.type", kind)
        path = None if dataset_path is None else str(dataset_path)
        if kind == "jsonl_dataset_file":
            if validation_path is None:
                validation = None
            else:
                validation = str(validation_path)
            settings = {"training.file_path": path, "validation.file_path": validation}
        else:
            settings = {
                "dataset_path": path, "dataset_name": dataset_name,
                "training_split": training_split, "validation_split": validation_split,
            }  # fmt: skip
        if kind == "jsonl_dataset_file":
            section = kind
        else:
            section = "huggingface_dat_repo"
        self._set_given({f"task_reader.{section}.{key}": value for key, value in settings.items()})
        return self

    @property
    def config(self) -> Config:
        """The validated config so far. Keys are set by `set`, or as AgentJet's programs do:
        `job.config.ajet.rollout.num_repeat = 8`. Raises ConfigError."""
        return self._build().model_copy().of_job(self.set)

    def _build(self) -> Config:
        if self._built is None:
            self._built = load_config(self._file, values={"ajet": self._values})
        return self._built

    def build_job_from_yaml(self, yaml_path: str | Path) -> dict[str, Any]:
        """Load a config file, and return its document."""
        return self.load_job_from_yaml(yaml_path).config.to_dict()

    def dump_job_as_yaml(self, path: str | Path) -> Path:
        """Write the job as a config file: `ajet --conf FILE` then does what `tune` does.

        Raises ConfigError if workflow or judge cannot be imported by a class path: a lambda, a
        nested function, a definition in a notebook or at a prompt, a name that now means another
        object.
        """
        for key, value in (("workflow", self._workflow), ("judge", self._judge)):
            if value is not None and not _is_importable(value):
                raise ConfigError(
                    f"the {key} {getattr(value, '__name__', value)!r} has no name that a config"
                    " file could refer to (it is a lambda, nested, defined in a notebook or at a"
                    " prompt, or its name in its module means something else); define it under its"
                    " own name in a .py file, and import it"
                )
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self._build().dump_yaml(only_set=True))
        return path

    def load_job_from_yaml(self, path: str | Path) -> AjetJob:
        """Load a config file; keys set afterwards override it."""
        config = load_config(path)
        self._file = Path(path)
        self._values = {"experiment_name": config.experiment_name}
        self._built = None
        if config.rollout.user_workflow:
            self._workflow = None
        if (
            config.task_judge.judge_protocol
            or config.task_judge.judge_type != "customized_protocol"
        ):
            self._judge = None
        return self

    def tune(
        self,
        tasks: GivenTasks | None = None,
        val_tasks: GivenTasks | None = None,
        *,
        resume: bool = False,
        debug_tags: tuple[str, ...] = (),
        ray: str | None = None,
    ) -> TunedModel:
        """Train, and return the model's path and metrics. The arguments and what is raised are as
        in `ajet.train`."""
        return train(
            self._build(),
            workflow=self._workflow,
            judge=self._judge,
            tasks=tasks,
            val_tasks=val_tasks,
            resume=resume,
            debug_tags=debug_tags,
            ray=ray,
        )


def _check_arguments(settings: Mapping[str, object]) -> None:
    """Raise TypeError for an unknown argument, with the nearest known one."""
    for name in settings:
        if name not in JOB_ARGUMENTS:
            near = difflib.get_close_matches(name, JOB_ARGUMENTS, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise TypeError(f"AjetJob has no argument {name!r}{hint}")


AgentJetJob = AjetJob
AstunerJob = AjetJob


def _class_path(value: object) -> str | None:
    """`module->Name`, or `file.py->Name` for objects of the main program; None without such a
    name."""
    name = getattr(value, "__qualname__", "")
    module = getattr(value, "__module__", None)
    if not name or not module or "<" in name:
        return None
    if module != "__main__":
        return f"{module}->{name}"
    file = getattr(sys.modules["__main__"], "__file__", None)  # a notebook and a prompt have none
    return f"{Path(file).resolve()}->{name}" if file else None


def _is_importable(value: Any) -> bool:
    """Whether the class path of an object is valid in another process."""
    if _class_path(value) is None:
        return False
    resolved: object = sys.modules.get(value.__module__)
    for step in value.__qualname__.split("."):
        resolved = getattr(resolved, step, None)
    if resolved is not value:
        return False
    if value.__module__ != "__main__":
        return True
    file = getattr(
        sys.modules["__main__"], "__file__", ""
    )  # the code of a notebook cell is in another
    members = vars(value).values() if isinstance(value, type) else (value,)
    codes = (
        getattr(inspect.unwrap(member), "__code__", None) for member in members if callable(member)
    )
    return all(Path(code.co_filename).name == Path(file).name for code in codes if code is not None)
