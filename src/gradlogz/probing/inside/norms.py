"""Recognition of normalisation layers by their behaviour.

    N(x) = gain * x / |x| + bias      |x|: root mean square of the features, after their mean is subtracted if N centres
    eps                               added to |x|², measured on a token of small norm

Read next: discovery.py (norms of the stream), weights.py (norms of queries and keys).
"""

import torch
from torch import nn

from ..._typing import Tensor
from .offloading import plain_copy, present

TOKENS = 256  # random tokens on which a module is tested


def norm_of(module: nn.Module, like: Tensor) -> tuple[bool, Tensor, Tensor] | None:
    """Return (centres, gain, bias) of a normalisation layer; None if the module is not one.

    A norm has no matrices and no submodules, is invariant to the scale of its input, and multiplies each feature of
    the normalised token by a constant.
    """
    if any(p.ndim > 1 for p in module.parameters()) or any(True for _ in module.children()):
        return None
    with present(module):
        parameters = [p.detach().double().cpu() for p in module.parameters()]
    if like.dtype in (torch.float16, torch.bfloat16):  # too coarse to distinguish p from 1 + p
        module, like = plain_copy(module).float(), like.float()
    width = like.shape[-1]
    eps = max(torch.finfo(like.dtype).eps, torch.finfo(torch.float32).eps)  # many norms compute in float32
    generator = torch.Generator().manual_seed(0)
    size = 0.03 / eps**0.5  # large enough that the eps of a norm is lost in rounding
    tokens = size * torch.randn(TOKENS, width, generator=generator, dtype=torch.float64)

    def out(z: Tensor) -> Tensor:
        return module(z.to(like)).double().cpu()

    with torch.no_grad():
        once, scaled, shifted, negated = out(tokens), out(4.0 * tokens), out(tokens + 8.0 * size), out(-tokens)
    error = 64 * eps * float(once.abs().max())
    if float((once - scaled).abs().max()) > error or float((once - negated).abs().max()) <= error:
        return None
    centres = float((once - shifted).abs().max()) <= 10 * error
    z = tokens.to(like.dtype).double()
    z = z - z.mean(-1, keepdim=True) if centres else z
    z = z / z.square().mean(-1, keepdim=True).sqrt()
    about = z - z.mean(0)
    gain = (about * once).sum(0) / about.square().sum(0)
    bias = once.mean(0) - gain * z.mean(0)
    if float((gain * z + bias - once).abs().max()) > 8 * error:
        return None  # it does not divide by the root mean square
    bias = torch.where(bias.abs() <= 8 * error, 0.0, bias)
    for p in parameters:  # use the exact stored parameters where they match
        for exact in (p, 1.0 + p):
            if exact.shape == gain.shape and float((exact - gain).abs().max()) <= 8 * error:
                gain = exact
            elif exact.shape == bias.shape and float((exact - bias).abs().max()) <= 8 * error:
                bias = exact
    return centres, gain, bias


def parameters_of(module: nn.Module, *, centres: bool, like: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return gain, bias and eps of a norm gain * x / sqrt(|x|² + eps) + bias to the precision of the module.

    A token at 0 gives the bias. Tokens of root mean square s give gain * x / |x| * s / sqrt(s² + eps) + bias. The ratio
    of this factor for a small and for a large s gives eps, and the large s gives the gain.
    """
    large, small = 1e3, 1e-6
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, like.shape[-1], generator=generator, dtype=torch.float64)
    x = x - x.mean(-1, keepdim=True) if centres else x
    x = x / x.square().mean(-1, keepdim=True).sqrt()
    if like.dtype in (torch.float16, torch.bfloat16):
        module, like = plain_copy(module).float(), like.float()
    with torch.no_grad():
        at_large, at_small, bias = (module((s * x).to(like)).double().cpu() for s in (large, small, 0.0))
    gain = (x * (at_large - bias)).sum(0) / x.square().sum(0)
    along = gain * x
    square = float(((at_small - bias) * along).sum() / along.square().sum()) ** 2
    eps = max((1 - square) * (small * large) ** 2 / (square * large**2 - small**2), 0.0)
    return gain * (1 + eps / large**2) ** 0.5, bias[0], eps
