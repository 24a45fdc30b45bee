"""Do contrastive features become Gaussian on a thin shell? Encoders trained with InfoNCE, and with labels.

    python examples/contrastive_shell.py [folder]      about ten minutes on one core

The claim [betser26]: with InfoNCE the lengths of features concentrate (a thin shell) and their coordinates become
Gaussian for any distribution of the inputs; with labels they do not. Inputs are Gaussian, Laplace and sparse. A
positive is the same input with independent noise, the encoder has one hidden layer, and similarities are cosines, so
that the loss does not depend on lengths. Measured on new inputs:

    coefficient of variation     std |z| / mean |z|
    Anderson-Darling             A² of each coordinate of z, standardised; 0.752 is exceeded by 1 Gaussian in 20

They are compared with a Gaussian of the same covariance and with the untrained encoder, over ten seeds of the initial
weights and of all data: means with 95 % confidence intervals, also of the differences from the untrained encoder of the
same seed. The script writes contrastive_shell.json and, if matplotlib is installed, contrastive_shell.svg.
"""

import json
import math
import sys
from pathlib import Path

import torch
from torch import nn

import gradlogz as gz

HIDDEN, FEATURES, CLASSES = 256, 32, 10
BATCH, STEPS, RATE, TEMPERATURE, NOISE, TESTED = 512, 800, 2e-3, 0.2, 0.5, 4096
SEEDS = 10
STUDENT = 2.262  # 97.5 % quantile of Student's t distribution with SEEDS - 1 degrees of freedom
CRITICAL = 0.752  # 5 % critical value of A² (1 + 0.75/n + 2.25/n²), mean and variance estimated   [dagostino86]


def gaussian(count: int, inputs: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(count, inputs, generator=generator)


def laplace(count: int, inputs: int, generator: torch.Generator) -> torch.Tensor:
    """Draw Laplace variables of variance 1, as differences of two exponentials."""
    one, other = (torch.empty(count, inputs).exponential_(generator=generator) for _ in range(2))
    return (one - other) / math.sqrt(2)


def sparse(count: int, inputs: int, generator: torch.Generator) -> torch.Tensor:
    """Draw Gaussian vectors with nine in ten coordinates set to zero, of variance 1."""
    some = torch.rand(count, inputs, generator=generator) < 0.1
    return gaussian(count, inputs, generator) * some * math.sqrt(10)


SOURCES = {
    "gaussian, 64": (gaussian, 64),
    "laplace, 64": (laplace, 64),
    "sparse, 64": (sparse, 64),
    "sparse, 512": (sparse, 512),
}


def encoder(inputs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, FEATURES))


def trained(source: str, objective: str, seed: int) -> nn.Module:
    """Return an encoder trained for STEPS steps with InfoNCE or with labels of a random teacher, or untrained."""
    draw_inputs, inputs = SOURCES[source]
    model = encoder(inputs, seed)
    if objective == "untrained":
        return model
    g = torch.Generator().manual_seed(1000 + seed)
    teacher, head = torch.randn(inputs, CLASSES, generator=g), nn.Linear(FEATURES, CLASSES)
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], RATE)
    for _ in range(STEPS):
        x = draw_inputs(BATCH, inputs, g)
        one, other = (x + NOISE * torch.randn(x.shape, generator=g) for _ in range(2))
        if objective == "labels":
            loss = nn.functional.cross_entropy(head(model(one)), (x @ teacher).argmax(-1))
        else:
            loss = gz.info_nce(model(one), model(other), temperature=TEMPERATURE, normalize=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def anderson_darling(z: torch.Tensor) -> torch.Tensor:
    """Return A² of every column against a Gaussian with estimated mean and variance, corrected for the estimation."""
    n = z.shape[0]
    y = ((z - z.mean(0)) / z.std(0)).sort(0).values
    odd = 2 * torch.arange(1, n + 1, dtype=z.dtype).unsqueeze(-1) - 1
    a = -n - (odd * (torch.special.log_ndtr(y) + torch.special.log_ndtr(-y.flip(0)))).sum(0) / n
    return a * (1 + 0.75 / n + 2.25 / n**2)


def variation(z: torch.Tensor) -> float:
    """Return the coefficient of variation of the lengths."""
    length = z.norm(dim=-1)
    return float(length.std() / length.mean())


def measured(source: str, objective: str, seed: int) -> dict[str, float]:
    """Return the statistics of the features of new inputs for one seed."""
    g = torch.Generator().manual_seed(2000 + seed)
    model, (draw_inputs, inputs) = trained(source, objective, seed), SOURCES[source]
    z = model(draw_inputs(TESTED, inputs, g)).detach().double()
    z = z - z.mean(0)
    values, axes = torch.linalg.eigh(z.mT @ z / len(z))
    gaussian_features = torch.randn(z.shape, generator=g, dtype=z.dtype) * values.clamp(min=0).sqrt() @ axes.mT
    a = anderson_darling(z)
    return {
        "variation": variation(z),
        "variation of a Gaussian": variation(gaussian_features),
        "passed": float((a < CRITICAL).double().mean()),
    }


def interval(values: list[float]) -> dict[str, float]:
    """Return the mean over seeds and half the width of its 95 % confidence interval."""
    v = torch.tensor(values, dtype=torch.float64)
    return {"mean": float(v.mean()), "half width": STUDENT * float(v.std()) / math.sqrt(len(v))}


def summary(by_objective: dict[str, list[dict[str, float]]]) -> dict:
    """Return intervals of every statistic, and of its difference from the untrained encoder of the same seed."""
    result = {}
    for objective, rows in by_objective.items():
        result[objective] = {name: interval([row[name] for row in rows]) for name in rows[0]}
        for name in ("variation", "passed"):
            differences = [row[name] - base[name] for row, base in zip(rows, by_objective["untrained"], strict=True)]
            result[objective][f"{name}, change"] = interval(differences)
    return result


OBJECTIVES = ("untrained", "info_nce", "labels")


def draw(results: dict, path: Path) -> None:
    """Draw a row for each kind of input, a dot for each encoder, and a bar for a Gaussian."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "gradlogz", "font.size": 9, "svg.fonttype": "none"})
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 1, figsize=(7, 5.4), constrained_layout=True)
    colours = dict(zip(OBJECTIVES, ("#888888", "#1b6ca8", "#e07a1f"), strict=True))
    words = dict(zip(OBJECTIVES, ("untrained", "InfoNCE", "labels"), strict=True))
    for panel, name in zip(panels, ("variation", "passed"), strict=True):
        for place, by in enumerate(results.values()):
            for shift, (objective, row) in zip((0.22, 0.0, -0.22), by.items(), strict=True):
                at, colour = -place + shift, colours[objective]
                if name == "variation":
                    panel.plot(row["variation of a Gaussian"]["mean"], at, "|", color="#b0302f", markersize=11)
                panel.errorbar(row[name]["mean"], at, xerr=row[name]["half width"], fmt="o", color=colour, markersize=5)
            panel.axhline(-place - 0.5, color="#dddddd", linewidth=0.8)
        panel.set_yticks([-place for place in range(len(results))], list(results))
        panel.set_ylim(-len(results) + 0.5, 0.5)
        panel.spines[["top", "right"]].set_visible(False)
    for place, objective in enumerate(OBJECTIVES):
        at, colour = (0.88, 0.95 - 0.075 * place), colours[objective]
        panels[0].annotate(words[objective], at, xycoords="axes fraction", va="top", color=colour)
    panels[0].set_xlim(0, 0.5)
    panels[0].set_title(
        "coefficient of variation of lengths, 95 % CI over seeds; red: Gaussian of that covariance",
        loc="left",
        fontsize=9,
    )
    panels[1].axvline(0.95, color="#b0302f", linestyle="--", linewidth=1.2)
    panels[1].annotate("a Gaussian", (0.95, 0.5), (4, -12), textcoords="offset points", color="#b0302f")
    panels[1].set_xlim(-0.03, 1.1)
    panels[1].set_xticks([0, 0.25, 0.5, 0.75, 1.0])
    panels[1].set_title("share of coordinates that pass the Anderson-Darling test at 5 %", loc="left", fontsize=9)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    results = {
        source: summary(
            {objective: [measured(source, objective, seed) for seed in range(SEEDS)] for objective in OBJECTIVES}
        )
        for source in SOURCES
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "contrastive_shell.json").write_text(json.dumps(results, indent=1) + "\n")
    for source, by in results.items():
        for objective, row in by.items():
            cells = (f"{name} {value['mean']:.3f} ± {value['half width']:.3f}" for name, value in row.items())
            print(f"{source:12} {objective:10}", *cells, sep="  ")
    try:
        draw(results, folder / "contrastive_shell.svg")
    except ImportError:
        print("no picture: matplotlib is not installed")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("."))
