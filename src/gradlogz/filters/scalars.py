"""Conversion of Python numbers and tensors to tensors of one dtype on one device.

Read next: models/linear_motion.py, conjugate/families.py.
"""

import torch

from .._typing import Tensor

Number = float | Tensor


def with_numbers(**numbers: Number) -> dict[str, Tensor]:
    """Convert Python numbers to tensors like the first tensor, or with torch's defaults if there is none."""
    like = next((n for n in numbers.values() if isinstance(n, Tensor)), None)
    dtype, device = (torch.get_default_dtype(), None) if like is None else (like.dtype, like.device)
    return {
        name: torch.as_tensor(n, dtype=dtype, device=device) if isinstance(n, (int, float)) else n
        for name, n in numbers.items()
    }


def as_tensors(
    numbers: dict[str, Number], *, dtype: torch.dtype | None, device: torch.device | str | None
) -> dict[str, Tensor]:
    """Convert all values to one dtype and device: the given ones, or those of the first tensor."""
    tensors = with_numbers(**numbers)
    like = next((n for n in numbers.values() if isinstance(n, Tensor)), next(iter(tensors.values())))
    dtype, device = dtype or like.dtype, device or like.device
    return {name: torch.as_tensor(numbers[name], dtype=dtype, device=device) for name in tensors}
