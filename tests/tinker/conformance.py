"""What of the Tinker SDK works against which server: each method of its clients, and what the API
promises.

    python -m tests.tinker.conformance --model DIR --write \
      --column "ajet, SDK 0.38.0=http://127.0.0.1:8900,SITE_PACKAGES" --column "SkyRL 0.3.0, SDK 0.22.2=URL,FOLDER"

Each SDK is run in a process of its own, with its folder first on the path; the servers run already.
A method works, is refused by a message of the server that names what is missing, or is wrong:
another error, a wrong result, a hang.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

PAGE = Path(__file__).parents[2] / "docs" / "tinker-conformance.md"
CLIENTS = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient")
PATIENCE = 60.0
"""Seconds after which an answer is taken for one that never comes."""
IDS = [41, 71, 82, 73, 91, 82, 71, 90, 75, 27, 23, 24, 27, 17, 27, 25, 26]
LOCAL = {
    "get_telemetry",
    "get_console_url",
    "on_queue_state_change",
    "create",
    "get_sampler_handle",
    "from_sampler_handle",
    "create_custom_loss",
    "save_weights_and_get_sampling_client_submit",
}
"""Methods that ask no server, or that others call."""


class Refused(Exception):
    """The server says what it does not have."""


def settled(value: Any) -> Any:
    """A result, whether the SDK gives it at once or as a future."""
    while hasattr(value, "result"):
        value = value.result(PATIENCE)
    return value


class Checks:
    """All calls of one SDK to one server."""

    def __init__(self, url: str, model: str) -> None:
        import tinker
        from tinker.lib.public_interfaces.rest_client import RestClient

        self.tinker, self.types, self.url, self.model = tinker, tinker.types, url, model
        self.classes = {name: getattr(tinker, name, RestClient) for name in CLIENTS}
        self.verdicts: dict[str, dict[str, str]] = {}
        self.numbers = iter(range(10_000))

    def run(self) -> dict[str, dict[str, str]]:
        self.service = self.tinker.ServiceClient(base_url=self.url)
        self.rest = settled(self.service.create_rest_client())
        self.trainer = self.new_trainer()
        self.step()
        self.sampler = settled(self.trainer.save_weights_and_get_sampling_client())
        self.state = settled(self.trainer.save_state("conformance")).path
        self.weights = settled(self.trainer.save_weights_for_sampler("conformance")).path
        for client, instance in zip(
            CLIENTS, (self.service, self.trainer, self.sampler, self.rest), strict=True
        ):
            calls = getattr(self, f"of_{client}")()
            for name in (
                name
                for name, value in vars(self.classes[client]).items()
                if callable(value) or "static" in str(value)
            ):
                if (
                    name.startswith("_")
                    or name in LOCAL
                    or name.removesuffix("_async") not in calls
                ):
                    if not name.startswith("_") and name not in LOCAL:
                        self.verdicts[f"{client}.{name}"] = {"verdict": "not tried"}
                    continue
                self.verdicts[f"{client}.{name}"] = self.verdict(
                    self.call(instance, name, calls[name.removesuffix("_async")])
                )
        for name in dir(self):
            if name.startswith("promise_"):
                title = (getattr(self, name).__doc__ or "").strip().rstrip(".")
                self.verdicts[f"promise.{title}"] = self.verdict(getattr(self, name))
        self.verdicts["ServiceClient.close"] = self.verdict(self.close)
        return self.verdicts

    def call(
        self,
        instance: Any,
        name: str,
        what: tuple[Callable[[], tuple[Any, ...]], Callable[[Any], bool]],
    ) -> Any:
        arguments, right = what

        async def awaited() -> Any:
            value = await getattr(instance, name)(*arguments())
            return await value if hasattr(value, "__await__") else value

        def run() -> None:
            value = (
                asyncio.run(awaited())
                if name.endswith("_async")
                else settled(getattr(instance, name)(*arguments()))
            )
            if not right(value):
                raise AssertionError(f"returned {str(value)[:80]}")

        return run

    def verdict(self, run: Callable[[], None]) -> dict[str, str]:
        started = time.monotonic()
        try:
            run()
        except Exception as error:  # noqa: BLE001  (it is what is measured)
            text = " ".join(str(error).split())
            known = (
                self.tinker.RequestFailedError,
                self.tinker.BadRequestError,
                self.tinker.NotFoundError,
                Refused,
            )
            named = isinstance(error, known)
            named = named or "this server has no" in text or "requires JWT auth" in text
            category = getattr(error, "category", None)
            refused = (
                named
                and "Internal" not in text
                and (category is None or "server" not in str(category).lower())
            )
            return {
                "verdict": "refused" if refused else "wrong",
                "why": f"{type(error).__name__}: {text}"[:160],
            }
        return {"verdict": "works", "seconds": f"{time.monotonic() - started:.2f}"}

    # What the calls need

    def name(self) -> str:
        return f"c{next(self.numbers)}"

    def new_trainer(self) -> Any:
        return settled(
            self.service.create_lora_training_client(self.model, 8, 1, True, True, False)
        )

    def datum(self, ids: list[int] = IDS, **inputs: Any) -> Any:
        size = len(ids) - 1
        values = inputs or {"weights": np.ones(size)}
        given = {name: np.asarray(value, np.float32) for name, value in values.items()}
        return self.types.Datum(
            model_input=self.types.ModelInput.from_ints(ids[:-1]),
            loss_fn_inputs={"target_tokens": np.asarray(ids[1:], np.int64), **given},
        )

    def adam(self, **values: float) -> Any:
        return self.types.AdamParams(**{"learning_rate": 1e-2, **values})

    def step(self, trainer: Any = None, **values: float) -> None:
        trainer = trainer or self.trainer
        trainer.forward_backward([self.datum()], "cross_entropy")
        settled(trainer.optim_step(self.adam(**values)))

    def logprobs(self, trainer: Any) -> Any:
        try:
            done = settled(trainer.forward([self.datum()], "cross_entropy"))
        except (
            self.tinker.NotFoundError
        ):  # a server without `forward` gives them with a gradient, of nothing here
            done = settled(
                trainer.forward_backward(
                    [self.datum(weights=np.zeros(len(IDS) - 1))], "cross_entropy"
                )
            )
        return done.loss_fn_outputs[0]["logprobs"].to_numpy()

    # The methods, with arguments and what a right answer is

    def of_ServiceClient(self) -> dict[str, Any]:
        model, state, weights = self.model, self.state, self.weights
        client = lambda value: hasattr(value, "forward") or hasattr(value, "sample")  # noqa: E731
        return {
            "get_server_capabilities": (tuple, lambda v: len(v.supported_models) > 0),
            "create_lora_training_client": (lambda: (model, 8, 1, True, True, False), client),
            "create_training_client_from_state": (lambda: (state,), client),
            "create_training_client_from_state_with_optimizer": (lambda: (state,), client),
            "create_sampling_client": (lambda: (weights,), client),
            "create_rest_client": (tuple, lambda v: hasattr(v, "list_checkpoints")),
            "copy_weights": (lambda: (weights,), lambda v: v.startswith("tinker://")),
        }

    def of_TrainingClient(self) -> dict[str, Any]:
        def custom(data: Any, logprobs: Any) -> Any:
            return -logprobs[0].sum(), {"mine:sum": 1.0}

        data = [self.datum()]
        passed = lambda v: len(v.loss_fn_outputs) == 1  # noqa: E731
        return {
            "forward": (lambda: (data, "cross_entropy"), passed),
            "forward_backward": (lambda: (data, "cross_entropy"), passed),
            "forward_backward_custom": (lambda: (data, custom), lambda v: "mine:sum" in v.metrics),
            "optim_step": (lambda: (self.adam(),), lambda v: v is not None),
            "save_state": (lambda: (self.name(),), lambda v: v.path.startswith("tinker://")),
            "load_state": (lambda: (self.state,), lambda v: v is not None),
            "load_state_with_optimizer": (lambda: (self.state,), lambda v: v is not None),
            "save_weights_for_sampler": (
                lambda: (self.name(),),
                lambda v: v.path.startswith("tinker://"),
            ),
            "save_weights_external": (
                lambda: (self.name(),),
                lambda v: v.path.startswith("tinker://"),
            ),
            "get_info": (tuple, lambda v: v.model_id == self.trainer.model_id),
            "get_tokenizer": (tuple, lambda v: len(v.encode("a")) > 0),
            "create_sampling_client": (lambda: (self.weights,), lambda v: hasattr(v, "sample")),
            "save_weights_and_get_sampling_client": (tuple, lambda v: hasattr(v, "sample")),
        }

    def of_SamplingClient(self) -> dict[str, Any]:
        prompt = self.types.ModelInput.from_ints(IDS)
        params = self.types.SamplingParams(max_tokens=4, temperature=1.0)

        def sampled(v):
            whole = all(len(s.tokens) == len(s.logprobs) for s in v.sequences)
            return whole and len(v.sequences) == 2

        return {
            "sample": (lambda: (prompt, 2, params), sampled),
            "compute_logprobs": (lambda: (prompt,), lambda v: len(v) == len(IDS) and v[0] is None),
            "get_tokenizer": (tuple, lambda v: len(v.encode("a")) > 0),
            "get_base_model": (tuple, lambda v: v == self.model),
        }

    def of_RestClient(self) -> dict[str, Any]:
        run, path = self.trainer.model_id, self.weights

        def fresh() -> str:
            return str(settled(self.trainer.save_weights_for_sampler(self.name())).path)

        def external() -> str:
            return str(settled(self.trainer.save_weights_external(self.name())).path)

        def split(path: str) -> tuple[str, str]:
            head, _, tail = path.removeprefix("tinker://").partition("/")
            return head, tail

        sampler = getattr(self.sampler, "_sampling_session_id", "")
        some = lambda v: v is not None  # noqa: E731
        done = lambda v: True  # noqa: E731
        return {
            "get_server_capabilities": (tuple, lambda v: len(v.supported_models) > 0),
            "get_training_run": (lambda: (run,), lambda v: v.training_run_id == run),
            "get_training_run_by_tinker_path": (
                lambda: (path,),
                lambda v: v.training_run_id == run,
            ),
            "get_weights_info_by_tinker_path": (lambda: (path,), lambda v: v.lora_rank == 8),
            "list_training_runs": (tuple, lambda v: len(v.training_runs) > 0),
            "list_checkpoints": (
                lambda: (run,),
                lambda v: any(c.tinker_path == path for c in v.checkpoints),
            ),
            "get_external_weights_urls": (lambda: (external(),), lambda v: len(v.urls) > 0),
            "get_checkpoint_archive_url": (lambda: split(path), lambda v: bool(v.url)),
            "get_checkpoint_archive_url_from_tinker_path": (lambda: (path,), lambda v: bool(v.url)),
            "delete_checkpoint": (lambda: split(fresh()), done),
            "delete_checkpoint_from_tinker_path": (lambda: (fresh(),), done),
            "list_user_checkpoints": (tuple, lambda v: len(v.checkpoints) > 0),
            "get_sampler": (lambda: (sampler,), lambda v: v.base_model == self.model),
            "get_session": (lambda: (run.split(":")[0],), some),
            "list_sessions": (tuple, some),
            "publish_checkpoint_from_tinker_path": (lambda: (path,), done),
            "unpublish_checkpoint_from_tinker_path": (lambda: (path,), done),
            "set_checkpoint_ttl_from_tinker_path": (lambda: (path, 7200), done),
            "copy_weights": (lambda: (path,), lambda v: v.startswith("tinker://")),
            "whoami": (tuple, some),
            "get_audit_log": (tuple, some),
            "assign_session_project": (lambda: (run.split(":")[0], "project"), done),
            "export_session_trace": (lambda: (run.split(":")[0],), some),
            "get_current_checkpoint_storage_usage": (tuple, some),
            "search_sessions": (lambda: (self.types.SessionSearchRequest.model_construct(),), some),
            "get_billing_usage": (lambda: (datetime.datetime.now(), datetime.datetime.now()), some),
        }

    # What the API promises

    def promise_loss(self) -> None:
        """The loss is the sum over tokens, and twice the weights are twice the loss."""
        trainer = self.new_trainer()
        expected = -float(self.logprobs(trainer).sum())
        for factor in (1.0, 2.0):
            weights = np.full(len(IDS) - 1, factor)
            done = settled(trainer.forward_backward([self.datum(weights=weights)], "cross_entropy"))
            assert abs(done.metrics["loss:sum"] - factor * expected) < 1e-3 * abs(expected), (
                done.metrics
            )

    def promise_gradient(self) -> None:
        """The gradient is that of the sum: twice the weights, or the data twice, move twice as
        far."""
        moved = []
        for data in ([1.0], [2.0], [1.0, 1.0]):
            trainer = self.new_trainer()
            before = self.logprobs(trainer)
            for factor in data:
                weights = np.full(len(IDS) - 1, factor)
                trainer.forward_backward([self.datum(weights=weights)], "cross_entropy")
            settled(
                trainer.optim_step(self.adam(learning_rate=1e-3, eps=1e4))
            )  # with this eps a step is the gradient
            moved.append(float((self.logprobs(trainer) - before).sum()))
        assert (
            moved[0] > 0
            and abs(moved[1] / moved[0] - 2) < 0.1
            and abs(moved[2] / moved[0] - 2) < 0.1
        ), moved

    def promise_clip(self) -> None:
        """`grad_clip_norm` is honoured."""
        moved = []
        for clip in (0.0, 1e-3):
            trainer = self.new_trainer()
            before = self.logprobs(trainer)
            trainer.forward_backward([self.datum()], "cross_entropy")
            settled(trainer.optim_step(self.adam(learning_rate=1e-3, eps=1e4, grad_clip_norm=clip)))
            moved.append(float(np.abs(self.logprobs(trainer) - before).sum()))
        assert moved[1] < moved[0] / 10, moved

    def promise_losses(self) -> None:
        """`importance_sampling`, `ppo` and `cispo` are the documented sums."""
        trainer = self.new_trainer()
        new = self.logprobs(trainer)
        old, advantages = new - 0.3, np.linspace(-1, 1, len(new))
        ratio = np.exp(new - old)
        expected = {
            "importance_sampling": -(ratio * advantages).sum(),
            "ppo": -np.minimum(ratio * advantages, ratio.clip(0.8, 1.2) * advantages).sum(),
            "cispo": -(ratio.clip(0.0, 4.0) * new * advantages).sum(),
        }
        for loss, value in expected.items():
            done = settled(
                trainer.forward_backward([self.datum(logprobs=old, advantages=advantages)], loss)
            )
            assert abs(done.metrics["loss:sum"] - value) < 1e-3 * max(1, abs(value)), (
                loss,
                done.metrics,
                value,
            )

    def promise_same(self) -> None:
        """The sampler's log-probabilities are those of the trainer."""
        sampler = settled(self.trainer.save_weights_and_get_sampling_client())
        scored = settled(sampler.compute_logprobs(self.types.ModelInput.from_ints(IDS)))
        difference = np.abs(
            np.array(scored[-(len(IDS) - 1) :], float) - self.logprobs(self.trainer)
        ).max()
        assert difference < 1e-3, difference

    def promise_reload(self) -> None:
        """A state is taken up with its optimizer: the next step is the same."""
        path = settled(self.trainer.save_state(self.name())).path
        again = settled(self.service.create_training_client_from_state_with_optimizer(path))
        for trainer in (self.trainer, again):
            self.step(trainer)
        assert np.abs(self.logprobs(again) - self.logprobs(self.trainer)).max() < 1e-4

    def promise_once(self) -> None:
        """The same `seq_id` twice is applied once, and requests out of order are put in order."""
        import httpx

        plain, mine = self.new_trainer(), self.new_trainer()
        self.step(plain)

        def send(route: str, media: str, content: bytes) -> bool:
            headers = {
                "X-API-Key": os.environ["TINKER_API_KEY"],
                "Content-Type": f"application/{media}",
            }
            reply = httpx.post(
                f"{self.url}/api/v1/{route}", headers=headers, timeout=PATIENCE, content=content
            )
            return reply.status_code == 200 and "request_id" in reply.json()

        values = {"target_tokens": {"data": IDS[1:], "dtype": "int64"},
                  "weights": {"data": [1.0] * (len(IDS) - 1), "dtype": "float32"}}  # fmt: skip
        datum = {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": IDS[:-1]}]},
            "loss_fn_inputs": values,
        }
        plainly = {"model_id": mine.model_id, "seq_id": 1,
                   "forward_backward_input": {"data": [datum], "loss_fn": "cross_entropy"}}  # fmt: skip
        bodies = [("json", json.dumps(plainly).encode())]
        with contextlib.suppress(ImportError):  # older SDKs have JSON alone
            from tinker.proto.request_conv import forward_backward_request_to_proto

            given = self.types.ForwardBackwardInput(data=[self.datum()], loss_fn="cross_entropy")
            request = self.types.ForwardBackwardRequest(
                forward_backward_input=given, model_id=mine.model_id, seq_id=1
            )
            bodies.insert(
                0, ("x-protobuf", forward_backward_request_to_proto(request).SerializeToString())
            )
        step = {
            "model_id": mine.model_id,
            "seq_id": 2,
            "adam_params": self.adam().model_dump(),
            "type": "optim_step",
        }
        for _ in range(2):
            assert send("optim_step", "json", json.dumps(step).encode()), (
                "a step ahead of its pass is refused"
            )
            assert any(send("forward_backward", *body) for body in bodies), (
                "a pass after its step is refused"
            )
        mine._request_id_counter = mine._turn_counter = 2
        apart = np.abs(self.logprobs(mine) - self.logprobs(plain)).max()
        assert apart < 1e-5, (
            f"log-probabilities differ by {apart:.2g} from those after one pass and one step"
        )

    def promise_unknown(self) -> None:
        """A loss that the server has not is refused by name."""
        try:
            settled(self.new_trainer().forward_backward([self.datum()], "gspo"))
        except ValidationError as error:
            raise Refused("this SDK knows no such loss") from error
        except (self.tinker.RequestFailedError, self.tinker.APIStatusError) as error:
            assert "gspo" in str(error), error
        else:
            raise AssertionError("it was taken")

    def close(self) -> None:
        if not hasattr(self.service, "close"):
            raise Refused("this SDK has no close()")
        settled(self.service.close("success"))


def measure(site: str, url: str, model: str) -> dict[str, dict[str, str]]:
    """The verdicts of one SDK, in a process of its own."""
    root = str(Path(__file__).parents[2])
    settings = {
        "PYTHONPATH": os.pathsep.join([site, root, os.environ.get("PYTHONPATH", "")]),
        "TINKER_TELEMETRY": "0",
        "TINKER_PROJECT_ID": "a-project",
        "TINKER_API_KEY": os.environ.get("TINKER_API_KEY", "tml-any"),
    }
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.tinker.conformance",
        "--one",
        url,
        "--model",
        model,
    ]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **settings})
    if done.returncode:
        raise SystemExit(f"{site} against {url} did not end:\n{done.stderr[-4000:]}")
    verdicts: dict[str, dict[str, str]] = json.loads(done.stdout.splitlines()[-1])
    return verdicts


SIGNS = {"works": "works", "refused": "refused", "wrong": "**wrong**", "not tried": "not tried"}
HEAD = """# Conformance to the Tinker API

Measured on {day} by `python -m tests.tinker.conformance` ({system}, Python {python}, no GPU), with a Qwen3 of {model}
and random weights. Each method of the SDK's clients was called once.

- works: the result is as documented.
- refused: the server reports that it does not support the method (404, or a message).
- **wrong**: another error, another result, or no answer within {patience:g} s.
- –: the SDK has no such method. A method and its `_async` twin share a row if their results agree.

Open-RL is commit bfc0f09 of its repository, run from source on Python 3.11 (its project file asks for 3.12).
SkyRL 0.4.0 is not in the table: it needs Python 3.12 and imports torch, for which PyPI has no build without CUDA for
Linux on x86.
"""


def page(columns: dict[str, dict[str, dict[str, str]]], model: str) -> str:
    """The table as a page."""
    system, python = platform.system(), platform.python_version()
    lines = HEAD.format(
        day=datetime.date.today(), system=system, python=python, model=model, patience=PATIENCE
    ).split("\n")
    keys = list(dict.fromkeys(key for verdicts in columns.values() for key in verdicts))

    def cells(key: str) -> list[str]:
        return [
            SIGNS[verdicts[key]["verdict"]] if key in verdicts else "–"
            for verdicts in columns.values()
        ]

    for part in (*CLIENTS, "promise"):
        lines += [f"## {part}" if part != "promise" else "## What the API promises", ""]
        lines += ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        for key in (one for one in keys if one.startswith(f"{part}.")):
            if key.endswith("_async") and cells(key) == cells(key.removesuffix("_async")):
                continue
            name = key.removeprefix(f"{part}.")
            lines.append(
                f"| {name if part == 'promise' else f'`{name}`'} | {' | '.join(cells(key))} |"
            )
        lines.append("")
    wrong = [
        f"- {column}, {key.removeprefix('promise.')}: {verdict['why']}"
        for column, verdicts in columns.items()
        for key, verdict in verdicts.items()
        if verdict["verdict"] == "wrong"
        and not (
            key.endswith("_async") and verdicts[key.removesuffix("_async")]["verdict"] == "wrong"
        )
    ]
    return "\n".join([*lines, *(["## What was wrong", "", *wrong, ""] if wrong else [])])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="the base model as the servers call it")
    parser.add_argument(
        "--about", default="0.1 million parameters", help="the model's size, for the page"
    )
    parser.add_argument("--column", action="append", default=[], metavar="TITLE=URL,FOLDER")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}, not print it")
    parser.add_argument("--one", metavar="URL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(Checks(args.one, args.model).run()))
        os._exit(sys.stdout.flush() or 0)
    columns = {}
    for title, where in (column.split("=", 1) for column in args.column):
        url, folder = where.split(",", 1)
        columns[title] = measure(folder, url, args.model)
    text = page(columns, args.about)
    if args.write:
        PAGE.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
