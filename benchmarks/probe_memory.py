"""Memory of a divided probe beside the weights of its model, against the bound `part_bytes`.

python benchmarks/probe_memory.py     measures each shape in a process of its own; writes results/probe_memory.json

Models of Llama's form with random weights in float32; all predictions, no draws.
BUNDLE is scaled so that the parts of every shape have the bundles of predictions that those of 8 billion weights have.
The first of the eight groups of documents has more tokens than the samples of a layer, the others have fewer; batches
are of ROWS windows of WINDOW tokens.

    weights     of the model
    batch       memory of a plain pass over a batch: what the model needs without a probe
    measuring   memory while parts are measured, written and joined, beside the weights
    judging     memory while all predictions are judged, beside the weights
    bound       part_bytes: a bound of the statistics, beside the weights and a batch

Memory is that which is not of mapped files: the kernel takes these back when it needs to. It is looked at every few
milliseconds, and freed blocks of 64 kB and more go back at once, as those of large models do.
"""

import json
import multiprocessing
import os
import platform
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gradlogz.engine import InProcess
from gradlogz.probing.divided import divided_pass
from gradlogz.probing.divided.corpus_parts import DividedPass
from gradlogz.probing.divided.model_source import ModelSource
from gradlogz.probing.inside.discovery import discover
from gradlogz.probing.inside.loading import Loaded
from gradlogz.probing.passes import memory_limits
from gradlogz.probing.run_probe import chosen, evaluate
from gradlogz.probing.statistics import GROUPS
from gradlogz.probing.statistics.hashing import group_of, hash_of

RESULTS = Path(__file__).parent / "results" / "probe_memory.json"
WORDS, WINDOW, ROWS = 512, 128, 18
BATCHES = (3, *(1,) * (GROUPS - 1))  # of each group
BUNDLE = memory_limits.BUNDLE
MIB = 2**20


class Shape(NamedTuple):
    """Width, heads, key heads, width of the feed-forward map, layers."""

    D: int
    h: int
    h_k: int
    wide: int
    layers: int


LLAMA_8B = Shape(4096, 32, 8, 14336, 32)
SMALL = Shape(64, 2, 1, 128, 1)  # what is measured first in every process, so that all is imported
SHAPES = [Shape(256, 2, 1, 896, 4), Shape(512, 4, 1, 1792, 2), Shape(1024, 8, 2, 3584, 1)]
HELD_OUT = [Shape(768, 6, 2, 2688, 2)]  # measured after JUDGED and OTHERS in memory_limits.py were chosen


def llama(shape: Shape) -> LlamaForCausalLM:
    """Return a model with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=shape.D, num_attention_heads=shape.h, num_key_value_heads=shape.h_k, intermediate_size=shape.wide,
        num_hidden_layers=shape.layers, vocab_size=WORDS, max_position_embeddings=WINDOW,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def batches() -> Iterator[tuple[list[str], dict[str, torch.Tensor]]]:
    """Yield batches of one group each, with names of their rows that belong to this group."""
    generator, numbers = torch.Generator().manual_seed(1), count()
    for group, number in enumerate(BATCHES):
        for _ in range(number):
            names = islice((n for n in map("row {}".format, numbers) if group_of(hash_of(n)) == group), ROWS)
            words = torch.randint(WORDS, (ROWS, WINDOW), generator=generator)
            yield list(names), {"input_ids": words, "attention_mask": torch.ones_like(words)}


class Peak:
    """The largest anonymous memory of this process while it is looked at, in bytes beside that at the beginning."""

    def __init__(self) -> None:
        self._before, self.bytes = anonymous_bytes(), 0

    def look(self) -> None:
        """Take note of the present memory."""
        self.bytes = max(self.bytes, anonymous_bytes() - self._before)


def anonymous_bytes() -> int:
    """Return the memory of this process that belongs to no file."""
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


@contextmanager
def looked_at() -> Iterator[Peak]:
    """Context in which a thread looks at the memory."""
    peak, ended = Peak(), threading.Event()

    def look() -> None:
        while not ended.wait(0.003):
            peak.look()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def measured(shape: Shape) -> dict[str, Any]:
    """Measure a shape in this process."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    memory_limits.BUNDLE = int(BUNDLE * (shape.D / LLAMA_8B.D) ** 2 * shape.layers / LLAMA_8B.layers)
    model, predictions = llama(shape), chosen(None)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    entries = list(batches())
    first = entries[0][1]
    with torch.no_grad(), looked_at() as batch:
        model(**first, use_cache=False)
    architecture = discover(model, first)
    source = ModelSource("m", "m", None, "cpu", None, None, False, False, tuple(p.name for p in predictions), (), 0)
    begun = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        with looked_at() as measuring:
            outcome = divided_pass.divided_measure(
                source, Loaded(model, None, "m", {"device": "cpu"}), entries,
                DividedPass(None, None, 0, 0.0, 0, 8), predictions=predictions, facts={}, known={},
                folder=Path(folder) / "parts", engine=InProcess(),
            )  # fmt: skip
        assert outcome.measured is not None, outcome.failures
        with looked_at() as judging:
            findings = evaluate(outcome.measured, predictions=predictions)
        failed = [claim.prediction for claim in findings.claims if claim.verdict == "failed"]
    bound = memory_limits.part_bytes(architecture, predictions)
    return {
        **shape._asdict(), "bundles": len(memory_limits.bundles_of(architecture, predictions)),
        "MiB of weights": weights / MIB, "MiB of a batch": batch.bytes / MIB, "MiB measuring": measuring.bytes / MIB,
        "MiB judging": judging.bytes / MIB, "MiB bound": bound / MIB,
        "MiB of all matrices": memory_limits.matrix_bytes(architecture, predictions) / MIB, "failed": failed,
        "seconds": time.process_time() - begun,
    }  # fmt: skip


def _child(shape: Shape, pipe: Any) -> None:
    measured(SMALL)
    pipe.send(measured(shape))


def main() -> None:
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # of the processes that measure
    context, rows = multiprocessing.get_context("spawn"), []
    for shape in [*SHAPES, *HELD_OUT]:
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(shape, there))
        process.start()
        there.close()
        row = {name: round(value, 2) if isinstance(value, float) else value for name, value in here.recv().items()}
        rows.append({"use": "held out" if shape in HELD_OUT else "chosen from", **row})
        process.join()
        print(rows[-1], flush=True)
    table = {
        "benchmark": "probe_memory", "python": platform.python_version(), "torch": torch.__version__,
        "machine": platform.machine(), "rows": rows,
    }  # fmt: skip
    RESULTS.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
