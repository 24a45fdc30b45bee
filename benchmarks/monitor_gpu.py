"""Cost of the monitor in a training step on a GPU: time and memory, on SDPA and on `attend`, eager and compiled.

    GPT-2 small   16 x 1024, autocast to bfloat16, the model compiled as one
    Llama, 1 B     4 x 4096, bfloat16 (the sizes of Llama 3.2 1B, random weights), its layers compiled

python3 benchmarks/monitor_gpu.py [folder] [--limit 150]   on a machine with a GPU; writes monitor_gpu.json
python3 benchmarks/monitor_gpu.py [folder] --tiny          small models, also without a GPU: whether it runs

Each row is printed and written when it is measured, GPT-2 first; no row is begun that would not end within the limit,
by the time of the row before it or, for the first row of its kind, by an estimate.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import gradlogz
from gradlogz.attention.in_models.compiled_passes import CompiledPasses

QUIET = gradlogz.attention.Thresholds(None, None, None)
DEFAULT = 25  # interval of recorded steps by default; its mean is computed from recorded steps and those between
PERIOD = 3  # interval at which both are measured
ON_GPU = torch.cuda.is_available()
DEVICE, BACKEND = ("cuda", "inductor") if ON_GPU else ("cpu", "aot_eager")
EAGER_PASSES: list[None] = []  # one entry for each eager pass of a compiled model


class Subject(NamedTuple):
    """A model, its batches, and the number of steps that are measured."""

    name: str
    build: Callable[[bool], Any]  # of its size: tiny or not
    batch: tuple[int, int]
    dtype: torch.dtype  # of the parameters
    layers: str | None  # the modules that are compiled one by one; None: the model as one
    steps: int
    seconds: float  # of a compiled model, before one has been measured; half as many of an eager one


def gpt2(tiny: bool) -> Any:
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 100} if tiny else {}
    config = GPT2Config(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, **sizes)
    return GPT2LMHeadModel._from_config(config, attn_implementation="sdpa")


def llama(tiny: bool) -> Any:
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    if tiny:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 100}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, **heads, max_position_embeddings=4096, tie_word_embeddings=True, rope_theta=5e5)
    return LlamaForCausalLM._from_config(config, attn_implementation="sdpa")


SUBJECTS = [
    Subject("GPT-2 small", gpt2, (16, 1024), torch.float32, None, 12, 25.0),
    Subject("Llama, 1 B", llama, (4, 4096), torch.bfloat16, "LlamaDecoderLayer", 3, 24.0),
]


def milliseconds(step: Callable[[], None], steps: int) -> list[float]:
    """Return the milliseconds of every step, by the GPU's clock if there is one, from end to end."""
    if not ON_GPU:
        ends = [time.perf_counter()]
        for _ in range(steps):
            step()
            ends.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in itertools.pairwise(ends)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.reset_peak_memory_stats()
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]


def milliseconds_of_host(step: Callable[[], None]) -> float:
    """Return the milliseconds until a step has been sent to an idle GPU, the median of three."""
    taken = []
    for _ in range(3):
        if ON_GPU:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        step()
        taken.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(taken)


def peak() -> int:
    """Return the largest number of bytes allocated since the last measurement began."""
    return torch.cuda.max_memory_allocated() if ON_GPU else 1


def measured(subject: Subject, compiled: bool, on_attend: bool, tiny: bool) -> dict[str, object]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    with torch.device(DEVICE):
        model = subject.build(tiny).to(subject.dtype).train()
    if on_attend:
        gradlogz.register(model)
    call = model
    if compiled and subject.layers is None:
        call = torch.compile(model, backend=BACKEND)
    elif compiled:
        for module in model.modules():
            if type(module).__name__ == subject.layers:
                module.compile(backend=BACKEND)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
    batch = (2, 48) if tiny else subject.batch
    ids = torch.randint(0, model.config.vocab_size, batch, device=DEVICE)

    def step() -> None:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=subject.dtype == torch.float32):
            loss = call(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    begun = time.perf_counter()
    milliseconds(step, 2)
    with gradlogz.monitor(call, every=1, thresholds=QUIET):
        milliseconds(step, 2)
    seconds_before = time.perf_counter() - begun
    plain, plain_bytes, plain_host = milliseconds(step, subject.steps), peak(), milliseconds_of_host(step)
    EAGER_PASSES.clear()
    with gradlogz.monitor(call, every=1, thresholds=QUIET) as m:
        step()  # finds the names of the layers
        recorded, recorded_bytes = milliseconds(step, subject.steps), peak()
        recorded_host = milliseconds_of_host(step)
    eager_passes = len(EAGER_PASSES)
    with gradlogz.monitor(call, every=PERIOD, thresholds=QUIET):
        in_turn = milliseconds(step, max(subject.steps, 2 * PERIOD) + 1)
    again = milliseconds(step, subject.steps)
    base, every = statistics.median(plain + again), statistics.median(recorded)
    between = statistics.median(ms for i, ms in enumerate(in_turn) if i % PERIOD)
    by_default = (statistics.mean(in_turn[PERIOD::PERIOD]) + (DEFAULT - 1) * between) / DEFAULT
    first, second = statistics.median(plain), statistics.median(again)
    return {
        "model": subject.name + ", on attend" * on_attend + ", compiled" * compiled,
        "batch": list(batch),
        "ms": {
            "plain": round(base, 3),
            "looked at": round(every, 3),
            "by default, mean": round(by_default, 3),
        },
        "looked at / plain": round(every / base, 4),
        "by default / plain": round(by_default / base, 4),
        "A/A": round(second / first, 4),
        "ms of the host": {"plain": round(plain_host, 1), "looked at": round(recorded_host, 1)},
        "eager passes": eager_passes,
        "GiB": round(plain_bytes / 2**30, 2),
        "memory, looked at / plain": round(recorded_bytes / plain_bytes, 4),
        "layers": len(m.row().layers),
        "seconds before": round(seconds_before, 1),
    }


def main(folder: Path, tiny: bool, limit: float) -> None:
    begun, rows, skipped = time.perf_counter(), [], []
    table = {
        "benchmark": "monitor_gpu",
        "device": torch.cuda.get_device_name() if ON_GPU else "CPU",
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "rows": rows,
        "not measured": skipped,
    }
    run_eager = CompiledPasses._run_eager
    CompiledPasses._run_eager = lambda *a: EAGER_PASSES.append(None) or run_eager(*a)  # type: ignore[method-assign,func-returns-value]
    for subject, compiled in itertools.product(SUBJECTS, (True, False)):
        seconds = subject.seconds if compiled else subject.seconds / 2
        for on_attend in (True, False):
            row_begun = time.perf_counter()
            if row_begun - begun + seconds > limit:
                skipped.append(subject.name + ", on attend" * on_attend + ", compiled" * compiled)
                print("no time is left for", skipped[-1], flush=True)
            else:
                rows.append(measured(subject, compiled, on_attend, tiny))
                seconds = time.perf_counter() - row_begun
                print(json.dumps(rows[-1]), f"{seconds:.0f} s", flush=True)
            if ON_GPU:
                torch.cuda.empty_cache()
            if not tiny:
                (folder / "monitor_gpu.json").write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent / "results")
    options.add_argument("--tiny", action="store_true")
    options.add_argument("--limit", type=float, default=600.0, help="seconds")
    chosen = options.parse_args()
    main(chosen.folder, chosen.tiny, chosen.limit)
