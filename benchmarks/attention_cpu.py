"""`attend` on the CPU relative to torch's scaled_dot_product_attention, float32, two threads, ratios of one run.

Each row has a problem, the statistics requested of `attend`, and its time divided by that of SDPA (which computes the
output only) on the same operands. "torch path" is `attend` without numba. "A/A" is the ratio of SDPA to itself, a
measure of noise.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from gradlogz import attend
from gradlogz.kernels.attention import blocked
from gradlogz.kernels.attention.operator import directional
from gradlogz.kernels.attention.scoring import Scoring, Sight
from gradlogz.kernels.optional import kernel_module
from timing import compare

THREADS = 2


def rows() -> list[dict[str, Any]]:
    torch.set_num_threads(THREADS)
    return [*forward(), *masks(), *backward(), *small(), *memory()]


def operands(heads: int, tokens: int, d: int, *, queries: int | None = None, grad: bool = False) -> tuple[Any, ...]:
    torch.manual_seed(0)
    shape = (1, heads, queries or tokens, d), (1, heads, tokens, d), (1, heads, tokens, d)
    return tuple(torch.randn(*s, requires_grad=grad) for s in shape)


def row(problem: str, plain: Callable[[], Any], ours: dict[str, Callable[[], Any]], rounds: int) -> Iterator[dict]:
    seconds = compare({"sdpa": plain, **ours}, rounds=rounds)
    for name in ours:
        yield {
            "problem": problem,
            "asked": name,
            "ratio": round(seconds[name] / seconds["sdpa"], 3),
            "A/A": round(seconds["A/A"] / seconds["sdpa"], 3),
        }


def forward() -> Iterator[dict]:
    for heads, tokens, d in (
        (8, 1024, 64), (16, 1024, 64), (8, 2048, 32), (8, 2048, 128), (8, 4096, 64), (8, 16384, 64)
    ):  # fmt: skip
        q, k, v = operands(heads, tokens, d)
        ours = {
            "scalar": lambda q=q, k=k, v=v: attend(q, k, v),
            "none": lambda q=q, k=k, v=v: attend(q, k, v, statistics="none"),
            "moments": lambda q=q, k=k, v=v: attend(q, k, v, statistics="moments"),
            "scalar, torch path": lambda q=q, k=k, v=v, d=d: blocked.forward(q, k, v, Sight(), Scoring(d**-0.5)),
        }
        rounds = 3 if tokens > 10000 else 9
        yield from row(
            f"{heads} x {tokens} x {d}", lambda q=q, k=k, v=v: scaled_dot_product_attention(q, k, v), ours, rounds
        )
        yield from row(
            f"{heads} x {tokens} x {d}, causal",
            lambda q=q, k=k, v=v: scaled_dot_product_attention(q, k, v, is_causal=True),
            {"scalar": lambda q=q, k=k, v=v: attend(q, k, v, is_causal=True)},
            rounds,
        )


def masks() -> Iterator[dict]:
    heads, tokens, d = 8, 2048, 64
    q, k, v = operands(heads, tokens, d)
    some = torch.rand(tokens, tokens) > 0.2
    padding = (torch.arange(tokens) < tokens - 200).view(1, 1, 1, tokens)
    for name, mask in {"bool mask": some, "additive mask": torch.randn(tokens, tokens), "padding": padding}.items():
        yield from row(
            f"{heads} x {tokens} x {d}, {name}",
            lambda m=mask: scaled_dot_product_attention(q, k, v, attn_mask=m),
            {"scalar": lambda m=mask: attend(q, k, v, attn_mask=m)},
            9,
        )
    segments = (torch.arange(tokens) // 256).view(1, tokens)
    same = (segments[:, :, None] == segments[:, None, :]).unsqueeze(1)
    yield from row(
        f"{heads} x {tokens} x {d}, 8 segments",
        lambda: scaled_dot_product_attention(q, k, v, attn_mask=same),
        {"scalar": lambda: attend(q, k, v, segments=segments)},
        9,
    )


def backward() -> Iterator[dict]:
    for heads, tokens, d, causal in (
        (8, 1024, 64, False),
        (8, 2048, 64, False),
        (8, 2048, 64, True),
        (8, 2048, 128, False),
    ):
        q, k, v = operands(heads, tokens, d, grad=True)
        go, gz = torch.randn(1, heads, tokens, d), torch.randn(1, heads, tokens)

        def plain(q=q, k=k, v=v, go=go, causal=causal) -> Any:
            out = scaled_dot_product_attention(q, k, v, is_causal=causal)
            return torch.autograd.grad(out, (q, k, v), go)

        def with_z_loss(q=q, k=k, v=v, go=go, gz=gz, causal=causal) -> Any:
            result = attend(q, k, v, is_causal=causal)
            return torch.autograd.grad((result.output, result.log_normalizer), (q, k, v), (go, gz))

        def with_entropy(q=q, k=k, v=v, go=go, gz=gz, causal=causal) -> Any:
            result = attend(q, k, v, is_causal=causal)
            return torch.autograd.grad((result.output, result.entropy), (q, k, v), (go, gz))

        name = f"{heads} x {tokens} x {d}{', causal' if causal else ''}, forward and backward"
        yield from row(name, plain, {"output and log normaliser": with_z_loss, "output and entropy": with_entropy}, 7)
    heads, tokens, d = 8, 2048, 64
    q, k, v = operands(heads, tokens, d, grad=True)
    go = torch.randn_like(q)
    out = scaled_dot_product_attention(q, k, k)
    yield from row(
        f"{heads} x {tokens} x {d}, Fisher-vector product against the backward of SDPA",
        lambda: torch.autograd.grad(out, (q, k), go, retain_graph=True),
        {"covariance_product": lambda: directional(q.detach(), k.detach(), Sight(), Scoring(d**-0.5), go)},
        7,
    )


def small() -> Iterator[dict]:
    for heads, queries, tokens, d in (
        (8, 64, 64, 64),
        (8, 128, 128, 64),
        (8, 256, 256, 64),
        (16, 1, 1024, 64),
        (16, 1, 8192, 64),
    ):
        q, k, v = operands(heads, tokens, d, queries=queries)
        name = f"{heads} x {tokens} x {d}" + (", one query" if queries == 1 else "")
        yield from row(
            name,
            lambda q=q, k=k, v=v: scaled_dot_product_attention(q, k, v),
            {
                "scalar": lambda q=q, k=k, v=v: attend(q, k, v),
                "none": lambda q=q, k=k, v=v: attend(q, k, v, statistics="none"),
            },
            51,
        )


def memory() -> Iterator[dict]:
    """Yield the memory allocated in addition to the operands, by torch's profiler."""
    q, k, v = operands(8, 16384, 64)
    with torch.profiler.profile(profile_memory=True) as profile:
        attend(q, k, v)
    made = sum(max(event.cpu_memory_usage, 0) for event in profile.events() if event.name.startswith("aten::empty"))
    kernel = kernel_module("gradlogz.kernels.attention.cpu", "numba")
    yield {
        "problem": "8 x 16384 x 64, memory made",
        "asked": "scalar",
        "MiB": round(made / 2**20, 1),
        "of which output MiB": round(q.numel() * 4 / 2**20, 1),
        "kernel": "numba" if kernel else "torch",
    }
