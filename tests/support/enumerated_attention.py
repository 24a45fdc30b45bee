"""Attention by enumeration: one row and one visible key at a time, from the documented conventions alone.

Also a table of cases: every mask, window, bias and grouping that attention supports, small enough to enumerate.
"""

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

FIELDS = (
    "output",
    "log_normalizer",
    "entropy",
    "mean_logit",
    "logit_variance",
    "max_logit",
    "key_mean",
    "key_variance",
    "value_variance",
)


class Case(NamedTuple):
    """Operands and keyword arguments of one call of attend."""

    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]


def sees(case: Case, b: int, h: int, i: int, j: int) -> bool:
    """Return whether key j is visible to query i of head h, by the documentation."""
    options = case.options
    m, n = case.query.shape[-2], case.key.shape[-2]
    position = i + n - m
    if options.get("is_causal") and j > position:
        return False
    left, right = options.get("window") or (None, None)
    if left is not None and position - j > left:
        return False
    if right is not None and j - position > right:
        return False
    segments = options.get("segments")
    if segments is not None:
        segments = segments.expand(case.query.shape[0], n)
        if segments[b, j] != segments[b, position]:
            return False
    mask = options.get("attn_mask")
    if mask is not None and mask.dtype == torch.bool:
        return bool(mask.expand(case.query.shape[0], case.query.shape[1], m, n)[b, h, i, j])
    return True


def enumerated(case: Case) -> dict[str, Tensor]:
    """Compute all fields of Attention in float64, by loops."""
    q, k, v = (t.double() for t in case[:3])
    options = case.options
    (B, H, m, d), (_, K, n, _) = q.shape, k.shape
    scale = 1 / math.sqrt(d) if options.get("scale") is None else options["scale"]
    added = torch.zeros(B, H, m, n, dtype=torch.float64)
    for name in ("attn_mask", "bias"):
        tensor = options.get(name)
        if tensor is not None and tensor.is_floating_point():
            added = added + tensor.double()
    fields: dict[str, list[Tensor]] = {name: [] for name in FIELDS}
    zero, nothing = torch.tensor(0.0, dtype=torch.float64), torch.tensor(-math.inf, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            group = h // (H // K)
            for i in range(m):
                logits, keys, values = [], [], []
                for j in range(n):
                    s = q[b, h, i] @ k[b, group, j] * scale
                    if options.get("softcap"):
                        s = options["softcap"] * torch.tanh(s / options["softcap"])
                    s = s + added[b, h, i, j]
                    if sees(case, b, h, i, j) and s > -math.inf:
                        logits.append(s)
                        keys.append(k[b, group, j])
                        values.append(v[b, group, j])
                if options.get("sinks") is not None:
                    logits.append(options["sinks"].double()[h])
                    keys.append(torch.zeros_like(k[0, 0, 0]))
                    values.append(torch.zeros_like(v[0, 0, 0]))
                if not logits:
                    row = (v[0, 0, 0] * 0, nothing, zero, zero, zero, nothing, k[0, 0, 0] * 0, zero, v[0, 0, 0] * 0)
                else:
                    s, x, y = torch.stack(logits), torch.stack(keys), torch.stack(values)
                    p = torch.exp(s - s.max())
                    p = p / p.sum()
                    G = s.max() + torch.log(torch.exp(s - s.max()).sum())
                    E = (p * s).sum()
                    mean_x, mean_y = p @ x, p @ y
                    positive = p[p > 0]
                    row = (
                        mean_y,
                        G,
                        -(positive * positive.log()).sum(),
                        E,
                        (p * (s - E) ** 2).sum(),
                        s.max(),
                        mean_x,
                        (p * ((x - mean_x) ** 2).sum(-1)).sum(),
                        p @ (y - mean_y) ** 2,
                    )
                for name, value in zip(FIELDS, row, strict=True):
                    fields[name].append(value)
    return {name: torch.stack(rows).reshape(B, H, m, *rows[0].shape) for name, rows in fields.items()}


def cases(dtype: torch.dtype = torch.float64, *, d: int = 3, v: int = 4) -> dict[str, Case]:
    """Return one case for each convention, and some combinations."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    def chance(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator) > 0.4

    def operands(m: int = 5, n: int = 5, h: int = 2, hk: int = 2) -> tuple[Tensor, ...]:
        return normal(2, h, m, d), normal(2, hk, n, d), normal(2, hk, n, v)

    additive = normal(1, 2, 5, 5).masked_fill(~chance(1, 2, 5, 5), -math.inf)
    empty_row = chance(2, 1, 5, 5)
    empty_row[0, 0, 2] = False
    packed = torch.tensor([[0, 0, 1, 1, 1], [3, 3, 3, 3, 9]])
    table: dict[str, tuple[tuple[Tensor, ...], dict[str, Any]]] = {
        "plain": (operands(), {}),
        "scale": (operands(), {"scale": -1.3}),
        "more keys than queries": (operands(m=3, n=7), {}),
        "more queries than keys": (operands(m=7, n=3), {}),
        "one query": (operands(m=1, n=6), {}),
        "one key": (operands(n=1), {}),
        "bool mask": (operands(), {"attn_mask": chance(2, 2, 5, 5)}),
        "bool mask with an empty row": (operands(), {"attn_mask": empty_row}),
        "bool mask of keys": (operands(), {"attn_mask": chance(2, 1, 1, 5)}),
        "additive mask": (operands(), {"attn_mask": additive}),
        "bias": (operands(), {"bias": normal(1, 2, 5, 5)}),
        "bias of keys": (operands(), {"bias": normal(2, 1, 1, 5)}),
        "bias beside a bool mask": (operands(), {"bias": normal(5, 5), "attn_mask": chance(2, 1, 5, 5)}),
        "bias beside an additive mask": (operands(), {"bias": normal(2, 1, 5, 5), "attn_mask": additive}),
        "causal": (operands(), {"is_causal": True}),
        "causal, decoding": (operands(m=2, n=6), {"is_causal": True}),
        "causal, first rows without keys": (operands(m=6, n=3), {"is_causal": True}),
        "causal with a mask": (operands(), {"is_causal": True, "attn_mask": chance(2, 1, 5, 5)}),
        "window": (operands(m=7, n=7), {"window": (2, 1)}),
        "window to the left": (operands(m=7, n=7), {"window": (1, None)}),
        "window of itself": (operands(), {"window": (0, 0)}),
        "sliding window of a decoder": (operands(m=6, n=6), {"window": (2, 0), "is_causal": True}),
        "window, decoding": (operands(m=3, n=8), {"window": (2, 0)}),
        "window that leaves rows empty": (operands(m=8, n=3), {"window": (1, 0)}),
        "segments": (operands(), {"segments": packed}),
        "segments, causal": (operands(), {"segments": packed, "is_causal": True}),
        "segments shared, decoding": (operands(m=2), {"segments": packed[:1]}),
        "softcap": (operands(), {"softcap": 0.7}),
        "softcap with bias": (operands(), {"softcap": 0.7, "bias": normal(1, 2, 5, 5)}),
        "grouped heads": (operands(h=4, hk=2), {"enable_gqa": True}),
        "one key head": (operands(h=4, hk=1), {"enable_gqa": True, "is_causal": True}),
        "sinks": (operands(), {"sinks": normal(2)}),
        "sinks, causal, first rows without keys": (operands(m=6, n=3), {"sinks": normal(2), "is_causal": True}),
        "everything": (
            operands(m=4, n=6, h=4, hk=2),
            {
                "enable_gqa": True,
                "attn_mask": chance(2, 4, 4, 6),
                "bias": normal(1, 4, 1, 6),
                "is_causal": True,
                "window": (4, 2),
                "segments": torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 2]]),
                "softcap": 1.5,
                "sinks": normal(4),
                "scale": 0.8,
            },
        ),
    }
    return {name: Case(*three, options) for name, (three, options) in table.items()}


NAMES = tuple(cases())


def enumerated_row_fields(case: Case) -> dict[str, Tensor]:
    """Compute the fields that attend adds on request: of each row from a list of its visible keys and their logits."""
    q, k = case.query.double(), case.key.double()
    options = case.options
    (B, H, m, d), (_, K, n, _) = q.shape, k.shape
    scale = 1 / math.sqrt(d) if options.get("scale") is None else options["scale"]
    found: dict[str, list[float]] = {"max_key": [], "min_logit": [], "first_key_weight": []}
    for b, h, i in itertools.product(range(B), range(H), range(m)):
        row = {}
        for j in range(n):
            s = float(q[b, h, i] @ k[b, h // (H // K), j]) * scale
            if options.get("softcap"):
                s = options["softcap"] * math.tanh(s / options["softcap"])
            for name in ("attn_mask", "bias"):
                tensor = options.get(name)
                if tensor is not None and tensor.is_floating_point():
                    s += float(tensor.double().expand(B, H, m, n)[b, h, i, j])
            if sees(case, b, h, i, j) and s > -math.inf:
                row[j] = s
        others = [] if options.get("sinks") is None else [float(options["sinks"].double()[h])]
        total = math.fsum(math.exp(s) for s in [*row.values(), *others])
        found["max_key"].append(max(row, key=lambda j: row[j], default=-1))
        found["min_logit"].append(min(row.values(), default=math.inf))
        found["first_key_weight"].append(math.exp(row[min(row)]) / total if row else 0.0)
    dtypes = {"max_key": torch.long}
    return {n: torch.tensor(rows, dtype=dtypes.get(n, torch.float64)).reshape(B, H, m) for n, rows in found.items()}
