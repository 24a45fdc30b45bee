"""Attention with statistics on a GPU, compared with attention without: milliseconds, ratios, and hardware limits.

python benchmarks/attention_gpu.py [section ...]        all sections by default; writes results/attention_gpu.json

    --folder FOLDER      write attention_gpu.json there; other sections are those of results/attention_gpu.json
    --limit SECONDS      begin no row after this time
    --tiny               small sizes, also without a GPU, nothing written: whether it runs

What has not been measured with the present kernels, in one call of at most seven minutes, most valuable first:

    python3 benchmarks/attention_gpu.py packed masks forward --limit 240 --folder "$OUT" &&
    python3 benchmarks/monitor_gpu.py "$OUT" --limit 160

    rows        as many queries as keys, forward and backward, against cuDNN, flash attention 2 and flex attention
    training    a step of GPT-2 small on attend and on scaled_dot_product_attention, eager and compiled
    masks       forward with masks, against scaled_dot_product_attention with a dense mask, and without a mask
    packed      8 documents of 512 tokens in one sequence, against the same documents in a batch, on the device
    forward     forward with all scalar statistics and without, against cuDNN: two sizes of "rows", in seconds
    decoding    few queries and many keys, against scaled_dot_product_attention

    floor = max(operations / rate of a large product, bytes / rate of a large copy, exponentials / 16 per clock and SM)

Bytes count inputs and outputs once each. Operations and exponentials are those that every method needs: two products
and one exponential per visible pair forward, five products and one exponential backward. gradlogz needs seven products
backward.

Most of the time of a first run is that of compiling: "packed" needs 54 kernels, 4 minutes of one core. They are
compiled by four processes at once. The file is written after every row.

Sections that are not selected retain their numbers. "runs" has the date and the versions of each section, and "sha256"
identifies the code of the kernels that were measured, without comments. Short calls are timed twice: as Python calls,
and as a replayed CUDA graph, which measures the device only.
"""

import argparse
import json
import statistics as numbers
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from triton.testing import do_bench

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from gradlogz import attend
from gradlogz.kernels.attention import (
    backward_plan,
    cpp_calls,
    decoding,
    gpu,
    hopper,
    hopper_backward,
    hopper_tiles,
    segment_spans,
)
from gradlogz.kernels.attention.operator import directional
from gradlogz.kernels.attention.scoring import Scoring, Sight
from source_hash import source_hash

SHAPES = [(16, 16, 512, 64), (32, 12, 1024, 64), (4, 16, 4096, 64), (4, 16, 4096, 128), (1, 16, 16384, 128)]
# Batch, heads, heads of keys, queries, keys, head size, and whether a tenth of the keys is padding.
DECODING = [
    (8, 32, 8, 1, 4096, 128, False),
    (8, 32, 8, 1, 32768, 128, False),
    (1, 32, 8, 1, 32768, 128, False),
    (8, 16, 16, 1, 8192, 64, False),
    (8, 32, 8, 4, 4096, 128, False),
    (8, 32, 8, 1, 32768, 128, True),
]
RESULTS = Path(__file__).parent / "results" / "attention_gpu.json"
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
CUDNN = SDPBackend.CUDNN_ATTENTION if ON_GPU else SDPBackend.MATH
TINY = "--tiny" in sys.argv
if TINY:
    SHAPES = [(1, 2, 128, 64), (1, 2, 256, 128)]
    DECODING = [(1, 4, 2, 1, 128, 64, False), (1, 4, 2, 1, 128, 64, True)]
Call = Callable[[], object]
Rows = Iterator[dict[str, object]]


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def milliseconds(call: Call) -> float | None:
    """Return the median time; None for an alternative that is not available here."""
    try:
        if TINY:
            return numbers.median(in_turns({"": call}, 1, rounds=1)[""])
        return do_bench(call, warmup=25, rep=100, return_mode="median")
    except Exception as error:
        print(f"   not measured: {error!r:.120}", flush=True)
        return None


def with_backward(attend: Callable[..., torch.Tensor], inputs: list[torch.Tensor], grad_output: torch.Tensor) -> Call:
    leaves = [x.detach().requires_grad_() for x in inputs]
    return lambda: torch.autograd.grad(attend(*leaves), leaves, grad_output)


def rivals(inputs: list[torch.Tensor], grad_output: torch.Tensor, causal: bool) -> dict[str, float | None]:
    def plain(q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    times = {}
    for name, backend in (("cudnn", CUDNN), ("fa2", SDPBackend.FLASH_ATTENTION)):
        with sdpa_kernel(backend):
            times[name] = milliseconds(lambda: plain(*inputs))
            times[f"{name} with backward"] = milliseconds(with_backward(plain, inputs, grad_output))

    if TINY:
        return times | {"flex with lse": None, "flex with lse with backward": None}
    n = inputs[0].shape[2]
    block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n) if causal else None
    torch.compiler.reset()  # the compiler has a limit on the number of shapes
    compiled = torch.compile(flex_attention, dynamic=False)

    def flex(q, k, v):
        return compiled(q, k, v, block_mask=block_mask, return_aux=AuxRequest(lse=True))[0]

    times["flex with lse"] = milliseconds(lambda: flex(*inputs))
    times["flex with lse with backward"] = milliseconds(with_backward(flex, inputs, grad_output))
    return times


def ours(inputs: list[torch.Tensor], grad_output: torch.Tensor, causal: bool) -> dict[str, float | None]:
    """Return the times of attend as a user calls it: with all scalar statistics, or with none."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    rows = [torch.randn_like(inputs[0][..., 0], dtype=torch.float32) for _ in range(3)]

    def through_every_statistic() -> object:
        r = attend(*leaves, is_causal=causal)
        results = r.output, r.log_normalizer, r.entropy, r.logit_variance
        return torch.autograd.grad(results, leaves, (grad_output, *rows))

    def with_z_loss() -> object:
        r = attend(*leaves, is_causal=causal)
        return torch.autograd.grad((r.output, r.log_normalizer), leaves, (grad_output, rows[0]))

    def output(q, k, v):
        return attend(q, k, v, is_causal=causal).output

    query, key, _ = inputs
    scoring = Scoring(query.shape[3] ** -0.5, right=0 if causal else None)
    calls: dict[str, Call] = {
        "attend": lambda: attend(*inputs, is_causal=causal),
        "attend again": lambda: attend(*inputs, is_causal=causal),
        "attend without statistics": lambda: attend(*inputs, is_causal=causal, statistics="none"),
        "attend with backward": with_backward(output, inputs, grad_output),
        "attend with backward and z-loss": with_z_loss,
        "attend with backward through every statistic": through_every_statistic,
        "Fisher-vector product": lambda: directional(query, key, Sight(), scoring, grad_output),
    }
    return {name: milliseconds(call) for name, call in calls.items()}


def in_python(inputs: list[torch.Tensor], grad_output: torch.Tensor, causal: bool) -> dict[str, dict[str, float]]:
    """Return milliseconds per call in a loop, and the microseconds after which a call returns to Python."""

    def ours(q, k, v):
        return attend(q, k, v, is_causal=causal).output

    def theirs(q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    calls: dict[str, Call] = {
        "attend": lambda: ours(*inputs),
        "sdpa": lambda: theirs(*inputs),
        "attend with backward": with_backward(ours, inputs, grad_output),
        "sdpa with backward": with_backward(theirs, inputs, grad_output),
    }

    on_device = forward_calls(inputs, causal)
    del on_device["cudnn again"]
    loop = in_turns(calls, 50, rounds=9)
    host: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(9):
        for name, call in calls.items():
            synchronize()
            start = time.perf_counter()
            for _ in range(20):
                call()
            host[name].append((time.perf_counter() - start) / 20 * 1e6)
    return {
        "as called, ms": {name: round(numbers.median(t), 4) for name, t in loop.items()},
        "host, microseconds": {name: round(numbers.median(t), 1) for name, t in host.items()},
        "as a graph, ms": as_graphs(on_device),
    }


def ceilings() -> dict[str, float]:
    if not ON_GPU:
        return {"product_tflops": 1.0, "copy_tbytes_per_s": 1.0, "clock_mhz": 1.0, "exponentials_per_s": 1.0}
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    product = do_bench(lambda: a @ b, return_mode="median")
    clock = subprocess.run(
        ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"], capture_output=True, text=True
    ).stdout.split()[0]
    source = torch.randint(0, 255, (1 << 32,), device=DEVICE, dtype=torch.uint8)
    target = torch.empty_like(source)
    copy = do_bench(lambda: target.copy_(source), return_mode="median")
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    return {
        "product_tflops": 2 * 8192**3 / product / 1e9,
        "copy_tbytes_per_s": 2 * source.numel() / copy / 1e9,
        "clock_mhz": float(clock),
        "exponentials_per_s": 16 * multiprocessors * float(clock) * 1e6,
    }


def floor(shape: tuple[int, int, int, int], causal: bool, top: dict[str, float], products: int) -> dict[str, float]:
    b, h, n, d = shape
    pairs = b * h * (n * (n + 1) // 2 if causal else n * n)
    tensors = 4 if products == 2 else 4 + 8
    return {
        "operations_ms": 2 * products * pairs * d / top["product_tflops"] / 1e9,
        "bytes_ms": tensors * 2 * b * h * n * d / top["copy_tbytes_per_s"] / 1e9,
        "exponentials_ms": pairs * (1 if products == 2 else 2) / top["exponentials_per_s"] * 1e3,
    }


def ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else round(one / other, 3)


def row(shape: tuple[int, int, int, int], causal: bool, top: dict[str, float]) -> dict[str, object]:
    *inputs, grad_output = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
    times = {**ours(inputs, grad_output, causal), **rivals(inputs, grad_output, causal)}
    ratios = {
        f"{way} / {name}": ratio(times[way], times[f"{name} with backward" if "backward" in way else name])
        for way in times
        if way.startswith("attend")
        for name in ("cudnn", "fa2", "flex with lse")
    }
    return {
        "shape": shape,
        "causal": causal,
        "ms": {name: None if t is None else round(t, 4) for name, t in times.items()},
        "ratios": ratios,
        **(in_python(inputs, grad_output, causal) if shape[2] <= 1024 else {}),
        "floor forward": floor(shape, causal, top, 2),
        "floor with backward": floor(shape, causal, top, 7),
    }


def squares(top: dict[str, float]) -> Rows:
    for shape in SHAPES:
        for causal in (False, True):
            yield row(shape, causal, top)


def forward(_top: dict[str, float]) -> Rows:
    """The forward pass at the sizes whose goals are stated, without the kernels of the backward pass."""
    for shape in SHAPES[-3:-1]:
        for causal in (False, True):
            inputs = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]
            calls = forward_calls(inputs, causal)
            times = {name: milliseconds(call) for name, call in calls.items()}
            yield {
                "shape": shape,
                "causal": causal,
                "ms": {name: None if t is None else round(t, 4) for name, t in times.items()},
                "ratios": {name: ratio(times[name], times["cudnn"]) for name in times if name != "cudnn"},
            }


def forward_calls(inputs: list[torch.Tensor], causal: bool) -> dict[str, Call]:
    """Calls of attend with statistics and without, and of cuDNN."""

    def cudnn() -> object:
        with sdpa_kernel(CUDNN):
            return functional.scaled_dot_product_attention(*inputs, is_causal=causal)

    return {
        "attend": lambda: attend(*inputs, is_causal=causal),
        "attend without statistics": lambda: attend(*inputs, is_causal=causal, statistics="none"),
        "cudnn": cudnn,
        "cudnn again": cudnn,
    }


def training(_top: dict[str, float]) -> Rows:
    """Steps of GPT-2 small in bfloat16, in turns; the statistics of attend are computed and not used."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from gradlogz import register

    register()
    sizes = {"n_layer": 1, "n_embd": 64, "n_head": 4} if TINY else {}
    for batch, compiled in ((1, False),) if TINY else ((16, False), (4, False), (16, True)):
        steps: dict[str, Call] = {}
        for name in ("sdpa", "gradlogz"):
            torch.manual_seed(0)
            config = GPT2Config(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, **sizes)
            model = GPT2LMHeadModel._from_config(config, attn_implementation=name).to(DEVICE).train()
            call = torch.compile(model) if compiled else model
            optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
            ids = torch.randint(0, 50000, (batch, 64 if TINY else 1024), device=DEVICE)

            def step(call=call, optimizer=optimizer, ids=ids) -> None:
                with torch.autocast(DEVICE, torch.bfloat16):
                    loss = call(input_ids=ids, labels=ids, use_cache=False).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

            for _ in range(3):
                step()
            steps["attend" if name == "gradlogz" else name] = step
        times = in_turns(steps | {"sdpa again": steps["sdpa"]}, 5, rounds=7)
        ms = {name: round(numbers.median(t), 3) for name, t in times.items()}
        yield {"batch": (batch, 1024), "compiled": compiled, "ms": ms, "ratio": ratio(ms["attend"], ms["sdpa"])}


def masks(_top: dict[str, float]) -> Rows:
    b, h, n, _ = shape = SHAPES[-1] if TINY else (4, 16, 4096, 128)
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    position = torch.arange(n, device=DEVICE)
    before = position[:, None] - position
    pairs = torch.rand(1, 1, n, n, device=DEVICE) < 0.7
    padding = (position < n - (50 if TINY else 1000)).expand(b, 1, 1, n)
    segments = position // 512
    window, packed = (before >= 0) & (before < 512), segments[:, None] == segments
    additive = torch.randn(1, h, n, n, device=DEVICE, dtype=torch.bfloat16)
    cases = {
        "none": (None, {}),
        "bool mask": (pairs, {"attn_mask": pairs}),
        "padding": (padding, {"attn_mask": padding}),
        "additive mask per head": (additive, {"attn_mask": additive}),
        "window of 512": (window, {"window": (511, 0)}),
        "8 segments": (packed, {"segments": segments[None]}),
    }
    for name, (mask, options) in cases.items():
        times = {
            "attend": milliseconds(lambda options=options: attend(q, k, v, **options)),
            "sdpa": milliseconds(lambda m=mask: functional.scaled_dot_product_attention(q, k, v, attn_mask=m)),
        }
        visible = 1.0 if mask is None or mask.dtype is not torch.bool else mask.float().mean().item()
        ms = {key: t and round(t, 4) for key, t in times.items()}
        yield {"shape": shape, "mask": name, "visible pairs": round(visible, 4), "ms": ms}


def packed(_top: dict[str, float]) -> Rows:
    """Documents of equal lengths that fill tiles, and of unequal ones; the batch has as many tokens of equal length."""
    if ON_GPU:
        compile_at_once([(str(size), str(int(causal))) for size in (64, 128) for causal in (False, True)])
    for size in (64, 128):
        for causal in (False, True):
            calls = calls_of_documents(size, causal)
            for name, ways in calls.items():
                for way, call in zip(("forward", "with backward"), ways, strict=True):
                    begun = time.perf_counter()
                    call()
                    synchronize()
                    print(f"   {size} {name} {way}: first call in {time.perf_counter() - begun:.1f} s", flush=True)
            forward = as_graphs({name: forward for name, (forward, _) in calls.items()}, repeats=10, rounds=9)
            backward = as_graphs({name: both for name, (_, both) in calls.items()}, repeats=3, rounds=9)
            yield {"head size": size, "causal": causal, "forward, ms": forward, "with backward, ms": backward}


def calls_of_documents(size: int, causal: bool) -> dict[str, tuple[Call, Call]]:
    lengths = {"8 x 512": [512] * 8, "100 to 1000": [300, 700, 512, 130, 1000, 454, 900, 100]}
    if TINY:
        lengths = {name: [n // 32 for n in each] for name, each in lengths.items()}
    batch, heads = (1, 2) if TINY else (4, 16)
    tokens = {name: sum(each) for name, each in lengths.items()}
    calls = {"batch": step_of_documents((8 * batch, heads, lengths["8 x 512"][0], size), causal, None)}
    for name, each in lengths.items():
        numbered = torch.arange(len(each), device=DEVICE).repeat_interleave(torch.tensor(each, device=DEVICE))
        calls[name] = step_of_documents((batch, heads, tokens[name], size), causal, numbered.unsqueeze(0))
    return calls


def compile_at_once(kinds: list[tuple[str, str]]) -> None:
    """Compile the kernels of packed documents into Triton's cache, each kind in a process of its own."""
    processes = [subprocess.Popen([sys.executable, __file__, "--compile", *kind]) for kind in kinds]
    for process in processes:
        process.wait()


def step_of_documents(
    shape: tuple[int, int, int, int], causal: bool, segments: torch.Tensor | None
) -> tuple[Call, Call]:
    """Forward pass, and with a backward pass through output, log normaliser and entropy."""
    *inputs, grad_output = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
    row = torch.randn(shape[:3], device=DEVICE)

    def forward() -> object:
        return attend(*inputs, is_causal=causal, segments=segments)

    def with_backward() -> object:
        leaves = [x.detach().requires_grad_() for x in inputs]
        r = attend(*leaves, is_causal=causal, segments=segments)
        return torch.autograd.grad((r.output, r.log_normalizer, r.entropy), leaves, (grad_output, row, row))

    return forward, with_backward


def in_turns(calls: dict[str, Call], repeats: int, rounds: int = 25) -> dict[str, list[float]]:
    """Return the milliseconds per call in many consecutive calls, bounded by Python or the device, for each round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    repeats, rounds = (1, 1) if TINY else (repeats, rounds)
    for _ in range(rounds):
        for name, call in calls.items():
            synchronize()
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            synchronize()
            times[name].append((time.perf_counter() - start) / repeats * 1e3)
    return times


def as_called(calls: dict[str, Call]) -> dict[str, dict[str, float]]:
    """Return median and minimum: the time of Python depends on the host processor, which may be shared."""
    times = in_turns(calls, 200)
    return {
        "as called, ms": {name: round(numbers.median(t), 4) for name, t in times.items()},
        "as called at best, ms": {name: round(min(t), 4) for name, t in times.items()},
    }


def as_graphs(calls: dict[str, Call], repeats: int = 20, rounds: int = 25) -> dict[str, float]:
    """Return milliseconds on the device, without Python."""
    if not ON_GPU:
        return {name: round(numbers.median(t), 4) for name, t in in_turns(calls, 1, 1).items()}
    replays = {}
    for name, call in calls.items():
        with torch.cuda.stream(torch.cuda.Stream()):
            call()
        synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                call()
        replays[name] = graph.replay
    return {name: round(numbers.median(t) / repeats, 4) for name, t in in_turns(replays, 5, rounds).items()}


def few_queries(top: dict[str, float]) -> Rows:
    for b, h, hk, m, n, d, padded in DECODING:
        q = torch.randn(b, h, m, d, device=DEVICE, dtype=torch.bfloat16)
        k, v = (torch.randn(b, hk, n, d, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        mask = (torch.arange(n, device=DEVICE) >= n // 10).expand(b, 1, 1, n).contiguous() if padded else None
        options = {"attn_mask": mask, "enable_gqa": h != hk}
        calls: dict[str, Call] = {
            "attend": lambda q=q, k=k, v=v, o=options: attend(q, k, v, **o),
            "output alone": lambda q=q, k=k, v=v, o=options: attend(q, k, v, statistics="none", **o),
            "sdpa": lambda q=q, k=k, v=v, o=options: functional.scaled_dot_product_attention(q, k, v, **o),
        }
        yield {
            "query": (b, h, m, d),
            "key": (b, hk, n, d),
            "padding": padded,
            **as_called(calls),
            "as a graph, ms": as_graphs(calls),
            "bytes_ms": 2 * k.nbytes / top["copy_tbytes_per_s"] / 1e9,
        }


HOPPER = gpu, hopper, hopper_backward, hopper_tiles, backward_plan, segment_spans
SECTIONS = {
    "rows": (squares, HOPPER),
    "training": (training, HOPPER),
    "masks": (masks, HOPPER),
    "packed": (packed, HOPPER),
    "forward": (forward, HOPPER),
    "decoding": (few_queries, (gpu, decoding)),
}


def main(names: list[str], folder: Path, limit: float) -> None:
    begun = time.perf_counter()
    torch.manual_seed(0)
    table = json.loads(RESULTS.read_text()) if names else {"sha256": {}}
    name_of_device = torch.cuda.get_device_name() if ON_GPU else "CPU"
    machine = {"device": name_of_device, "torch": torch.__version__, "triton": triton.__version__}
    table |= {"benchmark": "attention_gpu", **machine}
    if ON_GPU:
        print("calls from C++:", cpp_calls.wait() or cpp_calls.problem(), flush=True)
    if not names:
        table["ceilings"] = ceilings()
    for name in names or SECTIONS:
        measure, modules = SECTIONS[name]
        rows: list[dict[str, object]] = []
        table["sha256"][name] = {Path(m.__file__).name: source_hash(Path(m.__file__)) for m in modules}
        table.setdefault("runs", {})[name] = {"date": datetime.now(UTC).isoformat(timespec="minutes"), **machine}
        if time.perf_counter() - begun > limit:
            print(f"no time is left for {name}", flush=True)
            return
        for row in measure(table["ceilings"]):
            rows.append(row)
            print(f"{name}, {time.perf_counter() - begun:.0f} s:", row, flush=True)
            table[name] = rows
            if not TINY:
                (folder / RESULTS.name).write_text(json.dumps(table, indent=2) + "\n")
            if time.perf_counter() - begun > limit:
                print(f"{name} ended by the limit after {len(rows)} rows", flush=True)
                return


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("sections", nargs="*", choices=[[], *SECTIONS], default=[])
    options.add_argument("--folder", type=Path, default=RESULTS.parent)
    options.add_argument("--limit", type=float, default=3600.0, help="seconds")
    options.add_argument("--tiny", action="store_true")
    options.add_argument("--compile", nargs=2, metavar=("SIZE", "CAUSAL"), help="of packed documents; nothing else")
    chosen = options.parse_args()
    if chosen.compile:
        for ways in calls_of_documents(int(chosen.compile[0]), chosen.compile[1] == "1").values():
            for call in ways:
                call()
        synchronize()
    else:
        main(chosen.sections, chosen.folder, chosen.limit)
