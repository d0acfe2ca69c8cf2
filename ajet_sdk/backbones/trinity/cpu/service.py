"""The service of a CPU run: one process with two copies of the model, one that is trained and one that samples.

Trinity's actors hold no weights: the package `tinker` that they import is a client of this service. It answers
OpenAI's /v1/completions with token ids, and /train/… with log-probabilities, gradients and steps. Arrays travel as
safetensors. Started by `process.run_service`; `python -m ajet_sdk.backbones.trinity.cpu.service --help`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ajet_sdk.backbones.trinity.cpu.learner import Adam, Learner, Sequences, logprobs_of
from ajet_sdk.backbones.trinity.cpu.wire import SERVICE, array_body, array_response, fail, json_body, prompt_ids, refuse
from ajet_sdk.dialects.fields import COMPLETIONS
from ajet_sdk.dialects.fields import refuse as refuse_parameters
from ajet_sdk.dialects.openai_chat import TEXT
from ajet_sdk.engines.chat import refuse_processing
from ajet_sdk.engines.local.loading import load_model
from ajet_sdk.engines.local.sampler import LocalSampler
from ajet_sdk.errors import AjetError, CheckpointError, ConfigError, RequestRefused
from ajet_sdk.gateway.gateway import KEEP_ALIVE, listening_socket
from ajet_sdk.gateway.http_server import server_config
from ajet_sdk.learn.checkpoint import read_weights
from ajet_sdk.learn.objective import LossSettings
from ajet_sdk.learn.trainer import TrainerSettings
from ajet_sdk.protocols import Answer, Choice, Sampled
from ajet_sdk.reporting.output import echo
from ajet_sdk.tokens.huggingface import HFTokenizer
from ajet_sdk.types import new_id
from ajet_sdk.whole_file import write_whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ajet_sdk.dialects.json import Json

_SAMPLER = re.compile(r"-sampler-(\d+)$")
"""How Trinity ends the name of weights to sample from: with the number of the training step."""

_log = logging.getLogger("ajet.service")
T = TypeVar("T")


class Service:
    """The routes, and the two copies of the model behind them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.base = Path(args.model)
        self.work_dir = Path(args.work_dir)
        self.work_dir.mkdir(parents=True, exist_ok=True)
        self.temperature = float(args.temperature)
        self.learner = Learner(self.base, self.temperature, _settings(args.settings))
        self.tokenizer = HFTokenizer(self.base)
        model = load_model(self.base, dtype=args.dtype)
        longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or args.max_model_len
        self.sampler = LocalSampler(
            model,
            self.tokenizer,
            model_name=str(args.model),
            max_model_len=min(args.max_model_len, longest),
            max_batch=args.max_batch,
            seed=args.seed,
        )
        self._reference: PreTrainedModel | None = None
        self._training = asyncio.Lock()
        self._loading = asyncio.Lock()
        self._doomed: Path | None = None

    def app(self) -> Starlette:
        routes = [
            Route("/health", self.health),
            Route("/info", self.info),
            Route("/v1/models", self.models),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/logprobs", self.logprobs, methods=["POST"]),
            Route("/sampler", self.load_sampler, methods=["POST"]),
            Route("/train/start", self.start, methods=["POST"]),
            Route("/train/forward", self.forward, methods=["POST"]),
            Route("/train/backward", self.backward, methods=["POST"]),
            Route("/train/update", self.update, methods=["POST"]),
            Route("/train/save_state", self.save_state, methods=["POST"]),
            Route("/train/save_weights", self.save_weights, methods=["POST"]),
            Route("/checkpoints/{name}", self.delete, methods=["DELETE"]),
        ]
        return Starlette(routes=routes, exception_handlers={AjetError: refuse, Exception: fail})

    # What it is

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def info(self, request: Request) -> Response:
        """What serves here, the versions of both copies, and the temperature that training assumes."""
        about = {
            "service": SERVICE,
            "pid": os.getpid(),
            "model": str(self.base),
            "policy_version": self.sampler.policy_version,
            "updates": self.learner.updates,
            "parameters": self.learner.parameters,
            "temperature": self.temperature,
            "max_model_len": self.sampler.max_model_len,
        }
        return JSONResponse(about)

    async def models(self, request: Request) -> Response:
        entry = {"id": self.sampler.model, "object": "model", "owned_by": "ajet"}
        return JSONResponse({"object": "list", "data": [{**entry, "max_model_len": self.sampler.max_model_len}]})

    # Sampling

    async def completions(self, request: Request) -> Response:
        """OpenAI's completions over token ids, as vLLM's server gives them, with the weights that are loaded now.

        Beyond vLLM's: `session` in the request, whose prompts tend to extend each other; `policy_version` in the reply.
        """
        body = await json_body(request)
        session = str(body.pop("session", ""))
        prompt = prompt_ids(body.get("prompt"))
        if body.get("ignore_eos") is True and set(body.get("stop_token_ids") or ()) == self.tokenizer.eos_ids:
            del body["ignore_eos"], body["stop_token_ids"]  # so a reply ends here anyway
        refuse_parameters(body, COMPLETIONS)
        ask = TEXT.ask({"temperature": self.temperature, **body}, session, "")
        refuse_processing(ask.sampling)
        sampling = replace(ask.sampling, grammar=str((body.get("structured_outputs") or {}).get("grammar") or ""))
        sampled = await _unless_gone(request, self.sampler.sample(prompt, sampling, session))
        if sampled is None:
            return Response(status_code=499)
        answer = Answer(
            choices=tuple(self._choice(sample) for sample in sampled),
            model=self.sampler.model,
            prompt_ids=prompt,
            policy_version=sampled[0].policy_version,
        )
        reply = TEXT.completion(answer, ask, new_id())
        reply["policy_version"] = answer.policy_version
        for choice, sample in zip(reply["choices"], sampled, strict=True):
            choice["stop_reason"] = None if sample.text is None else self._stop_string(sample, sampling.stop)
            if body.get("return_token_ids"):
                choice["prompt_token_ids"] = prompt
        return JSONResponse(reply)

    def _choice(self, sampled: Sampled) -> Choice:
        text = sampled.text
        if text is None:
            text = self.tokenizer.decode([i for i in sampled.output_ids if not self.tokenizer.is_special(i)])
        return Choice(
            message=None,
            text=text,
            finish_reason=sampled.finish_reason,
            output_ids=sampled.output_ids,
            logprobs=sampled.logprobs,
            tokens=[self.tokenizer.token_bytes(i) for i in sampled.output_ids],
        )

    def _stop_string(self, sampled: Sampled, stops: tuple[str, ...]) -> str:
        """Which stop string cut the reply; the first where it began inside a character."""
        behind = self.tokenizer.decode(sampled.output_ids)[len(sampled.text or "") :]
        return next((stop for stop in stops if behind.startswith(stop)), stops[0])

    async def logprobs(self, request: Request) -> Response:
        """Log-probabilities of a prompt's own tokens at the run's temperature, by the base model or a snapshot.

        The snapshot must be the one that is loaded; the base model is loaded a third time when first asked.
        """
        body = await json_body(request)
        prompt, name = prompt_ids(body.get("prompt")), body.get("snapshot")
        async with self._loading:
            if name is None:
                if self._reference is None:
                    self._reference = await asyncio.to_thread(load_model, self.base)
                logprobs = await asyncio.to_thread(logprobs_of, self._reference, prompt, self.temperature)
            else:
                if _version(str(name)) != self.sampler.policy_version:
                    raise RequestRefused(f"{name} is not loaded; version {self.sampler.policy_version} is")
                async with self.sampler.exclusive():
                    logprobs = await asyncio.to_thread(logprobs_of, self.sampler.module, prompt, self.temperature)
        return array_response(logprobs_N=logprobs)

    async def load_sampler(self, request: Request) -> Response:
        """Sample with a snapshot's weights from now on; what runs ends first, with the weights it began with."""
        checkpoint = self._existing(await json_body(request))
        version = _version(checkpoint.name)
        async with self._loading:
            if version != self.sampler.policy_version:
                async with self.sampler.exclusive():
                    await asyncio.to_thread(read_weights, checkpoint, self.sampler.module)
                    self.sampler.policy_version = version
                _log.info("Now sampling from version %s.", version)
        return JSONResponse({"policy_version": version})

    # Training

    async def _train(self, work: Callable[..., T], *arguments: object) -> T:
        """Run something of the learner's, one at a time, beside the event loop."""
        async with self._training:
            return await asyncio.to_thread(work, *arguments)

    async def start(self, request: Request) -> Response:
        """Begin to train: at the base model, or where the state that `path` names was saved."""
        body = await json_body(request)
        if body.get("path") is not None:
            await self._train(self.learner.load_state, self._existing(body))
        elif self.learner.updates:
            await self._train(self.learner.start)
        return JSONResponse({"updates": self.learner.updates})

    async def forward(self, request: Request) -> Response:
        """Arrays lengths_B, ids_N, targets_N, needed_N in; logprobs_N out, 0 where none is needed."""
        arrays = array_body(await request.body(), "lengths_B", "ids_N", "targets_N", "needed_N")
        sequences = Sequences(
            lengths_B=arrays["lengths_B"].astype(np.int64),
            ids_N=arrays["ids_N"].astype(np.int64),
            targets_N=arrays["targets_N"].astype(np.int64),
            needed_N=arrays["needed_N"].astype(np.bool_),
        )
        return array_response(logprobs_N=await self._train(self.learner.forward, sequences))

    async def backward(self, request: Request) -> Response:
        """gradients_N in: of the loss with regard to the log-probabilities that `forward` gave last."""
        arrays = array_body(await request.body(), "gradients_N")
        await self._train(self.learner.backward, arrays["gradients_N"].astype(np.float32))
        return JSONResponse({})

    async def update(self, request: Request) -> Response:
        """One AdamW step with the parameters of `Adam`."""
        body = await json_body(request)
        try:
            adam = Adam(**{name: float(value) for name, value in body.items()})
        except (TypeError, ValueError) as error:
            raise RequestRefused(f"invalid AdamW parameters: {error}") from error
        norm = await self._train(self.learner.update, adam)
        return JSONResponse({"grad_norm": norm, "updates": self.learner.updates})

    # Checkpoints

    async def save_state(self, request: Request) -> Response:
        """Write weights and optimiser under `name`."""
        checkpoint = self._checkpoint_path((await json_body(request)).get("name"))
        await self._train(self.learner.save_state, checkpoint)
        return JSONResponse({"path": str(checkpoint)})

    async def save_weights(self, request: Request) -> Response:
        """Write a snapshot to sample from under `name`, which ends with `-sampler-` and the version."""
        checkpoint = self._checkpoint_path((await json_body(request)).get("name"))
        _version(checkpoint.name)
        if checkpoint == self._doomed:  # of a run that was taken up before it: this one is to stay
            self._doomed = None
        await self._train(self.learner.save_weights, checkpoint)
        return JSONResponse({"path": str(checkpoint)})

    async def delete(self, request: Request) -> Response:
        """Delete a snapshot once the next one is deleted.

        Trinity deletes one up to a second before it stops telling samplers of it.
        """
        checkpoint = self._checkpoint_path(request.path_params["name"])
        _version(checkpoint.name)
        before, self._doomed = self._doomed, checkpoint
        if before is not None and before != checkpoint and before.is_dir():
            await asyncio.to_thread(shutil.rmtree, before)
        return JSONResponse({})

    def _checkpoint_path(self, name: object) -> Path:
        if not isinstance(name, str) or not name or name.startswith(".") or Path(name).name != name:
            raise RequestRefused(f"{name!r} is not a valid checkpoint name: it must be a plain file name", "name")
        return self.work_dir / name

    def _existing(self, body: Json) -> Path:
        """The checkpoint that a path names. Only its last part counts: the experiment may have been moved."""
        checkpoint = self._checkpoint_path(Path(str(body.get("path"))).name)
        if not checkpoint.is_dir():
            raise CheckpointError(f"there is no checkpoint {checkpoint.name} in {self.work_dir}")
        return checkpoint


def _version(name: str) -> int:
    match = _SAMPLER.search(name)
    if match is None:
        raise RequestRefused(f"{name} is not a set of sampler weights: its name must end with -sampler-NUMBER", "name")
    return int(match[1])


async def _unless_gone(request: Request, sampling: Awaitable[list[Sampled]]) -> list[Sampled] | None:
    """What is sampled, or None once the client is gone: then the sampler stops, too."""
    work, gone = asyncio.ensure_future(sampling), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        work.cancel()
        gone.cancel()


# The process


def main() -> None:
    """Serve until SIGTERM or until the parent process is gone."""
    args = _arguments()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    if args.parent is not None:
        threading.Thread(target=_end_with, args=(args.parent,), daemon=True).start()
    try:
        asyncio.run(_serve(args))
    except AjetError as error:
        echo(f"ajet: {error}", err=True)
        raise SystemExit(1) from None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train and sample a model for Trinity-RFT on this machine.")
    parser.add_argument("--model", required=True, help="directory of the base model")
    parser.add_argument("--work-dir", required=True, help="directory for snapshots and states")
    parser.add_argument(
        "--ready-file", required=True, type=Path, help="file to write url and pid to once the service listens"
    )
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--temperature", type=float, default=1.0, help="sampling temperature, assumed in training")
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--max-batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32", help="of the sampling copy; the trained copy is float32")
    parser.add_argument(
        "--settings", default="{}", help="JSON of the KL and entropy terms and the learning rate schedule"
    )
    parser.add_argument("--parent", type=int, help="pid of the parent process; the service exits with it")
    return parser.parse_args()


def _settings(text: str) -> TrainerSettings:
    sent = json.loads(text)
    return TrainerSettings(**{"lr": 1.0, "warmup_steps": 0, **sent, "loss": LossSettings(**sent.get("loss", {}))})


async def _serve(args: argparse.Namespace) -> None:
    import uvicorn

    if args.temperature <= 0:
        raise ConfigError(f"--temperature must be above 0 for training (got {args.temperature})")
    service = await asyncio.to_thread(Service, args)
    with listening_socket("127.0.0.1", args.port) as listener:
        settings = server_config(
            service.app(),
            timeout_keep_alive=KEEP_ALIVE,  # a step may be as far from the last one as the server's usual patience
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(settings)
        server.capture_signals = nullcontext  # type: ignore[method-assign,assignment]  # it would raise them again at the end
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, server.handle_exit, number, None)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        _announce(args.ready_file, url)
        _log.info("Serving %s at %s (%s parameters).", args.model, url, service.learner.parameters)
        await server.serve(sockets=[listener])
    await service.sampler.aclose()


def _announce(path: Path, url: str) -> None:
    write_whole(path, json.dumps({"url": url, "pid": os.getpid()}))


def _end_with(parent: int) -> None:
    """Stop once the parent is gone: at once, and for good if that takes longer than five seconds."""
    while os.getppid() == parent:
        time.sleep(0.2)
    with suppress(ProcessLookupError):
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)
    os._exit(1)


if __name__ == "__main__":
    main()
