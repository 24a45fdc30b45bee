"""Query, key and value of attention without a softmax, checked and arranged as [b, h, tokens, size].

The functions beside `attend` (linear.py, sigmoid.py) take plain tensors with equal leading dimensions, and compute in
float32 or float64.

Read next: linear.py, sigmoid.py.
"""

import math
from typing import NamedTuple

import torch

from .._autocast import wide
from .._errors import InputTypeError, InputValueError, shape_of
from .._typing import Float, Tensor


class Operands(NamedTuple):
    """Operands in float32 or float64, and the leading dimensions of the arguments."""

    query: Float[Tensor, "b h m d"]
    key: Float[Tensor, "b h n d"]
    value: Float[Tensor, "b h n v"]
    lead: tuple[int, ...]

    @property
    def batch(self) -> torch.Size:
        """Dimensions before the heads."""
        return torch.Size(self.lead[:-1])

    @property
    def size(self) -> tuple[int, int, int]:
        """Numbers of heads, queries and keys."""
        return self.query.shape[1], self.query.shape[2], self.key.shape[2]

    def restored(self, tensor: Float[Tensor, "b h *rest"]) -> Float[Tensor, "..."]:
        """A result with the leading dimensions of the arguments."""
        return tensor.reshape(*self.lead, *tensor.shape[2:])


def operands(call: str, query: Tensor, key: Tensor, value: Tensor) -> Operands:
    """Check and arrange the operands of a call."""
    tensors = {"query": query, "key": key, "value": value}
    for name, t in tensors.items():
        if not isinstance(t, Tensor) or not t.is_floating_point() or t.dtype != query.dtype or t.ndim < 2:
            fact = f"{t.dtype} of shape {shape_of(t)}" if isinstance(t, Tensor) else type(t).__name__
            condition = f"{name} must be a floating-point tensor [*b, tokens, size] with the dtype of query"
            raise InputTypeError(call, name, f"{condition}, got {fact}", "Convert it with .to(query.dtype).")
    if key.shape[-1] != query.shape[-1] or not query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        fact = ", ".join(f"{name} {shape_of(t)}" for name, t in tensors.items())
        remedy = "Expand the leading dimensions to the same batch and heads."
        raise InputValueError(
            call, "key", f"query, key and value must be [*b, m, d], [*b, n, d], [*b, n, v], got {fact}", remedy
        )
    if key.shape[-2] != value.shape[-2]:
        condition = f"value must have n={key.shape[-2]} tokens, one for each key"
        raise InputValueError(
            call, "value", f"{condition}, got shape {shape_of(value)}", "Cut or pad one of them first."
        )
    lead = tuple(query.shape[:-2])
    b, h = math.prod(lead[:-1]), lead[-1] if lead else 1
    q, k, v = (wide(t).reshape(b, h, *t.shape[-2:]) for t in (query, key, value))
    return Operands(q, k, v, lead)
