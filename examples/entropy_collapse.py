"""Train a small GPT with a growing learning rate until it diverges; the monitor raises alerts before the loss rises.

    python examples/entropy_collapse.py [folder]      about a minute on one core

The model reads the source of Python's argparse character by character. Every 5 steps the monitor evaluates its 4
layers; alerts are printed with the loss. The script writes entropy_collapse.json and, if matplotlib is installed,
entropy_collapse.svg to the folder.
"""

import argparse
import inspect
import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import gradlogz

CONTEXT, BATCH, STEPS, EVERY = 96, 16, 400, 5
RATE, GROWTH, WARMUP = 2e-3, 1.012, 20


class SelfAttention(nn.Module):
    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(size), nn.LayerNorm(size)
        self.attention = SelfAttention(size, heads)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.after(x))


class GPT(nn.Module):
    def __init__(self, letters: int, size: int = 96, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(letters, size), nn.Embedding(CONTEXT, size)
        self.blocks = nn.Sequential(*(Block(size, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, letters)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.letter(ids) + self.place.weight[: ids.shape[1]])))


def source() -> torch.Tensor:
    """Return the text as numbers of letters."""
    text = inspect.getsource(argparse)
    letters = {letter: index for index, letter in enumerate(sorted(set(text)))}
    return torch.tensor([letters[letter] for letter in text])


def loss_of(model: nn.Module, data: torch.Tensor) -> torch.Tensor:
    """Return the loss of a random batch."""
    start = torch.randint(0, len(data) - CONTEXT - 1, (BATCH, 1))
    ids = data[start + torch.arange(CONTEXT + 1)]
    return functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def rate(step: int) -> float:
    """Return the learning rate of a step: a warm-up that never ends."""
    return RATE * min(1.0, (step + 1) / WARMUP) * GROWTH**step


def trained(
    steps: int = STEPS,
) -> tuple[list[float], list[gradlogz.attention.MonitorRow], list[gradlogz.attention.Alert]]:
    """Train the model; return the losses of all steps, and the rows and alerts of the monitor."""
    torch.manual_seed(0)
    data = source()
    model = GPT(int(data.max()) + 1)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.0)
    losses: list[float] = []
    rows: list[gradlogz.attention.MonitorRow] = []
    alerts: list[gradlogz.attention.Alert] = []

    def alarmed(alert: gradlogz.attention.Alert) -> None:
        alerts.append(alert)
        print(f"loss {losses[-1]:.2f}   {alert}")

    with gradlogz.monitor(model, every=EVERY, writer=rows.append, on_alert=alarmed):
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = rate(step)
            loss = loss_of(model, data)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, rows, alerts


def noticed(losses: list[float], span: int = 20, worse: float = 0.05) -> int | None:
    """Return the first step at which the mean loss over `span` steps exceeds its minimum by the share `worse`."""
    best = float("inf")
    for step in range(span, len(losses) + 1):
        mean = sum(losses[step - span : step]) / span
        best = min(best, mean)
        if mean > (1 + worse) * best:
            return step - 1
    return None


def first(alerts: list[gradlogz.attention.Alert], kind: str) -> int | None:
    return next((alert.step for alert in alerts if alert.kind == kind), None)


def draw(results: dict, path: Path) -> None:
    """Draw loss, entropy and largest logit, with the step of the first alarm of each."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "gradlogz", "font.size": 9, "svg.fonttype": "none"})
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(3, 1, figsize=(7, 6.2), sharex=True, constrained_layout=True)
    colours = ["#1b6ca8", "#e07a1f", "#3f8f4f", "#8e4a9e"]
    panels[0].plot(results["losses"], color="#444444", linewidth=0.9)
    panels[0].set_ylabel("loss")
    for colour, (layer, values) in zip(colours, results["layers"].items(), strict=True):
        panels[1].plot(results["steps"], values["entropy"], color=colour, label=layer)
        panels[2].plot(results["steps"], values["max_logit"], color=colour)
    panels[1].set_ylabel("mean entropy (nats)")
    panels[1].legend(frameon=False, fontsize=8, ncols=2, loc="lower left")
    panels[2].set_yscale("log")
    panels[2].set_ylabel("highest logit")
    panels[2].set_xlabel("step")
    marks = (
        ("loss up 5 %", results["loss"], "#444444", "-"),
        ("entropy collapse", results["entropy collapse"], "#b0302f", "--"),
        ("logit explosion", results["logit explosion"], "#b0302f", ":"),
    )
    for panel, (name, step, colour, _) in zip(panels, marks, strict=True):
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(x=0)
        for _, other, its_colour, style in marks:
            panel.axvline(other, color=its_colour, linestyle=style, linewidth=1.2)
        text, at = f"{name}, step {step}", (step, panel.get_ylim()[1])
        style = {"textcoords": "offset points", "ha": "right", "va": "top", "color": colour, "fontsize": 8.5}
        panel.annotate(text, at, (-5, -2), **style)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main(folder: Path) -> None:
    torch.set_num_threads(1)  # the same numbers everywhere
    losses, rows, alerts = trained()
    results = {
        "losses": [round(loss, 4) for loss in losses],
        "steps": [row.step for row in rows],
        "layers": {
            layer: {
                "entropy": [round(float(row.layers[layer].entropy.mean.mean()), 4) for row in rows],
                "max_logit": [round(float(row.layers[layer].max_logit.greatest.max()), 3) for row in rows],
            }
            for layer in rows[0].layers
        },
        "logit explosion": first(alerts, "logit explosion"),
        "entropy collapse": first(alerts, "entropy collapse"),
        "loss": noticed(losses),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "entropy_collapse.json").write_text(json.dumps(results) + "\n")
    alarms, late = {name: results[name] for name in ("logit explosion", "entropy collapse")}, results["loss"]
    print(", ".join(f"{name} at step {step}" for name, step in {**alarms, "loss": late}.items()))
    if not all(step is not None and late is not None and step < late for step in alarms.values()):
        sys.exit("the loss was first")
    try:
        draw(results, folder / "entropy_collapse.svg")
    except ImportError:
        print("no picture: matplotlib is not installed")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("."))
