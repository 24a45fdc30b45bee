"""Table and figure of docs/experiments/metric.md, from results.json of the full form.

    python -m experiments.metric.page

Read next: experiment.py (where the results come from).
"""

from pathlib import Path
from typing import Any

from ..pages import write_page
from .estimation import FAMILIES, HEADS
from .experiment import COVARIANCE, FISHER, PRECISION, QUERIES

COLUMNS = {"R⁻¹": PRECISION, "(S + R)⁻¹": QUERIES, "R": COVARIANCE, "F": FISHER}


def table(results: dict[str, Any]) -> str:
    """Cosines with four targets, their rotation null, and the excess risk, for every cell."""
    lines = [
        f"| d | family | head | {' | '.join(f'cos {name} (null)' for name in COLUMNS)} | excess risk, n = 64 |",
        "|---" * (len(COLUMNS) + 4) + "|",
    ]
    for cell in _ordered(results):
        cosines = [f"{_number(cell[name]['cosine'])} ({cell[name]['null']['mean']:.2f})" for name in COLUMNS.values()]
        row = [str(cell["d"]), cell["family"], cell["head"], *cosines, _number(cell["excess risk"]["64"])]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def figure(results: dict[str, Any], path: Path) -> None:
    """Cosines with three targets and their rotation null, by family and head, at the smaller dimension."""
    import matplotlib.pyplot as plt

    d = min(cell["d"] for cell in results["cells"])
    cells = {(c["family"], c["head"]): c for c in results["cells"] if c["d"] == d}
    targets = {name: COLUMNS[name] for name in ("R⁻¹", "(S + R)⁻¹", "F")}
    fig, panels = plt.subplots(1, len(FAMILIES), figsize=(10, 3.4), sharey=True, layout="constrained")
    for panel, family in zip(panels, FAMILIES, strict=True):
        for i, (label, target) in enumerate(targets.items()):
            rows = [cells[family, head][target] for head in HEADS]
            x = [h + 0.25 * (i - 1) for h in range(len(HEADS))]
            means = [row["cosine"]["mean"] for row in rows]
            arms = [row["cosine"]["high"] - row["cosine"]["mean"] for row in rows]
            panel.errorbar(x, means, arms, fmt="o", ms=5, capsize=3, color=f"C{i}", label=f"cosine with {label}")
            nulls = [row["null"]["mean"] for row in rows]
            panel.plot(x, nulls, "_", ms=11, mew=2, color=f"C{i}", alpha=0.6)
        panel.set_title(f"{family}, d = {d}")
        panel.set_xticks(range(len(HEADS)), [head.replace(", ", ",\n") for head in HEADS], fontsize=8)
        panel.set_ylim(0, 1.05)
        panel.grid(axis="y", alpha=0.3)
    panels[0].set_ylabel("cosine of the QK matrix")
    panels[0].plot([], [], "_", ms=11, mew=2, color="grey", label="rotation null")
    panels[0].legend(loc="lower left", fontsize=8)
    plt.rcParams["svg.hashsalt"] = "metric"
    fig.savefig(path, metadata={"Date": None})
    plt.close(fig)


def _ordered(results: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted(results["cells"], key=lambda c: (c["d"], FAMILIES.index(c["family"]), HEADS.index(c["head"])))


def _number(interval: dict[str, float]) -> str:
    return f"{interval['mean']:.3f} ± {interval['high'] - interval['mean']:.3f}"


if __name__ == "__main__":
    write_page("metric", {"metric": table}, figure)
