"""Trainings in two processes, with every order of compiling, wrapping for distributed training, and monitoring."""

import contextlib
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import gradlogz
from support.small_trainings import GPT, batches, train

QUIET = gradlogz.attention.Thresholds(None, None, None)


def ddp(model):
    return nn.parallel.DistributedDataParallel(model)


def compiled(model):
    return torch.compile(model, backend="eager")


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


def with_compiled_blocks(model):
    for block in model.blocks:
        block.compile(backend="eager")
    return model


def sharded(model):
    for part in (*model.blocks, model):
        fully_shard(part)
    return model


# Functions that are applied to the model in turn, and whether the monitor gets the result or the model itself. A model
# that is compiled elsewhere shows no calls: there only the training is compared.
ORDERS = {
    "DDP, then compiled": ([ddp, compiled], True),
    "compiled, then DDP": ([compiled, ddp], True),
    "compiled in place, then DDP": ([compiled_in_place, ddp], True),
    "compiled blocks, then DDP": ([with_compiled_blocks, ddp], True),
    "sharded, then compiled": ([sharded, compiled], True),
    "sharded, then compiled in place": ([sharded, compiled_in_place], True),
    "compiled blocks, then sharded": ([with_compiled_blocks, sharded], True),
    "DDP, then compiled; the model is monitored": ([ddp, compiled], False),
    "compiled, then DDP; the model is monitored": ([compiled, ddp], False),
    "sharded, then compiled; the model is monitored": ([sharded, compiled], False),
}


def trained(order, rank, monitored):
    """Losses, weights and numbers of rows of three steps; the monitor begins after the first."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    wrappers, of_result = ORDERS[order]
    model = call = GPT(dropout=0.1)
    for wrap in wrappers:
        call = wrap(call)
    inputs = [ids[2 * rank : 2 * rank + 2] for ids in batches(3, size=4)]
    torch.manual_seed(rank)
    losses = train(model, inputs[:1], call=call)
    context = gradlogz.monitor(call if of_result else model, every=1, thresholds=QUIET, strict=of_result)
    with context if monitored else contextlib.nullcontext() as m:
        losses += train(model, inputs[1:], call=call)
    rows = [heads.rows for heads in m.row().layers.values()] if monitored and of_result else None
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return losses, [p.tolist() for p in weights], torch.get_rng_state().tolist(), rows


def wrapped_rank(rank, port, folder, orders):
    """Save for each order whether the training is the same, and the rows of the layers."""
    torch.set_num_threads(1)
    wait = timedelta(minutes=5)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=wait)
    found = {}
    for order in orders:
        *plain, _ = trained(order, rank, monitored=False)
        *same, rows = trained(order, rank, monitored=True)
        found[order] = plain == same, rows
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
