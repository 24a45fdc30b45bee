"""Switching filters on a GPU, compiled by NVRTC: tensors to addresses, targets to threads.

    forward      what ../../filters/gaussian/switching.py calls where nothing is to be differentiated

Each target is a thread, and all steps of a series are one launch: only observations are read and only what is wanted is
written. CUDA, and not Triton, because a thread keeps small matrices in registers, which Triton has no arrays for. A
kernel is compiled at the first call for its method, sizes, number and wanted fields, in one to some seconds, and
remembered as long as the process lives. The caller waits once, for whether all densities were finite.

Read next: targets_in_threads.cu (what is compiled), nvrtc.py (how).
"""

import math
from array import array
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..._typing import Bool, Float, Tensor
from .fields import FIELDS, MODEL_ENDS, KernelResult, in_one_piece
from .nvrtc import Kernel, compile_source

SOURCE = Path(__file__).with_name("targets_in_threads.cu")
NUMBERS = {torch.float64: "double", torch.float32: "float"}
LARGEST_STATE, LARGEST_OBSERVATION = 9, 6  # loops over them are unrolled: beyond, little of it fits in registers
LOCAL = 1 << 14  # bytes of histories for each thread; the driver sets aside that much for all that may run at once
STAGE = 3 << 14  # bytes of shared memory that a block may have


class Sizes(NamedTuple):
    """What is known when a kernel is compiled."""

    number: str
    modes: int
    state: int
    observation: int
    depth: int  # 0 is imm
    most: int  # histories that are kept
    wanted: int  # a bit for each field
    threads: int  # of a block
    lanes: int = 32  # of a warp


def forward(
    depth: int,
    parameters: tuple[Any, ...],
    state: tuple[Tensor, Tensor, Tensor, Tensor],
    observations: Float[Tensor, "*b t o"],
    seen: Bool[Tensor, "*b t o"] | None,
    *,
    last: bool,
    wanted: frozenset[str],
) -> KernelResult | None:
    """All steps of a series, or its last alone; None where a density was 0, infinite or none, or sizes are too large.

    Args:
        depth: of "gpb"; 0 is "imm".
        parameters: tensors transition, F, Q, H, R, b, d; the last two may be None.
        state: mean, covariance, log probability and log likelihood at the beginning.
        observations: without NaN.
        seen: where there are observations, None for everywhere.
        last: report the last step alone, without time.
        wanted: the fields to report, by name.
    """
    y, (*batch, steps, o) = observations, observations.shape
    (k, s), h = parameters[2].shape[-3:-1], state[2].shape[-1]
    most = k if depth == 0 else k ** (depth - 1)
    begun = 1 if depth == 1 else h
    shapes = ((*batch, begun, s), (*batch, begun, s, s), (*batch, h), tuple(batch))
    if any(t.shape != shape for t, shape in zip(state, shapes, strict=True)) or h % k or h > max(most, k):
        return None
    most = min(most, h * k ** min(steps, depth))  # histories that there will be
    kernel_sizes = sizes_of(depth, k, s, o, most, y.dtype, wanted)
    kernel = None if kernel_sizes is None else compiled(kernel_sizes, y.device)
    if kernel is None or kernel_sizes is None:
        return None

    b, d = (y.new_zeros(k, n) if t is None else t for t, n in zip(parameters[5:], (s, o), strict=True))
    read = [
        *(
            in_one_piece(t, ending, batch)
            for t, ending in zip((*parameters[:5], b, d), MODEL_ENDS.values(), strict=True)
        ),
        in_one_piece(y, 1, batch),
        *(in_one_piece(t.unsqueeze(len(batch)), n, batch) for t, n in zip(state, (2, 3, 1, 0), strict=True)),
    ]
    looks = None if seen is None else seen.contiguous()
    time, of = () if last else (steps,), {"k": k, "s": s, "o": o}
    reported = tuple(
        y.new_empty((*batch, *time, *map(of.__getitem__, field.shape))) if name in wanted else None
        for name, field in FIELDS.items()
    )
    end_h = h if depth < 2 else min(h * k ** min(steps, depth), max(most, k))
    end_g = 1 if depth == 1 else end_h
    ends = tuple(y.new_empty((*batch, *form)) for form in ((end_g, s), (end_g, s, s), (end_h,), ()))
    failed = torch.zeros(1, dtype=torch.int32, device=y.device)

    targets = math.prod(batch)
    numbers = chain(
        *((t.data_ptr(), row, step) for t, row, step in read),
        (0 if looks is None else looks.data_ptr(), targets, steps, steps - 1 if last else 0, h),
        (0 if t is None else t.data_ptr() for t in (*reported, *ends)),
        (failed.data_ptr(),),
    )
    problem = array("q", numbers)
    blocks = -(-targets // kernel_sizes.threads)
    is_taken = kernel.launch(blocks, kernel_sizes.threads, problem.buffer_info()[0])
    return KernelResult(reported, *ends) if is_taken and not bool(failed) else None


def sizes_of(
    depth: int, modes: int, state: int, observation: int, most: int, dtype: torch.dtype, wanted: frozenset[str]
) -> Sizes | None:
    """What a kernel is compiled for; None where it would be too large."""
    k, s, o, size = modes, state, observation, dtype.itemsize
    kept = (2 * max(most, k) * (s + s * (s + 1) // 2 + 2) + k * (k + s)) * size
    if s > LARGEST_STATE or o > LARGEST_OBSERVATION or kept > LOCAL:
        return None
    stage = (max(s * s, o * o, k) | 1) * size
    threads = next((n for n in (128, 64, 32) if n * stage <= STAGE), None)
    bits = sum(1 << i for i, name in enumerate(FIELDS) if name in wanted)
    return None if threads is None else Sizes(NUMBERS[dtype], k, s, o, depth, most, bits, threads)


def source_of(sizes: Sizes) -> str:
    """The sizes and the numbers of the fields, and the text that reads them."""
    number, *others = sizes
    constants = "".join(
        f"constexpr int {name.upper()} = {value};\n" for name, value in zip(Sizes._fields[1:], others, strict=True)
    )
    fields = f"enum Reported {{ {', '.join(name.upper() for name in FIELDS)}, REPORTED }};\n"
    return f"using Number = {number};\n{constants}{fields}{SOURCE.read_text(encoding='utf-8')}"


@cache
def compiled(sizes: Sizes, device: torch.device) -> Kernel | None:
    """The kernel of these sizes on a device; None where there is no compiler."""
    return compile_source(source_of(sizes), "filter_all", device)
