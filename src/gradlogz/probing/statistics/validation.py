"""Precision of tensors and equality of shapes, for all statistics."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..._errors import InputValueError
from ..._typing import Tensor


def double(tensor: Tensor) -> Tensor:
    """Convert a tensor to float64 on its device, or on the CPU if the device has no float64."""
    return tensor.cpu().double() if tensor.device.type == "mps" else tensor.double()


@contextmanager
def full_precision_products() -> Iterator[None]:
    """Context in which float32 matrix products are not rounded to TF32 or bf16."""
    rounded: list[tuple[Any, str]] = []
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    for backend in backends:
        if backend.fp32_precision in ("tf32", "bf16"):
            rounded.append((backend, backend.fp32_precision))
            backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        for backend, precision in rounded:
            backend.fp32_precision = precision


def check_alike(call: str, one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    """Raise if two statistics differ in their shapes, which addition would silently broadcast."""
    shapes = [tuple(None if t is None else tuple(t.shape) for t in fields) for fields in (one, other)]
    if shapes[0] != shapes[1]:
        fact = " and ".join(", ".join(map(str, each)) for each in shapes)
        remedy = "Merge statistics of the same quantity of the same layer."
        raise InputValueError(call, "other", f"both must have the same shapes, got {fact}", remedy)
