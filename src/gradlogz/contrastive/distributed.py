"""Candidates of all processes: gathered, or passed around a ring.

    gather_candidates     every process holds all candidates; their gradients are summed where they came from
    ring_info_nce         every process holds its own and one more block, which goes on after each partial sum

    G = log sum over blocks of exp G_block        the merge of partial log normalisers, one block after the other
    ∇ of a block's candidates                     travels around the ring with it, every process adding its share

Processes train on the mean of their losses (DistributedDataParallel averages gradients): with the sum of all gradients
for each candidate this is the gradient of the loss of the whole batch. Gathering without gradients, or with those of
the own part alone, gives another, smaller one.

Read next: losses.py, ../kernels/losses/pairwise_log_sum_exp.py.
"""

from typing import Any, NamedTuple

import torch
from torch import distributed

from .._errors import InputRuntimeError
from .._typing import Float, Int, Tensor
from ..kernels.attention import dispatch
from ..kernels.attention.scoring import Scoring, Sight
from ..kernels.losses.pairwise_log_sum_exp import received
from .validation import check_rows, check_temperature, check_vectors, reduced, unit, wide

WHOLE = Scoring(1.0)


class Gathered(NamedTuple):
    """The candidates of all processes in the order of their ranks, and where those of this one are."""

    candidates: Float[Tensor, "n d"]
    own: Int[Tensor, " m"]


def gather_candidates(candidates: Float[Tensor, "m d"], *, group: "distributed.ProcessGroup | None" = None) -> Gathered:
    """All candidates of all processes, with gradients: info_nce(anchor, all.candidates, positive=all.own).

    Batches may be of different sizes. Each process must call it the same number of times, backward too.
    """
    check_vectors("gather_candidates", candidates=candidates)
    _check_started("gather_candidates")
    sizes = _sizes(candidates, group)
    rank = distributed.get_rank(group)
    own = torch.arange(candidates.shape[0], device=candidates.device) + sum(sizes[:rank])
    return Gathered(_Gather.apply(candidates, sizes, group), own)


def ring_info_nce(
    anchor: Float[Tensor, "m d"],
    candidates: Float[Tensor, "m d"],
    *,
    temperature: float | Float[Tensor, ""] = 1.0,
    normalize: bool = False,
    reduction: str = "mean",
    group: "distributed.ProcessGroup | None" = None,
) -> Tensor:
    """info_nce over the candidates of all processes, of which none is ever gathered.

        loss_i = -log [ exp(s_i+) / sum over all candidates of all processes of exp(s_ij) ]

    Denominator: as in info_nce, of the whole batch. Memory is linear in the batch of one process; the candidates go
    around once forward and, with their gradients, once backward. First derivatives only.
    """
    call = "ring_info_nce"
    check_vectors(call, anchor=anchor, candidates=candidates)
    check_rows(call, "candidates", candidates, anchor.shape[0], "anchor")
    check_temperature(call, temperature, anchor)
    _check_started(call)
    a, x = (unit(wide(t)) if normalize else wide(t) for t in (anchor, candidates))
    eta = a / temperature
    G = _Ring.apply(eta, x, _sizes(x, group), group)
    return reduced(call, G - (eta * x).sum(-1), reduction)


def _check_started(call: str) -> None:
    if not (distributed.is_available() and distributed.is_initialized()):
        remedy = "Call torch.distributed.init_process_group first; with one process info_nce is all it needs."
        raise InputRuntimeError(call, "processes", "processes must have been joined, got no process group", remedy)


def _sizes(candidates: Tensor, group: "distributed.ProcessGroup | None") -> list[int]:
    """How many candidates each process has."""
    own = torch.tensor([candidates.shape[0]], device=candidates.device)
    found = [torch.empty_like(own) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(found, own, group=group)
    return [int(size) for size in found]


def _padded(tensor: Tensor, rows: int) -> Tensor:
    """What all processes can exchange: as many rows everywhere."""
    whole = tensor.new_zeros(rows, tensor.shape[1])
    whole[: tensor.shape[0]] = tensor
    return whole


class _Gather(torch.autograd.Function):
    """All gathered; backward, all summed and the own part taken."""

    @staticmethod
    def forward(ctx: Any, candidates: Tensor, sizes: list[int], group: Any) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        blocks = [candidates.new_empty(max(sizes), candidates.shape[1]) for _ in sizes]
        distributed.all_gather(blocks, _padded(candidates, max(sizes)), group=group)
        return torch.cat([block[:size] for block, size in zip(blocks, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _Scatter.apply(gradient, ctx.sizes, ctx.group), None, None


class _Scatter(torch.autograd.Function):
    """The backward of gathering, whose own backward is gathering."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, sizes: list[int], group: Any) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        total = gradient.contiguous().clone()
        distributed.all_reduce(total, group=group)
        rank = distributed.get_rank(group)
        return total[sum(sizes[:rank]) : sum(sizes[: rank + 1])].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _Gather.apply(gradient, ctx.sizes, ctx.group), None, None


class _Ring(torch.autograd.Function):
    """G of every anchor over all candidates, as blocks of them pass by."""

    @staticmethod
    def forward(ctx: Any, eta: Tensor, candidates: Tensor, sizes: list[int], group: Any) -> Tensor:
        q, block = eta[None, None], _padded(candidates, max(sizes))
        G, E = q.new_full(q.shape[:-1], -torch.inf), torch.zeros_like(q)
        for here in _around(sizes, group):
            k = block[None, None, : sizes[here]]
            found = dispatch.forward(q, k, k, Sight(), WHOLE, None, statistics=False)
            total = torch.logaddexp(G, found.log_normalizer)
            old, new = (G - total).exp().unsqueeze(-1), (found.log_normalizer - total).exp().unsqueeze(-1)
            G, E = total, old * E + new * found.output
            (block,) = _passed_on([block], group)
        ctx.sizes, ctx.group = sizes, group
        ctx.save_for_backward(eta, candidates, G, E)
        return G[0, 0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        eta, candidates, G, E = ctx.saved_tensors
        sizes, q, g = ctx.sizes, eta[None, None], gradient[None, None]
        block = _padded(candidates, max(sizes))
        collected = torch.zeros_like(block)
        for here in _around(sizes, ctx.group):
            k = block[None, None, : sizes[here]]
            collected[: sizes[here]] += received(k, q, q, g, G, None, WHOLE)[0, 0]
            block, collected = _passed_on([block, collected], ctx.group)
        return gradient.unsqueeze(-1) * E[0, 0], collected[: candidates.shape[0]], None, None


def _around(sizes: list[int], group: Any) -> list[int]:
    """Whose block is here, step after step: one's own first, then that of the process before."""
    rank = distributed.get_rank(group)
    return [(rank - step) % len(sizes) for step in range(len(sizes))]


def _passed_on(tensors: list[Tensor], group: Any) -> list[Tensor]:
    """To the next process, from the one before."""
    world, rank = distributed.get_world_size(group), distributed.get_rank(group)
    if world == 1:
        return tensors
    after, before = (rank + 1) % world, (rank - 1) % world
    if group is not None:
        after, before = (distributed.get_global_rank(group, r) for r in (after, before))
    arrived = [torch.empty_like(t) for t in tensors]
    exchanges = [
        *(distributed.P2POp(distributed.isend, t.contiguous(), after, group) for t in tensors),
        *(distributed.P2POp(distributed.irecv, t, before, group) for t in arrived),
    ]
    for exchange in distributed.batch_isend_irecv(exchanges):
        exchange.wait()
    return arrived
