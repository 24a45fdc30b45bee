"""The losses of contrastive_gpu.py by other libraries, as far as they are installed.

    siglip-kernel [avocardio26]     fused_siglip_loss: products by cuBLAS in chunks, sigmoids by a Triton kernel
    cut-cross-entropy [wijmans24]   InfoNCE as the cross-entropy of a linear layer; "exact" keeps small gradients too
    liger-kernel [hsu24]            the same by its fused linear cross-entropy
    inf-cl [cheng24]                InfoNCE in float32 with products in TF32
    open_clip [ilharco21]           ClipLoss and SigLipLoss as its training calls them, inside autocast

Vectors are float32 and rounded to bfloat16, except for Inf-CL, which computes in float32. CLIP is two calls where a
library has one direction only.

python contrastive_libraries.py MODULE     compiles a library and prints its errors on a small problem; needs a GPU
"""

import importlib
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

Tensor = torch.Tensor
Loss = Callable[[Tensor, Tensor], Tensor]
HALF = torch.bfloat16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPEN_CLIP_UP_TO = 32_768  # pairs; beyond, its matrices of logits do not fit into memory
MODULES = (
    "siglip_kernel",
    "cut_cross_entropy",
    "liger_kernel.ops.fused_linear_cross_entropy",
    "inf_cl",
    "open_clip.loss",
)
LEFT_OUT: set[str] = set()  # modules that are not measured


@cache
def installed(name: str) -> Any:
    """The module, or None if it is missing, left out, or does not start with this torch and Triton."""
    if name in LEFT_OUT:
        return None
    try:
        return importlib.import_module(name)
    except Exception as error:  # of whatever it needs
        print(f"{name} is left out: {type(error).__name__}: {error}"[:300], file=sys.stderr, flush=True)
        return None


def cross_entropies() -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Mean cross-entropy of a linear layer, from hidden states [n, d], weights [words, d] and labels."""
    result: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {}
    cce = installed("cut_cross_entropy")
    if cce is not None:
        result["cut-cross-entropy"] = lambda h, w, labels: cce.linear_cross_entropy(h, w, labels)
        result["cut-cross-entropy, exact"] = lambda h, w, labels: cce.linear_cross_entropy(
            h, w, labels, filter_eps=None
        )
    liger = installed("liger_kernel.ops.fused_linear_cross_entropy")
    if liger is not None:
        # The function returns the loss and optional quantities.
        result["liger"] = lambda h, w, labels: liger.LigerFusedLinearCrossEntropyFunction.apply(h, w, labels)[0]
    return result


def losses(name: str, n: int, d: int, temperature: float, offset: float) -> dict[str, Loss]:
    """The loss of n pairs of vectors of d dimensions by each library that has it."""
    if name == "siglip":
        return _siglip(n, temperature, offset)
    if name not in ("info_nce", "clip_loss"):
        return {}
    one_way: dict[str, Loss] = {}
    labels = torch.arange(n, device=DEVICE)
    for label, function in cross_entropies().items():
        one_way[label] = lambda a, b, f=function: f((a / temperature).to(HALF), b.to(HALF), labels)
    inf_cl = installed("inf_cl")
    if inf_cl is not None:
        head = min(d, 256)
        one_way["inf-cl"] = lambda a, b: inf_cl.cal_flash_loss(a, b, labels, 1 / temperature, head).mean()
    if name == "info_nce":
        return one_way
    both: dict[str, Loss] = {label: lambda a, b, f=f: (f(a, b) + f(b, a)) / 2 for label, f in one_way.items()}
    open_clip = installed("open_clip.loss")
    if open_clip is not None and n <= OPEN_CLIP_UP_TO:
        module = open_clip.ClipLoss()

        def clip(a: Tensor, b: Tensor) -> Tensor:
            with torch.autocast(DEVICE, HALF):
                return module(a, b, 1 / temperature)

        both["open_clip"] = clip
    return both


def _siglip(n: int, temperature: float, offset: float) -> dict[str, Loss]:
    result: dict[str, Loss] = {}
    log_scale, shift = (torch.tensor(x, device=DEVICE) for x in (-torch.tensor(temperature).log().item(), offset))
    kernel = installed("siglip_kernel")
    if kernel is not None:
        result["siglip-kernel"] = lambda a, b: kernel.fused_siglip_loss(a.to(HALF), b.to(HALF), log_scale, shift)
    open_clip = installed("open_clip.loss")
    if open_clip is not None and n <= OPEN_CLIP_UP_TO:
        module = open_clip.SigLipLoss()

        def siglip(a: Tensor, b: Tensor) -> Tensor:
            with torch.autocast(DEVICE, HALF):
                return module(a, b, 1 / temperature, offset)

        result["open_clip"] = siglip
    return result


def main(module: str) -> None:
    """Run a library once on small problems, so that its kernels are compiled, and compare it with float64."""
    from contrastive_gpu import DENSE, DIMENSIONS, OFFSET, SIZES, T, both_ways, vectors

    LEFT_OUT.update(set(MODULES) - {module})
    for d in DIMENSIONS:
        for name in ("siglip", "info_nce", "clip_loss"):
            a, b = vectors(2048, d)
            exact = [t.detach().double().requires_grad_() for t in (a, b)]
            dense = DENSE[name](exact[0] @ exact[1].mT, 0, T)
            expected = [dense.detach(), *torch.autograd.grad(dense, exact)]
            for label, loss in losses(name, 2048, d, T, OFFSET).items():
                value = loss(a, b)
                results = [value.detach(), *torch.autograd.grad(value, (a, b))]
                errors = [float((f - e).norm() / e.norm()) for f, e in zip(results, expected, strict=True)]
                print(f"{name} 2048 x {d} {label}: errors {', '.join(f'{e:.1e}' for e in errors)}", flush=True)
    for n in SIZES:  # kernels may differ from size to size
        for name in ("siglip", "info_nce"):
            for loss in losses(name, n, 128, T, OFFSET).values():
                both_ways(loss, *vectors(n, 128))()
    torch.cuda.synchronize()
    print(f"{module} ran", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
