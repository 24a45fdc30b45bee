"""What four models say about the theory, from the folders of their runs.

gradlogz probe minilm --out runs/minilm          and likewise rxnmapper, rxnfp, smollm2
python benchmarks/findings.py runs/minilm runs/rxnmapper runs/rxnfp runs/smollm2     writes results/findings.json
"""

import json
import math
import sys
from pathlib import Path

from gradlogz.probing.runs import read_run

LAYERS = {"ascent": ("gain", "gain, permuted"), "linearity": ("held-out R²",), "symmetry": ("symmetry",)}


def plain(value: float) -> float | None:
    return None if math.isnan(value) else float(f"{value:.4g}")


def model(folder: str) -> dict[str, object]:
    run = read_run(folder)
    claims = {
        s.prediction: {
            "verdict": s.verdict, "value": plain(s.value), "null": plain(s.null), "supported": s.supported,
            "judged": s.judged, "words": s.words,
        }
        for s in run.findings.summary()
    }  # fmt: skip
    by_layer = {
        f"{prediction}: {quantity}": [plain(row["value"]) for row in run.findings.table(prediction, quantity=quantity)]
        for prediction, quantities in LAYERS.items()
        for quantity in quantities
    }
    facts = {name: run.model[name] for name in ("name", "architecture", "parameters", "layers", "heads", "dequantised")}
    return {**facts, "counts": run.counts, "version": run.version, "claims": claims, "by layer": by_layer}


if __name__ == "__main__":
    table = {"benchmark": "findings", "rows": [model(folder) for folder in sys.argv[1:]]}
    text = json.dumps(table, indent=1, ensure_ascii=False)
    (Path(__file__).parent / "results" / "findings.json").write_text(text + "\n")
