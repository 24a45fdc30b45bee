"""Tables and figure of docs/experiments/ascent.md, from results.json, compute.json and replication.json.

    python -m experiments.ascent.page

Read next: experiment.py (where the results come from).
"""

import json
from pathlib import Path
from typing import Any

from ..intervals import student
from ..pages import DOCS, EXPERIMENTS, replace_table, write_page
from .experiment import PREDICTIONS

RUNS = {"compute": "equal compute", "replication": "replication"}  # files, and their tables on the page


def measured(results: dict[str, Any]) -> str:
    """Mean and CI over seeds of the loss and of what the probe measures at the end, for every model."""
    lines = [f"| objective | placement | value map | held-out loss | {' | '.join(PREDICTIONS)} |", "|---" * 7 + "|"]
    for name in dict.fromkeys(_name(row) for row in results["models"]):
        rows = [row for row in results["models"] if _name(row) == name]
        last = [row["probe"][max(row["probe"], key=int)] for row in rows if row["probe"]]
        values = [[row["held-out loss"] for row in rows]]
        values += [[probed[claim]["value"] for probed in last] for claim in PREDICTIONS]
        lines.append(f"| {' | '.join((*name, *map(_cell, values)))} |")
    return "\n".join(lines)


def decided(results: dict[str, Any]) -> str:
    """Verdicts and intervals of the plan."""
    lines = ["| contrast | verdict | difference (95 % CI) |", "|---" * 3 + "|"]
    for name, row in results["answer"].items():
        if isinstance(row, dict):
            interval = row["nats"] if "nats" in row else row["difference"]
            unit = " nats" if "nats" in row else ""
            lines.append(f"| {name} | {row['verdict']} | {_interval(interval)}{unit} |")
    return "\n".join(lines)


def _interval(interval: dict[str, float]) -> str:
    return f"{interval['mean']:.3f} [{interval['low']:.3f}, {interval['high']:.3f}]"


def _name(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["objective"], row["placement"], row["value_map"]


def _cell(values: list[float]) -> str:
    if not values:  # not probed
        return "–"
    each = student(values)
    return f"{each.mean:.3f} ± {each.high - each.mean:.3f}"


def figure(results: dict[str, Any], path: Path) -> None:
    """Ascent before and after training of free models, and losses of all, a point for each seed."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "ascent"
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.1), layout="constrained")
    pairs = list(dict.fromkeys(_name(row)[:2] for row in results["models"]))
    maps = list(dict.fromkeys(row["value_map"] for row in results["models"]))
    for row in results["models"]:
        i, steps = pairs.index(_name(row)[:2]), sorted(row["probe"], key=int)
        if row["value_map"] == "free":
            values = [row["probe"][step]["ascent"]["value"] for step in steps]
            left.plot([i - 0.15, i + 0.15], values, "o-", color=f"C{i}", ms=4, lw=1)
        offset = 0.25 * (maps.index(row["value_map"]) - (len(maps) - 1) / 2)
        right.plot(i + offset, row["held-out loss"], "o", color=f"C{maps.index(row['value_map'])}", ms=4)
    for number, value_map in enumerate(maps):
        right.plot([], [], "o", color=f"C{number}", ms=4, label=value_map)
    right.legend(fontsize=8)
    left.set_title("ascent: excess gain, untrained and trained (free models)", fontsize=9)
    right.set_title("held-out loss, nats per predicted token", fontsize=9)
    left.axhline(0, color="0.4", lw=0.8)
    for panel in (left, right):
        panel.set_xticks(range(len(pairs)), [f"{objective}, {placement}" for objective, placement in pairs], fontsize=8)
        panel.grid(axis="y", alpha=0.3)
    fig.savefig(path, metadata={"Date": None})
    plt.close(fig)


if __name__ == "__main__":
    write_page("ascent", {"measured": measured, "decided": decided}, figure)
    for file, run in RUNS.items():
        results = json.loads((EXPERIMENTS / "ascent" / f"{file}.json").read_text())
        for name, make in (("measured", measured), ("decided", decided)):
            replace_table(DOCS / "experiments" / "ascent.md", f"{name}, {run}", make(results))
