"""Gradient of imm and gpb2 on a GPU, compiled by NVRTC: one thread for each target.

    differentiate    called by ../../filters/gaussian/compiled_gradient.py in the backward pass

All steps, forward and back, are one launch. The kernel filters again instead of reading what the filter left, so that
nothing but the inputs is kept between the passes. Long series of many targets are cut into segments of sqrt(t) steps,
which are filtered twice, so that the memory of the pass grows with sqrt(t).

Read next: gradients_in_threads.cu (the source), gpu.py (the filters).
"""

import math
from array import array
from collections.abc import Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ..._typing import Bool, Float, Tensor
from .fields import FIELDS, MODEL_ENDS
from .gpu import LOCAL, Sizes, constants_of, inputs, sizes_of
from .gpu import SOURCE as FILTER_SOURCE
from .nvrtc import CudaKernel, compile_source

SOURCE = Path(__file__).with_name("gradients_in_threads.cu")
IS_COMPARED_FIRST = True  # with automatic differentiation, before its first use
THREADS = 64  # per block: a thread has up to 255 registers, and few targets spread over many multiprocessors
LARGEST_STATE, LARGEST_OBSERVATION = 6, 4  # larger sizes take long to compile and do not fit in registers
WORKSPACE = 1 << 30  # bytes of kept beliefs from which a series is cut into segments
INPUTS = (*MODEL_ENDS, "y", "mean", "covariance", "log_probability")  # tensors that may have gradients, in order
ENDS = {**MODEL_ENDS, "y": 1}  # dimensions of one step
RESULTS = ("log_likelihood", "mean", "covariance", "log_probability")  # tensors whose gradients are given


def differentiate(
    depth: int,
    parameters: tuple[Any, ...],
    state: tuple[Tensor, Tensor, Tensor],
    observations: Float[Tensor, "*b t o"],
    observed: Bool[Tensor, "*b t o"] | None,
    outside: Mapping[str, Tensor],
    needed: frozenset[str],
) -> dict[str, Tensor] | None:
    """Gradients in the needed inputs by name, in their shapes; None if sizes are too large or a number is not finite.

    Args:
        depth: 0 for "imm", 2 for "gpb2".
        parameters: tensors transition, F, Q, H, R, b, d; the last two may be None.
        state: initial mean, covariance and log probability of each mode.
        observations: observations without NaN.
        observed: mask of observed entries, None for all.
        outside: gradients in some of the log likelihood and the last means, covariances and log probabilities.
        needed: names of `INPUTS`.
    """
    y, (*batch, steps, o) = observations, observations.shape
    (k, s), targets = parameters[2].shape[-3:-1], math.prod(batch)
    if depth not in (0, 2) or state[0].shape != (*batch, k, s):
        return None
    kernel_sizes = gradient_sizes(depth, k, s, o, y.dtype)
    kernel = None if kernel_sizes is None else compiled(kernel_sizes, y.device)
    if kernel is None:
        return None
    read = inputs(parameters, (*state, y.new_zeros(batch)), y)
    mask = None if observed is None else observed.contiguous()
    of_results = [None if name not in outside else outside[name].contiguous() for name in RESULTS]
    # Gradients: [times or 1, items, targets], so that neighbouring threads write neighbouring numbers
    tensors = dict(zip(INPUTS, (*parameters, y, *state), strict=True))
    slopes: dict[str, Tensor] = {}
    places = []
    for name, t in tensors.items():
        if name not in needed:
            places += [0, 0]
            continue
        ending = ENDS.get(name)
        times = t.shape[t.ndim - ending - 1] if ending is not None and t.ndim > ending else 1
        items = t.shape[t.ndim - ending :] if ending is not None else t.shape[len(batch) :]
        slopes[name] = y.new_zeros((times, *items, targets))
        places += [slopes[name].data_ptr(), items.numel() * targets if times > 1 else 0]
    # Kept beliefs
    numbers = k * (s + s * (s + 1) // 2 + 1) * targets
    length = steps if steps * numbers * y.itemsize <= WORKSPACE else math.isqrt(steps - 1) + 1
    beliefs = y.new_empty((-(-steps // length) - 1 + length) * numbers)
    failed = torch.zeros(1, dtype=torch.int32, device=y.device)
    problem = array(
        "q",
        chain(
            *((t.data_ptr(), row, step) for t, row, step in read),
            (0 if mask is None else mask.data_ptr(), targets, steps, 0, k),
            [0] * (len(FIELDS) + 4),
            (failed.data_ptr(),),
            (0 if t is None else t.data_ptr() for t in of_results),
            places,
            (beliefs.data_ptr(), length),
        ),
    )
    is_taken = kernel.launch(-(-targets // THREADS), THREADS, problem.buffer_info()[0])
    if not is_taken or bool(failed):
        return None
    return {name: _in_shape(slope, tensors[name], batch, name) for name, slope in slopes.items()}


def _in_shape(slope: Tensor, tensor: Tensor, batch: list[int], name: str) -> Tensor:
    """Gradient [times or 1, items, targets] of each target, summed to the shape of a tensor."""
    items = slope.ndim - 2
    if tensor.ndim == items:
        return slope.sum(-1).squeeze(0)
    by_target = slope.unflatten(-1, batch) if batch else slope.squeeze(-1)
    by_target = by_target.movedim(tuple(range(items + 1, by_target.ndim)), tuple(range(len(batch))))
    if name not in ENDS:
        by_target = by_target.squeeze(len(batch))
    return by_target.sum_to_size(tensor.shape)


def gradient_sizes(depth: int, modes: int, state: int, observation: int, dtype: torch.dtype) -> Sizes | None:
    """Compile-time constants of the kernel for these sizes; None if they are too large."""
    sizes = sizes_of(depth, modes, state, observation, modes, dtype, frozenset())
    beliefs = modes * (state + state * (state + 1) // 2 + 2)
    if sizes is None or state > LARGEST_STATE or observation > LARGEST_OBSERVATION:
        return None
    return None if 5 * beliefs * dtype.itemsize > LOCAL else sizes._replace(threads=THREADS)


def source_of(sizes: Sizes) -> str:
    """CUDA source of the gradient: the steps of the filter, then their reverse."""
    sources = (path.read_text(encoding="utf-8") for path in (FILTER_SOURCE, SOURCE))
    return "".join((constants_of(sizes), "#define GRADIENTS\n", *sources))


@cache
def compiled(sizes: Sizes, device: torch.device) -> CudaKernel | None:
    """Compiled kernel of these sizes for a device; None if there is no compiler."""
    return compile_source(source_of(sizes), "differentiate_all", device)
