"""Train a small GPT with a fault in its optimizer; the alert switches QK-clip on, and the training goes on.

    python examples/qk_clip.py [folder]      about two minutes on one core

From step 60 on, the projections of queries and keys grow by 5 % in each step, as with a weight decay of the wrong sign.
Logits grow without bound, the loss rises, and in the end it is NaN. In the second run the first alert of the monitor
switches QK-clip on. The script writes qk_clip.json and, if matplotlib is installed, qk_clip.svg to the folder.
"""

import json
import math
import sys
from pathlib import Path

import torch

import gradlogz
from entropy_collapse import GPT, loss_of, noticed, source
from gradlogz.attention import Alert, Thresholds, qk_clip

STEPS, FAULT, GROWTH, RATE, WARMUP = 240, 60, 1.05, 8e-3, 20
ALERT, TAU = 100.0, 30.0  # largest logit that raises the alert, and to which logits are clipped then


def trained(*, clip: bool, steps: int = STEPS, fault: int = FAULT) -> tuple[list[float], list[float], list[Alert]]:
    """Return loss and largest logit of every step, and the alerts; with `clip`, clip from the first alert on."""
    torch.manual_seed(0)
    data = source()
    model = GPT(int(data.max()) + 1)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.0)
    losses: list[float] = []
    logits: list[float] = []
    alerts: list[Alert] = []
    thresholds = Thresholds(entropy=None, logit=ALERT, sink=None)
    with gradlogz.monitor(model, every=1, on_alert=alerts.append, thresholds=thresholds) as m:
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / WARMUP)
            loss = loss_of(model, data)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            logits.append(max(float(heads.max_logit.greatest.max()) for heads in m.row().layers.values()))
            if step >= fault:
                grow(model)
            if clip and alerts:
                qk_clip(model, m.row(), TAU)
    return losses, logits, alerts


@torch.no_grad()
def grow(model: GPT) -> None:
    """Multiply the projections of queries and keys by the growth of the fault."""
    for block in model.blocks:
        weight = block.attention.qkv.weight
        weight[: 2 * len(weight) // 3] *= GROWTH


def rounded(values: list[float]) -> list[float | None]:
    """Four digits, and None for NaN, which JSON does not have."""
    return [round(value, 4) if math.isfinite(value) else None for value in values]


def draw(results: dict, path: Path) -> None:
    """Draw loss and largest logit of both runs."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "gradlogz", "font.size": 9, "svg.fonttype": "none"})
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 1, figsize=(7, 4.6), sharex=True, constrained_layout=True)
    for name, colour in (("without QK-clip", "#b0302f"), ("with QK-clip from the alert on", "#1b6ca8")):
        for panel, curve, width in zip(panels, ("losses", "logits"), (0.9, 1.2), strict=True):
            values = [math.nan if value is None else value for value in results[name][curve]]
            panel.plot(values, color=colour, linewidth=width, label=name)
    panels[0].set_ylabel("loss")
    panels[0].set_ylim(1.4, 3.4)
    panels[0].legend(frameon=False, fontsize=8.5)
    panels[1].set_yscale("log")
    panels[1].set_ylabel("largest logit")
    panels[1].set_xlabel("step")
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(x=0)
        panel.axvline(FAULT, color="#888888", linestyle=":", linewidth=1.2)
        panel.axvline(results["alert"], color="#444444", linestyle="--", linewidth=1.2)
    style = {"textcoords": "offset points", "va": "bottom", "fontsize": 8.5}
    panels[1].annotate(f"fault, step {FAULT}", (FAULT, 3.0), (-4, 0), ha="right", color="#888888", **style)
    panels[1].annotate(f"alert, step {results['alert']}", (results["alert"], 3.0), (4, 0), color="#444444", **style)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main(folder: Path) -> None:
    torch.set_num_threads(1)  # the same numbers everywhere
    results: dict = {}
    for name, clip in (("without QK-clip", False), ("with QK-clip from the alert on", True)):
        losses, logits, alerts = trained(clip=clip)
        results[name] = {"losses": rounded(losses), "logits": rounded(logits)}
        results["alert"] = alerts[0].step
        print(f"{name}: alert at step {alerts[0].step}, final loss {sum(losses[-20:]) / 20:.2f}")
    losses = results["without QK-clip"]["losses"]
    results["NaN"] = losses.index(None)
    results["loss up 5 %"] = noticed(losses[: results["NaN"]])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "qk_clip.json").write_text(json.dumps(results) + "\n")
    try:
        draw(results, folder / "qk_clip.svg")
    except ImportError:
        print("no picture: matplotlib is not installed")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("."))
