"""The layers on the CPU relative to torch.nn.MultiheadAttention, float32, two threads, ratios of one run.

Each row has a problem (batch x tokens x size, heads), the computation (forward without gradients; or forward and
backward, with gradients of tokens and parameters) and a layer, with its time divided by that of
torch.nn.MultiheadAttention, without attention weights, on the same tokens. Torch's forward pass has a fused path in
evaluation mode and SDPA in training mode; the faster one is the reference. "A/A" is the ratio of torch's layer to
itself, a measure of noise.
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
    if size < 100:  # timed separately, since it evicts the data of the others from the caches
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
    """Return torch's layer in evaluation and in training mode."""
    return {
        "torch": (nn.MultiheadAttention(size, heads, batch_first=True).eval(), ordinary),
        "torch, in training": (nn.MultiheadAttention(size, heads, batch_first=True), ordinary),
    }


def full(size: int, heads: int) -> tuple[nn.Module, Call]:
    return gz.MomentAttention(size, heads, covariance="full"), moments


def layers(size: int, heads: int) -> dict[str, tuple[nn.Module, Call]]:
    """Return every layer with the function that calls it; torch first."""
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
        "LinearAttention": (gz.attention.LinearAttention(size, heads), alone),
        "SigmoidAttention": (gz.attention.SigmoidAttention(size, heads), alone),
        "CosineAttention": (gz.attention.CosineAttention(size, heads), alone),
    }


def ordinary(layer: Any, x: Tensor) -> Tensor:
    return layer(x, x, x, need_weights=False)[0]


def alone(layer: Any, x: Tensor) -> Tensor:
    return layer(x)


def moments(layer: gz.MomentAttention, x: Tensor) -> Tensor:
    variance = torch.ones_like(x)
    output = layer(x, variance if layer.covariance == "diagonal" else torch.diag_embed(variance))
    return output.mean + (output.covariance if layer.covariance == "diagonal" else output.covariance.sum(-1))


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
