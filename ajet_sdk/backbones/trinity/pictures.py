"""Pictures in what Trinity's Tinker trainer sends to the service, which would have their tokens
alone."""

from __future__ import annotations

from logging import Logger
from typing import Any

import tinker
import trinity.trainer.tinker.tinker_trainer as tinker_trainer
from trinity.common.experience import Experience
from trinity.trainer.tinker.utils import to_tinker_input

from ajet_sdk.engines.tinker.sdk import model_input, target_tokens


def install() -> None:
    """Let the trainer of this process send pictures."""
    tinker_trainer.to_tinker_input = with_pictures


def with_pictures(
    experiences: list[Experience], logger: Logger
) -> tuple[list[tinker.Datum], list[tinker.ModelInput], list[dict[str, Any]]]:
    """What Trinity makes of experiences, with the pictures in `info["pictures"]`."""
    data, inputs, tensors = to_tinker_input(experiences, logger)
    for at, experience in enumerate(experiences):
        spans = experience.info.get("pictures")
        if not spans:
            continue
        ids = experience.tokens.tolist()
        inputs[at] = model_input(tinker, ids, spans)
        data[at] = tinker.Datum(
            model_input=model_input(tinker, ids[:-1], spans),
            loss_fn_inputs={
                "weights": data[at].loss_fn_inputs["weights"],
                "target_tokens": target_tokens(ids, spans),
            },
        )
    return data, inputs, tensors
