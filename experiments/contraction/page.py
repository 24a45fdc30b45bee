"""Tables and figure of docs/experiments/contraction.md, from results.json.

    python -m experiments.contraction.page

Read next: experiment.py (where the results come from).
"""

from pathlib import Path
from typing import Any

from ..pages import write_page
from .experiment import KINDS, SIZES


def decided(results: dict[str, Any]) -> str:
    """Cost of every contraction at each size of the data, and the difference of both."""
    columns = (*SIZES, "regime")
    lines = [f"| contraction | {' | '.join(columns)} |", "|---" * 4 + "|"]
    for kind in KINDS:
        if kind != "layer_norm":
            cells = [results["answer"][f"{kind}, {column}"] for column in columns]
            texts = [f"{_interval(row['nats'])}: {row['verdict']}" for row in cells]
            lines.append(f"| {kind} | {' | '.join(texts)} |")
    return "\n".join(lines)


def measured(results: dict[str, Any]) -> str:
    """Mean loss at each size, and what each block does to the stream, trained and untrained, with much text."""
    header = "| contraction | loss, little text | loss, much text | Δ log tr Cov of each block, untrained | trained "
    lines = [header + "| normalised entropy, untrained | trained |", "|---" * 7 + "|"]
    for kind in KINDS:
        rows = {size: [r for r in results["models"] if (r["contraction"], r["data"]) == (kind, size)] for size in SIZES}
        losses = [_mean([row["held-out loss"] for row in each]) for each in rows.values()]
        budgets = [[row[name] for row in rows["much text"]] for name in ("untrained budget", "budget")]
        spreads = [", ".join(_blocks(each)) for each in budgets]
        entropies = [f"{_mean([row['normalised entropy'] for row in each]):.2f}" for each in budgets]
        cells = [f"{losses[0]:.3f}", f"{losses[1]:.3f}", *spreads, *entropies]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _blocks(budgets: list[dict[str, Any]]) -> list[str]:
    return [f"{_mean(list(values)):.2f}" for values in zip(*(each["log tr Cov"] for each in budgets), strict=True)]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _interval(values: dict[str, float]) -> str:
    return f"{values['mean']:.2f} [{values['low']:.2f}, {values['high']:.2f}]"


def figure(results: dict[str, Any], path: Path) -> None:
    """Held-out losses of all models, a point for each seed."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "contraction"
    fig, axis = plt.subplots(figsize=(7, 3), layout="constrained")
    for row in results["models"]:
        number = list(SIZES).index(row["data"])
        axis.plot(row["held-out loss"], KINDS[::-1].index(row["contraction"]), "o", color=f"C{number}", ms=4)
    for number, size in enumerate(SIZES):
        axis.plot([], [], "o", color=f"C{number}", ms=4, label=size)
    axis.set_yticks(range(len(KINDS)), KINDS[::-1], fontsize=8)
    axis.set_xlabel("held-out loss, nats per token")
    axis.legend(fontsize=8)
    axis.grid(axis="x", alpha=0.3)
    fig.savefig(path, metadata={"Date": None})
    plt.close(fig)


if __name__ == "__main__":
    write_page("contraction", {"decided": decided, "measured": measured}, figure)
