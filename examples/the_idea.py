"""Attention in one picture: the log normaliser of seven keys, its gradient, and the keys weighted by one query.

    python examples/the_idea.py [folder]      a second on one core

Left, the plane of queries: level lines of G(η) = log Σ_j exp<k_j, η>, and its gradient at three queries. Right, the
plane of keys: the weights of the query of the filled arrow, their mean, which is the gradient, and their covariance,
which is the second derivative. The script writes the_idea.svg to the folder.
"""

import math
import sys
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from matplotlib.patches import Ellipse

from gradlogz import Empirical

KEYS = torch.tensor(
    [[-1.5, -0.4], [-0.9, 1.1], [0.2, -1.3], [0.5, 0.6], [1.3, 1.2], [1.6, -0.5], [-0.2, 0.1]], dtype=torch.float64
)
QUERY = torch.tensor([1.2, 0.8], dtype=torch.float64)
OTHERS = torch.tensor([[-1.6, 1.0], [0.2, -1.7]], dtype=torch.float64)
BLUE, ORANGE, GREY = "#2457a6", "#d9650b", "#6b7280"


def log_normalizer_panel(axes, h):
    """Level lines of the log normaliser, and its gradient at the queries."""
    line = torch.linspace(-2.6, 2.6, 161, dtype=torch.float64)
    x, y = torch.meshgrid(line, line, indexing="xy")
    values = h.log_normalizer(torch.stack((x, y), -1).reshape(-1, 2)).reshape(x.shape)
    axes.contour(x, y, values, levels=14, colors=GREY, linewidths=0.7, alpha=0.7)
    for query, colour in [(QUERY, ORANGE), *((other, BLUE) for other in OTHERS)]:
        gradient = h.mean(query)
        axes.annotate("", query + 0.7 * gradient, query, arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 2})
        axes.plot(*query, "o", color=colour, markersize=6)
    axes.annotate("query η", QUERY, (4, -14), textcoords="offset points", color=ORANGE)
    axes.annotate("∇G(η)", QUERY + 0.7 * h.mean(QUERY), (-42, 4), textcoords="offset points", color=ORANGE)
    axes.set_title("Log normaliser G(η) = log Σ exp⟨kⱼ, η⟩\nand its gradient", fontsize=10)


def keys_panel(axes, h):
    """The keys with the weights of the query, their mean and their covariance."""
    weights = torch.softmax(KEYS @ QUERY, 0)
    axes.scatter(*KEYS.T, s=20 + 900 * weights, color=BLUE, alpha=0.55, linewidths=0)
    for key, weight in zip(KEYS, weights, strict=True):
        axes.annotate(f"{weight:.2f}", key, (0, -20), textcoords="offset points", ha="center", fontsize=8, color=BLUE)
    mean, (values, vectors) = h.mean(QUERY), torch.linalg.eigh(h.covariance(QUERY))
    angle = math.degrees(math.atan2(*vectors[:, 1].flip(0)))
    axes.add_patch(Ellipse(mean, *(2 * values.flip(0).sqrt()), angle=angle, fill=False, edgecolor=ORANGE, lw=1.5))
    axes.plot(*mean, "o", color=ORANGE, markersize=7)
    pointer = {"arrowstyle": "-", "color": ORANGE, "lw": 0.8, "shrinkB": 5}
    axes.annotate("attention = ∇G(η)", mean, (-2.3, 2.0), color=ORANGE, arrowprops=pointer)
    axes.annotate("covariance = ∇²G(η)", mean, (-42, 58), textcoords="offset points", color=ORANGE)
    axes.set_title("Keys weighted by softmax⟨kⱼ, η⟩:\ntheir mean is the output of attention", fontsize=10)


def main(folder: Path) -> None:
    plt.rcParams.update({"font.size": 9, "svg.hashsalt": "the_idea"})
    h = Empirical(KEYS)
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.2, 4.1), layout="constrained")
    log_normalizer_panel(left, h)
    keys_panel(right, h)
    for axes in (left, right):
        axes.set(xlim=(-2.6, 2.6), ylim=(-2.6, 2.6), aspect="equal", xticks=[], yticks=[])
        axes.spines[:].set_color("#d1d5db")
    figure.savefig(folder / "the_idea.svg", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
