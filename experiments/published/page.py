"""Tables and figure of docs/experiments/published.md, from results.json.

    python -m experiments.published.page

Read next: experiment.py (where the results come from).
"""

from pathlib import Path
from typing import Any

from ..pages import write_page
from .experiment import PUBLISHED_CAPACITY, PUBLISHED_ERROR, THEORY, load_at_half, loads_of


def compared(results: dict[str, Any]) -> str:
    """Published and measured numbers."""
    answer = results["answer"]
    published = f"{PUBLISHED_CAPACITY} ± {PUBLISHED_ERROR} [steffan94]; theory {THEORY} [amit85]"
    row = answer["capacity"]
    lines = [
        "| number | published | measured (95 % CI) | verdict |",
        "|---" * 4 + "|",
        f"| patterns per spin at capacity | {published} | {_ci(row['capacity'], 4)} | {row['verdict']} |",
    ]
    for name, row in answer.items():
        if name != "capacity":
            ratio = _ci(row["error relative to the published prediction"], 4)
            error, slope = f"{row['published error']:.4f} [zhang24]", _ci(row["slope"], 3)
            lines.append(
                f"| regression, {name}: error | {error} | {ratio} times that of the prediction | {row['verdict']} |"
            )
            null = f"1 (null {row['slope of the null']:.2f})"
            measured = f"{slope}; cosine {row['cosine']['mean']:.4f}"
            lines.append(f"| regression, {name}: slope | {null} | {measured} | {row['verdict']} |")
    return "\n".join(lines)


def networks(results: dict[str, Any]) -> str:
    """Load at which half of the patterns are retrieved, by number of spins."""
    lines = ["| spins | sets | load at one half, mean | smallest | largest |", "|---" * 5 + "|"]
    for spins in dict.fromkeys(row["spins"] for row in results["networks"]):
        loads = [load_at_half(spins, row["shares"]) for row in results["networks"] if row["spins"] == spins]
        cells = [f"{value:.4f}" for value in (sum(loads) / len(loads), min(loads), max(loads))]
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
