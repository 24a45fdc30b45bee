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
    inner = getattr(model, "_orig_mod", model)
    for part in (*inner.blocks, inner):
        fully_shard(part)
    return model


# Functions that are applied to the model in turn, and whether the monitor gets the result, the model itself, or the
# model before they are applied. A model that is compiled elsewhere shows no calls: there only the training is compared.
ORDERS = {
    "DDP, then compiled": ([ddp, compiled], "result"),
    "compiled, then DDP": ([compiled, ddp], "result"),
    "compiled in place, then DDP": ([compiled_in_place, ddp], "result"),
    "compiled blocks, then DDP": ([with_compiled_blocks, ddp], "result"),
    "sharded, then compiled": ([sharded, compiled], "result"),
    "compiled, then sharded": ([compiled, sharded], "result"),
    "sharded, then compiled in place": ([sharded, compiled_in_place], "result"),
    "compiled blocks, then sharded": ([with_compiled_blocks, sharded], "result"),
    "DDP, then compiled; the model is monitored": ([ddp, compiled], "model"),
    "compiled, then DDP; the model is monitored": ([compiled, ddp], "model"),
    "sharded, then compiled; the model is monitored": ([sharded, compiled], "model"),
    "monitored, then DDP": ([ddp], "model before"),
    "monitored, then sharded": ([sharded], "model before"),
    "monitored, then compiled, then DDP": ([compiled, ddp], "model before"),
    "monitored, then sharded, then compiled": ([sharded, compiled], "model before"),
}


def trained(order, rank, monitored):
    """Losses, weights and numbers of rows of three steps; the monitor begins after the first, or before wrapping."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    wrappers, subject = ORDERS[order]
    model = call = GPT(dropout=0.1)
    inputs, losses = [ids[2 * rank : 2 * rank + 2] for ids in batches(3, size=4)], []
    with contextlib.ExitStack() as context:

        def monitor(part):
            strict = subject == "result"
            options = {"every": 1, "thresholds": QUIET, "strict": strict}
            return context.enter_context(gradlogz.monitor(part, **options)) if monitored else None

        m = monitor(model) if subject == "model before" else None
        for wrap in wrappers:
            call = wrap(call)
        torch.manual_seed(rank)
        if subject != "model before":
            losses = train(model, inputs[:1], call=call)
            m = monitor(call if subject == "result" else model)
        losses += train(model, inputs[len(losses) :], call=call)
    shows_calls = monitored and (subject == "result" or compiled not in wrappers)
    rows = [heads.rows for heads in m.row().layers.values()] if shows_calls else None
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
