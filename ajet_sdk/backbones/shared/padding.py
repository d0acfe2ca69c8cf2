"""verl removes padding with functions of flash-attn; this replaces them where it is not
installed."""

from __future__ import annotations

from importlib.util import find_spec


def unpad_without_flash_attention() -> None:
    """Let verl 0.8 use its own functions in this process if flash-attn is not installed.

    They are plain torch with the same results; verl has them for NPUs.
    """
    if find_spec("flash_attn") is not None:
        return
    from verl.utils import attention_utils, npu_flash_attn_utils

    named = ("index_first_axis", "pad_input", "rearrange", "unpad_input")
    functions = tuple(getattr(npu_flash_attn_utils, name) for name in named)
    attention_utils._get_attention_functions = lambda: functions
