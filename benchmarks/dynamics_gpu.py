"""One step of a large cloud on a GPU, compared with one plain attention call on the same cloud.

python3 benchmarks/dynamics_gpu.py [folder]     on a machine with a GPU; writes dynamics_gpu.json

The cloud is float32 and every token attends to all. With "bfloat16" logits are computed from rounded tokens
(`Ascent.precision`), and the reference is torch's attention on the rounded cloud; with "float32" it is torch's
attention in float32. Plain attention is the fastest of torch's kernels. "rate" is 4 n^2 d operations divided by the
time of a step, in TFLOP/s; "bytes" is the memory of a step in addition to the cloud, per token.
"""

import itertools
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from gradlogz import Ascent, evolve

D = 64
CLOUDS = (
    (1 << 16, "bfloat16"),
    (1 << 18, "bfloat16"),
    (1 << 20, "bfloat16"),
    (1 << 16, "float32"),
)
BACKENDS = {
    torch.bfloat16: (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION),
    torch.float32: (SDPBackend.EFFICIENT_ATTENTION,),
}
CONTRACTIONS = ("sphere", "layer_norm", "zca")
OBSERVED = ("log_pair_energy", "self_weight", "entropy")
Call = Callable[[], object]


def seconds(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Return the median time of each call by the GPU's clock; every round runs each call once."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
        marks[0].record()
        for call, mark in zip(calls.values(), marks[1:], strict=True):
            call()
            mark.record()
        torch.cuda.synchronize()
        for name, (a, b) in zip(calls, itertools.pairwise(marks), strict=True):
            times[name].append(a.elapsed_time(b) / 1e3)
    return {name: statistics.median(t) for name, t in times.items()}


def plain_attention(y: torch.Tensor) -> dict[str, Call]:
    """Return a call for each of torch's kernels that supports this cloud."""

    def by(backend: SDPBackend) -> Call:
        def call() -> object:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(y, y, y)

        return call

    return {backend.name.lower(): by(backend) for backend in BACKENDS[y.dtype]}


def memory_of(call: Call) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated() - before


def row(n: int, precision: str) -> dict[str, object]:
    x = torch.randn(n, D, device="cuda")
    dtype = getattr(torch, precision)
    ascent = Ascent(tau=0.5, beta=D**-0.5, precision=dtype if dtype is not torch.float32 else None)
    steps = 8 if n <= 1 << 16 else 2

    def step(contraction: str, **options: object) -> Call:
        return lambda: evolve(x, ascent, contraction=contraction, steps=steps, **options)

    plain = plain_attention(x[None, None].to(dtype))
    times = {**plain, **{name: step(name) for name in CONTRACTIONS}}
    times["sphere, observed"] = step("sphere", observe=OBSERVED, every=steps)
    memory = {name: memory_of(call) for name, call in times.items()}  # this also warms up
    fastest = min(plain, key=lambda name, t=seconds(plain, 1): t[name])
    measured = seconds({**times, "plain again": plain[fastest]}, 3 if n > 1 << 16 else 15)
    for name in CONTRACTIONS:
        measured[name] /= steps
    measured["sphere, observed"] /= steps + 1  # and one recording at the end
    asked = (*CONTRACTIONS, "sphere, observed", "plain again")
    return {
        "tokens": n,
        "dimension": D,
        "precision": precision,
        "plain": fastest,
        "ms": {name: round(1e3 * t, 3) for name, t in measured.items()},
        "rate": {name: round(4 * n**2 * D / t / 1e12, 1) for name, t in measured.items()},
        "ratios": {name: round(measured[name] / measured[fastest], 3) for name in asked},
        "bytes": {name: round(memory[name] / n) for name in times},
    }


def main(folder: Path) -> None:
    torch.manual_seed(0)
    rows = []
    for n, precision in CLOUDS:
        rows.append(row(n, precision))
        print(rows[-1], flush=True)
    table = {
        "benchmark": "dynamics_gpu",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rows": rows,
    }
    (folder / "dynamics_gpu.json").write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results")
