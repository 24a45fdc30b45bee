"""Work of each of two processes that clip one model, each with logits of its own."""

from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gradlogz.attention import qk_clip
from support.small_trainings import GPT


def initial_model():
    torch.manual_seed(0)
    return GPT(dropout=0.0)


def largest_of_rank(rank):
    """Largest logits of the four heads of two layers, different in each process."""
    first, second = ([300.0, 40.0, 120.0, 99.0], [50.0, 60.0, 70.0, 80.0]), ([10.0, 20.0, 240.0, 98.0], [101.0] * 4)
    return {f"blocks.{i}.attention": torch.tensor((first, second)[rank][i]) for i in range(2)}


def clipped_rank(rank, port, folder):
    """Clip a replicated and a sharded model; save their parameters and the number of reductions."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    replicated, sharded, results = initial_model(), initial_model(), {}
    for block in sharded.blocks:
        fully_shard(block, mesh=init_device_mesh("cpu", (2,)))
    wrapped = {"replicated": nn.parallel.DistributedDataParallel(replicated), "sharded": sharded}
    for kind, model in wrapped.items():
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduction:
            qk_clip(model, largest_of_rank(rank))
        inner = replicated if kind == "replicated" else sharded
        parameters = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in inner.named_parameters()}
        results[kind] = {"reductions": reduction.call_count}
        results[kind]["parameters"] = {name: p.detach() for name, p in parameters.items()}
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
