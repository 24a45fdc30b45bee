"""Cost of a probe of large models on a GPU: a model of 1 B weights, a cost model, and the memory of 8 B weights.

python3 benchmarks/probe_cost_gpu.py [folder] [--limit SECONDS]    on a machine with a GPU; writes probe_cost_gpu.json
python3 benchmarks/probe_cost_gpu.py [folder] --tiny               small shapes, also without a GPU: whether it runs

    seconds = sum_i c_i f_i     for a token and a layer, fitted to FITTED; HELD_OUT and the large models are predicted
    products     2 (2 D² + 2 D² h_k / h + 3 D I + D V / L)     half-precision operations; V words, L layers
    moments      2 (3 · 0.56 + 2) D²                           float32 operations of second moments
    merging      8 (3 · 0.56 + 2) D² / tokens of a batch       bytes of their float64 sums
    pairs        2 · 2 n D                                     of logits and values
    bytes        4 D                                           of a vector of the residual stream
    calls        1 / tokens of a batch                         fixed time of an event
    replicates   201 h / n                                     sums over a document in 200 bootstrap samples

All predictions, models of Llama's form with random weights in bfloat16, wall time of one GPU. The stages come in the
order of their importance, and the file is written again and again: what the limit cuts off is missing at its end. A
stage that raises does not end the others.
"""

import argparse
import json
import math
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gradlogz.engine.work_folder import WorkFolder
from gradlogz.probing.corpus.batching import Batch
from gradlogz.probing.inside.discovery import discover
from gradlogz.probing.measurement import Measurement
from gradlogz.probing.passes.batch_statistics import statistics_of
from gradlogz.probing.passes.memory_limits import bundles_of, part_bytes
from gradlogz.probing.passes.placement import placed
from gradlogz.probing.prediction import Prediction
from gradlogz.probing.run_probe import chosen, evaluate, measure
from gradlogz.probing.statistics import group_of, hash_of
from probe_cost import fitted, predicted

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
REPEATS = 2
GIB = 2**30


class Shape(NamedTuple):
    """Width, heads, key heads, width of the feed-forward map, layers; rows and tokens of a batch; words."""

    D: int
    h: int
    h_k: int
    wide: int
    layers: int
    rows: int
    n: int
    words: int = 512

    def features(self) -> dict[str, float]:
        """Counts for a token and a layer."""
        D, n, batch = self.D, self.n, self.rows * self.n
        matrices = 2 * D * D + 2 * D * D * self.h_k / self.h + 3 * D * self.wide + D * self.words / self.layers
        moments = (3 * 0.56 + 2) * D * D
        return {
            "products": 2 * matrices,
            "moments": 2 * moments,
            "merging": 8 * moments / batch,
            "pairs": 4.0 * n * D,
            "bytes": 4.0 * D,
            "calls": 1.0 / batch,
            "replicates": 201.0 * self.h / n,
        }


FITTED = [
    Shape(512, 8, 2, 1408, 4, 64, 1024), Shape(512, 8, 8, 2048, 4, 8, 1024), Shape(1024, 16, 4, 2816, 4, 64, 1024),
    Shape(1024, 16, 16, 4096, 4, 32, 256), Shape(1024, 8, 8, 4096, 4, 4, 2048), Shape(2048, 16, 8, 5632, 2, 64, 1024),
    Shape(3072, 24, 8, 8192, 2, 8, 1024), Shape(3072, 24, 8, 8192, 2, 32, 1024), Shape(4096, 32, 32, 11008, 2, 8, 1024),
]  # fmt: skip
HELD_OUT = Shape(1536, 12, 4, 4224, 4, 16, 1024)
LLAMA_1B = Shape(2048, 32, 8, 8192, 16, 64, 1024, 128256)
LLAMA_8B = Shape(4096, 32, 8, 14336, 32, 8, 1024, 128256)


def tiny(shape: Shape) -> Shape:
    """Return a shape of the same form that a CPU passes in a second."""
    heads, layers = max(1, shape.h // 8), max(1, shape.layers // 8)
    return Shape(16 * heads, heads, max(1, heads * shape.h_k // shape.h), shape.wide // 64, layers, 3, 32, 100)


def llama(shape: Shape) -> LlamaForCausalLM:
    """Return a model with random weights in bfloat16, made on the device."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=shape.D, num_attention_heads=shape.h, num_key_value_heads=shape.h_k, intermediate_size=shape.wide,
        num_hidden_layers=shape.layers, vocab_size=shape.words, max_position_embeddings=2048,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(DEVICE):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def inputs_of(shape: Shape, rows: int) -> dict[str, torch.Tensor]:
    """Return random tokens for so many rows."""
    ids = torch.randint(3, shape.words, (rows, shape.n), generator=torch.Generator().manual_seed(rows))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def batch_of(shape: Shape, number: int) -> Batch:
    """Return a batch whose rows belong to group 0."""
    keys = islice((key for i in count() if group_of(key := hash_of(f"{number} {i}")) == 0), shape.rows)
    names, starts = [f"{number} {i}" for i in range(shape.rows)], torch.zeros(shape.rows, dtype=torch.int64)
    return Batch(inputs_of(shape, shape.rows), torch.tensor(list(keys)), 0, names, starts)


class Passes(NamedTuple):
    """Passes of batches of a shape: seconds of the first, least seconds of the others, GiB beside the weights."""

    first: float
    least: float
    peak: float
    state: dict[str, Any]


def passes(model: LlamaForCausalLM, shape: Shape, predictions: list[Prediction], repeats: int = REPEATS) -> Passes:
    """Measure batches of one group, each added to the state of those before."""
    architecture = discover(model, placed(batch_of(shape, 0), model).inputs)
    state: dict[str, Any] = {}
    seconds: list[float] = []
    before = forget_peak()
    for number in range(1 + repeats):
        batch = placed(batch_of(shape, number), model)
        begun = now()
        state, _ = statistics_of(model, architecture, batch, predictions, state)
        seconds.append(now() - begun)
    return Passes(seconds[0], min(seconds[1:], default=seconds[0]), gpu_peak() - before, state)


# Stages -------------------------------------------------------------------------------------------------------------


class Stages:
    """The table, and the stages that fill it."""

    def __init__(self, file: Path, *, small: bool) -> None:
        self.file, self.begun = file, time.perf_counter()
        self.sized: Callable[[Shape], Shape] = tiny if small else lambda shape: shape
        self.tokens, self.rows = (200, 4) if small else (100_000, 64)
        self.measured: Measurement | None = None
        device = torch.cuda.get_device_name() if ON_GPU else "CPU"
        self.table: dict[str, Any] = {"benchmark": "probe_cost_gpu", "device": device, "torch": torch.__version__}
        self.table |= {"1 B": {}, "coefficients": {}, "rows": [], "8 B": [], "judging": {}, "errors": []}

    def write(self) -> None:
        self.table["seconds"] = time.perf_counter() - self.begun
        self.file.write_text(json.dumps(_rounded(self.table), indent=2) + "\n")

    def first_calls(self) -> None:
        """Compile kernels, which the times below shall not contain."""
        shape = self.sized(FITTED[0])
        self.table["seconds of first calls"] = passes(llama(shape), shape, chosen(None), 0).first

    def run_of_1b(self) -> None:
        """A run over a text without draws, which finds its batches as every run does; then large batches."""
        shape, begun = self.sized(LLAMA_1B), now()
        model = llama(shape)
        row = self.table["1 B"] = {**shape._asdict(), "seconds of building": now() - begun}
        row["GiB of weights"] = before = forget_peak()
        begun = now()
        inputs = inputs_of(shape, -(-self.tokens // shape.n))
        self.measured = measure(model, None, [inputs], tokens=None, draws=0)
        row |= {"tokens": inputs["input_ids"].numel(), "seconds": now() - begun}
        row["seconds of the pass"] = self.measured.seconds["model"]
        row |= {"GiB beside the weights": gpu_peak() - before, "host GiB": host_peak()}
        self.write()
        large = passes(model, shape, chosen(None))
        row |= {"seconds of a large batch": large.least, "GiB of a large batch": large.peak}

    def shapes(self) -> None:
        """The cost model."""
        fits, seconds = list(dict.fromkeys(map(self.sized, FITTED))), []
        rows = self.table["rows"]
        for shape in [*fits, self.sized(HELD_OUT)]:
            done = passes(llama(shape), shape, chosen(None))
            seconds.append(done.least / (shape.rows * shape.n * shape.layers))
            rows.append({**shape._asdict(), "first": done.first, "seconds": done.least, "GiB": done.peak})
            del done
            self.write()
        self.table["coefficients"] = coefficients = fitted(fits, seconds[:-1])
        for row, shape, each in zip(rows, [*fits, self.sized(HELD_OUT)], seconds, strict=True):
            row |= {"use": "fitted" if shape in fits else "held out", "microseconds": 1e6 * each}
            row["ratio"] = predicted(shape, coefficients) / each
        row, shape = self.table["1 B"], self.sized(LLAMA_1B)
        row["predicted seconds of a large batch"] = _pass_seconds(shape, coefficients)

    def parts_of_8b(self) -> None:
        """The parts of one group of documents: each bundle of predictions, small and large batches, its file."""
        shape, begun = self.sized(LLAMA_8B), now()
        model, predictions, rows = llama(shape), chosen(None), self.table["8 B"]
        rows.append({**shape._asdict(), "seconds of building": now() - begun, "GiB of weights": forget_peak()})
        architecture = discover(model, placed(batch_of(shape, 0), model).inputs)
        rows[0]["bound of the statistics, GiB"] = part_bytes(architecture, predictions) / GIB
        rows[0]["predicted seconds of a pass"] = _pass_seconds(shape, self.table["coefficients"])
        for repeats, n in ((2, shape.rows), (0, self.rows)):
            for bundle in reversed(bundles_of(architecture, predictions)):
                done = passes(model, shape._replace(rows=n), bundle, repeats)
                row = {"rows": n, "predictions": len(bundle), "seconds": done.least}
                rows.append(row | {"GiB beside the weights": done.peak, "host GiB": host_peak()})
                self.write()
                if repeats:
                    rows[-1] |= _written(done.state)
                del done

    def judging(self) -> None:
        """Seconds of each prediction's judgement of the run of 1 B weights."""
        assert self.measured is not None
        names, before = [p.name for p in chosen(None)], forget_peak()
        seconds, last = self.table["judging"], now()

        def show(done: int, _: int) -> None:
            nonlocal last
            if done:
                seconds[names[done - 1]] = now() - last
            last = now()

        findings = evaluate(self.measured, progress=show)
        seconds["GiB beside the statistics"] = gpu_peak() - before
        self.table["failed"] = [claim.remarks for claim in findings.claims if claim.verdict == "failed"]


def _pass_seconds(shape: Shape, coefficients: dict[str, float]) -> float:
    return predicted(shape, coefficients) * shape.rows * shape.n * shape.layers if coefficients else math.nan


def _written(state: dict[str, Any]) -> dict[str, float]:
    """Write a state as parts do; seconds, size of the file, memory."""
    with tempfile.TemporaryDirectory() as folder:
        place = WorkFolder("probe", Path(folder), {})
        forget_peak()
        with place.opened():
            begun = now()
            size = place.write("part", state).stat().st_size
            return {"seconds of writing": now() - begun, "GiB of the file": size / GIB, "host GiB then": host_peak()}


# Clock and memory ---------------------------------------------------------------------------------------------------


def now() -> float:
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def gpu_peak() -> float:
    return torch.cuda.max_memory_allocated() / GIB if ON_GPU else 0.0


def host_peak() -> float:
    """Return the most memory of this process on the host since `forget_peak`, in GiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**20


def forget_peak() -> float:
    """Let both peaks begin at the present memory; return that of the GPU in GiB."""
    with suppress(OSError):  # where it is forbidden, the peak of the host is that of the whole process
        Path("/proc/self/clear_refs").write_text("5")
    if not ON_GPU:
        return 0.0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated() / GIB


class LimitError(BaseException):
    """The end of the time; no `except Exception` catches it."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Context that ends silently after so many seconds."""

    def end(*_: object) -> None:
        raise LimitError

    signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    except LimitError:
        print("limit reached", flush=True)
    finally:
        signal.alarm(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", default=Path(__file__).parent / "results", type=Path)
    parser.add_argument("--limit", type=int, default=140)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    stages = Stages(options.folder / "probe_cost_gpu.json", small=options.tiny)
    with limited(options.limit):
        for stage in (stages.first_calls, stages.run_of_1b, stages.shapes, stages.parts_of_8b, stages.judging):
            try:
                stage()
            except Exception:
                stages.table["errors"].append(traceback.format_exc())
            stages.write()
            print(json.dumps(_rounded(stages.table)), flush=True)
    stages.write()


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: each if name == "coefficients" else _rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
