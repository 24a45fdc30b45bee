"""Candidates of all processes, gathered: every process holds all, and gradients are summed on that of each candidate.

DistributedDataParallel averages gradients over processes, so the gradient of each candidate must be summed over all
processes to give the gradient of the loss of the global batch. Gathering without gradients, or only with those of the
local part, gives a smaller gradient.

A process that waits for one that has raised an error would wait until the timeout of the group. The numbers of
candidates that processes exchange, before they gather and for a mean, therefore tell of errors too: `announcing`.

Read next: ring.py (the same without holding all candidates), losses/.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import distributed

from .._errors import InputRuntimeError, InputValueError
from .._process_ring import OtherProcessError
from .._typing import Float, Int, Tensor
from .validation import check_indices, check_integers, check_log_weights, check_rows, check_vectors

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
FAILED = -1  # in the place of a number of candidates


class Gathered(NamedTuple):
    """The candidates of all processes in the order of their ranks, and the indices of those of this process."""

    candidates: Float[Tensor, "n d"]
    own: Int[Tensor, " m"]  # plain-words: ok


@contextmanager
def announcing(group: "distributed.ProcessGroup | None", *tensors: Any) -> Iterator[None]:
    """Context of calls that exchange sizes: an error in one process is raised in the others as OtherProcessError.

    A process that fails takes part in the next exchange of sizes of the others. Contexts must not be nested. A
    KeyboardInterrupt is not announced, since it must not wait: it ends the process, and with it the connections.
    """
    try:
        yield
    except OtherProcessError:
        raise
    except Exception:
        with suppress(OtherProcessError):  # the group may be what has failed
            _exchanged_sizes(FAILED, group, *tensors)
        raise


def announces_errors(loss: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a loss to run inside `announcing` if it has a group of several processes.

    A mean ends with an exchange of sizes. With another reduction one is made at the end, so that no process enters a
    backward pass that others do not reach.
    """

    @wraps(loss)
    def wrapped(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        group: Any = options.get("group")
        if group is None or not is_distributed(group):
            return loss(*arguments, **options)
        tensors: Any = (*arguments, *options.values())
        with announcing(group, *tensors):
            result = loss(*arguments, **options)
            if options.get("reduction", "mean") != "mean":
                await_checks(group, *tensors)
        return result

    return wrapped


def gather_candidates(candidates: Float[Tensor, "m d"], *, group: "distributed.ProcessGroup | None" = None) -> Gathered:
    """Gather the candidates of all processes, with gradients: info_nce(anchor, g.candidates, positive=g.own).

    Batches may have different sizes. Every process must make the same number of forward and backward calls.
    """
    check_started("gather_candidates")
    with announcing(group, candidates):
        check_vectors("gather_candidates", candidates=candidates)
        return candidates_of_all(candidates, group)


def candidates_of_all(candidates: Float[Tensor, "m d"], group: "distributed.ProcessGroup | None") -> Gathered:
    """`gather_candidates` for calls that announce errors themselves."""
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
    anchor_name, name = options.get("names", ("anchor", "candidates"))
    vectors: dict[str, Any] = {anchor_name: anchor, name: candidates}
    check_vectors(call, **vectors)
    n = candidates.shape[0]
    if positive is None:
        check_rows(call, name, candidates, anchor.shape[0], anchor_name)
    elif not positive.is_floating_point():
        check_indices(call, "positive", positive, n)
    # Lengths are checked here, since those of several processes could be wrong and have the right sum.
    of_anchors, of_candidates = ids if isinstance(ids, tuple) else (ids, ids)
    if ids is not None:
        check_integers(call, "ids", of_candidates, (n,), candidates)
    if log_weights is not None:
        check_log_weights(call, log_weights, **{name: candidates})
    everything = candidates_of_all(candidates, group)
    if positive is None:
        options["positive"] = everything.own
    elif not positive.is_floating_point():
        options["positive"] = positive.long() + everything.own[0]
    if ids is not None:
        options["ids"] = (of_anchors, gather_rows(of_candidates, group))
    if log_weights is not None:
        options["log_weights"] = candidates_of_all(log_weights.unsqueeze(-1), group).candidates.squeeze(-1)
    return everything.candidates


def mean_over_processes(
    total: Float[Tensor, ""], rows: int, device: torch.device, group: "distributed.ProcessGroup | None"
) -> Float[Tensor, ""]:
    """Sum of the losses of this process, scaled so that the average over processes is the mean over all anchors.

    With equal batches it is the mean over the anchors of this process. DistributedDataParallel averages gradients over
    processes, so that batches of different sizes are right too.
    """
    sizes = sizes_of_batches(torch.empty(rows, 0, device=device), group)
    return total * (len(sizes) / max(1, sum(sizes)))  # 0 if no process has an anchor that counts


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
    return _checked_sizes(candidates.shape[0], group, candidates)


def await_checks(group: "distributed.ProcessGroup | None", *tensors: Any) -> None:
    """Wait until all processes have come here, or raise an error if one of them has."""
    _checked_sizes(0, group, *tensors)


def _checked_sizes(size: int, group: "distributed.ProcessGroup | None", *tensors: Any) -> list[int]:
    sizes = _exchanged_sizes(size, group, *tensors)
    failed = [rank for rank, size in enumerate(sizes) if size == FAILED]
    if failed:
        raise OtherProcessError(f"The call on rank {failed[0]} raised an error, which that process reports.")
    return sizes


def _exchanged_sizes(size: int, group: "distributed.ProcessGroup | None", *tensors: Any) -> list[int]:
    local = torch.tensor([size], device=_device_of_sizes(group, tensors))
    sizes = [torch.empty_like(local) for _ in range(distributed.get_world_size(group))]
    _all_gather(sizes, local, group)
    return [int(size) for size in sizes]


def _device_of_sizes(group: "distributed.ProcessGroup | None", tensors: tuple[Any, ...]) -> torch.device:
    """A CPU if the group has a backend for it, which all processes know, whatever the tensors of a failing call are.

    Else the GPU of the tensors, or the current one for a call without any.
    """
    if "cpu" in distributed.get_backend_config(group):
        return torch.device("cpu")
    devices = (t.device for t in tensors if isinstance(t, Tensor) and t.device.type != "cpu")
    return next(devices, None) or torch.device("cuda", torch.cuda.current_device())


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
