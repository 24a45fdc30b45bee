"""Contrastive losses and a language-model head on a GPU in bfloat16, forward and backward, within a time limit.

PYTHONPATH=src python3 benchmarks/contrastive_gpu.py [folder] [seconds]     writes contrastive_gpu.json after every row

"compiled" is the loss of one matrix of logits with torch.compile; from 32768 pairs its products are outside of the
graph. "chunked" computes 8192 rows at a time, compiled, and recomputes them in the backward pass. "row blocks" computes
loss and gradient of 1024 rows at a time in the forward pass, the arithmetic of Liger's fused linear cross-entropy in
plain torch. "attention" is InfoNCE by the kernel of attention. Vectors are float32 and rounded to bfloat16 before
products; gradients are float32. Supervised losses compare vectors with each other, the others two batches. An
alternative that does not fit into memory has no entry.

Before anything is measured, other processes compile what is needed into the caches of Triton and of torch.
"""

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

import torch
from torch.nn.functional import cross_entropy, logsigmoid, normalize
from torch.utils.checkpoint import checkpoint

import gradlogz as gz
from gradlogz.contrastive import linear_cross_entropy
from gradlogz.kernels.losses import tiled_rows

START = time.perf_counter()
T, OFFSET, HALF = 0.1, -10.0, torch.bfloat16
SIZES, DIMENSIONS = (8192, 65_536, 32_768), (128, 768, 512)  # the most important first
ROUNDS = {8192: 15, 32_768: 3, 65_536: 2}
WHOLE_GRAPH = 8192
CHUNK, BLOCK = 8192, 1024  # rows
CLASS = 8  # vectors of a class
EXACT = (4096, 0.01)  # pairs and temperature of the comparison with float64
HEAD = (8192, 2048, 128_256)  # tokens, dimension, words
COMPILERS, SECONDS_TO_COMPILE = 12, 40
TILINGS = {
    "128 x 128, 8 warps": tiled_rows.Tiling(128, 128, 64, 8, 3),
    "128 x 256, 8 warps": tiled_rows.Tiling(128, 256, 64, 8, 3),
}
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


def by_attention(a: Tensor, b: Tensor) -> Tensor:
    return -gz.Likelihood(a, b, temperature=T, precision=HALF).log_probability().mean()


def vectors(n: int, d: int, name: str = "") -> tuple[Tensor, Tensor]:
    g = torch.Generator(device="cuda").manual_seed(0)
    a, b = (normalize(torch.randn(n, d, generator=g, device="cuda"), dim=-1).requires_grad_() for _ in range(2))
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
    if name == "info_nce":
        if n > WHOLE_GRAPH:
            calls["row blocks"] = lambda: by_row_blocks(a, b)
        if d <= 256:
            calls["attention"] = both_ways(by_attention, a, b)
    return calls


# Measurements ---------------------------------------------------------------------------------------------------------


def milliseconds(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Return the median time of each call by the GPU's clock; every round runs each call once, the first one twice."""
    if not calls:
        return {}
    first = next(iter(calls))
    calls = {**calls, f"{first} again": calls[first]}
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


def host_milliseconds(call: Call) -> float:
    """Return the time in which a call is issued, while the GPU has nothing else to do."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
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
def settings(tiling: "tiled_rows.Tiling | None", stored_from: int) -> Iterator[None]:
    """Use another tiling for logits that are not stored, and another number of dimensions from which they are."""
    before = dict(tiled_rows.TILINGS), tiled_rows.STORED_FROM
    if tiling is not None:
        tiled_rows.TILINGS.update(dict.fromkeys((k for k in tiled_rows.TILINGS if k != "stored"), tiling))
    tiled_rows.STORED_FROM = stored_from
    try:
        yield
    finally:
        tiled_rows.TILINGS.update(before[0])
        tiled_rows.STORED_FROM = before[1]


def tiling_calls(name: str, a: Tensor, b: Tensor) -> dict[str, Call]:
    """The loss with the settings of the library and with others."""
    choices = {"chosen": (None, tiled_rows.STORED_FROM), "stored": (None, 1), "not stored": (None, 1 << 30)}
    choices |= {label: (tiling, 1 << 30) for label, tiling in TILINGS.items()}
    plain = both_ways(lambda x, y: gradlogz_loss(name, x, y), a, b)

    def with_settings(choice: "tuple[tiled_rows.Tiling | None, int]") -> Call:
        def call() -> object:
            with settings(*choice):
                return plain()

        return call

    return {label: with_settings(choice) for label, choice in choices.items()}


def tiling_row(name: str, n: int, d: int) -> dict[str, object]:
    result = measured(tiling_calls(name, *vectors(n, d, name)), ROUNDS[n])
    torch.cuda.empty_cache()
    return {"tilings of": name, "vectors": n, "dimension": d, **result}


def exactness(name: str, d: int) -> dict[str, object]:
    """Return relative errors of loss and gradients at a low temperature, where the positives are near their anchors."""
    n, temperature = EXACT
    a, noise = vectors(n, d)
    b = normalize(a.detach() + 0.7 * noise.detach(), dim=-1).requires_grad_()
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
    result = {label: errors(function) for label, function in functions.items()}
    return {"exactness of": name, "vectors": n, "dimension": d, "temperature": temperature, "errors": result}


def head_row() -> dict[str, object]:
    tokens, d, words = HEAD
    hidden = torch.randn(tokens, d, device="cuda").to(HALF).requires_grad_()
    weight = (torch.randn(words, d, device="cuda") / d**0.5).to(HALF).requires_grad_()
    labels = torch.randint(words, (tokens,), device="cuda")
    dense_head = torch.compile(lambda h, w: cross_entropy((h @ w.mT).float(), labels), dynamic=False)
    calls = {
        "gradlogz": both_ways(lambda h, w: linear_cross_entropy(h, w, labels, precision=HALF).loss, hidden, weight),
        "compiled": both_ways(dense_head, hidden, weight),
    }
    return {"head": list(HEAD), **measured(calls, 3)}


def kernel_times(name: str, n: int, d: int) -> dict[str, object]:
    """Return the milliseconds of every kernel of a call."""
    call = both_ways(lambda x, y: gradlogz_loss(name, x, y), *vectors(n, d, name))
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    times = {e.key[:60]: round(e.device_time_total / 1e3, 3) for e in profile.key_averages()}
    return {"kernels of": name, "vectors": n, "dimension": d, "ms": {k: t for k, t in times.items() if t >= 0.002}}


# Order of the measurements, and their compilation beforehand ----------------------------------------------------------


def measurements() -> Iterator[Call]:
    """All measurements, the most important ones first."""
    first, large, last = SIZES

    def rows_of(n: int) -> Iterator[Call]:
        yield from (partial(row, name, n, d) for d in DIMENSIONS for name in DENSE)

    yield from rows_of(first)
    yield from (partial(exactness, name, d) for d in DIMENSIONS[:2] for name in DENSE)
    yield from rows_of(large)
    sizes = (large, 128), (large, 768), (first, 128)
    yield from (partial(tiling_row, name, *size) for size in sizes for name in DENSE)
    yield from (partial(kernel_times, name, *size) for size in sizes[1:] for name in ("info_nce", "siglip"))
    yield head_row
    yield from rows_of(last)


def pieces() -> Iterator[Call]:
    """Calls that compile all that is measured; the largest, of which few fit into memory together, come first."""
    for n, name in itertools.product(SIZES[1:], DENSE):
        yield lambda n=n, name=name: alternatives(name, n, 128)["compiled"]()
        if name != "clip_loss":
            yield lambda n=n, name=name: alternatives(name, n, 128)["chunked"]()
    for name in DENSE:
        for d in (64, 512):
            for label in tiling_calls(name, *(torch.empty(0),) * 2):
                yield lambda name=name, d=d, label=label: tiling_calls(name, *vectors(512, d, name))[label]()
        for d in DIMENSIONS:
            yield lambda name=name, d=d: alternatives(name, SIZES[0], d)["compiled"]()
    for n in SIZES[1:]:
        yield lambda n=n: by_row_blocks(*vectors(n, 128))
    yield lambda: alternatives("info_nce", SIZES[0], 128)["attention"]()


def compile_part(number: int) -> None:
    """Compile every COMPILERS-th piece."""
    for piece in itertools.islice(pieces(), number, None, COMPILERS):
        try:
            piece()
        except Exception as error:  # compiled later, by the process that measures
            print(f"not compiled in advance: {type(error).__name__}: {error}"[:300], file=sys.stderr)
        torch.cuda.empty_cache()


def compile_all() -> None:
    call = [sys.executable, __file__, "compile"]
    processes = [subprocess.Popen([*call, str(i)], stderr=subprocess.PIPE, text=True) for i in range(COMPILERS)]
    for process in processes:
        try:
            process.wait(max(0.1, SECONDS_TO_COMPILE - (time.perf_counter() - START)))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main(folder: Path, limit: float) -> None:
    torch._dynamo.config.recompile_limit = 64
    compile_all()
    table = {"benchmark": "contrastive_gpu", "torch": torch.__version__, "device": torch.cuda.get_device_name()}
    rows: list[object] = [{"seconds to compile": round(time.perf_counter() - START, 1)}]
    for measurement in measurements():
        if time.perf_counter() - START > limit:
            break
        try:
            rows.append(measurement())
        except Exception as error:  # a measurement that fails must not cost the others
            rows.append({"failed": f"{type(error).__name__}: {error}"[:500]})
        print(json.dumps(rows[-1]), flush=True)
        (folder / "contrastive_gpu.json").write_text(json.dumps({**table, "rows": rows}, indent=2) + "\n")
    print(f"{time.perf_counter() - START:.1f} s")
    sys.stdout.flush()
    os._exit(0)  # compiler processes of torch would be waited for


if __name__ == "__main__":
    if sys.argv[1:2] == ["compile"]:
        torch._dynamo.config.recompile_limit = 64
        compile_part(int(sys.argv[2]))
    else:
        default = Path(__file__).parent / "results"
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else default, float(sys.argv[2]) if len(sys.argv) > 2 else 600.0)
