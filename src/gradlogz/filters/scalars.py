"""Python numbers beside tensors: all of them as tensors of one dtype on one device.

Read next: models/linear_motion.py, conjugate/families.py.
"""

import torch

from .._typing import Tensor

Number = float | Tensor


def with_numbers(**given: Number) -> dict[str, Tensor]:
    """Tensors as they are, Python numbers as tensors like the first of them, or with torch's defaults without one."""
    like = next((n for n in given.values() if isinstance(n, Tensor)), None)
    dtype, device = (torch.get_default_dtype(), None) if like is None else (like.dtype, like.device)
    return {
        name: torch.as_tensor(n, dtype=dtype, device=device) if isinstance(n, (int, float)) else n
        for name, n in given.items()
    }


def as_tensors(
    given: dict[str, Number], *, dtype: torch.dtype | None, device: torch.device | str | None
) -> dict[str, Tensor]:
    """All of one dtype on one device: those named, or those of the first tensor."""
    tensors = with_numbers(**given)
    like = next((n for n in given.values() if isinstance(n, Tensor)), next(iter(tensors.values())))
    dtype, device = dtype or like.dtype, device or like.device
    return {name: torch.as_tensor(given[name], dtype=dtype, device=device) for name in tensors}
