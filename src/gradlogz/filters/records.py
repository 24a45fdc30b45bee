"""Records of tensors that are printed by their sizes and compared by their values.

    repr(a)           names and sizes of tensors, and the options that are not defaults
    a == b            True if types, options, dtypes, devices, sizes and values are equal: torch.equal, field by field
    a.allclose(b)     the same up to rounding: torch.allclose, field by field
    hash(a)           of type and sizes, so that equal records have equal hashes

Records without functions are saved by torch.save and loaded by torch.load with weights_only=True.

Read next: models/switching_model.py, prior_and_series.py, results.py.
"""

import dataclasses
from typing import Any

import torch

from .._typing import Tensor


class TensorRecord:
    """Base of records (../_pytree.py) that are printed by their sizes and compared by their values."""

    def __repr__(self) -> str:
        parts, dtypes = [], set()
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                parts.append(f"{field.name}={list(value.shape)}")
                if value.is_floating_point():
                    dtypes.add(str(value.dtype).removeprefix("torch."))
            elif value is not None and value != field.default:
                parts.append(f"{field.name}={_shown(value)}")
        return f"{type(self).__name__}({', '.join([*parts, *sorted(dtypes)])})"

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(_equal(a, b) for a, b in zip(_values(self), _values(other), strict=True))

    def __hash__(self) -> int:
        sizes = tuple(tuple(v.shape) if isinstance(v, Tensor) else None for v in _values(self))
        return hash((type(self).__name__, sizes))

    def allclose(self, other: object, *, rtol: float = 1e-5, atol: float = 1e-8) -> bool:
        """Return True if the other record has the same options and sizes, and values up to these tolerances."""
        if type(other) is not type(self):
            return False
        return all(_close(a, b, rtol, atol) for a, b in zip(_values(self), _values(other), strict=True))


def _values(record: Any) -> list[Any]:
    return [getattr(record, field.name) for field in dataclasses.fields(record)]


def _shown(value: Any) -> str:
    """Functions by their names, everything else as Python writes it."""
    if isinstance(value, tuple) and value and all(callable(f) for f in value):
        return f"({', '.join(_shown(f) for f in value)})"
    return getattr(value, "__name__", type(value).__name__) if callable(value) else repr(value)


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return bool(a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b))
    return _alike(a, b) and torch.equal(a, b)


def _close(a: Any, b: Any, rtol: float, atol: float) -> bool:
    if isinstance(a, TensorRecord):
        return a.allclose(b, rtol=rtol, atol=atol)
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or not a.is_floating_point():
        return _equal(a, b)
    return _alike(a, b) and torch.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True)


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device and a.shape == b.shape
