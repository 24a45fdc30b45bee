"""How many steps do contrastive losses need? N-pair, SigLIP, Bernoulli and triplet losses on one task.

    python examples/contrastive_convergence.py [folder]      about five minutes on one core

The claim [shim22, section 2.2; sohn16]: the Bernoulli loss of pairs and the triplet loss converge slowly, the N-pair
loss does not. An input is a tanh of mixed class and nuisance coordinates, a positive has the same class and other
nuisance, and the encoder has one hidden layer. Similarities are cosines. Two properties of the losses are separated:

                                       all other positives of the batch     one of them, at random
    softmax over candidates            N-pair                               N-pair, one negative
    a sigmoid for each pair            SigLIP                               Bernoulli
    margin                                                                  triplet

Measured on pairs of new classes: recall at 1, the share of anchors whose nearest candidate is their own. Step size,
margin, and the initial value of the learned offset of sigmoids are those of RATES and SETTINGS with the largest mean
recall over training for two seeds that are not reported. The script writes contrastive_convergence.json and, if
matplotlib is installed, contrastive_convergence.svg to the folder.
"""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from scipy import stats
from torch import nn

from gradlogz import contrastive

INPUTS, CLASS, HIDDEN, FEATURES = 48, 8, 96, 16
BATCH, STEPS, EVERY, TESTED = 96, 400, 2, 512
TEMPERATURE, NUISANCE = 0.1, 0.7
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
OFFSETS = (0.0, -math.log(BATCH - 1), -10.0, -20.0)  # even odds, those of the batch, the value of [zhai23b], lower
SETTINGS = {"SigLIP": OFFSETS, "Bernoulli": OFFSETS, "triplet": (0.2, 0.5, 1.0, 1.5)}  # initial offsets; margins
SEEDS, TUNING = tuple(range(10)), (100, 101)
LEVEL = 0.8  # recall that a loss has to reach


class Pairs:
    """Anchors and positives: classes in CLASS coordinates, nuisance in the others, mixed and passed through tanh."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.mixing = torch.linalg.qr(torch.randn(INPUTS, INPUTS, generator=self.generator)).Q

    def draw(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        g = self.generator
        classes = torch.randn(count, CLASS, generator=g)
        nuisance = (NUISANCE * torch.randn(count, INPUTS - CLASS, generator=g) for _ in range(2))
        one, other = (torch.tanh(torch.cat((classes, n), -1) @ self.mixing) for n in nuisance)
        return one, other


def n_pair(a: torch.Tensor, b: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return contrastive.n_pair(a, b, temperature=TEMPERATURE, normalize=True)


def siglip(a: torch.Tensor, b: torch.Tensor, _: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    return contrastive.siglip(a, b, temperature=TEMPERATURE, offset=offset, normalize=True)


def n_pair_one(a: torch.Tensor, b: torch.Tensor, negative: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    """Return log(1 + exp((s_- - s_+) / T)), the N-pair loss of two candidates."""
    options = {"similarity": "dot", "temperature": TEMPERATURE, "normalize": True}
    return contrastive.triplet_loss(a, b, negative, **options) / TEMPERATURE


def bernoulli(a: torch.Tensor, b: torch.Tensor, negative: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Return -log sigmoid(s_+ / T + offset) - log sigmoid(-s_- / T - offset)."""
    a, b, negative = (nn.functional.normalize(t, dim=-1) for t in (a, b, negative))
    s, away = ((a * t).sum(-1) / TEMPERATURE + offset for t in (b, negative))
    return (nn.functional.softplus(-s) + nn.functional.softplus(away)).mean()


def triplet(a: torch.Tensor, b: torch.Tensor, negative: torch.Tensor, margin: torch.Tensor) -> torch.Tensor:
    return contrastive.triplet_loss(a, b, negative, margin=float(margin.detach()), similarity="dot", normalize=True)


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "N-pair": n_pair,
    "SigLIP": siglip,
    "N-pair, one negative": n_pair_one,
    "Bernoulli": bernoulli,
    "triplet": triplet,
}


def recall(model: nn.Module, pairs: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Return the share of anchors whose nearest candidate by cosine is their own positive."""
    with torch.no_grad():
        a, b = (nn.functional.normalize(model(x), dim=-1) for x in pairs)
        return float(((a @ b.mT).argmax(-1) == torch.arange(len(a))).double().mean())


def trained(name: str, rate: float, setting: float, seed: int, steps: int = STEPS) -> list[float]:
    """Return recall before training and after every EVERY steps; `setting` is an initial offset or a margin."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, FEATURES))
    offset = nn.Parameter(torch.tensor(setting))
    pairs = Pairs(seed)
    tested = pairs.draw(TESTED)
    optimizer = torch.optim.Adam([*model.parameters(), offset], rate)
    curve = [recall(model, tested)]
    for step in range(1, steps + 1):
        one, other = pairs.draw(BATCH)
        a, b = model(one), model(other)
        shift = int(torch.randint(1, BATCH, (), generator=pairs.generator))
        loss = LOSSES[name](a, b, b.roll(shift, 0), offset)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % EVERY == 0:
            curve.append(recall(model, tested))
    return curve


def reached(curve: list[float]) -> float:
    """Return the first recorded step at which recall is at least LEVEL, infinite if there is none."""
    return next((float(EVERY * i) for i, value in enumerate(curve) if value >= LEVEL), math.inf)


def interval(values: list[float]) -> tuple[float, float]:
    """Return mean and half width of a 95 % confidence interval (Student's t)."""
    t = torch.tensor(values, dtype=torch.float64)
    return float(t.mean()), float(stats.t.ppf(0.975, len(t) - 1) * t.std() / math.sqrt(len(t)))


def measured(name: str) -> dict:
    """Choose rate and setting of a loss on the tuning seeds, and train on the others."""
    choices = [(rate, setting) for rate in RATES for setting in SETTINGS.get(name, (0.0,))]
    score = {choice: sum(sum(trained(name, *choice, seed)) for seed in TUNING) for choice in choices}
    rate, setting = max(choices, key=lambda choice: score[choice])
    return {"rate": rate, "setting": setting, "curves": [trained(name, rate, setting, seed) for seed in SEEDS]}


def summary(row: dict) -> dict:
    """Return means and half widths of 95 % CI: steps to LEVEL, if all seeds reach it, and the last recall."""
    steps = [reached(curve) for curve in row["curves"]]
    return {
        "reached": sum(map(math.isfinite, steps)),
        "steps": interval(steps) if all(map(math.isfinite, steps)) else None,
        "last": interval([curve[-1] for curve in row["curves"]]),
    }


def draw(results: dict, path: Path) -> None:
    """Draw the mean recall of each loss over training, with its 95 % confidence band."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "gradlogz", "font.size": 9, "svg.fonttype": "none"})
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(7, 3.6), constrained_layout=True)
    colours = ("#1b6ca8", "#2a9d6f", "#7a5195", "#e07a1f", "#b0302f")
    for colour, (name, row) in zip(colours, results.items(), strict=True):
        each = [interval(list(values)) for values in zip(*row["curves"], strict=True)]
        steps = [EVERY * i for i in range(len(each))]
        panel.fill_between(steps, [m - h for m, h in each], [m + h for m, h in each], color=colour, alpha=0.2, lw=0)
        panel.plot(steps, [m for m, _ in each], color=colour, label=name)
    panel.axhline(LEVEL, color="#888888", linestyle=":", linewidth=1)
    panel.set_xlabel("training steps")
    panel.set_ylabel("recall at 1, new classes")
    panel.set_ylim(0, 1)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    results = {name: measured(name) for name in LOSSES}
    folder.mkdir(parents=True, exist_ok=True)
    rounded = {n: row | {"curves": [[round(v, 3) for v in c] for c in row["curves"]]} for n, row in results.items()}
    (folder / "contrastive_convergence.json").write_text(json.dumps(rounded) + "\n")
    for name, row in results.items():
        print(f"{name:22} rate {row['rate']:g}  setting {row['setting']:.3g}  {summary(row)}")
    try:
        draw(results, folder / "contrastive_convergence.svg")
    except ImportError:
        print("no picture: matplotlib is not installed")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("."))
