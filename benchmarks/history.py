"""Benchmark values over the commits that changed them, from the history of the JSON files in benchmarks/results.

    python benchmarks/history.py     writes results/history.json; then benchmarks/tables.py writes docs/performance.md

Values of two commits were measured at different times, some on other machines: only ratios within one run are compared.
"""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def _row(results: Any, **values: object) -> Any:
    """Return the first row with these values; KeyError if there is none, as in results of older commits."""
    for row in results["rows"]:
        if all(row.get(name) == value for name, value in values.items()):
            return row
    raise KeyError(values)


def _gpu(results: Any, name: str) -> float:
    ms = _row(results, shape=[4, 16, 4096, 128], causal=False)["ms"]
    return ms[name] / ms["cudnn with backward" if "backward" in name else "cudnn"]


SERIES: dict[str, tuple[str, Callable[[Any], float]]] = {
    "attend / SDPA, CPU, (1, 8, 1024, 64), forward with statistics": (
        "attention_cpu",
        lambda r: _row(r, problem="8 x 1024 x 64", asked="scalar")["ratio"],
    ),
    "attend / SDPA, CPU, (1, 8, 1024, 64), forward and backward": (
        "attention_cpu",
        lambda r: _row(r, problem="8 x 1024 x 64, forward and backward", asked="output and log normaliser")["ratio"],
    ),
    "attend / cuDNN, H200, (4, 16, 4096, 128), forward with statistics": (
        "attention_gpu",
        lambda r: _gpu(r, "attend"),
    ),
    "attend / cuDNN, H200, (4, 16, 4096, 128), forward and backward": (
        "attention_gpu",
        lambda r: _gpu(r, "attend with backward"),
    ),
    "info_nce / dense loss, CPU, 1024 pairs of dimension 128": (
        "contrastive",
        lambda r: _row(r, loss="info_nce", pairs=1024, dimension=128)["gradlogz / dense"],
    ),
    "filterpy / imm, CPU, 3 modes, 1 target": (
        "filters",
        lambda r: _row(r, problem="imm, 3 modes, 1 target")["ratios"]["filterpy"],
    ),
    "forward pass with all predictions / plain, CPU, MiniLM": (
        "probe",
        lambda r: _row(r, model="minilm")["ratios"]["all predictions"],
    ),
    "gradlogz --help, seconds": ("import_time", lambda r: _row(r, what="gradlogz --help")["seconds"]),
}


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=RESULTS, capture_output=True, text=True, check=True).stdout


def collected() -> dict[str, list[dict[str, object]]]:
    """Values of each series with commit and date, oldest first; commits that do not change a value are left out."""
    series: dict[str, list[dict[str, object]]] = {}
    for name, (file, value) in SERIES.items():
        series[name] = []
        for line in _git("log", "--reverse", "--format=%H %as", "--", f"{file}.json").splitlines():
            commit, date = line.split()
            try:
                number = round(value(json.loads(_git("show", f"{commit}:./{file}.json"))), 3)
            except (KeyError, ValueError):
                continue
            if not series[name] or series[name][-1]["value"] != number:
                series[name].append({"commit": commit[:7], "date": date, "value": number})
    return series


if __name__ == "__main__":
    (RESULTS / "history.json").write_text(json.dumps(collected(), indent=1) + "\n")
