"""Training of a model that is split over two processes by heads or by layers, and what each process saves."""

from collections import OrderedDict
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import gradlogz
from gradlogz.attention import Thresholds, qk_clip

SIZE, HEADS, TOKENS, STEPS = 8, 4, 6, 3


class Attention(nn.Module):
    """Attention with one projection per operand; the number of heads follows from their local sizes."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(SIZE, SIZE, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, SIZE // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(y.transpose(1, 2).flatten(2))


def model():
    torch.manual_seed(0)
    return nn.Sequential(Attention(), Attention()).double()


def inputs():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, TOKENS, SIZE, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def quiet_monitor(monitored, group="local"):
    return gradlogz.monitor(monitored, every=1, thresholds=Thresholds(None, None, None), group=group)


def train(parameters, step):
    """Train for a few steps; return the losses of this process."""
    optimizer, losses = torch.optim.SGD(parameters, 0.1), []
    for x in inputs():
        losses.append(step(x))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def step_of(whole):
    def step(x):
        loss = whole(x).square().mean()
        loss.backward()
        return loss.item()

    return step


def split_by_heads():
    plan = {name: ColwiseParallel() for name in ("q", "k", "v")} | {"o": RowwiseParallel()}
    split = model()
    for layer in split:
        parallelize_module(layer, init_device_mesh("cpu", (2,)), plan)
    return split


def step_of_stage(stage, rank):
    """Step of a pipeline by hand: the first process sends its activations, the second one their gradient."""

    def step(x):
        if rank == 0:
            y = stage(x)
            dist.send(y.detach(), 1)
            gradient = torch.empty_like(y)
            dist.recv(gradient, 1)
            y.backward(gradient)
            return None
        activations = torch.empty_like(x)
        dist.recv(activations, 0)
        activations.requires_grad_()
        loss = stage(activations).square().mean()
        loss.backward()
        dist.send(activations.grad, 0)
        return loss.item()

    return step


def step_of_schedule(stage, rank):
    """Step of a pipeline by torch.distributed.pipelining, in two microbatches."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    part = PipelineStage(stage, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(part, n_microbatches=2, loss_fn=lambda y, _: y.square().mean())

    def step(x):
        losses = []
        schedule.step(x) if rank == 0 else schedule.step(target=x, losses=losses)
        return [loss.item() for loss in losses]

    return step


def trained(kind, rank, *, monitored, group="local"):
    """Losses, parameters and records of the last step of this process."""
    if kind == "heads":
        part = split_by_heads()
        step = step_of(part)
    else:
        part = nn.Sequential(OrderedDict({str(rank): model()[rank]}))  # the layer keeps its name
        step = (step_of_stage if kind == "stage" else step_of_schedule)(part, rank)
    records = None
    if monitored:
        with quiet_monitor(part, group) as m:
            losses = train(part.parameters(), step)
        records = m.row().records()
    else:
        losses = train(part.parameters(), step)
    local = [p.to_local() if hasattr(p, "to_local") else p for p in part.parameters()]
    return losses, [p.detach().clone() for p in local], records


def clipped(kind, rank):
    """Parameters of this process after qk_clip, with the largest logits of its own heads or layers."""
    part = split_by_heads() if kind == "heads" else nn.Sequential(OrderedDict({str(rank): model()[rank]}))
    group = None if kind == "joined" else "local"
    with quiet_monitor(part, group) as m:
        train(part.parameters(), step_of(part) if kind == "heads" else step_of_stage(part, rank))
    row, tau = m.row(), 1e-3
    if kind == "heads":  # every process has the parameters of all heads as DTensors
        own = {name: heads.max_logit.greatest for name, heads in row.layers.items()}
        whole = {name: [torch.empty_like(largest) for _ in range(2)] for name, largest in own.items()}
        for name, parts in whole.items():
            dist.all_gather(parts, own[name])
        row = {name: torch.cat(parts) for name, parts in whole.items()}
    qk_clip(part, row, tau, group=group)
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for n, p in part.named_parameters()}


def refusal():
    try:
        trained("heads", 0, monitored=True, group=None)
    except ValueError as error:
        return str(error)


def parallel_rank(rank, port, folder):
    """Train with and without a monitor, split by heads, by layers by hand, and by layers with torch's schedule."""
    torch.set_num_threads(1)
    wait = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=wait)
    kinds = ("heads", "stage", "schedule")
    results = {kind: [trained(kind, rank, monitored=monitored) for monitored in (False, True)] for kind in kinds}
    results["joined"] = trained("stage", rank, monitored=True, group=None)
    results["refusal"] = refusal()
    results["clipped"] = {kind: clipped(kind, rank) for kind in ("heads", "stage", "joined")}
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
