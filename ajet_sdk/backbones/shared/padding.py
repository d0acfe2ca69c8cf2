"""verl takes the padding from a batch with functions of flash-attn, whatever the attention; here without it."""

from __future__ import annotations

from importlib.util import find_spec


def unpad_without_flash_attention() -> None:
    """Where flash-attn is not installed let verl 0.8, in this process, use its own functions for it.

    They are plain torch, and give the same; verl keeps them for NPUs.
    """
    if find_spec("flash_attn") is not None:
        return
    from verl.utils import attention_utils, npu_flash_attn_utils

    named = ("index_first_axis", "pad_input", "rearrange", "unpad_input")
    functions = tuple(getattr(npu_flash_attn_utils, name) for name in named)
    attention_utils._get_attention_functions = lambda: functions
