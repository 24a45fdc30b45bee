"""Time and memory of contrastive losses on a CPU, forward and backward, relative to dense losses in plain torch."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import process_time

import torch
from torch.nn.functional import cross_entropy, logsigmoid, normalize, softplus

import gradlogz as gz
from timing import compare

T, OFFSET = 0.1, -10.0
# pairs of a batch, calls per measurement, rounds
SIZES = ((64, 50, 5), (256, 5, 5), (1024, 1, 3), (4096, 1, 1))
DIMENSIONS = (128, 512)
COMPILED_FROM = 1024
MEMORY_AT = 4096
HEAD = (2048, 256, 32_000)  # tokens, dimension, words
Loss = Callable[..., torch.Tensor]


def labels_of(m: int) -> torch.Tensor:
    return torch.arange(m) // 2


def dense_info_nce(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return cross_entropy(a @ b.mT / T, torch.arange(len(a)))


def dense_ids(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y, eye = labels_of(len(a)), torch.eye(len(a), dtype=torch.bool)
    s = (a @ b.mT / T).masked_fill((y.unsqueeze(-1) == y) & ~eye, -torch.inf)
    return cross_entropy(s, torch.arange(len(a)))


def dense_clip(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    s, targets = a @ b.mT / T, torch.arange(len(a))
    return (cross_entropy(s, targets) + cross_entropy(s.mT, targets)) / 2


def dense_nt_xent(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    z = torch.cat([a, b])
    itself = torch.eye(len(z), dtype=torch.bool)
    s = (z @ z.mT / T).masked_fill(itself, -torch.inf)
    return cross_entropy(s, torch.arange(len(z)).roll(len(a)))


def dense_supervised(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    z, y = torch.cat([a, b]), labels_of(len(a)).repeat(2)
    itself = torch.eye(len(z), dtype=torch.bool)
    log_p = (z @ z.mT / T).masked_fill(itself, -torch.inf).log_softmax(-1)
    positive = (y.unsqueeze(-1) == y) & ~itself
    return -(log_p.masked_fill(~positive, 0.0).sum(-1) / positive.sum(-1)).mean()


def dense_siglip(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    s = a @ b.mT / T + OFFSET
    return -logsigmoid(s * (2 * torch.eye(len(a)) - 1)).sum() / len(a)


def dense_multi_similarity(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    z, y = torch.cat([a, b]), labels_of(len(a)).repeat(2)
    same, itself = y.unsqueeze(-1) == y, torch.eye(2 * len(a), dtype=torch.bool)
    s = z @ z.mT
    above = (-2 * (s - 0.5)).masked_fill(~same | itself, -torch.inf).logsumexp(-1)
    below = (50 * (s - 0.5)).masked_fill(same, -torch.inf).logsumexp(-1)
    return (softplus(above) / 2 + softplus(below) / 50).mean()


def dense_circle(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    z, y = torch.cat([a, b]), labels_of(len(a)).repeat(2)
    same, itself = y.unsqueeze(-1) == y, torch.eye(2 * len(a), dtype=torch.bool)
    s = z @ z.mT
    above = -80 * (1.4 - s.detach()).clamp(min=0) * (s - 0.6)
    below = 80 * (s.detach() + 0.4).clamp(min=0) * (s - 0.4)
    sums = (
        above.masked_fill(~same | itself, -torch.inf).logsumexp(-1),
        below.masked_fill(same, -torch.inf).logsumexp(-1),
    )
    return softplus(sums[0] + sums[1]).mean()


DENSE: dict[str, Loss] = {
    "info_nce": dense_info_nce,
    "info_nce, ids": dense_ids,
    "clip_loss": dense_clip,
    "nt_xent": dense_nt_xent,
    "supervised_contrastive": dense_supervised,
    "siglip": dense_siglip,
    "multi_similarity_loss": dense_multi_similarity,
    "circle_loss": dense_circle,
}
OURS: dict[str, Loss] = {
    "info_nce": lambda a, b: gz.info_nce(a, b, temperature=T),
    "info_nce, ids": lambda a, b: gz.info_nce(a, b, ids=labels_of(len(a)), temperature=T),
    "clip_loss": lambda a, b: gz.clip_loss(a, b, temperature=T),
    "nt_xent": lambda a, b: gz.nt_xent(a, b, temperature=T),
    "supervised_contrastive": lambda a, b: gz.supervised_contrastive(
        torch.cat([a, b]), labels_of(len(a)).repeat(2), temperature=T
    ),
    "siglip": lambda a, b: gz.siglip(a, b, temperature=T, offset=OFFSET),
    "multi_similarity_loss": lambda a, b: gz.contrastive.multi_similarity_loss(
        torch.cat([a, b]), labels_of(len(a)).repeat(2)
    ),
    "circle_loss": lambda a, b: gz.contrastive.circle_loss(torch.cat([a, b]), labels_of(len(a)).repeat(2)),
}


def batch(m: int, d: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    a, b = (normalize(torch.randn(m, d, generator=g), dim=-1).requires_grad_() for _ in range(2))
    return a, b


def both_ways(loss: Loss, a: torch.Tensor, b: torch.Tensor, calls: int = 1) -> Callable[[], object]:
    def run() -> None:
        for _ in range(calls):
            torch.autograd.grad(loss(a, b), (a, b))

    return run


def head_operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, d, words = HEAD
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(tokens, d, generator=g), torch.randn(words, d, generator=g) / d**0.5
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(words, (tokens,), generator=g)


def dense_head(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(hidden @ weight.mT, labels)


def products_of_head(hidden: torch.Tensor, weight: torch.Tensor) -> object:
    """The three products of matrices without which there are no gradients."""
    with torch.no_grad():
        s = hidden @ weight.mT
        return s @ weight, s.mT @ hidden


def head(kind: str) -> Callable[[], object]:
    hidden, weight, labels = head_operands()
    if kind == "products":
        return lambda: products_of_head(hidden, weight)
    if kind == "gradlogz":
        return lambda: torch.autograd.grad(
            gz.contrastive.linear_cross_entropy(hidden, weight, labels).loss, (hidden, weight)
        )
    loss = torch.compile(dense_head) if kind == "compiled" else dense_head
    return lambda: torch.autograd.grad(loss(hidden, weight, labels), (hidden, weight))


def mebibytes(kind: str, name: str, m: int, d: int) -> int:
    """Return the peak memory added by one forward and backward pass, measured in a separate process."""
    call = [sys.executable, __file__, kind, name, str(m), str(d)]
    process = subprocess.run(call, capture_output=True, text=True, check=True)
    return json.loads(process.stdout)


def held(kind: str, name: str, m: int, d: int) -> int:
    def now(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field))

    torch.set_num_threads(1)
    if name == "linear_cross_entropy":
        call = head(kind)
    else:
        loss = (OURS if kind == "gradlogz" else DENSE)[name]
        both_ways(loss, *batch(600, d))()  # loads and compiles everything that is needed once
        call = both_ways(loss, *batch(m, d))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the present value
    before = now("VmRSS")
    call()
    return round((now("VmHWM") - before) / 1024)


def ratios(seconds: dict[str, float], calls: int) -> dict[str, object]:
    row: dict[str, object] = {"dense ms": round(1e3 * seconds["dense"] / calls, 3)}
    row["gradlogz / dense"] = round(seconds["gradlogz"] / seconds["dense"], 3)
    if "compiled" in seconds:
        row["gradlogz / compiled"] = round(seconds["gradlogz"] / seconds["compiled"], 3)
    if "products" in seconds:
        row["products / compiled"] = round(seconds["products"] / seconds["compiled"], 3)
    row["A/A"] = round(seconds["A/A"] / seconds["dense"], 3)
    return row


def rows() -> list[dict[str, object]]:
    """Return one row per loss, number of pairs and dimension, by CPU time on one thread."""
    torch.set_num_threads(1)
    table: list[dict[str, object]] = []
    for m, calls, rounds in SIZES:
        for d in DIMENSIONS:
            for name, dense in DENSE.items():
                a, b = batch(m, d)
                alternatives = {"dense": both_ways(dense, a, b, calls), "gradlogz": both_ways(OURS[name], a, b, calls)}
                if m >= COMPILED_FROM:
                    torch._dynamo.reset()
                    alternatives["compiled"] = both_ways(torch.compile(dense), a, b, calls)
                seconds = compare(alternatives, rounds=rounds, clock=process_time)
                row: dict[str, object] = {"loss": name, "pairs": m, "dimension": d, **ratios(seconds, calls)}
                if m == MEMORY_AT:
                    row["MiB dense"], row["MiB gradlogz"] = (mebibytes(k, name, m, d) for k in ("dense", "gradlogz"))
                table.append(row)
    torch._dynamo.reset()
    kinds = "dense", "gradlogz", "compiled", "products"
    seconds = compare({kind: head(kind) for kind in kinds}, rounds=3, clock=process_time)
    row = {"loss": "linear_cross_entropy", "pairs": HEAD[0], "dimension": HEAD[1], **ratios(seconds, 1)}
    row["MiB dense"], row["MiB gradlogz"] = (mebibytes(k, "linear_cross_entropy", 0, 0) for k in ("dense", "gradlogz"))
    return [*table, row]


if __name__ == "__main__":
    kind, name, m, d = sys.argv[1:]
    print(held(kind, name, int(m), int(d)))
