"""Table and figure of docs/experiments/linearity.md, from results.json.

    python -m experiments.linearity.page

Read next: experiment.py (where the results come from).
"""

from pathlib import Path
from typing import Any

from ..intervals import student
from ..pages import write_page

COLUMNS = ("loss", "R2", "affine share", "closed form", "trend")


def table(results: dict[str, Any]) -> str:
    """Mean and CI over seeds of every statistic, at every step."""
    lines = ["| step | loss | R² | affine share | closed form − mean output (nats) | trend |", "|---" * 6 + "|"]
    for step in sorted({row["step"] for row in results["models"]}):
        cells = []
        for name in COLUMNS:
            each = student([row[name] for row in results["models"] if row["step"] == step])
            digits = 3 if name == "closed form" else 2
            cells.append(f"{each.mean:.{digits}f} ± {each.high - each.mean:.{digits}f}")
        lines.append(f"| {step} | {' | '.join(cells)} |")
    return "\n".join(lines)


def figure(results: dict[str, Any], path: Path) -> None:
    """R² and the advantage of the closed form through training, a line for each seed."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "linearity"
    fig, panels = plt.subplots(1, 2, figsize=(8, 2.9), layout="constrained")
    names = {"R2": "held-out R² of an affine fit", "closed form": "closed form − mean output, nats"}
    for panel, (name, title) in zip(panels, names.items(), strict=True):
        for seed in sorted({row["seed"] for row in results["models"]}):
            rows = [row for row in results["models"] if row["seed"] == seed]
            panel.plot([max(row["step"], 1) for row in rows], [row[name] for row in rows], "o-", ms=4, lw=1)
        panel.set_xscale("log")
        panel.set_xlabel("step (1: untrained)")
        panel.set_title(title, fontsize=9)
        panel.grid(alpha=0.3)
    panels[1].axhline(0, color="0.4", lw=0.8)
    fig.savefig(path, metadata={"Date": None})
    plt.close(fig)


if __name__ == "__main__":
    write_page("linearity", {"linearity": table}, figure)
