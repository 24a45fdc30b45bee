"""InfoNCE on a GPU, forward and backward, compared with a dense matrix of logits and with chunked losses.

python3 benchmarks/contrastive_gpu.py [folder]     on a machine with a GPU; writes contrastive_gpu.json

"dense" is the cross-entropy of one matrix, "compiled" the same with torch.compile, "chunked" the compiled loss for
blocks of rows, recomputed in the backward pass, and "linear_cross_entropy" torch's function, where it exists. In
bfloat16 the vectors are rounded before the product, by `precision` in gradlogz and by a cast in the alternatives;
gradients are float32. Memory excludes the vectors; an alternative that does not fit has no entry.
"""

import itertools
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from gradlogz import info_nce

D, T, ROWS = 128, 0.1, 8192
SIZES = ((8192, 15), (32_768, 5), (65_536, 3), (262_144, 1))
MOST_DENSE = 65_536
Call = Callable[[], object]


def dense(a: torch.Tensor, b: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy((a @ b.mT).float() / T, targets, reduction="sum") / len(targets)


def rivals(n: int, precision: torch.dtype) -> dict[str, Call]:
    g = torch.Generator(device="cuda").manual_seed(0)
    a, b = (
        functional.normalize(torch.randn(n, D, generator=g, device="cuda"), dim=-1).requires_grad_() for _ in range(2)
    )
    targets = torch.arange(n, device="cuda")
    half = None if precision == torch.float32 else precision
    compiled = torch.compile(dense)

    def chunked(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses = []
        for i in range(0, n, ROWS):
            losses.append(checkpoint(compiled, x[i : i + ROWS], y, targets[i : i + ROWS], use_reentrant=False))
        return torch.stack(losses).mean()

    def both_ways(loss: Callable[..., torch.Tensor]) -> Call:
        return lambda: torch.autograd.grad(loss(), (a, b))

    calls = {"gradlogz": both_ways(lambda: info_nce(a, b, temperature=T, precision=half))}
    if n <= MOST_DENSE:
        calls["dense"] = both_ways(lambda: dense(a.to(precision), b.to(precision), targets))
        calls["compiled"] = both_ways(lambda: compiled(a.to(precision), b.to(precision), targets))
    calls["chunked"] = both_ways(lambda: chunked(a.to(precision), b.to(precision)))
    if hasattr(functional, "linear_cross_entropy"):
        calls["linear_cross_entropy"] = both_ways(
            lambda: functional.linear_cross_entropy((a / T).to(precision), b.to(precision), targets)
        )
    calls["gradlogz again"] = calls["gradlogz"]
    return calls


def milliseconds(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Return the median time of each call by the GPU's clock; every round runs each call once."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
        marks[0].record()
        for call, mark in zip(calls.values(), marks[1:], strict=True):
            call()
            mark.record()
        torch.cuda.synchronize()
        for name, (begin, end) in zip(calls, itertools.pairwise(marks), strict=True):
            times[name].append(begin.elapsed_time(end))
    return {name: round(statistics.median(t), 3) for name, t in times.items()}


def mebibytes(call: Call) -> float:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def row(n: int, rounds: int, precision: torch.dtype) -> dict[str, object]:
    torch._dynamo.reset()  # each size is compiled separately
    calls, memory, failed = rivals(n, precision), {}, {}
    for name, call in list(calls.items()):
        try:
            call()  # compiles
            memory[name] = mebibytes(call)
        except Exception as error:  # the alternative does not fit into memory or does not support the input
            failed[name] = type(error).__name__
            del calls[name]
            torch.cuda.empty_cache()
    ms = milliseconds(calls, rounds)
    operations = 8 * n * n * D  # two products forward and two backward, as computed by gradlogz
    result = {"vectors": n, "dimension": D, "precision": str(precision).removeprefix("torch."), "ms": ms, "MiB": memory}
    return {**result, "failed": failed, "TFLOP/s": round(operations / ms["gradlogz"] / 1e9, 1)}


def main(folder: Path) -> None:
    rows = []
    for precision, (n, rounds) in itertools.product((torch.bfloat16, torch.float32), SIZES):
        rows.append(row(n, rounds, precision))
        print(json.dumps(rows[-1]), flush=True)
        torch.cuda.empty_cache()
    table = {"benchmark": "contrastive_gpu", "torch": torch.__version__, "device": torch.cuda.get_device_name()}
    (folder / "contrastive_gpu.json").write_text(json.dumps({**table, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results")
