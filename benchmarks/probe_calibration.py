"""Operating characteristics of the probe: how often random models are supported or refuted, and planted effects found.

python benchmarks/probe_calibration.py [--models 100] [--planted 25] [--jobs 2]    or    make probe-calibration

    random    never trained, in four families, with weights of standard deviation .02, .125 and .25 in turn
    planted   GPT-2s whose OV matrices have a cosine `strength` with the transposed QK matrices (tests/support/planted)

Every row of a tested claim (a head or a layer) counts; so does the verdict on the model. The text is random documents
of topics with Zipf-distributed words. Writes results/probe_calibration.json; benchmarks/tables.py makes the table of
docs/probe.md.
"""

import argparse
import json
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from gradlogz import probe  # noqa: E402
from support.planted.matrices import HEADS, VOCABULARY, WIDTH, gpt2, tied  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "probe_calibration.json"
CLAIMS = "ascent", "tie", "qk_geometry", "gaussian_measure", "expansion", "pair_energy", "entropy", "hopfield"
SCALES = 0.02, 0.125, 0.25  # of initialisation; the first is the default of transformers
STRENGTHS = -1.0, -0.3, -0.1, 0.0, 0.1, 0.2, 0.3, 1.0
DOCUMENTS, LENGTH, TOPICS, DRAWS = 64, 40, 8, 20


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


def planted_model(strength: float, seed: int) -> torch.nn.Module:
    def heads(generator: np.random.Generator, gain: np.ndarray) -> list[np.ndarray]:
        Wq, Wk, Wv, Wo = tied(generator, gain, abs(strength))
        return [Wq, Wk, Wv, Wo if strength >= 0 else -Wo]

    torch.manual_seed(seed)
    return gpt2(seed, heads)


def text(seed: int) -> list[dict[str, torch.Tensor]]:
    """Return one batch of documents, each of words of one topic and of frequent words."""
    generator = np.random.default_rng(seed)
    words = np.arange(3, VOCABULARY)
    frequencies = 1.0 / np.arange(1, len(words) + 1)
    topic = generator.integers(TOPICS, size=len(words))
    rows = []
    for _ in range(DOCUMENTS):
        weights = frequencies * np.where(topic == generator.integers(TOPICS), 8.0, 1.0)
        rows.append(generator.choice(words, LENGTH, p=weights / weights.sum()))
    ids = torch.tensor(np.array(rows))
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}]


def judged(task: tuple[str, str | float, int]) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return the verdicts on the rows and on the model, by claim."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    kind, value, seed = task
    model = random_model(str(value), seed) if kind == "random" else planted_model(float(value), seed)
    findings = probe(model, None, text(seed), predictions=list(CLAIMS), draws=DRAWS, seed=seed)
    claims = {}
    for claim in findings.claims:
        if claim.prediction in CLAIMS:
            rows = [
                r.verdict for r in findings.rows if r.prediction == claim.prediction and r.quantity == claim.quantity
            ]
            claims[claim.prediction] = {"model": claim.verdict, "rows": Counter(v for v in rows if v)}
    return f"{kind}: {value}", claims


def main(models: int, planted: int, jobs: int) -> None:
    tasks: list[tuple[str, str | float, int]] = [("random", f, seed) for seed in range(models) for f in FAMILIES]
    tasks += [("planted", strength, seed) for seed in range(planted) for strength in STRENGTHS]
    table: dict[str, dict[str, dict[str, Counter[str]]]] = {}
    begun = time.perf_counter()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for done, (setting, claims) in enumerate(pool.map(judged, tasks), 1):
            for claim, verdicts in claims.items():
                counts = table.setdefault(setting, {}).setdefault(claim, {"models": Counter(), "rows": Counter()})
                counts["models"][verdicts["model"]] += 1
                counts["rows"] += verdicts["rows"]
            if done % 20 == 0:
                print(f"{done} of {len(tasks)} models, {time.perf_counter() - begun:.0f} s", flush=True)
    settings = {"documents": DOCUMENTS, "length": LENGTH, "draws": DRAWS, "scales": SCALES, "claims": CLAIMS}
    record = {"benchmark": "probe_calibration", "random models": models, "planted models": planted, **settings}
    RESULTS.write_text(json.dumps({**record, "counts": table}, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=100, help="random models of each family")
    parser.add_argument("--planted", type=int, default=25, help="planted models of each strength")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    arguments = parser.parse_args()
    main(arguments.models, arguments.planted, arguments.jobs)
