"""Losses of two views or two towers, in both directions: CLIP and NT-Xent.

Read next: one_positive.py.
"""

from typing import TYPE_CHECKING, Any

import torch

from ..._autocast import without_autocast
from ..._typing import Float, Int, Tensor
from ...kernels.losses.logit_losses import DENSE, compiled_sum, is_compiled, sum_of_rows
from ...kernels.losses.pairwise_log_sum_exp import log_add, log_sum_exp
from ...kernels.losses.softmax_losses import BothDirections, OnePositive, softplus
from ...kernels.losses.visible_pairs import VisiblePairs
from ..distributed import announces_errors, candidates_of_all, check_started, gather_rows, gathered, mean_over_processes
from ..likelihood import Likelihood
from ..ring import behind_on_ring, check_ring
from ..validation import (
    REDUCTIONS,
    check_choice,
    check_integers,
    check_precision,
    check_rows,
    check_temperature,
    check_vectors,
    in_dtype_of,
    promoted,
    reduced,
    unit,
)
from .options import Temperature

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Number of pairs up to which both directions are computed from one matrix of logits (4 MiB of float32).
ONE_MATRIX = 1 << 20
# The same for the compiled loss of a CPU (64 MiB), which computes one exponential of each pair.
COMPILED_MATRIX = 1 << 24


@announces_errors
@without_autocast
def clip_loss(
    a: Float[Tensor, "m d"],
    b: Float[Tensor, "m d"],
    *,
    temperature: Temperature = 1.0,
    log_weights: Float[Tensor, " m"] | None = None,
    ids: Int[Tensor, " m"] | None = None,
    normalize: bool = False,
    precision: torch.dtype | None = None,
    group: "ProcessGroup | None" = None,
    ring: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """CLIP loss: the average of info_nce(a, b) and info_nce(b, a).   [radford21]

    Denominator: all vectors of the other side, including the positive; both directions. The temperature is
    exp(-logit scale) in CLIP's notation. `ids`, one for each pair, exclude pairs with the same id; `group` and
    `ring` are those of info_nce.
    """
    call = "clip_loss"
    check_choice(call, "reduction", reduction, REDUCTIONS)
    check_vectors(call, a=a, b=b)
    check_rows(call, "b", b, a.shape[0], "a")
    a, b = (unit(t) if normalize else t for t in promoted(a, b))
    options: Any = {"temperature": temperature, "log_weights": log_weights, "ids": ids}
    options |= {"precision": precision, "call": call}
    check_ring(call, ring, group)
    if group is not None:
        sides = ((a, b, ("a", "b")), (b, a, ("b", "a")))
        there, back = (_over_processes(x, y, names, group, ring, reduction, options) for x, y, names in sides)
        return (there + back) / 2
    one = Likelihood(a, b, names=("a", "b"), **options)
    m = a.shape[0]
    if reduction != "none" and log_weights is None:
        rows = BothDirections(VisiblePairs() if ids is None else VisiblePairs(labels=(ids, ids), same=False))
        coefficient = 1 / m if reduction == "mean" else 1.0
        eta, factor = (one.eta, 1.0) if isinstance(temperature, Tensor) else (one.anchor, 1 / temperature)
        arguments: Any = (rows, eta, one.candidates, None, coefficient)
        total = None
        if m * m <= ONE_MATRIX:
            total = sum_of_rows(*arguments, factor=factor, precision=precision)
        elif a.is_cuda or m * m <= COMPILED_MATRIX:
            total = compiled_sum(*arguments, factor=factor, precision=precision)
        if total is not None:
            return total
    other = Likelihood(b, a, names=("b", "a"), **options)
    return (one.loss(reduction) + other.loss(reduction)) / 2


def _over_processes(
    x: Tensor, y: Tensor, names: tuple[str, str], group: "ProcessGroup", ring: bool, reduction: str, options: Any
) -> Tensor:
    """One direction of the loss over the candidates of all processes."""
    part, options = "sum" if reduction == "mean" else reduction, {**options, "names": names}
    if ring:
        family = Likelihood(x, y, **options)
        loss = family.loss_of_log_odds(-behind_on_ring(family, group), part)
    else:
        candidates = gathered(x, y, group, options)
        loss = Likelihood(x, candidates, **options).loss(part)
    return loss if part == reduction else mean_over_processes(loss, x.shape[0], x.device, group)


@announces_errors
@without_autocast
def nt_xent(
    a: Float[Tensor, "m d"],
    b: Float[Tensor, "m d"],
    *,
    temperature: Temperature = 1.0,
    ids: Int[Tensor, " m"] | None = None,
    margin: float = 0.0,
    decoupled: bool = False,
    normalize: bool = False,
    precision: torch.dtype | None = None,
    group: "ProcessGroup | None" = None,
    ring: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """NT-Xent, the loss of SimCLR: the positive of each view is the other view of its pair.   [chen20, Eq. 1]

        loss_i = -log [ exp(s_i+) / sum_{j != i} exp(s_ij) ],   i and j in all 2m views

    Denominator: all 2m - 1 other views, including the positive; both directions. With decoupled=True the positive is
    excluded too [yeh22]. `ids`, one for each pair, exclude views of other pairs with the same id. "none" returns 2m
    losses, those of `a` first. A single pair has loss 0. `group` and `ring` as in info_nce: the views of
    all processes.
    """
    call = "nt_xent"
    check_vectors(call, a=a, b=b)
    check_rows(call, "b", b, a.shape[0], "a")
    a, b = promoted(a, b)
    z = torch.cat([unit(a), unit(b)] if normalize else [a, b])
    view_ids = None
    if ids is not None:
        check_integers(call, "ids", ids, (a.shape[0],), a)
        view_ids = torch.cat([ids, ids])
    positive = torch.arange(z.shape[0], device=z.device).roll(a.shape[0])
    options: Any
    check_ring(call, ring, group)
    if group is not None and ring:
        options = {"positive": positive, "ids": view_ids, "temperature": temperature, "precision": precision}
        family = Likelihood(z, z, exclude_self=True, call=call, **options)
        part = "sum" if reduction == "mean" else reduction
        log_odds = -behind_on_ring(family, group, itself=False)
        loss = family.loss_of_log_odds(log_odds, part, decoupled=decoupled, margin=margin)
        return loss if part == reduction else mean_over_processes(loss, z.shape[0], z.device, group)
    if group is not None:
        check_started(call)
        views = candidates_of_all(z, group)
        # A view is excluded by its id, which it shares with the pairs to be excluded, or with none.
        shared = (views.own, gather_rows(views.own, group))
        shared = shared if view_ids is None else (view_ids, gather_rows(view_ids, group))
        options = {"positive": views.own[positive], "ids": shared, "temperature": temperature, "precision": precision}
        family = Likelihood(z, views.candidates, call=call, **options)
        part = "sum" if reduction == "mean" else reduction
        loss = family.loss(part, decoupled=decoupled, margin=margin)
        return loss if part == reduction else mean_over_processes(loss, z.shape[0], z.device, group)
    rows = OnePositive(z.shape[0], positive, VisiblePairs(itself=False))
    summed = reduction != "none" and not decoupled and is_compiled(rows, z, z, None, precision)
    if view_ids is None and z.shape[0] ** 2 > DENSE and not summed:
        check_choice(call, "reduction", reduction, REDUCTIONS)
        check_temperature(call, temperature, z)
        check_precision(call, precision)
        temperature = in_dtype_of(z, temperature)
        behind = _behind_in_large_batches(z, a.shape[0], temperature, precision) + margin / temperature
        return reduced(call, behind if decoupled else softplus(behind), reduction)
    options = {"positive": positive, "exclude_self": True, "ids": view_ids}
    options |= {"temperature": temperature, "precision": precision, "call": call}
    return Likelihood(z, z, **options).loss(reduction, decoupled=decoupled, margin=margin)


def _behind_in_large_batches(
    z: Float[Tensor, "v d"], m: int, temperature: Temperature, precision: torch.dtype | None
) -> Float[Tensor, " v"]:
    """N - s_+ of all 2m views. The negatives are all views but number i in both halves, so no masks are needed."""
    eta, x = z / temperature, z - z.detach().mean(0)
    but_itself, parts = VisiblePairs(itself=False), []
    for half, other in ((slice(None, m), slice(m, None)), (slice(m, None), slice(None, m))):
        sums = (log_sum_exp(eta[half], x[side], None, but_itself, precision=precision) for side in (half, other))
        parts.append(log_add(*sums) - (eta[half] * x[other]).sum(-1))
    return torch.cat(parts)
