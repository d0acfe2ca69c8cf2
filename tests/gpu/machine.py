"""The device: what it is, a clock that waits for it, what it allocates, and how fast it
multiplies."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch

_TERAFLOPS = {  # by the makers' data sheets: dense bfloat16, float32 without TF32
    "H100 PCIe": (756, 51),
    "H100 NVL": (835, 60),
    "H100": (989, 67),
    "GH200": (989, 67),
    "H200 NVL": (835, 60),
    "H200": (989, 67),
    "H800": (989, 67),
    "H20": (148, 44),
    "B200": (2250, 75),
    "A100": (312, 19.5),
    "A800": (312, 19.5),
    "A40": (150, 37.4),
    "A10G": (70, 35),
    "A10": (125, 31.2),
    "L40S": (362, 91.6),
    "L40": (181, 90.5),
    "L4": (121, 30.3),
    "RTX 4090": (165, 82.6),
    "RTX 3090": (71, 35.6),
}
_PACKAGES = ("ajet", "torch", "transformers", "tokenizers", "peft", "numpy", "pyarrow", "duckdb", "triton",
             "flash-attn", "vllm", "trinity-rft")  # fmt: skip


def clock(device: torch.device) -> float:
    """Seconds, once the device has done all that it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def free(device: torch.device) -> None:
    """Give memory that nothing holds back to the device; call it when the last reference is
    gone."""
    import gc

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def peak_memory(device: torch.device, work: Callable[[], object]) -> int:
    """Bytes that `work` has allocated at once, above what was allocated when it began."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    return int(np.cumsum([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]).max())


def peak_rate(name: str, dtype: torch.dtype) -> float | None:
    """Floating-point operations a second that the maker promises of a GPU; None for one not
    listed."""
    for part, (low, full) in sorted(_TERAFLOPS.items(), key=lambda item: -len(item[0])):
        if part.lower() in name.lower():
            return (full if dtype == torch.float32 else low) * 1e12
    return None


def matmul_rate(device: torch.device, dtype: torch.dtype, size: int, rounds: int = 10) -> float:
    """Floating-point operations a second of a product of square matrices, after three to warm
    up."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    for _ in range(3):
        a @ b
    begin = clock(device)
    for _ in range(rounds):
        a @ b
    return 2 * size**3 * rounds / (clock(device) - begin)


def describe(device: torch.device) -> dict[str, Any]:
    """The machine in a form that JSON takes."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    known: dict[str, Any] = {
        "device": device.type,
        "python": platform.python_version(),
        "versions": versions,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        known |= {
            "name": properties.name,
            "memory": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    else:
        known["name"] = platform.processor() or platform.machine()
    return known
