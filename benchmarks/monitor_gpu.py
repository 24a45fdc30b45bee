"""Cost of the monitor in a training step on a GPU: GPT-2 small, bfloat16, eager and compiled.

python3 benchmarks/monitor_gpu.py [folder]     on a machine with a GPU; writes monitor_gpu.json
"""

import itertools
import json
import statistics
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import gradlogz

BATCH, TOKENS, STEPS = 16, 1024, 20
QUIET = gradlogz.attention.Thresholds(None, None, None)


def milliseconds(step, steps: int = STEPS) -> list[float]:
    """Return the milliseconds of every step by the GPU's clock, from the end of one step to the end of the next."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]


def measured(compiled: bool, on_attend: bool) -> dict[str, object]:
    torch.manual_seed(0)
    config = GPT2Config(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    model = GPT2LMHeadModel._from_config(config, attn_implementation="sdpa").cuda().train()
    if on_attend:
        gradlogz.register(model)
    call = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
    ids = torch.randint(0, 50000, (BATCH, TOKENS), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = call(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    with gradlogz.monitor(call, every=1, thresholds=QUIET):
        for _ in range(3):
            step()
    plain = milliseconds(step)
    with gradlogz.monitor(call, every=1, thresholds=QUIET) as m:
        looked_at = milliseconds(step)
    with gradlogz.monitor(call, thresholds=QUIET):
        by_default = milliseconds(step, 100)
    again = milliseconds(step)
    base = statistics.median(plain)
    return {
        "model": "GPT-2 small" + ", on attend" * on_attend + ", compiled" * compiled,
        "batch": [BATCH, TOKENS],
        "ms": {
            "plain": round(base, 3),
            "plain again": round(statistics.median(again), 3),
            "looked at": round(statistics.median(looked_at), 3),
            "by default, mean": round(statistics.mean(by_default), 3),
        },
        "looked at / plain": round(statistics.median(looked_at) / base, 4),
        "by default / plain": round(statistics.mean(by_default) / statistics.mean(plain), 4),
        "A/A": round(statistics.median(again) / base, 4),
        "layers": len(m.row().layers),
    }


def main(folder: Path) -> None:
    rows = []
    for compiled, on_attend in itertools.product((False, True), repeat=2):
        rows.append(measured(compiled, on_attend))
        print(json.dumps(rows[-1], indent=2), flush=True)
        torch.cuda.empty_cache()
    name = torch.cuda.get_device_name()
    table = {"benchmark": "monitor_gpu", "device": name, "torch": torch.__version__, "rows": rows}
    (folder / "monitor_gpu.json").write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results")
