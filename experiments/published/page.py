"""Tables and figure of docs/experiments/published.md, from results.json and replication.json.

    python -m experiments.published.page

Read next: experiment.py (where the results come from).
"""

import json
from pathlib import Path
from typing import Any

from ..pages import EXPERIMENTS, write_page
from .experiment import PUBLISHED_CAPACITY, PUBLISHED_ERROR, THEORY, load_at_half, loads_of

REPLICATION = EXPERIMENTS / "published" / "replication.json"


def compared(results: dict[str, Any]) -> str:
    """Published numbers, measured ones, and those of the replication."""
    again = json.loads(REPLICATION.read_text())["answer"]
    published = f"{PUBLISHED_CAPACITY} ± {PUBLISHED_ERROR} [steffan94]; theory {THEORY} [amit85]"
    lines = ["| number | published | measured (95 % CI) | replication (95 % CI) |", "|---" * 4 + "|"]
    for name, row in results["answer"].items():
        both = (row, again[name])
        if name == "capacity":
            cells = [f"{_ci(each['capacity'], 4)}: {each['verdict']}" for each in both]
            lines.append(f"| patterns per spin at capacity | {published} | {' | '.join(cells)} |")
            continue
        error, slope = f"1 ({row['published error']:.4f}) [zhang24]", f"1 (null {row['slope of the null']:.2f})"
        ratios = [f"{_ci(each['error relative to the published prediction'], 4)}: {each['verdict']}" for each in both]
        slopes = [f"{_ci(each['slope'], 3)}, cosine {each['cosine']['mean']:.4f}: {each['verdict']}" for each in both]
        lines.append(f"| regression, {name}: error over the published one | {error} | {' | '.join(ratios)} |")
        lines.append(f"| regression, {name}: slope | {slope} | {' | '.join(slopes)} |")
    return "\n".join(lines)


def networks(results: dict[str, Any]) -> str:
    """Load at which half of the patterns are retrieved, by number of spins."""
    lines = ["| spins | sets | load at one half, mean | smallest | largest | replication, mean |", "|---" * 6 + "|"]
    again = json.loads(REPLICATION.read_text())
    for spins in dict.fromkeys(row["spins"] for row in results["networks"]):
        loads, others = (
            [load_at_half(spins, row["shares"]) for row in each["networks"] if row["spins"] == spins]
            for each in (results, again)
        )
        cells = [f"{v:.4f}" for v in (sum(loads) / len(loads), min(loads), max(loads), sum(others) / len(others))]
        lines.append(f"| {spins} | {len(loads)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _ci(interval: dict[str, Any], digits: int) -> str:
    return f"{interval['mean']:.{digits}f} [{interval['low']:.{digits}f}, {interval['high']:.{digits}f}]"


def figure(results: dict[str, Any], path: Path) -> None:
    """Share of retrieved patterns against the load, a line for each set."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "published"
    fig, panel = plt.subplots(figsize=(7, 3.1), layout="constrained")
    sizes = list(dict.fromkeys(row["spins"] for row in results["networks"]))
    for row in results["networks"]:
        panel.plot(loads_of(row["spins"]), row["shares"], color=f"C{sizes.index(row['spins'])}", lw=1)
    for i, spins in enumerate(sizes):
        panel.plot([], [], color=f"C{i}", lw=1, label=f"{spins} spins")
    panel.axvspan(PUBLISHED_CAPACITY - PUBLISHED_ERROR, PUBLISHED_CAPACITY + PUBLISHED_ERROR, color="0.9", zorder=0)
    panel.axvline(THEORY, color="0.4", lw=0.8, ls=":")
    panel.set_xlabel("patterns per spin")
    panel.set_ylabel("share of patterns retrieved")
    panel.legend(fontsize=8)
    fig.savefig(path, metadata={"Date": None})
    plt.close(fig)


if __name__ == "__main__":
    write_page("published", {"compared": compared, "networks": networks}, figure)
