"""Dimension names of all annotated shapes in this package, and conversion of Python numbers to scalar tensors.

b   batch            h   heads           m   queries         n   points
d   dimension        e   new dimension   v   value dimension
t   time             k   components, modes
s   state            o   observation     l   layers          p   side of a matrix

*b  any number of leading batch dimensions
*bm the batch of a measure followed by any number of query dimensions
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["Bool", "Float", "Int", "Tensor", "as_scalar_tensor"]


def as_scalar_tensor(value: Any, like: Any = None, ndim: int = 0) -> Any:
    """Convert a Python number to a tensor [1, ..., 1] of ndim dimensions; return anything else unchanged.

    The dtype and device are those of `like` if it is a tensor, otherwise torch's defaults.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    dtype, device = (like.dtype, like.device) if isinstance(like, Tensor) else (torch.get_default_dtype(), None)
    return torch.full((1,) * ndim, float(value), dtype=dtype, device=device)
