"""The choice of a kernel for switching filters: numba on the CPU, CUDA through NVRTC on a GPU, else the torch path.

numba      CPU, float32 and float64                                       cpu.py, cpu_gradients.py; extra [fast]
NVRTC      CUDA, float32 and float64                                      gpu.py, gpu_gradients.py
None       other gradients, tracing, few steps: the torch path            ../../filters/gaussian/switching.py
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from ..._errors import has_values
from ..._typing import Tensor
from ..optional import kernel_module

# Number of Kalman filter steps (one mode, one time) from which a compiled kernel pays off.
WORTH_FILTERING = 1 << 8
# The same on a GPU, where the first call compiles for about a second and every call synchronises once.
WORTH_FILTERING_THERE = 1 << 12


def filtering_kernel(tensors: tuple[Tensor | None, ...], filters: int, *, is_online: bool = False) -> Any:
    """Compiled kernel of the switching filters, a module with `forward`; None if none applies.

    Kernels support float32 and float64 without derivatives of any kind, and no CUDA graph capture. Online steps always
    use the CPU kernel, because they are repeated.
    """
    present = [t for t in tensors if t is not None]
    device = present[0].device
    worth = WORTH_FILTERING_THERE if device.type == "cuda" else WORTH_FILTERING
    is_worth = filters >= worth or (is_online and device.type == "cpu" and worth < math.inf)
    if not is_worth or not _are_plain(present):
        return None
    if device.type == "cuda":
        return None if torch.cuda.is_current_stream_capturing() else kernel_module(f"{__package__}.gpu", "ctypes")
    return kernel_module(f"{__package__}.cpu", "numba") if device.type == "cpu" else None


def gradient_kernel(tensors: tuple[Tensor | None, ...], filters: int, *, reports: bool) -> Any:
    """Compiled gradient of imm and gpb2, a module with `differentiate`; None if none applies.

    It supports reverse mode alone, and tensors of which at least one requires a gradient. If the filter reports fields,
    the torch path is used on the CPU, because it computes them with their gradients at once.
    """
    present = [t for t in tensors if t is not None]
    device = present[0].device.type
    is_worth = filters >= (WORTH_FILTERING_THERE if device == "cuda" else WORTH_FILTERING)
    if not is_worth or not torch.is_grad_enabled() or not any(t.requires_grad for t in present):
        return None
    if not _are_plain(present, with_gradients=True):
        return None
    if device == "cuda":
        is_recorded = torch.cuda.is_current_stream_capturing()
        return None if is_recorded else kernel_module(f"{__package__}.gpu_gradients", "ctypes")
    is_supported = device == "cpu" and not reports
    return kernel_module(f"{__package__}.cpu_gradients", "numba") if is_supported else None


def function_kernel(tensors: tuple[Tensor, ...], filters: int, *, is_online: bool) -> Any:
    """Compiled filter of built-in functions on the CPU, float64, a module with `forward`; None if none applies."""
    is_worth = filters >= WORTH_FILTERING or (is_online and WORTH_FILTERING < math.inf)
    if not is_worth or tensors[0].device.type != "cpu" or tensors[0].dtype != torch.float64 or not _are_plain(tensors):
        return None
    return kernel_module(f"{__package__}.functions", "numba")


def discretization_kernel(tensors: tuple[Tensor, ...]) -> Any:
    """Compiled discretisation on the CPU, a module with `discretize` and `discretize_chain`; None if none applies."""
    if tensors[0].device.type != "cpu" or WORTH_FILTERING == math.inf or not _are_plain(tensors):
        return None
    return kernel_module(f"{__package__}.discretization", "numba")


def backward_kernel(tensors: tuple[Tensor | None, ...], filters: int, *, is_repeated: bool = False) -> Any:
    """Compiled kernel of backward passes, a module with `smooth` and `differentiate`; None if none applies.

    It applies where the kernel of the filters does, on the CPU. A backward step of the torch path takes about four
    times as long as a step of a filter. Repeated passes over a series always use the kernel.
    """
    on_cpu = all(t is None or t.device.type == "cpu" for t in tensors)
    if not on_cpu or filtering_kernel(tensors, 4 * filters, is_online=is_repeated) is None:
        return None
    return kernel_module(f"{__package__}.backward", "numba")


def moments_kernel(tensors: tuple[Tensor, ...]) -> Any:
    """Compiled E step of one mode on the CPU, float64, a module with `moments`; None if none applies."""
    if tensors[0].device.type != "cpu" or tensors[0].dtype != torch.float64 or WORTH_FILTERING == math.inf:
        return None
    return kernel_module(f"{__package__}.one_mode", "numba") if _are_plain(tensors) else None


def _are_plain(tensors: Sequence[Tensor], *, with_gradients: bool = False) -> bool:
    """Return True if tensors have values of one kernel dtype on one device, and no other derivatives are needed."""
    if not has_values(*tensors) or forward_ad._current_level >= 0:
        return False
    refuses_gradients = not with_gradients and torch.is_grad_enabled()
    device, dtype = tensors[0].device, tensors[0].dtype
    if dtype not in (torch.float64, torch.float32):
        return False
    for t in tensors:
        if type(t) is not Tensor and type(t) is not torch.nn.Parameter:
            return False
        if (refuses_gradients and t.requires_grad) or t.dtype != dtype or t.device != device:
            return False
        if t.is_neg() or not t.numel():
            return False
    return True
