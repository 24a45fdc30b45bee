"""Does attention spread the cloud of tokens, and do norms gather it?

    x'        = x + u                                         u: what a sublayer adds to the stream x
    growth    = log tr Cov(x') - log tr Cov(x)
    by chance = log(1 + r²),   r² = tr Cov(u) / tr Cov(x)     if u has nothing to do with x
    excess    = growth - log(1 + r²) = log(1 + 2 tr Cov(x, u) / (tr Cov(x) + tr Cov(u)))
    volume    = (log det Cov(x') - log det Cov(x)) / k        by chance  (log det(Cov(x) + Cov(u)) - log det Cov(x)) / k

A step up a log normaliser moves no two tokens closer: gradients of convex functions are monotone, so that
tr Cov(x, u) = E<x - y, u(x) - u(y)> / 2 >= 0 for tokens x, y that see the same keys [theory 5.1, E15]. Growth itself
says little, since adding anything spreads a cloud. Traces are those of single tokens and coordinates where these are
massive: they are taken with and without the first token of each row, and volumes, in which every direction counts the
same, are those of k = 32 random directions, or of the whole stream if it is not wider. Norms have growth and volume.

Nulls: of growth and volume, an addition by chance; of the excess, updates exchanged between tokens, which gives 0 with
a deviation of at most 2 r / ((1 + r²) sqrt(n)) for n tokens; of the excess of volume, and of norms, the random twin.

Verdict: an attention sublayer is judged by the excess without first tokens: supported above 0.01 and above its null,
refuted below -0.01.

Read next: linearity.py, ../../dynamics/contraction.py (what norms do to clouds).
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from ..._typing import Bool, Float, Tensor
from ..capturing import Event, Normed, Passed
from ..findings import Finding
from ..nulls import band
from ..prediction import Finished, Judgement, Measured, Probed, Twin, real
from ..rulings import Bounds, absent, count, judge, measured, middle
from ..statistics import GROUPS, Comoments, Moments, comoments_of, jackknife
from ..texts import Batch

claim = "Attention spreads the cloud of tokens more than the addition of an unrelated vector would."
formula = "log tr Cov(x + u) - log(tr Cov(x) + tr Cov(u)) of each attention sublayer, and the same of log determinants"
refutes = "Attention sublayers whose updates draw tokens together: a negative excess."

GROWTH, VOLUME, VOLUME_EXCESS = "growth of log trace", "growth of log det", "excess of log det"
EXCESS = {"attention": "excess of log trace", "feed_forward": "excess of log trace of the feed-forward"}
REST = {kind: f"{name} without first tokens" for kind, name in EXCESS.items()}
BOUND = 0.01
DIRECTIONS = 32


def statistics(event: Event | Finished, batch: Batch, memory: dict[str, Any]) -> dict[str, Any] | None:  # noqa: ARG001
    """Traces of the covariances of x, u and x + u, and the covariances of x and u along some directions."""
    if isinstance(event, Passed):
        name, x, u = event.sublayer.name, event.stream, event.update
    elif isinstance(event, Normed):
        name, x, u = _of_norm(event.norm.name, event.norm.call), event.given, event.result
    else:
        return None
    mask = real(batch, event)
    later = mask.clone()
    later[:, 0] = False
    spread, rest = _spreads(x, u, torch.stack((mask, later)), batch.group)
    found = {"spread": spread, "volume": _volume(x, u, mask, batch.group)}
    return {name: found if isinstance(event, Normed) else {**found, "rest": rest}}


def evaluate(state: Mapping[str, Any], model: Probed) -> list[Measured]:
    """Growth and excess of each sublayer and norm."""
    rows = []
    for sublayer in model.layout.sublayers:
        found = state.get(sublayer.name)
        if found is None:
            rows += [absent(sublayer.name, REST["attention"])] if sublayer.kind == "attention" else []
            continue
        tokens = found["spread"].tokens.sum()
        for quantity, function, part in (
            (GROWTH, _growth, "spread"),
            (EXCESS[sublayer.kind], _excess, "spread"),
            (REST[sublayer.kind], _excess, "rest"),
            (VOLUME, _volume_growth, "volume"),
            (VOLUME_EXCESS, _volume_excess, "volume"),
        ):
            rows += measured(sublayer.name, quantity, jackknife(function, found[part]), tokens)
    for name in _norms(model):
        if name in state:
            tokens = state[name]["spread"].tokens.sum()
            rows += measured(name, GROWTH, jackknife(_change, state[name]["spread"]), tokens)
            rows += measured(name, VOLUME, jackknife(_volume_change, state[name]["volume"]), tokens)
    return rows


def null(state: Mapping[str, Any], model: Probed, twin: Twin | None) -> list[Measured]:
    """Additions by chance, exchanged updates, random weights."""
    rows = []
    for sublayer in model.layout.sublayers:
        found = state.get(sublayer.name)
        if found is None:
            continue
        chance = {
            GROWTH: jackknife(lambda m: _growth(m) - _excess(m), found["spread"]),
            VOLUME: jackknife(lambda m: _volume_growth(m) - _volume_excess(m), found["volume"]),
        }
        for quantity, estimate in chance.items():
            rows += measured(sublayer.name, quantity, estimate, 0)
        for name, part in ((EXCESS[sublayer.kind], "spread"), (REST[sublayer.kind], "rest")):
            whole = found[part].total()
            x, u, _ = _traces(whole)
            r = (u / x).sqrt()
            deviation = 2 * r / ((1 + r.square()) * whole.tokens.sqrt())
            heads: list[int | None] = [None] if deviation.ndim == 0 else list(range(len(deviation)))
            for head, each in zip(heads, deviation.reshape(-1).tolist(), strict=True):
                rows.append(Measured(sublayer.name, head, name, *band(0.0, each)))
    if twin is not None:
        norms = set(_norms(twin.model))
        others = evaluate(twin.state, twin.model)
        rows += [m for m in others if m.quantity == VOLUME_EXCESS or (m.layer in norms and m.tokens)]
    return rows


def verdict(findings: list[Finding]) -> Judgement:
    """By the excess of attention sublayers without first tokens."""
    judged = REST["attention"]
    findings = judge(findings, judged, lambda f: Bounds(max(BOUND, f.null_high), -BOUND))
    found = count(findings, judged)
    if not found.judged:
        return Judgement(findings, "not applicable", "No attention sublayer adds to a stream.", quantity=judged)
    attention = {(f.layer, f.call) for f in findings if f.quantity == judged}
    growth = [f for f in findings if f.quantity == GROWTH and (f.layer, f.call) in attention]
    words = (
        f"The log trace grows by {middle(f.value for f in growth):.2f} in the middle attention sublayer, by "
        f"{middle(f.null for f in growth):.2f} if what is added were unrelated; without first tokens the excess is "
        f"{found.value:.2f}."
    )
    return Judgement(findings, found.verdict, words, found.value, null=found.null, quantity=judged, note=found.note)


# Clouds --------------------------------------------------------------------------------------------------------------


def _spreads(x: Tensor, u: Tensor, masks: Bool[Tensor, "k b n"], group: int) -> list[Comoments]:
    """Means and traces of covariances of x, u and x + u under each mask.

    All from one pass around the means of the first: |x - m|², |u - k|² and <x - m, u - k> of every token.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    x, u = (t.to(wide).flatten(0, 1) for t in (x, u))
    w = masks.flatten(1).to(wide)
    n = w.sum(-1, keepdim=True).clamp(min=1.0)
    means = [w @ t / n for t in (x, u)]
    dx, du = (t.sub(m[:1]) for t, m in zip((x, u), means, strict=True))
    products = w @ torch.stack([torch.linalg.vecdot(a, b) for a, b in ((dx, dx), (du, du), (dx, du))], -1)
    mx, mu = (m.double() for m in means)
    ex, eu = (m.sub(m[:1]) for m in (mx, mu))
    between = torch.stack([torch.linalg.vecdot(a, b) for a, b in ((ex, ex), (eu, eu), (ex, eu))], -1)
    products = products.double() - n.double() * between
    found = []
    for mask, m, k, (xx, uu, xu) in zip(w, mx, mu, products, strict=True):
        means_of_all = torch.stack((m, k, torch.stack((m, k)).sum(0)))
        traces = torch.stack((xx, uu, torch.stack((xx, uu, 2 * xu)).sum()))
        nothing = m.new_zeros(3, 1)
        each = Moments(
            mask.sum().double(), nothing, nothing.unsqueeze(-1), means_of_all, m.new_zeros(3, 1, len(m)), traces
        )  # fmt: skip
        found.append(Comoments(tuple(each if g == group else None for g in range(GROUPS))))
    return found


def _volume(x: Tensor, u: Tensor, mask: Bool[Tensor, "b n"], group: int) -> Comoments:
    """The covariance of x and u along the directions, side by side."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x, u = x.to(wide), u.to(wide)
    if x.shape[-1] > DIRECTIONS:
        directions = _directions(x.shape[-1], x.device).to(wide)
        x, u = x @ directions, u @ directions
    return comoments_of(torch.cat((x, u), -1).flatten(0, 1), group=group, weights=mask.flatten())


@lru_cache
def _directions(width: int, device: torch.device) -> Float[Tensor, "D k"]:
    """Orthonormal columns, the same in every run."""
    gaussian = torch.randn(width, DIRECTIONS, generator=torch.Generator().manual_seed(width), dtype=torch.float64)
    return torch.linalg.qr(gaussian).Q.to(device)


def _traces(m: Moments) -> tuple[Tensor, Tensor, Tensor]:
    x, u, after = m.divided(m.yy).unbind(-1)
    return x, u, after


def _growth(m: Moments) -> Tensor:
    x, _, after = _traces(m)
    return after.log() - x.log()


def _excess(m: Moments) -> Tensor:
    x, u, after = _traces(m)
    return after.log() - (x + u).log()


def _change(m: Moments) -> Tensor:
    """Of a norm: from its input to its output."""
    x, result, _ = _traces(m)
    return result.log() - x.log()


def _volumes(m: Moments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log determinants over k of Cov(x), Cov(u), Cov(x + u) and Cov(x) + Cov(u); NaN of singular ones."""
    C = m.covariance
    k = C.shape[-1] // 2
    x, u, across = C[..., :k, :k], C[..., k:, k:], C[..., :k, k:]
    found = torch.linalg.slogdet(torch.stack((x, u, x + u + across + across.mT, x + u)))
    each = torch.where((found.sign > 0) & found.logabsdet.isfinite(), found.logabsdet / k, torch.nan)
    return each[0], each[1], each[2], each[3]


def _volume_growth(m: Moments) -> Tensor:
    x, _, after, _ = _volumes(m)
    return after - x


def _volume_excess(m: Moments) -> Tensor:
    _, _, after, unrelated = _volumes(m)
    return after - unrelated


def _volume_change(m: Moments) -> Tensor:
    x, result, _, _ = _volumes(m)
    return result - x


def _of_norm(name: str, call: int) -> str:
    return name if call == 1 else f"{name}#{call}"


def _norms(model: Probed) -> list[str]:
    """The norms of the stream, each once, in the order of computation."""
    every = [n for s in model.layout.sublayers for n in (s.norm_of_stream, s.reads, s.closes, s.follows)]
    return list(dict.fromkeys(_of_norm(n.name, n.call) for n in every if n is not None))
