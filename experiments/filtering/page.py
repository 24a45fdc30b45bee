"""Tables and figure of docs/experiments/filtering.md, from results.json of the full form.

    python -m experiments.filtering.page

Read next: experiment.py (where the results come from).
"""

from pathlib import Path
from typing import Any

from ..intervals import student
from ..pages import write_page
from .experiment import Arm
from .systems import SYSTEMS

FILTERS = ("linear", "attention", "10 particles", "gpb1", "100 particles", "imm", "gpb2")


def arms(results: dict[str, Any]) -> dict[Arm, list[dict[str, Any]]]:
    """Rows of each arm."""
    groups: dict[Arm, list[dict[str, Any]]] = {}
    for row in results["models"]:
        groups.setdefault(Arm(row["system"], row["attention"], row["layers"]), []).append(row)
    return groups


def errors(results: dict[str, Any]) -> str:
    """Relative errors of filters and transformers, a column for each system."""
    lines = [f"| prediction | {' | '.join(SYSTEMS)} |", "|---" * (len(SYSTEMS) + 1) + "|"]
    for name in FILTERS:
        cells = [f"{results['filters'][system][name]['relative error']:.2g}" for system in SYSTEMS]
        lines.append(f"| {_label(name)} | {' | '.join(cells)} |")
    groups = arms(results)
    for attention, layers in dict.fromkeys((arm.attention, arm.layers) for arm in groups):
        cells = []
        for system in SYSTEMS:
            rows = groups.get(Arm(system, attention, layers))
            cells.append(_cell([row["relative error"] for row in rows]) if rows else "")
        lines.append(f"| transformer, {attention}, {layers} layers | {' | '.join(cells)} |")
    return "\n".join(lines)


def read_outs(results: dict[str, Any]) -> str:
    """R² of mode probabilities and of predictive log variances, trained and with random weights."""
    lines = [
        "| system | attention, layers | read-out | modes | random weights | variance | random weights |",
        "|---" * 7 + "|",
    ]
    for arm, rows in arms(results).items():
        for part in list(rows[0]["read-outs"])[1:]:  # that of the embedding is 0
            cells = [
                _cell([row[weights][part][target]["r2"] for row in rows])
                for target in ("modes", "uncertainty")
                for weights in ("read-outs", "random weights")
            ]
            lines.append(f"| {arm.system} | {arm.attention}, {arm.layers} | {_part(part)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def decided(results: dict[str, Any]) -> str:
    """Verdicts of every arm, with the numbers that they are based on."""
    names = {
        "H1 against gpb1": "difference",
        "H1 against imm": "difference",
        "H1 against gpb2": "difference",
        "H2 errors of IMM": "coefficient",
        "H3 modes in the stream": "R2 minus random weights",
        "H3 against the quadratic read-out": "difference",
        "H4 modes in the attention weights": "R2 minus random weights",
        "H5 uncertainty": "R2 minus random weights",
        "H5 against the stream": "difference",
    }
    groups = list(arms(results))
    header = " | ".join(f"{arm.system}, {arm.attention}, {arm.layers}" for arm in groups)
    lines = [f"| hypothesis | {header} |", "|---" * (len(groups) + 1) + "|"]
    for name, quantity in names.items():
        cells = []
        for arm in groups:
            row = results["answer"][f"{arm.system}, {arm.attention}, {arm.layers} layers"].get(name)
            cells.append("" if row is None else f"{row['verdict']}: {interval(row[quantity])}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def interval(values: dict[str, float], digits: int = 2) -> str:
    """Mean [low, high]."""
    return f"{values['mean']:.{digits}f} [{values['low']:.{digits}f}, {values['high']:.{digits}f}]"


def _cell(values: list[float]) -> str:
    each = student(values)
    return f"{each.mean:.3f} ± {each.high - each.mean:.3f}"


def _label(name: str) -> str:
    known = {"linear": "best affine prediction", "attention": "IMM with attention for transitions"}
    return known.get(name, name.upper() if name.islower() and " " not in name else f"particle filter, {name}")


def _part(name: str) -> str:
    kind, _, depth = name.partition(" ")
    if kind == "stream":
        return "embedding" if depth == "0" else f"stream after block {depth}"
    return (
        f"log variances after block {depth}" if kind == "variance" else {"weights": "attention weights"}.get(name, name)
    )


def figure(results: dict[str, Any], path: Path) -> None:
    """Relative errors of all predictions, and R² of modes by depth."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "filtering"
    groups = arms(results)
    fig, panels = plt.subplots(2, len(SYSTEMS), figsize=(10, 5.6), layout="constrained")
    for column, system in enumerate(SYSTEMS):
        top, bottom = panels[0, column], panels[1, column]
        filters = sorted(FILTERS, key=lambda name: -results["filters"][system][name]["relative error"])
        for y, name in enumerate(filters):
            top.plot(results["filters"][system][name]["relative error"], y, "o", color="0.4", ms=5)
        top.set_yticks(range(len(filters)), filters, fontsize=8)
        top.set_xscale("log")
        top.set_title(system)
        top.grid(axis="x", alpha=0.3)
        top.set_xlabel("relative error")
        for i, (arm, rows) in enumerate((a, r) for a, r in groups.items() if a.system == system):
            each = student([row["relative error"] for row in rows])
            label = f"{arm.attention}, {arm.layers} layers"
            top.axvspan(each.low, each.high, color=f"C{i}", alpha=0.35, label=label)
            for weights, style in (("read-outs", "-o"), ("random weights", ":o")):
                depths = range(arm.layers + 1)
                means = [
                    student([row[weights][f"stream {depth}"]["modes"]["r2"] for row in rows]).mean for depth in depths
                ]
                name = label if weights == "read-outs" else "random weights"
                bottom.plot(depths, means, style, color=f"C{i}", ms=4, label=name if column == 0 or i else None)
        bottom.axhline(results["filters"][system]["quadratic read-out"]["r2"], color="0.4", ls="--", lw=1)
        bottom.set_ylim(0, 1)
        bottom.set_xlabel("blocks")
        bottom.xaxis.get_major_locator().set_params(integer=True)
        bottom.grid(axis="y", alpha=0.3)
        top.legend(fontsize=7, loc="lower left")
    panels[1, 0].set_ylabel("R² of mode probabilities")
    panels[1, 0].legend(fontsize=7)
    fig.savefig(path, metadata={"Date": None})
    plt.close(fig)


if __name__ == "__main__":
    write_page("filtering", {"errors": errors, "decided": decided, "read-outs": read_outs}, figure)
