"""Candidates of all processes: gathered, or passed around a ring.

    gather_candidates     every process holds all candidates; gradients are summed on the process of each candidate
    ring_info_nce         every process holds its own block and one other, which it passes on after each partial sum

    G = log sum over blocks of exp G_block        partial log normalisers are merged block by block
    gradient of a block's candidates              travels around the ring with the block; every process adds its term

DistributedDataParallel averages gradients over processes, so the gradient of each candidate must be summed over all
processes to give the gradient of the loss of the global batch. Gathering without gradients, or only with those of the
local part, gives a smaller gradient.

Read next: losses.py, ../kernels/losses/pairwise_log_sum_exp.py.
"""

from typing import Any, NamedTuple

import torch
from torch import distributed

from .._errors import InputRuntimeError
from .._process_ring import Exchange, ranks_of_blocks
from .._typing import Float, Int, Tensor
from ..kernels.attention import dispatch
from ..kernels.attention.scoring import Scoring, Sight
from ..kernels.losses.pairwise_log_sum_exp import log_add, received
from ..kernels.losses.softmax_losses import softplus
from .validation import check_rows, check_temperature, check_vectors, promoted, reduced, unit

SCORING = Scoring(1.0)


class Gathered(NamedTuple):
    """The candidates of all processes in the order of their ranks, and the indices of those of this process."""

    candidates: Float[Tensor, "n d"]
    own: Int[Tensor, " m"]  # plain-words: ok


def gather_candidates(candidates: Float[Tensor, "m d"], *, group: "distributed.ProcessGroup | None" = None) -> Gathered:
    """Gather the candidates of all processes, with gradients: info_nce(anchor, g.candidates, positive=g.own).

    Batches may have different sizes. Every process must make the same number of forward and backward calls.
    """
    check_vectors("gather_candidates", candidates=candidates)
    check_started("gather_candidates")
    sizes = _sizes(candidates, group)
    rank = distributed.get_rank(group)
    index = torch.arange(candidates.shape[0], device=candidates.device) + sum(sizes[:rank])
    return Gathered(_Gather.apply(candidates, sizes, group), index)


def mean_over_processes(
    total: Float[Tensor, ""], rows: int, device: torch.device, group: "distributed.ProcessGroup | None"
) -> Float[Tensor, ""]:
    """Sum of the losses of this process, scaled so that the average over processes is the mean over all anchors.

    With equal batches it is the mean over the anchors of this process. DistributedDataParallel averages gradients over
    processes, so that batches of different sizes are right too.
    """
    sizes = _sizes(torch.empty(rows, 0, device=device), group)
    return total * (len(sizes) / sum(sizes))


def ring_info_nce(
    anchor: Float[Tensor, "m d"],
    candidates: Float[Tensor, "m d"],
    *,
    temperature: float | Float[Tensor, ""] = 1.0,
    normalize: bool = False,
    reduction: str = "mean",
    group: "distributed.ProcessGroup | None" = None,
) -> Tensor:
    """info_nce over the candidates of all processes, without gathering them.

        loss_i = -log [ exp(s_i+) / sum over all candidates of all processes of exp(s_ij) ]

    Denominator: as in info_nce, over the global batch. Memory is linear in the batch of one process; the candidates
    pass around the ring once forward and, with their gradients, once backward. First derivatives only.
    """
    call = "ring_info_nce"
    check_vectors(call, anchor=anchor, candidates=candidates)
    check_rows(call, "candidates", candidates, anchor.shape[0], "anchor")
    check_temperature(call, temperature, anchor)
    check_started(call)
    a, x = (unit(t) if normalize else t for t in promoted(anchor, candidates))
    eta = a / temperature
    N = _Ring.apply(eta, x, _sizes(x, group), group)
    return reduced(call, softplus(N - (eta * x).sum(-1)), reduction)


def check_started(call: str) -> None:
    """Check that torch.distributed has a process group."""
    if not (distributed.is_available() and distributed.is_initialized()):
        remedy = "Call torch.distributed.init_process_group first, or use info_nce for one process."
        raise InputRuntimeError(call, "group", "torch.distributed has no process group", remedy)


def _sizes(candidates: Tensor, group: "distributed.ProcessGroup | None") -> list[int]:
    """Number of candidates on each process."""
    local = torch.tensor([candidates.shape[0]], device=candidates.device)
    sizes = [torch.empty_like(local) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(sizes, local, group=group)
    return [int(size) for size in sizes]


def _padded(tensor: Tensor, rows: int) -> Tensor:
    """The tensor padded with zeros to `rows` rows, since processes exchange blocks of one size."""
    padded = tensor.new_zeros(rows, *tensor.shape[1:])
    padded[: tensor.shape[0]] = tensor
    return padded


def _rows_of_all(tensor: Tensor, sizes: list[int], group: Any) -> Tensor:
    blocks = [tensor.new_empty(max(sizes), *tensor.shape[1:]) for _ in sizes]
    distributed.all_gather(blocks, _padded(tensor, max(sizes)), group=group)
    return torch.cat([block[:size] for block, size in zip(blocks, sizes, strict=True)])


def is_distributed(group: "distributed.ProcessGroup | None" = None) -> bool:
    """True if there are several processes."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    return distributed.get_world_size(group) > 1


def gather_rows(tensor: Tensor, group: "distributed.ProcessGroup | None" = None) -> Tensor:
    """Rows of all processes in the order of their ranks, without gradients: labels, or vectors for a queue."""
    return _rows_of_all(tensor.detach(), _sizes(tensor, group), group)


class _Gather(torch.autograd.Function):
    """Gather all candidates; backward, sum their gradients and take the local part."""

    @staticmethod
    def forward(ctx: Any, candidates: Tensor, sizes: list[int], group: Any) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _rows_of_all(candidates, sizes, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _Scatter.apply(gradient, ctx.sizes, ctx.group), None, None


class _Scatter(torch.autograd.Function):
    """The backward pass of gathering, whose backward pass is gathering."""

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


def _negatives(here: int, size: int, group: Any, device: torch.device) -> Sight:
    """All candidates of another process; of this process all but the positive of each anchor."""
    if here != distributed.get_rank(group):
        return Sight()
    return Sight(mask=~torch.eye(size, dtype=torch.bool, device=device)[None, None])


class _Ring(torch.autograd.Function):
    """Log-sum-exp over the negatives of every anchor on all processes, block by block."""

    @staticmethod
    def forward(ctx: Any, eta: Tensor, candidates: Tensor, sizes: list[int], group: Any) -> Tensor:
        q, block = eta[None, None], _padded(candidates, max(sizes))
        G, E = q.new_full(q.shape[:-1], -torch.inf), torch.zeros_like(q)
        for here in ranks_of_blocks(group):
            k = block[None, None, : sizes[here]]
            sight = _negatives(here, sizes[here], group, q.device)
            result = dispatch.forward(q, k, k, sight, SCORING, None, statistics=False)
            total = log_add(G, result.log_normalizer)
            top = total.masked_fill(total == -torch.inf, 0.0)
            old, new = (G - top).exp().unsqueeze(-1), (result.log_normalizer - top).exp().unsqueeze(-1)
            G, E = total, old * E + new * result.output
            (block,) = Exchange([block], group).received()
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
        for here in ranks_of_blocks(ctx.group):
            k = block[None, None, : sizes[here]]
            mask = _negatives(here, sizes[here], ctx.group, q.device).mask  # symmetric
            collected[: sizes[here]] += received(k, q, q, g, G, None, SCORING, mask)[0, 0]
            block, collected = Exchange([block, collected], ctx.group).received()
        return gradient.unsqueeze(-1) * E[0, 0], collected[: candidates.shape[0]], None, None
