"""`VllmSampler`: samples with a vLLM server that it starts, restarts, and updates with new weights.

The server is controlled in a thread with its own event loop; `sample` may be awaited in any other.
With `Settings.token_route` the weights change under running calls, which go on with the new ones;
else they change between calls.
"""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import TypeVar

from ajet_sdk.engines.vllm import token_prompts
from ajet_sdk.engines.vllm.completions import choices_of, request_body, sampling_parameters
from ajet_sdk.engines.vllm.server import Server, Settings
from ajet_sdk.engines.vllm.token_prompts import TokenPrompts
from ajet_sdk.errors import EngineError, EngineUnavailable
from ajet_sdk.pictures import PlacedPicture
from ajet_sdk.protocols import Sampled, Sampling, Tokenizer

log = logging.getLogger("ajet")
T = TypeVar("T")

RESTARTS = 3
"""Maximum restarts of a dead server per run."""
_NOT_LOADED = re.compile(
    r"were not loaded from checkpoint"
    r"|(?<!RotaryEmbedding)(?<!FusedMMInputNorm): Failed to load weights"
)
"""vLLM's log lines on weights that it did not load. Rotary embeddings and the normalization of
pixels are computed and are in no file."""
_DYING = 5.0
"""Seconds to check for a dead server after a broken connection."""


class VllmSampler:
    """Implements `protocols.Sampler` over a vLLM server.

    `write` writes the trainer's weights to a directory: all of them, or with `adapter` those of a
    LoRA adapter, which the server loads beside its base model. A trainer changes the weights inside
    `exclusive()` and sets `policy_version`; the server uses the old ones until the block ends. It
    starts with `settings.model`, or with `written` with the weights of a first `write`. `first` is
    an adapter that is not trained; `policy_version` is then None. `tokenizer` is needed with
    `settings.token_route`.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        eos_ids: frozenset[int],
        directory: Path,
        write: Callable[[Path], None] | None = None,
        adapter: bool = False,
        written: bool = False,
        first: Path | None = None,
        policy_version: int | None = 0,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        # Imported before agents run: openai looks for httpx in sys.modules and fails on a
        # half-imported one.
        import httpx  # noqa: F401

        self.model = settings.name
        self.max_model_len = settings.max_model_len
        self.policy_version = policy_version
        self.settings = settings
        self._eos_ids = eos_ids
        self.takes_pictures = settings.takes_pictures
        shown = None if tokenizer is None else tokenizer.pictures
        self._never_sampled = () if shown is None else shown.never_sampled
        self._write = write
        self._adapter = adapter
        self._written = written
        self._prompts: TokenPrompts | None = None
        if settings.token_route:
            assert tokenizer is not None
            self._prompts = TokenPrompts(tokenizer, names_versions=self._changes_in_flight)
        directory.mkdir(parents=True, exist_ok=True)
        self._scratch = Path(tempfile.mkdtemp(prefix="vllm-", dir=directory.resolve()))
        """The directory of the versions of the weights. The server's keeper removes it if this
        process cannot."""
        self._weights_path = first
        self._served = policy_version
        self._ordinal = count()
        self._restarts = self._running = 0
        self._failure: EngineError | None = None
        self._closed = False
        self._server: Server | None = None
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()
        self._idle = asyncio.Event()
        self._changing = asyncio.Lock()
        self._idle.set()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="ajet-vllm", daemon=True
        )
        self._thread.start()
        self._life = asyncio.run_coroutine_threadsafe(self._live(), self._loop)

    @property
    def _changes_in_flight(self) -> bool:
        """Whether weights change under running calls. A call is of one adapter, by its name."""
        return self.settings.token_route and self.settings.changing and not self._adapter

    @property
    def pid(self) -> int | None:
        return self._server.pid if self._server is not None else None

    # Called from any event loop

    async def ready(self) -> None:
        """Wait until the server answers. Raises EngineError if it does not start."""
        await self._there(self._until_open())

    async def sample(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        session: str,
        pictures: Sequence[PlacedPicture] = (),
    ) -> list[Sampled]:
        """Sample `sampling.n` continuations. Raises ContextOverflow, RequestRefused,
        EngineUnavailable.

        If the server dies, the call waits for its restart and is retried once.
        """
        parameters = sampling_parameters(
            prompt_ids,
            sampling,
            model=self.model,
            max_model_len=self.max_model_len,
            eos_ids=self._eos_ids,
            drawn_from=f"{self.settings.seed}/{next(self._ordinal)}",
            never_sampled=self._never_sampled,
        )
        if self._prompts is None:
            body = request_body(prompt_ids, parameters)
            reply, version = await self._there(self._ask("v1/completions", body))
            return choices_of(reply, version, sampling.n)
        prompt = self._prompts.prompt(prompt_ids, pictures)
        reply, version = await self._there(self._ask(token_prompts.ROUTE, prompt.body(parameters)))
        return self._prompts.choices_of(reply, prompt, sampling, version)

    def forget(self, session: str) -> None:
        """Does nothing: the server's prefix cache drops the oldest entries."""

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Change the weights within the block. If `policy_version` changed, at its end calls stop
        (or, without `Settings.token_route`, running ones finish and new ones wait), the server
        loads the weights and clears its cache, and the calls go on. Raises EngineError if that
        fails.
        """
        yield
        if self._write is None or self.policy_version == self._served:
            return
        version = self.policy_version
        directory = await asyncio.to_thread(self._write_version, version)
        await self._there(self._change(directory, version))

    def _write_version(self, version: int | None) -> Path:
        """Write the trainer's weights to a directory, which is complete or absent. Raises
        EngineError."""
        assert self._write is not None
        directory = self._scratch / f"version_{version}"
        fresh = directory.with_name(f".{directory.name}")
        try:
            self._write(fresh)
            fresh.rename(directory)
        except OSError as error:
            raise EngineError(
                f"the weights of version {version} could not be written for vLLM: {error}"
            ) from error
        return directory

    async def aclose(self) -> None:
        """Stop the server; running and waiting calls fail with EngineUnavailable."""
        if self._closed:
            return
        self._closed = True
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._end(), self._loop))
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()
        await asyncio.to_thread(shutil.rmtree, self._scratch, ignore_errors=True)

    async def _there(self, work: Coroutine[object, None, T]) -> T:
        """Await a coroutine in the sampler's own loop; cancellation is passed on."""
        if self._closed:
            work.close()
            raise EngineUnavailable(f"the sampler of {self.model} is closed")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    # Requests

    async def _ask(
        self, route: str, body: dict[str, object]
    ) -> tuple[dict[str, object], int | None]:
        """Return the reply and the version of its weights."""
        try:
            return await self._ask_once(route, body)
        except EngineUnavailable as error:
            if error.status is not None and error.status < 500:
                raise
            server = self._server
            first = error
        # The retry has to wait until the server is known to be alive or is restarted.
        if server is not None and await server.gone(_DYING):
            await self._revive(server)
        elif first.status is not None:
            raise first
        return await self._ask_once(route, body)

    async def _ask_once(
        self, route: str, body: dict[str, object]
    ) -> tuple[dict[str, object], int | None]:
        await self._until_open()
        assert self._server is not None
        version = self._served
        self._running += 1
        self._idle.clear()
        try:
            reply = await self._server.endpoint.post(route, {**body, "model": self._name(version)})
        except EngineUnavailable as error:
            if self._closed:
                raise EngineUnavailable(f"the sampler of {self.model} was closed") from error
            raise
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()
        return reply, version

    def _name(self, version: int | None) -> str:
        """The model name of a request; the name of an adapter has its version."""
        return f"{self.model}@{version}" if self._adapter else self.model

    # Start, restart and failure of the server, in the sampler's loop

    async def _live(self) -> None:
        try:
            async with self._changing:
                if self._written:
                    self._weights_path = await asyncio.to_thread(self._write_version, self._served)
                await self._start()
            while self._failure is None:
                server = self._server
                assert server is not None
                if await server.gone(1.0):
                    await self._revive(server)
        except EngineError as error:
            await self._fail(error)
        except Exception as error:  # noqa: BLE001  (stored, and raised to every caller)
            await self._fail(
                EngineError(f"vLLM could not be restarted: {type(error).__name__}: {error}")
            )

    async def _start(self) -> None:
        """Start a server with the newest weights and wait until it is ready. Raises EngineError."""
        if self._adapter or self._weights_path is None:
            model = self.settings.model
        else:
            model = str(self._weights_path)
        log.info("Starting vLLM with %s; log file: %s", model, self.settings.log)
        server = self._server = Server(self.settings, model, self._scratch)
        await server.ready()
        if self._changes_in_flight:
            await _name_weights(server, self._served)
        if self._adapter and self._weights_path is not None:
            await self._load_adapter(server, self._weights_path, self._served)
        self._open.set()

    async def _until_open(self) -> None:
        while not self._open.is_set():  # may be cleared again before this task runs
            await self._open.wait()
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        if self._closed:
            raise EngineUnavailable(f"the sampler of {self.model} is closed")

    async def _fail(self, error: EngineError) -> None:
        """Stop the server for good; every further call raises `error`."""
        self._failure = error
        self._open.set()
        if self._server is not None:
            await self._server.stop()

    async def _revive(self, dead: Server) -> None:
        """Restart a dead server unless another task did; after too many restarts, fail. Raises
        EngineUnavailable."""
        async with self._changing:
            if self._server is dead and self._failure is None and not self._closed:
                await self._start_again(dead)

    async def _start_again(self, dead: Server) -> None:
        self._open.clear()
        cause = dead.cause()
        await dead.stop()
        self._restarts += 1
        if self._restarts > RESTARTS:
            await self._fail(
                EngineUnavailable(f"vLLM crashed {self._restarts} times, most recently: {cause}")
            )
            return
        log.warning("vLLM crashed (%s). Restarting it (%d of %d).", cause, self._restarts, RESTARTS)
        try:
            await self._start()
        except EngineError as error:
            await self._fail(error)

    # New weights

    async def _change(self, directory: Path, version: int | None) -> None:
        """Load the weights in `directory` into the server. Raises EngineError."""
        async with self._changing:
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            self._open.clear()
            if not self._changes_in_flight:
                await self._idle.wait()
            server = self._server
            old = self._weights_path
            before = self._served
            assert server is not None
            self._weights_path = directory
            self._served = version
            try:
                if self._adapter:
                    await self._load_adapter(server, directory, version)
                    await server.control(
                        "v1/unload_lora_adapter", {"lora_name": self._name(before)}
                    )
                else:
                    await _reload(server, directory, version if self._changes_in_flight else None)
                self._open.set()
            except EngineError as error:
                if await server.gone(_DYING):  # started again, with the new weights
                    await self._start_again(server)
                else:
                    message = f"vLLM could not load the weights of version {self._served}: {error}"
                    await self._fail(EngineError(f"{message}\nIts log: {self.settings.log}"))
            if self._failure is not None:
                raise self._failure.with_traceback(None)
        if old is not None and old.parent == self._scratch:
            await asyncio.to_thread(shutil.rmtree, old, ignore_errors=True)

    async def _load_adapter(self, server: Server, directory: Path, version: int | None) -> None:
        await server.control(
            "v1/load_lora_adapter", {"lora_name": self._name(version), "lora_path": str(directory)}
        )

    async def _end(self) -> None:
        self._life.cancel()
        self._open.set()
        if self._server is not None:
            await self._server.stop()
        pending = asyncio.all_tasks() - {asyncio.current_task()}
        if pending:  # running calls fail by themselves without a server
            _, stuck = await asyncio.wait(pending, timeout=2 * _DYING)
            for task in stuck:
                task.cancel()


async def _name_weights(server: Server, version: int | None) -> None:
    """Set the version that the server names for the tokens that it samples from here on."""
    await server.control("update_weight_version", {"new_version": str(version)})


async def _reload(server: Server, directory: Path, version: int | None) -> None:
    """Load other weights in place, under running calls if a version is given. Raises EngineError
    if a weight was not loaded."""
    begun = server.logged()
    in_flight = version is not None
    await server.control(f"pause?mode={'keep' if in_flight else 'wait'}")
    await server.control(
        "collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
    )
    unloaded = [line for line in server.log_text(begun).splitlines() if _NOT_LOADED.search(line)]
    if unloaded:
        raise EngineError(f"it kept some of the old ones: {unloaded[0][-500:]}")
    # Keys and values of running calls are dropped, too, and computed again with the new weights.
    reset = f"reset_prefix_cache?reset_running_requests={str(in_flight).lower()}"
    for _ in range(20):  # a call that has just ended may hold its blocks for a moment
        if '"success":true' in await server.control(reset):
            break
        await asyncio.sleep(0.1)
    else:
        raise EngineError("the prefix cache of the old weights could not be cleared")
    if in_flight:
        await _name_weights(server, version)
    await server.control("resume")
