"""Results of the probe for four models, collected from the folders of their runs.

gradlogz probe minilm --out runs/minilm          and likewise rxnmapper, rxnfp, smollm2
python benchmarks/findings.py runs/minilm runs/rxnmapper runs/rxnfp runs/smollm2     writes results/findings.json
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

from gradlogz.probing.runs.records import Summary
from gradlogz.probing.runs.run_folder import read_run

LAYERS = {
    "ascent": ("gain", "gain, permuted", "gain, own minus permuted"),
    "linearity": ("held-out R²",),
    "symmetry": ("symmetry",),
}


def plain(value: float) -> float | None:
    return None if math.isnan(value) else float(f"{value:.4g}")


def _claim(summary: Summary) -> dict[str, Any]:
    numbers = {name: plain(getattr(summary, name)) for name in ("value", "low", "high", "null")}
    counts = {name: getattr(summary, name) for name in ("supported", "refuted", "judged")}
    details = [{name: value for name, value in detail._asdict().items() if known(value)} for detail in summary.details]
    return {"verdict": summary.verdict, **numbers, **counts, "details": details}


def known(value: Any) -> bool:
    return value not in (None, "") and value == value


def model(folder: str) -> dict[str, Any]:
    run = read_run(folder)
    claims = {s.prediction: _claim(s) for s in run.findings.summary()}
    measured = {row.prediction for row in run.findings.rows}
    by_layer = {
        f"{prediction}: {quantity}": [plain(row["value"]) for row in run.findings.table(prediction, quantity=quantity)]
        for prediction, quantities in LAYERS.items()
        for quantity in quantities
        if prediction in measured
    }
    facts = {name: run.model[name] for name in ("name", "architecture", "parameters", "layers", "heads", "dequantised")}
    return {**facts, "counts": run.counts, "version": run.version, "claims": claims, "by layer": by_layer}


if __name__ == "__main__":
    place = Path(__file__).parent / "results" / "findings.json"
    text = json.dumps({"benchmark": "findings", "rows": [model(folder) for folder in sys.argv[1:]]}, indent=1)
    place.write_text(text + "\n")
