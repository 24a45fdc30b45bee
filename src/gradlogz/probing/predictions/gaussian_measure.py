"""Gaussian keys: the attended mean and the log normaliser of a Gaussian measure.

    k ~ N(mu, Sigma):   attended mean = mu + Sigma q,   G = log n + <mu, q> + <q, Sigma q> / 2          [shim22, Cor. 1]

Read next: observables/gaussian_keys.py (the null: n Gaussian keys), observables/attention_rows.py (the rows).
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from ..._typing import Float, Tensor
from ..batch_pass import BatchPass
from ..hypothesis_tests import (
    COMPATIBLE,
    NOTHING_MEASURED,
    TEST_DETAILS,
    Bounds,
    absent,
    bootstrapped,
    conclude,
    matched_null,
    measured,
    median_detail,
    refutable,
)
from ..inside.events import Attended, Event, ForwardOutput
from ..planted_power import planted_power
from ..prediction import Baseline, Prediction, Probed
from ..runs.judgement import Judgement, Measured
from ..runs.records import PREDICTED, Declaration, Finding, Label, Quantity, Remark
from ..statistics import Comoments, GroupMoments, Sums, jackknifed, sums_of
from .observables.attention_rows import Rows, applies, moments_of_keys, moments_of_queries, rows_of
from .observables.gaussian_keys import gaussian_row

EXPLAINED, NORMALIZER, INFORMATION = "mean explained", "log normalizer explained", "information"
DEFICIT, OF_NORMALIZER = "mean deficit", "log normalizer deficit"
POOLED = "pooled mean explained"
BOUND = 0.1
INFORMED, FEWEST = 0.1, 8
POWER = 0.25  # smallest explained variance of Gaussian keys with which a head can be compatible

FORMULAS = """\
    k ~ N(mu, Sigma):   attended mean = mu + Sigma q,   G = log n + <mu, q> + <q, Sigma q> / 2          [shim22, Cor. 1]
    k, q                visible keys of a row, and its scaled query
    mu, Sigma           mean and covariance of these keys; the matrix Sigma is not formed. With u_j = <q, k_j>:
                        <mu, q> = mean u,   <q, Sigma q> = Var u,   Sigma q = mean (u - mean u) k
    |x|²                = mean <q', x>² over the queries q' of the head in the sequence: the squared error of logits.
                        Keys and queries may be transformed, k to k M^-T and q to q M, without a change of the model;
                        this norm does not change either, unlike the sum of squared coordinates

    attended mean       1 - sum |m - mu - Sigma q|² / sum |m - mu|²         m: attended mean; sums over rows; 1 is exact
    log normaliser      1 - sum (g - <q, Sigma q>/2)² / sum g²              g = G - log n - <mu, q>
    Gaussian keys       the same with the sums expected for n Gaussian keys with mean mu and covariance Sigma
    deficit             = explained variance expected for Gaussian keys - explained variance of the keys

    cosine              <m - mu, Sigma q> / |m - mu| |Sigma q|              pooled over rows
    R²                  1 - sum (g - <q, Sigma q>/2)² / sum (y - mean y)²   y = G - log n
    correlation         corr(G - log n, <mu, q> + <q, Sigma q>/2)
    information         log n - H, in nats
    frozen rows         Var u > 2 log n: the largest of n Gaussian logits dominates                      [theory 10.3]
    keys of all texts   with mu, Sigma of the keys of all texts, from moments of a sample of the tokens"""

DECLARATION = Declaration(
    title="Gaussian keys",
    kind=PREDICTED,
    claim=(
        "Keys act on a query q like a Gaussian sample of their mean mu and covariance Sigma, for which the attended "
        "mean is mu + Sigma q up to sampling error."
    ),
    formula=(
        "deficit = explained variance expected for Gaussian keys - explained variance of the keys. Explained variance "
        "of the attended mean m (deficit shown as the result): 1 - sum |m - mu - Sigma q|² / sum |m - mu|²; |x|² is "
        "the mean of <q', x>² over the queries q' of the head in the sequence. Explained variance of the log "
        "normaliser G (deficit also judged): 1 - sum (g - <q, Sigma q>/2)² / sum g², g = G - log n - <mu, q>. Sums "
        "over rows. mu and Sigma: mean and covariance of the n visible keys of a row; q: its scaled query. Expected "
        "for Gaussian keys: the same sums for n Gaussian keys with the same mu and Sigma, for the same query"
    ),
    refutes=(
        f"Either deficit is above {BOUND:g}, and the attention weights carry at least {INFORMED:g} nats of information "
        "(log n - entropy)."
    ),
    method=(
        FORMULAS,
        f"The sample is a random subset of the rows with at least {FEWEST} visible keys. If logits have additive "
        "biases b_j, the means over keys are weighted by exp(b_j), and n is their effective number. For keys of any "
        "distribution the formula holds to first order in the logits; it therefore holds trivially where logits hardly "
        "vary.",
        "Finitely many keys do not follow the formula exactly even if they are Gaussian: at a logit variance of 4, 256 "
        "independent keys of 64 dimensions explain about half of the variance. Mean and covariance are sufficient "
        "statistics of a Gaussian, so that the expected sums given both are known without any parameter. The deficit "
        "of independent Gaussian keys is 0 for any number of keys, dimension and logit variance. Keys of neighbouring "
        "tokens that are alike, and words that occur several times, act like fewer keys and have a deficit, too: a "
        "refutation says that the keys of a row are no independent Gaussian sample, and not why.",
        f"Compatible heads: both deficits are significantly below {BOUND:g}, the attention weights carry at least "
        f"{INFORMED:g} nats of information, and the explained variance expected for Gaussian keys is at least "
        f"{POWER:g}. They do not support the claim: keys that are random projections of tokens are nearly "
        "Gaussian, and heads of untrained models are compatible as well.",
        "Nulls: Gaussian keys for explained variances and deficits, whose deficit is 0; the matched baseline for all "
        "other quantities, and beside the deficits, where it is the deficit of randomly oriented matrices.",
    ),
    decision_rule=(
        f"A deficit of {BOUND:g} is an error of the attended mean of a third of its length beyond the sampling error "
        "of independent keys; for scale, independent Laplace coordinates have 0.12, Student's t with 5 degrees of "
        f"freedom 0.34 at a logit variance of 2 (256 keys, 32 dimensions). With less than {INFORMED:g} nats of "
        "information any keys would pass, and rounding errors of nearly equal logits could fail; where Gaussian keys "
        f"themselves would explain less than {POWER:g}, few keys hold most of the weight and little is tested. Both "
        "deficits are needed: a single key with most of the attention weight can move the mean along Sigma q "
        "whatever the distribution of the keys, but the log normaliser is then not that of a Gaussian. A model is "
        "refuted if more than half of its heads are; nothing supports the claim."
    ),
    bounds={
        f"{BOUND:g} (deficit)": (
            f"The attended mean is then wrong by sqrt({BOUND:g}), a third of its length, beyond the sampling error of "
            "independent keys."
        ),
        f"{INFORMED:g} nats": (
            "To second order the information is half of the variance of the logits, here 0.2; with less, the formula "
            "is mostly its first order in the logits, which holds for keys of any distribution."
        ),
        f"{POWER:g}": (
            f"Below it the sampling error of Gaussian keys is at least {(1 - POWER) / POWER:g} times what the formula "
            "explains."
        ),
    },
    interesting=("A deficit of 0.3: that of keys of Student's t distribution with 5 degrees of freedom."),
    power=planted_power("gaussian_measure"),
    quantities={
        EXPLAINED: Quantity("1", "1 − sum|m − μ − Σq|² / sum|m − μ|²"),
        DEFICIT: Quantity("1", "explained variance of Gaussian keys − that of the keys"),
        "mean cosine": Quantity("1", "⟨m − μ, Σq⟩ / |m − μ| |Σq|"),
        NORMALIZER: Quantity("1", "1 − sum(g − ⟨q, Σq⟩/2)² / sum g²,  g = G − log n − ⟨μ, q⟩"),
        OF_NORMALIZER: Quantity("1", "explained variance of Gaussian keys − that of the keys"),
        "log normalizer R²": Quantity("1", "1 − sum(g − ⟨q, Σq⟩/2)² / sum(y − ȳ)²,  y = G − log n"),
        "log normalizer correlation": Quantity("1", "corr(G − log n, ⟨μ, q⟩ + ⟨q, Σq⟩/2)"),
        INFORMATION: Quantity("nats", "log n − H"),
        "frozen": Quantity("share of rows", "P(Var u > 2 log n)"),
        POOLED: Quantity("1", "1 − E|m − μ − Σq|² / E|m − μ|²,  all texts"),
    },
    references=("shim22",),
    statistic="median deficit of the explained variance of the attended mean",
    null_reason=(
        "Gaussian keys, given mean and covariance, are the claim itself, and their expected sums are known "
        "without draws: the deficit is measured from them, and its null is 0. The matched baseline, shown as "
        "the null, is the deficit of randomly oriented heads of equal spectra; it takes no part in the "
        "verdict."
    ),
    null="matched baseline",
    details={
        EXPLAINED: Label("median explained variance of the attended mean", null="Gaussian keys"),
        NORMALIZER: Label("median explained variance of the log normaliser", null="Gaussian keys"),
        COMPATIBLE: Label("compatible heads"),
        **TEST_DETAILS,
    },
    remarks={
        NOTHING_MEASURED: "No attention layer exposes queries and keys whose products are its logits.",
        "too_even": (f"{{heads:.0f}} heads carry less than {INFORMED:g} nats of information and are not tested."),
        "too_sharp": (
            f"In {{heads:.0f}} heads Gaussian keys would explain less than {POWER:g}; these cannot be compatible."
        ),
    },
    labels={
        EXPLAINED: "explained variance of the attended mean",
        DEFICIT: "deficit of the attended mean",
        NORMALIZER: "explained variance of the log normaliser",
        OF_NORMALIZER: "deficit of the log normaliser",
        "mean cosine": "cosine of the attended mean with its Gaussian value",
        "log normalizer R²": "R² of the log normaliser",
        "log normalizer correlation": "correlation of the log normaliser with its Gaussian value",
        "frozen": "share of frozen rows",
        POOLED: "explained variance of the attended mean, keys of all texts",
    },
)


class LayerState(NamedTuple):
    """Sums over rows of a layer, and moments; all None if its logits are no inner products.

    key_heads: number of key heads. queries: moments of scaled queries with attended means.
    """

    key_heads: int | None = None
    rows: Sums | None = None
    queries: Comoments | None = None
    keys: Comoments | None = None


def statistics(event: Event | ForwardOutput, batch_pass: BatchPass) -> dict[str, LayerState] | None:
    """Sums over the sampled rows; moments of queries, attended means and keys."""
    if not isinstance(event, Attended):
        return None
    if not applies(event, batch_pass) or event.arguments.softcap is not None:
        return {event.layer: LayerState()}
    rows = rows_of(event, batch_pass)
    sums = None if rows is None else sums_of(_columns(rows, _query_products(event, batch_pass)), batch_pass.documents)
    layer_state = LayerState(event.key.shape[1], sums)
    if event.arguments.sinks is None and event.attention.key_mean is not None:
        layer_state = layer_state._replace(
            queries=moments_of_queries(event, batch_pass), keys=moments_of_keys(event, batch_pass)
        )
    return {event.layer: layer_state}


def evaluate(state: dict[str, LayerState], model: Probed) -> list[Measured]:
    """Explained variances and deficits (bootstrap), and those with the moments of all texts (jackknife)."""
    rows = [absent(layer, DEFICIT) for layer, layer_state in state.items() if layer_state.key_heads is None]
    rows += _of_rows(state, SHARES)
    for layer, layer_state in state.items():
        rows += _pooled(layer, layer_state)
    return rows


def null(
    state: dict[str, LayerState],
    model: Probed,
    baseline: Baseline[dict[str, LayerState]] | None,
) -> list[Measured]:
    """Explained variances of Gaussian keys; elsewhere the values of the matched baseline."""
    others = DECLARATION.quantities.keys() - OF_GAUSSIAN_KEYS.keys()
    return _of_rows(state, OF_GAUSSIAN_KEYS) + matched_null(baseline, others)


def verdict(findings: list[Finding]) -> Judgement:
    """Judge every head by its deficits of the attended mean and of the log normaliser."""
    information = {(f.layer, f.call, f.head): f.value for f in findings if f.quantity == INFORMATION}
    expected = {(f.layer, f.call, f.head): f.null for f in findings if f.quantity == EXPLAINED}

    def bounds(f: Finding) -> Bounds:
        head = (f.layer, f.call, f.head)
        informed, explained = information.get(head, 0.0) >= INFORMED, expected.get(head, 0.0) >= POWER
        return Bounds(BOUND if informed and explained else math.nan, BOUND if informed else math.nan)

    judged, fits = refutable(findings, DEFICIT, OF_NORMALIZER, bounds)
    details = [median_detail(quantity, findings, quantity) for quantity in (EXPLAINED, NORMALIZER)]
    too_even = sum(value < INFORMED for value in information.values())
    too_sharp = sum(value < POWER for value in expected.values())
    counts = {"too_even": too_even, "too_sharp": too_sharp}
    remarks = [Remark(key, {"heads": heads}) for key, heads in counts.items() if heads]
    return conclude(judged, DEFICIT, details=[*details, fits], remarks=remarks)


# Columns of the sums -------------------------------------------------------------------------------------------------

_ROWS, _MOVED, _LEFT, _DOT, _EXPECTED, _MOVED_0, _LEFT_0, _G, _G_LEFT, _G_0, _G_LEFT_0 = range(11)
_X, _XX, _Y, _XY, _YY, _INFORMATION, _FROZEN = range(11, 18)


def _correlation(t: Tensor) -> Tensor:
    x, xx, y, xy, yy = (t[..., i] / t[..., _ROWS] for i in (_X, _XX, _Y, _XY, _YY))
    return (xy - x * y) / ((xx - x.square()) * (yy - y.square())).clamp(min=0.0).sqrt()


def _share(left: int, total: int) -> Callable[[Tensor], Tensor]:
    return lambda t: 1 - t[..., left] / t[..., total]


OF_GAUSSIAN_KEYS = {EXPLAINED: _share(_LEFT_0, _MOVED_0), NORMALIZER: _share(_G_LEFT_0, _G_0)}
SHARES = {
    EXPLAINED: _share(_LEFT, _MOVED),
    NORMALIZER: _share(_G_LEFT, _G),
    DEFICIT: lambda t: t[..., _LEFT] / t[..., _MOVED] - t[..., _LEFT_0] / t[..., _MOVED_0],
    OF_NORMALIZER: lambda t: t[..., _G_LEFT] / t[..., _G] - t[..., _G_LEFT_0] / t[..., _G_0],
    "mean cosine": lambda t: t[..., _DOT] / (t[..., _MOVED] * t[..., _EXPECTED]).sqrt(),
    "log normalizer R²": lambda t: 1 - t[..., _G_LEFT] / (t[..., _YY] - t[..., _Y].square() / t[..., _ROWS]),
    "log normalizer correlation": _correlation,
    INFORMATION: lambda t: t[..., _INFORMATION] / t[..., _ROWS],
    "frozen": lambda t: t[..., _FROZEN] / t[..., _ROWS],
}


def _columns(rows: Rows, W: Float[Tensor, "b h d d"]) -> Float[Tensor, "b h k"]:
    """Columns of the sampled rows, summed within each sequence; W: the metric."""
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
    key = rows.key - rows.key.mean(2, keepdim=True)  # an offset would lose digits
    moved, expected = rows.averaged(p - base, key), rows.averaged(base * away, key)
    along = _square(expected, W)
    # Gaussian keys with these moments ---------------------------------------------------------------------------------
    size = base.square().sum(-1).reciprocal()  # n without a bias
    lengths = _square(key.repeat_interleave(W.shape[1] // key.shape[1], 1), W).unsqueeze(2)
    trace = (base * lengths).sum(-1) - _square(rows.averaged(base.expand_as(u), key), W)
    row = gaussian_row(size, variance, u.shape[-1])
    square = variance.square()
    sideways = row.across * (square * trace - variance * along).clamp(min=0.0) / (size - 2).clamp(min=1.0)
    x, y = mean + variance / 2, G - mass
    g = y - mean
    columns = [
        torch.ones_like(G), _square(moved, W), _square(moved - expected, W), ((moved @ W) * expected).sum(-1), along,
        row.along * along + sideways, row.short * along + sideways,
        g.square(), (g - variance / 2).square(), row.normalizer * square, row.missed * square,
        x, x.square(), y, x * y, y.square(), n.log() - H, (variance > 2 * n.log()).to(G.dtype),
    ]  # fmt: skip
    enough = (rows.valid.unsqueeze(1) & (n >= FEWEST)).expand_as(G)
    return torch.stack(columns, -1).masked_fill(~enough.unsqueeze(-1), 0.0).double().sum(2)


def _query_products(event: Attended, batch_pass: BatchPass) -> Float[Tensor, "b h d d"]:
    """Mean of q qᵀ over the scaled queries of each sequence: the metric in which keys are compared."""
    real = batch_pass.real(event)[:, None, :, None]
    q = event.query.to(event.attention.log_normalizer.dtype) * event.arguments.scale * real
    return q.mT @ q / real.sum(2, keepdim=True).clamp(min=1)


def _square(x: Float[Tensor, "*b r d"], W: Float[Tensor, "*b d d"]) -> Float[Tensor, "*b r"]:
    return ((x @ W) * x).sum(-1)


# From the sums to values ---------------------------------------------------------------------------------------------


def _of_rows(state: dict[str, LayerState], functions: Mapping[str, Callable[[Tensor], Tensor]]) -> list[Measured]:
    sums = {layer: layer_state.rows for layer, layer_state in state.items() if layer_state.rows is not None}
    rows = []
    for quantity, function in functions.items():
        for layer, estimate in bootstrapped(sums, function).items():
            rows += measured(layer, quantity, estimate, sums[layer].totals[0, :, 0])
    return rows


def _pooled(layer: str, layer_state: LayerState) -> list[Measured]:
    """Explained variance with mu and Sigma of the keys of all texts."""
    if layer_state.queries is None or layer_state.keys is None:
        return []
    q, k = layer_state.queries.versions(), layer_state.keys.versions()
    if len(q.tokens) != len(k.tokens):
        return []  # all keys of a group are masked
    share = _explained(q, k.mean_x, k.covariance)
    return measured(layer, POOLED, jackknifed(share[0], share[1:], q.tokens[0] - q.tokens[1:]), q.tokens[0])


def _explained(q: GroupMoments, mu: Tensor, Sigma: Tensor) -> Tensor:
    """1 - E|m - mu - Sigma q|² / E|m - mu|², [v, h], from the moments of (q, m), in the metric E q qᵀ."""
    each = q.xx.shape[1] // Sigma.shape[1]
    mu, Sigma = mu.repeat_interleave(each, 1), Sigma.repeat_interleave(each, 1)
    W = q.covariance + q.mean_x.unsqueeze(-1) * q.mean_x.unsqueeze(-2)
    away = (q.mean_y - mu).unsqueeze(-2)
    left = away - q.mean_x.unsqueeze(-2) @ Sigma
    residual = q.yy - 2 * Sigma @ q.xy + Sigma @ q.xx @ Sigma

    def size(products: Tensor, mean: Tensor) -> Tensor:
        return q.divided((W * products).sum((-2, -1))) + _square(mean, W).squeeze(-1)

    return 1 - size(residual, left) / size(q.yy, away)


PREDICTION = Prediction(__name__, DECLARATION, statistics, evaluate, null, verdict, order=60, baseline="matched")
