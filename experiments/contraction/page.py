"""Tables and figure of docs/experiments/contraction.md, from results.json.

    python -m experiments.contraction.page

Read next: experiment.py (where the results come from).
"""

from pathlib import Path
from typing import Any

from ..intervals import student
from ..pages import write_page
from .experiment import KINDS, SIZES

Rows = list[dict[str, Any]]


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


def losses(results: dict[str, Any]) -> str:
    """Losses at each size of the data, with half of their CI."""
    names = ("held-out loss", "lowest held-out loss", "training loss")
    header = [f"{name}, {size}" for size in SIZES for name in (names if size == "little text" else names[::2])]
    lines = [f"| contraction | {' | '.join(header)} |", "|---" * (1 + len(header)) + "|"]
    for kind in KINDS:
        cells = []
        for size in SIZES:
            rows = rows_of(results, kind, size)
            cells += [_mean([row[name] for row in rows]) for name in (names if size == "little text" else names[::2])]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def budgets(results: dict[str, Any]) -> str:
    """Changes of the stream by the blocks, with much text: untrained, trained, and predicted from Gaussian tokens."""
    parts = ("Δ log tr Cov of each block", "distance to a Gaussian", "normalised entropy")
    columns = [f"{part}, {state}" for part in parts for state in ("untrained", "trained", "Gaussian tokens")]
    lines = [f"| contraction | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for kind in KINDS:
        rows = rows_of(results, kind, "much text")
        states = [
            ([row[budget] for row in rows], suffix)
            for budget, suffix in (("untrained budget", ""), ("budget", ""), ("budget", ", Gaussian tokens"))
        ]
        cells = [_blocks([each[f"log tr Cov{suffix}"] for each in budget]) for budget, suffix in states]
        for name in parts[1:]:
            cells += [f"{average([each[f'{name}{suffix}'] for each in budget]):.2f}" for budget, suffix in states]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def predicted(results: dict[str, Any]) -> str:
    """Error of the prediction of the growth of log tr Cov, and its verdict; untrained models beside it."""
    lines = ["| contraction | untrained: text − Gaussian tokens | trained (95 % CI) | verdict |", "|---" * 4 + "|"]
    for kind in KINDS:
        untrained = [row["untrained budget"] for row in rows_of(results, kind, "much text")]
        error = student([growth(each) - growth(each, ", Gaussian tokens") for each in untrained])
        row = results["answer"][f"{kind}, prediction"]
        lines.append(f"| {kind} | {error.mean:.2f} | {_interval(row['log ratio'])} | {row['verdict']} |")
    return "\n".join(lines)


def rows_of(results: dict[str, Any], kind: str, size: str) -> Rows:
    """Rows of all seeds."""
    return [row for row in results["models"] if (row["contraction"], row["data"]) == (kind, size)]


def growth(budget: dict[str, Any], suffix: str = "") -> float:
    """Change of log tr Cov over all blocks."""
    return sum(budget[f"log tr Cov{suffix}"])


def average(values: list[float]) -> float:
    """Mean."""
    return sum(values) / len(values)


def _blocks(changes: list[list[float]]) -> str:
    return ", ".join(f"{average(list(values)):.2f}" for values in zip(*changes, strict=True))


def _mean(values: list[float]) -> str:
    each = student(values)
    return f"{each.mean:.3f} ± {each.high - each.mean:.3f}"


def _interval(values: dict[str, float]) -> str:
    return f"{values['mean']:.2f} [{values['low']:.2f}, {values['high']:.2f}]"


def figure(results: dict[str, Any], path: Path) -> None:
    """Held-out losses of all models, and the growth of the variance of text against that of Gaussian tokens."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "contraction"
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", width_ratios=(3, 2))
    for row in results["models"]:
        number = SIZES.index(row["data"])
        offset = 0.15 - 0.3 * number
        left.plot(row["held-out loss"], KINDS[::-1].index(row["contraction"]) + offset, "o", color=f"C{number}", ms=3)
    for number, size in enumerate(SIZES):
        left.plot([], [], "o", color=f"C{number}", ms=4, label=size)
    left.set_yticks(range(len(KINDS)), KINDS[::-1], fontsize=8)
    left.set_xlabel("held-out loss, nats per token")
    left.grid(axis="x", alpha=0.3)
    ends = []
    for number, kind in enumerate(KINDS):
        each_budget = [row["budget"] for row in rows_of(results, kind, "much text")]
        x, y = ([growth(each, suffix) for each in each_budget] for suffix in (", Gaussian tokens", ""))
        right.plot(x, y, "o", color=f"C{number}", ms=4, label=kind)
        ends += x + y
    right.plot([min(ends), max(ends)], [min(ends), max(ends)], color="0.6", lw=0.8, zorder=0)
    right.set_xlabel("growth of log tr Cov, Gaussian tokens")
    right.set_ylabel("growth of log tr Cov, text")
    for panel in (left, right):
        panel.legend(fontsize=7)
    fig.savefig(path, metadata={"Date": None})
    plt.close(fig)


if __name__ == "__main__":
    tables = {"decided": decided, "losses": losses, "budgets": budgets, "predicted": predicted}
    write_page("contraction", tables, figure)
