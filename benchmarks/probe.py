"""What the probe costs: all predictions in one pass against a plain forward pass over the same tokens.

python benchmarks/run.py probe            MiniLM and SmolLM2 on the CPU, ratios
python3 benchmarks/probe.py [folder]      on a GPU: a model of the shape of SmolLM2 with random weights, and how long a
                                          million tokens take; writes probe_gpu.json
"""

import json
import sys
import time
from pathlib import Path

import torch

from gradlogz.probing import running
from gradlogz.probing.passes import without_cache
from gradlogz.probing.statistics import GROUPS, merge
from gradlogz.probing.texts import Batch
from gradlogz.probing.tracing import trace
from timing import compare


def random_batches(vocabulary: int, rows: int, length: int, count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for i in range(count):
        ids = torch.randint(3, vocabulary, (rows, length), generator=generator)
        keys = torch.randint(0, 2**62, (rows,), generator=generator)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        names = [f"{i} {row}" for row in range(rows)]
        found.append(Batch(inputs, keys, i % GROUPS, names, torch.zeros(rows, dtype=torch.int64)))
    return found


def rows() -> list[dict[str, object]]:
    """On the CPU: each prediction by itself, and all of them."""
    from gradlogz.probing.loading import load

    torch.set_num_threads(2)
    found: list[dict[str, object]] = []
    for name, batch, length in (("minilm", 16, 256), ("smollm2", 2, 512)):
        model = load(name).model
        (tokens,) = random_batches(20000, batch, length, 1)
        layout = trace(model, tokens.inputs)

        def plain(model=model, tokens=tokens) -> None:
            with torch.no_grad():
                model(**tokens.inputs, **without_cache(model))

        def looked_at(wanted, model=model, tokens=tokens, layout=layout) -> None:
            running.passed(model, layout, tokens, wanted)

        seconds = compare(
            {
                "plain": plain,
                "plain again": plain,
                "events alone": lambda: looked_at([]),
                "all predictions": lambda: looked_at(list(running.PREDICTIONS)),
            },
            rounds=5,
        )
        ratios = {key: round(t / seconds["plain"], 3) for key, t in seconds.items()}
        each = {}
        for prediction in running.PREDICTIONS:
            begun = time.perf_counter()
            looked_at([prediction])
            each[running.name_of(prediction)] = round((time.perf_counter() - begun) / seconds["plain"], 3)
        found.append({"model": name, "batch": [batch, length], "ratios": ratios, "events and one prediction": each})
    return found


def on_a_gpu() -> dict[str, object]:
    """A model of SmolLM2-135M's shape with random weights: milliseconds of a batch, and seconds of a million tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa").cuda().eval()
    batches = [running._placed(batch, model) for batch in random_batches(49152, 16, 1024, 8)]
    layout = trace(model, batches[0].inputs)
    wanted = list(running.PREDICTIONS)

    def plain(batch: Batch) -> None:
        with torch.no_grad():
            model(**batch.inputs, use_cache=False)

    def timed(run, given: list[Batch]) -> float:
        run(given[0])
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for batch in given:
            run(batch)
        torch.cuda.synchronize()
        return (time.perf_counter() - begun) / len(given)

    seconds = {"plain": timed(plain, batches)}
    seconds["events alone"] = timed(lambda b: running.passed(model, layout, b, []), batches[:4])
    each: dict[str, float] = {}
    for p in list(wanted):
        try:
            each[running.name_of(p)] = timed(lambda b, p=p: running.passed(model, layout, b, [p]), batches[:2])
        except Exception as error:  # the others are still to be measured
            print(running.name_of(p), "failed:", repr(error)[:600], flush=True)
            wanted.remove(p)
    torch.cuda.reset_peak_memory_stats()
    seconds["all predictions"] = timed(lambda b: running.passed(model, layout, b, wanted), batches[:4])
    seconds["plain again"] = timed(plain, batches)
    peak = torch.cuda.max_memory_allocated()
    ratios = {key: round(t / seconds["plain"], 3) for key, t in seconds.items()}
    report = {
        "model": "of SmolLM2-135M's shape, random weights, float32", "batch": [16, 1024],
        "ms": {key: round(1e3 * t, 2) for key, t in seconds.items()}, "ratios": ratios,
        "events and one prediction": {key: round(t / seconds["plain"], 3) for key, t in each.items()},
        "GiB at most": round(peak / 2**30, 2),
    }  # fmt: skip
    print(json.dumps(report, indent=2), flush=True)
    begun, state, tokens = time.perf_counter(), {}, 0
    while tokens < 1_000_000 and time.perf_counter() - begun < 90:
        state = merge(state, running.passed(model, layout, batches[tokens // (16 * 1024) % 8], wanted)[0])
        tokens += 16 * 1024
    torch.cuda.synchronize()
    elapsed = time.perf_counter() - begun
    return {**report, "a pass with merging": {"tokens": tokens, "seconds": round(elapsed, 1)}}


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results"
    found = on_a_gpu()
    device = torch.cuda.get_device_name()
    table = {"benchmark": "probe_gpu", "device": device, "torch": torch.__version__, "rows": [found]}
    (folder / "probe_gpu.json").write_text(json.dumps(table, indent=2) + "\n")
    print(json.dumps(found["a pass with merging"]))
