"""Tables and figures of docs/experiments/metric.md, from results.json of the full form and from training.json.

    python -m experiments.metric.page

Read next: experiment.py and training.py (where the results come from).
"""

import json
from pathlib import Path
from typing import Any

from ..intervals import student
from ..pages import DOCS, replace_table, write_page
from .estimation import FAMILIES, HEADS
from .experiment import COVARIANCE, FISHER, PRECISION, QUERIES
from .training import POSITIVE, RESULTS, TARGETS

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


# Through the training of language models ------------------------------------------------------------------------------


def trained(results: dict[str, Any]) -> str:
    """Cosines at every step, and the means of their nulls: means over seeds."""
    names = (POSITIVE, *(f"cosine with the {target}" for target in TARGETS))
    lines = [f"| step | {' | '.join(f'{name} (null)' for name in names)} |", "|---" * 5 + "|"]
    for step in _steps(results):
        rows = [row for row in results["models"] if row["step"] == step]
        cells = []
        for name in (POSITIVE, *TARGETS):
            value = student([row[name][0] for row in rows])
            null = sum(row[name][1] for row in rows) / len(rows)
            cells.append(f"{value.mean:.2f} ± {value.high - value.mean:.2f} ({null:.2f})")
        lines.append(f"| {step} | {' | '.join(cells)} |")
    return "\n".join(lines)


def judged(results: dict[str, Any]) -> str:
    """Verdicts of the plan."""
    lines = ["| hypothesis of the plan | verdict | cosine above its null (95 % CI) |", "|---" * 3 + "|"]
    for name, row in results["answer"].items():
        if isinstance(row, dict):
            value = row["value"]
            number = f"{value['mean']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"
            lines.append(f"| {name} | {row['verdict']} | {number} |")
    return "\n".join(lines)


def figure_of_training(results: dict[str, Any], path: Path) -> None:
    """Cosines above their nulls through training, a line for each seed."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "metric_training"
    names = (POSITIVE, *TARGETS)
    fig, panels = plt.subplots(1, len(names), figsize=(10, 2.6), sharey=True, layout="constrained")
    steps = _steps(results)
    x = [max(step, 10) for step in steps]  # step 0 is drawn at 10
    for i, (panel, name) in enumerate(zip(panels, names, strict=True)):
        for seed in sorted({row["seed"] for row in results["models"]}):
            values = {row["step"]: row[name][0] - row[name][1] for row in results["models"] if row["seed"] == seed}
            panel.plot(x, [values[step] for step in steps], "o-", color=f"C{i}", ms=3, lw=1)
        panel.axhline(0, color="0.4", lw=0.8)
        panel.set_xscale("log")
        panel.set_xticks([10, 100, 1000], ["0", "100", "1000"])
        panel.minorticks_off()
        panel.set_title(name if name == POSITIVE else f"with the {name}", fontsize=9)
        panel.set_xlabel("step")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("cosine − null")
    fig.savefig(path, metadata={"Date": None})
    plt.close(fig)


def _steps(results: dict[str, Any]) -> list[int]:
    return sorted({row["step"] for row in results["models"]})


def _ordered(results: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted(results["cells"], key=lambda c: (c["d"], FAMILIES.index(c["family"]), HEADS.index(c["head"])))


def _number(interval: dict[str, float]) -> str:
    return f"{interval['mean']:.3f} ± {interval['high'] - interval['mean']:.3f}"


if __name__ == "__main__":
    write_page("metric", {"metric": table}, figure)
    training = json.loads(RESULTS.read_text())
    for name, make in (("training", trained), ("training decided", judged)):
        replace_table(DOCS / "experiments" / "metric.md", name, make(training))
    figure_of_training(training, DOCS / "pictures" / "metric_training.svg")
