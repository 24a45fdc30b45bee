"""Run the benchmarks: ratios to the alternative, timed alternately in one run, and one JSON file each.

python benchmarks/run.py [name ...]     all benchmarks if no name is passed; writes benchmarks/results/<name>.json
"""

import json
import platform
import sys
from pathlib import Path

import torch

import attention_cpu
import contrastive
import dynamics
import filters
import filters_in_time
import filters_online
import import_time
import layers
import measures
import models
import probe
import regime_switching
import smoothers

BENCHMARKS = {
    "import_time": import_time.rows,
    "measures": measures.rows,
    "attention_cpu": attention_cpu.rows,
    "layers": layers.rows,
    "models": models.rows,
    "dynamics": dynamics.rows,
    "contrastive": contrastive.rows,
    "probe": probe.rows,
    "filters": filters.rows,
    "filters_in_time": filters_in_time.rows,
    "filters_online": filters_online.rows,
    "smoothers": smoothers.rows,
    "regime_switching": regime_switching.rows,
}
RESULTS = Path(__file__).parent / "results"


def main(names: list[str]) -> None:
    for name in names or BENCHMARKS:
        rows = BENCHMARKS[name]()
        for row in rows:
            print("  ".join(f"{key} {value}" for key, value in row.items()))
        RESULTS.mkdir(exist_ok=True)
        table = {
            "benchmark": name,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "machine": platform.machine(),
            "rows": rows,
        }
        (RESULTS / f"{name}.json").write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
