"""Checks of arguments that several chapters share.

    call: what is wrong with which argument (the value, if it helps). What to do.

Messages hold shapes, dtypes and counts, never tensors. Values are checked only where they can be read: not while
torch.compile traces, and not on the wrapped tensors of torch.func.

Read next: _input_errors.py (the exceptions).
"""

import math

import torch
from torch import Tensor

from ._input_errors import InputError as InputError
from ._input_errors import InputNotImplementedError as InputNotImplementedError
from ._input_errors import InputRuntimeError as InputRuntimeError
from ._input_errors import InputTypeError as InputTypeError
from ._input_errors import InputValueError as InputValueError
from ._input_errors import MissingPackageError as MissingPackageError

FLOATS = (torch.float32, torch.float64)


def has_values(*tensors: Tensor) -> bool:
    """Return whether the values of these tensors can be read: not while tracing or inside torch.func transforms."""
    if torch.compiler.is_compiling():
        return False
    return not any(torch._C._functorch.is_functorch_wrapped_tensor(t) or t.is_meta for t in tensors)


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Shape as a plain tuple, for messages."""
    return tuple(tensor.shape)


def present(**tensors: Tensor | None) -> dict[str, Tensor]:
    """Arguments that are not None, by name."""
    return {name: t for name, t in tensors.items() if t is not None}


def check_floats(call: str, **tensors: Tensor) -> None:
    """Check that all arguments are tensors, all float32 or all float64, on one device."""
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            fact, remedy = type(t).__name__, "Wrap it in torch.as_tensor."
            kind = getattr(getattr(t, "dtype", None), "kind", "f")  # of a numpy array
            if kind in "mM":
                fact, remedy = f"{fact} of {t.dtype}", f"Pass seconds: ({name} - {name}[0]) / np.timedelta64(1, 's')."
            elif kind not in "biufc":
                fact, remedy = f"{fact} of {t.dtype}", "Convert it to numbers with .astype(float)."
            raise InputTypeError(call, name, f"{name} must be a tensor, got {fact}", remedy)
        if t.dtype not in FLOATS:
            remedy = f"Convert it with {name}.float() or {name}.double(); a mask of zeros and ones with {name}.bool()."
            raise InputTypeError(call, name, f"{name} must be float32 or float64, got {t.dtype}", remedy)
    if len({t.dtype for t in tensors.values()}) > 1:
        fact = ", ".join(f"{name} {t.dtype}" for name, t in tensors.items())
        raise InputTypeError(
            call, None, f"tensors must share one dtype, got {fact}", "Convert one of them with .to(dtype)."
        )
    if len({t.device for t in tensors.values()}) > 1:
        fact = ", ".join(f"{name} on {t.device}" for name, t in tensors.items())
        raise InputValueError(
            call, None, f"tensors must be on one device, got {fact}", "Move one of them with .to(device)."
        )


def check_finite(call: str, **tensors: Tensor) -> None:
    """Check that no tensor contains NaN or infinities."""
    for name, t in tensors.items():
        if not has_values(t):
            continue
        if math.isfinite(float(t.detach().sum())):  # a finite sum has finite terms
            continue
        if bad := int((~torch.isfinite(t)).sum()):
            problem = f"{name} must be finite, but {bad} of {t.numel()} entries are NaN or infinite"
            raise InputValueError(call, name, problem, "Mask or remove those entries first.")


def check_logarithms(call: str, name: str, logarithms: Tensor) -> None:
    """Check that log weights are finite or -inf (no mass)."""
    if not has_values(logarithms):
        return
    bad = int((torch.isnan(logarithms) | (logarithms == torch.inf)).sum())
    if bad:
        problem = f"{name} must be finite or -inf, but {bad} of {logarithms.numel()} entries are NaN or +inf"
        raise InputValueError(call, name, problem, "Use -inf for points without mass.")


def check_positive(call: str, **tensors: Tensor) -> None:
    """Check that every entry of every tensor is positive."""
    for name, t in tensors.items():
        if not has_values(t):
            continue
        if bool((t <= 0).any()):
            problem = f"{name} must be positive, but {int((t <= 0).sum())} of {t.numel()} entries are at or below 0"
            raise InputValueError(call, name, problem, "Pass values above 0.")


ANY_MASS = "Normalise them (torch.log_softmax), or use add for measures of any mass."


def check_normalized(call: str, name: str, total: Tensor, remedy: str = ANY_MASS) -> None:
    """Check that log masses are 0: the probabilities sum to one."""
    if not has_values(total):
        return
    tolerance = 1e-4 if total.dtype == torch.float32 else 1e-8
    worst = float(total.detach().abs().max()) if total.numel() else 0.0
    if not worst <= tolerance:
        problem = f"{name} must sum to one, but the log of their sum is off by up to {worst:.3g}"
        raise InputValueError(call, name, problem, remedy)


def check_positive_semidefinite(call: str, name: str, matrix: Tensor) -> None:
    """Check that a covariance is symmetric and has no eigenvalue below rounding error."""
    if not has_values(matrix) or matrix.numel() == 0:
        return
    matrix = matrix.detach()
    tolerance = matrix.abs().amax((-2, -1)) * matrix.shape[-1] * 16 * torch.finfo(matrix.dtype).eps
    asymmetry = (matrix - matrix.mT).abs().amax((-2, -1))
    if bool((asymmetry > tolerance).any()):
        problem = f"{name} must be symmetric, but its asymmetry is {float(asymmetry.max()):.3g}"
        raise InputValueError(call, name, problem, f"Pass ({name} + {name}.mT) / 2.")
    smallest = torch.linalg.eigvalsh(matrix).amin(-1)
    if bool((smallest < -tolerance).any()):
        problem = f"{name} must be positive semidefinite, but its smallest eigenvalue is {float(smallest.min()):.3g}"
        remedy = "Clip its negative eigenvalues, or add a multiple of the identity."
        raise InputValueError(call, name, problem, remedy)
