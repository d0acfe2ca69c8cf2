"""Computes matrix products in bfloat16 over weights in float32, on CPUs with instructions for them.

Weights in bfloat16 would also round the sums over the layers. Here only the products of the layers
are rounded, as under PyTorch's autocast; weights, sums, attention and the head stay in float32.
Rounding of the head causes most of the difference between sampler and trainer (MiniMax-M1,
arXiv:2506.13585, section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_INSTRUCTIONS = ("avx512_bf16", "amx_bf16")


def instructions() -> str | None:
    """PyTorch's name of the processor's instructions for products in bfloat16; None without
    them."""
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return next((name for name in _INSTRUCTIONS if capabilities.get(name)), None)


def inner_model(model: PreTrainedModel) -> PreTrainedModel:
    """The model that an adapter wraps, or the model itself."""
    inner: PreTrainedModel = getattr(model, "get_base_model", lambda: model)()
    return inner


def multiply_in(model: PreTrainedModel, products: torch.dtype) -> None:
    """Let the layers of a model, adapters included, multiply in `products`."""
    body: Any = inner_model(model).base_model
    body.products = products
    body.forward = MethodType(_forward, body)  # a method, so that a copy of the model gets its own


def _forward(self: PreTrainedModel, *arguments: object, **named: object) -> object:
    products = products_of(self)
    with torch.autocast(self.device.type, products, enabled=products != self.dtype):
        return type(self).forward(self, *arguments, **named)


def products_of(model: PreTrainedModel) -> torch.dtype:
    """The type of the products in the layers of a model."""
    products: torch.dtype = getattr(inner_model(model).base_model, "products", model.dtype)
    return products


@contextmanager
def exact_products(model: PreTrainedModel) -> Iterator[None]:
    """Compute products in the type of the weights, to compare two computations without their
    rounding."""
    products = products_of(model)
    if products == model.dtype:
        yield
        return
    multiply_in(model, model.dtype)
    try:
        yield
    finally:
        multiply_in(model, products)
