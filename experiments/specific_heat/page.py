"""Table and figure of docs/experiments/specific_heat.md, from results.json and curves.json of the reduced form.

    python -m experiments.specific_heat.page

Read next: experiment.py (where the results come from).
"""

import json
from pathlib import Path
from typing import Any

from ..pages import write_page
from .experiment import KINDS


def table(results: dict[str, Any]) -> str:
    """Landmarks of every run."""
    lines = ["| kind | p | seed | memorised | peak | prominence | onset | test accuracy at the end |", "|---" * 8 + "|"]
    for row in results["runs"]:
        memorised, onset = ("none" if row[name] is None else str(row[name]) for name in ("memorised", "onset"))
        cells = [row["kind"], row["p"], row["seed"], memorised, row["peak"], f"{row['prominence']:.2f}", onset]
        lines.append(f"| {' | '.join(map(str, cells))} | {row['accuracy']:.2f} |")
    return "\n".join(lines)


def curves_of(folder: Path) -> list[dict[str, Any]]:
    """Heat and test accuracy of every run below a folder, with four digits, for the figure."""
    rows = []
    for path in sorted(folder.glob("*/curves.jsonl")):
        kind, p, seed = path.parent.name.rsplit("-", 2)
        curves = [json.loads(line) for line in path.read_text().splitlines()]
        columns = {name: [float(f"{row[name]:.4g}") for row in curves] for name in ("step", "heat", "test_accuracy")}
        rows.append({"kind": kind.replace("_", " "), "p": int(p), "seed": int(seed), **columns})
    return rows


def figure(runs: list[dict[str, Any]], path: Path) -> None:
    """Heat and test accuracy through training, a panel for each kind."""
    import matplotlib.pyplot as plt

    fig, panels = plt.subplots(2, len(KINDS), figsize=(10, 4.6), sharex=True, sharey="row", layout="constrained")
    for column, kind in enumerate(KINDS):
        for run in (run for run in runs if run["kind"] == kind):
            step = [max(1, s) for s in run["step"]]
            panels[0, column].plot(step, run["heat"], lw=1)
            panels[1, column].plot(step, run["test_accuracy"], lw=1)
        panels[0, column].set_title(kind)
        panels[1, column].set_xlabel("step")
        panels[1, column].axhline(0.9, color="grey", lw=0.8, ls=":")
        panels[0, column].set_xscale("log")
        panels[0, column].set_xlim(left=20)
    panels[0, 0].set_ylabel("logit variance")
    panels[1, 0].set_ylabel("test accuracy")
    plt.rcParams["svg.hashsalt"] = "specific_heat"
    fig.savefig(path, metadata={"Date": None})
    plt.close(fig)


if __name__ == "__main__":
    write_page("specific_heat", {"heat": table}, figure, "curves.json")
