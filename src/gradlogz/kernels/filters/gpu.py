"""Switching filters on a GPU, compiled by NVRTC: one thread for each target.

    forward      called by ../../filters/gaussian/switching.py if no gradients are needed

All steps of a series are one launch: it reads only observations and writes only the requested fields. The source is
CUDA and not Triton, because threads keep small matrices in registers and Triton has no register arrays. A kernel is
compiled at the first call for each method, size, dtype and set of fields, in one to a few seconds, and cached for the
process. The caller synchronises once, to check that all densities were finite.

Read next: targets_in_threads.cu (the source), nvrtc.py (the compiler).
"""

import math
from array import array
from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..._typing import Bool, Float, Tensor
from .fields import FIELDS, MODEL_ENDS, KernelResult, in_one_piece
from .nvrtc import CudaKernel, compile_source

SOURCE = Path(__file__).with_name("targets_in_threads.cu")
NUMBERS = {torch.float64: "double", torch.float32: "float"}
LARGEST_STATE, LARGEST_OBSERVATION = 9, 6  # loops are unrolled; larger sizes do not fit in registers
LOCAL = 1 << 14  # bytes of histories per thread; the driver reserves them for all resident threads
STAGE = 3 << 14  # bytes of shared memory per block


class Sizes(NamedTuple):
    """Compile-time constants of a kernel."""

    number: str
    modes: int
    state: int
    observation: int
    depth: int  # 0 is imm
    most: int  # largest number of histories
    wanted: int  # one bit for each requested field
    threads: int  # threads per block
    lanes: int = 32  # threads per warp


def forward(
    depth: int,
    parameters: tuple[Any, ...],
    state: tuple[Tensor, Tensor, Tensor, Tensor],
    observations: Float[Tensor, "*b t o"],
    observed: Bool[Tensor, "*b t o"] | None,
    *,
    last: bool,
    wanted: frozenset[str],
) -> KernelResult | None:
    """Filter a series; None if a density was not finite and positive, or if sizes are too large.

    Args:
        depth: depth of "gpb"; 0 is "imm".
        parameters: tensors transition, F, Q, H, R, b, d; the last two may be None.
        state: initial mean, covariance, log probability and log likelihood.
        observations: observations without NaN.
        observed: mask of observed entries, None for all.
        last: return only the last step, without time.
        wanted: names of the fields to compute.
    """
    y, (*batch, steps, o) = observations, observations.shape
    (k, s), h = parameters[2].shape[-3:-1], state[2].shape[-1]
    most = k if depth == 0 else k ** (depth - 1)
    gaussians = 1 if depth == 1 else h
    shapes = ((*batch, gaussians, s), (*batch, gaussians, s, s), (*batch, h), tuple(batch))
    if any(t.shape != shape for t, shape in zip(state, shapes, strict=True)) or h % k or h > max(most, k):
        return None
    most = min(most, h * k ** min(steps, depth))  # largest number reached in these steps
    kernel_sizes = sizes_of(depth, k, s, o, most, y.dtype, wanted)
    kernel = None if kernel_sizes is None else compiled(kernel_sizes, y.device)
    if kernel is None or kernel_sizes is None:
        return None

    read = inputs(parameters, state, y)
    mask = None if observed is None else observed.contiguous()
    time, letters = () if last else (steps,), {"k": k, "s": s, "o": o}
    reported = tuple(
        y.new_empty((*batch, *time, *map(letters.__getitem__, field.shape))) if name in wanted else None
        for name, field in FIELDS.items()
    )
    end_h = h if depth < 2 else min(h * k ** min(steps, depth), max(most, k))
    end_g = 1 if depth == 1 else end_h
    ends = tuple(y.new_empty((*batch, *form)) for form in ((end_g, s), (end_g, s, s), (end_h,), ()))
    failed = torch.zeros(1, dtype=torch.int32, device=y.device)

    targets = math.prod(batch)
    numbers = chain(
        *((t.data_ptr(), row, step) for t, row, step in read),
        (0 if mask is None else mask.data_ptr(), targets, steps, steps - 1 if last else 0, h),
        (0 if t is None else t.data_ptr() for t in (*reported, *ends)),
        (failed.data_ptr(),),
    )
    problem = array("q", numbers)
    blocks = -(-targets // kernel_sizes.threads)
    is_taken = kernel.launch(blocks, kernel_sizes.threads, problem.buffer_info()[0])
    return KernelResult(reported, *ends) if is_taken and not bool(failed) else None


def inputs(
    parameters: tuple[Any, ...], state: Sequence[Tensor], observations: Float[Tensor, "*b t o"]
) -> list[tuple[Tensor, int, int]]:
    """The tensors that a kernel reads, contiguous, with their strides from target to target and from step to step."""
    y, batch, (k, s) = observations, observations.shape[:-2], parameters[2].shape[-3:-1]
    b, d = (y.new_zeros(k, n) if t is None else t for t, n in zip(parameters[5:], (s, y.shape[-1]), strict=True))
    return [
        *(
            in_one_piece(t, ending, batch)
            for t, ending in zip((*parameters[:5], b, d), MODEL_ENDS.values(), strict=True)
        ),
        in_one_piece(y, 1, batch),
        *(in_one_piece(t.unsqueeze(len(batch)), n, batch) for t, n in zip(state, (2, 3, 1, 0), strict=True)),
    ]


def sizes_of(
    depth: int, modes: int, state: int, observation: int, most: int, dtype: torch.dtype, wanted: frozenset[str]
) -> Sizes | None:
    """Compile-time constants of the kernel for these sizes; None if they are too large."""
    k, s, o, size = modes, state, observation, dtype.itemsize
    local_bytes = (2 * max(most, k) * (s + s * (s + 1) // 2 + 2) + k * (k + s)) * size
    if s > LARGEST_STATE or o > LARGEST_OBSERVATION or local_bytes > LOCAL:
        return None
    stage = (max(s * s, o * o, k) | 1) * size
    threads = next((n for n in (128, 64, 32) if n * stage <= STAGE), None)
    bits = sum(1 << i for i, name in enumerate(FIELDS) if name in wanted)
    return None if threads is None else Sizes(NUMBERS[dtype], k, s, o, depth, most, bits, threads)


def source_of(sizes: Sizes) -> str:
    """CUDA source of the filter, with the constants and the enumeration of fields prepended."""
    return f"{constants_of(sizes)}{SOURCE.read_text(encoding='utf-8')}"


def constants_of(sizes: Sizes) -> str:
    """The constants of a kernel and the enumeration of fields, in CUDA."""
    number, *others = sizes
    constants = "".join(
        f"constexpr int {name.upper()} = {value};\n" for name, value in zip(Sizes._fields[1:], others, strict=True)
    )
    fields = f"enum Reported {{ {', '.join(name.upper() for name in FIELDS)}, REPORTED }};\n"
    return f"using Number = {number};\n{constants}{fields}"


@cache
def compiled(sizes: Sizes, device: torch.device) -> CudaKernel | None:
    """Compiled kernel of these sizes for a device; None if there is no compiler."""
    return compile_source(source_of(sizes), "filter_all", device)
