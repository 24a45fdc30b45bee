"""Small models that are trained for a few steps, with and without the monitor."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gradlogz
from gradlogz.attention.in_models import process_check

VOCABULARY, TOKENS = 50, 13


class SelfAttention(nn.Module):
    """Attention as in a training script: one call of torch's function."""

    def __init__(self, size, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        p = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        return self.out(y.transpose(1, 2).flatten(2))


class AttendAttention(nn.Module):
    """Attention of a script that uses attend, with a z-loss on its statistics."""

    def __init__(self, like, statistics):
        super().__init__()
        self.heads, self.dropout, self.statistics = like.heads, like.dropout, statistics
        self.qkv, self.out = like.qkv, like.out

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        p = self.dropout if self.training else 0.0
        result = gradlogz.attend(q, k, v, is_causal=True, dropout_p=p, statistics=self.statistics)
        if not torch.compiler.is_compiling():  # checkpoints inside a graph may not set attributes
            self.result = result
        return self.out(result.output.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, size, heads, dropout):
        super().__init__()
        self.before, self.after = nn.LayerNorm(size), nn.LayerNorm(size)
        self.attention = SelfAttention(size, heads, dropout)
        self.mlp = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size), nn.Dropout(dropout))

    def forward(self, x):
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.after(x))


class GPT(nn.Module):
    """A model of a training script; `checkpointed` is None, or whether checkpoints are reentrant."""

    def __init__(self, size=16, heads=4, layers=2, dropout=0.1, checkpointed=None):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, size), nn.Linear(size, VOCABULARY)
        self.blocks = nn.ModuleList(Block(size, heads, dropout) for _ in range(layers))
        self.checkpointed = checkpointed
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids):
        x = self.embedding(ids)
        if self.training:
            self.seen += 1
        for block in self.blocks:
            x = block(x) if self.checkpointed is None else checkpoint(block, x, use_reentrant=self.checkpointed)
        return self.head(x)


class Encoder(nn.Module):
    """An encoder of torch's layers, whose attention is one function."""

    def __init__(self, dropout=0.1):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout, batch_first=True)
        self.embedding, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids):
        return self.head(self.encoder(self.embedding(ids), src_key_padding_mask=ids == 0))


def batches(count, size=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCABULARY, (size, TOKENS + 1), generator=generator) for _ in range(count)]


def train(model, inputs, *, rate=1e-2, accumulate=1, call=None, after=lambda: None):
    """Run a training loop and return the exact losses."""
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    losses = []
    for index, ids in enumerate(inputs):
        logits = (model if call is None else call)(ids[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        losses.append(loss.item())
        if (index + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            after()
    return losses


def monitored_rank(rank, port, folder, how):
    """Train a model in one of two processes, each on half of every batch, and save losses and records."""
    torch.set_num_threads(1)
    wait = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=wait)
    torch.manual_seed(0)
    model = GPT(dropout=0.0)
    if how == "sharded":
        for part in (*model.blocks, model):
            fully_shard(part)
        call = seen = model
    else:
        call = nn.parallel.DistributedDataParallel(model)
        seen = call if how == "ddp" else model
    inputs = [ids[2 * rank : 2 * rank + 2] for ids in batches(3, size=4)]
    thresholds, group = gradlogz.attention.Thresholds(None, None, None), "local" if how == "local" else None
    with gradlogz.monitor(seen, every=2, thresholds=thresholds, group=group) as m:
        losses = train(model, inputs, rate=1e-5, call=call)
    torch.save({"losses": losses, "records": m.row().records()}, f"{folder}/{rank}.pt")
    dist.barrier()  # neither process leaves while the other still communicates
    dist.destroy_process_group()


def lonely_rank(rank, port, folder):
    """Monitor a model in one of two processes only, then in both; save the error and the number of rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    process_check.PATIENCE = timedelta(seconds=2)
    model, error = GPT(dropout=0.0), None
    if rank == 0:
        try:
            with gradlogz.monitor(model):
                pass
        except RuntimeError as raised:
            error = str(raised)
    dist.barrier()
    process_check.PATIENCE = timedelta(minutes=5)
    rows = []
    for _ in range(2):
        with gradlogz.monitor(model, every=1) as m:
            train(model, batches(1))
        rows.append({heads.rows for heads in m.row().layers.values()})
    torch.save({"error": error, "rows": rows}, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
