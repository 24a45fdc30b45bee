"""Coverage of the confidence intervals of the probe: how often those of samples contain the value of the whole corpus.

python benchmarks/probe_coverage.py [tokens samples] ...     5000 12 by default; writes JSON after each sample

The corpus is the default text, read as a whole by all-MiniLM-L6-v2; a sample reads some of its windows. Each sample has
one interval for each head or layer. Null values are left out, because coverage is about values.
"""

import json
import math
import platform
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from gradlogz.probing.corpus.readers import corpus_of
from gradlogz.probing.inside.loading import load
from gradlogz.probing.predictions import known_predictions
from gradlogz.probing.run_probe import evaluate, measure
from gradlogz.probing.runs.findings import Findings
from gradlogz.probing.runs.records import Finding

RESULTS = Path(__file__).parent / "results" / "probe_coverage.json"
DEFAULT = [(5000, 12)]
# Of weights alone, or of the model as a whole and slow.
LEFT_OUT = ("identity", "symmetry", "word_vectors", "gaussianity")


def findings(model: Any, tokens: int | None, seed: int) -> Findings:
    """Values of one sample, or of the whole corpus (tokens None)."""
    wanted = [p.name for p in known_predictions() if p.name not in LEFT_OUT]
    corpus = corpus_of(model.tokenizer, None)
    return evaluate(
        measure(
            model.model, model.tokenizer, corpus, tokens=tokens, seed=seed, predictions=wanted, draws=0, baseline=0.0
        )
    )


def intervals(sample: Findings) -> dict[tuple[Any, ...], Finding]:
    """Rows with an interval whose quantity is judged, or is the value of a description."""
    judged = {(row.prediction, row.quantity) for row in sample.rows if row.verdict not in ("", "not applicable")}
    return {
        (r.prediction, r.quantity, r.layer, r.call, r.head): r
        for r in sample.rows
        if (r.prediction, r.quantity) in judged and math.isfinite(r.low) and r.low < r.high
    }


def main(sizes: list[tuple[int, int]]) -> None:
    """Read the corpus, then the samples, and write what is known after each."""
    torch.set_num_threads(1)
    model = load("minilm")
    corpus = findings(model, None, 0)
    truth = {place: row.value for place, row in intervals(corpus).items()}
    (facts,) = corpus.facts.values()
    about = {name: facts[name] for name in ("tokens", "documents", "effective_documents") if name in facts}
    table: dict[str, Any] = {
        "benchmark": "probe_coverage", "python": platform.python_version(), "torch": torch.__version__,
        "model": "minilm", "corpus": about, "rows": [],
    }  # fmt: skip
    for tokens, samples in sizes:
        inside: dict[tuple[str, str], list[bool]] = defaultdict(list)
        effective = []
        for seed in range(1, samples + 1):
            sample = findings(model, tokens, seed)
            (facts,) = sample.facts.values()
            effective.append(facts.get("effective_documents"))
            for place, row in intervals(sample).items():
                if place in truth:
                    inside[place[:2]].append(row.low <= truth[place] <= row.high)
            row = {
                "tokens": tokens, "samples": seed, "effective_documents": effective,
                "covered": {" / ".join(name): [sum(each), len(each)] for name, each in inside.items()},
            }  # fmt: skip
            table["rows"] = [r for r in table["rows"] if r["tokens"] != tokens] + [row]
            RESULTS.write_text(json.dumps(table, indent=1) + "\n")
            print(tokens, seed, flush=True)


if __name__ == "__main__":
    numbers = [int(each) for each in sys.argv[1:]]
    main(list(zip(numbers[::2], numbers[1::2], strict=True)) or DEFAULT)
