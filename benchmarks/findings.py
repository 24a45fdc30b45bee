"""Results of the probe for four models, and for one of them on another text, from the folders of their runs.

gradlogz probe minilm --out runs/minilm                    and likewise rxnmapper, rxnfp, smollm2
python benchmarks/findings.py --text runs/readmes.jsonl    writes the other text: descriptions of installed packages
gradlogz probe minilm --text runs/readmes.jsonl --out runs/minilm-readmes
python benchmarks/findings.py runs/{minilm,rxnmapper,rxnfp,smollm2,minilm-readmes}    other runs keep their rows
gradlogz probe smollm2 --only ascent,tie --out runs/some/smollm2    in a folder of the same name: other claims keep
python benchmarks/findings.py runs/some/smollm2                     their results
"""

import json
import math
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from gradlogz.probing.hypothesis_tests import beyond_the_null, conclude, judge
from gradlogz.probing.predictions import known_predictions
from gradlogz.probing.runs.findings import Findings
from gradlogz.probing.runs.judgement import graded
from gradlogz.probing.runs.records import BEYOND, PREDICTED, Summary
from gradlogz.probing.runs.run_folder import read_run

LAYERS = {
    "ascent": ("gain", "gain, permuted", "gain, own minus permuted"),
    "linearity": ("held-out R²",),
    "symmetry": ("symmetry",),
}
BOUNDS = 0.025, 0.05, 0.1  # the second is that of the claims
SHORTEST, LONGEST = 1000, 8000  # characters of a description


def plain(value: float) -> float | None:
    return None if math.isnan(value) else float(f"{value:.4g}")


def _claim(summary: Summary) -> dict[str, Any]:
    numbers = {name: plain(getattr(summary, name)) for name in ("value", "low", "high", "null")}
    counts = {name: getattr(summary, name) for name in ("supported", "refuted", "judged")}
    details = [{name: value for name, value in detail._asdict().items() if known(value)} for detail in summary.details]
    return {"verdict": summary.verdict, **numbers, **counts, "details": details}


def with_other_bounds(findings: Findings) -> dict[str, dict[str, list[Any]]]:
    """Verdict, and numbers of heads that support and refute, by the bound of the claims that have ±0.05."""
    tested = [p for p in known_predictions() if p.declaration.kind in (PREDICTED, BEYOND) and p.declaration.supports]
    measured = {row.prediction for row in findings.rows}
    bounded = [p for p in tested if "0.05" in p.declaration.bounds and p.name in measured]
    table: dict[str, dict[str, list[Any]]] = {}
    for prediction in bounded:
        rows = [row for row in findings.rows if row.prediction == prediction.name]
        (quantity,) = {row.quantity for row in rows if row.verdict} or {""}
        for bound in BOUNDS:
            judged = judge(rows, quantity, lambda f, bound=bound: beyond_the_null(f, bound))
            judgement = graded(conclude(judged, quantity), prediction.declaration.kind)
            counts = [judgement.verdict, judgement.supported, judgement.refuted]
            table.setdefault(prediction.name, {})[f"{bound:g}"] = counts
    return table


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
    return {
        "run": Path(folder).name,
        **facts,
        "counts": run.counts,
        "version": run.version,
        "claims": claims,
        "by layer": by_layer,
        "bounds": with_other_bounds(run.findings),
    }


def readmes(path: Path) -> None:
    """Write the descriptions of installed packages, one document for each, cut to a few windows."""
    texts = {one.metadata["Name"]: one.metadata.json.get("description") or "" for one in metadata.distributions()}
    lines = [json.dumps({"text": text[:LONGEST]}) for _, text in sorted(texts.items()) if len(text) >= SHORTEST]
    path.write_text("\n".join(lines))


if __name__ == "__main__" and sys.argv[1] == "--text":
    readmes(Path(sys.argv[2]))
elif __name__ == "__main__":
    place = Path(__file__).parent / "results" / "findings.json"
    rows = {row["run"]: row for row in json.loads(place.read_text())["rows"]}
    for row in map(model, sys.argv[1:]):
        before = rows.get(row["run"], {})
        rows[row["run"]] = row | {part: before.get(part, {}) | row[part] for part in ("claims", "by layer", "bounds")}
    place.write_text(json.dumps({"benchmark": "findings", "rows": [*rows.values()]}, indent=1) + "\n")
