"""The layers on the CPU against torch.nn.MultiheadAttention, float32, two threads, ratios of one run.

Each row names a problem (batch x tokens x size, heads), what was asked (forward without gradients; or forward and
backward, gradients of tokens and parameters) and a layer, with its time over that of torch.nn.MultiheadAttention, which
makes no weights, on the same tokens. Forward, torch has two ways, a fused one in evaluation and SDPA in training: the
faster one counts. "A/A" is torch's layer over itself: how much is noise.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import gradlogz as gz
from timing import compare

THREADS = 2
PROBLEMS = ((8, 64, 64, 8), (8, 128, 256, 4), (1, 1024, 512, 8), (1, 4096, 512, 8))


def rows() -> list[dict[str, Any]]:
    torch.set_num_threads(THREADS)
    return [row for problem in PROBLEMS for row in of_problem(*problem)]


def of_problem(batch: int, tokens: int, size: int, heads: int) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    x = torch.randn(batch, tokens, size)
    name, rounds = f"{batch} x {tokens} x {size}, {heads} heads", 5 if tokens > 2000 else 25
    calls = [layers(size, heads)]
    if size < 100:  # by itself, because whatever follows it finds nothing of its own in the caches
        calls.append({**torchs(size, heads), "MomentAttention, full": full(size, heads)})
    for asked, timed in (("forward", forward), ("forward and backward", backward)):
        for group in calls:
            seconds = compare({layer: timed(*call, x) for layer, call in group.items()}, rounds)
            torch_seconds = min(seconds["torch"], seconds["torch, in training"])
            for layer in list(group)[2:]:
                yield {
                    "problem": name,
                    "asked": asked,
                    "layer": layer,
                    "ratio": round(seconds[layer] / torch_seconds, 2),
                    "A/A": round(seconds["A/A"] / seconds["torch"], 2),
                }


Call = Callable[[Any, Tensor], Tensor]


def torchs(size: int, heads: int) -> dict[str, tuple[nn.Module, Call]]:
    """The two ways of torch."""
    return {
        "torch": (nn.MultiheadAttention(size, heads, batch_first=True).eval(), ordinary),
        "torch, in training": (nn.MultiheadAttention(size, heads, batch_first=True), ordinary),
    }


def full(size: int, heads: int) -> tuple[nn.Module, Call]:
    return gz.MomentAttention(size, heads, covariance="full"), moments


def layers(size: int, heads: int) -> dict[str, tuple[nn.Module, Call]]:
    """Every layer, and how it is called; torch first."""
    multihead = gz.MultiheadAttention(size, heads, batch_first=True)
    return {
        **torchs(size, heads),
        "MultiheadAttention": (multihead, ordinary),
        "MultiheadAttention.attend": (multihead, lambda layer, x: layer.attend(x, x, x)[0]),
        "MomentAttention": (gz.MomentAttention(size, heads), moments),
        "MixtureAttention": (gz.MixtureAttention(size, heads), alone),
        "MixtureAttention, rank 8": (gz.MixtureAttention(size, heads, rank=8), alone),
        "MixtureAttention, of heads": (gz.MixtureAttention(size, heads, covariance="head"), alone),
        "GatedHeads": (gz.GatedHeads(size, heads), alone),
        "GatedHeads, tied": (gz.GatedHeads(size, heads, tied=True), alone),
        "LinkAttention, poisson": (
            gz.LinkAttention(size, heads, family="poisson"),
            lambda layer, x: layer(softplus(x)),
        ),
    }


def ordinary(layer: Any, x: Tensor) -> Tensor:
    return layer(x, x, x, need_weights=False)[0]


def alone(layer: Any, x: Tensor) -> Tensor:
    return layer(x)


def moments(layer: gz.MomentAttention, x: Tensor) -> Tensor:
    variance = torch.ones_like(x)
    found = layer(x, variance if layer.covariance == "diagonal" else torch.diag_embed(variance))
    return found.mean + (found.covariance if layer.covariance == "diagonal" else found.covariance.sum(-1))


def forward(layer: nn.Module, call: Call, x: Tensor) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return call(layer, x)

    return run


def backward(layer: nn.Module, call: Call, x: Tensor) -> Callable[[], object]:
    leaves = [x.clone().requires_grad_(), *layer.parameters()]

    def run() -> object:
        output = call(layer, leaves[0])
        return torch.autograd.grad(output, leaves, torch.ones_like(output), allow_unused=True)

    return run
