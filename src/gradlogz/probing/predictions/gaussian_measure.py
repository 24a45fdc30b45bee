"""Do keys look Gaussian to their queries?

    h = N(mu, Sigma):   attended mean = mu + Sigma q,   G = log n + <mu, q> + <q, Sigma q> / 2          [shim22, Cor. 1]
    mu, Sigma           of the keys that the row sees; q scaled. In logits u_j = <q, k_j>, without a matrix:
                        <mu, q> = mean u,   <q, Sigma q> = Var u,   Sigma q = mean (u - mean u) k
    mean explained      1 - sum |m - mu - Sigma q|² / sum |m - mu|²          m: the attended mean, over rows; 1 is exact
    mean cosine         <m - mu, Sigma q> / |m - mu| |Sigma q|, over rows together: the direction alone
    log normalizer explained, R², correlation      of G against log n + <mu, q>, against a constant, with the formula
    information         log n - H, in nats; frozen: the share of rows with Var u > 2 log n, in which the largest of n
                        Gaussian logits outweighs all others and no finite sample obeys the formula      [theory 10.3]

All of this of the rows with small hashes that see 8 keys or more; biases are log weights of the keys. Every measure
obeys the formula to first order: where logits hardly vary it says nothing about the keys, and a random twin obeys it.

    pooled              the same with mu, Sigma of the keys of all texts, from moments of a part of the tokens
    within position     with Sigma of keys around the mean at their position in the sequence, as rotations leave it
    position share      1 - tr Sigma within position / tr Sigma pooled

Null of what is explained: Sigma of the next head's keys. Of all else: a random twin.

Verdict: a head supports the claim if the interval of "mean explained" lies above BAR and above the null, that of "log
normalizer explained" above BAR too, and it has at least INFORMED nats of information (with less, any keys would do); it
refutes it if one of the intervals lies below BAR. Both are needed: a single key that takes all weight draws the mean
along Sigma q by chance, and then the log normaliser tells.

Read next: observables/attention_rows.py (the rows), entropy.py (on which it depends), ../../measures/gaussian.py (the
measure).
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..._typing import Bool, Float, Tensor
from ...attention.in_models.intercepted_calls import visible
from ..corpus.text import Batch
from ..findings import Finding
from ..inside.capturing import Attended, Event
from ..prediction import Finished, Judgement, Measured, Probed, Twin
from ..statistics import Comoments, Moments, Sums, comoments_of, jackknifed, sums_of
from ..testing import Bounds, absent, bootstrapped, count, judge, measured, middle, random_band
from .observables.attention_rows import Rows, applies, moments_of_keys, moments_of_queries, rows_of

claim = "Keys act on queries as a Gaussian measure does: the attended mean is mu + Sigma q."
formula = "1 - sum |m - mu - Sigma q|² / sum |m - mu|², m the attended mean, mu and Sigma of the keys a row sees"
refutes = "Less than 80 % of the way from mu to the attended mean, or from log n + <mu, q> to G, is explained."

EXPLAINED = "mean explained"
BAR = 0.8  # a sink, which no Gaussian has, reaches 0.6 to 0.8 by chance; 128 Gaussian keys 0.9 at Var u = 1
INFORMED, FEWEST = 0.1, 8
STEP = 4  # between the positions that are looked at
BINS = ("0 to 1/4", "1/4 to 1/2", "1/2 to 3/4", "3/4 to 1")


def statistics(event: Event | Finished, batch: Batch, memory: dict[str, Any]) -> dict[str, Any] | None:
    """Sums over the chosen rows, apart for four ranges of entropy; moments of queries, attended means and keys."""
    if not isinstance(event, Attended):
        return None
    if not applies(event, batch) or event._call().options.get("softcap") is not None:
        return {event.layer: {"rows": None}}
    found: dict[str, Any] = {"key heads": event.key.shape[1]}
    if (rows := rows_of(event, batch, memory)) is not None:
        found["rows"] = sums_of(_columns(rows), batch.keys)
    if event._call().options.get("sinks") is None:
        found |= _moments(event, batch, memory)
    return {event.layer: found}


def evaluate(state: Mapping[str, Any], model: Probed) -> list[Measured]:  # noqa: ARG001
    """Shares over rows with the bootstrap, of all of them and by their entropy; pooled ones with the jackknife."""
    found = [absent(layer, EXPLAINED) for layer, kept in state.items() if "rows" in kept and kept["rows"] is None]
    sums = _sums(state)
    every = {layer: Sums(s.totals.sum(2)) for layer, s in sums.items()}
    for name, function in QUANTITIES.items():
        for layer, estimate in bootstrapped(every, function).items():
            found += measured(layer, name, estimate, every[layer].totals[0, :, 0])
    for i, name in enumerate(BINS):
        of_bin = {layer: Sums(s.totals[:, :, i]) for layer, s in sums.items()}
        for layer, estimate in bootstrapped(of_bin, QUANTITIES[EXPLAINED]).items():
            found += measured(layer, f"{EXPLAINED}, entropy {name}", estimate, of_bin[layer].totals[0, :, 0])
    for layer, kept in state.items():
        if "queries" in kept:
            found += _pooled(layer, kept["queries"], kept["keys"], kept.get("positions"), turn=0)
    return found


def null(state: Mapping[str, Any], model: Probed, twin: Twin | None) -> list[Measured]:  # noqa: ARG001
    """The covariance of the next head's keys; of what no covariance enters, a random twin."""
    found = []
    every = {layer: Sums(s.totals.sum(2)) for layer, s in _sums(state).items() if state[layer]["key heads"] > 1}
    for layer, estimate in bootstrapped(every, lambda t: 1 - t[..., 5] / t[..., 1]).items():
        found += measured(layer, EXPLAINED, estimate, every[layer].totals[0, :, 0])
    for layer, kept in state.items():
        if "queries" in kept and kept["key heads"] > 1:
            found += _pooled(layer, kept["queries"], kept["keys"], kept.get("positions"), turn=1)
    known = {(m.layer, m.quantity) for m in found}
    by: dict[tuple[str, str], list[float]] = defaultdict(list)
    for m in [] if twin is None else evaluate(twin.state, twin.model):
        if m.head is not None and (m.layer, m.quantity) not in known and m.quantity != EXPLAINED:
            by[m.layer, m.quantity].append(m.value)
    for (layer, quantity), values in by.items():
        found += random_band(layer, quantity, torch.tensor(values))
    return found


def verdict(findings: list[Finding]) -> Judgement:
    """As the module says."""
    informed = {(f.layer, f.call, f.head): f.value for f in findings if f.quantity == "information"}

    def bounds(f: Finding) -> Bounds:
        known = informed.get((f.layer, f.call, f.head), 0.0) >= INFORMED
        beyond = BAR if math.isnan(f.null_high) else max(BAR, f.null_high)
        return Bounds(beyond if known else math.nan, BAR)

    ruled = judge(findings, EXPLAINED, bounds)
    ruled = judge(ruled, "log normalizer explained", lambda f: Bounds(bounds(f._replace(null_high=math.nan))[0], BAR))
    beside = {(f.layer, f.call, f.head): f.verdict for f in ruled if f.quantity == "log normalizer explained"}
    ruled = [
        f._replace(verdict=_both(f.verdict, beside.get((f.layer, f.call, f.head), f.verdict)))
        if f.quantity == EXPLAINED
        else f
        for f in ruled
    ]
    c = count(ruled, EXPLAINED)
    if not c.judged:
        return Judgement(ruled, "not applicable", "No layer hands on queries and keys whose products are its logits.")
    sharp, even = (
        middle(f.value for f in findings if f.quantity == f"{EXPLAINED}, entropy {name}")
        for name in (BINS[0], BINS[-1])
    )
    words = (
        f"A Gaussian measure explains {BAR:.0%} of attended means and log normalisers in {c.supported} of "
        f"{c.judged} heads, less in {c.refuted}; of the means of the middle head {_number(c.value)}, in rows of "
        f"entropy above 3/4 {_number(even)}, below 1/4 {_number(sharp)}."
    )
    few = sum(value < INFORMED for value in informed.values())
    words += f" In {few} heads weights are too even to tell." if few else ""
    return Judgement(ruled, c.verdict, words, c.value, null=c.null, quantity=EXPLAINED, note=c.note)


def _both(one: str, other: str) -> str:
    """Supported by both, refuted by either."""
    return one if one == other else "refuted" if "refuted" in (one, other) else "undecided"


def _correlation(t: Tensor) -> Tensor:
    x, xx, y, xy, yy = (t[..., i] / t[..., 0] for i in range(8, 13))
    return (xy - x * y) / ((xx - x.square()) * (yy - y.square())).clamp(min=0.0).sqrt()


QUANTITIES = {
    EXPLAINED: lambda t: 1 - t[..., 2] / t[..., 1],
    "mean cosine": lambda t: t[..., 3] / (t[..., 1] * t[..., 4]).sqrt(),
    "log normalizer explained": lambda t: 1 - t[..., 7] / t[..., 6],
    "log normalizer R²": lambda t: 1 - t[..., 7] / (t[..., 12] - t[..., 10].square() / t[..., 0]),
    "log normalizer correlation": _correlation,
    "information": lambda t: t[..., 13] / t[..., 0],
    "frozen": lambda t: t[..., 14] / t[..., 0],
}


def _columns(rows: Rows) -> Float[Tensor, "b h bins k"]:
    """What each chosen row adds, summed over the rows of a sequence in each of four ranges of entropy."""
    u, w = rows.products, rows.log_weights
    hidden = w == -torch.inf
    mass, n = w.logsumexp(-1), rows.seen
    base = (w - mass.unsqueeze(-1)).exp()
    mean = (base * u).sum(-1)
    away = u - mean.unsqueeze(-1)
    variance = (base * away.square()).sum(-1)
    s = u + w
    G = s.logsumexp(-1)
    p = (s - G.unsqueeze(-1)).exp()
    H = G - (p * s.masked_fill(hidden, 0.0)).sum(-1)
    # Both displacements in one product: sum_j (p_j - base_j) k_j and sum_j base_j (u_j - mean) k_j.
    centre = rows.key.mean(2, keepdim=True)  # an offset would cost digits
    moved = rows.averaged(p - base, rows.key - centre)
    expected = rows.averaged(base * away, rows.key - centre)
    other = (rows.key - centre).roll(1, 1)
    turned = rows.products_with(other)
    turned = turned - (base * turned).sum(-1, keepdim=True)
    elsewhere = rows.averaged(base * turned, other)
    x, y = mean + variance / 2, G - mass
    g = y - mean
    columns = [
        torch.ones_like(G), _square(moved), _square(moved - expected), (moved * expected).sum(-1), _square(expected),
        _square(moved - elsewhere), g.square(), (g - variance / 2).square(), x, x.square(), y, x * y, y.square(),
        n.log() - H, (variance > 2 * n.log()).to(G.dtype),
    ]  # fmt: skip
    kept = (rows.valid.unsqueeze(1) & (n >= FEWEST)).expand_as(G)
    part = (4 * H / n.log()).floor().clamp(0, 3)
    found = torch.stack(columns, -1).masked_fill(~kept.unsqueeze(-1), 0.0).double()
    each = [found.masked_fill((part != i).unsqueeze(-1), 0.0).sum(2) for i in range(len(BINS))]
    return torch.stack(each, 2)


def _square(t: Tensor) -> Tensor:
    return t.square().sum(-1)


def _moments(event: Attended, batch: Batch, memory: dict[str, Any]) -> dict[str, Any]:
    """Of scaled queries with attended means, of keys, and of keys around their mean at each position."""
    call, mean = event._call(), event.attention.key_mean
    if mean is None:
        return {}
    found = {
        "queries": moments_of_queries(event, batch, memory),
        "keys": moments_of_keys(event, batch, memory),
    }
    if len(call.key) > 1:
        found["positions"] = _positions(call.key[:, :, ::STEP].to(mean.dtype), visible(call), batch.group)
    return found


def _positions(k: Tensor, seen: Bool[Tensor, "b n"] | None, group: int) -> Comoments:
    """Moments of keys around the mean of all sequences of the batch at the same position, of one degree less each."""
    keys = torch.ones_like(k[:, 0, :, 0], dtype=torch.bool) if seen is None else seen[:, ::STEP]
    weight = keys[:, None, :, None].to(k.dtype)
    several = weight.sum(0)
    mean = (weight * k).sum(0) / several.clamp(min=1)
    within = (k - mean) * (several / (several - 1).clamp(min=1)).sqrt()
    tokens = within.transpose(0, 1).flatten(1, 2)
    return comoments_of(tokens, group=group, weights=(keys & (several[0, :, 0] > 1)).flatten())


def _sums(state: Mapping[str, Any]) -> dict[str, Sums]:
    return {layer: kept["rows"] for layer, kept in state.items() if kept.get("rows") is not None}


def _pooled(
    layer: str, queries: Comoments, keys: Comoments, positions: Comoments | None, *, turn: int
) -> list[Measured]:
    """What mu + Sigma q explains with moments over all texts; of the heads `turn` further, as the null."""
    q, k = queries.versions(), keys.versions()
    if len(q.tokens) != len(k.tokens):
        return []  # a group whose keys are all hidden
    tokens = q.tokens[0] - q.tokens[1:]
    found = []
    for name, Sigma, varied in _covariances(k, positions):
        share = _explained(q, k.mean_x, Sigma.roll(turn, 1))
        shares = {f"{name} mean explained": share}
        if name == "within position" and not turn:
            spread, whole = (t.diagonal(dim1=-2, dim2=-1).sum(-1) for t in (Sigma, k.covariance))
            shares["position share"] = (1 - spread / whole).repeat_interleave(q.xx.shape[1] // k.xx.shape[1], 1)
        for quantity, each in shares.items():
            estimate = jackknifed(each[0], each[1:], tokens)
            if not varied:
                nothing = torch.full_like(estimate.value, torch.nan)
                estimate = estimate._replace(low=nothing, high=nothing)
            found += measured(layer, quantity, estimate, q.tokens[0])
    return found


def _covariances(k: Moments, positions: Comoments | None) -> Iterator[tuple[str, Tensor, bool]]:
    """Sigma of each kind, with and without each group; and whether it was met in all groups, so that it varies."""
    yield "pooled", k.covariance, True
    if positions is not None:
        within = positions.versions()
        second = within.covariance + within.mean_x.unsqueeze(-1) * within.mean_x.unsqueeze(-2)
        varied = len(second) == len(k.tokens)
        yield "within position", second if varied else second[:1].expand(len(k.tokens), -1, -1, -1), varied


def _explained(q: Moments, mu: Tensor, Sigma: Tensor) -> Tensor:
    """1 - E|m - mu - Sigma q|² / E|m - mu|² from the moments of (q, m), [v, h]."""
    each = q.xx.shape[1] // Sigma.shape[1]
    mu, Sigma = mu.repeat_interleave(each, 1), Sigma.repeat_interleave(each, 1)
    away = q.mean_y - mu
    left = away - (Sigma @ q.mean_x.unsqueeze(-1)).squeeze(-1)
    spread = q.spread_y - 2 * (Sigma * q.xy).sum((-2, -1)) + ((Sigma @ q.xx) * Sigma).sum((-2, -1))
    return 1 - (q.divided(spread) + _square(left)) / (q.divided(q.spread_y) + _square(away))


def _number(value: float) -> str:
    return "none" if math.isnan(value) else f"{value:z.2f}"
