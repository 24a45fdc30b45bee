"""Capacity of modern Hopfield networks: share of patterns retrieved against their number and dimension.

    python examples/hopfield_capacity.py [folder]      about two minutes on one core

N random patterns of norm sqrt(d - 1), beta = 1. A pattern is retrieved if a start at a distance of 20 % of its norm
converges to within 10 % of it. Beside it two statements of the theory: the share of patterns that one update provably
leaves within 10 %, from the bound of each pattern, and the number of patterns that can be stored [ramsauer20, Thm. 3].
The script writes hopfield_capacity.json and, if matplotlib is installed, hopfield_capacity.svg to the folder.
"""

import json
import math
import sys
from pathlib import Path

import torch

import gradlogz as gz

BETA, NOISE, NEAR, FAILURE = 1.0, 0.2, 0.1, 0.01
DIMENSIONS = (8, 10, 12, 14, 16, 18, 20, 24, 28, 32)
NUMBERS = tuple(2**k for k in range(1, 17))
SHARES_OF = (12, 16, 20)  # dimensions of the first panel
QUERIES, SEEDS = 200, 4


def sphere(*shape: int, generator: torch.Generator) -> torch.Tensor:
    """Return uniform points on the unit sphere."""
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return x / x.norm(dim=-1, keepdim=True)


def bounds(patterns: torch.Tensor, queries: int) -> torch.Tensor:
    """Return 2 M (N - 1) exp(-beta Delta_i) of the first patterns, without the products of all pairs."""
    products = patterns[:queries] @ patterns.mT
    squares = products.diagonal().clone()
    others = products.fill_diagonal_(-math.inf).amax(-1)
    M, n = float(patterns.norm(dim=-1).max()), len(patterns)
    return 2 * M * (n - 1) * torch.exp(-BETA * (squares - others))


def shares(d: int, n: int, seed: int, queries: int = QUERIES) -> dict[str, float]:
    """Return the shares of patterns that are retrieved, that one update leaves near, and that theory guarantees."""
    generator = torch.Generator().manual_seed(seed)
    M = math.sqrt(d - 1)
    patterns = M * sphere(n, d, generator=generator)
    targets = patterns[:queries]
    start = targets + NOISE * M * sphere(*targets.shape, generator=generator)
    end = gz.retrieve(start, patterns, beta=BETA, max_iterations=60, throw=False).state
    once = gz.retrieve(targets, patterns, beta=BETA, max_iterations=1, throw=False).state

    def near(state: torch.Tensor) -> float:
        return float(((state - targets).norm(dim=-1) <= NEAR * M).double().mean())

    guaranteed = float((bounds(patterns, queries) <= NEAR * M).double().mean())
    return {"retrieved": near(end), "kept": near(once), "guaranteed": guaranteed}


def capacity(numbers: list[int], values: list[float]) -> float:
    """Return the number of patterns up to which a share of 99 % holds, interpolated in log N; NaN if it always does."""
    level = 1 - FAILURE
    for i, value in enumerate(values):
        if value < level:
            if i == 0:
                return math.nan
            part = (values[i - 1] - level) / (values[i - 1] - value)
            return math.exp(math.log(numbers[i - 1]) + part * math.log(numbers[i] / numbers[i - 1]))
    return math.nan


def bound(d: int) -> float:
    """Return sqrt(p) c^((d-1)/4), the number of patterns of the theorem."""
    c = gz.dynamics.capacity_constant(beta=BETA, K=1.0, d=d, p=FAILURE)
    return math.sqrt(FAILURE) * c ** ((d - 1) / 4)


def measured(dimensions: tuple[int, ...] = DIMENSIONS, numbers: tuple[int, ...] = NUMBERS, seeds: int = SEEDS) -> dict:
    """Return shares for each dimension and number of patterns, as means over seeds, and the capacities."""
    curves: dict[str, dict[str, list[float]]] = {}
    for d in dimensions:
        rows = [[shares(d, n, seed) for seed in range(seeds)] for n in numbers]
        curves[str(d)] = {name: [sum(r[name] for r in row) / seeds for row in rows] for name in rows[0][0]}
    capacities = {
        name: {d: capacity(list(numbers), curve[name]) for d, curve in curves.items()}
        for name in ("retrieved", "guaranteed")
    }
    return {
        "numbers": list(numbers),
        "curves": curves,
        "capacity": {name: {d: None if math.isnan(v) else v for d, v in by.items()} for name, by in capacities.items()},
        "bound": {str(d): bound(d) for d in range(4, 65, 4)},
    }


def draw(results: dict, path: Path) -> None:
    """Draw the shares against the number of patterns, and the capacity against the dimension."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "gradlogz", "font.size": 9, "svg.fonttype": "none"})
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 1, figsize=(7, 6.2), constrained_layout=True)
    colours = ["#1b6ca8", "#e07a1f", "#3f8f4f"]
    numbers = results["numbers"]
    for colour, d in zip(colours, SHARES_OF, strict=True):
        curve = results["curves"][str(d)]
        panels[0].plot(numbers, curve["retrieved"], "o-", color=colour, markersize=3, linewidth=1.2)
        panels[0].plot(numbers, curve["guaranteed"], "--", color=colour, linewidth=1.2)
        half = next((i for i, value in enumerate(curve["retrieved"]) if value < 0.5), len(numbers) - 1)
        at = (numbers[half], curve["retrieved"][half])
        panels[0].annotate(f"d = {d}", at, (4, 4), textcoords="offset points", color=colour)
    panels[0].set_xscale("log")
    panels[0].set(xlabel="number of patterns", ylabel="share of patterns")
    panels[0].set_title("retrieved (solid), guaranteed by the bound of each pattern (dashed)", loc="left", fontsize=9)
    styles = {"retrieved": ("retrieved", "o-", 0), "guaranteed": ("guaranteed", "s--", 1)}
    for name, (label, style, i) in styles.items():
        rows = [(int(d), n) for d, n in results["capacity"][name].items() if n is not None]
        panels[1].plot(*zip(*rows, strict=True), style, color=colours[i], markersize=4, linewidth=1.2, label=label)
    line = [(int(d), n) for d, n in results["bound"].items()]
    panels[1].plot(*zip(*line, strict=True), ":", color="#b0302f", linewidth=1.4, label="theorem 3 of [ramsauer20]")
    panels[1].set_yscale("log")
    panels[1].legend(frameon=False, fontsize=8.5)
    panels[1].set(xlabel="dimension", ylabel="number of patterns")
    panels[1].set_title("number of patterns of which 99 % are retrieved", loc="left", fontsize=9)
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main(folder: Path) -> None:
    torch.set_num_threads(1)  # the same numbers everywhere
    results = measured()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hopfield_capacity.json").write_text(json.dumps(results) + "\n")
    for d in results["curves"]:
        parts = [f"{name} {n:.0f}" for name, by in results["capacity"].items() if (n := by[d]) is not None]
        print(f"d = {d}: 99 % of {', '.join(parts) or 'more patterns than were tried'}; theorem {bound(int(d)):.2g}")
    try:
        draw(results, folder / "hopfield_capacity.svg")
    except ImportError:
        print("no picture: matplotlib is not installed")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("."))
