"""Cost of a probe of large models on a GPU: a model of 1 B weights, a cost model, and the memory of 8 B weights.

python3 benchmarks/probe_cost_gpu.py [folder] --warm               compile the kernels, in a minute; measures nothing
python3 benchmarks/probe_cost_gpu.py [folder] [--limit SECONDS]    on a machine with a GPU; writes probe_cost_gpu.json
python3 benchmarks/probe_cost_gpu.py [folder] --stages shapes ...  these stages, added to the file of an earlier run
python3 benchmarks/probe_cost_gpu.py [folder] --tiny               small shapes, also without a GPU: whether it runs

    seconds = max(sum_i c_i f_i, host / tokens of a batch)     for a token and a layer
    products     2 (2 D² + 2 D² h_k / h + 3 D I + D V / L)     half-precision operations; V words, L layers
    moments      2 (3 · 0.56 + 2) D² + D I / 4                 float32 operations: second moments, sampled hidden units
    pairs        2 · 2 n D                                     of logits and values
    elements     n h                                           logits, on which elementwise functions act
    bytes        4 D                                           of a vector of the residual stream
    once         1 / L                                         time of a token outside of the layers
    replicates   201 h / n                                     sums over a document in 200 bootstrap samples
    host         seconds in which the host calls the kernels of a layer: those of SMALL, whose batch is small

Fitted to those of FITTED that are not bound by the host; HELD_OUT and the large models are predicted.

All predictions, models of Llama's form with random weights in bfloat16, wall time of one GPU. The stages come in the
order of their importance, and the file is written after every row: what the limit cuts off is missing at its end, and
`--stages` continues there. A stage that raises does not end the others.
"""

import argparse
import gc
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

from gradlogz._output_files import write
from gradlogz.engine.work_folder import WorkFolder
from gradlogz.probing.corpus.batching import Batch
from gradlogz.probing.inside.discovery import discover
from gradlogz.probing.measurement import Measurement
from gradlogz.probing.passes.batch_statistics import statistics_of
from gradlogz.probing.passes.memory_limits import bundles_of, part_bytes
from gradlogz.probing.passes.placement import placed
from gradlogz.probing.prediction import Prediction
from gradlogz.probing.run_probe import DRAWS, chosen, evaluate, measure
from gradlogz.probing.statistics import group_of, hash_of
from probe_cost import fitted, predicted

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
REPEATS = 2
BOUND_BY_HOST = 1.3  # of the seconds of the host for a layer: shapes that take less are not fitted
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
        D, n = self.D, self.n
        matrices = 2 * D * D + 2 * D * D * self.h_k / self.h + 3 * D * self.wide + D * self.words / self.layers
        return {
            "products": 2 * matrices,
            "moments": 2 * (3 * 0.56 + 2) * D * D + D * self.wide / 4,
            "pairs": 4.0 * n * D,
            "elements": float(n * self.h),
            "bytes": 4.0 * D,
            "once": 1.0 / self.layers,
            "replicates": 201.0 * self.h / n,
        }

    @property
    def tokens(self) -> int:
        """Tokens of a batch."""
        return self.rows * self.n


FITTED = [
    Shape(1024, 16, 4, 2816, 4, 64, 1024), Shape(2048, 16, 8, 5632, 2, 64, 1024),
    Shape(4096, 32, 32, 11008, 2, 64, 1024), Shape(1024, 16, 16, 4096, 2, 256, 256),
    Shape(1024, 8, 8, 4096, 4, 32, 2048), Shape(3072, 24, 8, 8192, 2, 64, 1024),
    Shape(2048, 32, 32, 8192, 4, 32, 1024), Shape(1536, 24, 24, 4096, 4, 128, 512),
    Shape(512, 8, 2, 1408, 4, 64, 1024), Shape(3072, 24, 24, 8192, 2, 32, 1024),
]  # fmt: skip
SMALL = Shape(1024, 8, 8, 4096, 4, 8, 1024)
HELD_OUT = [Shape(1536, 12, 4, 4224, 4, 64, 1024), Shape(2560, 20, 4, 6912, 2, 64, 1024)]
LLAMA_1B = Shape(2048, 32, 8, 8192, 16, 64, 1024, 128256)
LLAMA_8B = Shape(4096, 32, 8, 14336, 32, 8, 1024, 128256)


def tiny(shape: Shape) -> Shape:
    """Return a shape of the same form that a CPU passes in a second."""
    heads, layers = max(1, shape.h // 8), max(1, shape.layers // 8)
    return Shape(16 * heads, heads, max(1, heads * shape.h_k // shape.h), shape.wide // 64, layers, 3, 32, 100)


def llama(shape: Shape) -> LlamaForCausalLM:
    """Return a model with random weights in bfloat16, made on the device."""
    gc.collect()  # earlier models are part of reference cycles
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

    def __init__(self, file: Path, *, small: bool, continues: bool) -> None:
        self.file, self.begun = file, time.perf_counter()
        self.sized: Callable[[Shape], Shape] = tiny if small else lambda shape: shape
        self.tokens, self.rows = (200, 4) if small else (100_000, 64)
        self.host_share = 0.0 if small else BOUND_BY_HOST  # all small shapes are fitted, to show that this runs
        self.large: tuple[LlamaForCausalLM, str] | None = None
        self.measured: Measurement | None = None  # of 1 B weights
        device = torch.cuda.get_device_name() if ON_GPU else "CPU"
        self.table: dict[str, Any] = {"benchmark": "probe_cost_gpu", "device": device, "torch": torch.__version__}
        self.table |= {"1 B": {}, "coefficients": {}, "host": None, "rows": []}
        self.table |= {"8 B": {}, "judging": {}, "seconds": {}, "errors": []}
        if continues and file.is_file():
            self.table = json.loads(file.read_text())

    def write(self, name: str, row: Any) -> None:
        """Write the file, and print what is new."""
        write(self.file, json.dumps(_rounded(self.table), indent=2) + "\n")  # whole, also if the limit comes now
        print(f"{time.perf_counter() - self.begun:6.1f} s  {name}: {json.dumps(_rounded(row))}", flush=True)

    def first_calls(self) -> None:
        """Compile kernels, which the times below shall not contain."""
        for shape in (*map(self.sized, FITTED[:3]), self.sized(LLAMA_1B)._replace(layers=2)):
            few = shape._replace(rows=min(shape.rows, 8))
            self.write("first calls", passes(llama(few), few, chosen(None), 0).first)

    def run_of_1b(self) -> None:
        """A run over a text without draws, which finds its batches as every run does."""
        model, row = self._llama_1b()
        before, begun = forget_peak(), now()
        inputs = inputs_of(self.sized(LLAMA_1B), -(-self.tokens // self.sized(LLAMA_1B).n))
        self.measured = measure(model, None, [inputs], tokens=None, draws=0)
        row |= {"tokens": inputs["input_ids"].numel(), "seconds": now() - begun}
        row["seconds of the pass"] = self.measured.seconds["model"]
        row |= {"GiB beside the weights": gpu_peak() - before, "host GiB": host_peak()}
        self.write("1 B", row)

    def judging(self) -> None:
        """Seconds of each prediction's judgement of the run of 1 B weights."""
        if self.measured is None:
            self.run_of_1b()
        assert self.measured is not None
        names, before = [p.name for p in chosen(None)], forget_peak()
        seconds, last = self.table["judging"], now()

        def show(done: int, _: int) -> None:
            nonlocal last
            if done:
                seconds[names[done - 1]] = now() - last
                self.write(names[done - 1], seconds[names[done - 1]])
            last = now()

        findings = evaluate(self.measured, progress=show)
        seconds["GiB beside the statistics"] = gpu_peak() - before
        self.table["failed"] = [claim.remarks for claim in findings.claims if claim.verdict == "failed"]
        self.write("failed", self.table["failed"])
        self.measured = None  # its matrices leave the memory of the GPU

    def shapes(self) -> None:
        """The cost model, fitted again after every shape."""
        held_out, small, rows = list(map(self.sized, HELD_OUT)), self.sized(SMALL), self.table["rows"]
        measured = {Shape(*(row[name] for name in Shape._fields)): row["microseconds"] / 1e6 for row in rows}
        for shape in dict.fromkeys(map(self.sized, [SMALL, *FITTED[:6], HELD_OUT[0], *FITTED[6:], *HELD_OUT[1:]])):
            if shape in measured:
                continue
            done = passes(llama(shape), shape, chosen(None))
            measured[shape] = done.least / (shape.tokens * shape.layers)
            rows.append({**shape._asdict(), "first": done.first, "seconds": done.least, "GiB": done.peak})
            rows[-1]["microseconds"] = 1e6 * measured[shape]
            del done
            self.table["host"] = host = measured[small] * small.tokens
            fits = [s for s in measured if s not in held_out and measured[s] * s.tokens > self.host_share * host]
            if fits:
                self.table["coefficients"] = fitted(fits, [measured[each] for each in fits])
            for known, each in zip(rows, measured, strict=True):
                use = "held out" if each in held_out else "fitted" if each in fits else "bound by the host"
                known |= {"use": use, "ratio": self._seconds(each) / measured[each]}
            self.write("shape", rows[-1])
        for row in rows:
            if row["use"] == "held out":
                self.write("held out, predicted / measured", row["ratio"])

    def draws_of_1b(self) -> None:
        """The draws of the matched baseline, with which a run of the command line has its null values."""
        model, row = self._llama_1b()
        before = forget_peak()
        inputs = inputs_of(self.sized(LLAMA_1B), -(-self.tokens // self.sized(LLAMA_1B).n))
        measured = measure(model, None, [inputs], tokens=None, draws=DRAWS)
        row |= {"draws": DRAWS, "seconds of the draws": measured.seconds["matched"]}
        row["GiB with draws"] = gpu_peak() - before
        row["reason without draws"] = measured.facts.get("without_matched", "")
        self.write("1 B, draws", row)

    def large_batch_of_1b(self) -> None:
        """A batch of the size that a GPU reads, which the cost model predicts."""
        model, row = self._llama_1b()
        large = passes(model, self.sized(LLAMA_1B), chosen(None), 1)
        row |= {"seconds of a large batch": large.least, "GiB of a large batch": large.peak}
        row["ratio"] = self._pass_seconds(self.sized(LLAMA_1B)) / large.least
        self.write("1 B, large batch", row)

    def memory_of_8b(self) -> None:
        """The parts of one group of documents in small batches: the memory beside the weights."""
        model, row = self._llama_8b()
        row["small batches"] = self._bundles(model, self.sized(LLAMA_8B), 1)

    def large_batches_of_8b(self) -> None:
        """Measure the parts in batches of the size that a GPU reads."""
        model, row = self._llama_8b()
        shape = self.sized(LLAMA_8B)._replace(rows=self.rows)
        row["large batches"] = bundles = self._bundles(model, shape, 0)
        products = self.table["coefficients"].get("products", math.nan) * shape.features()["products"]
        again = (len(bundles) - 1) * products * shape.tokens * shape.layers  # the model reads a batch for each bundle
        row["predicted seconds of a large batch"] = self._pass_seconds(shape) + again
        row["ratio"] = row["predicted seconds of a large batch"] / sum(bundle["seconds"] for bundle in bundles)
        self.write("8 B, predicted / measured", row["ratio"])

    def file_of_8b(self) -> None:
        """The file of a part with the largest matrices."""
        model, row = self._llama_8b()
        shape = self.sized(LLAMA_8B)
        architecture = discover(model, placed(batch_of(shape, 0), model).inputs)
        row["file"] = _written(passes(model, shape, bundles_of(architecture, chosen(None))[-1], 0).state)
        self.write("8 B, file", row["file"])

    def _llama_1b(self) -> tuple[LlamaForCausalLM, dict[str, Any]]:
        return self._model("1 B", self.sized(LLAMA_1B))

    def _llama_8b(self) -> tuple[LlamaForCausalLM, dict[str, Any]]:
        model, row = self._model("8 B", self.sized(LLAMA_8B))
        if "bound of the statistics, GiB" not in row:
            architecture = discover(model, placed(batch_of(self.sized(LLAMA_8B), 0), model).inputs)
            row["bound of the statistics, GiB"] = part_bytes(architecture, chosen(None)) / GIB
            self.write("8 B", row)
        return model, row

    def _model(self, name: str, shape: Shape) -> tuple[LlamaForCausalLM, dict[str, Any]]:
        """Return the large model of this name, of which one is in memory, and its row."""
        if self.large is None or self.large[1] != name:
            self.large = None
            before, begun = forget_peak(), now()
            self.large = llama(shape), name
            self.table[name] |= {**shape._asdict(), "seconds of building": now() - begun}
            self.table[name]["GiB of weights"] = forget_peak() - before
        return self.large[0], self.table[name]

    def _seconds(self, shape: Shape) -> float:
        """Return the predicted seconds for a token and a layer."""
        coefficients: dict[str, float] = self.table["coefficients"]
        if not coefficients:
            return math.nan
        return max(self.table["host"] / shape.tokens, predicted(shape, coefficients))

    def _pass_seconds(self, shape: Shape) -> float:
        """Return the predicted seconds of a batch."""
        return self._seconds(shape) * shape.tokens * shape.layers

    def _bundles(self, model: LlamaForCausalLM, shape: Shape, repeats: int) -> list[dict[str, float]]:
        """Measure a batch with each bundle of predictions, that with the largest matrices first."""
        architecture = discover(model, placed(batch_of(shape, 0), model).inputs)
        rows = []
        for bundle in reversed(bundles_of(architecture, chosen(None))):
            done = passes(model, shape, bundle, repeats)
            row = {"tokens": shape.tokens, "predictions": len(bundle), "first": done.first, "seconds": done.least}
            rows.append(row | {"GiB beside the weights": done.peak, "host GiB": host_peak()})
            self.write(f"8 B, batches of {shape.tokens} tokens", rows[-1])
            del done
        return rows


STAGES = (
    "first_calls", "run_of_1b", "judging", "shapes", "draws_of_1b", "large_batch_of_1b", "memory_of_8b",
    "large_batches_of_8b", "file_of_8b",
)  # fmt: skip


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
    parser.add_argument("--warm", dest="stages", action="store_const", const=("first_calls",), default=STAGES)
    parser.add_argument("--stages", nargs="*", choices=STAGES, default=STAGES)
    options = parser.parse_args()
    gc.freeze()  # so that collecting models does not search what was imported
    options.folder.mkdir(parents=True, exist_ok=True)
    file = options.folder / "probe_cost_gpu.json"
    stages = Stages(file, small=options.tiny, continues=options.stages != STAGES)
    with limited(options.limit):
        for name in options.stages:
            begun = now()
            try:
                getattr(stages, name)()
            except Exception:
                stages.table["errors"].append(traceback.format_exc())
                print(stages.table["errors"][-1], flush=True)
            stages.table["seconds"][name] = now() - begun
    stages.write("end", stages.table["seconds"])


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: each if name == "coefficients" else _rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    return value


if __name__ == "__main__":
    main()
