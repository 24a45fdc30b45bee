"""Time and memory of contrastive losses, forward and backward, relative to the loss from a dense matrix of logits."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy, normalize

import gradlogz as gz
from timing import compare

T = 0.1
# name, vectors in a batch, dimension, rounds
PROBLEMS = (("info_nce", 8192, 128, 3), ("clip", 8192, 128, 2), ("nt_xent", 4096, 128, 2), ("info_nce", 1024, 128, 9))
PAIRS = (64, 128)  # batch sizes for pytorch-metric-learning, whose memory grows as n³


def dense_info_nce(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return cross_entropy(a @ b.mT / T, torch.arange(len(a)))


def dense_clip(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    s, targets = a @ b.mT / T, torch.arange(len(a))
    return (cross_entropy(s, targets) + cross_entropy(s.mT, targets)) / 2


def dense_nt_xent(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    z = torch.cat([a, b])
    itself = torch.eye(len(z), dtype=torch.bool)
    s = (z @ z.mT / T).masked_fill(itself, -torch.inf)
    return cross_entropy(s, torch.arange(len(z)).roll(len(a)))


DENSE = {"info_nce": dense_info_nce, "clip": dense_clip, "nt_xent": dense_nt_xent}
LOSSES = {"info_nce": gz.info_nce, "clip": gz.clip_loss, "nt_xent": gz.nt_xent}
OURS = {name: lambda a, b, loss=loss: loss(a, b, temperature=T) for name, loss in LOSSES.items()}


def batch(n: int, d: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    a, b = (normalize(torch.randn(n, d, generator=g), dim=-1).requires_grad_() for _ in range(2))
    return a, b


def both_ways(loss: Callable[..., torch.Tensor], a: torch.Tensor, b: torch.Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(loss(a, b), (a, b))


def mebibytes(kind: str, name: str, n: int, d: int) -> int:
    """Return the peak memory added by one forward and backward pass, measured in a separate process."""
    here = Path(__file__)
    call = [sys.executable, str(here), kind, name, str(n), str(d)]
    process = subprocess.run(call, capture_output=True, text=True, check=True)
    return json.loads(process.stdout)


def held(kind: str, name: str, n: int, d: int) -> int:
    def now(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field))

    torch.set_num_threads(2)
    loss = (OURS if kind == "ours" else DENSE)[name]
    both_ways(loss, *batch(256, d))()  # loads and compiles everything that is needed once
    call = both_ways(loss, *batch(n, d))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the present value
    before = now("VmRSS")
    call()
    return round((now("VmHWM") - before) / 1024)


def rows() -> list[dict[str, object]]:
    torch.set_num_threads(2)
    table: list[dict[str, object]] = []
    for name, n, d, rounds in PROBLEMS:
        a, b = batch(n, d)
        alternatives = {"dense": both_ways(DENSE[name], a, b), "gradlogz": both_ways(OURS[name], a, b)}
        if name == "info_nce":
            alternatives["compiled"] = both_ways(torch.compile(DENSE[name]), a, b)
        seconds = compare(alternatives, rounds=rounds)
        row: dict[str, object] = {"loss": name, "vectors": n, "dimension": d}
        row["dense ms"] = round(1e3 * seconds["dense"], 1)
        row["gradlogz / dense"] = round(seconds["gradlogz"] / seconds["dense"], 3)
        if "compiled" in seconds:
            row["gradlogz / compiled"] = round(seconds["gradlogz"] / seconds["compiled"], 3)
        row["A/A"] = round(seconds["A/A"] / seconds["dense"], 3)
        row["MiB dense"], row["MiB gradlogz"] = (mebibytes(kind, name, n, d) for kind in ("dense", "ours"))
        table.append(row)
    table += others()
    return table


def others() -> list[dict[str, object]]:
    """Return rows for pytorch-metric-learning's NTXentLoss."""
    from pytorch_metric_learning.losses import NTXentLoss

    table: list[dict[str, object]] = []
    for pairs in PAIRS:
        a, b = batch(pairs, 128)
        labels, theirs = torch.arange(pairs).repeat(2), NTXentLoss(temperature=T)

        def metric_learning(a: torch.Tensor, b: torch.Tensor, labels=labels, theirs=theirs) -> torch.Tensor:
            return theirs(torch.cat([a, b]), labels)

        seconds = compare(
            {
                "dense": both_ways(dense_nt_xent, a, b),
                "gradlogz": both_ways(OURS["nt_xent"], a, b),
                "pytorch-metric-learning": both_ways(metric_learning, a, b),
            },
            rounds=15,
        )
        row: dict[str, object] = {"loss": "nt_xent", "vectors": pairs, "dimension": 128}
        row["dense ms"] = round(1e3 * seconds["dense"], 3)
        for name in ("gradlogz", "pytorch-metric-learning"):
            row[f"{name} / dense"] = round(seconds[name] / seconds["dense"], 2)
        row["A/A"] = round(seconds["A/A"] / seconds["dense"], 3)
        table.append(row)
    return table


if __name__ == "__main__":
    kind, name, n, d = sys.argv[1:]
    print(held(kind, name, int(n), int(d)))
