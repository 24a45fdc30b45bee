"""Results of the probe for four models, collected from the folders of their runs.

gradlogz probe minilm --out runs/minilm          and likewise rxnmapper, rxnfp, smollm2
python benchmarks/findings.py runs/minilm runs/rxnmapper runs/rxnfp runs/smollm2     writes results/findings.json
python benchmarks/findings.py --again runs/some      replaces the predictions of one model by those of this run
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

from gradlogz.probing.runs.run_folder import read_run
from gradlogz.reporting.findings_wording import sentences_of

LAYERS = {"ascent": ("gain", "gain, permuted"), "linearity": ("held-out R²",), "symmetry": ("symmetry",)}


def plain(value: float) -> float | None:
    return None if math.isnan(value) else float(f"{value:.4g}")


def model(folder: str) -> dict[str, Any]:
    run = read_run(folder)
    claims = {
        s.prediction: {
            "verdict": s.verdict, "value": plain(s.value), "null": plain(s.null), "supported": s.supported,
            "judged": s.judged, "refuted": s.refuted,
            "text": sentences_of(run.findings.declarations, s),
        }
        for s in run.findings.summary()
    }  # fmt: skip
    measured = {row.prediction for row in run.findings.rows}
    by_layer = {
        f"{prediction}: {quantity}": [plain(row["value"]) for row in run.findings.table(prediction, quantity=quantity)]
        for prediction, quantities in LAYERS.items()
        for quantity in quantities
        if prediction in measured
    }
    facts = {name: run.model[name] for name in ("name", "architecture", "parameters", "layers", "heads", "dequantised")}
    return {**facts, "counts": run.counts, "version": run.version, "claims": claims, "by layer": by_layer}


def renewed(rows: list[dict[str, Any]], new: dict[str, Any]) -> None:
    """Replace the claims of a model by those of a new run, and record its number of tokens."""
    (old,) = (row for row in rows if row["name"] == new["name"])
    for part in ("claims", "by layer"):
        old[part] |= new[part]
    old.setdefault("tokens again", {}).update(dict.fromkeys(new["claims"], new["counts"]["tokens"]))


if __name__ == "__main__":
    place = Path(__file__).parent / "results" / "findings.json"
    again = sys.argv[1] == "--again"
    rows = json.loads(place.read_text())["rows"] if again else [model(folder) for folder in sys.argv[1:]]
    for folder in sys.argv[2:] if again else ():
        renewed(rows, model(folder))
    text = json.dumps({"benchmark": "findings", "rows": rows}, indent=1, ensure_ascii=False)
    place.write_text(text + "\n")
