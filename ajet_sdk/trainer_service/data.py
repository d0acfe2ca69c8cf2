"""Converts protobuf messages of the Tinker API to arrays, and results to messages, with the SDK's
classes.

Letters of shapes: B sequences of a request, T the length of one, N tokens of all of them, K
alternatives of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from ajet_sdk.errors import MissingExtra, RequestRefused
from ajet_sdk.protocols import Sampled, Tokenizer
from ajet_sdk.trainer_service.inputs import Chunk, ModelInput, model_input
from ajet_sdk.types import Floats

LOSSES: Mapping[str, Mapping[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.05},
}
"""Each loss with the parameters of `loss_fn_config`, at the API's defaults."""


def messages() -> ModuleType:
    """The module with the API's protobuf classes. Raises MissingExtra."""
    try:
        from tinker.proto import tinker_public_pb2
    except ImportError as error:
        raise MissingExtra("tinker (it needs Python 3.11 or later)", "tinker") from error
    module: ModuleType = tinker_public_pb2
    return module


def pass_address(body: bytes) -> tuple[str, int]:
    """The policy id and number of a `ForwardBackwardRequest`. Raises RequestRefused."""
    from google.protobuf.message import DecodeError

    try:
        message = messages().ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise RequestRefused(
            "the request is not protobuf; use the SDK (tinker 0.25 or later)"
        ) from error
    return str(message.model_id), int(message.seq_id)


@dataclass(frozen=True, slots=True)
class Batch:
    """Data of a request: B sequences, with target token and weight for each position."""

    loss: str
    config: Mapping[str, float]
    inputs: list[ModelInput]
    targets: list[npt.NDArray[np.int64]]
    shares: list[Floats]
    """Weights for `cross_entropy`, advantages for other losses."""
    sampled: list[Floats]
    """The sampler's log-probabilities; zeros for `cross_entropy`."""

    def check(self, vocabulary: int, longest: int) -> None:
        """Raise RequestRefused if a sequence is too long or has ids outside the vocabulary."""
        for index, (given, targets_T) in enumerate(zip(self.inputs, self.targets, strict=True)):
            ids_T = given.ids
            if len(ids_T) > longest:
                raise RequestRefused(
                    f"datum {index} has {len(ids_T)} tokens, but this server takes {longest};"
                    " shorten it, or start the server with a larger --max-model-len"
                )
            both = np.concatenate([ids_T, targets_T])
            if not 0 <= both.min() <= both.max() < vocabulary:
                raise RequestRefused(
                    f"datum {index} has the token id"
                    f" {both.max() if both.max() >= vocabulary else both.min()}, but the model's"
                    f" ids are below {vocabulary}; tokenize with the tokenizer of the base model"
                )


def read_batch(message: Any, tokenizer: Tokenizer) -> Batch:
    """Reads a `ForwardBackwardRequest`. Raises RequestRefused with the datum and the input."""
    if message.loss_fn not in LOSSES:
        raise RequestRefused(
            f"the loss {message.loss_fn!r} is not computed here; use one of {', '.join(LOSSES)}, or"
            " forward_backward_custom, which computes it in the client",
            "loss_fn",
        )
    settings = {name: value.number for name, value in message.loss_fn_config_v2.items()} or dict(
        message.loss_fn_config
    )
    if unknown := set(settings) - set(LOSSES[message.loss_fn]):
        known = ", ".join(LOSSES[message.loss_fn]) or "no parameters"
        raise RequestRefused(
            f"{message.loss_fn} has no parameter {sorted(unknown)[0]!r}; it has {known}"
        )
    if not len(message.data):
        raise RequestRefused("the request has no data")
    imitates = message.loss_fn == "cross_entropy"
    batch = Batch(message.loss_fn, {**LOSSES[message.loss_fn], **settings}, [], [], [], [])
    for index, datum in enumerate(message.data):
        given = _model_input(datum, index, tokenizer)
        if imitates:
            allowed = {"target_tokens", "weights"}
        else:
            allowed = {"target_tokens", "logprobs", "advantages"}
        if unknown := set(datum.loss_fn_inputs) - allowed:
            raise RequestRefused(
                f"datum {index}: {message.loss_fn} takes no input {sorted(unknown)[0]!r}; it takes "
                f"{', '.join(sorted(allowed))}"
            )
        size = len(given.ids)
        batch.inputs.append(given)
        batch.targets.append(_input(datum, "target_tokens", index, size).astype(np.int64))
        if imitates:
            weights = np.ones(size, np.float32)
            if "weights" in datum.loss_fn_inputs:
                shares = _input(datum, "weights", index, size)
            else:
                shares = weights
            batch.sampled.append(np.zeros(size, np.float32))
        else:
            shares = _input(datum, "advantages", index, size)
            batch.sampled.append(_input(datum, "logprobs", index, size).astype(np.float32))
        batch.shares.append(shares.astype(np.float32))
    return batch


def _model_input(datum: Any, index: int, tokenizer: Tokenizer) -> ModelInput:
    chunks: list[tuple[Chunk, int | None]] = []
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind == "encoded_text":
            chunks.append((np.frombuffer(chunk.encoded_text.tokens, np.int32).tolist(), None))
        elif kind == "image":
            chunks.append((chunk.image.data, chunk.image.expected_tokens or None))
        else:
            raise RequestRefused(
                f"datum {index} has a chunk of type {kind}; this server takes text and pictures"
            )
    given = model_input(chunks, tokenizer, f"datum {index}")
    if not len(given.ids):
        raise RequestRefused(f"datum {index} has no tokens")
    return given


def _input(datum: Any, name: str, index: int, size: int) -> npt.NDArray[np.generic]:
    if name not in datum.loss_fn_inputs:
        raise RequestRefused(
            f"datum {index} lacks the input {name!r}; it needs a value for each token of"
            " model_input"
        )
    tensor = datum.loss_fn_inputs[name]
    pb = messages()
    if tensor.HasField("sparse_csr") or len(tensor.shape) > 1:
        raise RequestRefused(
            f"datum {index}: {name} must be a dense tensor of one dimension, {size} values"
        )
    kind = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64, pb.DTYPE_INT32: np.int32}.get(
        tensor.dtype
    )
    if kind is None:
        raise RequestRefused(f"datum {index}: {name} must be of float32 or int64")
    values_T = np.frombuffer(tensor.dense, kind)
    if len(values_T) != size:
        raise RequestRefused(
            f"datum {index}: {name} has {len(values_T)} values for {size} tokens of model_input"
        )
    if not np.isfinite(values_T).all():
        raise RequestRefused(f"datum {index}: {name} has a value that is not finite")
    return values_T


def pass_result(logprobs: Sequence[Floats], loss: float) -> bytes:
    """Builds a `ForwardBackwardOutput` with the log-probability of each target, and the loss summed
    over all tokens."""
    pb = messages()
    ends = np.cumsum([0, *(array.nbytes for array in logprobs)], dtype=np.int64)
    field = pb.BatchedTensor(
        data=b"".join(array.tobytes() for array in logprobs),
        offsets=ends.tobytes(),
        dtype=pb.DTYPE_FLOAT32,
    )
    record = pb.ArrayRecord(fields={"logprobs": field}, num_datums=len(logprobs))
    output = pb.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics={"loss:sum": loss}
    )
    return bytes(output.SerializeToString(deterministic=True))


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of a prompt's T tokens (NaN if not scored), and the K most likely at each
    position."""

    logprobs_T: Floats
    ids_TK: npt.NDArray[np.int32]
    logprobs_TK: Floats


def sample_result(sampled: Sequence[Sampled], prompt: PromptScores | None) -> bytes:
    pb = messages()
    response = pb.SampleResponse()
    for sample in sampled:
        response.sequences.append(
            pb.SampledSequence(
                stop_reason=(
                    pb.STOP_REASON_LENGTH
                    if sample.finish_reason == "length"
                    else pb.STOP_REASON_STOP
                ),
                tokens=np.asarray(sample.output_ids, np.int32).tobytes(),
                logprobs=np.asarray(sample.logprobs, np.float32).tobytes(),
            )
        )
    if prompt is not None:
        response.prompt_logprobs = prompt.logprobs_T.tobytes()
        length, k = prompt.ids_TK.shape
        if k:
            top = pb.TopkLogprobs(
                token_ids=prompt.ids_TK.tobytes(),
                logprobs=prompt.logprobs_TK.tobytes(),
                k=k,
                length=length,
            )
            response.topk_prompt_logprobs.CopyFrom(top)
    return bytes(response.SerializeToString())
