"""Lets Trinity-RFT 0.6 run without GPUs and without vLLM, which one of its modules, for images and
videos, always imports.

That module is replaced by functions that raise, also beside a vLLM: Trinity's module can be imported
with vLLM up to 0.23 only. Ray's workers call `install`, too.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import NoReturn

from ajet_sdk.cluster.code import install_code

HOOK = f"{__name__}.install"
"""The function that Ray's workers call when they start."""
_MODULE = "trinity.common.models.mm_utils"
_FUNCTIONS = (
    "should_use_processor",
    "vLLMMultiModalRender",
    "combine_output_token_ids",
    "build_mm_message",
    "processor_or_tokenizer_cls",
)
"""Names that Trinity's other modules import from it."""


def _refuse(*_: object, **__: object) -> NoReturn:
    raise RuntimeError(
        "Trinity handles images and videos with vLLM, which a run without GPUs does not use: ajet"
        " install trinity --cuda"
    )


def install() -> None:
    """Make the run's code importable in a worker, and Trinity without vLLM. Idempotent."""
    install_code()
    stand_in()


def stand_in() -> None:
    """Replace Trinity's module in this process, unless it is loaded."""
    if _MODULE not in sys.modules:
        module = ModuleType(_MODULE)
        vars(module).update(dict.fromkeys(_FUNCTIONS, _refuse))
        sys.modules[_MODULE] = module
