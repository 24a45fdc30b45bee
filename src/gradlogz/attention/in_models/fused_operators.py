"""Fused attention operators of torch, read while a compiled graph runs them.

    scaled_dot_product_attention      is compiled into one of `OPERATORS`, which stays a call of torch in the graph
    FusedOperators                    a dispatch mode: sees this call with its operands, and changes nothing

Read next: compiled_passes.py, which enters the mode.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...kernels.tracing import is_traced
from .intercepted_calls import Call, call_from_sdpa

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


class FusedOperators(TorchDispatchMode):
    """Context in which a function gets every call of a fused operator, after the operator has run."""

    def __init__(self, read: Callable[[Call], None]) -> None:
        super().__init__()
        self._read = read

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: torch compiles inside this mode as it does outside."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in OPERATORS:
            call = call_from_operands(func, args, kwargs or {})
            if not is_traced(call[:3]):
                self._read(call)
        return result


def call_from_operands(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Convert a call of a fused operator; masks are named attn_bias or attn_mask."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    query, key, value = given["query"], given["key"], given["value"]
    return call_from_sdpa(
        query,
        key,
        value,
        given.get("attn_bias", given.get("attn_mask")),
        is_causal=given.get("is_causal", False),
        scale=given.get("scale"),
        enable_gqa=query.shape[1] != key.shape[1],
    )
