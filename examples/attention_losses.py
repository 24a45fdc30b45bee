"""Train a small GPT with and without each loss on statistics of attention, and draw the statistic that it bounds.

    python examples/attention_losses.py [folder]      about a minute on one core

The learning rate is so high that logits grow throughout. Coefficients are larger than the defaults, which are made for
runs of many more steps. The script writes attention_losses.json and, if matplotlib is
installed, z_loss.svg, entropy_loss.svg and logit_variance_loss.svg to the folder.
"""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

import gradlogz
from entropy_collapse import CONTEXT, GPT, loss_of, source
from gradlogz.attention import Observation, entropy_loss, logit_variance_loss, z_loss

STEPS, EVERY, RATE, WARMUP = 160, 4, 1e-2, 20
FLOOR = 0.2 * math.log(CONTEXT)


class Penalty(NamedTuple):
    """A loss, the statistic that is drawn, and its name."""

    loss: Callable[[Observation], torch.Tensor]
    statistic: Callable[[Observation], torch.Tensor]
    label: str


def lowest_entropy(observation: Observation) -> torch.Tensor:
    return observation.stack("entropy").mean((1, 3)).min()


PENALTIES = {
    "z_loss": Penalty(
        lambda o: z_loss(o, coefficient=1e-3), lambda o: o.stack("log_normalizer").square().mean(), "mean of G²"
    ),
    "entropy_loss": Penalty(
        lambda o: entropy_loss(o, floor=FLOOR, coefficient=1.0), lowest_entropy, "entropy of lowest head"
    ),
    "logit_variance_loss": Penalty(
        lambda o: logit_variance_loss(o, coefficient=1e-1), lambda o: o.stack("logit_variance").mean(), "logit variance"
    ),
}


def trained(name: str | None, steps: int = STEPS) -> dict[str, list[float]]:
    """Train with one of the losses, or with none; return the losses and every statistic of each fourth step."""
    torch.manual_seed(0)
    data = source()
    model = GPT(int(data.max()) + 1)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.0)
    curves: dict[str, list[float]] = {"loss": [], **{each: [] for each in PENALTIES}}
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / WARMUP)
        with gradlogz.observe(model) as observation:
            loss = loss_of(model, data)
        total = loss if name is None else loss + PENALTIES[name].loss(observation)
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        curves["loss"].append(round(loss.item(), 4))
        if step % EVERY == 0:
            for each, penalty in PENALTIES.items():
                curves[each].append(round(penalty.statistic(observation).item(), 4))
    return curves


def draw(results: dict, name: str, path: Path) -> None:
    """Draw the statistic of one loss, with and without it."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "gradlogz", "font.size": 9, "svg.fonttype": "none"})
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(4.4, 2.4), constrained_layout=True)
    for run, colour, label in (("none", "#b0302f", f"without {name}"), (name, "#1b6ca8", f"with {name}")):
        panel.plot(range(0, EVERY * len(results[run][name]), EVERY), results[run][name], color=colour, label=label)
    if name == "entropy_loss":
        panel.axhline(FLOOR, color="#888888", linestyle=":", linewidth=1.0)
        panel.annotate("floor", (0, FLOOR), (3, 2), textcoords="offset points", color="#888888", fontsize=8)
    panel.set_ylabel(PENALTIES[name].label)
    panel.set_xlabel("step")
    panel.legend(frameon=False, fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    panel.margins(x=0)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main(folder: Path) -> None:
    torch.set_num_threads(1)  # the same numbers everywhere
    results = {}
    for name in (None, *PENALTIES):
        curves = results[name or "none"] = trained(name)
        ends = ", ".join(f"{PENALTIES[each].label} {curves[each][-1]:.3g}" for each in PENALTIES)
        print(f"{name or 'none'}: loss {sum(curves['loss'][-20:]) / 20:.2f}, {ends}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "attention_losses.json").write_text(json.dumps(results) + "\n")
    try:
        for name in PENALTIES:
            draw(results, name, folder / f"{name}.svg")
    except ImportError:
        print("no picture: matplotlib is not installed")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("."))
