"""Candidates of all processes, gathered: every process holds all, and gradients are summed on that of each candidate.

DistributedDataParallel averages gradients over processes, so the gradient of each candidate must be summed over all
processes to give the gradient of the loss of the global batch. Gathering without gradients, or only with those of the
local part, gives a smaller gradient.

A process that waits for one that has raised an error would wait until the timeout of the group. The numbers of
candidates that processes exchange, before they gather and for a mean, therefore tell of errors too: `announces_errors`.

Read next: ring.py (the same without holding all candidates), losses/.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import distributed

from .._errors import InputRuntimeError, InputValueError
from .._process_ring import OtherProcessError
from .._typing import Float, Int, Tensor
from .validation import check_indices, check_rows, check_vectors

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
FAILED = -1  # in the place of a number of candidates


class Gathered(NamedTuple):
    """The candidates of all processes in the order of their ranks, and the indices of those of this process."""

    candidates: Float[Tensor, "n d"]
    own: Int[Tensor, " m"]  # plain-words: ok


def announces_errors(loss: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a loss so that an error in one process of `group` is raised in the others as OtherProcessError.

    A process that fails takes part in the next exchange of sizes of the others. A mean ends with one; with another
    reduction one is made at the end, so that no process enters a backward pass that others do not reach.
    """

    @wraps(loss)
    def wrapped(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        group: Any = options.get("group")
        if group is None or not is_distributed(group):
            return loss(*arguments, **options)
        device = next((t.device for t in arguments if isinstance(t, Tensor)), torch.device("cpu"))
        try:
            result = loss(*arguments, **options)
        except OtherProcessError:
            raise
        except Exception:
            with suppress(OtherProcessError):  # the group may be what has failed
                _exchanged_sizes(FAILED, device, group)
            raise
        if options.get("reduction", "mean") != "mean":
            _checked_sizes(0, device, group)
        return result

    return wrapped


def gather_candidates(candidates: Float[Tensor, "m d"], *, group: "distributed.ProcessGroup | None" = None) -> Gathered:
    """Gather the candidates of all processes, with gradients: info_nce(anchor, g.candidates, positive=g.own).

    Batches may have different sizes. Every process must make the same number of forward and backward calls.
    """
    check_vectors("gather_candidates", candidates=candidates)
    check_started("gather_candidates")
    sizes = sizes_of_batches(candidates, group)
    rank = distributed.get_rank(group)
    index = torch.arange(candidates.shape[0], device=candidates.device) + sum(sizes[:rank])
    return Gathered(_Gather.apply(candidates, sizes, group), index)


def gathered(
    anchor: Tensor, candidates: Tensor, group: "distributed.ProcessGroup", options: dict[str, Any]
) -> Float[Tensor, "n d"]:
    """Candidates of all processes; the options of a likelihood that belong to candidates are gathered in place."""
    call = options["call"]
    check_group(call, options)
    positive, ids, log_weights = (options.get(name) for name in ("positive", "ids", "log_weights"))
    if positive is None:
        check_rows(call, "candidates", candidates, anchor.shape[0], "anchor")
    elif not positive.is_floating_point():
        check_indices(call, "positive", positive, candidates.shape[0])
    everything = gather_candidates(candidates, group=group)
    if positive is None:
        options["positive"] = everything.own
    elif not positive.is_floating_point():
        options["positive"] = positive + everything.own[0]
    if ids is not None:
        of_anchors, of_candidates = ids if isinstance(ids, tuple) else (ids, ids)
        options["ids"] = (of_anchors, gather_rows(of_candidates, group))
    if log_weights is not None:
        options["log_weights"] = gather_candidates(log_weights.unsqueeze(-1), group=group).candidates.squeeze(-1)
    return everything.candidates


def mean_over_processes(
    total: Float[Tensor, ""], rows: int, device: torch.device, group: "distributed.ProcessGroup | None"
) -> Float[Tensor, ""]:
    """Sum of the losses of this process, scaled so that the average over processes is the mean over all anchors.

    With equal batches it is the mean over the anchors of this process. DistributedDataParallel averages gradients over
    processes, so that batches of different sizes are right too.
    """
    sizes = sizes_of_batches(torch.empty(rows, 0, device=device), group)
    return total * (len(sizes) / sum(sizes))


def check_group(call: str, options: dict[str, Any]) -> None:
    """Check that there is a process group, and no option that would need columns for candidates of other processes."""
    for name in ("mask", "bias"):
        if options.get(name) is not None:
            problem = f"{name} must not be passed with group=, since it has no columns for other processes"
            remedy = "Pass ids= or log_weights=, which are gathered, or gather_candidates before the loss."
            raise InputValueError(call, name, problem, remedy)
    check_started(call)


def check_started(call: str) -> None:
    """Check that torch.distributed has a process group."""
    if not (distributed.is_available() and distributed.is_initialized()):
        remedy = "Call torch.distributed.init_process_group first, or use info_nce for one process."
        raise InputRuntimeError(call, "group", "torch.distributed has no process group", remedy)


def sizes_of_batches(candidates: Tensor, group: "distributed.ProcessGroup | None") -> list[int]:
    """Number of candidates on each process."""
    return _checked_sizes(candidates.shape[0], candidates.device, group)


def _checked_sizes(size: int, device: torch.device, group: "distributed.ProcessGroup | None") -> list[int]:
    sizes = _exchanged_sizes(size, device, group)
    failed = [rank for rank, size in enumerate(sizes) if size == FAILED]
    if failed:
        raise OtherProcessError(f"The loss of rank {failed[0]} raised an error, which that process reports.")
    return sizes


def _exchanged_sizes(size: int, device: torch.device, group: "distributed.ProcessGroup | None") -> list[int]:
    local = torch.tensor([size], device=device)
    sizes = [torch.empty_like(local) for _ in range(distributed.get_world_size(group))]
    _all_gather(sizes, local, group)
    return [int(size) for size in sizes]


def _all_gather(blocks: list[Tensor], local: Tensor, group: Any) -> None:
    try:
        distributed.all_gather(blocks, local, group=group)
    except RuntimeError as error:
        raise OtherProcessError(f"A process of the group does not answer. {error}") from error


def padded(tensor: Tensor, rows: int) -> Tensor:
    """The tensor padded with zeros to `rows` rows, since processes exchange blocks of one size."""
    result = tensor.new_zeros(rows, *tensor.shape[1:])
    result[: tensor.shape[0]] = tensor
    return result


def _rows_of_all(tensor: Tensor, sizes: list[int], group: Any) -> Tensor:
    blocks = [tensor.new_empty(max(sizes), *tensor.shape[1:]) for _ in sizes]
    _all_gather(blocks, padded(tensor, max(sizes)), group)
    return torch.cat([block[:size] for block, size in zip(blocks, sizes, strict=True)])


def is_distributed(group: "distributed.ProcessGroup | None" = None) -> bool:
    """True if there are several processes."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    return distributed.get_world_size(group) > 1


def gather_rows(tensor: Tensor, group: "distributed.ProcessGroup | None" = None) -> Tensor:
    """Rows of all processes in the order of their ranks, without gradients: labels, or vectors for a queue."""
    return _rows_of_all(tensor.detach(), sizes_of_batches(tensor, group), group)


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
