"""Growth of small perturbations of an equilibrium under attention: theory curves and simulated tokens.

    python examples/growth.py [folder]      about half a minute on one core

Three panels: Hermite modes of a whitened cloud against beta, harmonics on the circle against their degree, and Gaussian
clouds that become non-Gaussian. The script writes growth.json and, if matplotlib is installed, growth.svg to the
folder.
"""

import json
import math
import sys
from pathlib import Path

import torch

import gradlogz as gz

TAU, TOKENS, EPS = 0.5, 4000, 0.002
ORDERS, BETAS = (3, 4, 5), (0.1, 0.25, 0.4, 0.55)
CIRCLES, DEGREES = (5.0, 20.0, 80.0), range(1, 26)
SEEDS, CLOUD, STEPS, BETA = 39, 768, 60, 0.3


def polynomial(order: int, x: torch.Tensor) -> torch.Tensor:
    """Return the Hermite polynomial He_n(x) by its recursion."""
    before, now = torch.ones_like(x), x
    for k in range(1, order):
        before, now = now, x * now - k * before
    return now if order else before


def quantiles(below: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the quantiles at (i + 1/2) / n of a distribution function tabulated at x."""
    p = (torch.arange(TOKENS, dtype=x.dtype) + 0.5) / TOKENS
    i = torch.searchsorted(below, p).clamp(1, len(x) - 1)
    part = (p - below[i - 1]) / (below[i] - below[i - 1])
    return x[i - 1] + part * (x[i] - x[i - 1])


def hermite_measured(order: int, beta: float) -> float:
    """Return the growth factor of a Hermite mode around N(0, 1) in one step, from a perturbation and its negative."""
    x = torch.linspace(-9, 9, 100_001, dtype=torch.float64)
    density = (-(x**2) / 2).exp() / math.sqrt(2 * math.pi)
    start, end = torch.zeros(1, dtype=x.dtype), torch.zeros(1, dtype=x.dtype)
    for eps in (EPS, -EPS):
        cloud = quantiles(torch.special.ndtr(x) - eps * polynomial(order - 1, x) * density, x).unsqueeze(-1)
        after = gz.evolve(cloud, gz.Ascent(tau=TAU, beta=beta), contraction="zca", steps=1).cloud
        start, end = gz.dynamics.hermite_mode(cloud, order) - start, gz.dynamics.hermite_mode(after, order) - end
    return float(end / start)


def circle_measured(degree: int, beta: float) -> float:
    """Return the growth factor of a harmonic around the uniform circle in one step."""
    even = torch.linspace(0, 2 * math.pi, 100_001, dtype=torch.float64)
    angle = quantiles((even + EPS / degree * (degree * even).sin()) / (2 * math.pi), even)
    cloud = torch.stack((angle.cos(), angle.sin()), -1)
    after = gz.evolve(cloud, gz.Ascent(tau=TAU, beta=beta), contraction="sphere", steps=1).cloud
    return float(gz.dynamics.harmonic_mode(after, degree) / gz.dynamics.harmonic_mode(cloud, degree))


def measured() -> dict:
    """Return measured growth factors, and the skewness of whitened clouds over time with its null distribution."""
    cloud = torch.randn(SEEDS, CLOUD, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    clouds = gz.evolve(
        cloud, gz.Ascent(tau=TAU, beta=BETA), contraction="zca", steps=STEPS, observe=["skewness"], every=2
    )
    band = clouds.band("skewness", level=0.9, of="cloud")
    null = gz.dynamics.null_band("skewness", cloud[0], level=0.9, generator=torch.Generator().manual_seed(1))
    return {
        "hermite": {order: [hermite_measured(order, beta) for beta in BETAS] for order in ORDERS},
        "circle": {beta: [circle_measured(degree, beta) for degree in DEGREES] for beta in CIRCLES},
        "fastest": {beta: gz.dynamics.fastest_degree(dim=2, beta=beta) for beta in CIRCLES},
        "times": clouds.times.tolist(),
        "skewness": {name: getattr(band, name).tolist() for name in band._fields},
        "null": [float(null.low), float(null.high)],
        "escape": gz.dynamics.escape_time(CLOUD, beta=BETA, tau=TAU),
    }


def draw(results: dict, path: Path) -> None:
    """Draw the three panels; lines are theory, dots are simulated tokens."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "gradlogz", "font.size": 9, "svg.fonttype": "none"})
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(3, 1, figsize=(7, 8.4), constrained_layout=True)
    colours = ["#1b6ca8", "#e07a1f", "#3f8f4f"]
    betas = torch.linspace(0.01, 0.6, 60).tolist()
    for colour, (order, values) in zip(colours, results["hermite"].items(), strict=True):
        (theory,) = gz.dynamics.hermite_curves([order], betas, tau=TAU).tolist()
        panels[0].plot(betas, theory, color=colour, linewidth=1.2)
        panels[0].plot(BETAS, values, "o", color=colour, markersize=4)
        panels[0].annotate(f"order {order}", (betas[-1], theory[-1]), (4, -3), textcoords="offset points", color=colour)
    panels[0].set(xlabel="beta", ylabel="factor per step", xlim=(0, 0.66))
    panels[0].set_title("Hermite modes of a whitened cloud", loc="left", fontsize=9)
    for colour, (beta, values) in zip(colours, results["circle"].items(), strict=True):
        theory = gz.dynamics.sphere_curves(DEGREES, [beta], dim=2, tau=TAU)[:, 0].tolist()
        panels[1].plot(DEGREES, theory, color=colour, linewidth=1.2)
        panels[1].plot(DEGREES, values, "o", color=colour, markersize=4)
        fastest = results["fastest"][beta]
        text, at = f"beta {beta:g}\nfastest {fastest}", (fastest, theory[fastest - 1])
        panels[1].annotate(text, at, (0, 6), textcoords="offset points", color=colour, ha="center")
    panels[1].margins(y=0.3)
    panels[1].set(xlabel="degree", ylabel="factor per step")
    panels[1].set_title("harmonics on the circle", loc="left", fontsize=9)
    times, skewness = results["times"], results["skewness"]
    panels[2].axhspan(*results["null"], color="#bbbbbb", alpha=0.6, linewidth=0)
    panels[2].fill_between(times, skewness["low"], skewness["high"], color=colours[0], alpha=0.2, linewidth=0)
    panels[2].plot(times, skewness["middle"], color=colours[0])
    panels[2].axvline(results["escape"], color="#b0302f", linestyle="--", linewidth=1.2)
    style = {"textcoords": "offset points", "fontsize": 8.5}
    panels[2].annotate("escape time of theory", (results["escape"], 1.0), (5, -20), color="#b0302f", **style)
    panels[2].annotate(
        "a Gaussian, 9 in 10", (times[-1], results["null"][1]), (-2, 4), ha="right", color="#666666", **style
    )
    panels[2].annotate(
        f"{SEEDS} clouds, 9 in 10", (times[-1], skewness["low"][-1]), (-2, -14), ha="right", color=colours[0], **style
    )
    panels[2].set_yscale("log")
    panels[2].set(xlabel="step", ylabel="skewness", xlim=(0, times[-1]))
    panels[2].set_title(f"whitened Gaussian clouds of {CLOUD} tokens, beta {BETA}", loc="left", fontsize=9)
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main(folder: Path) -> None:
    torch.set_num_threads(1)  # the same numbers everywhere
    results = measured()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "growth.json").write_text(json.dumps(results) + "\n")
    for beta, values in results["circle"].items():
        theory = [gz.dynamics.sphere_growth(degree, dim=2, beta=beta, tau=TAU) for degree in DEGREES]
        worst = max(abs(a - b) for a, b in zip(values, theory, strict=True))
        print(f"circle, beta {beta:g}: fastest degree {results['fastest'][beta]}, tokens off by {worst:.1e} at most")
    for order, values in results["hermite"].items():
        theory = [gz.dynamics.hermite_growth(order, variance=1.0, beta=beta, tau=TAU) for beta in BETAS]
        worst = max(abs(a - b) / (b - 1) for a, b in zip(values, theory, strict=True))
        print(f"order {order}: tokens off by {100 * worst:.0f} % of the growth at most")
    try:
        draw(results, folder / "growth.svg")
    except ImportError:
        print("no picture: matplotlib is not installed")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("."))
