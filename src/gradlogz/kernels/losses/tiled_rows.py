"""Losses of rows of logits on a GPU in half precision: the kernels of logit_tiles.py and two products of matrices.

    statistics, finish    loss of every row                                  one product of query and key
    slopes                W of a block of rows, at most SLOPES numbers       the same product again
    cuBLAS                dq = W k of these rows, dk += W^T q

Sigmoids need no statistics. A loss of rows and columns needs those of all rows before the first slope. Memory is linear
in the rows beyond SLOPES, and nothing waits for the device.

Read next: logit_tiles.py (the kernels), row_loss.py (what a `Problem` is).
"""

import math
import warnings
from collections.abc import Sequence
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ..._typing import Float, Tensor
from ..attention.launching import Kernel, current_stream, on_its_device
from .float32_products import add_product
from .logit_tiles import finish_lines, join_columns, tile_slopes, tile_statistics
from .row_loss import CLIP, MASS, MEAN, ONE, SIGMOIDS, Problem, RowLoss
from .softmax_losses import BothDirections, OnePositive, Sigmoids, SomePositives
from .visible_pairs import VisiblePairs

SLOPES = 1 << 27  # numbers of W in a block of rows: 256 MiB
ALIGNED = 64  # rows of W begin at multiples of so many numbers
LINES, TILES = 16, 64  # rows and tiles that a program of `finish_lines` reads at a time
HALF = torch.bfloat16
TOLERANCE = 2e-2  # of the largest entry: rounding stays several times below


class Tiling(NamedTuple):
    """Sizes of a tile of logits, of the part of the dimension that is multiplied at a time, warps and stages.

    A limit to the registers of a thread lets several programs share a multiprocessor.
    """

    rows: int
    keys: int
    depth: int
    warps: int
    stages: int
    registers: int | None = None


TILINGS = {
    ONE: Tiling(128, 128, 64, 4, 3),
    CLIP: Tiling(128, 128, 64, 8, 3),
    SIGMOIDS: Tiling(64, 128, 64, 4, 3, registers=168),  # 41 ms for 65536 x 768, 50 ms with 128 rows and 8 warps
    MEAN: Tiling(64, 128, 64, 4, 4),
    MASS: Tiling(64, 128, 64, 4, 4),
}


class LossForm(NamedTuple):
    """The properties of a problem that select code in the kernels; each form is compared with torch at first use."""

    kind: int
    chosen: str  # key of a row that is its positive, or with several positives neither positive nor negative
    without_own_number: bool
    decoupled: bool
    biased: bool
    labelled: bool
    masked: bool


class _Kernels(NamedTuple):
    """Kernels for one kind of call."""

    statistics: Kernel
    finish_rows: Kernel
    join_columns: Kernel
    finish_columns: Kernel
    slopes: Kernel


@lru_cache(maxsize=256)
def _kernels(form: LossForm, edge: bool, tiling: Tiling, _: Any) -> _Kernels:
    """Kernels for one kind of call; the last argument is all else that a launch remembers."""
    kind, chosen, without_own_number, decoupled, *_rest = form
    BM, BN, BK, warps, stages, registers = tiling
    constants = kind, chosen, without_own_number, edge, BM, BN, BK
    options = {"num_warps": warps, "num_stages": stages, **({"maxnreg": registers} if registers else {})}
    operands = partial(_tiles_of, BM, BK), partial(_tiles_of, BN, BK)
    ends: Any = (kind, decoupled, TILES, LINES), {"num_warps": 4}
    return _Kernels(
        Kernel(tile_statistics, constants, options, operands),
        Kernel(finish_lines, *ends),
        Kernel(join_columns, (TILES, LINES), {"num_warps": 4}),
        Kernel(finish_lines, *ends),
        Kernel(tile_slopes, constants, options, (*operands, partial(_tiles_of, BM, BN))),
    )


def _tiles_of(rows: int, columns: int, tensor: Tensor) -> Any:
    return TensorDescriptor.from_tensor(tensor, [rows, columns])


def form_of(problem: Problem, biased: bool) -> LossForm:
    """Form of a problem."""
    kind, several = problem.kind, problem.kind in (MEAN, MASS)
    if (problem.itself if several else problem.positive) is not None:
        chosen = "index"
    else:
        chosen = "none" if several and not problem.without_own_number else "own number"
    labelled, masked = problem.labels[0] is not None, problem.mask is not None
    return LossForm(kind, chosen, problem.without_own_number, problem.decoupled, biased, labelled, masked)


def serves(problem: Problem, biased: bool, device: torch.device) -> bool:
    """True if there are kernels for a loss, and they are right."""
    return problem.kind in TILINGS and is_right(form_of(problem, biased), device)


@on_its_device
def sum_and_gradients(
    query: Float[Tensor, "m d"],
    key: Float[Tensor, "n d"],
    bias: Float[Tensor, " n"] | None,
    problem: Problem,
    coefficient: float,
    factor: float,
    wanted: Sequence[bool],
    precision: torch.dtype,
    block: int | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """Sum over rows of coefficient times the loss of factor <q, k> + bias, and its gradients.

    A block of rows has at most `block` slopes, SLOPES by default, and at least one row of tiles.
    """
    (m, d), n, device, stream = query.shape, key.shape[0], query.device, current_stream(query.device)
    form, kind = form_of(problem, bias is not None), problem.kind
    BM, BN, *_ = tiling = TILINGS[kind]
    q, k = _operand(query, precision), _operand(key, precision, key.mean(0) if problem.centred else None)
    bias = None if bias is None else bias.contiguous()
    several, both = kind in (MEAN, MASS), kind == CLIP
    index = problem.itself if several else problem.positive
    index, *labels = (None if t is None else t.long().contiguous() for t in (index, *problem.labels))
    mask = None if problem.mask is None else problem.mask.contiguous()

    width = -(-n // ALIGNED) * ALIGNED
    lines = min(-(-m // BM), max(1, (block or SLOPES) // width // BM)) * BM  # rows of a block
    along, down = -(-n // BN), lines // BM
    present = tuple(None if t is None else t.data_ptr() % 16 for t in (bias, index, *labels, mask))
    edge = bool(n % BN or (both and m % lines))
    remembered = (device, q.dtype, m, n, q.shape[1], lines, present, any(wanted))
    kernels = _kernels(form, edge, tiling, remembered)

    everything = query.new_empty(8 if both else 5, m)  # of rows, then of columns
    results, columns = (everything[:5], everything[5:]) if both else (everything, None)
    parts = query.new_empty(6 if several else 2, along, lines)
    of_columns = query.new_empty(2, 1 + down, n) if both else None
    slopes = q.new_empty(lines, width) if any(wanted) or kind == SIGMOIDS else None
    slopes = slopes if slopes is None or n == width else slopes[:, :n]
    dq = query.new_empty(m, q.shape[1]) if wanted[0] else None
    dk = query.new_empty(n, q.shape[1]) if wanted[1] else None
    dbias = query.new_zeros(n) if bias is not None and wanted[2] else None
    pairs = bias, index, *labels, mask
    margin, weight = float(problem.margin), 0.5 if both else 1.0

    def statistics(first: int) -> None:
        sizes = first, lines, m, n, q.shape[1], factor
        kernels.statistics.launch(down * along, stream, (q, k), (parts, of_columns, results, *pairs), sizes)
        numbers = first, lines, lines, along, along, m, margin, weight, coefficient
        kernels.finish_rows.launch(-(-lines // LINES), stream, (), (parts, results, results[3]), numbers)
        if both:
            kernels.join_columns.launch(-(-n // LINES), stream, (), (of_columns,), (n, int(first == 0), 1 + down))

    def gradients(first: int, slopes: Tensor) -> None:
        sizes = first, lines, m, n, q.shape[1], factor, coefficient
        pointers = results, columns, parts, *pairs
        kernels.slopes.launch(down * along, stream, (q, k, slopes), pointers, sizes)
        rows, every = slice(first, min(m, first + lines)), lines == m  # a slice of all rows would cost the host time
        W = slopes if every else slopes[: rows.stop - first]
        scale = coefficient * factor
        if dq is not None:
            add_product(dq if every else dq[rows], W, k, beta=0.0, scale=scale)
        if dk is not None:
            add_product(dk, W.mT, q if every else q[rows], beta=float(first > 0), scale=scale)
        if dbias is not None:
            dbias.add_(W.sum(0, dtype=torch.float32), alpha=coefficient)

    blocks, losses = range(0, m, lines), []
    if columns is not None:
        for first in blocks:
            statistics(first)
        numbers = 0, n, n, 1 + down, 1, n, margin, weight, coefficient
        kernels.finish_columns.launch(-(-n // LINES), stream, (), (of_columns, columns, results[3]), numbers)
    for first in blocks:
        if kind != SIGMOIDS and not both:
            statistics(first)
        if slopes is not None:
            gradients(first, slopes)
        if kind == SIGMOIDS:
            losses.append((parts[0] if lines <= m - first else parts[0, :, : m - first]).sum())
    if kind != SIGMOIDS:
        losses.append(everything[::5].sum())
    total = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
    return total, [_cut(dq, d), _cut(dk, d), dbias]


def is_right(form: LossForm, device: torch.device) -> bool:
    """Compare the kernels of a form with torch on two small problems, at its first use on a GPU.

    Compilers have made wrong code of such kernels (../attention/canary.py). Kernels that are wrong, or that this GPU or
    Triton cannot compile or launch, are not used, with one warning. During the capture of a graph they are used.
    """
    return (device.type == "cuda" and torch.cuda.is_current_stream_capturing()) or _checked(form, device)


@cache
def _checked(form: LossForm, device: torch.device) -> bool:
    try:  # whole tiles in one block of rows, and ragged tiles in several
        errors = [(error, name) for m in (256, 300) for name, error in errors_of(form, device, m).items()]
        error, name = max((math.inf if math.isnan(error) else error, name) for error, name in errors)
        problem = "" if error <= TOLERANCE else f"give wrong results ({name}: relative error {error:.2g})"
    except Exception as error:  # of Triton's compiler, its launcher or the driver, which have no common class
        problem = f"fail ({type(error).__name__}: {str(error)[:200]})"
    if problem:
        text = f"The kernels of {form} {problem} with this GPU and Triton: slower ones are used."
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return not problem


def errors_of(form: LossForm, device: torch.device, m: int) -> dict[str, float]:
    """Errors of loss and gradients of a small problem, relative to the largest entry of each in float64."""
    generator = torch.Generator("cpu").manual_seed(form.kind)
    d = 64
    q, k = (torch.randn(m, d, generator=generator, device="cpu").bfloat16().to(device).float() for _ in range(2))
    bias = torch.randn(m, generator=generator, device="cpu").to(device) if form.biased else None
    loss, scale = _example(form, m, device), d**-0.5
    s = scale * q.double() @ k.double().mT
    losses, slope = loss.value_and_slope(s if bias is None else s + bias)
    expected = losses.sum(), scale * slope @ k.double(), scale * slope.mT @ q.double(), slope.sum(0)
    problem = loss.problem()
    assert problem is not None
    wanted = True, True, form.biased
    arguments = q, k, bias, problem._replace(centred=False), 1.0, scale, wanted, HALF
    total, grads = sum_and_gradients(*arguments, block=None if m == 256 else 1)
    names = "loss", "gradient of the query", "gradient of the key", "gradient of the bias"
    return {
        name: float((actual - exact).abs().max() / exact.abs().max())
        for name, actual, exact in zip(names, (total, *grads), expected, strict=True)
        if actual is not None
    }


def _example(form: LossForm, m: int, device: torch.device) -> RowLoss:
    """A loss of the form, of m rows and keys."""
    generator = torch.Generator("cpu").manual_seed(form.kind + 10)
    classes = torch.arange(m, device=device) % 20
    labels = (classes, classes) if form.labelled else None
    mask = torch.rand(m, m, generator=generator, device="cpu").to(device) > 0.3 if form.masked else None
    index = torch.randperm(m, generator=generator, device="cpu").to(device) if form.chosen == "index" else None
    if form.kind in (MEAN, MASS):
        sides = VisiblePairs(labels=labels), VisiblePairs(labels=labels, same=False)
        itself = not form.without_own_number
        positives, negatives = (side._replace(itself=itself, excluded=index) for side in sides)
        return SomePositives(m, positives, negatives, "mean" if form.kind == MEAN else "mass")
    negatives = VisiblePairs(not form.without_own_number, labels, same=False, mask=mask)
    if form.kind == CLIP:
        return BothDirections(negatives)
    if form.kind == SIGMOIDS:
        return Sigmoids(m, index, negatives)
    return OnePositive(m, index, negatives, margin=0.3, decoupled=form.decoupled)


def _operand(vectors: Tensor, precision: torch.dtype, centre: Tensor | None = None) -> Tensor:
    """Rows, less their centre, in half precision, that begin at multiples of 16 bytes."""
    rows, d = vectors.shape
    result = vectors.new_empty(rows, -(-d // 8) * 8, dtype=precision)
    inside = result if d == result.shape[1] else result.zero_()[:, :d]
    inside.copy_(vectors) if centre is None else torch.sub(vectors, centre, out=inside)
    return result


def _cut(gradient: Tensor | None, width: int) -> Tensor | None:
    return gradient if gradient is None or gradient.shape[1] == width else gradient[:, :width]
