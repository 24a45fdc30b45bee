"""Operating characteristics of the probe: how often random models are supported or refuted, and planted effects found.

python benchmarks/probe_calibration.py [--models 100] [--planted 20] [--jobs 2]    or    make probe-calibration
python benchmarks/probe_calibration.py --only tie,ascent                           other claims keep their counts
python benchmarks/probe_calibration.py --models 0                                  random models keep their counts

    random    never trained, in four families, with weights of standard deviation .02, .125 and .25 in turn
    planted   models with one effect of known size (tests/support/planted), for each tested claim:
              tied       GPT-2s whose OV matrices have this cosine with the transposed QK matrices, of two widths
              following  GPT-2s with W_k = strength W_q + noise, both on the principal axes of the tokens and scaled
                         with their deviations: QK matrices become positive and follow the covariance of the tokens
              alike      the same without relation to the tokens: equal matrices are positive, and no evidence
              matching   alike with smaller logits: heads attend to tokens like their own
              axes       W_q and W_k independent, both on the principal axes of the tokens, with this scale: no heads
                         are selective beyond the variance of their logits
              heavy      keys of Student's t distribution with 1 / strength degrees of freedom; Gaussian at 0
              attending  ALBERTs of one head that satisfy the theorem on the pair energy, with this step size
              unsure     models whose log variance of attended values raises the loss of the next token by this much
              maps       GPT-2s whose feed-forward output vectors have this cosine with the reading vectors
              linked     one layer whose logits have this correlation with those of the linear link of own keys

Every row of a tested claim (a head or a layer) counts; so does the verdict on the model. The text is random documents
of topics with Zipf-distributed words. Writes results/probe_calibration.json; benchmarks/tables.py makes the tables of
docs/probe.md, and tests compare the declared power of each claim with it.
"""

import argparse
import gzip
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers as tf

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from gradlogz import probe  # noqa: E402
from gradlogz.probing.predictions import known_predictions  # noqa: E402
from gradlogz.probing.runs.judgement import graded  # noqa: E402
from gradlogz.probing.runs.records import Finding  # noqa: E402
from support.planted import sublayers  # noqa: E402
from support.planted.energies import attending  # noqa: E402
from support.planted.links import LinkedQueries  # noqa: E402
from support.planted.matrices import (  # noqa: E402
    HEADS,
    VOCABULARY,
    WIDTH,
    alike,
    gpt2,
    matching,
    on_principal_axes,
    on_token_axes,
    tied,
)
from support.planted.rows import DrawnKeys, SureModel  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "probe_calibration.json"
ROWS = ROOT / "runs" / "probe_calibration.jsonl.gz"
STORED = (
    "layer", "call", "head", "quantity", "value", "low", "high", "null", "null_low", "null_high", "tokens", "freedom",
    "null_freedom",
)  # fmt: skip
PREDICTIONS = {p.name: p for p in known_predictions()}
CLAIMS = (
    "ascent", "tie", "qk_geometry", "link", "gaussian_measure", "expansion", "feed_forward_hopfield",
    "pair_energy", "entropy", "dropped_covariance",
)  # fmt: skip
SCALES = 0.02, 0.125, 0.25  # of initialisation; the first is the default of transformers
DOCUMENTS, LENGTH, TOPICS, DRAWS = 64, 40, 8, 20
WIDE = 256
FIRST = 1000  # the first seed: bounds and planted settings were chosen with seeds below 1000
WORDS, DISTINCT = 20_000, 4000  # distinct keys, for models whose keys are drawn one by one
UNRELATED = (
    "ascent", "tie", "qk_geometry", "link", "expansion", "feed_forward_hopfield", "entropy", "dropped_covariance",
)  # fmt: skip
ANY = "any of these"  # random models should have no verdict on any of UNRELATED
# Heads that are counted beside a claim: above and below the rotation null; compatible with a claim that is only refuted
BESIDE = {
    "link": ("link, rotation null", "above_rotations", "below_rotations"),
    "qk_geometry": ("qk_geometry, unrelated", "unrelated", ""),
    "gaussian_measure": ("gaussian_measure, compatible", "compatible", ""),
}


def random_model(family: str, seed: int) -> torch.nn.Module:
    """Return an untrained model of two layers."""
    torch.manual_seed(seed)
    scale = SCALES[seed % len(SCALES)]
    sizes = {"vocab_size": VOCABULARY, "initializer_range": scale}
    bert = {
        "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 4 * WIDTH,
        "max_position_embeddings": 64,
    }  # fmt: skip
    if family == "pre-norm (GPT-2)":
        config = tf.GPT2Config(n_embd=WIDTH, n_layer=2, n_head=HEADS, n_positions=64, **sizes)
        return tf.GPT2LMHeadModel(config).eval()
    if family == "post-norm (BERT)":
        return tf.BertModel(tf.BertConfig(**bert, **sizes)).eval()
    if family == "RoPE (Llama)":
        return tf.LlamaForCausalLM(tf.LlamaConfig(**bert, num_key_value_heads=2, **sizes)).eval()
    return tf.AlbertModel(tf.AlbertConfig(embedding_size=WIDTH, **bert, **sizes)).eval()


FAMILIES = "pre-norm (GPT-2)", "post-norm (BERT)", "RoPE (Llama)", "tied depth (ALBERT)"


def tied_model(
    strength: float, seed: int, build: Callable[..., torch.nn.Module] = gpt2, **sizes: int
) -> torch.nn.Module:
    def heads(generator: np.random.Generator, gain: np.ndarray) -> list[np.ndarray]:
        Wq, Wk, Wv, Wo = tied(generator, gain, abs(strength))
        return [Wq, Wk, Wv, Wo if strength >= 0 else -Wo]

    return build(seed, heads, **sizes)


def alike_model(strength: float, seed: int) -> torch.nn.Module:
    return gpt2(seed, lambda generator, gain: alike(generator, gain, strength), width=WIDE)


def matching_model(strength: float, seed: int) -> torch.nn.Module:
    return gpt2(seed, lambda generator, gain: matching(generator, gain, strength), width=WIDE)


def heavy_model(strength: float, seed: int) -> torch.nn.Module:
    def draw(source: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        if not strength:
            return source.standard_normal(shape)
        return source.standard_t(1 / strength, shape) * np.sqrt(1 - 2 * strength)  # of variance 1

    return DrawnKeys(draw, 32, 2.0, words=WORDS, seed=seed)


class Task(NamedTuple):
    """A model to measure: random or planted, its family or effect, the strength of the effect, a seed, and claims."""

    kind: str
    name: str
    strength: float
    seed: int
    claims: tuple[str, ...]


class Planted(NamedTuple):
    """Models with one effect, by strength; its claims; documents, their length and the number of distinct words."""

    build: Callable[[float, int], torch.nn.Module]
    claims: tuple[str, ...]
    strengths: tuple[float, ...]
    documents: int = DOCUMENTS
    length: int = LENGTH
    words: int = VOCABULARY


UPDATES = "tie", "ascent", "expansion"
COSINES = -1.0, -0.3, -0.1, 0.0, 0.1, 0.2, 0.3, 1.0
PLANTED = {
    f"tied, width {WIDTH}": Planted(tied_model, UPDATES, COSINES),
    f"tied, width {WIDE}": Planted(
        lambda strength, seed: tied_model(strength, seed, width=WIDE),
        UPDATES,
        (-1.0, -0.5, -0.1, 0.0, 0.05, 0.1, 0.2, 0.5, 1.0),
    ),
    "following": Planted(
        lambda strength, seed: on_token_axes(seed, strength, 0.25),
        ("qk_geometry",),
        (0.0, 0.5, 0.75, 0.85, 1.0),
        128,
        60,
    ),
    "alike": Planted(alike_model, ("qk_geometry",), (-1.0, -0.25, -0.1, -0.05, 0.0, 0.5, 1.0), 128, 60),
    "matching": Planted(matching_model, ("entropy",), (0.0, 0.25, 0.5, 0.75, 1.0), 128, 60),
    "axes": Planted(lambda scale, seed: on_principal_axes(seed, scale), ("entropy",), (0.5, 1.0, 2.0, 4.0), 64, 48),
    "heavy": Planted(heavy_model, ("gaussian_measure",), (0.0, 0.1, 0.15, 0.2, 0.3), 128, 256, WORDS),
    "attending": Planted(
        lambda step, seed: attending(step, seed=seed), ("pair_energy",), (0.01, 0.02, 0.03, 0.1), words=96
    ),
    "unsure": Planted(SureModel, ("dropped_covariance",), (-1.0, -0.5, 0.0, 0.2, 0.5, 0.7, 1.0), 128, words=96),
    "maps": Planted(sublayers.gpt2, ("feed_forward_hopfield",), (*COSINES, -0.2)),
    "linked": Planted(
        lambda strength, seed: LinkedQueries(strength, words=DISTINCT, seed=seed),
        ("link",),
        (-1.0, -0.3, -0.2, -0.1, -0.05, 0.0, 0.1, 0.3, 0.6, 0.8, 1.0),
        256,
        128,
        DISTINCT,
    ),
}


EVERY = tuple(dict.fromkeys((*CLAIMS, *(claim for each in PLANTED.values() for claim in each.claims))))


def text(
    seed: int, documents: int = DOCUMENTS, length: int = LENGTH, words: int = VOCABULARY
) -> list[dict[str, torch.Tensor]]:
    """Return one batch of documents, each of words of one topic and of frequent words; of any words if all differ."""
    generator = np.random.default_rng(seed)
    known = np.arange(3, words)
    frequencies = 1.0 / np.arange(1, len(known) + 1)
    topic = generator.integers(TOPICS, size=len(known))
    rows = []
    for _ in range(documents):
        weights = frequencies * np.where(topic == generator.integers(TOPICS), 8.0, 1.0)
        rows.append(generator.choice(known, length, p=None if words >= DISTINCT else weights / weights.sum()))
    ids = torch.tensor(np.array(rows))
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}]


def measured(task: Task) -> tuple[Task, dict[str, list[list[Any]]]]:
    """Return the rows of each claim for one model: values, intervals and null values, without verdicts."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    tf.logging.set_verbosity_error()
    torch.manual_seed(task.seed)
    if task.kind == "random":
        model, inputs = random_model(task.name, task.seed), text(task.seed)
    else:
        planted = PLANTED[task.name]
        model = planted.build(task.strength, task.seed).eval()
        inputs = text(task.seed, planted.documents, planted.length, planted.words)
    findings = probe(model, None, inputs, predictions=[*task.claims], draws=DRAWS, seed=task.seed)
    failed = [claim for claim in findings.claims if claim.verdict == "failed"]
    if failed:
        raise RuntimeError(f"{task}: {failed}")
    rows: dict[str, list[list[Any]]] = {claim: [] for claim in task.claims}
    for row in findings.rows:
        if row.prediction in rows:
            rows[row.prediction].append([getattr(row, name) for name in STORED])
    return task, rows


def judged(claim: str, rows: list[list[Any]]) -> dict[str, dict[str, Any]]:
    """Return the verdicts on the rows of a claim and on the model, by today's rule, and the values of the rows."""
    prediction = PREDICTIONS[claim]
    findings = [Finding("", claim, **dict(zip(STORED, row, strict=True))) for row in rows]
    judgement = graded(prediction.verdict(findings), prediction.declaration.kind)
    of_claim = [f for f in judgement.findings if f.quantity == judgement.quantity and f.verdict]
    verdicts = Counter(f.verdict for f in of_claim)
    decided = sum(number for verdict, number in verdicts.items() if verdict != "not applicable")
    verdicts["inconclusive"] += max(judgement.judged - decided, 0)  # layers that count without a value
    counted = {"model": judgement.verdict, "rows": verdicts, "values": [f.value for f in of_claim]}
    results = {claim: counted}
    details = {detail.key: detail.count or 0 for detail in judgement.details}
    if claim in BESIDE and details:
        name, *keys = BESIDE[claim]
        one, other = (details.get(key, 0) for key in keys)
        counts = {"supported": one, "refuted": other, "inconclusive": judgement.judged - one - other}
        results[name] = {"model": "inconclusive", "rows": Counter(counts), "values": []}
    return results


def tasks_of(models: int, planted: int, wanted: tuple[str, ...]) -> list[Task]:
    """Return all models to measure, those of each seed together."""
    on_random = tuple(claim for claim in wanted if claim in CLAIMS)
    tasks = [
        Task("random", f, 0.0, seed, on_random) for seed in range(FIRST, FIRST + models) for f in FAMILIES if on_random
    ]
    tasks += [
        Task("planted", name, strength, seed, claims)
        for seed in range(FIRST, FIRST + planted)
        for name, each in PLANTED.items()
        for strength in each.strengths
        if (claims := tuple(claim for claim in each.claims if claim in wanted))
    ]
    return tasks


def measure(tasks: list[Task], jobs: int, path: Path) -> None:
    """Measure the models that the file lacks; their rows are appended to it, one line for each model."""
    done = {task for task, _ in stored(path)}
    tasks = [task for task in tasks if task not in done]
    path.parent.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for number, (task, rows) in enumerate(pool.map(measured, tasks), 1):
            with gzip.open(path, "at") as file:  # a member of its own: complete, or cut off at the end
                file.write(json.dumps({"task": task, "rows": rows}) + "\n")
            if number % 20 == 0:
                print(f"{number} of {len(tasks)} models, {time.perf_counter() - begun:.0f} s", flush=True)


def stored(path: Path) -> Iterator[tuple[Task, dict[str, list[list[Any]]]]]:
    """Yield the models of the file and their rows, up to one that was not written whole."""
    if not path.exists():
        return
    with gzip.open(path, "rt") as file, suppress(EOFError, json.JSONDecodeError):
        for line in file:
            record = json.loads(line)
            *about, claims = record["task"]
            yield Task(*about, tuple(claims)), record["rows"]


def table_of(tasks: list[Task], path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Return counts of verdicts by setting and claim, and the median values of the rows."""
    measured_rows: dict[Task, dict[str, list[list[Any]]]] = {task._replace(claims=()): {} for task in tasks}
    for task, rows in stored(path):  # the last measurement of a claim counts
        measured_rows.get(task._replace(claims=()), {}).update(rows)
    table: dict[str, dict[str, dict[str, Any]]] = {}
    for task, rows in measured_rows.items():
        setting = f"{task.kind}: {task.name}" + (f": {task.strength:g}" if task.kind == "planted" else "")
        results = {claim: each for name in rows for claim, each in judged(name, rows[name]).items()}
        if task.kind == "random" and {*UNRELATED} <= {*rows}:
            verdicts = [v for name in UNRELATED if (v := results[name]["model"]) in ("supported", "refuted")]
            results[ANY] = {"model": (verdicts or ["inconclusive"])[0], "rows": Counter(), "values": []}
        for claim, result in results.items():
            empty = {"models": Counter(), "rows": Counter(), "values": []}
            counts = table.setdefault(setting, {}).setdefault(claim, empty)
            counts["models"][result["model"]] += 1
            counts["rows"] += result["rows"]
            counts["values"] += result["values"]
    for counts in (each for claims in table.values() for each in claims.values()):
        values = [value for value in counts.pop("values") if np.isfinite(value)]
        counts["median value"] = round(float(np.median(values)), 4) if values else None
    return table


def main(models: int, planted: int, jobs: int, wanted: tuple[str, ...], path: Path) -> None:
    tasks = tasks_of(models, planted, wanted)
    measure(tasks, jobs, path)
    table = table_of(tasks, path)
    settings = {"documents": DOCUMENTS, "length": LENGTH, "draws": DRAWS, "scales": SCALES, "claims": CLAIMS}
    record = {"benchmark": "probe_calibration", **settings}
    if wanted != EVERY or not models or not planted:  # the rest keeps its counts
        known = json.loads(RESULTS.read_text())
        table = {n: known["counts"].get(n, {}) | table.get(n, {}) for n in {**known["counts"], **table}}
    RESULTS.write_text(json.dumps({**record, "counts": table}, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=100, help="random models of each family")
    parser.add_argument("--planted", type=int, default=20, help="planted models of each strength")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--only", default=",".join(EVERY), help="claims, separated by commas")
    parser.add_argument("--rows", type=Path, default=ROWS, help="file of the measured rows, which is continued")
    arguments = parser.parse_args()
    main(arguments.models, arguments.planted, arguments.jobs, tuple(arguments.only.split(",")), arguments.rows)
