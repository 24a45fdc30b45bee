"""Losses of rows of logits on a GPU in half precision: the kernels of logit_tiles.py and two products of matrices.

    statistics, finish    loss of every row                                  one product of query and key
    slopes                W of a block of rows, at most SLOPES numbers       the same product again, or stored
    cuBLAS                dq = W k of these rows, dk += W^T q

Sigmoids need no statistics. A loss of rows and columns needs those of all rows before the first slope. Memory is linear
in the rows beyond SLOPES, and nothing waits for the device.

Read next: logit_tiles.py (the kernels), row_loss.py (what a `Problem` is).
"""

import warnings
from collections.abc import Sequence
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad
from triton.tools.tensor_descriptor import TensorDescriptor

from ..._typing import Float, Tensor
from ..attention.launching import Kernel, current_stream, on_its_device
from .float32_products import add_product
from .logit_tiles import finish_lines, join_columns, tile_slopes, tile_statistics
from .row_loss import CLIP, MASS, MEAN, ONE, PAIR, SIGMOIDS, Problem, RowLoss
from .softmax_losses import BothDirections, OnePositive, Sigmoids, SomePositives
from .visible_pairs import VisiblePairs

SLOPES = 1 << 27  # numbers of W in a block of rows: 256 MiB
ALIGNED = 64  # rows of W begin at multiples of so many numbers
LINES, TILES = 16, 64  # rows and tiles that a program of `finish_lines` reads at a time
HALF = torch.bfloat16
TOLERANCE = 2e-2  # of the largest entry: rounding stays several times below
# Number of dimensions from which the products of a block are stored (512 MiB), except for rows and columns.
STORED_FROM = 256


class Tiling(NamedTuple):
    """Sizes of a tile of logits, of the part of the dimension that is multiplied at a time, warps and stages."""

    rows: int
    keys: int
    depth: int
    warps: int
    stages: int


TILINGS = {
    "stored": Tiling(64, 128, 64, 4, 1),
    ONE: Tiling(128, 128, 64, 4, 3),
    CLIP: Tiling(128, 128, 64, 8, 3),
    SIGMOIDS: Tiling(128, 128, 64, 8, 3),
    MEAN: Tiling(64, 128, 64, 4, 4),
    MASS: Tiling(64, 128, 64, 4, 4),
}


class _Kernels(NamedTuple):
    """Kernels for one kind of call."""

    statistics: Kernel
    finish_rows: Kernel
    join_columns: Kernel
    finish_columns: Kernel
    slopes: Kernel


@lru_cache(maxsize=256)
def _kernels(
    kind: int, chosen: str, others: bool, edge: bool, stored: bool, decoupled: bool, tiling: Tiling, _: Any
) -> _Kernels:
    """Kernels for one kind of call; the last argument is all else that a launch remembers."""
    BM, BN, BK, warps, stages = tiling
    constants, options = (kind, chosen, others, edge, stored, BM, BN, BK), {"num_warps": warps, "num_stages": stages}
    operands = (partial(_tiles_of, BM, BN),) * 2 if stored else (partial(_tiles_of, BM, BK), partial(_tiles_of, BN, BK))
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


def is_stored(kind: int, d: int) -> bool:
    """True if the products of query and key are stored."""
    return d >= STORED_FROM and kind != CLIP


def serves(kind: int, d: int, device: torch.device) -> bool:
    """True if there are kernels for a loss of vectors of d dimensions, and they are right."""
    return kind != PAIR and is_right(kind, is_stored(kind, d), device)


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
) -> tuple[Tensor, list[Tensor | None]]:
    """Sum over rows of coefficient times the loss of factor <q, k> + bias, and its gradients."""
    (m, d), n, device, stream = query.shape, key.shape[0], query.device, current_stream(query.device)
    kind = problem.kind
    stored = is_stored(kind, d)
    tiling = TILINGS["stored" if stored else kind]
    BM, BN, *_ = tiling
    q, k = _operand(query, precision), _operand(key - key.mean(0) if problem.centred else key, precision)
    bias = None if bias is None else bias.contiguous()
    several, both = kind in (MEAN, MASS), kind == CLIP
    index = problem.itself if several else problem.positive
    index, *labels = (None if t is None else t.long().contiguous() for t in (index, *problem.labels))
    mask = None if problem.mask is None else problem.mask.contiguous()
    chosen = "index" if index is not None else "none" if several and not problem.without_own_number else "own number"

    width = -(-n // ALIGNED) * ALIGNED
    lines = min(-(-m // BM), max(1, SLOPES // width // BM)) * BM  # rows of a block
    along, down = -(-n // BN), lines // BM
    present = tuple(None if t is None else t.data_ptr() % 16 for t in (bias, index, *labels, mask))
    edge = bool(n % BN or (both and m % lines))
    remembered = (device, q.dtype, m, n, q.shape[1], lines, present, any(wanted))
    kernels = _kernels(kind, chosen, problem.without_own_number, edge, stored, problem.decoupled, tiling, remembered)

    results = query.new_empty(5, m)
    parts = query.new_empty(6 if several else 2, along, lines)
    of_columns = query.new_empty(2, 1 + down, n) if both else None
    columns = query.new_empty(3, n) if both else None
    slopes = q.new_empty(lines, width)[:, :n] if any(wanted) or kind == SIGMOIDS else None
    empty = query.new_zeros if m % lines else query.new_empty  # the last block may have fewer rows
    products = empty(lines, width)[:, :n] if stored else None
    dq = query.new_empty(m, q.shape[1]) if wanted[0] else None
    dk = query.new_empty(n, q.shape[1]) if wanted[1] else None
    dbias = query.new_zeros(n) if bias is not None and wanted[2] else None
    pairs, factors = (bias, index, *labels, mask), (q, k) if products is None else (products, products)
    margin, weight = float(problem.margin), 0.5 if both else 1.0

    def statistics(first: int) -> None:
        sizes = first, lines, m, n, q.shape[1], factor
        kernels.statistics.launch(down * along, stream, factors, (parts, of_columns, results, *pairs), sizes)
        numbers = first, lines, lines, along, along, m, margin, weight
        kernels.finish_rows.launch(-(-lines // LINES), stream, (), (parts, results, results[3]), numbers)
        if both:
            kernels.join_columns.launch(-(-n // LINES), stream, (), (of_columns,), (n, int(first == 0), 1 + down))

    def gradients(first: int, slopes: Tensor) -> None:
        sizes = first, lines, m, n, q.shape[1], factor
        pointers = results, columns, parts, *pairs
        kernels.slopes.launch(down * along, stream, (*factors, slopes), pointers, sizes)
        rows = slice(first, min(m, first + lines))
        W = slopes[: rows.stop - first]
        scale = coefficient * factor
        if dq is not None:
            add_product(dq[rows], W, k, beta=0.0, scale=scale)
        if dk is not None:
            add_product(dk, W.mT, q[rows], beta=float(first > 0), scale=scale)
        if dbias is not None:
            dbias.add_(W.sum(0, dtype=torch.float32), alpha=coefficient)

    blocks = range(0, m, lines)
    total = query.new_zeros(())
    if columns is not None:
        for first in blocks:
            statistics(first)
        numbers = 0, n, n, 1 + down, 1, n, margin, weight
        kernels.finish_columns.launch(-(-n // LINES), stream, (), (of_columns, columns, results[3]), numbers)
        total = columns[0].sum()
    for first in blocks:
        if products is not None:
            add_product(products[: m - first], q[first : first + lines], k.mT, beta=0.0)
        if kind != SIGMOIDS and not both:
            statistics(first)
        if slopes is not None:
            gradients(first, slopes)
        if kind == SIGMOIDS:
            total += parts[0, :, : m - first].sum()
    if kind != SIGMOIDS:
        total = total + results[0].sum()
    return total * coefficient, [_cut(dq, d), _cut(dk, d), dbias]


def is_right(kind: int, stored: bool, device: torch.device) -> bool:
    """Compare the kernels of a loss with torch on two small problems, at its first use on a GPU.

    Compilers have made wrong code of such kernels (../attention/canary.py). Kernels that are wrong, or that this GPU or
    Triton cannot compile or launch, are not used, with one warning. During the capture of a graph they are used.
    """
    return (device.type == "cuda" and torch.cuda.is_current_stream_capturing()) or _checked(kind, stored, device)


@cache
def _checked(kind: int, stored: bool, device: torch.device) -> bool:
    try:  # whole tiles, and ragged ones
        problem = "" if all(_agrees(kind, stored, device, m) for m in (256, 300)) else "give wrong results"
    except Exception as error:  # of Triton's compiler, its launcher or the driver, which have no common class
        problem = f"fail ({type(error).__name__})"
    if problem:
        text = f"The kernels of loss {kind} {problem} with this GPU and Triton: slower ones are used."
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return not problem


def _agrees(kind: int, stored: bool, device: torch.device, m: int) -> bool:
    """Compare loss and gradients of a small problem with the definition in float64."""
    generator = torch.Generator("cpu").manual_seed(kind)
    d = STORED_FROM if stored else 64
    q, k = (torch.randn(m, d, generator=generator, device="cpu").bfloat16().to(device).float() for _ in range(2))
    classes = torch.arange(m, device=device) % 20
    same, others = VisiblePairs(labels=(classes, classes)), VisiblePairs(labels=(classes, classes), same=False)
    loss: RowLoss = {
        ONE: lambda: OnePositive(m, None, VisiblePairs()),
        MEAN: lambda: SomePositives(m, same, others, "mean"),
        MASS: lambda: SomePositives(m, same, others, "mass"),
        SIGMOIDS: lambda: Sigmoids(m, None, VisiblePairs()),
        CLIP: lambda: BothDirections(VisiblePairs()),
    }[kind]()
    problem = loss.problem()
    assert problem is not None
    scale = d**-0.5
    losses, slope = loss.value_and_slope(scale * q.double() @ k.double().mT)
    expected = losses.sum(), scale * slope @ k.double(), scale * slope.mT @ q.double()
    total, grads = sum_and_gradients(q, k, None, problem._replace(centred=False), 1.0, scale, (True, True, False), HALF)
    return all(
        actual is not None and bool(((actual - wanted).abs().max() <= TOLERANCE * wanted.abs().max()).item())
        for actual, wanted in zip((total, *grads), expected, strict=False)
    )


def _operand(vectors: Tensor, precision: torch.dtype) -> Tensor:
    """Rows in half precision that begin at multiples of 16 bytes."""
    rest = vectors.shape[1] % 8
    return (pad(vectors, (0, 8 - rest)) if rest else vectors).to(precision).contiguous()


def _cut(gradient: Tensor | None, width: int) -> Tensor | None:
    return gradient if gradient is None or gradient.shape[1] == width else gradient[:, :width]
