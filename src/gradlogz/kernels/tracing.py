"""Tests whether operators are executed as they are, or traced or transformed by torch."""

from collections.abc import Sequence

from torch import Tensor
from torch._C import _get_tracing_state, _len_torch_dispatch_stack
from torch._C._functorch import maybe_current_level


def under_transform() -> bool:
    """Return whether a torch.func transform is active; constant during tracing."""
    return maybe_current_level() is not None


# As torch.compiler.assume_constant_result, without importing the compiler, which takes longer than importing torch.
under_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_traced(operands: Sequence[Tensor]) -> bool:
    """Return whether operators are intercepted: by a tracer, a dispatch mode or a wrapper subclass."""
    if _get_tracing_state() is not None or _len_torch_dispatch_stack():
        return True
    return any(type(t) is not Tensor and type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__ for t in operands)
