"""Gaussian keys: the attended mean and the log normaliser of a Gaussian measure.

    k ~ N(mu, Sigma):   attended mean = mu + Sigma q,   G = log n + <mu, q> + <q, Sigma q> / 2          [shim22, Cor. 1]

Read next: observables/attention_rows.py (the rows), entropy.py, ../../measures/gaussian.py (the measure).
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..._typing import Float, Tensor
from ..batch_pass import BatchPass
from ..hypothesis_tests import (
    NOTHING_MEASURED,
    Bounds,
    absent,
    bootstrapped,
    conclude,
    judge,
    measured,
    median_detail,
    random_band,
)
from ..inside.events import Attended, Event, ForwardOutput
from ..prediction import Baseline, Prediction, Probed
from ..runs.judgement import Judgement, Measured
from ..runs.records import PREDICTED, Declaration, Finding, Label, Quantity, Remark
from ..statistics import Comoments, GroupMoments, Sums, comoments_of, jackknifed, sums_of
from .observables.attention_rows import Rows, applies, moments_of_keys, moments_of_queries, rows_of

EXPLAINED, NORMALIZER, INFORMATION = "mean explained", "log normalizer explained", "information"
POOLED, WITHIN = "pooled", "within position"
BAR = 0.8  # attention sinks reach 0.6 to 0.8 without Gaussian keys; 128 Gaussian keys reach 0.9 at Var u = 1
INFORMED, FEWEST = 0.1, 8
STEP = 4  # distance of the sampled positions
RANDOM = "random-weights baseline"
BINS = ("0 to 1/4", "1/4 to 1/2", "1/2 to 3/4", "3/4 to 1")

FORMULAS = """\
    k ~ N(mu, Sigma):   attended mean = mu + Sigma q,   G = log n + <mu, q> + <q, Sigma q> / 2          [shim22, Cor. 1]
    k, q                visible keys of a row, and its scaled query
    mu, Sigma           mean and covariance of these keys; the matrix Sigma is not formed. With u_j = <q, k_j>:
                        <mu, q> = mean u,   <q, Sigma q> = Var u,   Sigma q = mean (u - mean u) k

    attended mean       1 - sum |m - mu - Sigma q|² / sum |m - mu|²         m: attended mean; sums over rows; 1 is exact
    cosine              <m - mu, Sigma q> / |m - mu| |Sigma q|              pooled over rows
    log normaliser      1 - sum (g - <q, Sigma q>/2)² / sum g²              g = G - log n - <mu, q>
    R²                  1 - sum (g - <q, Sigma q>/2)² / sum (y - mean y)²   y = G - log n
    correlation         corr(G - log n, <mu, q> + <q, Sigma q>/2)

    information         log n - H, in nats
    frozen rows         Var u > 2 log n: the largest of n Gaussian logits dominates, and the formula fails even for
                        Gaussian keys                                                                    [theory 10.3]
    keys of all texts   with mu, Sigma of the keys of all texts, from moments of a sample of the tokens
    within positions    with Sigma of keys around the mean of their position in the sequence
    position share      1 - tr Sigma within positions / tr Sigma of all texts"""

DECLARATION = Declaration(
    title="Gaussian keys",
    kind=PREDICTED,
    claim=(
        "Keys act on a query q like a Gaussian of their mean mu and covariance Sigma: the attended mean is mu + "
        "Sigma q."
    ),
    formula=(
        "explained variance of the attended mean m (shown as the result): 1 - sum |m - mu - Sigma q|² / sum |m - mu|². "
        "Explained variance of the log normaliser G (also judged): 1 - sum (g - <q, Sigma q>/2)² / sum g², g = G - log "
        "n - <mu, q>. Sums over rows. mu and Sigma: mean and covariance of the n visible keys of a row; q: its scaled "
        "query"
    ),
    supports=(
        f"Both explained variances are above {BAR:g}, that of the attended mean is above the null (Sigma of another "
        f"head's keys), and the attention weights carry at least {INFORMED:g} nats of information (log n - entropy)."
    ),
    refutes=f"Either explained variance is below {BAR:g}.",
    method=(
        FORMULAS,
        f"The sample is a random subset of the rows with at least {FEWEST} visible keys. If logits have additive "
        "biases b_j, the means over keys are weighted by exp(b_j). For keys of any distribution the formula holds to "
        "first order in the logits; it therefore holds trivially where logits hardly vary, as in the random-weights "
        "baseline.",
        "Nulls: for the explained variance of the attended mean (also with the keys of all texts and within "
        "positions), Sigma of the next head's keys. For all other quantities, among them those by entropy and those of "
        "the log normaliser, the random-weights baseline.",
    ),
    decision_rule=(
        f"With less than {INFORMED:g} nats of information any keys would pass. Both explained variances are needed: a "
        "single key with most of the attention weight can move the mean along Sigma q whatever the distribution of the "
        "keys, but the log normaliser is then not that of a Gaussian. The verdict on the model is that of more than "
        "half of its heads."
    ),
    quantities={
        EXPLAINED: Quantity("1", "1 − sum|m − μ − Σq|² / sum|m − μ|²"),
        "mean cosine": Quantity("1", "⟨m − μ, Σq⟩ / |m − μ| |Σq|"),
        NORMALIZER: Quantity("1", "1 − sum(g − ⟨q, Σq⟩/2)² / sum g²,  g = G − log n − ⟨μ, q⟩"),
        "log normalizer R²": Quantity("1", "1 − sum(g − ⟨q, Σq⟩/2)² / sum(y − ȳ)²,  y = G − log n"),
        "log normalizer correlation": Quantity("1", "corr(G − log n, ⟨μ, q⟩ + ⟨q, Σq⟩/2)"),
        INFORMATION: Quantity("nats", "log n − H"),
        "frozen": Quantity("share of rows", "P(Var u > 2 log n)"),
        **{f"{EXPLAINED}, entropy {name}": Quantity("1", "1 − sum|m − μ − Σq|² / sum|m − μ|²") for name in BINS},
        f"{POOLED} mean explained": Quantity("1", "1 − E|m − μ − Σq|² / E|m − μ|²,  all texts"),
        f"{WITHIN} mean explained": Quantity("1", "1 − E|m − μ − Σq|² / E|m − μ|²,  Σ within positions"),
        "position share": Quantity("1", "1 − tr Σ within / tr Σ pooled"),
    },
    references=("shim22",),
    statistic="median explained variance of the attended mean",
    null="other-head null",
    details={
        "high_entropy": Label("median explained variance in rows with normalised entropy above 0.75", null=RANDOM),
        "low_entropy": Label("median explained variance in rows with normalised entropy below 0.25", null=RANDOM),
    },
    remarks={
        NOTHING_MEASURED: "No attention layer exposes queries and keys whose products are its logits.",
        "too_even": (
            f"{{heads:.0f}} heads carry less than {INFORMED:g} nats of information and cannot support the claim."
        ),
    },
    labels={
        "mean explained": "explained variance of the attended mean",
        "log normalizer explained": "explained variance of the log normaliser",
        "mean cosine": "cosine of the attended mean with its Gaussian value",
        "log normalizer R²": "R² of the log normaliser",
        "log normalizer correlation": "correlation of the log normaliser with its Gaussian value",
        "frozen": "share of frozen rows",
        "pooled mean explained": "explained variance of the attended mean, keys of all texts",
        "within position mean explained": "explained variance of the attended mean, within positions",
    },
)


class LayerState(NamedTuple):
    """Sums over rows of a layer by range of entropy, and moments; all None if its logits are no inner products.

    key_heads: number of key heads.
    queries: moments of scaled queries with attended means. positions: moments of keys around their position means.
    """

    key_heads: int | None = None
    rows: Sums | None = None
    queries: Comoments | None = None
    keys: Comoments | None = None
    positions: Comoments | None = None


def statistics(event: Event | ForwardOutput, batch_pass: BatchPass) -> dict[str, LayerState] | None:
    """Sums over the sampled rows, for four ranges of entropy; moments of queries, attended means and keys."""
    if not isinstance(event, Attended):
        return None
    if not applies(event, batch_pass) or event.arguments.softcap is not None:
        return {event.layer: LayerState()}
    rows = rows_of(event, batch_pass)
    layer_state = LayerState(
        event.key.shape[1], None if rows is None else sums_of(_columns(rows), batch_pass.documents)
    )
    mean = event.attention.key_mean
    if event.arguments.sinks is None and mean is not None:
        layer_state = layer_state._replace(
            queries=moments_of_queries(event, batch_pass),
            keys=moments_of_keys(event, batch_pass),
            positions=_positions(event, mean.dtype, batch_pass) if len(event.key) > 1 else None,
        )
    return {event.layer: layer_state}


def evaluate(state: dict[str, LayerState], model: Probed) -> list[Measured]:
    """Explained variances over all rows and by entropy (bootstrap), and pooled ones (jackknife)."""
    rows = [absent(layer, EXPLAINED) for layer, layer_state in state.items() if layer_state.key_heads is None]
    sums = _sums(state)
    every = {layer: Sums(s.totals.sum(2)) for layer, s in sums.items()}
    for name, function in SHARES.items():
        for layer, estimate in bootstrapped(every, function).items():
            rows += measured(layer, name, estimate, every[layer].totals[0, :, 0])
    for i, name in enumerate(BINS):
        of_bin = {layer: Sums(s.totals[:, :, i]) for layer, s in sums.items()}
        for layer, estimate in bootstrapped(of_bin, SHARES[EXPLAINED]).items():
            rows += measured(layer, f"{EXPLAINED}, entropy {name}", estimate, of_bin[layer].totals[0, :, 0])
    for layer, layer_state in state.items():
        rows += _pooled(layer, layer_state, turn=0)
    return rows


def null(
    state: dict[str, LayerState],
    model: Probed,
    baseline: Baseline[dict[str, LayerState]] | None,
) -> list[Measured]:
    """Values with the covariance of the next head's keys; elsewhere those of the random-weights baseline."""
    rows = []
    every = {layer: Sums(s.totals.sum(2)) for layer, s in _sums(state).items() if _several(state[layer])}
    for layer, estimate in bootstrapped(every, lambda t: 1 - t[..., 5] / t[..., 1]).items():
        rows += measured(layer, EXPLAINED, estimate, every[layer].totals[0, :, 0])
    for layer, layer_state in state.items():
        if _several(layer_state):
            rows += _pooled(layer, layer_state, turn=1)
    known = {(m.layer, m.quantity) for m in rows}
    by: dict[tuple[str, str], list[float]] = defaultdict(list)
    for m in [] if baseline is None else evaluate(baseline.state, baseline.model):
        if m.head is not None and (m.layer, m.quantity) not in known and m.quantity != EXPLAINED:
            by[m.layer, m.quantity].append(m.value)
    for (layer, quantity), values in by.items():
        rows += random_band(layer, quantity, torch.tensor(values))
    return rows


def verdict(findings: list[Finding]) -> Judgement:
    """Judge every head by its explained variances of the attended mean and of the log normaliser."""
    information = {(f.layer, f.call, f.head): f.value for f in findings if f.quantity == INFORMATION}

    def bounds(f: Finding) -> Bounds:
        informed = information.get((f.layer, f.call, f.head), 0.0) >= INFORMED
        least = BAR if math.isnan(f.null_high) else max(BAR, f.null_high)
        return Bounds(least if informed else math.nan, BAR)

    ruled = judge(findings, EXPLAINED, bounds)
    ruled = judge(ruled, NORMALIZER, lambda f: Bounds(bounds(f._replace(null_high=math.nan))[0], BAR))
    others = {(f.layer, f.call, f.head): f.verdict for f in ruled if f.quantity == NORMALIZER}
    ruled = [
        f._replace(verdict=_both(f.verdict, others.get((f.layer, f.call, f.head), f.verdict)))
        if f.quantity == EXPLAINED
        else f
        for f in ruled
    ]
    details = [
        detail
        for key, name in (("high_entropy", BINS[-1]), ("low_entropy", BINS[0]))
        if not math.isnan((detail := median_detail(key, findings, f"{EXPLAINED}, entropy {name}")).value)
    ]
    too_even = sum(value < INFORMED for value in information.values())
    remarks = (Remark("too_even", {"heads": too_even}),) if too_even else ()
    return conclude(ruled, EXPLAINED, details=details, remarks=remarks)


def _both(one: str, other: str) -> str:
    """Combine two verdicts: supported if both are, refuted if either is."""
    return one if one == other else "refuted" if "refuted" in (one, other) else "inconclusive"


def _correlation(t: Tensor) -> Tensor:
    x, xx, y, xy, yy = (t[..., i] / t[..., 0] for i in range(8, 13))
    return (xy - x * y) / ((xx - x.square()) * (yy - y.square())).clamp(min=0.0).sqrt()


SHARES = {
    EXPLAINED: lambda t: 1 - t[..., 2] / t[..., 1],
    "mean cosine": lambda t: t[..., 3] / (t[..., 1] * t[..., 4]).sqrt(),
    NORMALIZER: lambda t: 1 - t[..., 7] / t[..., 6],
    "log normalizer R²": lambda t: 1 - t[..., 7] / (t[..., 12] - t[..., 10].square() / t[..., 0]),
    "log normalizer correlation": _correlation,
    INFORMATION: lambda t: t[..., 13] / t[..., 0],
    "frozen": lambda t: t[..., 14] / t[..., 0],
}


def _columns(rows: Rows) -> Float[Tensor, "b h bins k"]:
    """Columns of the sampled rows, summed within each sequence and range of entropy, [b, h, 4, k]."""
    u, w = rows.products, rows.log_weights
    hidden = w == -torch.inf
    mass, n = w.logsumexp(-1), rows.visible
    base = (w - mass.unsqueeze(-1)).exp()
    mean = (base * u).sum(-1)
    away = u - mean.unsqueeze(-1)
    variance = (base * away.square()).sum(-1)
    s = u + w
    G = s.logsumexp(-1)
    p = (s - G.unsqueeze(-1)).exp()
    H = G - (p * s.masked_fill(hidden, 0.0)).sum(-1)
    # Both displacements in one product: sum_j (p_j - base_j) k_j and sum_j base_j (u_j - mean) k_j.
    centre = rows.key.mean(2, keepdim=True)  # an offset would lose digits
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
    enough = (rows.valid.unsqueeze(1) & (n >= FEWEST)).expand_as(G)
    part = (4 * H / n.log()).floor().clamp(0, 3)
    masked = torch.stack(columns, -1).masked_fill(~enough.unsqueeze(-1), 0.0).double()
    each = [masked.masked_fill((part != i).unsqueeze(-1), 0.0).sum(2) for i in range(len(BINS))]
    return torch.stack(each, 2)


def _square(t: Tensor) -> Tensor:
    return t.square().sum(-1)


def _positions(event: Attended, dtype: torch.dtype, batch_pass: BatchPass) -> Comoments:
    """Moments of keys around their position means over the batch, corrected for the lost degree of freedom."""
    k, visible = event.key[:, :, ::STEP].to(dtype), event.visible_keys()
    keys = torch.ones_like(k[:, 0, :, 0], dtype=torch.bool) if visible is None else visible[:, ::STEP]
    weight = keys[:, None, :, None].to(k.dtype)
    several = weight.sum(0)
    mean = (weight * k).sum(0) / several.clamp(min=1)
    within = (k - mean) * (several / (several - 1).clamp(min=1)).sqrt()
    tokens = within.transpose(0, 1).flatten(1, 2)
    weights = (keys & (several[0, :, 0] > 1)).flatten()
    return comoments_of(tokens, group=batch_pass.batch.group, weights=weights)


def _sums(state: dict[str, LayerState]) -> dict[str, Sums]:
    return {layer: layer_state.rows for layer, layer_state in state.items() if layer_state.rows is not None}


def _several(layer_state: LayerState) -> bool:
    """True if there is another key head."""
    return layer_state.key_heads is not None and layer_state.key_heads > 1


def _pooled(layer: str, layer_state: LayerState, *, turn: int) -> list[Measured]:
    """Explained variances with moments over all texts; the null takes Sigma `turn` heads further."""
    if layer_state.queries is None or layer_state.keys is None:
        return []
    q, k = layer_state.queries.versions(), layer_state.keys.versions()
    if len(q.tokens) != len(k.tokens):
        return []  # all keys of a group are masked
    tokens = q.tokens[0] - q.tokens[1:]
    measurements = []
    for name, Sigma, varied in _covariances(k, layer_state.positions):
        share = _explained(q, k.mean_x, Sigma.roll(turn, 1))
        shares = {f"{name} mean explained": share}
        if name == WITHIN and not turn:
            spread, total = (t.diagonal(dim1=-2, dim2=-1).sum(-1) for t in (Sigma, k.covariance))
            shares["position share"] = (1 - spread / total).repeat_interleave(q.xx.shape[1] // k.xx.shape[1], 1)
        for quantity, each in shares.items():
            estimate = jackknifed(each[0], each[1:], tokens)
            if not varied:
                nothing = torch.full_like(estimate.value, torch.nan)
                estimate = estimate._replace(low=nothing, high=nothing)
            measurements += measured(layer, quantity, estimate, q.tokens[0])
    return measurements


def _covariances(k: GroupMoments, positions: Comoments | None) -> Iterator[tuple[str, Tensor, bool]]:
    """Sigma of each kind, in total and without each group, and a flag: measured in all groups, so that it varies."""
    yield POOLED, k.covariance, True
    if positions is not None:
        within = positions.versions()
        second = within.covariance + within.mean_x.unsqueeze(-1) * within.mean_x.unsqueeze(-2)
        varied = len(second) == len(k.tokens)
        yield WITHIN, second if varied else second[:1].expand(len(k.tokens), -1, -1, -1), varied


def _explained(q: GroupMoments, mu: Tensor, Sigma: Tensor) -> Tensor:
    """1 - E|m - mu - Sigma q|² / E|m - mu|², [v, h], from the moments of (q, m)."""
    each = q.xx.shape[1] // Sigma.shape[1]
    mu, Sigma = mu.repeat_interleave(each, 1), Sigma.repeat_interleave(each, 1)
    away = q.mean_y - mu
    left = away - (Sigma @ q.mean_x.unsqueeze(-1)).squeeze(-1)
    spread = q.spread_y - 2 * (Sigma * q.xy).sum((-2, -1)) + ((Sigma @ q.xx) * Sigma).sum((-2, -1))
    return 1 - (q.divided(spread) + _square(left)) / (q.divided(q.spread_y) + _square(away))


PREDICTION = Prediction(__name__, DECLARATION, statistics, evaluate, null, verdict, order=60)
