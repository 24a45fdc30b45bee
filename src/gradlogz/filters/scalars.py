"""Conversion of Python numbers, numpy arrays and tensors to tensors of one dtype on one device.

Read next: models/linear_motion.py, conjugate/families.py.
"""

from collections.abc import Sequence
from typing import Any

import torch

from .._typing import Tensor

Number = float | Tensor
Numbers = Number | Sequence[float]  # one for all axes, or one for each


def from_arrays(values: dict[str, Any], dimensions: dict[str, int] | None = None) -> dict[str, Any]:
    """Convert numpy arrays and numbers to tensors; everything else is returned as it is, for checks to refuse.

    Arrays are copied and keep a floating dtype. Arrays of integers and numbers take the dtype of the first tensor or
    floating array, or torch's default; numbers become tensors with the given number of dimensions, all of size 1.
    """
    if all(value is None or isinstance(value, Tensor) for value in values.values()):
        return values
    made = {name: from_array(value) for name, value in values.items()}
    floats = [t for t in made.values() if isinstance(t, Tensor) and t.is_floating_point()]
    dtype, device = (floats[0].dtype, floats[0].device) if floats else (torch.get_default_dtype(), None)
    for name, value in values.items():
        if isinstance(value, bool) or value is None or isinstance(value, Tensor):
            continue
        if isinstance(value, (int, float)):
            size = [1] * (dimensions or {}).get(name, 0)
            made[name] = torch.full(size, value, dtype=dtype, device=device)
        elif isinstance(made[name], Tensor):
            is_integer = not made[name].is_floating_point() and made[name].dtype != torch.bool
            made[name] = made[name].to(dtype=dtype if is_integer else None, device=device)
    return made


def from_array(value: Any) -> Any:
    """A numpy array of numbers as a tensor, copied; everything else as it is."""
    is_array = type(value).__module__ == "numpy" and hasattr(value, "dtype") and not isinstance(value, (int, float))
    return torch.tensor(value) if is_array and value.dtype.kind in "biufc" else value


def with_numbers(**numbers: Numbers) -> dict[str, Tensor]:
    """Convert numbers and lists of them to tensors like the first tensor, or with torch's defaults if there is none."""
    values: dict[str, Any] = {name: from_array(n) for name, n in numbers.items()}
    like = next((n for n in values.values() if isinstance(n, Tensor)), None)
    dtype, device = (torch.get_default_dtype(), None) if like is None else (like.dtype, like.device)
    return {
        name: torch.as_tensor(n, dtype=dtype, device=device) if isinstance(n, (int, float, list, tuple)) else n
        for name, n in values.items()
    }


def as_tensors(
    numbers: dict[str, Numbers], *, dtype: torch.dtype | None, device: torch.device | str | None
) -> dict[str, Tensor]:
    """Convert all values to one dtype and device: the given ones, or those of the first tensor."""
    numbers = {name: from_array(n) for name, n in numbers.items()}
    tensors = with_numbers(**numbers)
    like = next((n for n in numbers.values() if isinstance(n, Tensor)), next(iter(tensors.values())))
    dtype, device = dtype or like.dtype, device or like.device
    return {name: torch.as_tensor(numbers[name], dtype=dtype, device=device) for name in tensors}
