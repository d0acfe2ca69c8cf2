"""vLLM as the sampler beside the trainer, on the same device."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from tests.gpu import Figure, Setting, Skipped
from tests.gpu.local import case


def vllm(setting: Setting) -> Iterator[Figure]:
    """Full weights and LoRA in bfloat16, sampled by a vLLM server that gets them anew after each
    step."""
    if find_spec("vllm") is None:
        raise Skipped("vLLM is not installed (ajet install vllm)")
    if setting.dry and "vllm" not in setting.named:
        raise Skipped("its server takes a minute to start: name it to run it")
    for lora in (False, True):
        yield from case(setting, "bfloat16", lora, "sdpa", sampler="vllm")
