"""Fused attention operators of torch, read while a compiled graph runs them.

    scaled_dot_product_attention      is compiled into one of `OPERATORS`, which stays a call of torch in the graph
    FusedOperators                    a dispatch mode: sees this call with its operands, and changes nothing

Read next: compiled_passes.py, which enters the mode.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..._typing import Tensor
from ...kernels.tracing import is_traced

OPERATORS = tuple(
    getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default
    for name in (
        "flash_attention",
        "efficient_attention",
        "cudnn_attention",
        "flash_attention_for_cpu",
        "fused_attention_overrideable",
    )
)


class FusedCall(NamedTuple):
    """Operands of a fused operator."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float | None


class FusedOperators(TorchDispatchMode):
    """Context in which a function gets every call of a fused operator, after the operator has run."""

    def __init__(self, read: Callable[[FusedCall], None]) -> None:
        super().__init__()
        self._read = read

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: torch compiles inside this mode as it does outside."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in OPERATORS:
            call = _call(func, args, kwargs or {})
            if not is_traced(call[:3]):
                self._read(call)
        return result


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FusedCall:
    """Operands by name: the operators have them in different places, and name a mask attn_bias or attn_mask."""
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    mask = named.get("attn_bias", named.get("attn_mask"))
    return FusedCall(
        named["query"], named["key"], named["value"], mask, named.get("is_causal", False), named.get("scale")
    )
