"""A million targets, and one series of a million steps, on a GPU: switching filters, state 4, observation 2.

python3 benchmarks/filters_gpu.py [section ...] [--out FOLDER]     on a machine with a GPU; writes filters_gpu.json

The sections are few, rows, gradients and "in time", all if none is named; the others stay in the file as they are. Rows
are printed and written as they are measured.

"torch" is the filter step by step, "fused" the kernel that computes all steps in one launch
(../src/gradlogz/kernels/filters/gpu.py). "last step" returns the last step only, "all fields" every field of every
step, "means and modes" the mean and the mode probabilities of every step. "one step" is `SwitchingFilter.step`, one
call per observation, and "gradients" the log likelihood of the series with its gradient with respect to the model and
the observations; the torch path gets fewer steps. "bytes" is the peak memory per target, "A/A" the ratio of the fused
filter to itself. "few" is the time of 100 steps of few targets in milliseconds, by both paths. "in time" is one series
of a million steps by `filter_in_blocks`: means, covariances and mode probabilities, in milliseconds, with the largest
difference of the means of its first 20,000 steps from those of the sequential filter, in their standard deviations.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from gradlogz import Prior, SwitchingFilter, SwitchingModel
from gradlogz.filters import constant_velocity, coordinated_turn, filter_in_blocks
from gradlogz.kernels.filters import dispatch

Row = dict[str, Any]
TARGETS, STEPS, ROUNDS = 1 << 20, 3, 5
FUSED_STEPS = {"all fields": 10, "means and modes": 30, "last step": 30}
ASKED = {
    "all fields": {},
    "means and modes": {"fields": ("mean", "log_mode_probability")},
    "last step": {"keep": "last"},
}
FIELDS = ("transition", "F", "Q", "H", "R")
LONG, CHECKED = 1_000_000, 20_000  # steps of one series, and those that are compared with the sequential filter
BLOCKS = ((1024, 256), (512, 128), (256, 128), (128, 128))  # steps of a block and before it


def assembled(dtype: torch.dtype, modes: int = 3) -> SwitchingModel:
    """Return a model with one constant-velocity mode and coordinated turns to both sides."""
    noise = {"dt": 1.0, "spectral_density": 0.05, "observation_variance": 0.5, "dtype": dtype}
    turns = [sign * 0.2 * (n + 1) for n in range(modes // 2) for sign in (1, -1)][: modes - 1]
    parts = [constant_velocity(2, **noise), *(coordinated_turn(2, rate=rate, **noise) for rate in turns)]
    transition = torch.full((modes, modes), 0.1 / (modes - 1), dtype=dtype).fill_diagonal_(0.9)
    model = SwitchingModel.of(parts, transition=transition)
    return SwitchingModel(**{name: getattr(model, name).cuda() for name in FIELDS}, validate=False)


def beginning(like: torch.Tensor) -> dict[str, torch.Tensor]:
    return Prior(torch.zeros(4).to(like), torch.eye(4).to(like))


def measured(call: Callable[[], object], targets: int, steps: int, rounds: int = ROUNDS) -> dict[str, float]:
    """Return target-steps per second (median over rounds) and bytes per target."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    rate = targets * steps / statistics.median(seconds)
    memory = round(torch.cuda.max_memory_allocated() / targets)
    return {"targets": targets, "steps": steps, "rate": round(rate), "bytes": memory}


def fused(call: Callable[[], object], *sizes: int) -> Row:
    """Return `measured` of the compiled path, with its ratio to itself."""
    first, second = (measured(call, *sizes) for _ in range(2))
    torch.cuda.empty_cache()
    return {"path": "fused", **first, "A/A": round(second["rate"] / first["rate"], 3)}


def by_torch(call: Callable[[], object], *sizes: int) -> Row:
    """Return `measured` of the step-by-step path."""
    before, dispatch.WORTH_FILTERING_THERE = dispatch.WORTH_FILTERING_THERE, math.inf
    try:
        return {"path": "torch", **measured(call, *sizes, rounds=3)}
    finally:
        dispatch.WORTH_FILTERING_THERE = before
        torch.cuda.empty_cache()


def compared(dtype: torch.dtype, method: str, modes: int) -> Iterator[Row]:
    """Yield rows for both paths of one filter; with many modes torch filters fewer targets, to fit into memory."""
    chosen = SwitchingFilter(assembled(dtype, modes), "imm" if method == "imm" else "gpb")
    y = torch.randn(TARGETS, max(FUSED_STEPS.values()), 2, dtype=dtype, device="cuda").cumsum(1)
    start, few = beginning(y), TARGETS if modes <= 3 else TARGETS >> 3
    for asked, more in ASKED.items():
        z, short = y[:, : FUSED_STEPS[asked]].contiguous(), y[:few, :STEPS].contiguous()
        row = {"dtype": str(dtype).removeprefix("torch."), "filter": method, "modes": modes, "asked": asked}
        yield row | fused(lambda z=z, m=more: chosen.filter(z, start, **m), *z.shape[:2])
        if "fields" not in more:  # the torch path always computes all fields
            yield row | by_torch(lambda z=short, m=more: chosen.filter(z, start, **m), *short.shape[:2])


def others(dtype: torch.dtype) -> Iterator[Row]:
    """Yield rows for gradients and for single steps."""
    model = assembled(dtype)
    chosen, steps = SwitchingFilter(model), max(FUSED_STEPS.values())
    y = torch.randn(TARGETS, steps, 2, dtype=dtype, device="cuda").cumsum(1)
    start = beginning(y)

    def gradients(y: torch.Tensor) -> object:
        leaves = [t.detach().requires_grad_() for t in (y, *(getattr(model, name) for name in FIELDS))]
        learned = SwitchingFilter(SwitchingModel(*leaves[1:], validate=False))
        total = learned.filter(leaves[0], start, keep="last", fields=()).log_likelihood.sum()
        return torch.autograd.grad(total, leaves)

    def step() -> object:
        return chosen.step(state, y[:, 0])

    state = chosen.init(start, batch_shape=(TARGETS,))
    row = {"dtype": str(dtype).removeprefix("torch."), "filter": "imm", "modes": 3}
    yield row | {"asked": "gradients"} | fused(lambda: gradients(y), TARGETS, steps)
    short = y[:, :STEPS].contiguous()
    yield row | {"asked": "gradients"} | by_torch(lambda: gradients(short), TARGETS, STEPS)
    yield row | {"asked": "one step"} | fused(step, TARGETS, 1)
    yield row | {"asked": "one step"} | by_torch(step, TARGETS, 1)


def few() -> Iterator[Row]:
    """Yield milliseconds of 100 steps of few targets, by both paths."""
    chosen = SwitchingFilter(assembled(torch.float64))
    y = torch.randn(4096, 100, 2, dtype=torch.float64, device="cuda").cumsum(1)
    worth = dispatch.WORTH_FILTERING_THERE
    for targets in (1, 64, 4096):
        row: Row = {"targets": targets}
        for path, bound in (("fused", 1), ("torch", math.inf)):
            dispatch.WORTH_FILTERING_THERE = bound
            z = y[:targets]
            rate = measured(lambda z=z: chosen.filter(z, beginning(z)), targets, 100, 3)["rate"]
            row[path] = round(1e3 * targets * 100 / rate, 3)
        yield row
    dispatch.WORTH_FILTERING_THERE = worth


def rows() -> Iterator[Row]:
    for dtype in (torch.float64, torch.float32):
        for method in ("imm", "gpb2"):
            for modes in (3, 8):
                yield from compared(dtype, method, modes)


def gradients() -> Iterator[Row]:
    yield from others(torch.float32)
    yield from others(torch.float64)


def in_time() -> Iterator[Row]:
    """Yield milliseconds of one long series in blocks of several sizes."""
    g = torch.Generator().manual_seed(0)
    walk, noise = (torch.randn(LONG, 2, dtype=torch.float64, generator=g) for _ in range(2))
    y = (walk.cumsum(0) + noise).cuda()
    model, start = assembled(torch.float64), beginning(y)
    for method in ("imm", "gpb2"):
        chosen = SwitchingFilter(model, "imm" if method == "imm" else "gpb")
        sequential = chosen.filter(y[:CHECKED], start, fields=("mean", "covariance"))
        deviation = sequential.covariance.diagonal(dim1=-2, dim2=-1).sqrt()
        for block, overlap in BLOCKS:
            run = partial(filter_in_blocks, model, y, start, method=method, block=block, overlap=overlap)
            blocked = run()
            error = ((blocked.filtered.mean[:CHECKED] - sequential.mean).abs() / deviation).max()
            rates = [measured(run, 1, LONG)["rate"] for _ in range(2)]
            row: Row = {"filter": method, "modes": 3, "block": block, "overlap": overlap, "repairs": blocked.repairs}
            row |= {"milliseconds": round(1e3 * LONG / rates[0], 2), "A/A": round(rates[1] / rates[0], 3)}
            yield row | {"difference": float(error), "discrepancy": float(blocked.discrepancy.max())}


SECTIONS = {"few": few, "rows": rows, "gradients": gradients, "in time": in_time}


def main(names: list[str], folder: Path) -> None:
    path = folder / "filters_gpu.json"
    table: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"benchmark": "filters_gpu"}
    table |= {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    for name in names or SECTIONS:
        begin = time.perf_counter()
        table[name] = []
        for row in SECTIONS[name]():
            table[name].append(row)
            print(row, flush=True)
            path.write_text(json.dumps(table, indent=2) + "\n")
        print(f"{name}: {time.perf_counter() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Time the switching filters on a GPU.")
    parser.add_argument("sections", nargs="*", choices=[[], *SECTIONS], help="sections to measure, all if none")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the JSON file")
    options = parser.parse_args()
    main(options.sections, options.out)
