"""The only place where a kernel is chosen.

    gluon      Hopper GPUs, float16, bfloat16, head sizes 16 to 128, bands, segments    hopper.py, hopper_backward.py
    triton     CUDA, float16, bfloat16, float32, head sizes 16 to 256                   gpu.py; decoding.py, few queries
    numba      CPU, float32 (half precision in float32), once the work repays a call    cpu.py, extra [fast]
    flash      CPU without numba, if only output and log normaliser are needed          flash.py
    blocked    everything else: float64, dropout, small problems, other devices         blocked.py

All take the same arguments and return the same numbers up to rounding. The statistics are float32, or float64 for
float64 inputs.
"""

from functools import lru_cache
from typing import Any

import torch

from ..._typing import Float, Tensor
from ..optional import kernel_module
from . import blocked, canary, flash
from .blocked import coefficients
from .dropout import Dropout
from .reference import Gradients, Statistics
from .scoring import Scoring, Sight
from .wide_values import Chunked

# Number of logits from which the compiled CPU kernel is faster than a handful of torch calls.
WORTH_COMPILING = 1 << 10
# Number of queries per key head up to which splitting the keys is faster than splitting the queries.
FEW_QUERIES = 64
# Keys of packed documents up to which hopper.py has been run on a GPU: more keys take gpu.py. Benchmarks with 4096 keys
# were cut off, probably while their 54 kernels were compiled: no wait of the kernel is without its arrival
# (tests/kernels/test_every_wait_of_the_hopper_kernel_has_its_arrival.py).
PACKED_KEYS_OF_HOPPER = 1152


def forward(
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n v"],
    sight: Sight,
    scoring: Scoring,
    dropout: Dropout | None,
    *,
    statistics: bool,
    separate: bool = False,
) -> Statistics:
    """Statistics of every row, by the fastest kernel for these arguments; each in its own memory if `separate`."""
    if query.is_meta:
        number = torch.promote_types(query.dtype, torch.float32)
        rows = [query.new_empty(query.shape[:-1], dtype=number) for _ in range(4)]
        return Statistics(query.new_empty(*query.shape[:-1], value.shape[-1]), *rows)
    kernel = compiled_kernel(query, key, value, sight, scoring, dropout, backward=False)
    if kernel is not None and query.is_cuda:
        return kernel.forward(query, key, value, sight, scoring, statistics=statistics, separate=separate)
    if kernel is None and not statistics and dropout is None and flash.takes(query, sight, scoring, key.shape[2]):
        return flash.forward(query, key, value, sight, scoring)
    q, k, v, wide_sight = _wide(query), _wide(key), _wide(value), _wide_sight(sight)
    if kernel is None:
        result = blocked.forward(q, k, v, wide_sight, scoring, dropout)
    else:
        result = kernel.forward(q, k, v, wide_sight, scoring, statistics=statistics)
    return result if result.output.dtype == query.dtype else result._replace(output=result.output.to(query.dtype))


def backward(
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n v"],
    sight: Sight,
    scoring: Scoring,
    dropout: Dropout | None,
    result: Statistics,
    gradients: Gradients,
    *,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and bias, each in the dtype of its operand, from those of the statistics.

    The gradient of the maximum is not included.
    """
    kernel = compiled_kernel(query, key, value, sight, scoring, dropout, backward=True)
    grad_output = gradients.output
    if grad_output is None:
        grad_output = torch.zeros_like(result.output)
    if hasattr(kernel, "coefficients"):  # a kernel of a GPU
        per_row = kernel.coefficients(result, gradients)
        return kernel.backward(query, key, value, sight, scoring, per_row, grad_output, needs_bias=needs_bias)
    q, k, v, wide_sight, go = _wide(query), _wide(key), _wide(value), _wide_sight(sight), _wide(grad_output)
    curved = gradients.entropy is not None or gradients.logit_variance is not None
    # Only on a CPU, where reading a number waits for nothing.
    flash_takes = kernel is None and dropout is None and flash.takes(query, sight, scoring, k.shape[2])
    by_flash = flash_takes and not (curved or needs_bias) and flash.differentiates(result)
    # exp(logit - G) sums to one only if both are rounded alike: recompute what another kernel has computed forward.
    if kernel is not None and q.shape[2] <= kernel.FEW:
        result = kernel.forward(q, k, v, wide_sight, scoring, by_rows=False)
    elif flash_takes and not by_flash and flash.computed(result):
        result = blocked.forward(q, k, v, wide_sight, scoring, dropout)
    along = None if gradients.output is None else (go * _wide(result.output)).sum(-1)
    row = coefficients(result, gradients, along)
    G, E, c0, c1, c2 = row
    grad_bias: Tensor | None = None
    if kernel is not None:
        grad_q, grad_k, grad_v, grad_bias = kernel.backward(
            q, k, v, wide_sight, scoring, G, E, go, c0, c1, c2, needs_bias=needs_bias
        )
    elif by_flash:
        grad_q, grad_k, grad_v = flash.backward(q, k, v, wide_sight, scoring, G, go, c0)
    else:
        grad_q, grad_k, grad_v, grad_bias = blocked.backward(
            q, k, v, wide_sight, scoring, row, go, needs_bias=needs_bias, dropout=dropout
        )
    if grad_bias is not None and sight.bias is not None:
        grad_bias = grad_bias.to(sight.bias.dtype)
    return grad_q.to(query.dtype), grad_k.to(key.dtype), grad_v.to(value.dtype), grad_bias


def serving(
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n v"],
    sight: Sight,
    scoring: Scoring,
    *,
    backward: bool,
    statistics: bool = True,
) -> str:
    """Name of the kernel that serves a call without dropout, as in the table above."""
    kernel = compiled_kernel(query, key, value, sight, scoring, None, backward=backward)
    if kernel is None:
        plain = not statistics and query.device.type == "cpu" and flash.takes(query, sight, scoring, key.shape[2])
        return "flash" if plain else "blocked"
    module = getattr(kernel, "kernel", kernel).__name__.rpartition(".")[2]  # below Chunked
    return {"cpu": "numba", "hopper": "gluon", "hopper_backward": "gluon"}.get(module, "triton")


def compiled_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sight: Sight,
    scoring: Scoring,
    dropout: Dropout | None,
    *,
    backward: bool,
) -> Any:
    """Module of the compiled kernel for these arguments, with `forward` and `backward`; None if there is none."""
    if dropout is not None or query.dtype is torch.float64:
        return None
    if query.is_cuda:
        masks = "dense" if not (sight.bias is sight.mask is None) else "segments" if sight.segments is not None else ""
        arguments = query.dtype, query.device, query.shape, value.shape, scoring, masks
        return _gpu_kernel(*arguments, FEW_QUERIES, backward)
    logits = query.numel() // max(1, query.shape[-1]) * key.shape[2]
    if query.device.type == "cpu" and logits >= WORTH_COMPILING:
        return kernel_module(f"{__package__}.cpu", "numba")
    return None


@lru_cache(maxsize=1024)
def _gpu_kernel(
    dtype: torch.dtype,
    device: torch.device,
    query_shape: torch.Size,
    value_shape: torch.Size,
    scoring: Scoring,
    masks: str,
    few_queries: int,
    backward: bool,
) -> Any:
    """Module of the first kernel for these arguments that passes its check.

    It has the function `forward`, or `coefficients` and `backward`.
    """
    (_, h, m, d), (_, hk, n, v) = query_shape, value_shape
    if 0 in query_shape or d < 16 or d > 256 or v < 16:
        return None
    few = h // hk * m <= few_queries
    hopper = None if few else _hopper_kernel(device, "hopper_backward" if backward else "hopper")
    if hopper is not None and not hopper.takes(dtype, query_shape, value_shape, scoring, masks):
        hopper = None
    if masks == "segments" and n > PACKED_KEYS_OF_HOPPER:
        hopper = None
    for kernel in (hopper, kernel_module(f"{__package__}.{'decoding' if few else 'gpu'}", "triton")):
        if kernel is not None:
            kind = canary.Kind(kernel.__name__, backward, dtype, d, min(v, 256), masks, few, m == n)
            if canary.passes(kernel, kind, device):
                return kernel if v <= 256 else Chunked(kernel, 256)
    return None


def _hopper_kernel(device: torch.device, name: str) -> Any:
    """Module of a kernel for Hopper GPUs; None for other devices, and for versions of Triton not tested with it."""
    triton = kernel_module("triton", "triton")
    if triton is None or not triton.__version__.startswith("3.6."):
        return None
    if torch.cuda.get_device_capability(device) != (9, 0):
        return None
    return kernel_module(f"{__package__}.{name}", "triton.experimental.gluon")


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def _wide_sight(sight: Sight) -> Sight:
    return sight if sight.bias is None else sight._replace(bias=_wide(sight.bias))
