"""Run every tiling of an attention kernel of a GPU once, on small problems: for compute-sanitizer.

python every_attention_kernel.py hopper | "gpu, half" | "gpu, float32" | decoding
"""

import sys

import torch

from gradlogz.kernels.attention import decoding, dispatch, gpu
from gradlogz.kernels.attention.reference import Gradients
from gradlogz.kernels.attention.scoring import Scoring, Sight


def run(kernel, dtype: torch.dtype, size: int, queries: int, masked: bool, statistics: bool) -> None:
    query = torch.randn(1, 4, queries, size, device="cuda", dtype=dtype)
    key, value = (torch.randn(1, 2, 333, size, device="cuda", dtype=dtype) for _ in range(2))
    mask = torch.rand(1, 1, queries, 333, device="cuda") < 0.8 if masked else None
    sight, scoring = Sight(mask=mask), Scoring(size**-0.5, right=0)
    result = kernel.forward(query, key, value, sight, scoring, statistics=statistics)
    grad = torch.randn_like(result.output)
    row = torch.randn_like(result.entropy)
    gradients = Gradients(grad, row, row if statistics else None, row if statistics else None, None)
    per_row = kernel.coefficients(result, gradients)
    kernel.backward(query, key, value, sight, scoring, per_row, grad, needs_bias=False)


def main(name: str) -> None:
    kernels = {"hopper": dispatch._hopper_kernel(torch.device("cuda", 0)), "decoding": decoding}
    kernel = kernels.get(name, gpu)
    dtype = torch.float32 if "float32" in name else torch.bfloat16
    for size in (64, 128) if name == "hopper" else (64, 128, 256):
        for masked in (False,) if name == "hopper" else (False, True):
            for statistics in (False, True):
                run(kernel, dtype, size, 2 if kernel is decoding else 200, masked, statistics)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1])
