"""Products of matrices in half precision with sums and results in float32."""

import torch

from ..._typing import Float, Tensor

HALVES = (torch.bfloat16, torch.float16)


def add_product(
    total: Float[Tensor, "m n"],
    a: Float[Tensor, "m k"],
    b: Float[Tensor, "k n"],
    *,
    beta: float = 1.0,
    scale: float = 1.0,
) -> Float[Tensor, "m n"]:
    """Compute total = beta total + scale a b in place; with beta = 0 the total may be uninitialised."""
    if a.dtype not in HALVES:
        return torch.addmm(total, a, b, beta=beta, alpha=scale, out=total)
    if a.is_cuda:
        return torch.addmm(total, a, b, out_dtype=torch.float32, beta=beta, alpha=scale, out=total)
    return torch.addmm(total, a.float(), b.float(), beta=beta, alpha=scale, out=total)
