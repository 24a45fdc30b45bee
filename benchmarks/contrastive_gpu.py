"""Contrastive losses and a language-model head on a GPU in bfloat16, forward and backward, within a time limit.

PYTHONPATH=src python3 benchmarks/contrastive_gpu.py [folder] [--limit seconds]    contrastive_gpu.json after every row
PYTHONPATH=src python3 benchmarks/contrastive_gpu.py --compile                     compiles what is measured, in advance

"compiled" is the loss of one matrix of logits with torch.compile; from 32768 pairs its products are outside of the
graph. "chunked" computes 8192 rows at a time, compiled, and recomputes them in the backward pass. "row blocks" computes
loss and gradient of 1024 rows at a time in the forward pass, the arithmetic of Liger's fused linear cross-entropy in
plain torch. Other libraries are measured where they are installed (contrastive_libraries.py). Vectors are float32 and
rounded to bfloat16 before products; gradients are float32. Supervised losses compare vectors with each other, the
others two batches. An alternative that does not fit into memory has no entry. Without a GPU everything runs on small
problems, which shows only that it runs.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy, logsigmoid, normalize
from torch.utils.checkpoint import checkpoint

import contrastive_libraries
import gradlogz as gz
from contrastive_libraries import DEVICE
from gradlogz.contrastive import linear_cross_entropy
from gradlogz.kernels.losses import tiled_rows

START = time.perf_counter()
T, OFFSET, HALF = 0.1, -10.0, torch.bfloat16
SMALL = DEVICE == "cpu"
SIZES = (64, 512, 256) if SMALL else (8192, 65_536, 32_768)  # the most important first
DIMENSIONS = (128, 768, 512)
ROUNDS = dict(zip(SIZES, (15, 2, 3), strict=True))
WHOLE_GRAPH = SIZES[0]
CHUNK, BLOCK = (64, 64) if SMALL else (8192, 1024)  # rows
CLASS = 8  # vectors of a class
EXACT = (64 if SMALL else 4096, 0.01)  # pairs and temperature of the comparison with float64
HEAD = (64, 32, 1000) if SMALL else (8192, 2048, 128_256)  # tokens, dimension, words
QUEUE = 30_000_000  # cycles for which the GPU waits before a round of short calls, 15 ms
COMPILERS, SECONDS_TO_COMPILE = 8, 60
TILINGS = {
    "128 x 128, 4 warps": tiled_rows.Tiling(128, 128, 64, 4, 3),
    "64 x 128, 168 registers": tiled_rows.Tiling(64, 128, 64, 4, 3, 168),
    "64 x 128 x 128, 168 registers": tiled_rows.Tiling(64, 128, 128, 4, 1, 168),
    "128 x 128, 128 registers": tiled_rows.Tiling(128, 128, 64, 8, 3, 128),
}
BEST: dict[tuple[str, int, int], str] = {}  # the fastest tiling, where it is not that of the library
Tensor = torch.Tensor
Loss = Callable[..., Tensor]
Call = Callable[[], object]


# Losses of a block of products [rows, n], whose first row is `first` --------------------------------------------------


def info_nce(s: Tensor, first: int = 0, temperature: float = T) -> Tensor:
    targets = torch.arange(len(s), device=s.device) + first
    return cross_entropy(s.float() / temperature, targets, reduction="sum") / s.shape[1]


def clip_loss(s: Tensor, first: int = 0, temperature: float = T) -> Tensor:
    return (info_nce(s, first, temperature) + info_nce(s.mT, first, temperature)) / 2


def siglip(s: Tensor, first: int = 0, temperature: float = T) -> Tensor:
    row, column = (torch.arange(count, device=s.device) for count in s.shape)
    sign = torch.where((row + first).unsqueeze(-1) == column, 1.0, -1.0)
    return -logsigmoid(sign * (s.float() / temperature + OFFSET)).sum() / s.shape[1]


def supervised(s: Tensor, first: int = 0, temperature: float = T) -> Tensor:
    row, column = (torch.arange(count, device=s.device) for count in s.shape)
    itself = (row + first).unsqueeze(-1) == column
    positive = ((row + first).unsqueeze(-1) // CLASS == column // CLASS) & ~itself
    log_p = (s.float() / temperature).masked_fill(itself, -torch.inf).log_softmax(-1)
    return -log_p.masked_fill(~positive, 0.0).sum() / (CLASS - 1) / s.shape[1]


DENSE: dict[str, Loss] = {
    "info_nce": info_nce,
    "clip_loss": clip_loss,
    "siglip": siglip,
    "supervised_contrastive": supervised,
}


def gradlogz_loss(
    name: str, a: Tensor, b: Tensor, temperature: float = T, precision: torch.dtype | None = HALF
) -> Tensor:
    if name == "siglip":
        return gz.siglip(a, b, offset=OFFSET, temperature=temperature, precision=precision)
    if name == "supervised_contrastive":
        classes = torch.arange(len(a), device=a.device) // CLASS
        return gz.supervised_contrastive(a, classes, temperature=temperature, precision=precision)
    return getattr(gz, name)(a, b, temperature=temperature, precision=precision)


# Alternatives ---------------------------------------------------------------------------------------------------------


def dense(loss: Loss) -> Loss:
    """The loss of two batches of vectors by one matrix of products."""
    return lambda a, b, **options: loss(a.to(HALF) @ b.to(HALF).mT, **options)


def compiled(name: str, n: int) -> Loss:
    if n <= WHOLE_GRAPH:
        return torch.compile(dense(DENSE[name]), dynamic=False)
    return dense(torch.compile(DENSE[name], dynamic=False))


def chunked(name: str) -> Loss:
    part = torch.compile(lambda a, b, first: DENSE[name](a @ b.mT, first), dynamic=False)

    def loss(a: Tensor, b: Tensor) -> Tensor:
        a, b = a.to(HALF), b.to(HALF)
        parts = [
            checkpoint(part, a[i : i + CHUNK], b, torch.tensor(i, device=a.device), use_reentrant=False)
            for i in range(0, len(a), CHUNK)
        ]
        return torch.stack(parts).sum()

    return loss


@torch.compile(dynamic=False)
def loss_and_slope(s: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """InfoNCE of some rows, and its derivative in their products."""
    row, column = (torch.arange(count, device=s.device) for count in s.shape)
    here = (row + first).unsqueeze(-1) == column
    log_p = (s.float() / T).log_softmax(-1)
    loss = -log_p.masked_fill(~here, 0.0).sum() / s.shape[1]
    return loss, ((log_p.exp() - here.float()) / (T * s.shape[1])).to(s.dtype)


def by_row_blocks(a: Tensor, b: Tensor) -> Tensor:
    """Loss and gradients of InfoNCE, block by block."""
    x, y = a.detach().to(HALF), b.detach().to(HALF)
    total, dx, dy = torch.zeros((), device=a.device), torch.empty_like(x), torch.zeros_like(b)
    for i in range(0, len(x), BLOCK):
        rows = slice(i, i + BLOCK)
        part, slope = loss_and_slope(x[rows] @ y.mT, torch.tensor(i, device=a.device))
        total += part
        torch.mm(slope, y, out=dx[rows])
        dy += slope.mT @ x[rows]
    dx.float()
    return total


def vectors(n: int, d: int, name: str = "") -> tuple[Tensor, Tensor]:
    g = torch.Generator(device=DEVICE).manual_seed(0)
    a, b = (normalize(torch.randn(n, d, generator=g, device=DEVICE), dim=-1).requires_grad_() for _ in range(2))
    return (a, a) if name == "supervised_contrastive" else (a, b)


def both_ways(loss: Loss, a: Tensor, b: Tensor) -> Call:
    inputs = (a,) if a is b else (a, b)
    return lambda: torch.autograd.grad(loss(a, b), inputs)


def alternatives(name: str, n: int, d: int) -> dict[str, Call]:
    a, b = vectors(n, d, name)
    calls = {"gradlogz": both_ways(lambda x, y: gradlogz_loss(name, x, y), a, b)}
    calls["compiled"] = both_ways(compiled(name, n), a, b)
    if n > WHOLE_GRAPH and name != "clip_loss":  # a function of whole columns
        calls["chunked"] = both_ways(chunked(name), a, b)
    if name == "info_nce" and n > WHOLE_GRAPH:
        calls["row blocks"] = lambda: by_row_blocks(a, b)
    if (name, n, d) in BEST:
        label = BEST[name, n, d]
        calls[f"gradlogz, {label}"] = tiling_call(name, a, b, TILINGS[label])
    libraries = contrastive_libraries.losses(name, n, d, T, OFFSET)
    return calls | {label: both_ways(loss, a, b) for label, loss in libraries.items()}


# Measurements ---------------------------------------------------------------------------------------------------------


class HostMark:
    """A moment by the clock of the host, with the methods of an event of a GPU."""

    def record(self) -> None:
        self.time = time.perf_counter()

    def elapsed_time(self, end: "HostMark") -> float:
        return 1e3 * (end.time - self.time)


def milliseconds(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Return the median time of each call by the GPU's clock; every round runs each call once, the first one twice."""
    if not calls:
        return {}
    first = next(iter(calls))
    calls = {**calls, f"{first} again": calls[first]}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        marks = [HostMark() if SMALL else torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
        if rounds > 3 and not SMALL:
            torch.cuda._sleep(QUEUE)  # the host issues short calls more slowly than the GPU computes them
        marks[0].record()
        for call, mark in zip(calls.values(), marks[1:], strict=True):
            call()
            mark.record()
        synchronize()
        for name, (begin, end) in zip(calls, itertools.pairwise(marks), strict=True):
            times[name].append(begin.elapsed_time(end))
    return {name: round(statistics.median(t), 3) for name, t in times.items()}


def synchronize() -> None:
    if not SMALL:
        torch.cuda.synchronize()


def mebibytes(call: Call) -> float:
    if SMALL:
        call()
        return 0.0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def host_milliseconds(call: Call) -> float:
    """Return the time in which a call is issued, while the GPU has nothing else to do."""
    times = []
    for _ in range(5):
        synchronize()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return round(1e3 * statistics.median(times), 3)


def measured(calls: dict[str, Call], rounds: int) -> dict[str, object]:
    memory, failed = {}, {}
    for name, call in list(calls.items()):
        try:
            call()  # compiles
            memory[name] = mebibytes(call)
        except Exception as error:  # the alternative does not fit into memory, or does not compile
            failed[name] = f"{type(error).__name__}: {error}"[:300]
            del calls[name]
            torch.cuda.empty_cache()
    ms = milliseconds(calls, rounds)
    host = {name: host_milliseconds(call) for name, call in calls.items()} if rounds > 3 else {}
    return {"ms": ms, "host ms": host, "MiB": memory, "failed": failed}


def row(name: str, n: int, d: int) -> dict[str, object]:
    result = measured(alternatives(name, n, d), ROUNDS[n])
    torch.cuda.empty_cache()
    return {"loss": name, "vectors": n, "dimension": d, **result}


@contextmanager
def tiling_of_all(tiling: tiled_rows.Tiling) -> Iterator[None]:
    """Use another tiling for all losses."""
    before = dict(tiled_rows.TILINGS)
    tiled_rows.TILINGS.update(dict.fromkeys(before, tiling))
    try:
        yield
    finally:
        tiled_rows.TILINGS.update(before)


def tiling_call(name: str, a: Tensor, b: Tensor, tiling: tiled_rows.Tiling) -> Call:
    plain = both_ways(lambda x, y: gradlogz_loss(name, x, y), a, b)

    def call() -> object:
        with tiling_of_all(tiling):
            return plain()

    return call


def tiling_row(name: str, n: int, d: int) -> dict[str, object]:
    a, b = vectors(n, d, name)
    calls = {"chosen": both_ways(lambda x, y: gradlogz_loss(name, x, y), a, b)}
    calls |= {label: tiling_call(name, a, b, tiling) for label, tiling in TILINGS.items()}
    result = measured(calls, ROUNDS[n])  # without the calls that fail
    exact: Any = calls["chosen"]()
    differences = {}
    for label, call in calls.items():
        pairs: Any = zip(call(), exact, strict=True)
        differences[label] = max(float((x - y).norm() / y.norm()) for x, y in pairs)
    times: Any = result["ms"]
    best = min((label for label in calls if differences[label] < 0.01), key=times.__getitem__)
    if times[best] < 0.97 * times["chosen"]:
        BEST[name, n, d] = best
    del exact
    torch.cuda.empty_cache()
    return {"tilings of": name, "vectors": n, "dimension": d, **result, "differences from chosen": differences}


def exactness(name: str, d: int) -> dict[str, object]:
    """Return relative errors of loss and gradients at a low temperature, with positives near the closest negatives."""
    n, temperature = EXACT
    a, noise = vectors(n, d)
    b = normalize(a.detach() + 2.5 * noise.detach(), dim=-1).requires_grad_()
    if name == "supervised_contrastive":
        b = a
    exact = [t.detach().double().requires_grad_() for t in ((a,) if a is b else (a, b))]
    loss = DENSE[name](exact[0] @ exact[-1].mT, 0, temperature)
    expected = [loss.detach(), *torch.autograd.grad(loss, exact)]

    def errors(function: Loss) -> list[float]:
        value = function(a, b)
        results = [value.detach(), *torch.autograd.grad(value, (a,) if a is b else (a, b))]
        return [float(f"{float((f - e).norm() / e.norm()):.2g}") for f, e in zip(results, expected, strict=True)]

    functions: dict[str, Loss] = {
        "gradlogz, bfloat16": lambda x, y: gradlogz_loss(name, x, y, temperature),
        "gradlogz, float32": lambda x, y: gradlogz_loss(name, x, y, temperature, None),
        "dense, bfloat16": lambda x, y: dense(DENSE[name])(x, y, temperature=temperature),
        "dense, float32": lambda x, y: DENSE[name](x @ y.mT, 0, temperature),
    }
    functions |= contrastive_libraries.losses(name, n, d, temperature, OFFSET)
    result = {}
    for label, function in functions.items():
        try:
            result[label] = errors(function)
        except Exception as error:  # of another library
            print(f"{name} by {label}: {type(error).__name__}: {error}"[:300], file=sys.stderr, flush=True)
    return {"exactness of": name, "vectors": n, "dimension": d, "temperature": temperature, "errors": result}


def head_row() -> dict[str, object]:
    tokens, d, words = HEAD
    hidden = torch.randn(tokens, d, device=DEVICE).to(HALF).requires_grad_()
    weight = (torch.randn(words, d, device=DEVICE) / d**0.5).to(HALF).requires_grad_()
    labels = torch.randint(words, (tokens,), device=DEVICE)
    dense_head = torch.compile(lambda h, w: cross_entropy((h @ w.mT).float(), labels), dynamic=False)
    calls = {
        "gradlogz": both_ways(lambda h, w: linear_cross_entropy(h, w, labels, precision=HALF).loss, hidden, weight),
        "compiled": both_ways(dense_head, hidden, weight),
    }
    for label, function in contrastive_libraries.cross_entropies().items():
        calls[label] = both_ways(lambda h, w, f=function: f(h, w, labels), hidden, weight)
    return {"head": list(HEAD), **measured(calls, 3)}


def kernel_times(name: str, n: int, d: int) -> dict[str, object]:
    """Return the milliseconds of every kernel of a call."""
    call = both_ways(lambda x, y: gradlogz_loss(name, x, y), *vectors(n, d, name))
    call()
    activity = torch.profiler.ProfilerActivity.CPU if SMALL else torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]) as profile:
        call()
        synchronize()
    times = {e.key[:60]: round(e.device_time_total / 1e3, 3) for e in profile.key_averages()}
    return {"kernels of": name, "vectors": n, "dimension": d, "ms": {k: t for k, t in times.items() if t >= 0.002}}


# Order of the measurements, and their compilation in advance ----------------------------------------------------------


def measurements() -> Iterator[Call]:
    """All measurements, the most important ones first."""
    small, large, middle = SIZES
    names = ("siglip", "info_nce", "clip_loss", "supervised_contrastive")
    for function in (tiling_row, row):
        yield from (partial(function, name, small, 128) for name in names)
    for function in (tiling_row, row, kernel_times):
        yield from (partial(function, name, large, 768) for name in names[:2])
    for function in (tiling_row, row):
        yield from (partial(function, name, middle, 512) for name in names)
    yield head_row
    yield from (partial(kernel_times, name, small, 128) for name in names)
    yield from (partial(row, name, large, 768) for name in names[2:])
    yield from (partial(exactness, name, 128) for name in names)
    for d in (768, 512):
        for function in (tiling_row, row):
            yield from (partial(function, name, small, d) for name in names)
    yield from (partial(tiling_row, name, large, 128) for name in names)
    sizes = [(n, d) for n in (large, middle) for d in DIMENSIONS if (n, d) not in ((large, 768), (middle, 512))]
    yield from (partial(row, name, n, d) for n, d in sizes for name in names)


def pieces() -> Iterator[Call]:
    """Calls that compile all that is measured; the largest, of which few fit into memory together, come first."""
    for n, name in itertools.product(SIZES[1:], DENSE):
        yield lambda n=n, name=name: alternatives(name, n, 128)["compiled"]()
        if name != "clip_loss":
            yield lambda n=n, name=name: alternatives(name, n, 128)["chunked"]()
    for name in DENSE:
        for d in (64, 512):
            yield lambda name=name, d=d: gradlogz_loss(name, *vectors(512, d, name))
            for tiling in TILINGS.values():
                yield lambda name=name, d=d, tiling=tiling: tiling_call(name, *vectors(512, d, name), tiling)()
        for d in DIMENSIONS:
            yield lambda name=name, d=d: alternatives(name, SIZES[0], d)["compiled"]()
    for n in SIZES[1:]:
        yield lambda n=n: by_row_blocks(*vectors(n, 128))


def compile_part(number: int) -> None:
    """Compile every COMPILERS-th piece."""
    for piece in itertools.islice(pieces(), number, None, COMPILERS):
        try:
            piece()
        except Exception as error:  # compiled later, by the process that measures
            print(f"not compiled in advance: {type(error).__name__}: {error}"[:300], file=sys.stderr)
        torch.cuda.empty_cache()


def compile_all() -> None:
    """Compile all that is measured in other processes, into the caches of Triton and of torch."""
    call = [sys.executable, __file__, "--compile-part"]
    processes = [subprocess.Popen([*call, str(i)]) for i in range(COMPILERS)]
    for process in processes:
        try:
            process.wait(max(0.1, SECONDS_TO_COMPILE - (time.perf_counter() - START)))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main(folder: Path, limit: float) -> None:
    table = {
        "benchmark": "contrastive_gpu",
        "torch": torch.__version__,
        "device": "none" if SMALL else torch.cuda.get_device_name(),
    }
    rows: list[object] = []
    for measurement in measurements():
        begin = time.perf_counter() - START
        if begin > limit:
            break
        try:
            rows.append(measurement())
        except Exception as error:  # a measurement that fails must not cost the others
            rows.append({"failed": f"{type(error).__name__}: {error}"[:500]})
        print(f"{begin:.0f} s", json.dumps(rows[-1]), flush=True)
        (folder / "contrastive_gpu.json").write_text(json.dumps({**table, "rows": rows}, indent=2) + "\n")
    print(f"{time.perf_counter() - START:.1f} s", flush=True)
    os._exit(0)  # compiler processes of torch would be waited for


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parent / "results")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which no measurement begins")
    parser.add_argument("--compile", action="store_true", help="compile all that is measured, and end")
    parser.add_argument("--without", nargs="*", default=(), help="modules of libraries that are not measured")
    parser.add_argument("--compile-part", type=int, help="compile every n-th piece from this one on")
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64
    contrastive_libraries.LEFT_OUT.update(options.without)
    if options.compile_part is not None:
        compile_part(options.compile_part)
    elif options.compile:
        compile_all()
    else:
        main(options.folder, options.limit)
