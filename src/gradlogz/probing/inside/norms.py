"""Norms, told from other modules by what they do.

    N(x) = gain * x / |x| + bias      |x|: root mean square of the features, their mean taken off first if it centres

Read next: discovery.py (norms of the stream), weights.py (norms of queries and keys).
"""

import copy

import torch
from torch import nn

from ..._typing import Tensor

TOKENS = 256  # on which a norm is tried


def norm_of(module: nn.Module, like: Tensor) -> tuple[bool, Tensor, Tensor] | None:
    """Whether a norm centres, its gain and its bias; None if a module is no norm.

    It is one if it has no matrices and no parts, does not change when its input is made longer, and is a multiple of
    the token divided by its length, feature by feature.
    """
    parameters = list(module.parameters())
    if any(p.ndim > 1 for p in parameters) or any(True for _ in module.children()):
        return None
    if like.dtype in (torch.float16, torch.bfloat16):  # too coarse to tell p from 1 + p
        module, like = copy.deepcopy(module).float(), like.float()
    width = like.shape[-1]
    eps = max(torch.finfo(like.dtype).eps, torch.finfo(torch.float32).eps)  # many compute in float32 at any rate
    generator = torch.Generator().manual_seed(0)
    size = 0.03 / eps**0.5  # at which what a norm adds to the variance is lost in rounding
    tokens = size * torch.randn(TOKENS, width, generator=generator, dtype=torch.float64)

    def out(z: Tensor) -> Tensor:
        return module(z.to(like)).double().cpu()

    with torch.no_grad():
        once, longer, moved, turned = out(tokens), out(4.0 * tokens), out(tokens + 8.0 * size), out(-tokens)
    error = 64 * eps * float(once.abs().max())
    if float((once - longer).abs().max()) > error or float((once - turned).abs().max()) <= error:
        return None
    centres = float((once - moved).abs().max()) <= 10 * error
    z = tokens.to(like.dtype).double()
    z = z - z.mean(-1, keepdim=True) if centres else z
    z = z / z.square().mean(-1, keepdim=True).sqrt()
    about = z - z.mean(0)
    gain = (about * once).sum(0) / about.square().sum(0)
    bias = once.mean(0) - gain * z.mean(0)
    if float((gain * z + bias - once).abs().max()) > 8 * error:
        return None  # it divides by another length than that of the token
    for p in parameters:  # exactly what is stored, where it is stored
        for exact in (p.detach().double().cpu(), 1.0 + p.detach().double().cpu()):
            if exact.shape == gain.shape and float((exact - gain).abs().max()) <= 8 * error:
                gain = exact
            elif exact.shape == bias.shape and float((exact - bias).abs().max()) <= 8 * error:
                bias = exact
    return centres, gain, torch.where(bias.abs() <= 8 * error, 0.0, bias)
