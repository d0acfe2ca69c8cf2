"""A job on its way to other processes: config, workflow and judge as plain data, and back.

The modules that they come from travel as a `Parcel`; here is only what refers to them.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet_sdk.errors import ConfigError
from ajet_sdk.parcel import unpacked

if TYPE_CHECKING:
    from ajet_sdk.config import Config
    from ajet_sdk.protocols import Job

__all__ = ["pack", "unpack"]


def pack(job: Job) -> dict[str, Any]:
    """What a node needs to know of a job. Raises ConfigError where the workflow or the judge can't be pickled."""
    from ray import cloudpickle

    code = {}
    for name, thing in (("workflow", job.workflow), ("judge", job.judge)):
        try:
            code[name] = base64.b64encode(cloudpickle.dumps(thing)).decode()
        except Exception as error:  # pickling runs the object's own code
            raise ConfigError(
                f"the {name} {getattr(thing, '__qualname__', thing)!r} can't be sent to other processes "
                f"({type(error).__name__}: {error}); what it holds must be picklable: open files, locks and clients "
                "belong inside the function"
            ) from error
    config = job.config
    return {
        "run_id": job.run_id,
        "directory": str(job.directory.resolve()),
        "config": {"ajet": config.model_dump(mode="json", exclude_unset=True), **config.roots.plain()},
        "source": str(config.source) if config.source else None,
        **code,
    }


def unpack(given: Mapping[str, Any]) -> tuple[Config, Any, Any]:
    """Config, workflow and judge, on the other side."""
    from ray import cloudpickle

    from ajet_sdk.config import load_config

    config = load_config(values=given["config"])
    if given["source"]:
        arrived = unpacked()
        here = arrived.here(given["source"]) if arrived is not None else None
        config._source = here or Path(given["source"])
    workflow, judge = (cloudpickle.loads(base64.b64decode(given[name])) for name in ("workflow", "judge"))
    return config, workflow, judge
