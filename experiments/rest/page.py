"""Tables and figure of docs/experiments/rest.md, from results.json of the full form.

    python -m experiments.rest.page

Read next: experiment.py (where the results come from).
"""

from pathlib import Path
from typing import Any

from ..intervals import student
from ..pages import write_page
from .layers import ARMS

QUANTITIES = (
    "relative error", "rests", "spectral radius", "one attractor", "clusters", "within centres, injection",
    "within centres", "collapsed without injection", "certified", "cosine", "cosine, permuted",
)  # fmt: skip
HYPOTHESES = (
    "H1 rests", "H2 one attractor", "H3 three clusters", "H4 collapse without injection", "H5 ascent at rest",
    "H6 certificate",
)  # fmt: skip


def measured(results: dict[str, Any]) -> str:
    """Statistics of every arm, trained and untrained."""
    header = " | ".join(f"{arm}, {weights}" for arm in ARMS for weights in ("untrained", "trained"))
    lines = [f"| quantity | {header} |", "|---" * (2 * len(ARMS) + 1) + "|"]
    for name in QUANTITIES:
        cells = []
        for arm in ARMS:
            for weights in ("untrained", "trained"):
                values = [row[weights][name] for row in results["layers"] if row["arm"] == arm]
                cells.append("" if values[0] is None else _cell(values))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def decided(results: dict[str, Any]) -> str:
    """Verdicts of every arm."""
    lines = [f"| hypothesis | {' | '.join(ARMS)} |", "|---" * (len(ARMS) + 1) + "|"]
    for name in HYPOTHESES:
        rows = [results["answer"][arm].get(name) for arm in ARMS]
        cells = ["" if row is None else f"{row['verdict']}: {_interval(row['value'])}" for row in rows]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _interval(values: dict[str, float]) -> str:
    return f"{values['mean']:.2f} [{values['low']:.2f}, {values['high']:.2f}]"


def _cell(values: list[float]) -> str:
    each = student(values)
    return f"{each.mean:.2f} ± {each.high - each.mean:.2f}"


def figure(results: dict[str, Any], path: Path) -> None:
    """Four quantities before and after training, a line for each seed."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "rest"
    panels = {
        "spectral radius": lambda row: row["spectral radius"],
        "share of the variance within centres": lambda row: row["within centres"],
        "ascent: excess cosine": lambda row: row["cosine"] - row["cosine, permuted"],
        "share of sets with one attractor": lambda row: row["one attractor"],
    }
    fig, axes = plt.subplots(1, len(panels), figsize=(10, 2.9), layout="constrained")
    for axis, (title, value) in zip(axes, panels.items(), strict=True):
        for i, arm in enumerate(ARMS):
            for row in (row for row in results["layers"] if row["arm"] == arm):
                x = [i - 0.2, i + 0.2]
                axis.plot(x, [value(row["untrained"]), value(row["trained"])], "-", color=f"C{i}", lw=1)
                axis.plot(x[1], value(row["trained"]), "o", color=f"C{i}", ms=4)
        axis.set_xticks(range(len(ARMS)), ARMS, fontsize=8)
        axis.set_title(title, fontsize=9)
        axis.grid(axis="y", alpha=0.3)
    fig.savefig(path, metadata={"Date": None})
    plt.close(fig)


if __name__ == "__main__":
    write_page("rest", {"measured": measured, "decided": decided}, figure)
