"""Where users' code runs: in threads of this process, or in worker processes of a Ray cluster (`rollout.runner`)."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ajet_sdk.cluster import LOCAL, RayCluster, cluster
from ajet_sdk.parcel import parcel_of
from ajet_sdk.workers import Workers

if TYPE_CHECKING:
    from ajet_sdk.config import Config

__all__ = ["cluster_of", "workers_of"]

log = logging.getLogger("ajet")


@contextmanager
def cluster_of(config: Config, ray: str | None, *objects: Any) -> Iterator[RayCluster | None]:
    """The cluster that the run's own code runs on, with the code of `objects` (workflow, judge); None: threads do.

    `ray` is as in `Job`; without it the cluster that Ray itself would take (RAY_ADDRESS, which its job launcher sets),
    else a Ray of our own. Raises as `cluster` does.
    """
    if config.rollout.runner != "ray" or config.backbone not in ("debug", "local"):
        yield None  # the other backbones spread the agents themselves
        return
    address = ray or os.environ.get("RAY_ADDRESS") or LOCAL
    if ray is None and address == LOCAL:
        log.warning("rollout.runner: ray without --with-ray-cluster: starting a Ray on this machine, for this run")
    beside = [config.source.parent] if config.source is not None else []
    parcel = parcel_of(*objects, beside=beside, leave_out=[config.directory])
    with cluster(address, parcel=parcel) as joined:
        nodes = [node for node in joined.nodes() if node.alive]
        cpus = sum(node.cpus for node in nodes)
        log.info("Ray at %s: %d CPUs on %d node%s", joined.address, cpus, len(nodes), "s" if len(nodes) > 1 else "")
        yield joined


def workers_of(config: Config, joined: RayCluster | None) -> Workers:
    """The workers of a run."""
    limit = config.rollout.max_env_worker
    if joined is None:
        return Workers(limit)
    from ajet_sdk.ray_workers import RayWorkers

    return RayWorkers(limit, joined)
