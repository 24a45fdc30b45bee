"""Run every tiling of an attention kernel of a GPU once, on small problems: for compute-sanitizer.

python every_attention_kernel.py (hopper | "gpu, half" | "gpu, float32" | decoding) SIZE      SIZE: of a head
"""

import sys

import torch

from gradlogz.kernels.attention import decoding, dispatch, gpu
from gradlogz.kernels.attention.reference import Gradients
from gradlogz.kernels.attention.scoring import Scoring, Sight


def run(forward, backward, dtype: torch.dtype, size: int, queries: int, masks: str, statistics: bool) -> None:
    query = torch.randn(1, 4, queries, size, device="cuda", dtype=dtype)
    key, value = (torch.randn(1, 2, 333, size, device="cuda", dtype=dtype) for _ in range(2))
    mask = torch.rand(1, 1, queries, 333, device="cuda") < 0.8 if masks == "dense" else None
    segments = torch.arange(333, device="cuda").unsqueeze(0) // 70 if masks == "segments" else None
    sight, scoring = Sight(mask=mask, segments=segments), Scoring(size**-0.5, right=0)
    result = forward(query, key, value, sight, scoring, statistics=statistics)
    grad = torch.randn_like(result.output)
    row = torch.randn_like(result.entropy)
    gradients = Gradients(grad, row, row if statistics else None, row if statistics else None, None)
    per_row = gpu.coefficients(result, gradients)
    backward(query, key, value, sight, scoring, per_row, grad, needs_bias=False)


def main(name: str, size: int) -> None:
    dtype = torch.float32 if "float32" in name else torch.bfloat16
    forward, backward, queries = gpu.forward, gpu.backward, 200
    if name == "hopper":
        forward, backward = (dispatch._hopper_kernel(torch.device("cuda", 0), m) for m in ("hopper", "hopper_backward"))
        forward, backward, queries = forward.forward, backward.backward, 333
    elif name == "decoding":
        forward, backward, queries = decoding.forward, decoding.backward, 2
    for masks in ("", "segments") if name == "hopper" else ("", "segments", "dense"):
        for statistics in (False, True):
            gradients = gpu.backward if name == "hopper" and masks else backward
            run(forward, gradients, dtype, size, queries, masks, statistics)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
