"""Starts a Ray cluster for the length of a block, or joins one.

    with cluster("local", package=package) as ray_cluster:
        ...                                # ray is connected; every worker process has the package's code
        subprocess.run(command, env={**os.environ, **ray_cluster.environment()})   # joins, with the same code

Nodes need no shared disk: the user's code and ajet itself are sent as a `CodePackage`.
"""

# without Ray, pyright takes `ray` for this module:
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import json
import logging
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ajet_sdk.cluster.code import INSTALL, CodePackage
from ajet_sdk.errors import ConfigError, MissingExtra

log = logging.getLogger("ajet")

LOCAL = "local"
"""The address for starting Ray on this machine."""
_PATIENCE = 5.0
"""Seconds to wait for a connection."""
_PASSED_VARIABLES = re.compile(
    r"(OPENAI|AZURE_OPENAI|ANTHROPIC|DASHSCOPE|TINKER|WANDB|SWANLAB|TRINITY|AJET)_\w+|\w+_API_KEY|\w+_BASE_URL"
    r"|HF_TOKEN|HF_ENDPOINT|HF_HUB_OFFLINE|TRANSFORMERS_OFFLINE|OMP_NUM_THREADS|TOKENIZERS_PARALLELISM|no_proxy|NO_PROXY"
)
"""Environment variables passed to every node; others are those of `ray start` on the node."""


@dataclass(frozen=True)
class Node:
    node_id: str
    host: str
    port: int
    cpus: float
    gpus: float
    alive: bool


@dataclass(frozen=True)
class RayCluster:
    address: str
    """HOST:PORT of its control store, for other processes of this machine."""
    started: bool
    """Whether this process started it; then it stops with the block or the process."""
    host: str
    """Address for servers that every node must reach; loopback on a single machine."""
    runtime_env: Mapping[str, object]
    """Code (already uploaded) and environment variables of this connection's workers."""

    def environment(self) -> dict[str, str]:
        """Environment variables with which a subprocess joins; its workers get the same code and
        variables."""
        joined = {
            "RAY_ADDRESS": self.address,
            "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": dict(self.runtime_env)}),
        }
        return joined | {
            name: os.environ[name] for name in os.environ if name.startswith("RAY_AUTH_")
        }

    def nodes(self) -> list[Node]:
        """Every node that is or was in the cluster."""
        import ray

        return [
            Node(
                n["NodeID"],
                n["NodeManagerAddress"],
                int(n["NodeManagerPort"]),
                float(n["Resources"].get("CPU", 0)),
                float(n["Resources"].get("GPU", 0)),
                bool(n["Alive"]),
            )
            for n in ray.nodes()
        ]

    def reaches(self, node: Node) -> bool:
        """Whether a node still answers; Ray itself detects a lost node only after some seconds."""
        if not any(known.alive for known in self.nodes() if known.node_id == node.node_id):
            return False
        return _connection_error(node.host, node.port) is None


@contextmanager
def cluster(
    address: str,
    *,
    package: CodePackage | None = None,
    namespace: str | None = None,
    num_cpus: int | None = None,
    num_gpus: int | None = None,
    quiet: bool = False,
    hook: str = INSTALL,
) -> Iterator[RayCluster]:
    """Start Ray here (`local`) or join the cluster at `address` (HOST:PORT, or `auto` for the one
    on this machine).

    With `quiet` the output of workers goes to Ray's logs only. `num_cpus` and `num_gpus` are the
    resources of a new cluster, by default those of the machine. With a package, workers call the
    function `hook` when they start. An existing connection of this process is used and left open.

    Raises MissingExtra without Ray, ConfigError if the cluster cannot be reached, runs another
    version, or requires a token.
    """
    ray = _import()
    if ray.is_initialized():
        if ray.get_runtime_context().get_actor_id() is not None:
            raise ConfigError(
                "a run was started inside a Ray worker process, which imports the program's file"
                " for its functions; put the code that starts the run under `if __name__ =="
                ' "__main__":`'
            )
        yield _describe_connection(ray, started=False)
        return
    started = address == LOCAL
    options: dict[str, object] = {
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
        "include_dashboard": False,
    }
    target = address if started else _check_address(address)
    variables = {
        name: value for name, value in os.environ.items() if _PASSED_VARIABLES.fullmatch(name)
    }
    with package.write() if package is not None else nullcontext() as folder:
        if folder is None:
            code = {}
        else:
            code = {"working_dir": str(folder), "worker_process_setup_hook": hook}
        try:
            ray.init(
                address=target,
                namespace=namespace,
                runtime_env={**code, "env_vars": variables},
                logging_level="ERROR",
                log_to_driver=not quiet,
                **(options if started else {}),
            )
        except Exception as error:
            ray.shutdown()
            raise _explain_failure(address, error) from error
    try:
        yield _describe_connection(ray, started=started)
    finally:
        ray.shutdown()


def _import() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault(
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
    )  # else each start prints a long warning
    try:
        import ray
    except ImportError as error:
        raise MissingExtra("ray", "ray") from error
    return ray


def _describe_connection(ray: ModuleType, *, started: bool) -> RayCluster:
    context = ray.get_runtime_context()
    address = ray.util.get_node_ip_address()
    return RayCluster(
        address=context.gcs_address,
        started=started,
        host="127.0.0.1" if started or address.startswith("127.") else address,
        runtime_env=dict(context.runtime_env),
    )


def _check_address(address: str) -> str:
    """Resolve the address and check that it accepts connections. Raises ConfigError."""
    if address == "auto":
        return address
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        raise ConfigError(
            "--with-ray-cluster takes the HOST:PORT that `ray start --head` printed, or auto (got"
            f" {address!r})"
        )
    error = _connection_error(host.strip("[]"), int(port))
    if error is not None:
        raise ConfigError(
            f"no Ray cluster answers at {address} ({error}); check the address that `ray start"
            " --head` printed, or start a local Ray with --with-ray"
        ) from error
    return address


def _connection_error(host: str, port: int) -> OSError | None:
    """The error of a connection; None if it succeeds."""
    try:
        socket.create_connection((host, port), timeout=_PATIENCE).close()
    except OSError as error:
        return error
    return None


def _explain_failure(address: str, error: Exception) -> ConfigError:
    """The error for a cluster that could not be started or joined, with advice."""
    text = " ".join(str(error).split())
    if type(error).__name__ == "AuthenticationError" or "token" in text.lower():
        hint = (
            "its nodes use another token, or none. Copy ~/.ray/auth_token from the head node, or"
            " set RAY_AUTH_MODE (token, disabled) as on the cluster"
        )
    elif "ersion mismatch" in text:
        hint = "install the same versions of Python and Ray on this machine and on the nodes"
    elif address == LOCAL:
        hint = "its logs are in /tmp/ray/session_latest/logs"
    else:
        hint = (
            "run ajet on a node of the cluster, or add this machine to it: ray start"
            f" --address={address}"
        )
    if address == LOCAL:
        failure = "Ray could not be started"
    else:
        failure = f"the Ray cluster at {address} could not be joined"
    return ConfigError(f"{failure} ({type(error).__name__}: {text[:400]}); {hint}")
