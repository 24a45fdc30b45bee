"""Normalised entropy of attention heads, and other statistics of their rows.

    entropy           H / log n                  of a row with n >= 2 visible keys; 1 if its weights are uniform

Read next: gaussian_measure.py (a claim that depends on the entropy), ../../attention/in_models/alerts.py (the
alerts in training).
"""

from functools import partial
from typing import NamedTuple

import torch

from ...attention.in_models.alerts import Thresholds
from ..batch_pass import BatchPass
from ..hypothesis_tests import (
    NOTHING_MEASURED,
    TEST_DETAILS,
    bootstrapped,
    conclude,
    judge_against_null,
    matched_null,
    measured,
    median_detail,
    rescaled_null,
)
from ..inside.events import Attended, Event, ForwardOutput
from ..planted_power import planted_power
from ..prediction import Baseline, Prediction, Probed
from ..runs.judgement import Judgement, Measured
from ..runs.records import BEYOND, Declaration, Finding, Label, Quantity, Remark
from ..statistics import Comoments, Estimate, Sums, jackknifed, ratio, sums_of
from .observables.attention_rows import applies, keys_seen, moments_of_keys, moments_of_queries, weight_of_first
from .observables.equal_variance import (
    ABOVE_KEPT,
    BOTH_NULLS,
    EQUAL_VARIANCE,
    NO_NULLS,
    WITHOUT_NULLS,
    details_of_kept,
    remarks_without_nulls,
)

ENTROPY, LEARNED, HIGH = "entropy", "learned sink", "high logits"
KEPT = "entropy, logit variance kept"  # the entropy again, whose null keeps the variance of the logits
OF_LAYER, SINKS, RANK = "entropy of the layer", "heads with a sink", "logit rank"
COLLAPSE, LOGIT, SINK = (float(bound or 0.0) for bound in Thresholds()[:3])
# name: columns of numerator and denominator
COLUMNS = {
    ENTROPY: (2, 1),
    "logit variance": (3, 0),
    "max logit": (4, 0),
    "log normalizer": (5, 0),
    "sink": (6, 0),
    LEARNED: (7, 0),
    HIGH: (8, 0),
}

FORMULAS = f"""\
    entropy           H / log n                  of a row with n >= 2 visible keys; 1 if its weights are uniform
    logit variance    sum_j a_j (s_j - m)²       m = sum_j a_j s_j; a_j: attention weight and s_j: logit of key j
    max logit         max_j s_j
    log normaliser    G = log sum_j exp(s_j)
    sink              weight on the first key that is no padding                                      [xiao24] [gu25]
    learned sink      weight on a learned sink logit, if the model has one
    logit rank        tr(A)² / tr(A²),  A = E[q qᵀ] Cov(k)       participation ratio (1 to d) of the squared
                      singular values of the logits <q, k - mean k> over all texts, from a sample of the tokens
    high logits       share of rows with a logit above {LOGIT:g}"""

DECLARATION = Declaration(
    title="Entropy below baseline",
    kind=BEYOND,
    claim=(
        "Heads are selective beyond their scale: the entropy of attention is lower than with randomly oriented QK "
        "matrices of the same spectra, and lower than with random queries whose logits have the same variance."
    ),
    formula=(
        "normalised entropy H / log n of the attention weights, mean over the rows of a head; n: visible keys of a row"
    ),
    supports=(
        "The normalised entropy is significantly below both nulls: that of the matched baseline and that of random "
        "queries of equal logit variance."
    ),
    refutes="The normalised entropy is significantly above both nulls.",
    method=(
        FORMULAS,
        "The theory does not state this claim. It is tested because most statistics of attention follow the size of "
        "the logits: larger random matrices have lower entropy, too. Null of every quantity of a head or layer: its "
        "mean over draws of the matched baseline, with the 95 % prediction band of one more draw.",
        EQUAL_VARIANCE,
        f"The result has an alert if the mean normalised entropy of a layer is below {COLLAPSE:g}, if more than half "
        f"of the heads of a layer have a mean weight above {SINK:g} on the first key (sink), or if a logit is above "
        f"{LOGIT:g}.",
    ),
    decision_rule=(f"{BOTH_NULLS} The verdict on the model is that of more than half of its heads."),
    bounds={
        f"{COLLAPSE:g} (alert)": (
            "Of the entropy of uniform weights. The lowest layer of two pretrained models has 0.24 (SmolLM2) and 0.50 "
            "(MiniLM) of it; [zhai23] describe the collapse without a threshold."
        ),
        f"{SINK:g} (alert)": "The weight on the first key above which [gu25] count a head as a sink.",
        f"{LOGIT:g} (alert)": "The logit at which [kimi25] clip queries and keys in training.",
    },
    interesting=(
        "Heads whose query and key matrices have a cosine of 0.75, planted: their normalised entropy is 0.2 to 0.4 "
        "below both nulls. There is no bound; the difference that a run detects is beside its verdict."
    ),
    power=planted_power("entropy"),
    quantities={
        ENTROPY: Quantity("share of log n", "H / log n"),
        KEPT: Quantity("share of log n", "H / log n"),
        "logit variance": Quantity("nats²", "Σ a (s − Σ a s)²"),
        "max logit": Quantity("nats", "max s"),
        "log normalizer": Quantity("nats", "G"),
        "sink": Quantity("weight", "a₀"),
        LEARNED: Quantity("weight", "a_sink"),
        HIGH: Quantity("share of rows", f"P(max s > {LOGIT:g})"),
        OF_LAYER: Quantity("share of log n", "H / log n"),
        SINKS: Quantity("share of heads", f"P(E a₀ > {SINK:g})"),
        RANK: Quantity("dimensions", "tr(A)² / tr(A²),  A = E[q qᵀ] Cov(k)"),
    },
    references=("xiao24", "gu25", "berger82"),
    statistic="median normalised entropy",
    null_reason=(
        "The matched baseline (20 draws by default) keeps tokens and spectra, because entropy follows the "
        "scale of the weights; the second null keeps the variance of the logits of every row, because it "
        "follows that, too. Untrained weights have another scale and are no null."
    ),
    null="matched baseline",
    outcomes=("have lower entropy than both nulls", "higher"),
    details={
        OF_LAYER: Label("median over layers of the mean entropy", null="matched baseline"),
        KEPT: Label("median entropy", null="random queries of equal logit variance", counted="below this null"),
        ABOVE_KEPT: Label("heads above this null"),
        **TEST_DETAILS,
    },
    remarks={
        NOTHING_MEASURED: "No attention row has two or more visible keys.",
        WITHOUT_NULLS: NO_NULLS,
        "entropy_collapse": f"Alert: entropy collapse (mean below {COLLAPSE:g}) in {{layers}}.",
        "attention_sink": "Alert: attention sink in more than half of the heads of {layers}.",
        "logit_explosion": f"Alert: logits above {LOGIT:g} in {{layers}}.",
    },
    labels={
        "log normalizer": "log normaliser",
        ENTROPY: "normalised entropy",
        KEPT: "normalised entropy, against random queries of equal logit variance",
        "sink": "weight on the first key",
        LEARNED: "weight on the learned sink",
        HIGH: f"share of rows with a logit above {LOGIT:g}",
        OF_LAYER: "mean normalised entropy over heads",
        SINKS: "share of heads with a sink",
    },
)


class LayerState(NamedTuple):
    """Sums over the rows of the heads of a layer; presence of learned sinks; moments of queries and keys."""

    rows: Sums
    learned: bool
    queries: Comoments | None = None
    keys: Comoments | None = None


def statistics(event: Event | ForwardOutput, batch_pass: BatchPass) -> dict[str, LayerState] | None:
    """Sums over the rows of each document, and second moments of queries and keys."""
    if not isinstance(event, Attended) or len(event.attention.log_normalizer) != len(batch_pass.batch.keys):
        return None
    a = event.attention
    G = a.log_normalizer
    H, V, top = (t for t in (a.entropy, a.logit_variance, a.max_logit) if t is not None)
    sinks = event.arguments.sinks if applies(event, batch_pass) else None
    n = keys_seen(event, batch_pass) + (0 if sinks is None else 1)
    learned = torch.zeros_like(G) if sinks is None else (sinks.to(G).expand(G.shape[:2]).unsqueeze(-1) - G).exp()
    several = (n >= 2).to(G.dtype).expand_as(G)
    even = H / n.clamp(min=2).log() * several
    high = (top > LOGIT).to(G.dtype)
    rows = [torch.ones_like(G), several, even, V, top, G, weight_of_first(event), learned, high]
    valid = (batch_pass.real(event).unsqueeze(1) & a.seen).unsqueeze(-1)
    values = torch.stack(rows, -1).masked_fill(~valid, 0.0).sum(2, dtype=torch.float64)
    layer_state = LayerState(sums_of(values, batch_pass.documents), sinks is not None)
    if applies(event, batch_pass):
        layer_state = layer_state._replace(
            queries=moments_of_queries(event, batch_pass), keys=moments_of_keys(event, batch_pass)
        )
    return {event.layer: layer_state}


def evaluate(state: dict[str, LayerState], model: Probed) -> list[Measured]:
    """Means over rows (bootstrap), ranks (jackknife), and the layer averages that alerts use."""
    sums = {layer: layer_state.rows for layer, layer_state in state.items()}
    of_layers = {layer: Sums(each.totals.sum(1, keepdim=True)) for layer, each in sums.items()}
    rows = []
    for name, (above, below) in COLUMNS.items():
        for layer, estimate in bootstrapped(sums, partial(ratio, above=above, below=below)).items():
            if name != LEARNED or state[layer].learned:
                rows += measured(layer, name, estimate, sums[layer].totals[0, :, below])
    rows += [m._replace(quantity=KEPT) for m in rows if m.quantity == ENTROPY]
    for layer, estimate in bootstrapped(of_layers, lambda t: ratio(t, 2, 1)).items():
        one = Estimate(*(t.squeeze(0) for t in estimate))
        tokens = sums[layer].totals[0].amax(0)  # of one head, not of all
        rows += measured(layer, OF_LAYER, one, tokens[1])
        share = (ratio(sums[layer].totals[0], 6, 0) > SINK).double().mean()
        rows.append(Measured(layer, None, SINKS, float(share), tokens=int(tokens[0])))
        rows += _rank(layer, state[layer])
    return rows


def null(
    state: dict[str, LayerState],
    model: Probed,
    baseline: Baseline[dict[str, LayerState]] | None,
) -> list[Measured]:
    """Bands of heads over the draws of both nulls, and of layers over those of the first."""
    equal_variance = rescaled_null(evaluate(state, model), baseline, {ENTROPY: KEPT})
    return matched_null(baseline, {*COLUMNS, RANK, OF_LAYER, SINKS}) + equal_variance


def verdict(findings: list[Finding]) -> Judgement:
    """Judge every head by its normalised entropy; remark on alerts."""
    ruled = judge_against_null(findings, ENTROPY, also=(KEPT,), small=True)
    details = [median_detail(OF_LAYER, findings, OF_LAYER), *details_of_kept(findings, KEPT)]
    remarks = [*remarks_without_nulls(findings, ENTROPY, KEPT), *_alerts(findings)]
    return conclude(ruled, ENTROPY, details=details, remarks=remarks)


def _rank(layer: str, layer_state: LayerState) -> list[Measured]:
    if layer_state.queries is None or layer_state.keys is None:
        return []
    q, k = layer_state.queries.versions(), layer_state.keys.versions()
    if len(q.tokens) != len(k.tokens):
        return []  # all keys of a group are masked
    A = q.covariance + q.mean_x.unsqueeze(-1) * q.mean_x.unsqueeze(-2)
    C = k.covariance.repeat_interleave(A.shape[1] // k.xx.shape[1], 1)
    A = A @ C
    rank = A.diagonal(dim1=-2, dim2=-1).sum(-1).square() / (A * A.mT).sum((-2, -1))
    return measured(layer, RANK, jackknifed(rank[0], rank[1:], q.tokens[0] - q.tokens[1:]), q.tokens[0])


def _alerts(findings: list[Finding]) -> list[Remark]:
    """Alerts of the training monitor for these averages, with their layers."""
    rules = (
        ("entropy_collapse", OF_LAYER, lambda f: f.value < COLLAPSE),
        ("attention_sink", SINKS, lambda f: f.value > 0.5),
        ("logit_explosion", HIGH, lambda f: f.value > 0),
    )
    remarks = []
    for key, quantity, raised in rules:
        calls = dict.fromkeys((f.layer, f.call) for f in findings if f.quantity == quantity and raised(f))
        if calls:
            remarks.append(
                Remark(key, layers=tuple(layer if call == 1 else f"{layer}#{call}" for layer, call in calls))
            )
    return remarks


PREDICTION = Prediction(
    __name__, DECLARATION, statistics, evaluate, null, verdict, order=100, baseline="matched", rescaled=True
)
