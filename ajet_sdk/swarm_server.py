"""A swarm server: serves the model that it trains to agents anywhere, and trains it on their
episodes.

One process and one port. The main thread runs the training, as `ajet train` does; the gateway's
thread answers clients. Without a config the server waits for one from its owner.
"""

from __future__ import annotations

import asyncio
import queue
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from ajet_sdk.config.config import load_config
from ajet_sdk.errors import AjetError, ConfigError, first_line
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.reporting.output import echo
from ajet_sdk.rollout.event_loop import exit_on_sigterm
from ajet_sdk.run import train
from ajet_sdk.swarm.agentjet.routes import agentjet_routes
from ajet_sdk.swarm.host import SwarmHost
from ajet_sdk.swarm.refusals import Refused
from ajet_sdk.swarm.routes import Keys, Owner, SwarmRoutes

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from ajet_sdk.config.config import Config
    from ajet_sdk.reporting.results import TunedModel

FAREWELL = 20.0
"""Most seconds after the training in which its clients are still answered."""
SILENCE = 2.0
"""Seconds without a request after which they have all asked."""
_STOPPING = 120.0
"""Seconds that a stop may take."""


class SwarmServer(Owner):
    """Serves and trains, one run after another."""

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 10086,
        keys: Keys | None = None,
        overrides: Sequence[str] = (),
        ray: str | None = None,
        more_routes: Callable[[SwarmRoutes], Sequence[BaseRoute]] = agentjet_routes,
        say: Callable[[str], None] = echo,
    ) -> None:
        """`overrides` change every config, as on the command line. `ray`: the address of the Ray
        cluster of backbone trinity; None starts one here."""
        self.keys = keys or Keys()
        self._routes = routes = SwarmRoutes(self.keys, self)
        self.gateway = Gateway(
            host=host, port=port, routes=[*routes.routes(), *more_routes(routes)]
        )
        self.host = routes.host = SwarmHost(self.gateway)
        self._overrides = list(overrides)
        self._ray = ray
        self._say = say
        self._config: Config | None = None
        self._starts: queue.Queue[Config] = queue.Queue()
        self._is_resumed = False

    # Owner

    async def configure(self, text: str) -> None:
        self._check_offline()
        self._config = await asyncio.to_thread(self._read, text)

    def _read(self, text: str) -> Config:
        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"the config is not YAML: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(
                "the config must be a mapping with the key `ajet`, as in a config file"
            )
        return load_config(values=values, overrides=self._overrides)

    def _check_offline(self) -> None:
        if self.host.state not in ("offline", "finished"):
            raise Refused(
                409, "not_offline", f"the server is {self.host.state}; stop the training first"
            )

    async def start(self) -> None:
        self._check_offline()
        if self._config is None:
            raise Refused(422, "config", "there is no config to start; send one first")
        self.host.board.enter("booting")
        self._starts.put(self._config)

    async def stop(self) -> None:
        self.host.stop_requested = True
        self.host.stop_run()
        deadline = time.monotonic() + _STOPPING
        while self.host.state not in ("offline", "finished") and time.monotonic() < deadline:
            await self.host.board.next_event(1.0)

    # Serving

    def serve(self, config: Config | None = None, *, resume: bool = False) -> TunedModel | None:
        """Serve until the training of `config` is finished; without a config until Ctrl-C.

        Raises as `train`, and ConfigError if the port is taken.
        """
        self._is_resumed = resume
        if config is not None:
            self.host.board.enter("booting")
        with exit_on_sigterm(), self.gateway:
            self._introduce()
            if config is not None:
                tuned = self._train(config)
                if tuned is not None:
                    self._bid_farewell()
                return tuned
            self._say("no config: waiting for one (ajet train CONFIG --swarm URL)")
            while True:
                self._train_next(self._starts.get())

    def _train_next(self, config: Config) -> None:
        try:
            self._train(config)
        except (AjetError, OSError) as error:  # the server is there for the next one
            self._say(f"the training failed: {error}")

    def _train(self, config: Config) -> TunedModel | None:
        """Train once; None if the owner stopped it."""
        failure = ""
        self.host.stop_requested = False
        self.host.enter_soon("booting")
        try:
            return train(config, resume=self._is_resumed, ray=self._ray, swarm=self.host)
        except asyncio.CancelledError:
            self._say("the owner stopped the training")
            return None
        except Exception as error:
            failure = first_line(error)
            raise
        finally:
            if self.host.state != "finished":
                self.host.enter_soon("offline", failure)

    def _introduce(self) -> None:
        url = self.gateway.url
        self._say(f"swarm server at {url} (watch: ajet swarm watch {url}; API: {url}/docs)")
        if self.keys.worker is not None:
            self._say(f"workers join with AJET_SWARM_KEY={self.keys.worker}")
        if self.keys.owner is not None:
            self._say(f"the owner's key is {self.keys.owner}")

    def _bid_farewell(self) -> None:
        """Answer the clients of the training until they are silent for a moment: they learn that it
        is finished, and ask for their receipts."""
        finished = time.monotonic()
        while time.monotonic() < finished + FAREWELL:
            if time.monotonic() - max(self._routes.last_request, finished) > SILENCE:
                return
            time.sleep(0.1)


def keys_for(host: str, owner: str | None, worker: str | None) -> Keys:
    """The keys of a server: those given, and where other machines can connect, new ones in place of
    missing ones.

    Raises ConfigError if both are the same.
    """
    if owner is not None and owner == worker:
        raise ConfigError("the owner's key and the workers' key must differ")
    only_here = host in ("localhost", "127.0.0.1", "::1")
    if only_here and owner is None and worker is None:
        return Keys()
    return Keys(
        owner or f"owner-{secrets.token_urlsafe(24)}",
        worker or f"worker-{secrets.token_urlsafe(24)}",
    )


def config_for_server(
    path: Path | None, model: str | None, overrides: Sequence[str]
) -> tuple[Config | None, list[str]]:
    """The config that the server begins with, if any, and the overrides of all its configs."""
    added = list(overrides)
    if model is not None:
        added.append(f"ajet.model.path={model}")
    if path is None:
        return None, added
    return load_config(path, added), added
