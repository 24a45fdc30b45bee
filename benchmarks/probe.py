"""Cost of the probe: all predictions in one pass, relative to a plain forward pass over the same tokens; whole runs.

python benchmarks/run.py probe            MiniLM and SmolLM2 on one core, in seconds of CPU time
python3 benchmarks/probe.py [folder]      on a GPU: a model of SmolLM2's shape with random weights, and the time of a
                                          million tokens; writes probe_gpu.json
"""

import json
import sys
import time
from pathlib import Path
from unittest import mock

import torch

from gradlogz.probing.corpus.batching import Batch
from gradlogz.probing.corpus.readers import corpus_of
from gradlogz.probing.inside.discovery import discover
from gradlogz.probing.inside.hooks import without_cache
from gradlogz.probing.inside.loading import Loaded
from gradlogz.probing.passes.batch_statistics import statistics_of
from gradlogz.probing.passes.placement import placed
from gradlogz.probing.predictions import known_predictions
from gradlogz.probing.run_probe import evaluate, measure
from gradlogz.probing.statistics import GROUPS, merge
from timing import compare

MODELS = (("minilm", 16, 256, 20_000), ("smollm2", 1, 512, 1_000))  # name, batch, tokens of a run


def random_batches(vocabulary: int, rows: int, length: int, count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    batches = []
    for i in range(count):
        ids = torch.randint(3, vocabulary, (rows, length), generator=generator)
        keys = torch.randint(0, 2**62, (rows,), generator=generator)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        names = [f"{i} {row}" for row in range(rows)]
        batches.append(Batch(inputs, keys, i % GROUPS, names, torch.zeros(rows, dtype=torch.int64)))
    return batches


def rows() -> list[dict[str, object]]:
    """Return ratios of one batch, for each prediction alone and for all, and the stages of whole runs.

    The clock counts the time of this process on a core, which other work on the machine does not change much.
    """
    from gradlogz.probing.inside.loading import load

    torch.set_num_threads(1)
    table: list[dict[str, object]] = []
    for name, batch, length, tokens_of_a_run in MODELS:
        loaded = load(name, device="cpu")
        model = loaded.model
        (tokens,) = random_batches(20000, batch, length, 1)
        architecture = discover(model, tokens.inputs)

        def plain(model=model, tokens=tokens) -> None:
            with torch.no_grad():
                model(**tokens.inputs, **without_cache(model))

        def looked_at(wanted, model=model, tokens=tokens, architecture=architecture) -> None:
            statistics_of(model, architecture, tokens, wanted)

        seconds = compare(
            {
                "plain": plain,
                "plain again": plain,
                "events alone": lambda: looked_at([]),
                "all predictions": lambda: looked_at(known_predictions()),
                **{p.name: lambda p=p: looked_at([p]) for p in known_predictions()},
            },
            rounds=2,
            clock=time.process_time,
        )
        ratios = {key: round(t / seconds["plain"], 3) for key, t in seconds.items()}
        each = {p.name: ratios.pop(p.name) for p in known_predictions()}
        row = {"model": name, "batch": [batch, length], "ratios": ratios, "events and one prediction": each}
        table.append(row | {"tokens of a run": tokens_of_a_run, "stages": _stages(loaded, tokens_of_a_run)})
        print(json.dumps(table[-1]), flush=True)
    return table


def _stages(loaded: Loaded, tokens: int) -> dict[str, float]:
    """Return the seconds of CPU time of the parts of a run on the default text."""
    with mock.patch("time.perf_counter", time.process_time):
        measured = measure(loaded.model, loaded.tokenizer, corpus_of(loaded.tokenizer, None), tokens=tokens)
    begun = time.process_time()
    evaluate(measured)
    return {**measured.seconds, "judging": time.process_time() - begun}


def on_a_gpu() -> list[dict[str, object]]:
    """Time a model of SmolLM2-135M's shape with random weights: milliseconds per batch, seconds per million tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa").cuda().eval()
    table: list[dict[str, object]] = []
    for size in (8, 64):  # batch sizes of a small and of a large GPU
        batches = [placed(batch, model) for batch in random_batches(49152, size, 1024, 3)]
        table.append(_on_a_gpu(model, batches, alone=size == 64))
        print(json.dumps(table[-1]), flush=True)
    architecture, tokens, state = discover(model, batches[0].inputs), 0, {}
    torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    while tokens < 1_000_000:
        batch = batches[tokens // 65536 % 3]._replace(group=tokens // 65536 % GROUPS)
        state = merge(state, statistics_of(model, architecture, batch, known_predictions())[0])
        tokens += 65536
    torch.cuda.synchronize()
    seconds, peak = time.perf_counter() - begun, torch.cuda.max_memory_allocated()
    table.append({"tokens with merging": tokens, "seconds": round(seconds, 1), "GiB at most": round(peak / 2**30, 2)})
    print(json.dumps(table[-1]), flush=True)
    return table


def _on_a_gpu(model: torch.nn.Module, batches: list[Batch], *, alone: bool) -> dict[str, object]:
    architecture = discover(model, batches[0].inputs)

    def plain(batch: Batch) -> None:
        with torch.no_grad():
            model(**batch.inputs, use_cache=False)

    def looked_at(wanted):
        return lambda batch: statistics_of(model, architecture, batch, wanted)

    def timed(run, inputs: list[Batch]) -> float:
        run(inputs[0])
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for batch in inputs:
            run(batch)
        torch.cuda.synchronize()
        return (time.perf_counter() - begun) / len(inputs)

    seconds = {"plain": timed(plain, batches), "events alone": timed(looked_at([]), batches)}
    torch.cuda.reset_peak_memory_stats()
    seconds["all predictions"] = timed(looked_at(known_predictions()), batches)
    peak = torch.cuda.max_memory_allocated()
    seconds["plain again"] = timed(plain, batches)
    each = {p.name: timed(looked_at([p]), batches[:1]) for p in known_predictions()} if alone else {}
    return {
        "model": "of SmolLM2-135M's shape, random weights, float32",
        "batch": list(batches[0].inputs["input_ids"].shape),
        "ms": {key: round(1e3 * t, 2) for key, t in seconds.items()},
        "ratios": {key: round(t / seconds["plain"], 3) for key, t in seconds.items()},
        "events and one prediction": {key: round(t / seconds["plain"], 3) for key, t in each.items()},
        "GiB at most": round(peak / 2**30, 2),
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results"
    device = torch.cuda.get_device_name()
    table = {"benchmark": "probe_gpu", "device": device, "torch": torch.__version__, "rows": on_a_gpu()}
    (folder / "probe_gpu.json").write_text(json.dumps(table, indent=2) + "\n")
