"""Cost model of a probe: seconds per token and layer of one CPU core, from counts of operations.

python benchmarks/probe_cost.py     measures shapes, fits the model to some and predicts the others; writes JSON

    seconds = sum_i c_i f_i     c_i >= 0, fitted to FITTED by least squares of relative errors; HELD_OUT are predicted
    products     2 (2 D² + 2 D² h_k / h + 3 D I)      floating-point operations of the layer's matrices, for a token
                 + 2 (3 · 0.56 + 2) D²                of second moments: three xx, of which half is computed, and two xy
    pairs        2 · 2 n D                            of logits and values
    elements     n h                                  logits, on which elementwise functions act
    bytes        4 D                                  of a vector of the residual stream
    calls        1 / tokens of a batch                fixed time of an event
    replicates   201 h / n                            sums over a document in 200 bootstrap samples

All predictions, models of Llama's form with random weights, float32, processor time of one thread.
"""

import json
import platform
import time
from pathlib import Path
from typing import NamedTuple

import torch
from scipy.optimize import nnls
from transformers import LlamaConfig, LlamaForCausalLM

from gradlogz.probing.inside.discovery import discover
from gradlogz.probing.passes.batch_statistics import statistics_of
from gradlogz.probing.run_probe import chosen
from probe import random_batches

RESULTS = Path(__file__).parent / "results" / "probe_cost.json"
VOCABULARY = 512  # so small that the logits of words cost little
REPEATS = 3


class Shape(NamedTuple):
    """Width, heads, key heads, width of the feed-forward map, layers; rows and tokens of a batch."""

    D: int
    h: int
    h_k: int
    wide: int
    layers: int
    rows: int
    n: int

    def features(self) -> dict[str, float]:
        """Counts for a token and a layer."""
        D, h, n = self.D, self.h, self.n
        matrices = 2 * D * D + 2 * D * D * self.h_k / h + 3 * D * self.wide
        return {
            "products": 2 * matrices + 2 * (3 * 0.56 + 2) * D * D,
            "pairs": 4.0 * n * D,
            "elements": float(n * h),
            "bytes": 4.0 * D,
            "calls": 1.0 / (self.rows * n),
            "replicates": 201.0 * h / n,
        }


FITTED = [
    Shape(128, 2, 1, 352, 2, 16, 64), Shape(128, 4, 4, 352, 2, 8, 128), Shape(256, 4, 2, 704, 2, 16, 64),
    Shape(256, 4, 4, 704, 3, 4, 256), Shape(384, 6, 2, 1056, 2, 8, 128), Shape(512, 8, 2, 1408, 2, 4, 128),
    Shape(512, 8, 8, 1408, 2, 8, 64), Shape(768, 12, 4, 2112, 1, 4, 128), Shape(256, 8, 2, 704, 2, 2, 256),
]  # fmt: skip
HELD_OUT = [Shape(320, 5, 5, 880, 3, 8, 96), Shape(640, 10, 2, 1760, 2, 4, 192)]


def seconds_of(shape: Shape) -> float:
    """Return the processor time of a pass of a batch with all predictions, for a token and a layer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=shape.D, num_attention_heads=shape.h, num_key_value_heads=shape.h_k, intermediate_size=shape.wide,
        num_hidden_layers=shape.layers, vocab_size=VOCABULARY, max_position_embeddings=shape.n,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    first, *others = random_batches(VOCABULARY, shape.rows, shape.n, REPEATS + 1)
    architecture, predictions = discover(model, first.inputs), chosen(None)
    state, _ = statistics_of(model, architecture, first, predictions)
    times = []
    for batch in others:
        begun = time.process_time()
        statistics_of(model, architecture, batch._replace(group=first.group), predictions, state)
        times.append(time.process_time() - begun)
    return min(times) / (shape.rows * shape.n * shape.layers)


def fitted(shapes: list[Shape], seconds: list[float]) -> dict[str, float]:
    """Return the coefficients, nonnegative least squares of relative errors."""
    rows = [[value / t for value in shape.features().values()] for shape, t in zip(shapes, seconds, strict=True)]
    coefficients, _ = nnls(rows, [1.0] * len(rows))
    return dict(zip(shapes[0].features(), coefficients.tolist(), strict=True))


def predicted(shape: Shape, coefficients: dict[str, float]) -> float:
    """Return the seconds for a token and a layer."""
    return sum(coefficients[name] * value for name, value in shape.features().items())


def main() -> None:
    torch.set_num_threads(1)
    seconds = [seconds_of(shape) for shape in FITTED]
    coefficients = fitted(FITTED, seconds)
    rows = []
    for shape, measured in zip([*FITTED, *HELD_OUT], [*seconds, *map(seconds_of, HELD_OUT)], strict=True):
        ratio = predicted(shape, coefficients) / measured
        use = "held out" if shape in HELD_OUT else "fitted"
        rows.append({**shape._asdict(), "use": use, "microseconds": round(1e6 * measured, 1), "ratio": round(ratio, 3)})
        print(rows[-1], flush=True)
    table = {
        "benchmark": "probe_cost", "python": platform.python_version(), "torch": torch.__version__,
        "machine": platform.machine(), "coefficients": coefficients, "rows": rows,
    }  # fmt: skip
    RESULTS.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
