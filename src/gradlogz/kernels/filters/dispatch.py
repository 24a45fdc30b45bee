"""The choice of a kernel for switching filters: numba on the CPU, CUDA through NVRTC on a GPU, else the torch path.

numba      CPU, float32 and float64                                       cpu.py, extra [fast]
NVRTC      CUDA, float32 and float64                                      gpu.py
None       whatever is differentiated, traced or small: the torch path    ../../filters/gaussian/switching.py
"""

import math
from typing import Any

import torch
from torch.autograd import forward_ad

from ..._errors import has_values
from ..._typing import Tensor
from ..optional import kernel_module

# Kalman filters, one step of one mode each, from which it is worth to compile them all.
WORTH_FILTERING = 1 << 8
# The same on a GPU, where the first call compiles for a second and every call waits once.
WORTH_FILTERING_THERE = 1 << 12


def filtering_kernel(tensors: tuple[Tensor | None, ...], filters: int, *, is_online: bool = False) -> Any:
    """The compiled kernel of switching filters, a module with `forward`; or None.

    It takes float64 and float32, of which nothing is to be differentiated, in any mode; no recorded graphs of a GPU.
    Steps that are taken one by one are many, however few they are at once.
    """
    given = [t for t in tensors if t is not None]
    device = given[0].device
    worth = WORTH_FILTERING_THERE if device.type == "cuda" else WORTH_FILTERING
    is_worth = filters >= worth or (is_online and device.type == "cpu" and worth < math.inf)
    if not is_worth or not has_values(*given) or forward_ad._current_level >= 0:
        return None
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return None
    plain = all(
        type(t) in (Tensor, torch.nn.Parameter) and t.device == device and t.numel() and not t.is_neg() for t in given
    )
    if not plain or {t.dtype for t in given} not in ({torch.float64}, {torch.float32}):
        return None
    if device.type == "cuda":
        return None if torch.cuda.is_current_stream_capturing() else kernel_module(f"{__package__}.gpu", "ctypes")
    return kernel_module(f"{__package__}.cpu", "numba") if device.type == "cpu" else None
