"""Tables and figure of docs/experiments/needed.md, from results.json and curvature.json.

    python -m experiments.needed.page

Read next: experiment.py and curvature.py (where the results come from).
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..costs import Cost, cost
from ..intervals import student
from ..pages import DOCS, replace_table, write_page
from ..transformer import ModelSettings
from .curvature import RESULTS
from .experiment import ARMS, GROUPS


def table(results: dict[str, Any]) -> str:
    """Mean loss, relative cost, verdict, learned parameters and multiplications of every arm."""
    titles = "arm | held-out loss | relative cost (95 % CI) | verdict | learned parameters | multiplications of a token"
    lines = [f"| {titles} |", "|---" * 6 + "|"]
    for arm in ARMS:
        losses = [row["held-out loss"] for row in results["models"] if row["arm"] == arm]
        row = results["answer"].get(arm)
        relative, verdict = ("", "") if row is None else (_interval(row["relative cost"]), row["verdict"])
        size = learned(arm, ModelSettings(**results["settings"]["model"]))
        cells = [arm, f"{sum(losses) / len(losses):.3f}", relative, verdict]
        lines.append(f"| {' | '.join(cells)} | {size.parameters:,} | {size.multiplications:,.0f} |")
    return "\n".join(lines)


def learned(arm: str, model: ModelSettings) -> Cost:
    """Learned parameters of an arm, and its multiplications, of which maps that are held are a part."""
    every = cost(replace(model, **ARMS[arm]))
    held = set(ARMS[arm].get("identity", "") + ARMS[arm].get("frozen", ""))
    return every._replace(parameters=every.parameters - model.layers * len(held) * (model.width + 1) * model.width)


def curvature(results: dict[str, Any]) -> str:
    """Curvatures of every group and step, with half of their CI."""
    lines = [f"| step | {' | '.join(GROUPS)} |", "|---" * (1 + len(GROUPS)) + "|"]
    for step in sorted({row["step"] for row in results["models"]}):
        values = [student([row[group] for row in results["models"] if row["step"] == step]) for group in GROUPS]
        lines.append(f"| {step} | {' | '.join(f'{v.mean:.3f} ± {v.high - v.mean:.3f}' for v in values)} |")
    return "\n".join(lines)


def _interval(values: dict[str, float]) -> str:
    return f"{values['mean']:.2f} [{values['low']:.2f}, {values['high']:.2f}]"


def figure(results: dict[str, Any], path: Path) -> None:
    """Held-out losses of all arms, a point for each seed."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "needed"
    fig, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for y, arm in enumerate(reversed(ARMS)):
        losses = [row["held-out loss"] for row in results["models"] if row["arm"] == arm]
        axis.plot(losses, [y] * len(losses), "o", color="C1" if arm in ("free", "no attention") else "C0", ms=4)
    axis.set_yticks(range(len(ARMS)), reversed(ARMS), fontsize=8)
    axis.set_xlabel("held-out loss, nats per token")
    axis.grid(axis="x", alpha=0.3)
    fig.savefig(path, metadata={"Date": None})
    plt.close(fig)


if __name__ == "__main__":
    write_page("needed", {"needed": table}, figure)
    replace_table(DOCS / "experiments" / "needed.md", "curvature", curvature(json.loads(RESULTS.read_text())))
